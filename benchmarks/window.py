"""What a window of micro-batches costs in optimizer work: `clipped_multi_steps` beside `optax.MultiSteps`.

    python benchmarks/window.py               # a GPT of 92 M parameters, windows of 8, adamw; some minutes
    python benchmarks/window.py --layers 2    # a small one

A call takes donated parameters and state, and gradients that are there already; a window is eight such calls.
Contenders take turns (turns.py). With the packages of h200_deviceless.py installed and the
CUDA library built, the same steps are compiled for an H200 and their bytes counted. Writes results/window.json.
"""

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import re
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gpt
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
from machine import machine
from turns import quartiles, take_turns

FOLDER = pathlib.Path(__file__).parent
EVERY_K = 8

CONTENDERS = {
    "clipped_multi_steps(adamw)": lambda: ogc.clipped_multi_steps(optax.adamw(1e-3), 1.0, every_k=EVERY_K),
    "clipped_multi_steps(adamw), dynamic scale": lambda: ogc.clipped_multi_steps(
        optax.adamw(1e-3), 1.0, every_k=EVERY_K, loss_scale=ogc.DynamicLossScale(1.0)),
    "MultiSteps(chain(clip_by_global_norm, adamw))": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), EVERY_K),
}
OURS, _, THEIRS = CONTENDERS


def step_of(tx):
  def step(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state
  return step


def compile_step(tx, params, place=lambda tree: tree, **lowering):
  state = place(jax.eval_shape(tx.init, params))
  traced = jax.jit(step_of(tx), donate_argnums=(0, 1)).trace(place(params), state, place(params))
  return traced.lower(**lowering).compile()


def mb(size):
  return round(size / 1e6, 1)


def accumulator_mb(state):
  kept = state.accumulators if hasattr(state, "accumulators") else state.acc_grads
  return mb(sum(leaf.nbytes for leaf in jax.tree.leaves(kept)))


class Training:
  """A contender's parameters and state, going on from window to window."""

  def __init__(self, tx, shapes):
    self.params = gpt.random_leaves(shapes)
    self.compiled = compile_step(tx, [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes])
    self.state = tx.init(self.params)
    memory = self.compiled.memory_analysis()
    self.memory = dict(temporaries_mb=mb(memory.temp_size_in_bytes), accumulator_mb=accumulator_mb(self.state),
                       copies_of_leaves=len(re.findall(r"= f32\[\d\S* copy\(", self.compiled.as_text())))

  def window(self, gradients):
    """Seconds of each call."""
    seconds = []
    for _ in range(EVERY_K):
      start = time.perf_counter()
      self.params, self.state = self.compiled(self.params, self.state, gradients)
      jax.block_until_ready((self.params, self.state))
      seconds.append(time.perf_counter() - start)
    return seconds


def bench_cpu(shapes, turns):
  gradients = gpt.random_leaves(shapes, seed=1)
  runs = {name: Training(make(), shapes) for name, make in CONTENDERS.items()}
  def show(turn, windows):
    print(f"turn {turn + 1}:", *(f"{name} {sum(w[-1]):.2f} s" for name, w in windows.items()), sep="  ", flush=True)
  windows = take_turns(runs, turns, lambda run: run.window(gradients), show)
  difference = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(runs[OURS].params, runs[THEIRS].params))
  def milliseconds(calls):
    return round(1e3 * statistics.median(calls), 1)
  out = {"turns": turns, "largest_difference_of_parameters": difference, "contenders": {}}
  for name, run in runs.items():
    quotients = [sum(theirs) / sum(own) for theirs, own in zip(windows[THEIRS], windows[name])]
    out["contenders"][name] = dict(
        window_ms=milliseconds(map(sum, windows[name])),
        micro_step_ms=milliseconds(seconds for window in windows[name] for seconds in window[:-1]),
        boundary_ms=milliseconds(window[-1] for window in windows[name]),
        times_faster_than_multi_steps=quartiles(quotients, 2),
        **run.memory)
  return out


def bench_h200(shapes):
  """Launches and bytes of a window, from programs compiled for an H200 without one; None where that cannot be done."""
  if importlib.util.find_spec("jax_cuda13_plugin") is None or not ogc.backend_info()["cuda"].startswith("native"):
    return None
  import h200_deviceless  # sets what a deviceless compile needs in the environment
  place = h200_deviceless.place_on_one()
  params = place([jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes])
  out = {}
  for name, make in CONTENDERS.items():
    compiled = compile_step(make(), params, place, lowering_platforms=("cuda",))
    text = compiled.as_text()
    # In a micro-step the loop that closes a window makes no trip.
    boundary, micro_step = hlo.measure(text), hlo.measure(text.replace(" while(", " after-all("))
    window = {key: round((EVERY_K - 1) * micro_step[key] + boundary[key], 1) for key in ("launches", "mb_clipped")}
    out[name] = dict(window=window, micro_step=micro_step, boundary=boundary,
                     temporaries_mb=mb(compiled.memory_analysis().temp_size_in_bytes))
    print(f"{name}: {out[name]}", flush=True)
  return out


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--layers", type=int, default=gpt.SMALL.layers)
  parser.add_argument("--turns", type=int, default=7)
  parser.add_argument("--only", choices=["cpu", "h200"], help="the other's results stay as they are")
  parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "results" / "window.json")
  args = parser.parse_args()
  shapes = gpt.leaf_shapes(gpt.SMALL._replace(layers=args.layers))
  results = json.loads(args.out.read_text()) if args.out.exists() else {}
  results |= dict(date=datetime.date.today().isoformat(), leaves=len(shapes), every_k=EVERY_K,
                  parameters=sum(int(np.prod(shape)) for shape in shapes))
  if args.only != "cpu":
    h200 = bench_h200(shapes)
    if h200:
      results["h200_deviceless"] = h200
    elif args.only:
      parser.error("needs jax-cuda13-plugin and the CUDA library (BUILD.md)")
  if args.only != "h200":
    results["machine"] = machine()
    results["cpu"] = bench_cpu(shapes, args.turns)
    print(json.dumps(results["cpu"], indent=2))
  args.out.parent.mkdir(parents=True, exist_ok=True)
  args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
  main()
