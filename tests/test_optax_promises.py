"""Does what optax's documentation says of its clip, `MultiSteps` and `apply_if_finite` hold here too, but where said?

A test's docstring quotes the sentence; `test_difference_n` is number n of docs/coming_from_optax.md.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
import windows
from windows import f32

pytestmark = [pytest.mark.reference_repeats, pytest.mark.usefixtures("standard_promotion", "path")]
NAN, INF = np.nan, np.inf
GRADIENTS = {"w": f32(3, 4), "b": f32(12)}  # norm 13


def of(values):
  return jax.tree.map(jnp.asarray, values)


def clipped(tree, max_norm):
  """By optax and by us."""
  return [tx.update(tree, tx.init(tree))[0] for tx in (optax.clip_by_global_norm(max_norm), ogc.global_clip(max_norm))]


def multi_steps(inner, k, max_norm=INF, **options):
  """optax's windows and ours, of the same meaning."""
  theirs = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(max_norm), inner) if max_norm < INF else inner, k, **options)
  return theirs.gradient_transformation(), ogc.clipped_multi_steps(inner, max_norm, every_k=k)


# ----------------------------------------------------------------------------------------------------------------------
# clip_by_global_norm


def test_updates_are_clipped_using_their_global_norm():
  """Clips updates using their global norm. max_norm: The maximum global norm for an update."""
  for updates in clipped(of(GRADIENTS), 6.5):
    np.testing.assert_allclose(oracle.norm(updates), 6.5, rtol=1e-6)
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, g / 2, rtol=1e-6), updates, GRADIENTS)
  for updates in clipped(of(GRADIENTS), 13.5):
    assert oracle.same_bits(updates, of(GRADIENTS))


def test_a_clip_is_a_gradient_transformation_without_a_state():
  """Returns: A GradientTransformation object."""
  for tx in (optax.clip_by_global_norm(1.0), ogc.global_clip(1.0)):
    assert isinstance(tx, optax.GradientTransformation)
    assert tx.init({"w": 0.0}) == optax.EmptyState()


def test_difference_1_norms_of_half_precision():
  theirs, ours = clipped(jnp.full(9, 2000, jnp.float16), 3.0)
  assert (theirs == 0).all() and (ours == 1).all()


def test_difference_2_large_gradients():
  theirs, ours = clipped(jnp.full(4, 1e20, jnp.float32), 1.0)
  assert (theirs == 0).all()
  np.testing.assert_allclose(ours, 0.5, rtol=1e-6)


def test_difference_3_small_gradients():
  gradients = jnp.full(4, 1e-4, jnp.float16)
  theirs, ours = clipped(gradients, 1e-4)
  assert (theirs == gradients).all()
  np.testing.assert_allclose(ours.astype(np.float32), 5e-5, rtol=2e-3)


def test_difference_4_many_leaves_of_half_precision():
  theirs, ours = (oracle.norm(updates) for updates in clipped([jnp.ones(1, jnp.bfloat16)] * 324, 1.0))
  np.testing.assert_allclose([theirs, ours], [18 / 16, 1], rtol=2**-7)


def test_difference_5_a_norm_equal_to_the_threshold():
  gradients = f32(0.1, 0.2, 0.3)
  theirs, ours = clipped(gradients, optax.tree.norm(gradients))
  assert (theirs != gradients).any()
  theirs, ours = clipped(gradients, ogc.global_norm(gradients))
  assert oracle.same_bits(ours, gradients)


def test_difference_6_zero_at_a_threshold_of_zero():
  theirs, ours = clipped(jnp.zeros(2), 0.0)
  assert np.isnan(theirs).all() and (ours == 0).all()


def test_difference_7_a_threshold_of_infinity():
  gradients = jnp.full(4, 1e20, jnp.float32)
  theirs, ours = clipped(gradients, INF)
  assert np.isnan(theirs).all() and oracle.same_bits(ours, gradients)


def test_difference_8_one_infinity():
  theirs, ours = clipped(f32(2, INF, 4), 1.0)
  np.testing.assert_array_equal(theirs, [0, NAN, 0])
  assert np.isnan(ours).all()


def test_difference_9_a_negative_threshold():
  assert (optax.clip_by_global_norm(-1.0).update(f32(3, 4), ())[0] < 0).all()
  with pytest.raises(ValueError, match="negative"):
    ogc.global_clip(-1.0)
  assert np.isnan(ogc.global_clip(jnp.float32(-1)).update(f32(3, 4), ())[0]).all()


def test_difference_10_leaves_that_are_no_gradients():
  tree = {"w": f32(3, 4), "steps": jnp.int32(12)}
  with pytest.raises(TypeError):
    optax.clip_by_global_norm(1.0).update(tree, ())
  updates, _ = ogc.global_clip(1.0).update(tree, ())
  np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)
  assert updates["steps"] == 12
  narrow = {"w": jnp.zeros(2, jnp.float8_e4m3fn)}
  optax.clip_by_global_norm(1.0).update(narrow, ())
  with pytest.raises(TypeError, match="float8"):
    ogc.global_clip(1.0).update(narrow, ())


def test_difference_11_a_threshold_of_another_dtype():
  gradients = jnp.array([3, 4], jnp.bfloat16)
  with pytest.raises(TypeError):
    optax.clip_by_global_norm(jnp.float32(1)).update(gradients, ())
  np.testing.assert_allclose(ogc.global_clip(jnp.float32(1)).update(gradients, ())[0].astype(np.float32), [0.6, 0.8], rtol=2**-7)


def test_difference_12_update_takes_a_loss_scale_and_ignores_the_rest():
  with pytest.raises(TypeError):
    optax.clip_by_global_norm(1.0).update(f32(6, 8), (), loss_scale=2.0)
  updates, _ = ogc.global_clip(100.0).update(f32(6, 8), (), loss_scale=2.0, value=1.0)
  np.testing.assert_array_equal(updates, [3, 4])


# ----------------------------------------------------------------------------------------------------------------------
# MultiSteps


def test_updates_are_collected_and_zero_until_the_number_of_steps_is_reached():
  """The returned value is a tree of zeros of the same shape; then the gradients accumulated are passed to the wrapped
  optimizer's update, its state being updated; the accumulated gradients are set back to zero and the process starts
  again."""
  for tx in multi_steps(optax.sgd(1.0, momentum=0.5), 3):
    run = windows.Run(tx, f32(0, 0))
    emitted = [run(f32(g, 2 * g)) for g in (1, 2, 6, 3, 3, 3)]
    for index in (0, 1, 3, 4):
      np.testing.assert_array_equal(emitted[index], [0, 0])
    np.testing.assert_allclose(emitted[2], [-3, -6], rtol=1e-6)
    np.testing.assert_allclose(emitted[5], [-4.5, -9], rtol=1e-6)


def test_the_number_of_micro_batches_can_vary():
  """As a function, it returns how many mini-steps should be accumulated. Its only argument is the current gradient step
  count."""
  for tx in multi_steps(optax.sgd(1.0), lambda step: jnp.where(step < 1, 1, 2)):
    run = windows.Run(tx, f32(0))
    assert [run(f32(g)).item() for g in (5, 1, 3, 2, 4)] == [-5, 0, -2, 0, -3]


def test_the_inner_optimizer_counts_windows():
  """In the wrapped optimizer schedules and counts are of gradient steps."""
  for tx in multi_steps(optax.sgd(lambda count: 1.0 + count), 2):
    run = windows.Run(tx, f32(0))
    assert [run(f32(1)).item() for _ in range(6)] == [0, -1, 0, -2, 0, -3]


def test_difference_13_the_optimizer_does_not_run_between_boundaries():
  calls = []

  def update_fn(updates, state, params=None):
    jax.debug.callback(lambda: calls.append(1))
    return updates, state

  counts = []
  for tx in multi_steps(optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn), 4):
    run = windows.Run(tx, f32(0))
    for _ in range(4):
      run(f32(1))
    jax.effects_barrier()
    counts.append(len(calls))
    calls.clear()
  assert counts == [4, 1]


def test_difference_14_a_nan_does_not_stay():
  last = []
  for tx in multi_steps(optax.sgd(1.0), 2):
    run = windows.Run(tx, f32(0))
    last.append([run(f32(g)).item() for g in (NAN, 1, 2, 2)][-1])
  assert np.isnan(last[0]) and last[1] == -2


def test_difference_15_moments_of_half_precision_parameters():
  params = jnp.zeros(2, jnp.bfloat16)
  theirs, ours = (optax.tree.get(tx.init(params), "mu") for tx in multi_steps(optax.adam(1e-3), 2))
  assert theirs.dtype == jnp.bfloat16 and ours.dtype == jnp.float32


def test_difference_16_a_sum_instead_of_a_mean():
  theirs, _ = multi_steps(optax.sgd(1.0), 2, 5.0, use_grad_mean=False)
  ours = ogc.clipped_multi_steps(optax.chain(optax.scale(2), optax.sgd(1.0)), 5.0 / 2, every_k=2)
  for gradients in ((3, 1), (10, -4), (1, 1)):
    one, other = windows.Run(theirs, f32(0)), windows.Run(ours, f32(0))
    got = [(one(f32(g)).item(), other(f32(g)).item()) for g in gradients]
    np.testing.assert_allclose(got[-1][0], got[-1][1], rtol=1e-6)


def test_difference_17_a_dropped_micro_batch_fills_its_place():
  theirs, ours = multi_steps(optax.sgd(1.0), 2, should_skip_update_fn=optax.skip_not_finite)
  run = windows.Run(theirs, f32(0))
  assert [run(f32(g)).item() for g in (2, NAN, 4)] == [0, 0, -3]
  run = windows.Run(ours, f32(0))
  assert [run(f32(g), weight=float(np.isfinite(g))).item() for g in (2, NAN, 4)] == [0, -2, 0]


def test_difference_18_a_window_ended_early_and_weighed():
  run = windows.Run(ogc.clipped_multi_steps(optax.sgd(1.0), INF, every_k=4), f32(0))
  assert [run(f32(1), weight=3.0).item(), run(f32(5), weight=1.0, boundary=True).item()] == [0, -2]


# ----------------------------------------------------------------------------------------------------------------------
# apply_if_finite


def robust(inner, errors=2):
  return optax.apply_if_finite(inner, errors), ogc.clipped_multi_steps(inner, INF)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_gradient_that_is_not_finite_is_ignored(bad):
  """When a NaN or Inf is detected in the gradients, the wrapped optimizer ignores that gradient update."""
  for tx in robust(optax.sgd(1.0, momentum=0.5)):
    run = windows.Run(tx, f32(0, 0))
    assert [run(f32(*g)).tolist() for g in ((2, 2), (1, bad), (2, 2))] == [[-2, -2], [0, 0], [-3, -3]]


def test_difference_19_nothing_gives_up():
  """If the NaNs or Infs persist after a given number of updates, the wrapped optimizer gives up and accepts."""
  theirs, ours = (windows.Run(tx, f32(0)) for tx in robust(optax.sgd(1.0)))
  assert np.isnan([theirs(f32(NAN)).item() for _ in range(3)]).tolist() == [False, False, True]
  assert [ours(f32(NAN)).item() for _ in range(10)] == [0] * 10
  assert ours.metrics["consecutive_nonfinite"] == 10


def test_difference_20_the_names_of_the_counters():
  theirs, ours = (windows.Run(tx, f32(0)) for tx in robust(optax.sgd(1.0)))
  for gradient in (1, NAN, INF, 2, NAN):
    theirs(f32(gradient)), ours(f32(gradient))
    assert theirs.state.notfinite_count == ours.metrics["consecutive_nonfinite"]
    assert theirs.state.total_notfinite == ours.metrics["nonfinite_steps"]
    assert theirs.state.last_finite == (ours.metrics["consecutive_nonfinite"] == 0)


def test_difference_21_a_sum_that_overflows_is_bad():
  theirs = windows.Run(optax.apply_if_finite(optax.MultiSteps(optax.sgd(1.0), 2, use_grad_mean=False).gradient_transformation(),
                                             9), f32(0))
  ours = windows.Run(ogc.clipped_multi_steps(optax.sgd(1.0), INF, every_k=2), f32(0))
  assert [theirs(f32(3e38)).item() for _ in range(2)] == [0, -INF]
  assert [ours(f32(3e38)).item() for _ in range(2)] == [0, 0]
  assert ours.metrics["nonfinite_steps"] == 1


def test_every_numbered_difference_is_a_test():
  page = (pathlib.Path(__file__).parents[1] / "docs/coming_from_optax.md").read_text()
  said = [int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)]
  shown = [int(name.split("_")[2]) for name in globals() if name.startswith("test_difference_")]
  assert said == shown == list(range(1, len(said) + 1))
