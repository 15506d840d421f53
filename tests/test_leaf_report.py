"""Which leaf made the gradient spike, or holds NaN?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import windows

pytestmark = pytest.mark.reference_repeats


def _tree():
  return {"a": jnp.array([3.0, 4.0]), "b": [jnp.array([12.0], jnp.float16), jnp.arange(3)], "none": None}


def _monitored(tx, tree, updates):
  return jax.jit(tx.update)(updates, tx.init(tree))[1]


@pytest.mark.parametrize("make", [ogc.global_clip, ogc.per_tensor_clip])
def test_a_state_and_a_tree_give_the_same_report(make, path):
  from_state = ogc.leaf_report(_monitored(make(1.0, monitor=True), _tree(), _tree()))
  from_tree = ogc.leaf_report(_tree())
  assert [row.path for row in from_state.rows] == ["b/0", "a"]
  for row, other in zip(from_state.rows, from_tree.rows, strict=True):
    assert row == other
  np.testing.assert_allclose([row.norm for row in from_tree.rows], [12.0, 5.0], rtol=1e-6)
  np.testing.assert_allclose([row.share for row in from_tree.rows], [144 / 169, 25 / 169], rtol=1e-6)


def test_leaves_that_are_not_finite_come_first_with_their_counts(path):
  tree = {"big": jnp.array([1e30]), "nan": jnp.array([jnp.nan, 1.0]), "infs": jnp.array([jnp.inf, -jnp.inf])}
  rows = ogc.leaf_report(_monitored(ogc.global_clip(1.0, monitor=True), tree, tree)).rows
  assert [(row.path, row.nonfinite) for row in rows] == [("infs", 2), ("nan", 1), ("big", 0)]
  assert rows[2].share == 1.0 and np.isnan(rows[0].share)


def test_norms_of_a_scaled_loss_are_in_true_units(path):
  tx = ogc.global_clip(1.0, loss_scale=8, monitor=True)
  rows = ogc.leaf_report(_monitored(tx, _tree(), _tree())).rows
  np.testing.assert_allclose([row.norm for row in rows], [1.5, 0.625], rtol=1e-6)


@pytest.mark.parametrize("every_k", [1, 2])
def test_of_a_window_it_tells_of_the_mean_gradient_until_the_next_one_ends(every_k, path):
  tx = ogc.clipped_multi_steps(optax.identity(), 1.0, every_k=every_k, monitor=True, loss_scale=8)
  run = windows.Run(tx, _tree())
  def rows():
    return [(row.path, round(row.norm, 4), row.nonfinite) for row in ogc.leaf_report(run.state).rows]
  for _ in range(every_k):
    assert rows() == [("a", 0, 0), ("b/0", 0, 0)]
    run(_tree())
  assert rows() == [("b/0", 1.5, 0), ("a", 0.625, 0)]
  bad = _tree() | {"a": jnp.array([jnp.nan, jnp.inf])}
  run(bad, boundary=True)
  assert not run.ran and [(path, count) for path, _, count in rows()] == [("a", 2), ("b/0", 0)]


def test_a_window_without_a_monitor_is_an_error_that_names_it():
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0)
  with pytest.raises(ValueError, match="clipped_multi_steps record leaves with monitor=True"):
    ogc.leaf_report(tx.init(_tree()))


def test_of_a_batch_of_states_one_has_to_be_taken():
  tx = ogc.global_clip(1.0, monitor=True)
  gradients = {"w": jnp.ones((3, 2))}
  states = jax.vmap(tx.update)(gradients, jax.vmap(tx.init)(gradients))[1]
  with pytest.raises(ValueError, match="got a batch of shape \\(3,\\): take a member"):
    ogc.leaf_report(states)
  assert ogc.leaf_report(jax.tree.map(lambda x: x[1], states)).rows[0].path == "w"


@pytest.mark.parametrize("what", [lambda state, tree: state, lambda state, tree: tree], ids=["state", "tree"])
def test_inside_jit_it_is_an_error_that_says_so(what):
  tx = ogc.global_clip(1.0, monitor=True)
  with pytest.raises(TypeError, match="leaf_report: expected concrete arrays"):
    jax.jit(lambda state, tree: len(ogc.leaf_report(what(state, tree)).rows))(tx.init(_tree()), _tree())


def test_it_prints_as_a_table():
  lines = str(ogc.leaf_report({"w": jnp.array([3.0, 4.0])})).splitlines()
  assert lines[0].split() == ["leaf", "norm", "share", "non-finite"]
  assert lines[1].split() == ["w", "5", "100.0%", "0"]


def test_a_norm_beyond_float32_has_the_whole_share(path):
  rows = ogc.leaf_report({"huge": jnp.full(4, 3e38), "small": jnp.ones(2)}).rows
  assert [(row.path, row.share) for row in rows] == [("huge", 1.0), ("small", 0.0)]


def test_zero_gradients_have_no_share(path):
  assert ogc.leaf_report([jnp.zeros(3)]).rows == (ogc.LeafRow("0", 0.0, 0.0, 0),)


def test_an_empty_tree_has_no_rows():
  assert ogc.leaf_report({}).rows == ()


@pytest.mark.parametrize("tx", [optax.chain(ogc.global_clip(1.0), optax.sgd(0.1)), optax.sgd(0.1, momentum=0.9)])
def test_a_state_without_a_monitored_clip_is_an_error_that_names_monitor(tx):
  with pytest.raises(ValueError, match="monitor=True"):
    ogc.leaf_report(tx.init(_tree()))


def test_updates_of_another_tree_than_init_saw_are_an_error():
  tx = ogc.global_clip(1.0, monitor=True)
  with pytest.raises(ValueError, match="init recorded 1 leaves .* but the updates have 2"):
    tx.update({"a": jnp.ones(2), "b": jnp.ones(2)}, tx.init({"a": jnp.ones(2)}))


def test_the_state_survives_a_scan(path):
  tx = ogc.global_clip(1.0, monitor=True)
  tree = {"w": jnp.ones(2)}
  def step(state, scale):
    return tx.update({"w": jnp.ones(2) * scale}, state)[1], None
  state, _ = jax.jit(lambda s: jax.lax.scan(step, s, jnp.array([1.0, 2.0])))(tx.init(tree))
  np.testing.assert_allclose(ogc.leaf_report(state).rows[0].norm, np.sqrt(8), rtol=1e-6)
