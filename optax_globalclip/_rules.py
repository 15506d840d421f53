"""Rules for a threshold that follows the run: `zclip`, `ema_clip`, `autoclip`, `adagc`, and what a rule of one's own is."""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from optax_globalclip import _statistics
from optax_globalclip._arguments import as_dtype, check_bounds, check_decay, check_positive, check_whole


@runtime_checkable
class ThresholdRule(Protocol):
  """A rule for the threshold: what `max_norm` may be. Both methods are pure functions of arrays; no call is traced twice.

  It must not be callable: that is a schedule.

  Examples:
    A threshold of three times the last norm:

    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> class ThriceTheLast:
    ...   def init(self, like):
    ...     return jnp.full(like.shape, jnp.inf, like.dtype)
    ...   def update(self, state, norm, finite, *, global_norm):
    ...     return 3 * state, jnp.where(finite, norm, state)
    >>> isinstance(ThriceTheLast(), ogc.ThresholdRule)
    True
    >>> tx = ogc.global_clip(ThriceTheLast())
    >>> state = tx.init([jnp.zeros(1)])
    >>> for norm in [2., 50.]:
    ...   updates, state = tx.update([jnp.array([norm])], state)
    >>> float(updates[0][0])
    6.0
  """

  def init(self, like: jax.ShapeDtypeStruct) -> Any:
    """The first state: a pytree of arrays whose structure, shapes and dtypes never change.

    `like` has the shape and the dtype T of the norms: T[], or T[n] under `per_tensor_clip`, one for each leaf.
    """

  def update(self, state: Any, norm: jax.Array, finite: jax.Array, *, global_norm: jax.Array) -> tuple[jax.Array, Any]:
    """`(threshold, state)` for an update of this norm.

    Args:
      state: what `init` or the last call returned.
      norm: T[] or T[n], before the clip, in true units. It may be NaN or infinite where `finite` is False.
      finite: bool of the same shape: whether the norm may enter the statistics. False where the update holds NaN or
        infinity anywhere, where the norm is beyond its dtype, and in a window that is skipped as a spike.
      global_norm: T[], the norm of the whole tree.

    Returns:
      A threshold of the norm's shape, at least 0, which the norm is compared with now; the state that follows.
    """


def _enters(norm: jax.Array, finite: jax.Array) -> jax.Array:
  """A norm of 0 tells nothing of the run, and could hold a threshold at 0 for ever."""
  return finite & (norm > 0)


def _known(norm: jax.Array, enters: jax.Array) -> jax.Array:
  return jnp.where(enters, norm, jnp.zeros_like(norm))


@dataclasses.dataclass(frozen=True)
class _Bounded:
  """A rule whose thresholds stay within `minimum` and `maximum`."""
  minimum: Any = dataclasses.field(default=0.0, kw_only=True)
  maximum: Any = dataclasses.field(default=np.inf, kw_only=True)

  leaves_only = False  # whether it is for `per_tensor_clip` alone

  def __post_init__(self) -> None:
    rule = type(self).__name__.strip("_")
    for name in ("minimum", "maximum"):
      check_bounds(rule, name, getattr(self, name))
    if not any(isinstance(x, jax.Array) for x in (self.minimum, self.maximum)) and self.minimum > self.maximum:
      raise ValueError(f"{rule}: expected minimum <= maximum, got {self.minimum!r} and {self.maximum!r}")
    self.check(rule)

  def init(self, like: jax.ShapeDtypeStruct) -> Any:
    if not (hasattr(like, "shape") and hasattr(like, "dtype")):
      name = type(self).__name__
      raise TypeError(f"{name}: a rule for the threshold is no transformation by itself: expected it as max_norm, as in "
                      f"{'per_tensor_clip' if self.leaves_only else 'global_clip'}({name}())")
    return self.first(like)

  def bound(self, threshold: jax.Array, known: jax.Array) -> jax.Array:
    """The threshold within its bounds, and `maximum` where nothing is known yet."""
    low, high = (jnp.asarray(as_dtype(x, threshold.dtype)) for x in (self.minimum, self.maximum))
    # An infinity that is made, only to be left out, stops JAX's debuggers: this one stays apart until it is wanted.
    return jnp.where(known, jnp.minimum(jnp.maximum(threshold, low), high), high)


# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ema_clip(_Bounded):
  r"""The threshold is a multiple of the moving average of the norms.

  .. math:: \tau_t = \text{factor} \cdot \mu_{t-1}, \qquad
            \mu_t = \text{decay} \cdot \mu_{t-1} + (1 - \text{decay}) \min(\|g_t\|, \tau_t)

  Over the first `warmup` norms the average is their mean and the threshold is `maximum`. What enters is the norm after
  the clip, so that a spike raises the average by little. A norm that is NaN, infinite or 0 does not enter.

  Args:
    factor: how many times the average a norm may be; above 0. May be traced.
    decay: of the average; at least 0, below 1. May be traced.
    warmup: norms before the first threshold; an int, at least 1.
    minimum: no threshold is below it; at least 0. May be traced.
    maximum: no threshold is above it, in the warm-up too. May be traced.

  Returns:
    A rule: pass it as `max_norm`. Under `per_tensor_clip` each leaf has an average of its own.

  Raises:
    ValueError: a number outside of these bounds.
    TypeError: what is no number; a `warmup` that is no int.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> tx = ogc.global_clip(ogc.ema_clip(factor=2.0, decay=0.5, warmup=2))
    >>> state = tx.init([jnp.zeros(1)])
    >>> for norm in [1., 1., 1., 1., 10.]:
    ...   updates, state = tx.update([jnp.array([norm])], state)
    >>> float(updates[0][0]), float(state.threshold)
    (2.0, 2.0)

  References:
    The moving average as in AdaGC (Wang et al., arXiv 2502.11034), for the global norm.
  """
  factor: Any = 2.0
  decay: Any = 0.99
  warmup: int = 25

  def check(self, rule: str) -> None:
    check_positive(rule, "factor", self.factor)
    check_decay(rule, self.decay)
    check_whole(rule, "warmup", self.warmup, 1)

  def first(self, like: jax.ShapeDtypeStruct) -> _statistics.Mean:
    return _statistics.init_mean(like)

  def update(self, state: _statistics.Mean, norm: jax.Array, finite: jax.Array, *,
             global_norm: jax.Array) -> tuple[jax.Array, _statistics.Mean]:
    del global_norm
    enters = _enters(norm, finite)
    threshold = self.bound(as_dtype(self.factor, norm.dtype) * state.mean, state.taken >= self.warmup)
    clipped = jnp.minimum(_known(norm, enters), threshold)
    return threshold, _statistics.add_to_mean(state, clipped, enters, self.decay, self.warmup)


class ZClipState(NamedTuple):
  norms: _statistics.Mean
  deviation: jax.Array       # T: standard deviation of the norms
  deviation_rest: jax.Array  # T: what it is short of the true one


@dataclasses.dataclass(frozen=True)
class zclip(_Bounded):
  r"""The threshold follows mean and deviation of the norms; the further out a norm, the harder it is clipped.

  .. math:: z_t = \frac{\|g_t\| - \mu}{\sigma + \text{eps}}, \qquad
            \tau_t = \begin{cases} \mu + z_\text{threshold}^2 \, \sigma / z_t & z_t > z_\text{threshold} \\
                                   \mu + z_\text{threshold} \, \sigma & \text{otherwise} \end{cases}

  .. math:: \mu \leftarrow \text{decay} \, \mu + (1 - \text{decay}) \, c_t, \qquad
            \sigma^2 \leftarrow \text{decay} \, \sigma^2 + (1 - \text{decay}) (c_t - \mu)^2, \qquad
            c_t = \min(\|g_t\|, \tau_t)

  with the new mean in the variance, as in the authors' code. Over the first `warmup` norms mean and variance are those
  of the norms (the population's), and the threshold is `maximum`. A norm with z at or below `z_threshold` is never
  clipped but by `maximum`. A norm that is NaN, infinite or 0 does not enter.

  Args:
    z_threshold: how many deviations above the mean a norm may be; above 0. May be traced.
    decay: of mean and variance; at least 0, below 1. May be traced.
    warmup: norms before the first threshold; an int, at least 1.
    eps: added to the deviation; at least 0. May be traced.
    minimum: no threshold is below it; at least 0. May be traced.
    maximum: no threshold is above it, in the warm-up too. May be traced.

  Returns:
    A rule: pass it as `max_norm`. Under `per_tensor_clip` each leaf has statistics of its own.

  Raises:
    ValueError: a number outside of these bounds.
    TypeError: what is no number; a `warmup` that is no int.

  Examples:
    Norms 1 and 3 have mean 2 and deviation 1. 4 is within two deviations; 12 is ten above the mean, and far out:

    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> tx = ogc.global_clip(ogc.zclip(z_threshold=2.0, warmup=2, eps=0.0))
    >>> state = tx.init([jnp.zeros(1)])
    >>> for norm in [1., 3.]:
    ...   _, state = tx.update([jnp.array([norm])], state)
    >>> [round(float(tx.update([jnp.array([norm])], state)[0][0][0]), 4) for norm in [4., 12.]]
    [4.0, 2.4]

  References:
    Kumar et al., "ZClip: Adaptive spike mitigation for LLM pre-training", 2025, arXiv 2504.02507.
  """
  z_threshold: Any = 2.5
  decay: Any = 0.97
  warmup: int = 25
  eps: Any = dataclasses.field(default=1e-6, kw_only=True)

  def check(self, rule: str) -> None:
    check_positive(rule, "z_threshold", self.z_threshold)
    check_decay(rule, self.decay)
    check_whole(rule, "warmup", self.warmup, 1)
    check_bounds(rule, "eps", self.eps)

  def first(self, like: jax.ShapeDtypeStruct) -> ZClipState:
    return ZClipState(_statistics.init_mean(like), jnp.zeros(like.shape, like.dtype), jnp.zeros(like.shape, like.dtype))

  def update(self, state: ZClipState, norm: jax.Array, finite: jax.Array, *,
             global_norm: jax.Array) -> tuple[jax.Array, ZClipState]:
    del global_norm
    enters = _enters(norm, finite)
    norm = jnp.where(enters, norm, state.norms.mean)
    # A barrier, so that XLA updates all of the state in one kernel: of two, the first would write what the second reads.
    threshold = jax.lax.optimization_barrier(self.bound(self._threshold(state, norm), state.norms.taken >= self.warmup))
    clipped = jnp.minimum(norm, threshold)
    before = state.deviation, state.deviation_rest
    after = _statistics.add_to_deviation(state.norms, *before, clipped, self.decay, self.warmup)
    norms = _statistics.add_to_mean(state.norms, clipped, enters, self.decay, self.warmup)
    return threshold, ZClipState(norms, *(jnp.where(enters, x, y) for x, y in zip(after, before)))

  def _threshold(self, state: ZClipState, norm: jax.Array) -> jax.Array:
    mean, deviation = state.norms.mean, state.deviation
    limit, eps = as_dtype(self.z_threshold, norm.dtype), as_dtype(self.eps, norm.dtype)
    off, by = _statistics.distance(state.norms, norm), deviation + eps
    outlier = off > limit * by
    # limit^2 deviation / z, where z = off / by is above the limit: nothing on the way is beyond the dtype.
    shrunk = limit * deviation * (limit * by / jnp.where(outlier, off, jnp.ones_like(off)))
    return jnp.where(outlier, mean + shrunk, jnp.maximum(mean + limit * deviation, norm))


@dataclasses.dataclass(frozen=True)
class autoclip(_Bounded):
  r"""The threshold is a percentile of the last n norms, the current one among them.

  .. math:: \tau_t = \text{percentile}_p(\|g_{t-n+1}\|, \ldots, \|g_t\|)

  with linear interpolation between two norms, as `numpy.percentile`. The norms are those before the clip. The paper keeps
  every norm of the run; here the last n, so that the state has a fixed size. The sort of n numbers a step is the price.
  A norm that is NaN, infinite or 0 does not enter; before the first that does, the threshold is `maximum`.

  Args:
    percentile: from 0 to 100. May be traced; then the place between two norms is found in T instead of float64.
    n: how many norms are kept; an int, at least 1.
    minimum: no threshold is below it; at least 0. May be traced.
    maximum: no threshold is above it. May be traced.

  Returns:
    A rule: pass it as `max_norm`. Under `per_tensor_clip` each leaf has n norms of its own.

  Raises:
    ValueError: a number outside of these bounds.
    TypeError: what is no number; an `n` that is no int.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> tx = ogc.global_clip(ogc.autoclip(percentile=50, n=4))
    >>> state = tx.init([jnp.zeros(1)])
    >>> for norm in [1., 2., 3., 4., 100.]:
    ...   updates, state = tx.update([jnp.array([norm])], state)
    >>> float(updates[0][0]), float(state.threshold)
    (3.5, 3.5)

  References:
    Seetharaman et al., "AutoClip: Adaptive gradient clipping for source separation networks", 2020, arXiv 2007.14469.
  """
  percentile: Any = 10.0
  n: int = 1000

  def check(self, rule: str) -> None:
    check_bounds(rule, "percentile", self.percentile, high=100.0)
    check_whole(rule, "n", self.n, 1)

  def first(self, like: jax.ShapeDtypeStruct) -> _statistics.Recent:
    return _statistics.init_recent(self.n, like)

  def update(self, state: _statistics.Recent, norm: jax.Array, finite: jax.Array, *,
             global_norm: jax.Array) -> tuple[jax.Array, _statistics.Recent]:
    del global_norm
    enters = _enters(norm, finite)
    state = _statistics.add_to_recent(state, _known(norm, enters), enters)
    return self.bound(_statistics.percentile(state, self.percentile), state.filled > 0), state


class AdaGCState(NamedTuple):
  average: jax.Array       # T[n]: of each leaf's norm after the clip; 0 where there was none
  average_rest: jax.Array  # T[n]: what it is short of the true one
  taken: jax.Array         # int32[n]: finite updates, up to `warmup`


@dataclasses.dataclass(frozen=True)
class adagc(_Bounded):
  r"""For `per_tensor_clip`: the threshold of each leaf is a multiple of the moving average of its own norms.

  .. math:: \tau_{t,i} = \begin{cases} \|g_{t,i}\| \cdot \min(1, \lambda_\text{abs} / \|g_t\|) & t \le \text{warmup} \\
                                       \lambda_\text{rel} \, \gamma_{t-1,i} & \text{otherwise} \end{cases}

  .. math:: \gamma_{t,i} = \begin{cases} \min(\gamma_{t-1,i}, c_{t,i}) & t \le \text{warmup} \\
                                         \text{decay} \, \gamma_{t-1,i} + (1 - \text{decay}) \, c_{t,i} &
                                         \text{otherwise} \end{cases}
            \qquad c_{t,i} = \min(\|g_{t,i}\|, \tau_{t,i})

  So the first `warmup` updates are clipped by their global norm. A norm that is NaN, infinite or 0 does not enter, and a
  leaf that has had no other is not clipped; an update with a NaN or infinity anywhere enters nowhere and is not counted.

  Args:
    lambda_rel: how many times its average a leaf's norm may be; above 0. May be traced.
    lambda_abs: the threshold of the global norm in the warm-up; above 0. May be traced.
    decay: of the averages, the paper's beta; at least 0, below 1. May be traced.
    warmup: updates clipped by the global norm; an int, at least 1.
    minimum: no threshold is below it; at least 0. May be traced.
    maximum: no threshold is above it, in the warm-up too. May be traced.

  Returns:
    A rule: pass it as `max_norm` of `per_tensor_clip`.

  Raises:
    ValueError: a number outside of these bounds; where it is used by another clip than `per_tensor_clip`.
    TypeError: what is no number; a `warmup` that is no int.

  Examples:
    A first update of global norm 10 is scaled to 5; then no leaf exceeds twice its average, which is 3 and 4:

    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> tx = ogc.per_tensor_clip(ogc.adagc(lambda_rel=2.0, lambda_abs=5.0, warmup=1))
    >>> state = tx.init([jnp.zeros(1), jnp.zeros(1)])
    >>> for norms in [(6., 8.), (60., 7.)]:
    ...   updates, state = tx.update([jnp.array([norm]) for norm in norms], state)
    >>> [float(leaf[0]) for leaf in updates], state.threshold.tolist()
    ([6.0, 7.0], [6.0, 8.0])

  References:
    Wang et al., "AdaGC: Enhancing LLM pretraining stability via adaptive gradient clipping", version 2, arXiv
    2502.11034, algorithm 1.
  """
  lambda_rel: Any = 1.05
  lambda_abs: Any = 1.0
  decay: Any = 0.98
  warmup: int = 100

  leaves_only = True

  def check(self, rule: str) -> None:
    check_positive(rule, "lambda_rel", self.lambda_rel)
    check_positive(rule, "lambda_abs", self.lambda_abs)
    check_decay(rule, self.decay)
    check_whole(rule, "warmup", self.warmup, 1)

  def first(self, like: jax.ShapeDtypeStruct) -> AdaGCState:
    return AdaGCState(jnp.zeros(like.shape, like.dtype), jnp.zeros(like.shape, like.dtype), jnp.zeros(like.shape, jnp.int32))

  def update(self, state: AdaGCState, norm: jax.Array, finite: jax.Array, *,
             global_norm: jax.Array) -> tuple[jax.Array, AdaGCState]:
    dtype, enters = norm.dtype, _enters(norm, finite & (global_norm < np.inf))
    in_warmup, known = state.taken < self.warmup, state.average > 0
    norm = _known(norm, enters)
    limit = as_dtype(self.lambda_abs, dtype)
    shrinks = finite & (global_norm > limit)
    by_global = jnp.where(shrinks, limit * (norm / jnp.where(shrinks, global_norm, limit)), norm)
    by_leaf = as_dtype(self.lambda_rel, dtype) * state.average
    threshold = self.bound(jnp.where(in_warmup, by_global, by_leaf), jnp.where(in_warmup, finite, known))
    clipped = jnp.minimum(norm, threshold)
    before, fresh = (state.average, state.average_rest), (clipped, jnp.zeros_like(clipped))
    moved = _statistics.move(*before, clipped, *_statistics.decay_weights(self.decay, dtype))
    falls, begins = in_warmup & (clipped < state.average), ~known
    stays = ~enters | (known & in_warmup & ~falls)
    average = (jnp.where(stays, old, jnp.where(falls | begins, new, after))
               for old, new, after in zip(before, fresh, moved))
    return threshold, AdaGCState(*average, jnp.minimum(state.taken + finite.astype(jnp.int32), self.warmup))
