"""Flax: `TrainState` as it is and with the documented override, and `nnx.Optimizer`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
from flax import nnx
from flax.training import train_state
from windows import f32

NAN = np.nan


class WeightedState(train_state.TrainState):
  """The override of docs/loss_scale_and_accumulation.md: arguments of the call reach the transformation."""

  def apply_gradients(self, *, grads, **extra):
    updates, opt_state = self.tx.update(grads, self.opt_state, self.params, **extra)
    params = optax.apply_updates(self.params, updates)
    return self.replace(step=self.step + 1, params=params, opt_state=opt_state)


def make(**options):
  options = dict(every_k=2, loss_scale=ogc.DynamicLossScale(8.0)) | options
  return ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, **options)


def test_train_state_works_as_it_is(path):
  state = train_state.TrainState.create(apply_fn=None, params={"w": f32(0, 0)}, tx=make())
  step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)
  assert float(ogc.current_loss_scale(state)) == 8.0
  state = step(state, {"w": f32(48, 0)})
  assert not ogc.has_updated(state) and state.params["w"].tolist() == [0, 0]
  state = step(state, {"w": f32(0, 64)})
  np.testing.assert_allclose(state.params["w"], f32(-0.6, -0.8), rtol=1e-6)
  assert ogc.has_updated(state) and int(state.step) == 2 and int(state.opt_state.optimizer_step) == 1
  for _ in range(2):
    state = step(state, {"w": f32(NAN, 0)})
  np.testing.assert_allclose(state.params["w"], f32(-0.6, -0.8), rtol=1e-6)
  assert float(ogc.current_loss_scale(state.opt_state)) == 4.0
  assert ogc.clip_metrics(state)["nonfinite_steps"] == 1


def test_train_state_forwards_no_arguments_and_the_override_does():
  arguments = dict(weight=3.0, boundary=True, loss_scale=2.0)
  plain = train_state.TrainState.create(apply_fn=None, params={"w": f32(0)}, tx=make())
  with pytest.raises(TypeError, match="weight"):
    plain.apply_gradients(grads={"w": f32(1)}, **arguments)
  state = WeightedState.create(apply_fn=None, params={"w": f32(0)}, tx=make())
  state = state.apply_gradients(grads={"w": f32(1)}, weight=1.0, loss_scale=2.0)
  state = state.apply_gradients(grads={"w": f32(0.2)}, **arguments)
  np.testing.assert_allclose(state.params["w"], f32(-(0.5 + 0.3) / 4), rtol=1e-6)
  assert int(state.step) == 2


def test_a_float16_model_trains_under_train_state(path):
  def loss_fn(params, scale):
    prediction = (params["w"].astype(jnp.float16) * jnp.float16(2)).sum()
    loss = jnp.square(prediction - jnp.float16(4)).astype(jnp.float32)
    return scale * loss, loss

  @jax.jit
  def step(state):
    grads, loss = jax.grad(loss_fn, has_aux=True)(state.params, ogc.current_loss_scale(state))
    return state.apply_gradients(grads=grads), loss

  tx = ogc.clipped_multi_steps(optax.sgd(0.05), 1.0, loss_scale=ogc.DynamicLossScale(2.0**24))
  state = train_state.TrainState.create(apply_fn=None, params={"w": f32(0, 0)}, tx=tx)
  losses = []
  for _ in range(60):
    state, loss = step(state)
    losses.append(float(loss))
  metrics = ogc.clip_metrics(state)
  assert metrics["nonfinite_steps"] > 3 and metrics["consecutive_nonfinite"] == 0
  assert losses[0] == 16.0 and losses[-1] < 0.01


class Model(nnx.Module):
  def __init__(self):
    self.w = nnx.Param(jnp.zeros(2))


def test_nnx_optimizer_windows_scale_and_metrics(path):
  model = Model()
  optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer, target, **extra):
    scale = ogc.current_loss_scale(optimizer.opt_state)
    grads = nnx.grad(lambda model: scale * (model.w[...] * target).sum())(model)
    optimizer.update(model, grads, **extra)

  def numbers():
    values = (ogc.current_loss_scale(optimizer.opt_state), ogc.has_updated(optimizer.opt_state),
              *ogc.clip_metrics(optimizer.opt_state).values())
    assert all(isinstance(value, jax.Array) for value in values)
    return float(values[0]), bool(values[1]), float(ogc.clip_metrics(optimizer.opt_state)["global_norm"])

  assert numbers() == (8.0, False, 0.0)
  step(model, optimizer, f32(6, 0))
  assert numbers() == (8.0, False, 0.0) and model.w[...].tolist() == [0, 0]
  step(model, optimizer, f32(0, 8))
  assert numbers() == (8.0, True, 5.0)
  np.testing.assert_allclose(model.w[...], f32(-0.6, -0.8), rtol=1e-6)
  step(model, optimizer, f32(NAN, 8), boundary=True)
  assert numbers()[:2] == (4.0, False)
  np.testing.assert_allclose(model.w[...], f32(-0.6, -0.8), rtol=1e-6)


def test_nnx_optimizer_forwards_what_is_said_of_a_call():
  model = Model()
  optimizer = nnx.Optimizer(model, make(every_k=4), wrt=nnx.Param)
  grads = nnx.grad(lambda model: (model.w[...] * f32(1, 2)).sum())(model)
  optimizer.update(model, grads, loss_scale=10.0, weight=3.0)
  optimizer.update(model, grads, loss_scale=jnp.float32(5.0), weight=1.0, boundary=True)
  np.testing.assert_allclose(model.w[...], f32(-0.125, -0.25), rtol=1e-6)
  assert ogc.has_updated(optimizer.opt_state)


def test_nnx_optimizer_of_a_monitored_clip():
  model = Model()
  optimizer = nnx.Optimizer(model, optax.chain(ogc.global_clip(1.0, monitor=True), optax.sgd(1.0)), wrt=nnx.Param)
  grads = nnx.grad(lambda model: (model.w[...] * f32(3, 4)).sum())(model)
  optimizer.update(model, grads, loss_scale=2.0)
  assert float(ogc.clip_metrics(optimizer.opt_state)["global_norm"]) == 2.5
  np.testing.assert_allclose(model.w[...], f32(-0.6, -0.8), rtol=1e-6)


def test_nnx_state_survives_split_and_merge_in_mid_window(standard_promotion):
  model = Model()
  optimizer = nnx.Optimizer(model, ogc.clipped_multi_steps(optax.adamw(0.1), 1.0, every_k=2), wrt=nnx.Param)
  grads = nnx.grad(lambda model: (model.w[...] * f32(3, 4)).sum())(model)
  optimizer.update(model, grads)
  graph, state = nnx.split((model, optimizer))
  model, optimizer = nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state))
  optimizer.update(model, grads)
  assert ogc.has_updated(optimizer.opt_state) and ogc.clip_metrics(optimizer.opt_state)["global_norm"] == 5
