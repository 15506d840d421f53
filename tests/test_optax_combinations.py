"""The clip among optax's own transformations, in place of `optax.clip_by_global_norm`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest

pytestmark = pytest.mark.reference_repeats

PARAMS = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
SPIKE = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])}  # norm 13


def run(tx, gradients, params=PARAMS):
  """The updates of every step, under jit, params unchanged."""
  step = jax.jit(lambda g, s, p: tx.update(g, s, p))
  state, out = tx.init(params), []
  for g in gradients:
    updates, state = step(g, state, params)
    out.append(updates)
  return out, state


def expect(updates, a, b, rtol=1e-6):
  np.testing.assert_allclose(updates["a"], a, rtol=rtol)
  np.testing.assert_allclose(updates["b"], b, rtol=rtol)


def test_in_a_chain_with_sgd(path):
  (updates,), _ = run(optax.chain(ogc.global_clip(6.5), optax.sgd(0.1)), [SPIKE])
  expect(updates, [-0.15, -0.2], [-0.6])


def test_in_front_of_adamw_it_is_what_clipping_by_hand_gives(path, standard_promotion):
  clipped = jax.tree.map(lambda g: g / 13, SPIKE)
  small = jax.tree.map(lambda g: g / 26, SPIKE)
  got, state = run(optax.chain(ogc.global_clip(1.0), optax.adamw(3e-4)), [SPIKE, small, SPIKE])
  want, want_state = run(optax.chain(optax.identity(), optax.adamw(3e-4)), [clipped, small, clipped])
  for one, other in zip((got, state), (want, want_state), strict=True):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), one, other)


def test_the_default_state_is_empty_and_state_none_is_tolerated(path):
  tx = ogc.global_clip(1.0)
  assert tx.init(PARAMS) == optax.EmptyState()
  updates, state = tx.update(SPIKE, None)
  assert state == optax.EmptyState()
  expect(updates, [3 / 13, 4 / 13], [12 / 13])


@pytest.mark.parametrize("state", [None, optax.EmptyState(), (), {}], ids=repr)
def test_a_monitor_without_its_state_is_a_type_error(state):
  for make in (ogc.global_clip, ogc.per_tensor_clip):
    with pytest.raises(TypeError, match="ClipState"):
      make(1.0, monitor=True).update(SPIKE, state)


@pytest.mark.parametrize("monitor", [False, True])
def test_init_takes_shapes_alone(monitor, path):
  shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), PARAMS)
  tx = ogc.global_clip(1.0, monitor=monitor)
  from_shapes, from_params = tx.init(shapes), tx.init(PARAMS)
  assert oracle.same_bits(from_shapes, from_params)
  abstract = jax.eval_shape(tx.init, shapes)
  assert jax.tree.structure(abstract) == jax.tree.structure(from_params)


@pytest.mark.parametrize("monitor", [False, True])
def test_the_state_keeps_its_structure_and_dtypes(monitor, path):
  tx = ogc.global_clip(1.0, monitor=monitor)
  state = tx.init(PARAMS)
  _, after = jax.jit(tx.update)(SPIKE, state)
  assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) == jax.tree.map(
      lambda x: (x.shape, x.dtype, x.weak_type), after)


def test_inside_multi_steps_the_mean_is_clipped_and_in_front_of_it_every_micro_batch(path, standard_promotion):
  params = jnp.zeros(1)
  gradients = [jnp.array([10.0]), jnp.array([-9.0])]
  inside, _ = run(optax.MultiSteps(optax.chain(ogc.global_clip(5.0), optax.sgd(1.0)), 2), gradients, params)
  np.testing.assert_allclose(inside[1], [-0.5], rtol=1e-6)
  outside, _ = run(optax.chain(ogc.global_clip(5.0), optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()),
                   gradients, params)
  np.testing.assert_array_equal(outside[1], [0.0])


def test_inside_multi_steps_with_adamw_it_is_what_clipping_by_hand_gives(path, standard_promotion):
  mean = jax.tree.map(lambda g: g * 1.5, SPIKE)
  got, _ = run(optax.MultiSteps(optax.chain(ogc.global_clip(1.0), optax.adamw(3e-4)), 2),
               [SPIKE, jax.tree.map(lambda g: g * 2, SPIKE)])
  want, _ = run(optax.adamw(3e-4), [jax.tree.map(lambda g: g / 19.5, mean)])
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got[1], want[0])


def test_apply_if_finite_still_sees_what_is_not_finite(path):
  bad = {"a": jnp.array([jnp.inf, 1.0]), "b": jnp.array([1.0])}
  tx = optax.apply_if_finite(optax.chain(ogc.global_clip(6.5), optax.sgd(1.0)), max_consecutive_errors=2)
  (first, second), state = run(tx, [bad, SPIKE])
  expect(first, [0, 0], [0])
  expect(second, [-1.5, -2], [-6])
  assert state.total_notfinite == 1


def test_inject_hyperparams_makes_the_threshold_a_number_that_can_be_changed(path, standard_promotion):
  tx = optax.inject_hyperparams(ogc.global_clip)(max_norm=6.5)
  state = tx.init(PARAMS)
  assert set(state.hyperparams) == {"max_norm"}
  step = jax.jit(tx.update)
  updates, state = step(SPIKE, state)
  expect(updates, [1.5, 2], [6])
  state.hyperparams["max_norm"] = jnp.float32(1.3)
  updates, _ = step(SPIKE, state)
  expect(updates, [0.3, 0.4], [1.2])


def test_inject_hyperparams_takes_schedules_and_a_loss_scale(path, standard_promotion):
  tx = optax.inject_hyperparams(ogc.global_clip)(max_norm=lambda step: 6.5 / (step + 1), loss_scale=2.0, monitor=True,
                                                on_nonfinite="zero", scale_stage="auto")
  assert set(tx.init(PARAMS).hyperparams) == {"max_norm", "loss_scale"}
  (first, second), state = run(tx, [jax.tree.map(lambda g: g * 2, SPIKE)] * 2)
  expect(first, [1.5, 2], [6])
  expect(second, [0.75, 1], [3])
  np.testing.assert_allclose(ogc.clip_metrics(state)["global_norm"], 13, rtol=1e-6)


def test_hyperparams_of_bfloat16_parameters_are_bfloat16_unless_hyperparam_dtype_says_otherwise(path, standard_promotion):
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  spike = jax.tree.map(lambda g: g.astype(jnp.bfloat16), SPIKE)
  narrow = optax.inject_hyperparams(ogc.global_clip)(max_norm=1.003)
  wide = optax.inject_hyperparams(ogc.global_clip, hyperparam_dtype=jnp.float32)(max_norm=1.003)
  assert narrow.init(params).hyperparams["max_norm"].dtype == jnp.bfloat16
  assert wide.init(params).hyperparams["max_norm"] == np.float32(1.003)
  for tx in (narrow, wide):
    updates, _ = jax.jit(tx.update)(spike, tx.init(params))
    assert updates["a"].dtype == jnp.bfloat16
    expect(jax.tree.map(lambda u: u.astype(jnp.float32), updates), [3 / 13, 4 / 13], [12 / 13], rtol=2**-7)


def test_masked_leaves_are_left_alone(path):
  tx = optax.masked(ogc.global_clip(1.0, monitor=True), {"a": True, "b": False})
  (updates,), state = run(tx, [SPIKE])
  expect(updates, [0.6, 0.8], [12])
  assert ogc.clip_metrics(state)["global_norm"] == 5


def test_one_clip_before_a_partition_is_global_and_one_inside_each_label_is_not(path):
  gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
  labels = {"a": "one", "b": "other"}
  sgd = optax.scale(1.0)
  before = optax.chain(ogc.global_clip(1.0), optax.partition({"one": sgd, "other": sgd}, labels))
  inside = optax.partition({"one": optax.chain(ogc.global_clip(1.0), sgd), "other": optax.chain(ogc.global_clip(1.0), sgd)},
                           labels)
  expect(run(before, [gradients])[0][0], [0.6, 0], [0.8])
  expect(run(inside, [gradients])[0][0], [1, 0], [1])


def test_per_tensor_clip_replaces_clip_by_block_rms(path):
  (updates,), _ = run(optax.chain(ogc.per_tensor_clip(1.0), optax.scale(-1.0)), [SPIKE])
  expect(updates, [-0.6, -0.8], [-1])


def test_named_chain_and_tree_get_find_the_monitor(path):
  tx = optax.named_chain(("clip", ogc.global_clip(1.0, monitor=True)), ("sgd", optax.sgd(0.1, momentum=0.9)))
  _, state = run(tx, [SPIKE, SPIKE])
  assert optax.tree.get(state, "clipped_steps") == 2
  assert optax.tree.get(state, "global_norm") == 13


def test_extra_arguments_reach_the_clip_through_a_chain(path):
  tx = optax.chain(ogc.global_clip(100.0), optax.scale(-1.0))
  step = jax.jit(functools.partial(tx.update, loss_scale=jnp.float32(2)))
  updates, _ = step(SPIKE, tx.init(PARAMS))
  expect(updates, [-1.5, -2], [-6])


@pytest.mark.parametrize("max_norm", [0.5, 13.0, 100.0])
def test_where_optax_is_right_both_agree(max_norm, path):
  ours, _ = run(ogc.global_clip(max_norm), [SPIKE])
  stock, _ = run(optax.clip_by_global_norm(max_norm), [SPIKE])
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), ours, stock)
  np.testing.assert_allclose(ogc.global_norm(SPIKE), optax.global_norm(SPIKE), rtol=1e-6)


def test_tree_set_changes_a_threshold_and_tree_map_params_sees_what_mirrors_the_parameters(path, standard_promotion):
  tx = optax.inject_hyperparams(ogc.global_clip)(max_norm=6.5)
  updates, _ = tx.update(SPIKE, optax.tree.set(tx.init(PARAMS), max_norm=jnp.float32(1.3)))
  expect(updates, [0.3, 0.4], [1.2])
  steps = ogc.clipped_multi_steps(optax.adam(1e-3), 1.0, every_k=2, monitor=True)
  marked = optax.tree.map_params(steps, lambda leaf: "a parameter's", steps.init(PARAMS), transform_non_params=lambda leaf: None)
  moments = marked.inner_state[0]
  for tree in (moments.mu, moments.nu, marked.accumulators):
    assert tree == {"a": "a parameter's", "b": "a parameter's"}
  assert jax.tree.leaves(marked.clip_state) == []


def test_a_lookahead_around_the_clip_is_what_clipping_by_hand_gives(path, standard_promotion):
  def trained(fast, gradients):
    tx = optax.lookahead(fast, sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(PARAMS)
    state = tx.init(params)
    for g in gradients:
      updates, state = jax.jit(tx.update)(g, state, params)
      params = optax.apply_updates(params, updates)
    return params.slow
  got = trained(optax.chain(ogc.global_clip(1.3), optax.sgd(1.0)), [SPIKE] * 4)
  want = trained(optax.sgd(1.0), [jax.tree.map(lambda g: g / 10, SPIKE)] * 4)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want)


def test_schedule_free_around_the_clip_is_what_clipping_by_hand_gives(path, standard_promotion):
  def trained(base, gradients):
    tx = optax.contrib.schedule_free(base, learning_rate=0.5, b1=0.9)
    params, state = PARAMS, tx.init(PARAMS)
    for g in gradients:
      updates, state = jax.jit(tx.update)(g, state, params)
      params = optax.apply_updates(params, updates)
    return params
  got = trained(optax.chain(ogc.global_clip(1.3), optax.sgd(0.5)), [SPIKE] * 3)
  want = trained(optax.sgd(0.5), [jax.tree.map(lambda g: g / 10, SPIKE)] * 3)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, want)
