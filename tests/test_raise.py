"""`on_nonfinite="raise"` and `error_if_nonfinite=True`: an error that names the leaves, eagerly and under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest

BAD = {"fine": np.array([1.0], np.float32), "w": [{"kernel": np.array([1, np.nan, np.inf], np.float32)}],
       "z": np.array([complex(1, np.inf)], np.complex64)}
FINE = {"fine": np.array([1.0], np.float32), "w": [{"kernel": np.array([3, 4, 5], np.float32)}],
        "z": np.array([1 + 1j], np.complex64)}
NAMED = r"\['w'\]\[0\]\['kernel'\] \(2 elements\).*\['z'\] \(1 elements\)"


def global_clip(tree):
  return ogc.global_clip(1.0, on_nonfinite="raise").update(tree, optax.EmptyState())[0]


def per_tensor_clip(tree):
  return ogc.per_tensor_clip(1.0, on_nonfinite="raise").update(tree, optax.EmptyState())[0]


def clip_tree(tree):
  return ogc.clip_tree(tree, 1.0, error_if_nonfinite=True)


functions = pytest.mark.parametrize("function", [global_clip, per_tensor_clip, clip_tree])
LIMITS = {global_clip: 1, clip_tree: 1, per_tensor_clip: np.sqrt(3)}  # what the norm of three leaves is clipped to


@functions
def test_eagerly_it_is_a_floating_point_error_naming_the_leaves(function, path):
  with pytest.raises(FloatingPointError, match=NAMED) as info:
    function(BAD)
  assert "['fine']" not in str(info.value)


@functions
def test_under_jit_it_is_a_runtime_error_containing_that(function, path):
  run = jax.jit(lambda tree: function(tree))
  with pytest.raises(jax.errors.JaxRuntimeError, match="FloatingPointError: .*" + NAMED):
    jax.block_until_ready(run(BAD))
    jax.effects_barrier()


@functions
def test_finite_gradients_raise_nothing_and_are_clipped(function, path):
  for run in (function, jax.jit(lambda tree: function(tree))):
    updates = run(FINE)
    jax.effects_barrier()
    if function is clip_tree:
      updates, norm = updates
      np.testing.assert_allclose(norm, np.sqrt(53), rtol=1e-6)
    np.testing.assert_allclose(float(oracle.norm(updates)), LIMITS[function], rtol=1e-6)


def test_a_norm_that_overflows_is_no_error(path):
  updates, norm = ogc.clip_tree([np.full(4, 3e38, np.float32)], 1.0, error_if_nonfinite=True)
  assert norm == np.inf
  np.testing.assert_allclose(updates[0], 0.5, rtol=1e-6)


def test_a_tree_without_leaves_raises_nothing(path):
  assert ogc.clip_tree({}, 1.0, error_if_nonfinite=True)[0] == {}


def test_the_error_stops_a_compiled_loop(path):
  @jax.jit
  def run(scales):
    return jax.lax.scan(lambda c, s: (c, global_clip([jnp.ones(2) * s])[0]), 0.0, scales)[1]
  assert run(jnp.array([1.0, 2.0])).shape == (2, 2)
  with pytest.raises(jax.errors.JaxRuntimeError, match="FloatingPointError"):
    jax.block_until_ready(run(jnp.array([1.0, np.inf])))
    jax.effects_barrier()


def test_without_the_option_clip_tree_raises_nothing(path):
  updates, norm = ogc.clip_tree(BAD, 1.0)
  assert not np.isfinite(norm) and np.isnan(updates["fine"]).all()
