"""Does what is wrong with a rule, a schedule or a SpikeRule get an error that says what, and a state of another one too?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import sharded

X = [jnp.ones(2)]
MAKERS = {"global_clip": ogc.global_clip, "per_tensor_clip": ogc.per_tensor_clip,
          "clipped_multi_steps": lambda max_norm, **options: ogc.clipped_multi_steps(optax.sgd(1.0), max_norm, **options)}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@makers
@pytest.mark.parametrize("value", [ogc.zclip, ogc.ema_clip, ogc.SpikeRule, optax.sgd(0.1)], ids=["class", "class2", "SpikeRule", "sgd"])
def test_what_is_no_rule_is_refused(make, value):
  with pytest.raises(TypeError, match="max_norm: expected a number, a schedule or a rule, got"):
    make(value)


@makers
def test_a_rule_that_is_callable_is_refused(make):
  class Rule:
    def init(self, like):
      return ()

    def update(self, state, norm, finite, *, global_norm):
      return norm, state

    def __call__(self, count):
      return 1.0
  with pytest.raises(TypeError, match="Rule must not be callable"):
    make(Rule())


@pytest.mark.parametrize("make", [ogc.global_clip, MAKERS["clipped_multi_steps"]])
def test_adagc_is_for_per_tensor_clip(make):
  with pytest.raises(ValueError, match="adagc.*per_tensor_clip"):
    make(ogc.adagc())


@pytest.mark.parametrize("make, name", [
    (lambda: ogc.ema_clip(factor=0), "ema_clip: factor"), (lambda: ogc.ema_clip(decay=1.0), "ema_clip: decay"),
    (lambda: ogc.ema_clip(decay=np.nan), "ema_clip: decay"), (lambda: ogc.ema_clip(warmup=0), "ema_clip: warmup"),
    (lambda: ogc.ema_clip(minimum=-1), "ema_clip: minimum"), (lambda: ogc.ema_clip(minimum=2, maximum=1), "minimum <= maximum"),
    (lambda: ogc.zclip(z_threshold=-1), "zclip: z_threshold"), (lambda: ogc.zclip(eps=-1), "zclip: eps"),
    (lambda: ogc.autoclip(101), "autoclip: percentile"), (lambda: ogc.autoclip(n=0), "autoclip: n"),
    (lambda: ogc.adagc(lambda_abs=0), "adagc: lambda_abs"), (lambda: ogc.adagc(lambda_rel=-1), "adagc: lambda_rel"),
    (lambda: ogc.SpikeRule(), "exactly one of"), (lambda: ogc.SpikeRule(limit=1, factor=2), "exactly one of.*factor=2, limit=1"),
    (lambda: ogc.SpikeRule(window=8), "together"), (lambda: ogc.SpikeRule(deviations=3.0), "together"),
    (lambda: ogc.SpikeRule(window=8, deviations=3.0, decay=0.9), "decay"),
    (lambda: ogc.SpikeRule(factor=2.0, judge="value"), "factor"), (lambda: ogc.SpikeRule(factor=2.0, judge="either"), "factor"),
    (lambda: ogc.SpikeRule(limit=1.0, judge="either"), "limit"), (lambda: ogc.SpikeRule(limit=1.0, warmup=3), "limit"),
    (lambda: ogc.SpikeRule(limit=1.0, judge="loss"), "judge"), (lambda: ogc.SpikeRule(limit=1.0, max_consecutive=0), "max_consecutive"),
    (lambda: ogc.SpikeRule(window=8, deviations=3.0, warmup=9), "warmup.*window=8"),
    (lambda: ogc.SpikeRule(window=1, deviations=3.0), "window"), (lambda: ogc.SpikeRule(limit=np.nan), "limit")],
    ids=lambda x: x if isinstance(x, str) else "")
def test_a_number_out_of_its_bounds_is_named(make, name):
  with pytest.raises(ValueError, match=name):
    make()


@pytest.mark.parametrize("make, name", [
    (lambda: ogc.ema_clip(factor="2"), "ema_clip: factor"), (lambda: ogc.ema_clip(warmup=2.0), "ema_clip: warmup.*int"),
    (lambda: ogc.ema_clip(warmup=jnp.int32(2)), "warmup.*static_args"), (lambda: ogc.zclip(decay=True), "zclip: decay"),
    (lambda: ogc.autoclip(n=True), "autoclip: n"), (lambda: ogc.autoclip(percentile=None), "autoclip: percentile"),
    (lambda: ogc.adagc(maximum=[1.0]), "adagc: maximum"), (lambda: ogc.SpikeRule(limit="5"), "SpikeRule: limit"),
    (lambda: ogc.SpikeRule(window=8.0, deviations=3.0), "SpikeRule: window"),
    (lambda: MAKERS["clipped_multi_steps"](1.0, skip_spikes=5.0), "skip_spikes.*SpikeRule")],
    ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_no_number_is_named(make, name):
  with pytest.raises(TypeError, match=name):
    make()


@pytest.mark.parametrize("make", [ogc.global_clip, ogc.per_tensor_clip])
@pytest.mark.parametrize("max_norm", [ogc.ema_clip(), lambda count: 1.0], ids=["rule", "schedule"])
def test_an_update_without_its_state_is_refused(make, max_norm):
  for state in (None, optax.EmptyState()):
    with pytest.raises(TypeError, match="ThresholdState"):
      make(max_norm).update(X, state)


@makers
def test_a_state_of_another_rule_is_refused(make):
  state = make(ogc.ema_clip()).init(X)
  with pytest.raises(ValueError, match="another max_norm than zclip"):
    make(ogc.zclip()).update(X, state, X)
  with pytest.raises(ValueError, match="made with a schedule or a rule|another max_norm"):
    make(ogc.zclip()).update(X, make(lambda count: 1.0).init(X), X)


def test_a_state_made_with_a_number_is_refused_by_a_windows_rule():
  make = MAKERS["clipped_multi_steps"]
  with pytest.raises(ValueError, match="state: made with a number for max_norm"):
    make(ogc.zclip()).update(X, make(1.0).init(X), X)
  with pytest.raises(ValueError, match="state: made with a schedule, a rule or skip_spikes"):
    make(1.0).update(X, make(ogc.zclip()).init(X), X)
  with pytest.raises(ValueError, match="skip_spikes"):
    make(ogc.zclip(), skip_spikes=ogc.SpikeRule(limit=1)).update(X, make(ogc.zclip()).init(X), X)


@makers
def test_a_state_of_a_rule_that_keeps_another_number_of_norms_is_refused(make):
  state = make(ogc.autoclip(n=8)).init(X)
  with pytest.raises(ValueError, match=r"another max_norm than autoclip\(.*n=16.*recent: expected shape \(.*16.*got.*8"):
    make(ogc.autoclip(n=16)).update(X, state, X)


@pytest.mark.parametrize("made, wanted", [(8, 32), (32, 8)])
def test_a_state_of_a_spike_rule_with_another_window_is_refused(made, wanted):
  old, new = (MAKERS["clipped_multi_steps"](1.0, skip_spikes=ogc.SpikeRule(window=window, deviations=6.0))
              for window in (made, wanted))
  with pytest.raises(ValueError, match=rf"another skip_spikes than SpikeRule\(window={wanted}.*recent: expected shape \({wanted},"):
    new.update(X, old.init(X), X)


@pytest.mark.parametrize("options", [
    dict(max_norm=ogc.ema_clip(factor=10**400)), dict(max_norm=ogc.autoclip(minimum=10**400, maximum=10**401)),
    dict(max_norm=lambda count: 10**400), dict(max_norm=1.0, skip_spikes=ogc.SpikeRule(limit=10**400)),
    dict(max_norm=1.0, skip_spikes=ogc.SpikeRule(window=4, deviations=10**400)),
    dict(max_norm=1.0, skip_spikes=ogc.SpikeRule(factor=10**400))],
    ids=["ema_clip", "autoclip", "schedule", "limit", "deviations", "factor"])
def test_a_number_beyond_a_float_is_infinite(options):
  tx = ogc.clipped_multi_steps(optax.sgd(-1.0), **options)
  state = tx.init(X)
  for _ in range(3):
    updates, state = tx.update(X, state, X)
  np.testing.assert_allclose(updates[0], X[0] if options["max_norm"] != 1.0 else X[0] / 2**0.5, rtol=1e-6)


@makers
def test_a_spike_rule_is_no_threshold(make):
  with pytest.raises(TypeError, match="max_norm: a SpikeRule gives no threshold.*skip_spikes"):
    make(ogc.SpikeRule(limit=3.0))


@pytest.mark.parametrize("rule, clip", [(ogc.zclip, "global_clip"), (ogc.ema_clip, "global_clip"), (ogc.autoclip, "global_clip"),
                                        (ogc.adagc, "per_tensor_clip")])
def test_a_rule_in_the_place_of_a_transformation_says_where_it_belongs(rule, clip):
  for tx in optax.chain(rule(), optax.sgd(1.0)), ogc.clipped_multi_steps(rule(), 1.0):
    with pytest.raises(TypeError, match=rf"{rule.__name__}: a rule for the threshold is no .*{clip}\({rule.__name__}\(\)\)"):
      tx.init(X)


def test_a_rule_for_other_leaves_is_refused():
  tx = ogc.per_tensor_clip(ogc.adagc())
  with pytest.raises(ValueError, match="init made a rule for 1 leaves of its parameters, but the updates have 2"):
    tx.update([jnp.ones(1), jnp.ones(1)], tx.init(X))


@pytest.mark.parametrize("wrong, message", [
    (lambda norm: (jnp.stack([norm, norm]), ()), r"the threshold of Rule: expected shape \(\)"),
    (lambda norm: (norm.astype(jnp.bfloat16), ()), "the threshold of Rule: expected shape .* float32, got .* bfloat16"),
    (lambda norm: (norm, {"more": norm}), "the state of Rule: expected the structure")])
def test_a_rule_that_returns_something_else_is_named(wrong, message):
  class Rule:
    def init(self, like):
      return ()

    def update(self, state, norm, finite, *, global_norm):
      return wrong(norm)
  tx = ogc.global_clip(Rule())
  with pytest.raises(TypeError, match=message):
    tx.update(X, tx.init(X))


@pytest.mark.parametrize("value", ["1", jnp.ones(2), None])
def test_a_schedule_that_returns_no_number_is_named(value):
  tx = ogc.global_clip(lambda count: value)
  with pytest.raises(TypeError, match="max_norm: what the schedule returned"):
    tx.update(X, tx.init(X))


def test_the_loss_that_is_judged_must_be_there():
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, skip_spikes=ogc.SpikeRule(limit=5.0, judge="value"))
  with pytest.raises(TypeError, match=r"value: expected the loss, update\(\.\.\., value=loss\)"):
    tx.update(X, tx.init(X), X)
  with pytest.raises(TypeError, match="value: expected a number"):
    tx.update(X, tx.init(X), X, value=jnp.ones(2))


def test_a_loss_that_differs_between_devices_is_refused():
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, skip_spikes=ogc.SpikeRule(limit=5.0, judge="value"))
  state, P = tx.init(X), jax.sharding.PartitionSpec
  def update(losses):
    return tx.update(X, state, X, value=losses[0])[0]
  with pytest.raises(TypeError, match=r"value: expected the same loss on every device, got one that varies over \['x'\]"):
    jax.shard_map(update, mesh=sharded.line(4), in_specs=P("x"), out_specs=P())(jnp.ones(4))
