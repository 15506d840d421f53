"""Is a window that stands out skipped, and nothing else of the run touched by it?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import Run, make

pytestmark = pytest.mark.reference_repeats


def through(rule, norms, values=None, **options):
  """The run, and the norm of the update of each window of one."""
  run = Run(make(skip_spikes=rule, **({"every_k": 1, "max_norm": np.inf} | options)), jnp.zeros(1))
  extra = [{} if values is None else {"value": value} for value in (values or norms)]
  return run, [abs(float(run(jnp.asarray([x], jnp.float32), **more)[0])) for x, more in zip(norms, extra)]


def test_a_window_above_the_limit_is_skipped(path):
  run, updates = through(ogc.SpikeRule(limit=5), [3, 9, 4, 5])
  assert updates == [3, 0, 4, 5]
  assert int(run.state.optimizer_step) == 3 and run.metrics["spike_steps"] == 1 and run.metrics["steps"] == 4


@pytest.mark.parametrize("rule", [ogc.SpikeRule(factor=2.0, warmup=1), ogc.SpikeRule(window=4, deviations=3.0, warmup=1)],
                         ids=["factor", "window"])
def test_a_norm_that_the_loss_scale_makes_subnormal_tells_nothing(path, rule):
  scale = 2.0**15
  run, _ = through(rule, [norm * scale for norm in (3e-39, 1.0, 1.0, 1.0)], loss_scale=scale)
  assert run.metrics["spike_steps"] == 0 and run.ran


def test_a_skip_is_recorded_as_one_and_as_nothing_else(path):
  run, _ = through(ogc.SpikeRule(limit=5), [3, 9], max_norm=2.0, monitor=True)
  metrics = run.metrics
  assert (metrics["global_norm"], metrics["clip_factor"], metrics["clipped_steps"]) == (9, 0, 1)
  assert metrics["nonfinite_steps"] == metrics["consecutive_nonfinite"] == 0 and not run.ran
  assert ogc.leaf_report(run.state).rows[0].norm == 9


def test_the_optimizer_and_the_scale_are_as_they_were(path, standard_promotion):
  scale = ogc.DynamicLossScale(8.0, growth_interval=2)
  schedule = optax.linear_schedule(1.0, 0.0, 10)
  run, _ = through(ogc.SpikeRule(limit=5), [3 * 8], inner=optax.adam(schedule), loss_scale=scale)
  before = run.state
  update = run(jnp.asarray([9.0 * 8]))
  assert not update.any()
  for name in ("inner_state", "optimizer_step", "scale_state"):
    assert jax.tree.all(jax.tree.map(np.array_equal, getattr(before, name), getattr(run.state, name))), name


def test_a_window_that_is_not_finite_is_no_spike(path):
  scale = ogc.DynamicLossScale(8.0)
  run, updates = through(ogc.SpikeRule(limit=5), [np.inf, np.nan], loss_scale=scale)
  assert updates == [0, 0] and run.metrics["spike_steps"] == 0 and run.metrics["nonfinite_steps"] == 2
  assert run.scale == 2


def test_a_norm_that_stands_out_from_the_last_ones_is_a_spike(path):
  # Mean 2, deviation 1 once four are there.
  rule = ogc.SpikeRule(window=4, deviations=3.0, warmup=4)
  run, updates = through(rule, [1, 3, 1, 3, 5, 5.001])
  assert updates == [1, 3, 1, 3, 5, pytest.approx(5.001)]  # with the 5, the mean is 3 and the deviation 1.41
  run, updates = through(rule, [1, 3, 1, 3, 5.001, 5])
  assert updates == [1, 3, 1, 3, 0, 5]


def test_a_deviation_is_at_least_a_thousandth_of_the_mean(path):
  rule = ogc.SpikeRule(window=4, deviations=5.0, warmup=2)
  assert through(rule, [1, 1, 1.004])[1][-1] == pytest.approx(1.004)
  assert through(rule, [1, 1, 1.006])[1][-1] == 0


def test_a_multiple_of_the_moving_average_is_a_spike(path):
  rule = ogc.SpikeRule(factor=2.0, decay=0.5, warmup=2)
  assert through(rule, [1, 1, 2, 3.1, 3])[1] == [1, 1, 2, 0, 3]  # averages 1, 1, 1.5, 1.5


def test_no_spike_in_the_warmup_and_none_of_its_own_statistics(path):
  rule = ogc.SpikeRule(window=4, deviations=3.0, warmup=3)
  assert through(rule, [1, 100, 1, 100, 400])[1] == [1, 100, 1, 100, 0]


def test_after_so_many_in_a_row_a_spike_is_taken_and_statistics_begin_anew(path):
  rule = ogc.SpikeRule(window=4, deviations=3.0, warmup=2, max_consecutive=2)
  run, updates = through(rule, [1, 1, 50, 50, 50, 50, 51, 1], max_norm=10.0)
  # The fifth is taken, clipped; it and the sixth are the warm-up of what follows.
  assert updates == pytest.approx([1, 1, 0, 0, 10, 10, 0, 1])
  assert run.metrics["spike_steps"] == 3


def test_a_taken_spike_ends_the_row(path):
  rule = ogc.SpikeRule(limit=5, max_consecutive=1)
  assert through(rule, [9, 9, 9, 9])[1] == [0, 9, 0, 9]


def test_what_is_not_finite_neither_ends_a_row_nor_adds_to_it(path):
  rule = ogc.SpikeRule(limit=5, max_consecutive=2)
  assert through(rule, [9, np.nan, 9, 9])[1] == [0, 0, 0, 9]


def test_a_loss_that_stands_out_is_a_spike(path):
  rule = ogc.SpikeRule(limit=2.5, judge="value")
  assert through(rule, [1, 1, 1], [2.0, 3.0, -4.0])[1] == [1, 0, 1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_is_a_spike_and_does_not_enter(path, value):
  rule = ogc.SpikeRule(window=4, deviations=4.0, judge="value", warmup=2)
  run, updates = through(rule, [1] * 5, [2.0, value, 4.0, value, 5.0])
  assert updates == [1, 0, 1, 0, 1]
  assert np.isfinite(jax.tree.leaves(run.state.clip_state.spike_state.values)[0]).all()


def test_either_keeps_statistics_of_both(path):
  rule = ogc.SpikeRule(window=4, deviations=3.0, judge="either", warmup=2)
  assert through(rule, [1, 1, 1, 9, 1], [2.0, 2.0, 9.0, 2.0, 2.0])[1] == [1, 1, 0, 0, 1]


def test_the_loss_of_a_window_is_the_mean_by_its_weights(path):
  seen = []
  def inner_update(updates, state, params=None, *, value, **extra):
    return updates, {"value": jnp.asarray(value)}
  inner = optax.GradientTransformationExtraArgs(lambda params: {"value": jnp.zeros(())}, inner_update)
  run = Run(make(inner, skip_spikes=ogc.SpikeRule(limit=3.5, judge="value"), every_k=2), jnp.zeros(1))
  for values, weights in [((2.0, 6.0), (3.0, 1.0)), ((2.0, 6.0), (1.0, 3.0)), ((np.nan, 3.0), (0.0, 2.0))]:
    for value, weight in zip(values, weights):
      run(jnp.ones(1), value=value, weight=weight)
    seen.append((run.ran, float(run.state.inner_state["value"])))
  assert seen == [(True, 3.0), (False, 3.0), (True, 3.0)]


def test_a_loss_that_is_not_judged_reaches_the_optimizer_as_it_is(path):
  inner = optax.GradientTransformationExtraArgs(
      lambda params: {"value": jnp.zeros(())}, lambda updates, state, params=None, *, value: (updates, {"value": jnp.asarray(value)}))
  run = Run(make(inner, skip_spikes=ogc.SpikeRule(limit=3.5)), jnp.zeros(1))
  run(jnp.ones(1), value=7.0)
  run(jnp.ones(1), value=8.0)
  assert float(run.state.inner_state["value"]) == 8


@pytest.mark.parametrize("max_norm", [ogc.ema_clip(factor=1.0, decay=0.5, warmup=1), ogc.autoclip(50, n=3)],
                         ids=lambda rule: type(rule).__name__)
def test_a_skipped_window_enters_no_threshold(path, max_norm):
  norms = [1, 1.5, 9, 1.2, np.nan, 1.4]
  run, updates = through(ogc.SpikeRule(limit=5), norms, max_norm=max_norm)
  clean, expected = through(None, [1, 1.5, 1.2, 1.4], max_norm=max_norm)
  assert [updates[i] for i in (0, 1, 3, 5)] == expected
  assert run.metrics["threshold"] == clean.metrics["threshold"]


@pytest.mark.parametrize("policy, expected", [("zero", [1, 0, 0]), ("propagate", [1, 0, np.nan])])
def test_a_spike_is_skipped_under_every_policy(path, policy, expected):
  run, updates = through(ogc.SpikeRule(limit=5), [1, 9, np.nan], on_nonfinite=policy)
  np.testing.assert_array_equal(updates, expected)


class Model:
  """`SpikeRule(window=, deviations=)` in float64."""

  def __init__(self, window, deviations, warmup, max_consecutive):
    self.window, self.deviations, self.warmup, self.most = window, deviations, warmup, max_consecutive
    self.norms, self.row = [], 0

  def step(self, norm):
    """`(skipped, margin)`: whether it is skipped, and how far from the limit it was, relative."""
    skipped, margin = False, np.inf
    if len(self.norms) >= self.warmup:
      mean, deviation = np.mean(self.norms), np.std(self.norms)
      limit = mean + self.deviations * max(deviation, 1e-3 * abs(mean))
      margin = abs(norm - limit) / limit
      stands_out = norm > limit
      skipped = stands_out and self.row < self.most
      if stands_out and not skipped:
        self.norms = []
    if skipped:
      self.row += 1
    else:
      self.row = 0
      self.norms = [*self.norms, norm][-self.window:]
    return skipped, margin


RULE = dict(window=8, deviations=2.0, warmup=4, max_consecutive=2)
STEP = {}


@settings(max_examples=40)
@given(level=st.sampled_from([1e-20, 1.0, 1e30]), spread=st.sampled_from([1e-3, 0.3, 1.0]), seed=st.integers(0, 2**32 - 1))
def test_skips_follow_the_formula(level, spread, seed):
  random = np.random.default_rng(seed)
  norms = (level * np.exp(spread * random.standard_normal(40)) * np.where(random.random(40) < 0.1, 10, 1)).astype(np.float32)
  if not STEP:
    tx = make(skip_spikes=ogc.SpikeRule(**RULE), every_k=1, max_norm=np.inf)
    def step(state, norm):
      _, state = tx.update(norm[None], state)
      return state, ~state.updated
    STEP["run"] = jax.jit(lambda norms: jax.lax.scan(step, tx.init(jnp.zeros(1)), norms)[1])
  model = Model(**RULE)
  for got, norm in zip(np.asarray(STEP["run"](norms)), norms.astype(np.float64)):
    expected, margin = model.step(norm)
    if margin < 1e-6:  # either is right
      break
    assert got == expected
