"""Is a schedule of the threshold called with the count that it should be?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest


def norms(updates):
  return float(np.linalg.norm(np.concatenate([np.ravel(x) for x in jax.tree.leaves(updates)])))


@pytest.mark.parametrize("make", [ogc.global_clip, ogc.per_tensor_clip])
def test_the_threshold_of_an_update_is_that_of_its_count(path, make):
  tx = make(optax.linear_schedule(1.0, 3.0, 4))
  state, update = tx.init([jnp.zeros(2)]), jax.jit(tx.update)
  seen = []
  for _ in range(6):
    updates, state = update([jnp.asarray([30.0, 40.0])], state)
    seen.append((norms(updates), float(state.threshold)))
  np.testing.assert_allclose(seen, [(x, x) for x in (1, 1.5, 2, 2.5, 3, 3)], rtol=1e-6)
  assert int(state.clip_count) == 6


def test_a_schedule_counts_also_what_is_not_finite(path):
  tx = ogc.global_clip(lambda count: count + 1, on_nonfinite="zero")
  state = tx.init([jnp.zeros(1)])
  for x in (jnp.nan, 9.0):
    updates, state = tx.update([jnp.asarray([x])], state)
  assert norms(updates) == 2


def test_windows_count_the_runs_of_the_optimizer(path):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), lambda count: count + 1, every_k=2)
  state, update, seen = tx.init(jnp.zeros(1)), jax.jit(tx.update), []
  for x in (9, 9, jnp.nan, 9, 9, 9):
    updates, state = update(jnp.asarray([x], jnp.float32), state)
    seen.append(float(-updates[0]))
  assert seen == [0, 1, 0, 0, 0, 2]
  assert float(ogc.clip_metrics(state)["threshold"]) == 2


@pytest.mark.parametrize("value, expected", [(-1, np.nan), (float("nan"), np.nan), (np.float16(2), 2), (3, 3)])
def test_what_a_schedule_returns_is_judged_as_a_traced_threshold(path, value, expected):
  tx = ogc.global_clip(lambda count: value)
  updates, _ = jax.jit(tx.update)([jnp.asarray([9.0])], tx.init([jnp.zeros(1)]))
  np.testing.assert_array_equal(updates[0], [expected])


def test_inject_hyperparams_calls_a_schedule_itself(path):
  tx = optax.inject_hyperparams(ogc.global_clip)(max_norm=optax.linear_schedule(1.0, 3.0, 2))
  state = tx.init([jnp.zeros(1)])
  for expected in (1, 2, 3):
    updates, state = tx.update([jnp.asarray([9.0])], state)
    assert norms(updates) == expected
