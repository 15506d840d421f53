"""What a micro-batch weighs, where a window ends, and what it says there of gradients that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import windows
from windows import f32, make

pytestmark = pytest.mark.reference_repeats

NAN, INF = np.nan, np.inf


# Weights


def test_the_mean_is_weighted(path):
  run = windows.Run(make(every_k=3), f32(0))
  for gradient, weight in (1, 1), (2, 2), (5, 7):
    updates = run(f32(gradient), weight=weight)
  np.testing.assert_allclose(updates, f32(-4), rtol=1e-6)
  for gradient in 1, 2, 6:
    updates = run(f32(gradient))
  np.testing.assert_allclose(updates, f32(-3), rtol=1e-6)


@pytest.mark.parametrize("weight", [0, 0.0, np.float32(0), jnp.asarray(0), jnp.bfloat16(0)])
def test_weight_zero_contributes_nothing_even_where_it_is_nan(path, weight):
  run = windows.Run(make(every_k=3), f32(0, 0))
  run(f32(2, 4), weight=3)
  run(f32(NAN, INF), weight=weight)
  np.testing.assert_array_equal(run(f32(4, 8), weight=1), f32(-2.5, -5))


@pytest.mark.parametrize("every_k", [1, 2])
def test_a_window_of_no_weight_does_nothing(path, every_k):
  run = windows.Run(make(optax.sgd(1.0, momentum=0.5), every_k=every_k, loss_scale=ogc.DynamicLossScale(8.0)), f32(0))
  for _ in range(every_k):
    updates = run(f32(NAN), weight=0.0)
  np.testing.assert_array_equal(updates, f32(0))
  assert not run.ran and run.scale == 8.0 and run.metrics["steps"] == run.metrics["nonfinite_steps"] == 0
  assert int(run.state.micro_step) == 0 and float(optax.tree.get(run.state, "trace")[0]) == 0
  for _ in range(every_k):
    updates = run(f32(8), weight=2.0)
  np.testing.assert_array_equal(updates, f32(-1))
  assert run.ran


@pytest.mark.parametrize("every_k", [1, 2])
def test_a_window_of_ones_weight_is_the_plain_mean_whatever_the_weight(path, every_k):
  for dtype in np.float32, jnp.bfloat16:
    run = windows.Run(make(every_k=every_k, loss_scale=4.0), jnp.zeros(1, dtype))
    for _ in range(every_k):
      updates = run(jnp.full(1, 12, dtype), weight=np.float32(1000))
    assert updates.dtype == dtype and updates == -3


@pytest.mark.parametrize("on_nonfinite, fill", [("skip", 0), ("zero", 0), ("propagate", NAN)])
@pytest.mark.parametrize("every_k", [1, 2])
def test_a_traced_weight_that_is_no_weight_is_a_non_finite_window(on_nonfinite, fill, every_k):
  run = windows.Run(make(every_k=every_k, on_nonfinite=on_nonfinite), f32(0))
  for weight in -1.0, NAN, INF:
    for _ in range(every_k):
      updates = run(f32(1), weight=jnp.float32(weight))
    np.testing.assert_array_equal(updates, f32(fill))
  assert run.metrics["nonfinite_steps"] == 3


def test_weights_whose_sum_overflows_make_the_window_non_finite():
  run = windows.Run(make(), f32(0))
  for _ in range(2):
    updates = run(f32(2.0**-100), weight=3e38)
  np.testing.assert_array_equal(updates, f32(0))
  assert run.metrics["nonfinite_steps"] == 1


def test_a_finite_window_whose_sum_overflows_is_non_finite(path):
  run = windows.Run(make(loss_scale=ogc.DynamicLossScale(1.0)), f32(0))
  for _ in range(2):
    updates = run(f32(3e38))
  np.testing.assert_array_equal(updates, f32(0))
  assert run.metrics["nonfinite_steps"] == 1


# The ends of windows


def test_boundaries_may_be_traced_and_false_is_as_none(path):
  run = windows.Run(make(every_k=3), f32(0))
  emitted = [run(f32(g), boundary=np.bool_(b)).item() for g, b in
             [(1, False), (3, True), (1, False), (2, False), (3, False), (7, True), (1, False)]]
  assert emitted == [0, -2, 0, 0, -2, -7, 0]
  assert make().update(f32(1), make().init(f32(0)), boundary=True)[0].item() == -1


def test_a_window_may_end_early_and_bad(path):
  run = windows.Run(make(every_k=4, loss_scale=ogc.DynamicLossScale(8.0)), f32(0))
  run(f32(NAN))
  assert run(f32(8), boundary=True).item() == 0 and run.scale == 4.0
  assert run(f32(8), boundary=True).item() == -2


@pytest.mark.parametrize("schedule", [
    lambda step: jnp.where(step < 1, 2, 3),
    lambda step: 2 + (step >= 1),
    optax.piecewise_constant_schedule(2.0, {1: 1.5}),
    lambda step: jnp.where(step < 1, jnp.int8(2), jnp.int8(3)),
])
def test_every_k_may_be_a_schedule_of_the_optimizer_step(schedule, standard_promotion):
  run = windows.Run(make(every_k=schedule), f32(0))
  emitted = [run(f32(g)).item() for g in (1, 1, 1, 1, 1, 1, 1, 1)]
  assert emitted == [0, -1, 0, 0, -1, 0, 0, -1]


def test_skipped_windows_do_not_advance_the_schedule_of_every_k():
  run = windows.Run(make(every_k=lambda step: step + 1), f32(0))
  emitted = [run(f32(g)).item() for g in (NAN, NAN, 1, NAN, 1, 1, 1)]
  assert emitted == [0, 0, -1, 0, 0, 0, -1]
  assert int(run.state.optimizer_step) == 2


def test_a_schedule_may_say_one(path):
  run = windows.Run(make(every_k=lambda step: 1), f32(0))
  assert [run(f32(g)).item() for g in (1, 2)] == [-1, -2]


# Raising


@pytest.mark.parametrize("every_k", [1, 2])
def test_raise_names_the_leaves_at_the_end_of_the_window(path, every_k):
  tx = make(every_k=every_k, on_nonfinite="raise")
  params = {"a": f32(0, 0), "b": f32(0)}
  state = tx.init(params)
  batch = {"a": f32(NAN, INF), "b": f32(1)}
  for _ in range(every_k - 1):
    _, state = tx.update(batch, state, params)
  with pytest.raises(FloatingPointError, match=r"updates\['a'\] \(2 elements\)$"):
    tx.update(batch, state, params)


@pytest.mark.parametrize("every_k", [1, 2])
def test_raise_under_jit_is_a_runtime_error_that_says_the_same(path, every_k):
  tx = make(every_k=every_k, on_nonfinite="raise")
  params = {"a": f32(0, 0), "b": f32(0)}
  update, state = jax.jit(tx.update), tx.init(params)
  for _ in range(every_k):
    updates, state = update({"a": f32(1, 1), "b": f32(1)}, state, params)
  np.testing.assert_array_equal(updates["a"], f32(-1, -1))
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"FloatingPointError.*updates\['b'\]"):
    for _ in range(every_k):
      updates, state = update({"a": f32(1, 1), "b": f32(NAN)}, state, params)
    jax.block_until_ready(updates)
    jax.effects_barrier()
