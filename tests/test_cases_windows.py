"""Cases 33 to 45: gradients accumulated over a window, clipped once, applied once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import windows
from windows import f32

NAN = np.nan


def steps(every_k, max_norm=1.0, rate=1.0, **options):
  return ogc.clipped_multi_steps(optax.sgd(rate), max_norm, every_k=every_k, **options)


def test_33_one_norm_of_the_mean(path):
  run = windows.Run(steps(2), jnp.zeros(2))
  np.testing.assert_array_equal(run(f32(6, 0)), f32(0, 0))
  np.testing.assert_allclose(run(f32(0, 8)), f32(-0.6, -0.8), rtol=1e-6)
  assert run.metrics["global_norm"] == 5.0 and run.metrics["steps"] == 1


def test_34_micro_batches_are_not_clipped_one_by_one(path):
  run = windows.Run(steps(2, max_norm=5.0), jnp.zeros(1))
  assert [run(f32(g)).item() for g in (10, -9)] == [0, -0.5]
  assert run.metrics["clip_factor"] == 1.0


def test_35_a_nan_spoils_its_window_and_no_other(path):
  run = windows.Run(steps(4, max_norm=10.0), jnp.zeros(1))
  assert [run(f32(g)).item() for g in (1, NAN, 3, 4, 2, 2, 2, 2)] == [0] * 7 + [-2]


def test_36_the_mean_is_unscaled_every_window(path):
  run = windows.Run(steps(2, max_norm=10.0, loss_scale=4.0), jnp.zeros(1))
  assert [run(f32(g)).item() for g in (8, 16) * 3] == [0, -3] * 3


def test_37_the_mean_is_over_the_whole_window(path):
  run = windows.Run(steps(8, max_norm=10.0), jnp.zeros(1))
  assert [run(f32(g)).item() for g in [1] * 7 + [9]] == [0] * 7 + [-2]


def test_38_a_window_ended_early_takes_the_mean_of_what_it_holds(path):
  run = windows.Run(steps(4, max_norm=10.0), jnp.zeros(1))
  assert run(f32(2), boundary=True).item() == -2
  assert int(run.state.micro_step) == 0
  assert [run(f32(g), boundary=False).item() for g in (1, 2, 3, 4)] == [0, 0, 0, -2.5]


def test_39_scaled_float16_gradients_do_not_overflow_in_the_sum(path):
  run = windows.Run(steps(4, max_norm=10.0, loss_scale=16384.0), jnp.zeros(1))
  assert [run(np.full(1, 30000, np.float16)).item() for _ in range(4)] == [0, 0, 0, -1.8310546875]


def test_40_bfloat16_sums_do_not_stall(path):
  run = windows.Run(steps(64, max_norm=10.0), jnp.zeros(1))
  for i in range(64):
    updates = run(jnp.full(1, [1, 1.0078125][i % 2], jnp.bfloat16))
  assert updates.item() == -1.00390625
  run = windows.Run(steps(300, max_norm=10.0), jnp.zeros(1))
  for _ in range(300):
    updates = run(jnp.ones(1, jnp.bfloat16))
  assert updates.item() == -1.0


def test_41_bfloat16_parameters_trace_and_scan(path, standard_promotion):
  tx = ogc.clipped_multi_steps(optax.adamw(0.1), 1.0, every_k=2)
  params = jnp.ones(3, jnp.bfloat16)

  def step(carry, gradient):
    params, state = carry
    updates, state = tx.update(gradient, state, params)
    return (optax.apply_updates(params, updates), state), updates

  (params, _), updates = jax.jit(lambda carry, g: jax.lax.scan(step, carry, g))(
      (params, tx.init(params)), jnp.ones((4, 3), jnp.bfloat16))
  assert updates.dtype == params.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.any(np.asarray(updates, np.float32), axis=1), [False, True, False, True])


def test_42_nothing_decays_between_boundaries(standard_promotion):
  tx = ogc.clipped_multi_steps(optax.adamw(0.1, weight_decay=0.1), 1.0, every_k=3)
  run = windows.Run(tx, f32(2))
  for _ in range(2):
    updates = run(f32(1))
    np.testing.assert_array_equal(updates, f32(0))
    np.testing.assert_array_equal(optax.apply_updates(run.params, updates), f32(2))
  assert int(optax.tree.get(run.state, "count")) == 0
  assert run(f32(1)).item() < -0.1
  assert int(optax.tree.get(run.state, "count")) == 1


def counted():
  """An optimizer that does nothing, and the list that grows by one whenever it runs."""
  calls = []
  def update(updates, state, params=None):
    del params
    jax.debug.callback(lambda: calls.append(1))
    return updates, state
  return optax.GradientTransformation(optax.init_empty_state, update), calls


def test_43_the_optimizer_runs_once_a_window(path):
  counting, calls = counted()
  run = windows.Run(ogc.clipped_multi_steps(counting, 10.0, every_k=4), jnp.zeros(1))
  ran = []
  for _ in range(8):
    run(f32(1))
    ran.append(run.ran)
  jax.effects_barrier()
  assert len(calls) == 2 and int(run.state.optimizer_step) == 2
  assert ran == [False, False, False, True] * 2


def test_43_the_optimizer_does_not_run_on_a_skipped_window(path):
  counting, calls = counted()
  for every_k in 1, 2:
    run = windows.Run(ogc.clipped_multi_steps(counting, 10.0, every_k=every_k), jnp.zeros(1))
    calls.clear()
    for gradient in [NAN] * every_k + [1] * every_k:
      run(f32(gradient))
    jax.effects_barrier()
    assert len(calls) == 1 and int(run.state.optimizer_step) == 1


def test_44_a_window_goes_on_after_a_save(path):
  run = windows.Run(steps(3, max_norm=10.0), jnp.zeros(1))
  assert run(f32(3)).item() == 0
  run.state = windows.through_numpy(run.state)
  assert [run(f32(g)).item() for g in (6, 9)] == [0, -6]


@pytest.mark.parametrize("leaves", [1, 16])
def test_45_no_copy_of_a_large_bfloat16_tree(path, standard_promotion, leaves):
  tx = ogc.clipped_multi_steps(optax.adamw(1e-3), 1.0, every_k=4, loss_scale=ogc.DynamicLossScale())
  mib = 2**20
  params = [jax.ShapeDtypeStruct((512 * mib // 2 // leaves,), jnp.bfloat16)] * leaves
  state = jax.eval_shape(tx.init, params)
  assert [(x.shape, x.dtype) for x in state.accumulators] == [(x.shape, np.float32) for x in params]

  def step(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state
  compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 8 * mib
