"""Are accumulators kept in the dtype that is asked for, and what reaches the optimizer all the same float32?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import windows

PARAMS = {"w": jnp.zeros(2), "z": jnp.zeros(1, jnp.complex64)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_accumulators_have_it_and_updates_the_parameters_dtype(path, dtype):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0, momentum=0.5), 1.0, every_k=2, accumulator_dtype=dtype)
  state = tx.init(PARAMS)
  types = windows.types(state)
  assert state.accumulators["w"].dtype == dtype and state.accumulators["z"].dtype == jnp.complex64
  update = jax.jit(tx.update)
  for want in [0, 0], [-0.6, -0.8], [0, 0], [-0.9, -1.2]:
    gradient = {"w": jnp.array([6.0, 0.0] if int(state.micro_step) == 0 else [0.0, 8.0]), "z": jnp.zeros(1, jnp.complex64)}
    updates, state = update(gradient, state, PARAMS)
    np.testing.assert_allclose(updates["w"], want, rtol=1e-6)
    assert updates["w"].dtype == jnp.float32 and windows.types(state) == types


def test_sums_are_rounded_to_it(path):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 10.0, every_k=2, accumulator_dtype=jnp.bfloat16)
  state = tx.init(jnp.zeros(1))
  _, state = tx.update(jnp.array([1.0]), state)
  updates, _ = tx.update(jnp.array([2.0**-9]), state)
  assert updates.item() == -0.5  # 1 + 2^-9 is 1 in bfloat16


def test_a_skipped_window_leaves_nothing_in_it(path):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 10.0, every_k=2, accumulator_dtype=jnp.bfloat16)
  state = tx.init(jnp.zeros(1))
  for gradient in np.nan, 1.0:
    updates, state = jax.jit(tx.update)(jnp.array([gradient]), state)
  assert updates.item() == 0 and not ogc.has_updated(state)
  np.testing.assert_array_equal(np.asarray(state.accumulators, np.float32), [0])


@pytest.mark.parametrize("wrong", ["int32", "complex64", "float8_e4m3fn", 4, "half a float"])
def test_a_wrong_dtype_is_named(wrong):
  with pytest.raises(TypeError, match="accumulator_dtype.*bfloat16"):
    ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, accumulator_dtype=wrong)
