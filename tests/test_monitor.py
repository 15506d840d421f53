"""What `monitor=True` records, and that `clip_metrics` finds it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import programs
import pytest

pytestmark = pytest.mark.reference_repeats

STEPS = [1.0, 30.0, np.nan, np.inf, 5.0, 10.0, np.nan]
TREE = [np.array([0.6, 0.8], np.float32)]  # norm 1


def history(tx, factors=STEPS):
  step = jax.jit(lambda f, state: tx.update([TREE[0] * f], state)[1])
  state, out = tx.init(TREE), []
  for f in factors:
    state = step(np.float32(f), state)
    out.append({name: float(value) for name, value in ogc.clip_metrics(state).items()})
  return out


def column(rows, name):
  return [row[name] for row in rows]


def test_every_counter_counts_what_it_says(path):
  rows = history(ogc.global_clip(5.0, monitor=True))
  assert column(rows, "steps") == [1, 2, 3, 4, 5, 6, 7]
  assert column(rows, "clipped_steps") == [0, 1, 1, 1, 1, 2, 2]
  assert column(rows, "nonfinite_steps") == [0, 0, 1, 2, 2, 2, 3]
  assert column(rows, "consecutive_nonfinite") == [0, 0, 1, 2, 0, 0, 1]


def test_the_norm_is_that_before_the_clip_and_not_finite_where_the_gradient_is_not(path):
  norms = column(history(ogc.global_clip(5.0, monitor=True)), "global_norm")
  np.testing.assert_allclose([norms[i] for i in (0, 1, 4, 5)], [1, 30, 5, 10], rtol=1e-6)
  assert not np.isfinite([norms[i] for i in (2, 3, 6)]).any()


@pytest.mark.parametrize("policy, factor", [("propagate", np.nan), ("zero", 0)])
def test_the_factor_is_the_one_that_was_applied(policy, factor, path):
  factors = column(history(ogc.global_clip(5.0, monitor=True, on_nonfinite=policy)), "clip_factor")
  np.testing.assert_allclose(factors, [1, 1 / 6, factor, factor, 1, 0.5, factor], rtol=1e-6)


def test_before_the_first_step_all_are_zero():
  metrics = ogc.clip_metrics(ogc.global_clip(1.0, monitor=True).init(TREE))
  assert set(metrics) == {"global_norm", "clip_factor", "steps", "clipped_steps", "nonfinite_steps",
                          "consecutive_nonfinite", "largest_element", "zero_elements"}
  assert all(value == 0 and value.shape == () for value in metrics.values())


def test_of_per_tensor_factors_the_smallest_is_recorded_and_the_norm_is_the_trees(path):
  tx = ogc.per_tensor_clip(1.0, monitor=True)
  tree = [jnp.array([3.0]), jnp.array([4.0]), jnp.array([0.5])]
  metrics = ogc.clip_metrics(jax.jit(tx.update)(tree, tx.init(tree))[1])
  np.testing.assert_allclose(metrics["global_norm"], np.sqrt(25.25), rtol=1e-6)
  assert metrics["clip_factor"] == 0.25 and metrics["clipped_steps"] == 1


def test_per_tensor_steps_count_as_clipped_where_any_leaf_is(path):
  tx = ogc.per_tensor_clip(1.0, monitor=True)
  step = jax.jit(tx.update)
  state = tx.init([jnp.zeros(1)] * 2)
  for tree, clipped in (([0.9, 0.9], 0), ([0.9, 1.1], 1), ([1.0, 1.0], 1)):
    _, state = step([jnp.array([x]) for x in tree], state)
    assert state.clipped_steps == clipped


@pytest.mark.parametrize("monitor", [1, np.True_])
@pytest.mark.parametrize("make", [
    ogc.global_clip, ogc.per_tensor_clip, lambda m, **o: ogc.clipped_multi_steps(optax.identity(), m, **o)])
def test_what_is_true_monitors(make, monitor, path):
  tx = make(1.0, monitor=monitor)
  _, state = tx.update(TREE, tx.init(TREE), TREE)
  assert ogc.clip_metrics(state)["steps"] == 1 and len(ogc.leaf_report(state).rows) == len(TREE)


def test_max_inf_only_monitors(path):
  rows = history(ogc.global_clip(np.inf, monitor=True), [1.0, 1e20, 1e30])
  assert column(rows, "clipped_steps") == [0, 0, 0]
  np.testing.assert_allclose(column(rows, "global_norm"), [1, 1e20, 1e30], rtol=1e-6)


def test_metrics_are_found_anywhere_in_a_nested_state():
  tx = optax.chain(optax.identity(), optax.masked(optax.chain(ogc.global_clip(1.0, monitor=True), optax.sgd(0.1)), True))
  _, state = tx.update(TREE, tx.init(TREE))
  assert ogc.clip_metrics({"optimizer": [state, None]})["steps"] == 1


def test_none_or_several_monitors_are_an_error_that_says_how_many():
  with pytest.raises(ValueError, match="found 0.*monitor=True"):
    ogc.clip_metrics(ogc.global_clip(1.0).init(TREE))
  with pytest.raises(ValueError, match="found 0"):
    ogc.clip_metrics(TREE)
  several = optax.chain(ogc.global_clip(1.0, monitor=True), ogc.global_clip(2.0, monitor=True)).init(TREE)
  with pytest.raises(ValueError, match="found 2"):
    ogc.clip_metrics(several)


@pytest.mark.parametrize("made, wanted", [(True, False), ("leaves", False), (True, "leaves"), ("leaves", True)])
@pytest.mark.parametrize("make", [ogc.global_clip, ogc.per_tensor_clip, functools.partial(ogc.clipped_adamw, 0.1)],
                         ids=["global_clip", "per_tensor_clip", "clipped_adamw"])
@pytest.mark.parametrize("max_norm", [1.0, ogc.zclip()], ids=["number", "rule"])
def test_a_state_with_another_record_is_refused_and_not_dropped(make, max_norm, made, wanted):
  state = make(max_norm, monitor=made).init(TREE)
  tx = make(max_norm, monitor=wanted)
  words = f"state: made with monitor={made!r}, expected one made with monitor={wanted!r}: call init again"
  for function in (tx.update, tx.step) if hasattr(tx, "step") else (tx.update,):
    with pytest.raises(ValueError, match=words):
      function(TREE, state, TREE)


def test_a_state_of_a_rule_is_refused_by_a_number_and_not_dropped():
  with pytest.raises(ValueError, match="made with a schedule or a rule for max_norm, expected one made with a number"):
    ogc.global_clip(1.0).update(TREE, ogc.global_clip(ogc.zclip()).init(TREE))


@pytest.mark.parametrize("read", [ogc.clip_metrics, ogc.leaf_report, ogc.current_loss_scale, ogc.has_updated])
def test_a_state_that_was_restored_as_plain_dicts_is_an_error_that_says_how_to_restore_it(read):
  def plain(node):
    return {name: plain(x) for name, x in node._asdict().items()} if hasattr(node, "_asdict") else node
  state = ogc.clipped_multi_steps(optax.identity(), 1.0, monitor=True).init(TREE)
  for restored in plain(state), [{"0": plain(state)}]:
    with pytest.raises(ValueError, match=r"restored as plain dicts: restore it into jax.eval_shape\(tx.init, params\)"):
      read(restored)


def test_metrics_can_be_read_inside_a_compiled_step(path):
  tx = ogc.global_clip(5.0, monitor=True)
  @jax.jit
  def step(tree, state):
    _, state = tx.update(tree, state)
    return ogc.clip_metrics(state)["global_norm"]
  np.testing.assert_allclose(step(TREE, tx.init(TREE)), 1, rtol=1e-6)


def test_float64_parameters_have_a_float64_record(path, x64):
  tree = [np.array([3e200, 4e200])]
  tx = ogc.global_clip(1.0, monitor=True)
  state = tx.init(tree)
  assert state.global_norm.dtype == jnp.float64
  _, state = jax.jit(tx.update)(tree, state)
  np.testing.assert_allclose(state.global_norm, 5e200, rtol=1e-15)
  np.testing.assert_allclose(state.clip_factor, 2e-201, rtol=1e-15)


def test_python_floats_are_recorded_in_their_own_dtype(path, x64):
  tx = ogc.global_clip(1.0, monitor=True)
  _, state = tx.update({"w": 1e200}, tx.init({"w": 1e200}))
  assert ogc.clip_metrics(state)["global_norm"] == 1e200 == ogc.leaf_report(state).rows[0].norm


def test_counters_stop_at_the_largest_int32_and_do_not_wrap(path):
  tx = ogc.global_clip(1.0, monitor=True)
  state = tx.init(TREE)._replace(steps=jnp.int32(2**31 - 1), nonfinite_steps=jnp.int32(2**31 - 1))
  _, state = tx.update([TREE[0] * np.float32(np.nan)], state)
  assert state.steps == 2**31 - 1 and state.nonfinite_steps == 2**31 - 1


def test_the_largest_element_and_the_zeros_are_recorded_in_true_units(path):
  tree = [np.array([3, -40, 0], np.float32), np.array([0, 1], np.float16), np.zeros((0, 3), np.float32)]
  for scale in 1.0, 8.0, 10.0:
    metrics = programs.clip(path)(tree, 1.0, loss_scale=jnp.float32(scale))[1]
    np.testing.assert_allclose(metrics["largest_element"], 40 / scale, rtol=1e-6)
    assert metrics["zero_elements"] == 2


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_the_largest_element_is_infinite_beside_one_that_is_not_finite(path, bad):
  tree = [np.array([3, bad, 0], np.float32)]
  metrics = programs.clip(path)(tree, 1.0)[1]
  assert metrics["largest_element"] == np.inf and metrics["zero_elements"] == 1


def test_windows_record_the_largest_element_of_their_mean(path):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 100.0, every_k=2, monitor=True, loss_scale=4.0)
  state = tx.init([jnp.zeros(3)])
  for gradient in [8.0, 0.0, -16.0], [8.0, 0.0, 0.0]:
    _, state = jax.jit(tx.update)([jnp.array(gradient)], state)
  metrics = ogc.clip_metrics(state)
  assert metrics["largest_element"] == 2 and metrics["zero_elements"] == 1
