"""Does `step` of windows around a `clipped_adamw` do what `update` and `optax.apply_updates` do, in place?"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
import sharded
from programs import targets

pytestmark = [pytest.mark.reference_repeats, pytest.mark.usefixtures("standard_promotion")]

PARAMS = {"a": jnp.linspace(-1, 1, 12).reshape(3, 4), "b": jnp.asarray([0.5, -0.25, 2.0])}
INNER = dict(weight_decay=0.2)


def make(max_norm=1.0, inner=INNER, **options):
  """`(fused, plain)`."""
  rate = optax.linear_schedule(0.1, 0.01, 10)
  return (ogc.clipped_multi_steps(ogc.clipped_adamw(rate, np.inf, **inner), max_norm, **options),
          ogc.clipped_multi_steps(optax.chain(ogc.global_clip(np.inf), optax.adamw(rate, **inner)), max_norm, **options))


def run_both(fused, plain, batches, params=PARAMS, extra=({},)):
  """The parameters and states of both after every micro-batch."""
  step = jax.jit(lambda params, state, g, extra: fused.step(g, state, params, **extra))
  @jax.jit
  def stock(params, state, g, extra):
    updates, state = plain.update(g, state, params, **extra)
    return optax.apply_updates(params, updates), state
  got = want = (params, fused.init(params))
  assert oracle.same_bits(got[1], plain.init(params))
  for i, g in enumerate(batches):
    now = {name: jnp.asarray(value) for name, value in extra[i % len(extra)].items()}
    got, want = step(*got, g, now), stock(*want, g, now)
    yield got, want


def batches(count, dtype=np.float32, params=PARAMS, scale=1.0):
  rng = np.random.default_rng(0)
  return [jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) * scale, dtype), params) for _ in range(count)]


def without_what_has_no_meaning(after):
  """Accumulators of a window that has not begun hold whatever is left of the last."""
  if not (type(after) is tuple and isinstance(after[-1], ogc.ClippedMultiStepsState)) or after[1].micro_step != 0:
    return after
  return after[0], after[1]._replace(accumulators=None)


def check_close(got, want, rtol=2e-5, atol=2e-6):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  got, want = map(without_what_has_no_meaning, (got, want))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    a, b = (np.asarray(x, np.float32) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


CASES = {
    "windows of one": dict(every_k=1), "windows of three": dict(every_k=3),
    "a schedule of windows": dict(every_k=lambda step: 1 + step % 2),
    "a dynamic scale": dict(every_k=2, loss_scale=ogc.DynamicLossScale(8.0, growth_interval=2)),
    "a static scale": dict(every_k=1, loss_scale=4.0), "monitored": dict(every_k=2, monitor=True),
    "a rule": dict(every_k=2, max_norm=ogc.ema_clip(1.0, decay=0.5, warmup=1)), "a schedule": dict(every_k=2, max_norm=lambda step: 1.0 + step),
    "spikes": dict(every_k=1, skip_spikes=ogc.SpikeRule(limit=4.5)), "propagate": dict(every_k=2, on_nonfinite="propagate"),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_go_as_updates_do(path, case):
  for got, want in run_both(*make(**CASES[case]), batches(7)):
    check_close(got, want)


def test_weights_and_boundaries_are_those_of_update(path):
  extra = [dict(weight=2.0), dict(weight=0.0), dict(weight=1.0, boundary=True), dict(weight=3.0, boundary=False)]
  extra = [dict(boundary=False) | numbers for numbers in extra]
  for got, want in run_both(*make(every_k=4), batches(9), extra=extra):
    check_close(got, want)


def test_bfloat16_parameters_have_float32_moments_and_are_rounded_once(path):
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
  for accumulator_dtype in None, "bfloat16":
    runs = run_both(*make(every_k=2, accumulator_dtype=accumulator_dtype), batches(6, jnp.bfloat16), params)
    for got, want in runs:
      check_close(got[0], want[0], rtol=2.0**-6, atol=2.0**-7)
      assert got[1].inner_state[1][0].nu["a"].dtype == jnp.float32
      check_close(got[1].inner_state, want[1].inner_state, atol=1e-5)


@pytest.mark.parametrize("every_k", [1, 2])
def test_a_bad_window_leaves_no_trace(path, every_k):
  fused, _ = make(every_k=every_k, loss_scale=ogc.DynamicLossScale(8.0))
  step = jax.jit(lambda params, state, g: fused.step(g, state, params))
  params, state = PARAMS | {"a": PARAMS["a"].at[0, 0].set(-0.0)}, fused.init(PARAMS)
  for g in batches(every_k):
    params, state = step(params, state, g)
  before, inner = params, state.inner_state
  for g in batches(every_k):
    params, state = step(params, state, g | {"a": g["a"].at[1, 1].set(np.nan)})
  assert oracle.same_bits(params, before) and oracle.same_bits(state.inner_state, inner)
  assert not ogc.has_updated(state) and ogc.current_loss_scale(state) == 4


def test_between_ends_of_windows_parameters_stay_bit_for_bit(path):
  fused, _ = make(every_k=3)
  params = PARAMS | {"b": jnp.asarray(np.float32([-0.0, 1e-40, np.nan]))}
  after, state = jax.jit(fused.step)(batches(1)[0], fused.init(params), params)
  assert oracle.same_bits(after, params) and state.inner_state[1][0].count == 0


@pytest.mark.parametrize("inner", [dict(nesterov=True), dict(monitor=True), dict(loss_scale=1.0), dict(update_dtype="float32")],
                         ids=lambda options: next(iter(options)))
def test_what_the_kernel_does_not_do_goes_as_update_does(path, inner):
  tx = ogc.clipped_multi_steps(ogc.clipped_adamw(0.1, np.inf, **inner), 1.0, every_k=2)
  for got, want in run_both(tx, tx, batches(4)):
    check_close(got, want)


@pytest.mark.parametrize("max_norm", [1.0, 0, jnp.float32(np.inf), lambda step: np.inf, ogc.zclip()],
                         ids=["one", "zero", "array", "schedule", "rule"])
def test_an_inner_threshold_would_clip_again(max_norm):
  with pytest.raises(ValueError, match="inner: .*max_norm=inf"):
    ogc.clipped_multi_steps(ogc.clipped_adamw(0.1, max_norm), 1.0)


def test_it_takes_an_optimizer_of_another_kind_without_step():
  assert not hasattr(ogc.clipped_multi_steps(optax.adamw(0.1), 1.0), "step")


def test_of_donated_arrays_none_is_copied():
  params = {"w": jnp.ones((256, 256)), "v": jnp.ones((128, 128))}
  fused, _ = make(every_k=4)
  state = fused.init(params)
  lowered = jax.jit(lambda params, state, g: fused.step(g, state, params), donate_argnums=(0, 1)).lower(params, state, params)
  assert targets(lowered.as_text()) == {"optax_globalclip_norm_cpu_v2": 1, "optax_globalclip_adamw_cpu_v2": 1}
  compiled = lowered.compile()
  assert not re.findall(r"= f32\[(?:256,256|128,128)\]\S* copy\(", compiled.as_text())
  assert compiled.memory_analysis().temp_size_in_bytes < params["v"].nbytes


def test_sharded_windows_step_as_on_one_device(path):
  specs = {"a": sharded.P(None, "x"), "b": sharded.P()}
  mesh = sharded.make_mesh(sharded.AUTO, shape=(2, 2))
  fused, _ = make(every_k=2)
  step = jax.jit(lambda params, state, g: fused.step(g, state, params))
  def run(put):
    params = put(PARAMS)
    state = fused.init(params)
    for g in batches(4):
      params, state = step(params, state, put(g))
    return params, state
  check_close(*map(jax.device_get, (run(functools.partial(sharded.put, mesh=mesh, specs=specs)), run(lambda tree: tree))))
