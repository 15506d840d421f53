"""What a whole step costs on a CPU: `clipped_adamw(...).step` beside chains of a clip and AdamW, and a plain loop.

    python benchmarks/step.py                             # everything: some minutes, 6 GB
    python benchmarks/step.py --only given made compile   # some of: given made compile batches

given: parameters, state and gradients are arguments, all donated. made: gradients are made inside the program, as in
training. Both are update and apply. compile: 1,500 leaves of 768. batches: how many leaves one call should take.
Contenders take turns (turns.py). Writes results/step.json.
"""

import argparse
import ctypes
import datetime
import json
import pathlib
import subprocess
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
from turns import stopwatch, summary, take_turns

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


def bench_compile(n=1500):
  seconds = {name: compiled(make, n) for name, make in STEPS.items()}
  return {"leaves": n, "seconds": {name: {"wall": round(s.wall, 2), "cpu": round(s.cpu, 2)} for name, s in seconds.items()},
          "ratio": round(seconds[OURS].wall / seconds[OPTAX].wall, 3)}


def bench_batches(turns, sizes=(32, 64, 160, 320)):
  """Seconds to compile 1,500 leaves, and milliseconds of a step of the 148 of the GPT, by leaves in a call."""
  shapes = gpt.leaf_shapes()
  gradients, contenders, out = random_leaves(shapes, 1), {}, {}
  before = _fused_step._LEAVES_A_CALL
  for size in sizes:
    _fused_step._LEAVES_A_CALL = size
    out[str(size)] = {"compile 1,500 leaves": round(compiled(fused, 1500).wall, 2),
                      "compile 148 leaves": round(compiled(fused, 148).wall, 2)}
    if size <= 160:
      jax.clear_caches()
      contenders[str(size)] = Given(fused, shapes, gradients)
      contenders[str(size)].prepare()
      contenders[str(size)]()
  _fused_step._LEAVES_A_CALL = before
  return {"seconds": out, **summary(take_turns(contenders, turns, seconds), [(name, "160") for name in contenders])}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", nargs="+", choices=["given", "made", "compile", "batches"])
  parser.add_argument("--turns", type=int, default=15)
  parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
  arguments = parser.parse_args()
  results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
  sections = {"given": lambda: bench_steps(Given, arguments.turns), "made": lambda: bench_steps(Made, arguments.turns),
              "compile": bench_compile, "batches": lambda: bench_batches(arguments.turns)}
  results["machine"], results["date"] = machine(), datetime.date.today().isoformat()
  for name in arguments.only or sections:
    results[name] = sections[name]()
    print(name, json.dumps(results[name], indent=2), flush=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
  main()
