"""Does a change of OPTAX_GLOBALCLIP_BACKEND change the programs that run from then on?"""

import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest

TREE = {"a": np.float32([3, 4]), "b": np.float32([12])}  # norm 13


def is_native(function, *args):
  """Whether the compiled program of a jitted function calls native code."""
  return 'custom_call_target="optax_globalclip' in function.lower(*args).compile().as_text()


def update(tree):
  return ogc.global_clip(1.0).update(tree, optax.EmptyState())[0]


def window(tree):
  tx = ogc.clipped_multi_steps(optax.identity(), 1.0)
  return tx.update(tree, tx.init(tree), tree)[0]


def derivative(tree):
  return jax.grad(lambda t: sum(map(jnp.sum, ogc.clip_tree(t, 1.0)[0].values())))(tree)


def batch(tree):
  return jax.vmap(ogc.global_norm)(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), tree))


FUNCTIONS = {
    "global_norm": ogc.global_norm, "leaf_norms": ogc.leaf_norms, "clip_tree": lambda tree: ogc.clip_tree(tree, 1.0),
    "global_clip": update, "window": window, "derivative": derivative, "vmap": batch,
    "scan": lambda tree: jax.lax.scan(lambda t, _: (update(t), ogc.global_norm(t)), tree, length=2)[1],
    "remat": lambda tree: jax.checkpoint(update)(tree),
}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@functions
def test_the_next_lowering_of_a_jitted_function_is_of_the_new_backend(function, monkeypatch):
  run = jax.jit(function)
  for backend in "native", "reference", "auto", "reference", "native":
    monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", backend)
    jax.block_until_ready(run(TREE))
    assert is_native(run, TREE) == (backend != "reference"), backend
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "reference")
  assert not is_native(run, TREE)
  monkeypatch.delenv("OPTAX_GLOBALCLIP_BACKEND")
  assert is_native(run, TREE)


@functions
def test_a_function_jitted_again_is_of_the_new_backend(function, monkeypatch):
  for backend in "reference", "native", "reference":
    monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", backend)
    assert is_native(jax.jit(function), TREE) == (backend == "native")


def test_a_compiled_program_stays_what_it_is(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  compiled = jax.jit(lambda tree: ogc.global_norm(tree)).lower(TREE).compile()
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "reference")
  assert compiled(TREE) == 13 and 'custom_call_target="optax_globalclip' in compiled.as_text()


# XLA writes down every program that it compiles, and so it can be seen what a call runs: nothing new, where it is what
# ran before.
CALLS = """
    import json, os, pathlib, sys
    import jax, jax.numpy as jnp, numpy as np, optax
    import optax_globalclip as ogc
    clip, monitored = ogc.global_clip(1.0), ogc.global_clip(1.0, monitor=True)
    window = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0)
    every_two = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, every_k=2)
    def two(tree):
      _, state = every_two.update(tree, every_two.init(tree), tree)
      return every_two.update(tree, state, tree)[0]
    calls = {
        "global_norm": ogc.global_norm, "leaf_norms": ogc.leaf_norms, "clip_tree": lambda t: ogc.clip_tree(t, 1.0),
        "global_clip": lambda t: clip.update(t, None)[0],
        "monitor": lambda t: monitored.update(t, monitored.init(t))[0],
        "window": lambda t: window.update(t, window.init(t), t)[0], "window of two": two,
        "derivative": lambda t: jax.grad(ogc.global_norm)(t),
    }
    if sys.argv[1] == "jitted":
      calls = {name: jax.jit(call) for name, call in calls.items()}
    folder, seen, out = pathlib.Path(sys.argv[2]), set(), {}
    def new_programs():
      new = {file for file in folder.glob("*before_optimizations.txt")} - seen
      seen.update(new)
      return [file.read_text() for file in new]
    for i, (name, call) in enumerate(calls.items()):
      tree = {"a": jnp.ones(i + 2), "b": jnp.ones(1)}   # of shapes that no call before had: they share what they can
      out[name] = []
      for backend in ("native", "reference"):
        os.environ["OPTAX_GLOBALCLIP_BACKEND"] = backend
        new_programs()
        for _ in range(2):
          jax.block_until_ready(call(tree))
        programs = new_programs()
        jax.block_until_ready(call(tree))
        native = any('custom_call_target="optax_globalclip' in program for program in programs)
        out[name].append([backend, len(programs) > 0, native, len(new_programs()) if sys.argv[1] == "jitted" else 0])
    print(json.dumps(out))
"""


@pytest.mark.parametrize("how", ["jitted", "eager"])
def test_the_next_call_runs_the_new_backend(how, tmp_path):
  environment = os.environ | {"XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text", "JAX_PLATFORMS": "cpu"}
  done = subprocess.run([sys.executable, "-c", textwrap.dedent(CALLS), how, str(tmp_path)], env=environment, text=True,
                        capture_output=True, timeout=180)
  assert done.returncode == 0, done.stderr
  for name, seen in json.loads(done.stdout.splitlines()[-1]).items():
    # A new program, native or not; and where it is jitted, the third call compiles nothing.
    assert seen == [["native", True, True, 0], ["reference", True, False, 0]], name
