"""`SpikeRule`: which windows `clipped_multi_steps(skip_spikes=...)` leaves out, and the statistics it goes by."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_globalclip import _arguments, _compat, _reference, _statistics
from optax_globalclip._arguments import as_dtype


class SpikeState(NamedTuple):
  """What a `SpikeRule` goes by; statistics that it does not need are None."""
  norms: Any                      # statistics of the norms of accepted windows
  values: Any                     # of their losses
  spike_steps: jax.Array          # int32: windows that were skipped as spikes
  consecutive_spikes: jax.Array   # int32: of them the last ones in a row
  value_sum: jax.Array | None     # float32: sum of weight * value of the window so far, where the value is judged


class Verdict(NamedTuple):
  """What a `SpikeRule` says of a window."""
  skipped: jax.Array  # bool
  taken: jax.Array    # bool: one that stands out, and is taken because too many before it were skipped


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeRule:
  r"""A window that stands out from the last ones, by its norm or its loss, is skipped.

  A number x stands out where it is above, not at, a limit:

  .. math:: x > \text{mean} + \text{deviations} \cdot \max(\text{std}, 10^{-3} |\text{mean}|) \quad\text{or}\quad
            x > \text{factor} \cdot \mu \quad\text{or}\quad x > \text{limit}

  with mean and standard deviation (the population's) of the last `window` accepted ones, or μ their moving average. A
  skipped window gives zero updates; `inner` does not run, schedules and the loss scale do not move, and nothing of it
  enters the statistics, those of a threshold rule included. After `max_consecutive` in a row the next is taken, clipped,
  and the statistics begin anew with it, so that a lasting shift of the data does not stop the run.

  The norm is that of the window's gradient before the clip, in true units. One that is 0 or infinite enters no
  statistics. The value is the loss, `update(..., value=loss)`, not multiplied by a loss scale: over a window its
  mean by the weights of the micro-batches, which also reaches `inner` as `value`. A NaN or infinite one is a spike.

  Args:
    window: how many accepted windows are remembered, an int, at least 2; with `deviations`.
    deviations: how many standard deviations above the mean is a spike; above 0. May be traced.
    factor: how many times the moving average is a spike; above 0; with `decay`. For norms alone: a loss may be negative.
      May be traced.
    decay: of the moving average; at least 0, below 1; default 0.99. May be traced.
    limit: a fixed limit. May be traced.
    judge: "norm", "value", or "either" of the two, each with statistics of its own.
    warmup: accepted windows before the first is judged; an int. Default: half of `window`, at least 2; 25 with `factor`.
    max_consecutive: how many windows in a row may be skipped; an int, at least 1.

  Raises:
    ValueError: not exactly one of `window` with `deviations`, `factor`, and `limit`; `decay` without `factor`; `factor`
      where the value is judged; `limit` with "either" or with `warmup`; a number outside of its bounds.
    TypeError: what is no number; a `window`, `warmup` or `max_consecutive` that is no int.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_globalclip as ogc
    >>> tx = ogc.clipped_multi_steps(optax.sgd(1.0), 10.0, skip_spikes=ogc.SpikeRule(limit=5))
    >>> state = tx.init(jnp.zeros(1))
    >>> for norm in [3., 9., 4.]:
    ...   updates, state = tx.update(jnp.array([norm]), state)
    >>> int(state.optimizer_step), int(ogc.clip_metrics(state)["spike_steps"])
    (2, 1)

  References:
    OLMo-core's `SkipStepOptimizer` (window and deviations, of loss or norm).
  """
  window: int | None = None
  deviations: Any = None
  factor: Any = None
  decay: Any = None
  limit: Any = None
  judge: Literal["norm", "value", "either"] = "norm"
  warmup: int | None = None
  max_consecutive: int = 5

  def __post_init__(self) -> None:
    by_window = self.window is not None or self.deviations is not None
    if by_window + (self.factor is not None) + (self.limit is not None) != 1:
      raise ValueError("SpikeRule: expected exactly one of window= with deviations=, factor= (with decay=), and limit=; got "
                       + (", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self)[:5]
                                    if getattr(self, f.name) is not None) or "none"))
    if by_window and (self.window is None or self.deviations is None):
      raise ValueError(f"SpikeRule: expected window= and deviations= together, got window={self.window!r}, "
                       f"deviations={self.deviations!r}")
    if self.decay is not None and self.factor is None:
      raise ValueError("SpikeRule: decay: is of the moving average that factor= multiplies; expected factor= beside it")
    _arguments.check_choice("SpikeRule: judge", self.judge, ("norm", "value", "either"))
    if self.factor is not None and self.judges_value:
      raise ValueError(f"SpikeRule: factor: a multiple of a mean says nothing of a loss, which may be negative; expected "
                       f"judge='norm', got {self.judge!r}")
    if self.limit is not None and (self.judge == "either" or self.warmup is not None):
      raise ValueError("SpikeRule: limit: one number for norms or for values, from the first window on; expected judge='norm' "
                       f"or 'value' and no warmup, got judge={self.judge!r}, warmup={self.warmup!r}")
    self._check_numbers()

  def _check_numbers(self):
    if self.window is not None:
      _arguments.check_whole("SpikeRule", "window", self.window, 2)
      _arguments.check_positive("SpikeRule", "deviations", self.deviations)
    if self.factor is not None:
      _arguments.check_positive("SpikeRule", "factor", self.factor)
    if self.decay is not None:
      _arguments.check_decay("SpikeRule", self.decay)
    if self.limit is not None:
      _arguments.check_bounds("SpikeRule", "limit", self.limit, low=-np.inf)
    if self.warmup is not None:
      _arguments.check_whole("SpikeRule", "warmup", self.warmup, 0)
      if self.window is not None and self.warmup > self.window:
        raise ValueError(f"SpikeRule: warmup: expected at most window={self.window}, got {self.warmup}")
    _arguments.check_whole("SpikeRule", "max_consecutive", self.max_consecutive, 1)

  @property
  def judges_norm(self) -> bool:
    return self.judge != "value"

  @property
  def judges_value(self) -> bool:
    return self.judge != "norm"

  def init(self, dtype: np.dtype) -> SpikeState:
    """The first state, for norms of this dtype."""
    return SpikeState(self._init_statistics(dtype) if self.judges_norm else None,
                      self._init_statistics(np.dtype(np.float32)) if self.judges_value else None,
                      jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32),
                      jnp.zeros((), jnp.float32) if self.judges_value else None)

  def _init_statistics(self, dtype):
    like = jax.ShapeDtypeStruct((), dtype)
    if self.window is not None:
      return _statistics.init_recent(self.window, like)
    return None if self.factor is None else _statistics.init_mean(like)

  def verdict(self, state: SpikeState, norm: jax.Array, value: jax.Array | None) -> Verdict:
    """Of a window of this norm and mean loss."""
    stands_out = jnp.zeros((), jnp.bool_)
    if self.judges_norm:
      stands_out = stands_out | self._stands_out(state.norms, norm)
    if self.judges_value:
      stands_out = stands_out | self._stands_out(state.values, value) | ~jnp.isfinite(value)
    may_skip = state.consecutive_spikes < self.max_consecutive
    return Verdict(stands_out & may_skip, stands_out & ~may_skip)

  def _warmup(self) -> int:
    if self.warmup is not None:
      return self.warmup
    return 25 if self.factor is not None else max(2, self.window // 2)

  def _stands_out(self, statistics, x: jax.Array) -> jax.Array:
    if self.limit is not None:
      return x > as_dtype(self.limit, x.dtype)
    if self.factor is not None:
      x = x.astype(statistics.mean.dtype)
      return (statistics.taken >= self._warmup()) & (x > as_dtype(self.factor, x.dtype) * statistics.mean)
    x = x.astype(statistics.recent.dtype)
    mean, deviation = _statistics.moments(statistics)
    deviation = jnp.maximum(deviation, np.asarray(1e-3, x.dtype) * jnp.abs(mean))
    judged = (statistics.filled > 0) & (statistics.filled >= self._warmup())
    return judged & (x > mean + as_dtype(self.deviations, x.dtype) * deviation)

  def update(self, state: SpikeState, verdict: Verdict, norm: jax.Array, value: jax.Array | None,
             bad: jax.Array) -> SpikeState:
    """The state after a window; one that is bad leaves it as it is."""
    verdict = Verdict(verdict.skipped & ~bad, verdict.taken & ~bad)
    accepted = ~verdict.skipped & ~bad
    def move(statistics, x, *, positive):
      if statistics is None:
        return None
      # A taken spike begins the statistics anew.
      statistics = jax.tree.map(lambda s: jnp.where(verdict.taken, jnp.zeros_like(s), s), statistics)
      x = x.astype((statistics.recent if self.window is not None else statistics.mean).dtype)
      enters = accepted & jnp.isfinite(x)
      if positive:
        enters = enters & (_reference.flush(x) > 0)
      x = jnp.where(enters, x, jnp.zeros_like(x))
      if self.factor is not None:
        return _statistics.add_to_mean(statistics, x, enters, self._decay(), self._warmup())
      return _statistics.add_to_recent(statistics, x, enters)
    return state._replace(
        norms=move(state.norms, norm, positive=True),
        values=None if value is None else move(state.values, value, positive=False),
        spike_steps=jnp.where(verdict.skipped, optax.safe_increment(state.spike_steps), state.spike_steps),
        consecutive_spikes=jnp.where(accepted, 0, state.consecutive_spikes + verdict.skipped.astype(jnp.int32)))

  def _decay(self):
    return 0.99 if self.decay is None else self.decay


def read_value(value: Any) -> jax.Array:
  """The loss of a micro-batch, as float32; infinite where it is not finite."""
  if value is None:
    raise TypeError("value: expected the loss, update(..., value=loss), which skip_spikes judges; got none")
  _arguments.check_number("value", value)
  if isinstance(value, jax.Array) and (axes := _compat.varying_axes(value)):
    raise TypeError(f"value: expected the same loss on every device, got one that varies over {sorted(axes)}: take its mean "
                    "over them (jax.lax.pmean)")
  value = _arguments.as_scalar(value, np.float32)
  return jax.lax.select(jnp.isfinite(value), value, np.asarray(np.inf, np.float32))
