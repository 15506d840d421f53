"""Cases 22 and 23: a NaN or an infinity anywhere reaches everything, or does what the policy says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import programs
import pytest

SPIKED = {"a": np.array([2, np.inf, 4], np.float32), "b": np.array([-1, 2], np.float32)}
kinds = pytest.mark.parametrize("path, options", [
    ("native", {}), ("native", {"per_leaf": True}), ("native", {"scale_stage": "xla"}),
    ("native", {"per_leaf": True, "scale_stage": "xla"}), ("reference", {}), ("reference", {"per_leaf": True}),
], indirect=["path"])  # the reference path has one stage


def elements(tree):
  return np.concatenate([np.ravel(np.asarray(leaf).astype(np.complex128)) for leaf in jax.tree.leaves(tree)])


@kinds
def test_one_infinite_element_makes_every_update_nan(path, options):
  updates, _ = programs.clip(path, **options)(SPIKED, 1.0)
  assert np.isnan(elements(updates)).all()


@kinds
def test_one_infinite_element_makes_every_update_zero_where_the_policy_is_zero(path, options):
  updates, _ = programs.clip(path, on_nonfinite="zero", **options)(SPIKED, 1.0)
  assert oracle.same_bits(updates, jax.tree.map(np.zeros_like, SPIKED))


def test_clip_tree_makes_every_update_nan(path):
  updates, norm = jax.jit(ogc.clip_tree)(SPIKED, 1.0)
  assert np.isnan(elements(updates)).all()
  assert not np.isfinite(norm)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, np.inf])
@pytest.mark.parametrize("policy, fill", [("propagate", np.nan), ("zero", 0)])
def test_no_threshold_hides_a_nonfinite_element(bad, max_norm, policy, fill, path):
  tree = {"a": np.array([2, 3, bad], np.float32), "b": np.array([-1, 2], np.float32)}
  updates, metrics = programs.clip(path, on_nonfinite=policy)(tree, max_norm)
  np.testing.assert_array_equal(elements(updates).real, np.full(5, fill))
  assert not np.isfinite(metrics["global_norm"])
  assert (metrics["nonfinite_steps"], metrics["clipped_steps"]) == (1, 0)


def test_the_norm_of_a_tree_with_a_nan_is_nan_or_infinite_and_no_update_is_a_multiple_of_a_marker(path):
  tree = [jnp.float32(2), jnp.float32(np.nan)]
  updates, _ = programs.clip(path)(tree, 1.0)
  assert np.isnan(elements(updates)).all()
  norm, norms = programs.norms(path)(tree)
  assert not np.isfinite(norm)
  assert norms[0] == 2 and not np.isfinite(norms[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("path, at", [("native", at) for at in (0, 5, 31, 32, 36)] + [("reference", 36)],
                         indirect=["path"])  # on the reference path one position is like another
def test_a_nonfinite_element_is_seen_wherever_it_stands(dtype, at, path):
  for bad in (np.nan, np.inf, -np.inf):
    leaf = np.ones(37, dtype)
    leaf[at] = bad
    updates, metrics = programs.clip(path)({"good": np.ones(3, np.float32), "bad": leaf}, 100.0)
    assert not np.isfinite(metrics["global_norm"])
    assert np.isnan(elements(updates)).all()


def test_either_part_of_a_complex_element_may_be_the_nonfinite_one(path):
  for real, imaginary in itertools.product([1.0, np.nan, np.inf], repeat=2):
    leaf = np.array([complex(real, imaginary), 2], np.complex64)
    updates, _ = programs.clip(path)([leaf], 100.0)
    bad = not (np.isfinite(real) and np.isfinite(imaginary))
    assert np.isnan(updates[0].real).all() == bad and np.isnan(updates[0].imag).all() == bad


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_float64_leaves_are_judged_too(bad, path, x64):
  tree = [np.array([1e300, bad]), np.ones(2, np.float32)]
  updates, metrics = programs.clip(path)(tree, 1.0)
  assert updates[0].dtype == jnp.float64 and not np.isfinite(metrics["global_norm"])
  assert np.isnan(elements(updates)).all()


def test_finite_elements_whose_norm_overflows_are_not_taken_for_nonfinite(path):
  tree = [np.full(4, 3e38, np.float32)]
  updates, metrics = programs.clip(path, on_nonfinite="zero")(tree, 1.0)
  np.testing.assert_allclose(updates[0], 0.5, rtol=1e-6)
  assert metrics["global_norm"] == np.inf
  assert (metrics["nonfinite_steps"], metrics["clipped_steps"]) == (0, 1)


def test_under_zero_what_follows_in_the_chain_still_runs(path):
  tx = optax.chain(ogc.global_clip(1.0, on_nonfinite="zero"), optax.trace(0.5), optax.scale(-1.0))
  state = tx.init(SPIKED)
  ones = jax.tree.map(lambda x: jnp.full_like(x, 0.1), SPIKED)
  _, state = tx.update(ones, state)
  updates, _ = tx.update(SPIKED, state)
  np.testing.assert_allclose(elements(updates).real, -0.05, rtol=1e-6)


@pytest.mark.parametrize("scale", [2.0, 1000.0])
def test_a_loss_scale_hides_no_nonfinite_element(scale, path):
  updates, metrics = programs.clip(path)(SPIKED, 1e9, loss_scale=jnp.float32(scale))
  assert np.isnan(elements(updates)).all()
  assert metrics["nonfinite_steps"] == 1 and not np.isfinite(metrics["global_norm"])
