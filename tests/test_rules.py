"""Does each rule follow its published formula, over any history of norms?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax_globalclip as ogc
import pytest
import rule_models
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.reference_repeats

LENGTH = 48
NUMBERS = {
    "ema_clip": [dict(factor=2.0, decay=0.9, warmup=3), dict(factor=1.1, decay=0.99, warmup=1, minimum=0.5),
                 dict(factor=3.0, decay=0.0, warmup=10, maximum=5.0)],
    "zclip": [dict(z_threshold=2.5, decay=0.97, warmup=5), dict(z_threshold=1.0, decay=0.5, warmup=1, maximum=8.0),
              dict(z_threshold=3.0, decay=0.9, warmup=20, minimum=2.0)],
    "autoclip": [dict(percentile=10.0, n=7), dict(percentile=95.0, n=100, maximum=50.0), dict(percentile=33.0, n=1)],
    "adagc": [dict(lambda_rel=1.05, lambda_abs=1.0, decay=0.98, warmup=6),
              dict(lambda_rel=2.0, lambda_abs=0.1, decay=0.5, warmup=1, minimum=0.01)],
}
MODELS = {"ema_clip": rule_models.Ema, "zclip": rule_models.ZClip, "autoclip": rule_models.AutoClip,
          "adagc": rule_models.AdaGC}
CASES = [(name, i) for name, of_rule in NUMBERS.items() for i in range(len(of_rule))]


@functools.cache
def thresholds(name, i, leaves):
  """A jitted run of the rule over a history `(norms T[t, leaves], finite bool[t], global norms T[t])`."""
  rule = getattr(ogc, name)(**NUMBERS[name][i])
  def run(norms, finite, global_norms):
    def step(state, now):
      norm, good, global_norm = now
      threshold, state = rule.update(state, norm, good & (norm < np.inf), global_norm=global_norm)
      return state, threshold
    like = jax.ShapeDtypeStruct(norms.shape[1:], norms.dtype)
    return jax.lax.scan(step, rule.init(like), (norms, finite, global_norms))[1]
  return jax.jit(run)


def of_model(name, i, norms, finite, global_norms):
  out = np.zeros(norms.shape)
  for leaf in range(norms.shape[1]):
    model = MODELS[name](**NUMBERS[name][i])
    for t, norm in enumerate(norms[:, leaf].astype(np.float64)):
      out[t, leaf] = model.step(norm, bool(finite[t]) and np.isfinite(norm), float(global_norms[t]))
  return out


def tolerance(name, i):
  """Of a threshold, relative: what rounding to float32 at each step may add up to."""
  return max(1e-6, 2.0**-23 / (1 - NUMBERS[name][i].get("decay", 0)))


def bad_thresholds(name, i, norms, finite):
  """Where the rule and its model differ: `(step, leaf, got, expected)`."""
  with np.errstate(over="ignore"):
    global_norms = np.sqrt(np.sum(norms.astype(np.float64) ** 2, axis=1)).astype(np.float32)
  got = np.asarray(thresholds(name, i, norms.shape[1])(norms, finite, global_norms))
  expected = of_model(name, i, norms, finite, global_norms)
  expected = np.where(expected > np.finfo(np.float32).max, np.inf, expected)
  with np.errstate(invalid="ignore"):  # inf - inf
    same = (got == expected) | (np.abs(got - expected) <= tolerance(name, i) * np.abs(expected))
  return [(t, leaf, got[t, leaf], expected[t, leaf]) for t, leaf in np.argwhere(~same)]


@st.composite
def histories(draw, leaves):
  """Norms around a drifting level, with spikes, zeros, shifts, and updates that are not finite."""
  random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  level = 10.0 ** draw(st.sampled_from([-20, -3, 0, 0, 5, 30]))
  spread = draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0]))
  norms = level * np.exp(spread * random.standard_normal((LENGTH, leaves)))
  norms[random.random((LENGTH, leaves)) < draw(st.sampled_from([0, 0.1]))] *= draw(st.sampled_from([10, 100, 1e6]))
  norms[random.random((LENGTH, leaves)) < draw(st.sampled_from([0, 0.1, 0.9]))] = 0
  norms[LENGTH // 2:] *= draw(st.sampled_from([1, 1, 20, 0.01]))  # a shift, as after a restart on other data
  finite = random.random(LENGTH) >= draw(st.sampled_from([0, 0.1, 0.9]))
  norms[~finite] = draw(st.sampled_from([np.nan, np.inf, 1e3]))
  with np.errstate(over="ignore"):
    return norms.astype(np.float32), finite


@pytest.mark.parametrize("name, i", CASES)
@settings(max_examples=60)
@given(data=st.data())
def test_a_rule_follows_its_formula(name, i, data):
  norms, finite = data.draw(histories(3 if name == "adagc" else 1))
  assert bad_thresholds(name, i, norms, finite) == []


@pytest.mark.parametrize("name, i", [case for case in CASES if case[0] != "adagc"])
@settings(max_examples=10)
@given(data=st.data())
def test_a_rule_of_several_leaves_is_a_rule_each(name, i, data):
  norms, finite = data.draw(histories(4))
  assert bad_thresholds(name, i, norms, finite) == []


@pytest.mark.parametrize("name, i", CASES)
def test_a_rule_follows_its_formula_near_the_largest_float32(name, i):
  random = np.random.default_rng(1)
  norms = np.float32(3.4e38) * random.random((LENGTH, 1), np.float32)
  assert bad_thresholds(name, i, norms, np.ones(LENGTH, bool)) == []


def run(rule, norms, make=ogc.global_clip):
  """`(threshold, update)` of a leaf of one element, step by step through the clip."""
  tx = make(rule)
  state, update, out = tx.init([jnp.zeros(1)]), jax.jit(tx.update), []
  for norm in norms:
    updates, state = update([jnp.asarray([norm], jnp.float32)], state)
    out.append((float(np.ravel(state.threshold)[0]), float(updates[0][0])))
  return out


def test_ema_clip_takes_in_the_norm_after_the_clip(path):
  rule = ogc.ema_clip(factor=2.0, decay=0.5, warmup=2)
  assert run(rule, [1, 1, 1, 1, 10, 1]) == [(np.inf, 1), (np.inf, 1), (2, 1), (2, 1), (2, 2), (3, 1)]


def test_ema_clip_begins_with_the_mean_of_the_warmup(path):
  assert run(ogc.ema_clip(factor=2.0, decay=0.5, warmup=2), [1, 3, 9])[-1] == (4, 4)


def test_zclip_shrinks_what_is_further_out_more(path):
  # Mean 2, deviation 1 after the warm-up; z of 12 is 10.
  (_, near), = run(ogc.zclip(2.0, warmup=2, eps=0.0), [1, 3, 4.5])[2:]
  (_, far), = run(ogc.zclip(2.0, warmup=2, eps=0.0), [1, 3, 12])[2:]
  np.testing.assert_allclose([near, far], [2 + 4 / 2.5, 2 + 4 / 10], rtol=1e-6)


def test_zclip_leaves_what_is_no_outlier(path):
  assert run(ogc.zclip(2.0, warmup=2, eps=0.0), [1, 3, 4])[-1] == (4, 4)
  assert run(ogc.zclip(2.5, warmup=2), [1, 1, 1.000001])[-1][1] == np.float32(1.000001)


def test_autoclip_counts_the_norm_of_now(path):
  assert run(ogc.autoclip(50, n=4), [1, 2, 3, 4, 100]) == [(1, 1), (1.5, 1.5), (2, 2), (2.5, 2.5), (3.5, 3.5)]


def test_adagc_clips_by_the_global_norm_first(path):
  tx = ogc.per_tensor_clip(ogc.adagc(lambda_rel=2.0, lambda_abs=5.0, warmup=1))
  state = tx.init([jnp.zeros(1)] * 2)
  updates, state = tx.update([jnp.asarray([6.0]), jnp.asarray([8.0])], state)
  np.testing.assert_allclose(np.ravel(updates), [3, 4], rtol=1e-6)
  updates, state = tx.update([jnp.asarray([60.0]), jnp.asarray([7.0])], state)
  np.testing.assert_allclose(np.ravel(updates), [6, 7], rtol=1e-6)


@pytest.mark.parametrize("rule", [ogc.ema_clip(warmup=1), ogc.zclip(warmup=1), ogc.autoclip(50, n=4), ogc.adagc(warmup=1)],
                         ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_what_tells_nothing_leaves_no_trace(path, rule, bad):
  norms = [1, 1.5, 1.2, 1.4]
  clean, dirty = (run(rule, xs, ogc.per_tensor_clip) for xs in (norms, [1, 1.5, bad, 1.2, 1.4]))
  assert [dirty[i] for i in (0, 1, 3, 4)] == clean


@pytest.mark.parametrize("rule", [ogc.ema_clip(warmup=1), ogc.zclip(warmup=1), ogc.autoclip(50, n=4)],
                         ids=["ema_clip", "zclip", "autoclip"])
@pytest.mark.parametrize("make", [ogc.global_clip, ogc.per_tensor_clip])
def test_a_norm_that_the_loss_scale_makes_subnormal_tells_nothing(path, make, rule):
  scale = 2.0**15
  tx = make(rule, loss_scale=scale)
  state, update = tx.init([jnp.zeros(1)]), jax.jit(tx.update)
  for norm in (3e-39, 1.0, 1.0):
    updates, state = update([jnp.full(1, norm * scale, jnp.float32)], state)
  assert float(updates[0][0]) == 1 and float(state.threshold.sum()) >= 1


def test_bounds_hold_in_the_warmup_too(path):
  rule = ogc.ema_clip(factor=2.0, decay=0.5, warmup=2, minimum=3.0, maximum=4.0)
  assert [threshold for threshold, _ in run(rule, [10, 1, 1, 0.1, 0.1, 0.1])] == [4, 4, 4, 3.5, 3, 3]


def test_a_norm_beyond_float32_is_no_infinity_in_the_average(path):
  norms = run(ogc.ema_clip(factor=2.0, decay=0.5, warmup=1), [1, 1])
  tx = ogc.global_clip(ogc.ema_clip(factor=2.0, decay=0.5, warmup=1))
  state = tx.init([jnp.zeros(4)])
  for x in (0.5, 3e38, 0.5):
    updates, state = tx.update([jnp.full(4, x, jnp.float32)], state)
    assert np.isfinite(updates[0]).all()
  assert float(state.threshold) == norms[-1][0]


class Doubling:
  """A rule of a user's own: the threshold doubles with every update."""

  def init(self, like):
    return {"next": jnp.ones(like.shape, like.dtype)}

  def update(self, state, norm, finite, *, global_norm):
    return state["next"], {"next": state["next"] * 2}


def test_a_rule_of_ones_own_is_followed(path):
  assert [threshold for threshold, _ in run(Doubling(), [9, 9, 9])] == [1, 2, 4]
  assert isinstance(Doubling(), ogc.ThresholdRule)


class Exactly:
  """The threshold is the norm itself."""

  def init(self, like):
    return ()

  def update(self, state, norm, finite, *, global_norm):
    return norm, state


def test_a_threshold_that_equals_the_norm_clips_nothing(path):
  random = np.random.default_rng(0)
  for _ in range(20):
    tree = [random.standard_normal(37).astype(np.float32), random.standard_normal(5).astype(np.float16)]
    updates, _ = ogc.global_clip(Exactly()).update(tree, ogc.global_clip(Exactly()).init(tree))
    assert all(np.array_equal(x, y) for x, y in zip(tree, updates))


@pytest.mark.parametrize("threshold", [np.nan, -1.0])
@pytest.mark.parametrize("policy, expected", [("propagate", np.nan), ("zero", 0.0)])
def test_a_threshold_that_cannot_be_used_makes_the_update_bad(path, threshold, policy, expected):
  class Bad(Doubling):
    def update(self, state, norm, finite, *, global_norm):
      return jnp.full_like(norm, threshold), state
  tx = ogc.global_clip(Bad(), on_nonfinite=policy, monitor=True)
  updates, state = tx.update([jnp.ones(2)], tx.init([jnp.ones(2)]))
  np.testing.assert_array_equal(updates[0], np.full(2, expected))
  assert int(ogc.clip_metrics(state)["nonfinite_steps"]) == 1
