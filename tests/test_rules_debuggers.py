"""Do rules, schedules and skipped spikes compute a NaN or an infinity that nobody wants, or leave a tracer behind?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
from jax.experimental import checkify

pytestmark = [pytest.mark.slow, pytest.mark.reference_repeats]

TREE = [np.float32([3, 4]), np.float32([0.5])]
BOUND = dict(maximum=100.0)  # no infinity in the warm-up either
MAKERS = {
    "ema_clip": lambda: ogc.global_clip(ogc.ema_clip(warmup=2, **BOUND)),
    "zclip": lambda: ogc.global_clip(ogc.zclip(warmup=2, **BOUND), monitor=True),
    "autoclip": lambda: ogc.global_clip(ogc.autoclip(50, n=3, **BOUND)),
    "adagc": lambda: ogc.per_tensor_clip(ogc.adagc(warmup=2, **BOUND)),
    "schedule": lambda: ogc.global_clip(lambda count: 1 + count),
    "windows": lambda: ogc.clipped_multi_steps(optax.sgd(1.0), ogc.zclip(warmup=1, **BOUND), every_k=2, monitor=True,
                                               skip_spikes=ogc.SpikeRule(window=4, deviations=3.0, judge="either", warmup=1)),
    "factor": lambda: ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, skip_spikes=ogc.SpikeRule(factor=2.0, warmup=1)),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
HISTORY = [1, 1, 0, 1.5, 1, 1, 30, 30, 1, 1]


def run(tx, update, history):
  state = tx.init(TREE)
  for by in history:
    updates, state = update([x * np.float32(by) for x in TREE], state, TREE, value=jnp.float32(2.0))
  return updates, state


@makers
def test_nothing_that_is_not_finite_is_computed(path, make):
  tx = make()
  with jax.debug_nans(True), jax.debug_infs(True):
    run(tx, tx.update, HISTORY)


@makers
def test_checkify_finds_nothing(path, make):
  tx = make()
  checked = jax.jit(checkify.checkify(lambda *args, value: tx.update(*args, value=value), errors=checkify.float_checks))
  def update(*args, value):
    error, out = checked(*args, value=value)
    error.throw()
    return out
  run(tx, update, HISTORY)


@pytest.mark.parametrize("make", [MAKERS["windows"], MAKERS["factor"]], ids=["windows", "factor"])
def test_a_window_that_overflowed_is_skipped_under_debug_nans(path, make):
  tx = make()
  with jax.debug_nans(True):
    run(tx, jax.jit(tx.update), [1, 1, 1, 1, np.inf, np.inf, 1, 1])


@makers
def test_no_tracer_is_left_behind(path, make):
  tx = make()
  state = tx.init(TREE)
  with jax.checking_leaks():
    jax.jit(tx.update)(TREE, state, TREE, value=jnp.float32(2.0))


@makers
def test_a_jitted_update_talks_to_no_host(path, make):
  tx = make()
  args = jax.device_put((TREE, tx.init(TREE), TREE))
  update = jax.jit(lambda *args: tx.update(*args, value=jnp.float32(2.0)))
  text = update.lower(*args).compile().as_text()
  with jax.transfer_guard("disallow"):
    update(*args)
  assert "callback" not in text and "outfeed" not in text


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("windows", "factor")])
@pytest.mark.parametrize("stored", [False, True])
def test_the_derivative_of_a_clip_is_finite(path, name, stored):
  tx = MAKERS[name]()
  state = run(tx, tx.update, [1, 1, 1, 1])[1] if stored else tx.init(TREE)
  def total(tree):
    return sum(jnp.sum(x) for x in tx.update(tree, state)[0])
  gradients = jax.jit(jax.grad(total))([jnp.asarray(x) for x in TREE])
  assert all(np.isfinite(g).all() for g in gradients)
