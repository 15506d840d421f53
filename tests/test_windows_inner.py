"""What `clipped_multi_steps` hands on to the optimizer inside, and what it makes of that one's updates and state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import windows
from windows import f32, make


def recording(log):
  def update(updates, state, params=None, **extra):
    log.append((jax.tree.map(lambda g: g.dtype, updates), jax.tree.map(lambda p: p.dtype, params), sorted(extra)))
    return updates, state
  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def test_the_optimizer_sees_wide_gradients_and_parameters_and_the_other_arguments():
  log = []
  params = {"w": jnp.zeros(2, jnp.bfloat16)}
  for every_k in 1, 2:
    run = windows.Run(make(recording(log), every_k=every_k, loss_scale=2.0), params)
    log.clear()
    for _ in range(every_k):
      updates = run({"w": jnp.ones(2, jnp.bfloat16)}, weight=1.0, boundary=False, loss_scale=2.0, value=1.0)
    assert updates["w"].dtype == jnp.bfloat16
    assert set(map(str, log)) == {str(({"w": np.dtype("float32")}, {"w": np.dtype("float32")}, ["value"]))}


def test_extra_arguments_are_those_of_the_call_that_ends_the_window():
  def update(updates, state, params=None, *, value):
    del params
    return jax.tree.map(lambda g: g * value, updates), state
  inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
  run = windows.Run(make(inner), f32(0))
  run(f32(1), value=jnp.float32(1000))
  assert run(f32(1), value=jnp.float32(3)).item() == 3


def test_an_optimizer_without_extra_arguments_is_not_troubled_by_them(path):
  run = windows.Run(make(), f32(0))
  for _ in range(2):
    updates = run(f32(1), value=jnp.float32(3))
  assert updates.item() == -1


@pytest.mark.parametrize("every_k", [1, 2])
def test_parameters_may_be_left_out(every_k):
  tx = make(every_k=every_k)
  state, update = tx.init(jnp.zeros(1, jnp.bfloat16)), jax.jit(tx.update)
  for _ in range(every_k):
    updates, state = update(jnp.ones(1, jnp.bfloat16), state)
  assert updates.dtype == np.float32 and updates.item() == -1


def test_update_dtype_overrides_the_parameters(path):
  for dtype in "bfloat16", np.float32, jnp.float16:
    run = windows.Run(make(update_dtype=dtype), jnp.zeros(1, jnp.bfloat16))
    for _ in range(2):
      updates = run(jnp.full(1, 0.3, jnp.bfloat16))
      assert updates.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.float32(updates), f32(-0.30078125), rtol=1e-6)


def test_an_optimizer_whose_state_holds_python_numbers_and_keys(standard_promotion):
  def update(updates, state, params=None):
    del params
    return updates, {"calls": state["calls"] + 1, "key": jax.random.split(state["key"])[0]}
  inner = optax.GradientTransformation(lambda params: {"calls": 0, "key": jax.random.key(0)}, update)
  run = windows.Run(make(inner), f32(0))
  types = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), run.state)
  for _ in range(4):
    run(f32(1))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), run.state) == types
  assert int(run.state.inner_state["calls"]) == 2
  assert run.state.inner_state["key"] == jax.random.split(jax.random.split(jax.random.key(0))[0])[0]
