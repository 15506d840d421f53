"""What a norm and a clip cost on a CPU, beside optax, BLAS and the least that XLA needs.

    python benchmarks/cpu.py                    # everything but what optax takes minutes to compile
    python benchmarks/cpu.py --optax-compile    # that too: 5,000 leaves beside optax
    python benchmarks/cpu.py --only norm clip   # some of: norm clip chain rules monitor leaves compile stages
    python benchmarks/cpu.py --plot             # the figure alone, from the results already there

Contenders take turns (turns.py), and what is reported is the median and the quartiles of the ratio within a turn, of
wall time and of the time that the process had a CPU. Writes results/cpu.json and results/cpu.png.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import statistics

for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):  # they slow the dot that the norm is compared with
  os.environ.pop(name, None)

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import scipy
from gpt import random_leaves
from machine import machine
from optax_globalclip import _lowering
from scipy.linalg import blas
from turns import ratio, stopwatch, summary, take_turns

RESULTS = pathlib.Path(__file__).parent / "results"
WIDTH = 768  # of the leaves where there are many


def wait(out):
  jax.block_until_ready(out)


class Donated:
  """Calls a clip again and again on what it returned, its tree donated each time.

  `shrinks` below 1 makes every call clip: the threshold falls from call to call.
  """

  def __init__(self, update, shapes, shrinks):
    self.tree, self.shrinks = random_leaves(shapes), shrinks
    self.limit = float(ogc.global_norm(self.tree)) if shrinks < 1 else 1e30
    self.step = jax.jit(lambda tree, limit: update(limit)(tree), donate_argnums=0)

  def __call__(self):
    self.limit *= self.shrinks
    self.tree = self.step(self.tree, np.float32(self.limit))
    wait(self.tree)


def ours(limit, **options):
  return lambda tree: ogc.global_clip(limit, **options).update(tree, optax.EmptyState())[0]


def stock(limit):
  return lambda tree: optax.clip_by_global_norm(limit).update(tree, optax.EmptyState())[0]


def bench_norm(turns):
  tree = random_leaves(gpt.leaf_shapes())
  flat = np.concatenate([np.ravel(leaf) for leaf in tree])
  norms = {"optax_globalclip": jax.jit(ogc.global_norm), "optax": jax.jit(optax.global_norm)}
  contenders = {name: lambda f=f: wait(f(tree)) for name, f in norms.items()}
  contenders["sdot"] = lambda: blas.sdot(flat, flat)
  times = take_turns(contenders, turns)
  exact = float(np.sqrt(np.sum(np.square(flat, dtype=np.float64))))
  out = summary(times, [("optax_globalclip", "optax"), ("optax_globalclip", "sdot")])
  out["gigabytes_a_second"] = {name: round(flat.nbytes / min(t).wall / 1e9, 1) for name, t in times.items()}
  out["relative_error"] = {"optax_globalclip": abs(float(norms["optax_globalclip"](tree)) / exact - 1),
                           "optax": abs(float(norms["optax"](tree)) / exact - 1),
                           "sdot": abs(float(np.sqrt(blas.sdot(flat, flat))) / exact - 1)}
  return out


def bench_clip(turns):
  shapes = gpt.leaf_shapes()
  tree = random_leaves(shapes)
  norm = jax.jit(ogc.global_norm)
  alone = lambda limit: lambda tree: ogc.clip_tree(tree, limit)[0]
  contenders = {
      "norm alone": lambda: wait(norm(tree)),
      "optax_globalclip, clips": Donated(alone, shapes, 0.999), "optax, clips": Donated(stock, shapes, 0.999),
      "optax_globalclip, keeps": Donated(alone, shapes, 1), "optax, keeps": Donated(stock, shapes, 1),
  }
  return summary(take_turns(contenders, turns), [
      ("optax_globalclip, clips", "optax, clips"), ("optax_globalclip, keeps", "optax, keeps"),
      ("optax_globalclip, keeps", "norm alone")])


class Training:
  """Calls adamw's step behind a clip, or alone, again and again; parameters and state are donated, gradients are not."""

  def __init__(self, shapes, *clip, made_inside):
    tx = optax.chain(*clip, optax.adamw(1e-3))
    self.params, self.gradients = random_leaves(shapes, 0), random_leaves(shapes, 1)
    self.state = tx.init(self.params)
    def step(params, state, gradients):
      if made_inside:
        gradients = jax.lax.optimization_barrier([leaf + np.float32(1e-3) for leaf in gradients])
      updates, state = tx.update(gradients, state, params)
      return optax.apply_updates(params, updates), state
    self.step = jax.jit(step, donate_argnums=(0, 1))

  def __call__(self):
    self.params, self.state = self.step(self.params, self.state, self.gradients)
    wait(self.params)


def bench_chain(turns):
  shapes = gpt.leaf_shapes()
  out = {}
  for kind, made_inside in (("gradients given", False), ("gradients made inside", True)):
    contenders = {
        "optax_globalclip": Training(shapes, ogc.global_clip(1.0), made_inside=made_inside),
        "optax_globalclip, kernel": Training(shapes, ogc.global_clip(1.0, scale_stage="kernel"), made_inside=made_inside),
        "optax": Training(shapes, optax.clip_by_global_norm(1.0), made_inside=made_inside),
        "no clip": Training(shapes, made_inside=made_inside),
    }
    out[kind] = summary(take_turns(contenders, turns), [("optax_globalclip", "optax")])
  return out


RULES = {"zclip": ogc.zclip(), "ema_clip": ogc.ema_clip(), "autoclip": ogc.autoclip(),
         "schedule": optax.linear_schedule(2.0, 1.0, 1000)}


def bench_rule(turns, name):
  """A step whose threshold follows the run, beside one whose threshold is a number."""
  shapes = gpt.leaf_shapes()
  contenders = {name: Training(shapes, ogc.global_clip(RULES[name]), made_inside=False),
                "constant": Training(shapes, ogc.global_clip(1.0), made_inside=False)}
  return summary(take_turns(contenders, turns), [(name, "constant")])


def bench_monitor(turns):
  """What `monitor=True` adds to a clip, and to a clip before adamw: pairs of one with and one without."""
  shapes, out = gpt.leaf_shapes(), {}
  for kind in ("clip", "clip, then adamw"):
    contenders = {
        name: MonitoredClip(shapes, monitor) if kind == "clip" else Training(
            shapes, ogc.global_clip(1.0, monitor=monitor), made_inside=False)
        for name, monitor in (("monitored", True), ("plain", False))}
    out[kind] = summary(take_turns(contenders, turns), [("monitored", "plain")])
  return out


class MonitoredClip:
  """Calls a clip again and again on what it returned, with its state; the threshold falls, so that each call clips."""

  def __init__(self, shapes, monitor):
    self.tree = random_leaves(shapes)
    self.limit = float(ogc.global_norm(self.tree))
    self.state = ogc.global_clip(1.0, monitor=monitor).init(self.tree)
    def step(tree, state, limit):
      return ogc.global_clip(limit, monitor=monitor).update(tree, state)
    self.step = jax.jit(step, donate_argnums=(0, 1))

  def __call__(self):
    self.limit *= 0.999
    self.tree, self.state = self.step(self.tree, self.state, np.float32(self.limit))
    wait((self.tree, self.state))


STEPS = 50


def norms_inside(f):
  """The norm of gradients that lie inside the program, `STEPS` times over: what a jitted call costs for every argument
  is paid once, and what made the gradients is not counted."""
  def run(leaves):
    def step(_, norms):
      # Each step's gradients may be others, for all that XLA knows: nothing moves out of the loop.
      norms, leaves_now = jax.lax.optimization_barrier((norms, leaves))
      return norms + f(leaves_now)
    return jax.lax.fori_loop(0, STEPS, step, jnp.float32(0))
  return jax.jit(run)


def clips_inside(update):
  """The clip of gradients that lie inside the program, `STEPS` times over; the threshold falls, so that each clips."""
  def run(leaves, limit):
    def step(_, carry):
      leaves, limit = jax.lax.optimization_barrier(carry)
      return update(limit)(leaves), limit * np.float32(0.999)
    return jax.lax.fori_loop(0, STEPS, step, (leaves, limit))
  return jax.jit(run, donate_argnums=0)


class Inside:
  """Calls a compiled `clips_inside` again and again on what it returned."""

  def __init__(self, run, n):
    self.leaves = random_leaves([(WIDTH,)] * n)
    self.limit = ogc.global_norm(self.leaves) * np.float32(0.999)
    passed = stopwatch()
    self.run = run.lower(self.leaves, self.limit).compile()
    self.compiled = passed()

  def __call__(self):
    self.leaves, self.limit = self.run(self.leaves, self.limit)
    wait(self.leaves)


def bench_leaves(turns, n):
  leaves = random_leaves([(WIDTH,)] * n)
  contenders = {}
  for name, f in (("norm, optax_globalclip", ogc.global_norm), ("norm, optax", optax.global_norm)):
    run = norms_inside(f).lower(leaves).compile()
    contenders[name] = lambda run=run: wait(run(leaves))
  for name, f in (("clip, optax_globalclip", ours), ("clip, optax", stock)):
    contenders[name] = Inside(clips_inside(f), n)
  return summary(take_turns(contenders, turns), [("norm, optax_globalclip", "norm, optax"),
                                                 ("clip, optax_globalclip", "clip, optax")], calls=STEPS)


def compile_seconds(f, tree):
  jax.clear_caches()
  passed = stopwatch()
  jax.jit(lambda t: f(t)).lower(tree).compile()
  return passed()


def bench_compile(turns, n, with_optax):
  tree = [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)] * n
  contenders = {"multiply": lambda tree: [leaf * 0.5 for leaf in tree], "norm": ogc.global_norm, "clip": ours(1.0)}
  times = take_turns(contenders, turns, lambda f: compile_seconds(f, tree))
  pairs = [("clip", "multiply"), ("norm", "multiply")]
  ratios = [ratio(times, *pair) for pair in pairs]
  if with_optax:
    for name, f in (("optax norm", optax.global_norm), ("optax clip", stock(1.0))):
      times[name] = [compile_seconds(f, tree)]
  seconds = {name: {"median": round(statistics.median(x.wall for x in t), 2),
                    "cpu median": round(statistics.median(x.cpu for x in t), 2)} for name, t in times.items()}
  return dict(seconds=seconds, turns=turns, ratios=ratios)


@contextlib.contextmanager
def constants(fused, batch):
  saved = _lowering._FUSED_LEAVES, _lowering._ALIASED_LEAVES_A_CALL
  _lowering._FUSED_LEAVES, _lowering._ALIASED_LEAVES_A_CALL = fused, batch
  try:
    yield
  finally:
    _lowering._FUSED_LEAVES, _lowering._ALIASED_LEAVES_A_CALL = saved


STAGES = {
    "one call": (dict(fused=10**9, batch=64), {}),
    "norm, then calls of 16": (dict(fused=0, batch=16), {}),
    "norm, then calls of 64": (dict(fused=0, batch=64), {}),
    "norm, then calls of 256": (dict(fused=0, batch=256), {}),
    "norm, then XLA": (dict(fused=0, batch=64), dict(scale_stage="xla")),
}


def bench_stages(turns, n):
  """Where the scaling of `n` leaves of 768 is best done: to compile it, and to run it, donated or inside a program."""
  compiles, donated, inside = {}, {}, {}
  for name, (setting, options) in STAGES.items():
    if name == "one call" and n > 1500:
      continue  # compiling it takes minutes
    options = dict(scale_stage="kernel") | options
    with constants(**setting):
      jax.clear_caches()
      donated[name] = Donated(lambda limit, options=options: ours(limit, **options), [(WIDTH,)] * n, 0.999)
      donated[name]()
      jax.clear_caches()
      inside[name] = Inside(clips_inside(lambda limit, options=options: ours(limit, **options)), n)
      compiles[name] = {"wall": round(inside[name].compiled.wall, 2), "cpu": round(inside[name].compiled.cpu, 2)}
  out = dict(compile_seconds=compiles)
  for kind, contenders, calls in (("donated", donated, 1), ("inside", inside, STEPS)):
    times = take_turns(contenders, turns)
    out[kind] = summary(times, [(name, "norm, then calls of 64") for name in contenders], calls)
  return out


def plot(results, path):
  import matplotlib
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt
  rows = []
  def add(label, section, ours, theirs, kind=None):
    if section in results:
      measured = results[section][kind] if kind else results[section]
      found = next(r for r in measured["ratios"] if r["of"] == ours and r["to"] == theirs)
      rows.append((label, found))
  add("norm, 148 leaves, 92 M", "norm", "optax_globalclip", "optax")
  add("clip_tree, donated, clipping", "clip", "optax_globalclip, clips", "optax, clips")
  add("clip_tree, donated, not clipping", "clip", "optax_globalclip, keeps", "optax, keeps")
  add("chain(clip, adamw), gradients given", "chain", "optax_globalclip", "optax", "gradients given")
  add("chain(clip, adamw), made inside", "chain", "optax_globalclip", "optax", "gradients made inside")
  for n in (1500, 5000):
    add(f"norm, {n:,} leaves of 768", f"leaves {n}", "norm, optax_globalclip", "norm, optax")
    add(f"clip, {n:,} leaves of 768", f"leaves {n}", "clip, optax_globalclip", "clip, optax")
  if not rows:
    return
  figure, axes = plt.subplots(figsize=(7.2, 0.42 * len(rows) + 1.3), layout="constrained")
  for i, (label, found) in enumerate(reversed(rows)):
    median, (low, high) = found["median"], found["quartiles"]
    axes.barh(i, median, height=0.62, color="#0072B2")
    axes.plot([low, high], [i, i], color="black", linewidth=1.5)
    axes.text(min(low, median) - 0.015, i, f"{median:.2f}", color="white", ha="right", va="center", fontsize=9)
  axes.axvline(1, color="#D55E00", linewidth=1.5)
  axes.text(1, len(rows) - 0.45, "optax", color="#D55E00", ha="center", va="bottom", fontsize=9)
  axes.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)])
  axes.set_xlim(0, max(1.05, max(f["quartiles"][1] for _, f in rows) + 0.05))
  axes.set_xlabel("time relative to optax under jit, float32 (less is faster)\nline: quartiles over turns")
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
  m = results["machine"]
  axes.set_title(f"{m['cores']} cores of {m['cpu']}, jax {m['jax']}, optax {m['optax']}", fontsize=9, pad=16)
  figure.savefig(path, dpi=160)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", nargs="+", choices=["norm", "clip", "chain", "rules", "monitor", "leaves", "compile", "stages"])
  parser.add_argument("--turns", type=int, default=21)
  parser.add_argument("--optax-compile", action="store_true")
  parser.add_argument("--plot", action="store_true")
  parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
  arguments = parser.parse_args()
  path = arguments.out / "cpu.json"
  results = json.loads(path.read_text()) if path.exists() else {}
  if not arguments.plot:
    wanted = arguments.only or ["norm", "clip", "chain", "rules", "monitor", "leaves", "compile", "stages"]
    sections = {}
    if "norm" in wanted:
      sections["norm"] = lambda: bench_norm(arguments.turns)
    if "clip" in wanted:
      sections["clip"] = lambda: bench_clip(arguments.turns)
    if "chain" in wanted:
      sections["chain"] = lambda: bench_chain(arguments.turns)
    for name in RULES if "rules" in wanted else ():
      sections[f"rule {name}"] = lambda name=name: bench_rule(max(30, arguments.turns), name)
    if "monitor" in wanted:
      sections["monitor"] = lambda: bench_monitor(max(30, arguments.turns))
    for n in ((1500, 5000) if arguments.optax_compile else (1500,)) if "leaves" in wanted else ():
      sections[f"leaves {n}"] = lambda n=n: bench_leaves(arguments.turns, n)
    if "compile" in wanted:
      sections["compile 5000"] = lambda: bench_compile(3, 5000, arguments.optax_compile)
    for n in (64, 148, 300, 1500, 5000) if "stages" in wanted else ():
      sections[f"stages {n}"] = lambda n=n: bench_stages(arguments.turns, n)
    results["machine"] = machine() | dict(scipy=scipy.__version__)
    results["date"] = datetime.date.today().isoformat()
    for name, run in sections.items():
      print(name, flush=True)
      results[name] = run()
      print(json.dumps(results[name], indent=2), flush=True)
      arguments.out.mkdir(parents=True, exist_ok=True)
      path.write_text(json.dumps(results, indent=2) + "\n")
  plot(results, arguments.out / "cpu.png")


if __name__ == "__main__":
  main()
