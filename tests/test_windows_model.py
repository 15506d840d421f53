"""Random sequences of micro-batches against a model of the contract in float64 NumPy."""

import functools
import math
from typing import NamedTuple

import jax
import numpy as np
import optax
import optax_globalclip as ogc
import windows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FLOAT32_MAX = float(np.finfo(np.float32).max)
PARAMS = {"a": np.asarray([2, -1], np.float32), "b": np.asarray([0.5, 4, -8], np.float16)}
DECAY, RATE, MOMENTUM = 0.125, 0.5, 0.75
SCALE = ogc.DynamicLossScale(256.0, growth_interval=2, minimum=16.0, maximum=4096.0)


class Config(NamedTuple):
  every_k: int | str
  on_nonfinite: str

  def length(self, optimizer_step):
    """Micro-batches in the window after so many steps of the optimizer."""
    return 2 + optimizer_step % 3 if self.every_k == "schedule" else self.every_k

  def transformation(self, max_norm):
    inner = optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(RATE, momentum=MOMENTUM))
    every_k = self.length if self.every_k == "schedule" else self.every_k
    return ogc.clipped_multi_steps(inner, max_norm, every_k=every_k, loss_scale=SCALE, on_nonfinite=self.on_nonfinite)


class MicroBatch(NamedTuple):
  a: tuple[float, ...]          # true gradients, before the scale
  b: tuple[float, ...]
  weight: float | None = None
  boundary: bool | None = None
  loss_scale: float | None = None   # for this call alone
  restored: bool = False            # the state goes through a file first


class Model:
  """The contract for `chain(add_decayed_weights, sgd with momentum)`, in float64."""

  def __init__(self, config: Config, max_norm: float):
    self.config, self.max_norm = config, max_norm
    self.sums = {name: np.zeros(p.shape) for name, p in PARAMS.items()}
    self.weight_sum, self.held, self.optimizer_step = 0.0, 0, 0
    self.trace = {name: np.zeros(p.shape) for name, p in PARAMS.items()}
    self.scale, self.good_windows = SCALE.initial, 0
    self.norm, self.factor, self.consecutive = 0.0, 0.0, 0
    self.windows = self.bad_windows = 0
    self.updated = False

  def step(self, scaled, weight, boundary, loss_scale):
    """The updates of one micro-batch of gradients `scaled`."""
    scale = self.scale if loss_scale is None else loss_scale
    weight = 1.0 if weight is None else weight
    self.updated = False
    if self.config.every_k == 1:
      # No sum, and so no sum that could overflow.
      self.sums, self.weight_sum = {name: g / scale for name, g in scaled.items()}, float(weight != 0)
      nonfinite = not all(np.isfinite(g).all() for g in scaled.values())
    else:
      if weight:
        self.sums = {name: self._rounded_to_infinity(self.sums[name] + weight * g / scale)
                     for name, g in scaled.items()}
      self.weight_sum += weight
      nonfinite = not all(np.isfinite(g).all() for g in self.sums.values())
    self.held += 1
    closes = self.held >= self.config.length(self.optimizer_step) or boundary
    updates = {name: np.zeros(p.shape) for name, p in PARAMS.items()}
    if closes and self.weight_sum:
      updates = self._close(nonfinite) or updates
    if closes:
      self.sums = {name: np.zeros(p.shape) for name, p in PARAMS.items()}
      self.weight_sum, self.held = 0.0, 0
    return updates

  @staticmethod
  def _rounded_to_infinity(x):
    return np.where(np.abs(x) > FLOAT32_MAX, np.copysign(np.inf, x), x)

  def _close(self, nonfinite):
    mean = {name: total / self.weight_sum for name, total in self.sums.items()}
    self.windows += 1
    self.norm = math.nan if nonfinite else math.sqrt(sum(float(np.sum(g * g)) for g in mean.values()))
    self.factor = min(1.0, self.max_norm / self.norm) if self.norm else 1.0
    if nonfinite:
      self.factor = math.nan if self.config.on_nonfinite == "propagate" else 0.0
      self.bad_windows += 1
      self.consecutive += 1
      self.scale, self.good_windows = max(self.scale * SCALE.backoff_factor, SCALE.minimum), 0
      if self.config.on_nonfinite == "skip":
        return None
    else:
      self.consecutive = 0
      self.good_windows += 1
      if self.good_windows == SCALE.growth_interval:
        self.scale, self.good_windows = min(self.scale * SCALE.growth_factor, SCALE.maximum), 0
    updates = {}
    for name, p in PARAMS.items():
      clipped = np.full(p.shape, self.factor) if nonfinite else mean[name] * self.factor
      self.trace[name] = clipped + DECAY * p.astype(np.float64) + MOMENTUM * self.trace[name]
      updates[name] = -RATE * self.trace[name]
    self.optimizer_step += 1
    self.updated = True
    return updates


@functools.cache
def update_for(path: str, config: Config):
  """One jitted update for all sequences; `path` is part of the key because it is read when tracing."""
  return jax.jit(lambda max_norm, *args, **extra: config.transformation(max_norm).update(*args, **extra))


def check(path: str, config: Config, max_norm: float, sequence: list[MicroBatch]):
  model, update = Model(config, max_norm), update_for(path, config)
  state = config.transformation(max_norm).init(PARAMS)
  types = windows.types(state)
  for i, batch in enumerate(sequence):
    if batch.restored:
      state = windows.through_numpy(state)
    scale = np.float32(ogc.current_loss_scale(state) if batch.loss_scale is None else batch.loss_scale)
    with np.errstate(over="ignore"):
      scaled = {"a": np.float32(np.float64(batch.a) * scale), "b": np.float16(np.float64(batch.b) * scale)}
    # Arguments that are not given stand for themselves, so that one compiled update serves every sequence.
    updates, state = update(np.float32(max_norm), scaled, state, PARAMS, loss_scale=scale,
                            weight=np.float32(1 if batch.weight is None else batch.weight),
                            boundary=np.bool_(bool(batch.boundary)))
    want = model.step({name: np.asarray(g, np.float64) for name, g in scaled.items()}, batch.weight, batch.boundary,
                      batch.loss_scale)
    assert windows.types(state) == types
    updates, state = jax.device_get((updates, state))
    for name, p in PARAMS.items():
      assert updates[name].dtype == p.dtype
      rtol, atol = (2e-5, 1e-6) if p.dtype == np.float32 else (2e-3, 1e-6)
      np.testing.assert_allclose(np.float64(updates[name]), want[name], rtol=rtol, atol=atol, err_msg=f"{i}: {name}")
    metrics = {name: float(value) for name, value in ogc.clip_metrics(state).items()}
    assert bool(ogc.has_updated(state)) == model.updated
    assert metrics["loss_scale"] == model.scale
    assert metrics["steps"] == model.windows and metrics["nonfinite_steps"] == model.bad_windows
    assert metrics["consecutive_nonfinite"] == model.consecutive
    assert int(state.optimizer_step) == model.optimizer_step and int(state.micro_step) == model.held
    if math.isnan(model.norm):
      assert not math.isfinite(metrics["global_norm"])
    else:
      norm = math.inf if model.norm > FLOAT32_MAX else model.norm
      np.testing.assert_allclose(metrics["global_norm"], norm, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(metrics["clip_factor"], model.factor, rtol=1e-5, atol=1e-30)


# Powers of two and small integers, with what float16 cannot hold once scaled (100 * 4096), what sums beyond float32,
# and what is not finite to begin with.
values_a = st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0, 2.0**-12, 2e35]) | st.sampled_from([math.nan, math.inf, 3e38])
values_b = st.sampled_from([0.0, 1.0, -2.0, 0.25, 5.0, 100.0]) | st.sampled_from([math.nan, -math.inf])
good_a, good_b = st.sampled_from([0.0, 1.0, -3.0, 2.0**-12]), st.sampled_from([0.0, 1.0, -2.0, 0.25])


def micro_batches(a, b):
  return st.builds(
      MicroBatch, st.tuples(a, a), st.tuples(b, b, b), weight=st.sampled_from([None, None, 1.0, 3.0, 0.5, 0.0]),
      boundary=st.sampled_from([None, False, False, True]), loss_scale=st.sampled_from([None, None, None, 1.0, 3.0]),
      restored=st.sampled_from([False, False, False, True]))


# Mostly good ones, or no window would ever close.
sequences = st.lists(st.one_of(*[micro_batches(good_a, good_b)] * 4, micro_batches(values_a, values_b)), min_size=8,
                     max_size=16)
configs = st.builds(Config, st.sampled_from([1, 3, "schedule"]), st.sampled_from(["skip", "zero", "propagate"]))


# The fixture sets the same environment for every example.
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(configs, st.sampled_from([0.0, 0.5, 4.0, 1e6]), sequences)
def test_every_sequence_goes_as_the_contract_says(path, config, max_norm, sequence):
  check(path, config, max_norm, sequence)
