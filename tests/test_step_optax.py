"""Is `clipped_adamw` the chain of the clip and optax's adamw: in its state, its updates, over many steps, and where the
kernel does not serve?"""

import copy
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
from programs import targets

pytestmark = [pytest.mark.reference_repeats, pytest.mark.usefixtures("standard_promotion")]

PARAMS = {"a": jnp.linspace(-1, 1, 12).reshape(3, 4), "b": jnp.asarray([0.5, 2.0])}
RATE = optax.linear_schedule(0.1, 0.01, 10)
OPTIONS = {
    "defaults": {}, "numbers": dict(b1=0.8, b2=0.99, eps=1e-4, eps_root=1e-6, weight_decay=0.3),
    "mask": dict(mask={"a": True, "b": False}, weight_decay=0.3), "mu_dtype": dict(mu_dtype=jnp.bfloat16),
    "decay schedule": dict(weight_decay=optax.linear_schedule(0.1, 0.5, 10)),
    "masked decay schedule": dict(weight_decay=optax.linear_schedule(0.1, 0.5, 10), mask={"a": True, "b": False}),
    "no decay": dict(weight_decay=0.0), "nesterov": dict(nesterov=True),
}
CLIP_OPTIONS = {"rate": {}, "monitor": dict(monitor=True), "loss scale": dict(loss_scale=4.0)}


def gradients(steps, params=PARAMS, dtype=None):
  rng = np.random.default_rng(0)
  return [jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), dtype or x.dtype), params) for _ in range(steps)]


def chain(rate, clip, **options):
  return optax.chain(ogc.global_clip(1.0, **clip), optax.adamw(rate, **options))


def run_chain(tx, grads, params, state=None):
  @jax.jit
  def step(params, state, g):
    updates, state = tx.update(g, state, params)
    return optax.apply_updates(params, updates), state
  state = tx.init(params) if state is None else state
  for g in grads:
    params, state = step(params, state, g)
  return params, state


def run_steps(tx, grads, params, state=None):
  step = jax.jit(lambda params, state, g: tx.step(g, state, params))
  state = tx.init(params) if state is None else state
  for g in grads:
    params, state = step(params, state, g)
  return params, state


def check_close(got, want, rtol=2e-5, atol=2e-6):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    far = 2.0**-7 if a.dtype == jnp.bfloat16 else rtol
    kind = np.complex64 if jnp.iscomplexobj(a) else np.float32
    np.testing.assert_allclose(np.asarray(a, kind), np.asarray(b, kind), rtol=far, atol=atol)


@pytest.mark.parametrize("rate, options, clip", [
    *[pytest.param(RATE, options, {}, id=name) for name, options in OPTIONS.items()],
    *[pytest.param(0.1, {}, clip, id=name) for name, clip in CLIP_OPTIONS.items()]])
def test_state_updates_and_steps_are_those_of_the_chain(path, rate, options, clip):
  tx, want = ogc.clipped_adamw(rate, 1.0, **options, **clip), chain(rate, clip, **options)
  assert oracle.same_bits(tx.init(PARAMS), want.init(PARAMS))
  grads = gradients(5)
  assert oracle.same_bits(run_chain(tx, grads, PARAMS), run_chain(want, grads, PARAMS))
  # Of a bfloat16 moment optax rounds the product with b1 too.
  atol = 2e-3 if "mu_dtype" in options else 2e-6
  check_close(run_steps(tx, grads, PARAMS), run_chain(want, grads, PARAMS), atol=atol)


def test_losses_of_1000_steps_are_alike(path):
  rng = np.random.default_rng(1)
  x, y = jnp.asarray(rng.standard_normal((64, 8)), jnp.float32), jnp.asarray(rng.standard_normal((64, 1)), jnp.float32)
  params = {"w": jnp.asarray(rng.standard_normal((8, 16)), jnp.float32), "v": jnp.asarray(rng.standard_normal((16, 1)), jnp.float32)}
  loss = lambda p: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2)
  def losses(step, state):
    def body(carry, _):
      value, g = jax.value_and_grad(loss)(carry[0])
      return step(g, carry[1], carry[0]), value
    return jax.jit(lambda carry: jax.lax.scan(body, carry, None, 1000)[1])((params, state))
  tx, stock = ogc.clipped_adamw(1e-3, 0.5), optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))
  def stock_step(g, state, p):
    updates, state = stock.update(g, state, p)
    return optax.apply_updates(p, updates), state
  got, want = losses(tx.step, tx.init(params)), losses(stock_step, stock.init(params))
  assert want[-1] < 0.5 * want[0]
  np.testing.assert_allclose(got, want, rtol=1e-3)


def test_checkpoints_move_both_ways(path):
  def through_a_file(state):
    leaves, structure = jax.tree.flatten(state)
    file = io.BytesIO()
    np.savez(file, *map(np.asarray, leaves))
    file.seek(0)
    return structure.unflatten(np.load(file).values())
  tx, stock = ogc.clipped_adamw(0.1, 1.0), chain(0.1, {})
  grads = gradients(6)
  whole = run_steps(tx, grads, PARAMS)
  params, state = run_chain(stock, grads[:3], PARAMS)
  check_close(run_steps(tx, grads[3:], params, through_a_file(state)), whole)
  params, state = run_steps(tx, grads[:3], PARAMS)
  check_close(run_chain(stock, grads[3:], params, through_a_file(state)), whole)


PLAIN = {
    "nesterov": (PARAMS, dict(nesterov=True)), "no rate": (PARAMS, dict(learning_rate=None)),
    "update_dtype": (PARAMS, dict(update_dtype="float32")),
    "mask of arrays": (PARAMS, dict(mask={"a": jnp.asarray(True), "b": jnp.asarray(False)})),
    "complex leaf": (PARAMS | {"z": jnp.asarray([1 + 2j], jnp.complex64)}, {}), "no leaves": ({}, {}),
}


def custom_calls(tx, params):
  return targets(jax.jit(tx.step).lower(params, tx.init(params), params).as_text())


@pytest.mark.parametrize("params, options", PLAIN.values(), ids=PLAIN)
def test_what_the_kernel_does_not_do_goes_as_the_chain_does(path, params, options):
  options = dict(learning_rate=0.1) | options
  clip = {name: options.pop(name) for name in ["update_dtype"] if name in options}
  tx, want = ogc.clipped_adamw(max_norm=1.0, **options, **clip), chain(options.pop("learning_rate"), clip, **options)
  assert not any("adamw" in name for name in custom_calls(tx, params))
  grads = gradients(3, params)
  check_close(run_steps(tx, grads, params), run_chain(want, grads, params))


@pytest.mark.native_cases
@pytest.mark.parametrize("kind", ["numbers", "mask", "masked decay schedule", "mu_dtype", "clip"])
def test_what_it_does_is_two_calls(path, kind):
  options = OPTIONS.get(kind, dict(monitor=True, on_nonfinite="skip", loss_scale=2.0))
  calls = custom_calls(ogc.clipped_adamw(RATE, 1.0, **options), PARAMS)
  assert calls == {"optax_globalclip_norm_cpu_v2": 1, "optax_globalclip_adamw_cpu_v2": 1}


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "tree.map": lambda tx: jax.tree.map(lambda x: x, tx),
          "_replace": lambda tx: tx._replace(init=tx.init)}


@pytest.mark.parametrize("make", [lambda: ogc.clipped_adamw(jnp.float32(0.1), 1.0),
                                  lambda: ogc.clipped_multi_steps(ogc.clipped_adamw(0.1, np.inf), 1.0)], ids=["step", "windows"])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_the_step(copied, make):
  tx = make()
  twin = copied(tx)
  assert type(twin) is type(tx)
  hash(jax.tree.structure(twin))  # which equinox.filter_jit asks for
  for function in ("update", "step"):
    got, want = (getattr(one, function)(PARAMS, one.init(PARAMS), PARAMS) for one in (twin, tx))
    assert oracle.same_bits(got, want)


def test_wrapped_it_is_the_transformation_that_it_is():
  tx = ogc.clipped_adamw(0.1, 1.0)
  assert isinstance(tx, optax.GradientTransformationExtraArgs)
  init, update = tx
  wrapped = optax.chain(tx)
  assert not hasattr(wrapped, "step")
  updates, _ = wrapped.update(gradients(1)[0], wrapped.init(PARAMS), PARAMS)
  want, _ = update(gradients(1)[0], init(PARAMS), PARAMS)
  assert oracle.same_bits(updates, want)
  injected = optax.inject_hyperparams(ogc.clipped_adamw)(0.1, max_norm=1.0)
  injected.update(gradients(1)[0], injected.init(PARAMS), PARAMS)
  assert optax.tree.get(tx.init(PARAMS), "count") == 0
