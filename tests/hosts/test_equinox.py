"""Equinox: `filter_jit`, gradients with `None` in them, models that are trained in part, and `apply_updates`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest

eqx = pytest.importorskip("equinox", reason="equinox is not installed (pip install '.[hosts]')")


class Model(eqx.Module):
  weight: jax.Array
  bias: jax.Array
  calls: jax.Array
  activation: object = eqx.field(static=True, default=jax.nn.relu)
  name: str = "model"

  def __call__(self, x):
    return self.activation(self.weight @ x + self.bias)


def make():
  return Model(jnp.array([[1.0, 2.0]]), jnp.array([0.5]), jnp.array(7))


def loss_fn(model):
  return (10 * model(jnp.array([3.0, 4.0]))).sum()  # gradients 30, 40 and 10


def test_filter_jit_and_apply_updates(path):
  model = make()
  tx = optax.chain(ogc.global_clip(1.0, monitor=True), optax.sgd(1.0))
  opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

  @eqx.filter_jit
  def step(model, opt_state):
    updates, opt_state = tx.update(eqx.filter_grad(loss_fn)(model), opt_state)
    return eqx.apply_updates(model, updates), opt_state

  after, opt_state = step(model, opt_state)
  norm = np.sqrt(30.0**2 + 40**2 + 10**2)
  np.testing.assert_allclose(after.weight, [[1 - 30 / norm, 2 - 40 / norm]], rtol=1e-6)
  np.testing.assert_allclose(after.bias, [0.5 - 10 / norm], rtol=1e-6)
  assert after.calls == 7 and after.name == "model"
  np.testing.assert_allclose(ogc.clip_metrics(opt_state)["global_norm"], norm, rtol=1e-6)


def test_the_norm_of_a_partitioned_model_is_that_of_the_trained_part(path):
  trained, frozen = eqx.partition(make(), eqx.tree_at(lambda m: m.weight, jax.tree.map(lambda _: False, make()), True))
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, every_k=2)
  opt_state = tx.init(trained)

  @eqx.filter_jit
  def step(trained, opt_state):
    grads = eqx.filter_grad(lambda trained: loss_fn(eqx.combine(trained, frozen)))(trained)
    updates, opt_state = tx.update(grads, opt_state, trained)
    return eqx.apply_updates(trained, updates), opt_state

  first, opt_state = step(trained, opt_state)
  assert oracle.same_bits(first.weight, trained.weight)
  second, opt_state = step(first, opt_state)
  np.testing.assert_allclose(second.weight, [[0.4, 1.2]], rtol=1e-6)
  assert second.bias is None and ogc.has_updated(opt_state)
