"""What a whole step costs on a CPU: `clipped_adamw(...).step` beside chains of a clip and AdamW, and a plain loop.

    python benchmarks/step.py                             # everything: some minutes, 6 GB
    python benchmarks/step.py --only given made compile   # some of: given made compile batches

given: parameters, state and gradients are arguments, all donated. made: gradients are made inside the program, as in
training. Both are update and apply. compile: 1,500 leaves of 768. batches: how many leaves one call should take.
losses: 1,000 steps of examples/train_flax.py's tiny model on its text, beside optax's chain.
Contenders take turns (turns.py). Writes results/step.json.
"""

import argparse
import ctypes
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
from gpt import random_leaves
from machine import machine
from optax_globalclip import _fused_step
from turns import quartiles, stopwatch, summary, take_turns

FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER / "results" / "step.json"
RATE, MAX_NORM = 1e-3, 1.0


def wait(out):
  jax.block_until_ready(out)


def chained(tx):
  def step(grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state
  return tx.init, step


def fused():
  tx = ogc.clipped_adamw(RATE, MAX_NORM)
  return tx.init, tx.step


OURS, CHAIN, OPTAX, LOOP = "clipped_adamw.step", "chain(global_clip, adamw)", "optax's chain", "plain loop"
STEPS = {
    OURS: fused,
    CHAIN: lambda: chained(optax.chain(ogc.global_clip(MAX_NORM), optax.adamw(RATE))),
    OPTAX: lambda: chained(optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(RATE))),
}


class Given:
  """A step on arguments that are all donated; `prepare` makes the gradients, which a step uses up."""

  def __init__(self, make, shapes, gradients):
    init, step = make()
    self.gradients, self.params = gradients, random_leaves(shapes, 0)
    self.state = init(self.params)
    # Arguments in the order of the results: so JAX pairs each donated one with its own.
    self.step = jax.jit(lambda params, state, grads: step(grads, state, params), donate_argnums=(0, 1, 2))

  def prepare(self):
    self.given = [leaf.copy() for leaf in self.gradients]
    wait(self.given)

  def __call__(self):
    self.params, self.state = self.step(self.params, self.state, self.given)
    wait((self.params, self.state))


class Made:
  """A step on gradients that the program makes of what it is given."""

  def __init__(self, make, shapes, gradients):
    init, step = make()
    self.gradients, self.params = gradients, random_leaves(shapes, 0)
    self.state = init(self.params)
    def run(params, state, leaves):
      return step(jax.lax.optimization_barrier([leaf + np.float32(1e-3) for leaf in leaves]), state, params)
    self.step = jax.jit(run, donate_argnums=(0, 1))

  def prepare(self):
    pass

  def __call__(self):
    self.params, self.state = self.step(self.params, self.state, self.gradients)
    wait((self.params, self.state))


class Loop:
  """Two loops over every leaf, without XLA."""

  def __init__(self, shapes, gradients, folder):
    library = pathlib.Path(folder) / "adamw_loop.so"
    subprocess.run(["g++", "-O3", "-march=x86-64-v3", "-ffast-math", "-fopenmp", "-shared", "-fPIC",
                    FOLDER / "adamw_loop.cc", "-o", library], check=True)
    self.library = ctypes.CDLL(str(library))
    self.library.sum_squares.restype = ctypes.c_double
    self.g = [np.array(leaf) for leaf in gradients]
    self.m, self.v = ([np.zeros_like(leaf) for leaf in self.g] for _ in range(2))
    self.p = [np.array(leaf) for leaf in random_leaves(shapes, 0)]
    self.steps = 0

  def prepare(self):
    pass

  def __call__(self):
    def pointer(leaf):
      return ctypes.c_void_p(leaf.ctypes.data)
    sizes = [ctypes.c_int64(leaf.size) for leaf in self.g]
    norm = sum(self.library.sum_squares(pointer(g), n) for g, n in zip(self.g, sizes)) ** 0.5
    self.steps += 1
    numbers = [min(1, MAX_NORM / norm), 0.9, 0.999, 1 / (1 - 0.9**self.steps), 1 / (1 - 0.999**self.steps), RATE, 1e-8, 1e-4]
    for *leaf, n in zip(self.g, self.m, self.v, self.p, sizes):
      self.library.step(*map(pointer, leaf), n, *map(ctypes.c_float, numbers))


def seconds(contender, calls=2):
  """Of one call, after one that finds the caches as the last contender left them; making gradients is not counted."""
  contender.prepare()
  contender()
  total = None
  for _ in range(calls):
    contender.prepare()
    passed = stopwatch()
    contender()
    measured = passed()
    total = measured if total is None or measured < total else total
  return total


def bench_steps(kind, turns):
  shapes = gpt.leaf_shapes()
  gradients = random_leaves(shapes, 1)
  with tempfile.TemporaryDirectory() as folder:
    contenders = {name: kind(make, shapes, gradients) for name, make in STEPS.items()}
    contenders[LOOP] = Loop(shapes, gradients, folder)
    times = take_turns(contenders, turns, seconds)
  out = summary(times, [(OURS, CHAIN), (OURS, OPTAX), (OURS, LOOP)])
  difference = lambda other: max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in zip(
      contenders[OURS].params, other))
  out["largest difference of parameters"] = {name: difference(contenders[name].params) for name in (CHAIN, OPTAX)}
  if kind is Given:
    out["largest difference of parameters"][LOOP] = difference(contenders[LOOP].p)
  return out


def compiled(make, n):
  init, step = make()
  params = [jax.ShapeDtypeStruct((768,), jnp.float32)] * n
  state = jax.eval_shape(init, params)
  jax.clear_caches()
  passed = stopwatch()
  jax.jit(lambda params, state, grads: step(grads, state, params), donate_argnums=(0, 1, 2)).lower(
      params, state, params).compile()
  return passed()


def bench_compile(turns, n=1500):
  times = take_turns(STEPS, turns, lambda make: compiled(make, n))
  return {"leaves": n, **summary(times, [(OURS, CHAIN), (OURS, OPTAX)])}


def bench_losses(steps=1000, rows=4):
  sys.path.insert(0, str(FOLDER.parent / "examples"))
  import corpus
  import train_flax
  size = train_flax.SIZES["tiny"]
  batches = corpus.Batches(train_flax.load_corpus(None, size), rows=rows, length=size.length, seed=0, steps=steps)
  options = dict(learning_rate=size.learning_rate, steps=steps, seed=0, max_norm=MAX_NORM)
  states = {OURS: train_flax.create_state(size, fused=True, **options), CHAIN: train_flax.create_state(size, **options)}
  # optax's chain: the same with another clip, whose norm is recorded by one that never clips.
  made = train_flax.create_optimizer
  def stock(schedule, **_):
    return optax.chain(ogc.global_clip(np.inf, monitor=True), optax.clip_by_global_norm(MAX_NORM), optax.adamw(schedule))
  train_flax.create_optimizer = stock
  states[OPTAX] = train_flax.create_state(size, **options)
  train_flax.create_optimizer = made
  losses = {name: [] for name in states}
  for i in range(steps):
    for name in states:
      states[name], of_rows, metrics = train_flax.train_step(states[name], batches.batch(i).tokens)
      losses[name].append(float(of_rows.mean()))
  clipped = int(ogc.clip_metrics(states[OURS].opt_state)["clipped_steps"])
  of = {name: np.asarray(values) for name, values in losses.items()}
  return {
      "steps": steps, "clipped steps": clipped, "first loss": {name: round(float(x[0]), 6) for name, x in of.items()},
      "mean of the last 100 losses": {name: round(float(x[-100:].mean()), 4) for name, x in of.items()},
      "largest relative difference of a loss from optax's": {
          name: float(np.max(np.abs(x / of[OPTAX] - 1))) for name, x in of.items() if name != OPTAX},
      "the same of means over 100 steps": {
          name: float(np.max(np.abs(x.reshape(-1, 100).mean(1) / of[OPTAX].reshape(-1, 100).mean(1) - 1)))
          for name, x in of.items() if name != OPTAX}}


def bench_batches(turns, sizes=(32, 64, 96, 160, 320)):
  """Seconds to compile 1,500 leaves and the 148 of the GPT, by leaves in a call; medians."""
  before, seconds = (_fused_step._ONE_CALL, _fused_step._LEAVES_A_CALL), {}
  for size in sizes:
    _fused_step._ONE_CALL = _fused_step._LEAVES_A_CALL = size
    seconds[str(size)] = {f"{n} leaves": quartiles([compiled(fused, n).cpu for _ in range(turns)], 2) for n in (1500, 148)}
  _fused_step._ONE_CALL, _fused_step._LEAVES_A_CALL = before
  return {"cpu seconds": seconds}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", nargs="+", choices=["given", "made", "compile", "batches", "losses"])
  parser.add_argument("--turns", type=int, default=15)
  parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
  arguments = parser.parse_args()
  results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
  sections = {"given": lambda: bench_steps(Given, arguments.turns), "made": lambda: bench_steps(Made, arguments.turns),
              "compile": lambda: bench_compile(3), "batches": lambda: bench_batches(3), "losses": bench_losses}
  results["date"] = datetime.date.today().isoformat()
  results["machine"] = {name: value for name, value in machine().items() if name != "load_average_at_start"}
  for name in arguments.only or sections:
    results[name] = {"load_average_at_start": round(os.getloadavg()[0], 1), **sections[name]()}
    print(name, json.dumps(results[name], indent=2), flush=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
  main()
