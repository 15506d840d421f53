"""The clip under JAX's transformations: compiled, donated, in loops and branches, batched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
from seven import NORM, TREE, clip, expect

pytestmark = pytest.mark.reference_repeats

MONITORED = ogc.global_clip(1.0, monitor=True)


# ----------------------------------------------------------------------------------------------------------------------
# jit and donation (case 55)


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_what_is_not_donated_is_unchanged_to_the_bit(max_norm, path):
  tree = jax.device_put(TREE)
  updates = jax.jit(functools.partial(clip, max_norm=max_norm))(tree)
  eager = clip(tree, max_norm)
  assert oracle.same_bits(tree, TREE)
  expect(updates, min(1, max_norm / NORM))
  expect(eager, min(1, max_norm / NORM))


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_donated_gradients_are_clipped_in_place(max_norm, monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  tree = jax.tree.map(lambda g: jnp.tile(g, 100), TREE)  # device_put may share NumPy's memory, which is not donated
  addresses = sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree))
  updates = jax.jit(functools.partial(clip, max_norm=max_norm), donate_argnums=0)(tree)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(tree))
  assert sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(updates)) == addresses


def test_gradients_and_monitor_may_be_donated_from_the_first_step_on(path):
  step = jax.jit(MONITORED.update, donate_argnums=(0, 1))
  state = MONITORED.init(TREE)
  for n in range(1, 4):
    updates, state = step(jax.device_put(TREE), state)
    expect(updates)
    assert state.steps == n


def test_the_same_array_may_stand_at_two_leaves(path):
  w = jnp.array([3.0, 4.0])
  updates, norm = jax.jit(ogc.clip_tree)([w, w], 1.0)
  np.testing.assert_allclose(norm, np.sqrt(50), rtol=1e-6)
  np.testing.assert_allclose(updates[1], np.array([3, 4]) / np.sqrt(50), rtol=1e-6)
  np.testing.assert_array_equal(w, [3, 4])


def test_gradients_used_again_after_the_clip_are_the_unclipped_ones(path):
  @jax.jit
  def run(tree):
    gradients = jax.tree.map(lambda g: g * 1, tree)
    return clip(gradients), gradients, ogc.global_norm(gradients)
  updates, gradients, norm = run(TREE)
  expect(updates)
  assert oracle.same_bits(gradients, TREE) and norm == NORM


# ----------------------------------------------------------------------------------------------------------------------
# Control flow


def test_a_monitored_clip_is_a_scan_carry(path):
  def body(state, scale):
    updates, state = MONITORED.update(jax.tree.map(lambda g: g * scale, TREE), state)
    return state, (ogc.global_norm(updates), state.global_norm)
  scales = jnp.array([1.0, 0.1, jnp.nan, jnp.inf, 2.0])
  state, (after, before) = jax.jit(lambda s: jax.lax.scan(body, MONITORED.init(TREE), s))(scales)
  np.testing.assert_allclose(np.asarray(after)[[0, 1, 4]], [1, 0.7, 1], rtol=1e-6)
  np.testing.assert_allclose(np.asarray(before)[[0, 1, 4]], [7, 0.7, 14], rtol=1e-6)
  assert (state.steps, state.clipped_steps, state.nonfinite_steps, state.consecutive_nonfinite) == (5, 2, 2, 0)


def test_a_clip_inside_a_branch(path):
  @jax.jit
  def run(tree, on):
    return jax.lax.cond(on, clip, lambda t: t, tree)
  expect(run(TREE, True))
  assert oracle.same_bits(run(TREE, False), TREE)


def test_a_clip_inside_a_loop_whose_length_is_data(path):
  @jax.jit
  def run(tree, n):
    return jax.lax.fori_loop(0, n, lambda i, t: clip(t, 7.0 / (i + 2)), tree)
  expect(run(TREE, 3), 1 / 4)


def test_outside_of_jit_a_rematerialised_clip_runs_too(path):
  gradient = jax.grad(jax.checkpoint(lambda tree: ogc.global_norm(clip(tree, 0.5))))(TREE)
  jax.tree.map(lambda g: np.testing.assert_allclose(g, np.zeros_like(g), atol=1e-6), gradient)
  norm = jax.checkpoint(ogc.global_norm)(TREE)
  np.testing.assert_allclose(norm, NORM, rtol=1e-6)


def test_with_jit_disabled_everything_runs(path):
  with jax.disable_jit():
    np.testing.assert_allclose(ogc.global_norm(TREE), NORM, rtol=1e-6)
    expect(clip(TREE))
    tx = ogc.clipped_multi_steps(optax.identity(), 1.0, monitor=True)
    expect(tx.update(TREE, tx.init(TREE), TREE)[0])


@pytest.mark.parametrize("make", [ogc.global_clip, lambda m, **o: ogc.clipped_multi_steps(optax.identity(), m, **o)],
                         ids=["global_clip", "clipped_multi_steps"])
def test_finite_gradients_pass_under_debug_nans(make, path):
  tx = make(1.0, monitor=True)
  state = tx.init(TREE)
  with jax.debug_nans(True):
    expect(tx.update(TREE, state, TREE)[0])


# ----------------------------------------------------------------------------------------------------------------------
# vmap


FACTORS = np.array([1, 0.1, 100, np.nan, 0], np.float32)


def test_each_member_of_a_batch_has_its_own_norm(path):
  batch = jax.tree.map(lambda g: np.stack([g * f for f in FACTORS]), TREE)
  updates = jax.jit(jax.vmap(clip))(batch)
  norms = jax.vmap(ogc.global_norm)(batch)
  np.testing.assert_allclose(norms, NORM * FACTORS, rtol=1e-6)
  for i, factor in enumerate(FACTORS):
    member = jax.tree.map(lambda u: u[i], updates)
    if np.isnan(factor):
      assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(member))
    else:
      expect(member, min(factor, 1 / NORM))


def test_each_member_of_a_batch_of_batches_has_its_own_norm(path):
  batch = jax.tree.map(lambda g: np.stack([[g, g * 2, g * 0.1], [g * 3, g * 4, g * 5]]), TREE)
  norms = jax.jit(jax.vmap(jax.vmap(ogc.global_norm)))(batch)
  np.testing.assert_allclose(norms, NORM * np.array([[1, 2, 0.1], [3, 4, 5]]), rtol=1e-6)
  updates = jax.jit(jax.vmap(jax.vmap(clip)))(batch)
  after = jax.vmap(jax.vmap(ogc.global_norm))(updates)
  np.testing.assert_allclose(after, [[1, 1, 0.7], [1, 1, 1]], rtol=1e-6)


def test_a_batch_along_other_axes_or_of_thresholds_alone(path):
  rows = np.array([[3, 6], [4, 8]], np.float32)
  np.testing.assert_allclose(jax.vmap(clip, in_axes=1, out_axes=1)(rows), [[0.6, 0.6], [0.8, 0.8]], rtol=1e-6)
  clipped = jax.vmap(lambda m: ogc.clip_tree([np.array([3, 4], np.float32)], m)[0][0])(jnp.array([1.0, 2.5, 9.0]))
  np.testing.assert_allclose(clipped, [[0.6, 0.8], [1.5, 2.0], [3, 4]], rtol=1e-6)


def test_a_batch_of_which_one_leaf_is_shared(path):
  batched = np.array([[3], [6]], np.float32)
  shared = np.array([4], np.float32)
  norms = jax.vmap(lambda b, s: ogc.global_norm([b, s]), in_axes=(0, None))(batched, shared)
  np.testing.assert_allclose(norms, [5, np.sqrt(52)], rtol=1e-6)
  updates = jax.vmap(lambda b, s: clip([b, s]), in_axes=(0, None))(batched, shared)
  np.testing.assert_allclose(updates[1], 4 / np.array([[5], [np.sqrt(52)]]), rtol=1e-6)


def test_per_example_gradients_are_clipped_one_by_one(path):
  def loss(w, x):
    return jnp.dot(w, x)
  examples = np.array([[3, 4], [0.3, 0.4], [6, 8]], np.float32)
  clipped = jax.jit(jax.vmap(lambda x: clip(jax.grad(loss)(jnp.zeros(2), x))))(examples)
  np.testing.assert_allclose(clipped, [[0.6, 0.8], [0.3, 0.4], [0.6, 0.8]], rtol=1e-6)
