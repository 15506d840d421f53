"""The Python part of gpu_check.sh: right answers and speed on a GPU. It has not been run on one.

    python benchmarks/gpu_check.py replay huge bench --out result.json
    python benchmarks/gpu_check.py all --cpu           # every step at a small size, on the CPU: that it runs, no more

Times are of jitted calls queued one behind another, the last of them waited for; GB/s counts what has to be moved: a
norm reads the tree once, a clip that clips reads it twice and writes it once, adamw's share is added in a chain. `share`
is that rate over the rate of a device-to-device copy measured in the same process.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

STEPS = ("replay", "kernels", "huge", "bench")
ARGUMENTS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ARGUMENTS.add_argument("steps", nargs="+", choices=[*STEPS, "all", "case"])
ARGUMENTS.add_argument("--cpu", action="store_true")
ARGUMENTS.add_argument("--out", type=pathlib.Path)
ARGUMENTS.add_argument("--case", help="a model and a library, as JSON: what one process of the benchmark measures")
ARGUMENTS.add_argument("--seconds", type=float, default=40, help="for one such process, compilation included")
ARGUMENTS.add_argument("--budget", type=float, default=210, help="seconds for all of them")

if __name__ == "__main__":
  args = ARGUMENTS.parse_args()
  if args.cpu:
    os.environ["JAX_PLATFORMS"] = "cpu"
  elif "replay" in args.steps or "all" in args.steps:
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"
                               " --xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL")

import gpt
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc


def replay(cpu):
  """One compiled program, called again with other data: a captured graph must read it anew."""
  clip = jax.jit(lambda tree: ogc.clip_tree(tree, 1.0), donate_argnums=0)
  cases = [([3, 4], 5, [0.6, 0.8]), ([0, 0], 0, [0, 0]), ([30, 40], 50, [0.6, 0.8]),
           ([np.nan, 1], np.nan, [np.nan, np.nan])]
  for _ in range(3):
    for values, norm, want in cases:
      tree = {"a": jnp.asarray(values[:1], jnp.float32), "b": jnp.asarray(values[1:], jnp.float32)}
      clipped, got = clip(tree)
      np.testing.assert_allclose(got, np.float32(norm), rtol=1e-7)
      np.testing.assert_allclose(np.concatenate([clipped["a"], clipped["b"]]), want, rtol=1e-6)
  return {"calls": 3 * len(cases)}


def kernels(cpu):
  """Every kernel on every dtype, at sizes that leave short ends: small, for compute-sanitizer."""
  dtypes = ["float16", "bfloat16", "float32", "complex64"]
  tree = [jnp.full(size, 1 + i, dtype) for i, dtype in enumerate(dtypes) for size in (1, 7, 4097, 33000)]
  want = np.sqrt(sum(float(leaf.size) * (1 + i // 4) ** 2 for i, leaf in enumerate(tree)))
  for max_norm in (1e9, 1.0):
    clipped, norm = jax.jit(ogc.clip_tree)(tree, max_norm)
    np.testing.assert_allclose(norm, want, rtol=1e-6)
    np.testing.assert_allclose(ogc.global_norm(clipped), min(max_norm, want), rtol=1e-3)
  norms = ogc.leaf_norms(tree)
  return {"leaves": len(norms)}


def huge(cpu):
  """A bfloat16 leaf of 2^31 + 8 elements: every index and size beyond 32 bits."""
  ones = 2**16 if cpu else 2**31
  leaf = jnp.concatenate([jnp.ones(ones, jnp.bfloat16), jnp.full(8, 3, jnp.bfloat16)])
  want = np.sqrt(ones + 72.0)
  clipped, norm = jax.jit(lambda leaf: ogc.clip_tree(leaf, 1.0), donate_argnums=0)(leaf)
  np.testing.assert_allclose(norm, want, rtol=1e-7)
  np.testing.assert_array_equal(clipped[-8:], np.full(8, 3 / want, jnp.bfloat16))
  np.testing.assert_array_equal(clipped[:8], np.full(8, 1 / want, jnp.bfloat16))
  return {"elements": ones + 8, "norm": float(norm)}


SIZES = {"92M float32": gpt.SMALL, "1.3B bfloat16": gpt.LARGE}
MODELS = (*SIZES, "10000 leaves")


def shapes(model, cpu):
  """Leaves of a model, and their dtype."""
  if model == "10000 leaves":
    return [(128 + i % 64,) for i in range(40 if cpu else 10000)], jnp.float32
  size = gpt.Size(layers=1, width=32, vocabulary=100) if cpu else SIZES[model]
  return gpt.leaf_shapes(size), getattr(jnp, model.split()[1])


def seconds_a_call(call, wait, repeat):
  call()
  wait()
  best = float("inf")
  for _ in range(3):
    start = time.perf_counter()
    for _ in range(repeat):
      call()
    wait()
    best = min(best, (time.perf_counter() - start) / repeat)
  return best


def measure_jax(model, library, what, cpu):
  sizes, dtype = shapes(model, cpu)
  keys = np.random.default_rng(0)
  held = {"tree": [jnp.full(shape, keys.standard_normal() / 100, dtype) for shape in sizes]}
  clip = optax.clip_by_global_norm if library == "optax" else ogc.global_clip
  norm = optax.tree.norm if library == "optax" else ogc.global_norm
  repeat = 2 if cpu else 20
  # A threshold that halves from call to call, so that every one of them clips.
  thresholds = [jnp.float32(np.inf if what == "clip, unclipped" else 0.5**i) for i in range(3 * repeat + 1)]
  thresholds.reverse()

  if what == "norm":
    compiled = jax.jit(norm).lower(held["tree"]).compile()
    def call():
      held["norm"] = compiled(held["tree"])
  elif what == "chain with adamw":
    transform = optax.chain(clip(1.0), optax.adamw(1e-3))
    held["state"] = jax.jit(transform.init)(held["tree"])
    params = [jnp.copy(leaf) for leaf in held["tree"]]
    def step(grads, state, params):
      return transform.update(grads, state, params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(held["tree"], held["state"], params).compile()
    def call():
      held["tree"], held["state"] = compiled(held["tree"], held["state"], params)
  else:
    def run(tree, max_norm):
      if library == "ogc":
        return ogc.clip_tree(tree, max_norm)[0]
      return clip(max_norm.astype(dtype)).update(tree, optax.EmptyState())[0]  # optax refuses another dtype here
    compiled = jax.jit(run, donate_argnums=0).lower(held["tree"], thresholds[0]).compile()
    def call():
      held["tree"] = compiled(held["tree"], thresholds.pop())
  seconds = seconds_a_call(call, lambda: jax.block_until_ready(held), repeat)
  return seconds, hlo.measure(compiled.as_text())["kernels"]


def measure_torch(model, what, cpu):
  import torch
  sizes, dtype = shapes(model, cpu)
  device = "cpu" if cpu else "cuda"
  params = [torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, jnp.dtype(dtype).name), device=device))
            for shape in sizes]
  for p in params:
    p.grad = torch.full_like(p, 0.01)
  wait = (lambda: None) if cpu else torch.cuda.synchronize
  clip = lambda max_norm: torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=True)
  threshold = [1.0]
  optimizer = torch.optim.AdamW(params, lr=1e-3, fused=not cpu)
  def call():
    if what == "norm":
      torch.nn.utils.get_total_norm([p.grad for p in params], foreach=True)
    elif what == "chain with adamw":
      clip(1.0)
      optimizer.step()
    else:
      threshold[0] /= 2
      clip(float("inf") if what == "clip, unclipped" else threshold[0])
  repeat = 2 if cpu else 20
  seconds = seconds_a_call(call, wait, repeat)
  if cpu:
    return seconds, None
  with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
    call()
    wait()
  return seconds, sum(event.count for event in profile.key_averages())


def copy_rate(cpu):
  """Bytes read and written a second by a copy within the device."""
  x = jnp.zeros(2**20 if cpu else 2**30, jnp.uint8)
  held = {}
  copy = jax.jit(jnp.copy)
  def call():
    held["copy"] = copy(x)
  return 2 * x.size / seconds_a_call(call, lambda: jax.block_until_ready(held), 5)


# What must be moved, in passes over the tree: a chain's adamw reads gradients, moments and parameters, and writes
# moments and updates.
PASSES = {"norm": 1, "clip, unclipped": 1, "clip, clipped": 3, "chain with adamw": 8}


def case(cpu, model, library):
  """Prints a line of JSON for each measurement."""
  sizes, dtype = shapes(model, cpu)
  tree_bytes = sum(int(np.prod(shape)) for shape in sizes) * jnp.dtype(dtype).itemsize
  copies = copy_rate(cpu)
  for what, passes in PASSES.items():
    if model == "10000 leaves" and what == "chain with adamw" and library != "torch":
      continue  # XLA compiles adamw's loops over so many leaves for minutes
    seconds, kernels = (measure_torch(model, what, cpu) if library == "torch" else
                        measure_jax(model, library, what, cpu))
    rate = passes * tree_bytes / seconds
    print(json.dumps({what: {"microseconds": round(seconds * 1e6, 1), "gb_per_s": round(rate / 1e9, 1),
                             "share": round(rate / copies, 3), "launches": kernels}}), flush=True)


def bench(args):
  """Every model and library in a process of its own, so that one that does not end ends alone."""
  results, begin = {}, time.perf_counter()
  for model in MODELS:
    for library in ("ogc", "optax", "torch"):
      found = results.setdefault(model, {}).setdefault(library, {})
      if importlib.util.find_spec("torch" if library == "torch" else "optax") is None:
        found["failed"] = f"{library} is not installed"
        continue
      left = min(args.seconds, args.budget - (time.perf_counter() - begin))
      command = [sys.executable, __file__, "case", "--case", json.dumps([model, library])] + ["--cpu"] * args.cpu
      try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 1))
        lines = done.stdout
        if done.returncode:
          found["failed"] = (done.stderr.strip().splitlines() or ["no message"])[-1]
      except subprocess.TimeoutExpired as error:
        lines = (error.stdout or b"").decode()
        found["failed"] = f"the rest was not done in {left:.0f} s, compilation included"
      for line in lines.splitlines():
        found.update(json.loads(line))
      print(model, library, found, flush=True)
  return results


def main(args):
  if args.steps == ["case"]:
    case(args.cpu, *json.loads(args.case))
    return 0
  steps = STEPS if "all" in args.steps else args.steps
  platform = jax.default_backend()
  if platform == "cpu" and not args.cpu:
    sys.exit("JAX finds no GPU; --cpu runs every step at a small size")
  record = {"platform": platform, "device": jax.devices()[0].device_kind, "jax": jax.__version__,
            "backend": ogc.backend_info()}
  for step in steps:
    start = time.perf_counter()
    try:
      record[step] = bench(args) if step == "bench" else globals()[step](args.cpu)
    except AssertionError as error:
      record[step] = {"failed": str(error)}
    print(step, f"{time.perf_counter() - start:.1f} s", "failed" if "failed" in record[step] else "ok", flush=True)
  if args.out:
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**before, **record}, indent=1) + "\n")
  return int(any("failed" in record[step] for step in steps))


if __name__ == "__main__":
  sys.exit(main(args))
