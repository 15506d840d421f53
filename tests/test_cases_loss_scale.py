"""Cases 24 to 32: gradients of a scaled loss, and the scale that follows them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import windows
from windows import f32

pytestmark = pytest.mark.reference_repeats

INF = np.inf


def of_one(*, max_norm=1.0, **options):
  """The plain mixed-precision step: a window of one in front of sgd at rate 1."""
  return ogc.clipped_multi_steps(optax.sgd(1.0), max_norm, **options)


def both(max_norm, loss_scale=None):
  """The clip by itself and the window of one, which subtracts what the clip gives."""
  clip = windows.Run(ogc.global_clip(max_norm, loss_scale=loss_scale, monitor=True), jnp.zeros(2))
  steps = windows.Run(of_one(max_norm=max_norm, loss_scale=loss_scale), jnp.zeros(2))
  return (clip, 1), (steps, -1)


CASE_24 = 1024.0, f32(307.2, 409.6), f32(0.3, 0.4), 0.5
CASE_25 = 8.0, f32(240, 320), f32(0.6, 0.8), 50.0


@pytest.mark.parametrize("scale, scaled, want, norm", [CASE_24, CASE_25])
def test_24_25_a_scale_at_construction_puts_threshold_metric_and_updates_in_true_units(path, scale, scaled, want, norm):
  for run, sign in both(1.0, loss_scale=scale):
    np.testing.assert_allclose(run(scaled), sign * want, rtol=1e-6)
    assert run.metrics["global_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("at_construction", [None, 2.0])
def test_24_25_a_scale_passed_to_update_does_so_too_and_wins(path, at_construction):
  for run, sign in both(1.0, loss_scale=at_construction):
    for scale, scaled, want, norm in CASE_24, CASE_25:
      np.testing.assert_allclose(run(scaled, loss_scale=scale), sign * want, rtol=1e-6)
      assert run.metrics["global_norm"] == pytest.approx(norm, rel=1e-6)


def test_unscaling_is_a_division_rounded_once(path):
  rng = np.random.default_rng(0)
  for run, sign in both(np.inf):
    for scale in 1000.0, 2.0**127, 3.0, float(np.float32(0.1)):
      true = rng.uniform(1, 2, 2).astype(np.float32)
      scaled = np.float32(true * np.float32(scale))
      want = np.float32(np.float64(scaled) / np.float32(scale))
      np.testing.assert_array_equal(run(scaled, loss_scale=scale), sign * want)
    np.testing.assert_array_equal(run(f32(3000, 1000), loss_scale=1000.0), sign * f32(3, 1))


def test_26_float16_gradients_do_not_flush_to_zero_when_unscaled(path):
  scaled = np.full(4, 2.0**-10, np.float16)
  clip = windows.Run(ogc.global_clip(1.0, loss_scale=65536.0, monitor=True), jnp.zeros(4, jnp.float16))
  steps = windows.Run(of_one(loss_scale=65536.0), jnp.zeros(4, jnp.float32))
  for run, sign in (clip, 1), (steps, -1):
    updates = run(scaled)
    assert updates.dtype == np.float32
    np.testing.assert_allclose(updates, np.full(4, sign * 2.0**-26, np.float32), rtol=1e-6)
    assert run.metrics["global_norm"] == pytest.approx(2.980232e-8, rel=1e-6)


@pytest.mark.parametrize("every_k", [1, 2])
def test_27_the_scale_is_float32_among_float16_gradients_and_parameters(path, every_k):
  run = windows.Run(of_one(every_k=every_k, max_norm=10.0, loss_scale=ogc.DynamicLossScale(65536.0)),
                    jnp.zeros(2, jnp.float16))
  scale = ogc.current_loss_scale(run.state)
  assert scale.dtype == np.float32 and float(scale) == 65536.0
  for _ in range(every_k):
    updates = run(np.full(2, 2.0**-3 * 65536, np.float16))
  np.testing.assert_array_equal(updates, np.full(2, -(2.0**-3), np.float16))
  assert run.scale == 65536.0


def test_27_injected_scale_of_65536_needs_the_documented_dtype(path):
  inject = optax.inject_hyperparams(ogc.global_clip, hyperparam_dtype=jnp.float32)
  run = windows.Run(inject(max_norm=1.0, loss_scale=65536.0), jnp.zeros(1, jnp.float16))
  np.testing.assert_allclose(run(np.full(1, 2.0**15, np.float16)), f32(0.5), rtol=1e-6)


@pytest.mark.parametrize("every_k", [1, 2])
def test_28_overflow_in_float16_is_skipped_and_the_next_step_applies_once(path, every_k):
  run = windows.Run(of_one(every_k=every_k, loss_scale=ogc.DynamicLossScale(65536.0)), jnp.zeros(1))
  emitted = []
  for _ in range(3 * every_k):
    with np.errstate(over="ignore"):
      emitted.append(float(run(np.asarray([run.scale], np.float16))[0]))
  skipped = [0.0] * every_k
  applied = [0.0] * (every_k - 1) + [-1.0]
  assert emitted == skipped + applied + applied
  assert run.scale == 32768.0
  assert run.metrics["nonfinite_steps"] == 1 and run.metrics["consecutive_nonfinite"] == 0


def test_29_growth_ends_at_the_maximum_and_updates_stay_right(path):
  run = windows.Run(of_one(max_norm=10.0, loss_scale=ogc.DynamicLossScale(2.0**15, growth_interval=1)), jnp.zeros(2))
  scales = []
  for _ in range(120):
    np.testing.assert_array_equal(run(f32(1, -0.5) * np.float32(run.scale)), f32(-1, 0.5))
    scales.append(run.scale)
  assert scales[110] == 2.0**126 and scales[111] == 2.0**127
  assert set(scales[111:]) == {2.0**127}


@pytest.mark.parametrize("floor, want", [(1.0, [2, 1, 1, 1, 1]), (0.25, [2, 1, 0.5, 0.25, 0.25])])
def test_30_backoff_ends_at_the_minimum(floor, want):
  run = windows.Run(of_one(loss_scale=ogc.DynamicLossScale(4.0, minimum=floor)), jnp.zeros(1))
  scales = []
  for _ in range(5):
    run(f32(np.nan))
    scales.append(run.scale)
  assert scales == want
  assert run.metrics["consecutive_nonfinite"] == 5


def test_31_good_windows_are_counted_across_a_save():
  run = windows.Run(of_one(loss_scale=ogc.DynamicLossScale(8.0, growth_interval=5)), jnp.zeros(1))
  for step in range(5):
    if step == 3:
      run.state = windows.through_numpy(run.state)
    assert run.scale == 8.0
    run(f32(8))
  assert run.scale == 16.0
  for _ in range(5):
    assert run.scale == 16.0
    run(f32(16))
  assert run.scale == 32.0


@pytest.mark.parametrize("every_k", [1, 2])
def test_32_a_skipped_window_does_not_advance_the_schedule(path, every_k):
  sgd = optax.sgd(lambda count: jnp.float32(0.1) * (count + 1).astype(jnp.float32))
  run = windows.Run(ogc.clipped_multi_steps(sgd, 10.0, every_k=every_k), jnp.zeros(1))
  emitted = [[float(run(f32(g))[0]) for _ in range(every_k)][-1] for g in (1, INF, 1)]
  np.testing.assert_allclose(emitted, [-0.1, 0, -0.2], rtol=1e-6)


def test_good_windows_start_over_after_a_bad_one():
  run = windows.Run(of_one(loss_scale=ogc.DynamicLossScale(8.0, growth_interval=3)), jnp.zeros(1))
  scales = []
  for gradient in (1, 1, np.nan, 1, 1, 1, 1):
    run(f32(gradient))
    scales.append(run.scale)
  assert scales == [8, 8, 4, 4, 4, 8, 8]


@pytest.mark.parametrize("on_nonfinite, want", [("skip", 0), ("zero", 0), ("propagate", np.nan)])
@pytest.mark.parametrize("every_k", [1, 2])
def test_the_scale_backs_off_once_a_window_under_every_policy(path, on_nonfinite, want, every_k):
  tx = of_one(every_k=every_k, on_nonfinite=on_nonfinite, loss_scale=ogc.DynamicLossScale(8.0))
  run = windows.Run(tx, jnp.zeros(2))
  for micro_batch in range(every_k):
    assert run.scale == 8.0
    updates = run(f32(np.nan, 1))
  np.testing.assert_array_equal(updates, f32(want, want))
  assert run.scale == 4.0
  assert run.ran == (on_nonfinite != "skip")
  assert not np.isfinite(run.metrics["global_norm"])
  for _ in range(every_k):
    updates = run(f32(2.4, 3.2))
  np.testing.assert_allclose(updates, f32(-0.6, -0.8), rtol=1e-6)


def test_a_scale_for_one_call_wins_and_the_dynamic_one_still_moves():
  run = windows.Run(of_one(max_norm=10.0, loss_scale=ogc.DynamicLossScale(8.0, growth_interval=1)), jnp.zeros(1))
  np.testing.assert_array_equal(run(f32(6), loss_scale=2.0), f32(-3))
  assert run.scale == 16.0
  np.testing.assert_array_equal(run(f32(INF), loss_scale=2.0), f32(0))
  assert run.scale == 8.0


def test_each_micro_batch_is_divided_by_the_scale_it_was_taken_with(path):
  run = windows.Run(of_one(every_k=3, max_norm=10.0), jnp.zeros(1))
  for gradient, scale in (3, 1), (12, 4), (0.75, 0.25):
    updates = run(f32(gradient), loss_scale=scale)
  np.testing.assert_array_equal(updates, f32(-3))


@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize("on_nonfinite, fill", [("skip", 0), ("zero", 0), ("propagate", np.nan)])
def test_a_traced_scale_that_is_no_scale_is_a_non_finite_window(path, every_k, on_nonfinite, fill):
  run = windows.Run(of_one(every_k=every_k, on_nonfinite=on_nonfinite), jnp.zeros(2))
  for scale in 0.0, -1.0, INF, np.nan:
    for _ in range(every_k):
      updates = run(f32(3, 4), loss_scale=jnp.float32(scale))
    np.testing.assert_array_equal(updates, np.full(2, fill, np.float32))
  assert run.metrics["nonfinite_steps"] == 4


@pytest.mark.parametrize("tx, want", [
    (ogc.clipped_multi_steps(optax.sgd(1.0), 1.0), 1.0),
    (ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, loss_scale=1024), 1024.0),
    (ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, loss_scale=jnp.float32(64)), 64.0),
    (ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, loss_scale=ogc.DynamicLossScale()), 2.0**15),
    (optax.chain(optax.scale(1.0), ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, loss_scale=2)), 2.0),
])
def test_current_loss_scale_finds_the_scale_of_every_kind(tx, want):
  scale = ogc.current_loss_scale(tx.init({"w": jnp.zeros(2)}))
  assert isinstance(scale, jax.Array) and scale.dtype == np.float32 and scale.shape == () and float(scale) == want


def test_current_loss_scale_refuses_none_and_several():
  with pytest.raises(ValueError, match="found 0"):
    ogc.current_loss_scale(optax.sgd(1.0).init(jnp.zeros(2)))
  with pytest.raises(ValueError, match="found 2"):
    ogc.current_loss_scale(optax.chain(of_one(), of_one()).init(jnp.zeros(2)))
  with pytest.raises(ValueError, match="found 0"):
    ogc.has_updated(optax.sgd(1.0).init(jnp.zeros(2)))


@pytest.mark.parametrize("options, error, words", [
    (dict(initial=0.0), ValueError, "initial"),
    (dict(initial=INF), ValueError, "initial"),
    (dict(initial=np.nan), ValueError, "initial"),
    (dict(initial=2.0**128), ValueError, "initial"),
    (dict(initial=0.5), ValueError, "minimum <= initial"),
    (dict(initial=8.0, maximum=4.0), ValueError, "initial <= maximum"),
    (dict(maximum=2.0**128), ValueError, "maximum"),
    (dict(minimum=-1.0), ValueError, "minimum"),
    (dict(growth_factor=0.5), ValueError, "growth_factor"),
    (dict(backoff_factor=1.0), ValueError, "backoff_factor"),
    (dict(backoff_factor=0.0), ValueError, "backoff_factor"),
    (dict(growth_interval=0), ValueError, "growth_interval"),
    (dict(growth_interval=2.5), TypeError, "growth_interval"),
    (dict(growth_interval=True), TypeError, "growth_interval"),
    (dict(initial="2"), TypeError, "initial"),
    (dict(initial=True), TypeError, "initial"),
])
def test_dynamic_loss_scale_refuses_what_is_no_configuration(options, error, words):
  with pytest.raises(error, match=words):
    ogc.DynamicLossScale(**options)


@pytest.mark.parametrize("options, want", [
    (dict(growth_factor=2.0**127, growth_interval=1), 2.0**127),
    (dict(maximum=3.0e38, growth_factor=2.0**127, growth_interval=1), np.float32(3.0e38)),
    (dict(growth_factor=1.0, growth_interval=1), 2.0**15),
    (dict(growth_factor=1.5, growth_interval=1), 1.5 * 2.0**15),
])
def test_growth_is_bounded_by_the_maximum_even_where_the_product_is_infinite(options, want):
  scale = ogc.DynamicLossScale(**options)
  assert float(jax.jit(scale.update)(scale.init(), True).loss_scale) == want
