"""What a window of micro-batches does: accumulate, judge and clip, run the optimizer, record."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optax_globalclip import _arguments, _clip, _monitor, _ops, _reference
from optax_globalclip._arguments import is_zero, usable_scale, usable_weight
from optax_globalclip._leaves import SUPPORTED, Leaves, dtype_of, norm_dtype
from optax_globalclip._loss_scale import DynamicLossScale, LossScaleState
from optax_globalclip._monitor import ClipState
from optax_globalclip._norm import placed_leaves

POLICIES = {"skip": _reference.ZERO, **_clip.POLICIES}


class ClippedMultiStepsState(NamedTuple):
  """Structure and dtypes never change from `init` on."""
  inner_state: Any
  accumulators: Any               # sum of weight * gradient / loss_scale; None where a leaf does not count or k is 1.
                                  # Of no meaning where micro_step is 0.
  weight_sum: jax.Array           # float32, of the window so far
  micro_step: jax.Array           # int32, micro-batches in the window so far
  optimizer_step: jax.Array       # int32, times that `inner` ran: what a schedule of `every_k` is called with
  updated: jax.Array              # bool, whether the last call ran `inner`
  scale_state: LossScaleState
  clip_state: ClipState     # of the last window


class Settings(NamedTuple):
  """The arguments of `clipped_multi_steps`, checked."""
  inner: optax.GradientTransformationExtraArgs
  max_norm: Any
  every_k: Any
  dynamic: DynamicLossScale | None
  static: Any
  on_nonfinite: str
  monitor: bool
  update_dtype: np.dtype | None
  accumulator_dtype: np.dtype | None
  where: _clip.Where

  @property
  def accumulates(self) -> bool:
    return callable(self.every_k) or self.every_k > 1

  @property
  def zeroes(self) -> bool:
    """Whether a bad window's update is zero, instead of NaN."""
    return POLICIES[self.on_nonfinite] == _reference.ZERO

  def accumulator(self, wide: np.dtype) -> np.dtype:
    """The dtype of the accumulator of a leaf whose gradient reaches `inner` in the dtype `wide`."""
    complex_leaf = jnp.issubdtype(wide, jnp.complexfloating)
    return wide if complex_leaf or self.accumulator_dtype is None else self.accumulator_dtype

  def static_scale(self) -> jax.Array:
    # A buffer of its own: a donated state must not take the caller's scale with it.
    return jnp.array(_arguments.as_scalar(1 if self.static is None else self.static, np.float32), copy=True)


def _run_if(condition: jax.Array | bool, body: Callable, carry: Any) -> Any:
  """`body(carry)` where the condition holds (or is True outright), else `carry`.

  A loop of one trip or none works on its carry in place, where `lax.cond` copies it through the branch not taken.
  """
  if condition is True:
    return body(carry)
  def once(state):
    return jnp.zeros_like(condition), body(state[1])
  return lax.while_loop(lambda state: state[0], once, (condition, carry))[1]


def _if(condition: jax.Array, x: jax.Array) -> jax.Array:
  """`x` where the condition holds, else zeros: laid out as `x`, also where that is a constant to the tracer."""
  return jnp.where(condition, x, np.zeros((), x.dtype))


def _wide_dtype(name: str, leaf: Any) -> np.dtype | None:
  """The accumulator's dtype: the leaf's, or float32 where that is narrower; None for a leaf that does not count."""
  dtype = dtype_of(leaf)
  if not jnp.issubdtype(dtype, jnp.inexact):
    return None
  if str(dtype) not in SUPPORTED:
    raise TypeError(f"{name}: expected one of {', '.join(SUPPORTED)}, or an integer or bool leaf; got {dtype}")
  return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def _map_wide(function: Callable, params: Any) -> Any:
  """`function(leaf, its accumulator's dtype or None)` of every leaf."""
  def on_leaf(path, leaf):
    return function(leaf, _wide_dtype("params" + jax.tree_util.keystr(path), leaf))
  return jax.tree_util.tree_map_with_path(on_leaf, params)


def _widen(leaf: Any, dtype: np.dtype | None) -> Any:
  if dtype is None:
    return leaf
  return leaf.update(dtype=dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf, dtype)


def _check_boundary(boundary: Any) -> None:
  if not isinstance(boundary, bool) and (np.shape(boundary) or getattr(boundary, "dtype", None) != np.bool_):
    got = f"dtype {boundary.dtype}, shape {np.shape(boundary)}" if hasattr(boundary, "dtype") else repr(boundary)
    raise TypeError(f"boundary: expected a bool or a bool scalar, got {got}")


def init(settings: Settings, params: Any) -> ClippedMultiStepsState:
  def accumulator(leaf, wide):
    return jnp.zeros_like(leaf, dtype=settings.accumulator(wide)) if settings.accumulates and wide is not None else None
  inner_state = settings.inner.init(_map_wide(_widen, params))
  dynamic = settings.dynamic
  return ClippedMultiStepsState(
      inner_state=jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), inner_state),
      accumulators=_map_wide(accumulator, params),
      weight_sum=jnp.zeros((), jnp.float32),
      micro_step=jnp.zeros((), jnp.int32),
      optimizer_step=jnp.zeros((), jnp.int32),
      updated=jnp.zeros((), jnp.bool_),
      scale_state=dynamic.init() if dynamic else LossScaleState(settings.static_scale(), jnp.zeros((), jnp.int32)),
      clip_state=_monitor.init(params, leaves=settings.monitor))


def update(settings: Settings, updates, state, params=None, *, loss_scale=None, weight=None, boundary=None, **extra):
  leaves, placement = placed_leaves(updates, *settings.where)
  _check_state(settings, state, leaves)
  wide = _wide_dtypes(leaves, _like(settings, state, params))
  out_dtypes = _out_dtypes(leaves, wide, params, settings.update_dtype)
  if boundary is not None:
    _check_boundary(boundary)
  scale, weight = _read_scale(settings, state, loss_scale), _read_weight(weight)
  window = _accumulate(settings, leaves, state, scale, weight, boundary, wide)
  limit = _arguments.as_scalar(settings.max_norm, norm_dtype(window.gradients))

  def run_inner(carry):
    clipped, inner_state = carry
    new, after = settings.inner.update(leaves.rebuild(clipped), inner_state, _map_wide(_widen, params), **extra)
    new = [x.astype(dtype) for x, dtype in zip(leaves.matching(new, "updates of inner"), wide)]
    return new, jax.tree.map(lambda x, before: jnp.asarray(x, before.dtype), after, inner_state)

  closed = _close(settings, window, limit, wide, scale is not None, placement, state.inner_state, run_inner)
  if settings.on_nonfinite == "raise":
    _clip.raise_if_bad(leaves, closed.numbers, window.divisor, limit)
  out = [_if(closed.runs, x).astype(dtype) for x, dtype in zip(closed.buffers, out_dtypes)]
  def passed_through(leaf):
    return leaf if dtype_of(leaf) == jax.dtypes.float0 else _if(closed.runs, jnp.asarray(leaf))
  return leaves.rebuild(out, passed_through), _record(settings, leaves, state, window, closed, limit)


# ----------------------------------------------------------------------------------------------------------------------
# Accumulate


class _Window(NamedTuple):
  """The window with this micro-batch. Its gradient is `gradients / divisor`; a divisor that cannot be used is refused."""
  gradients: list[jax.Array]
  divisor: jax.Array
  weight_sum: jax.Array
  closes: jax.Array | bool    # whether it ends here
  measures: jax.Array | bool  # whether it ends and holds anything


def _read_scale(settings: Settings, state: ClippedMultiStepsState, loss_scale: Any) -> jax.Array | None:
  """The scale that this micro-batch's loss was multiplied by; None where there is none."""
  if loss_scale is not None:
    _arguments.check_loss_scale(loss_scale)
    return _arguments.as_scalar(loss_scale, np.float32)
  if settings.dynamic:
    return state.scale_state.loss_scale
  return None if settings.static is None else _arguments.as_scalar(settings.static, np.float32)


def _read_weight(weight: Any) -> jax.Array | None:
  if weight is None:
    return None
  _arguments.check_weight(weight)
  return _arguments.as_scalar(weight, np.float32)


def _or_one(condition: jax.Array, x: jax.Array) -> jax.Array:
  return jnp.where(condition, x, jnp.ones_like(x))


def _accumulate(settings: Settings, leaves: Leaves, state: ClippedMultiStepsState, scale, weight, boundary,
                wide: list[np.dtype]) -> _Window:
  """The window's sum of w g / S and sum of w, which is infinite once a scale or a weight cannot be used."""
  one, infinite = jnp.float32(1), np.asarray(np.inf, np.float32)
  good = usable_scale(one if scale is None else scale)
  if weight is not None:
    good = (good | is_zero(weight)) & usable_weight(weight)
  added = lax.select(good, one if weight is None else weight, infinite)
  weight_sum = state.weight_sum + added
  if settings.accumulates:
    gradients = _accumulated(settings, leaves, state, scale, weight, wide)
    closes = _reaches(settings.every_k, state)
    closes = closes if boundary is None else closes | boundary
    return _Window(gradients, weight_sum, weight_sum, closes, closes & ~is_zero(weight_sum))
  divisor = one if scale is None else scale
  if weight is None:
    return _Window(leaves.arrays, divisor, weight_sum, True, True)
  # (w g / S) / w
  weighs = ~is_zero(weight)
  gradients = [_if(weighs, x.astype(dtype)) for x, dtype in zip(leaves.arrays, wide)]
  divisor = lax.select(usable_weight(weight), divisor, infinite)
  return _Window(gradients, divisor, weight_sum, True, weighs)


def _accumulated(settings: Settings, leaves: Leaves, state: ClippedMultiStepsState, scale, weight,
                 wide: list[np.dtype]) -> list[jax.Array]:
  """The accumulators after this micro-batch; one of weight 0 adds nothing, whatever it holds."""
  counts, by = None, None
  if weight is not None:
    counts = usable_weight(weight) & ~is_zero(weight)
    by = _or_one(counts, weight)
  out = []
  for gradient, accumulator, dtype in zip(leaves.arrays, leaves.matching(state.accumulators, "parameters"), wide):
    x = gradient.astype(max(dtype, accumulator.dtype, key=lambda kind: kind.itemsize))
    if settings.zeroes:  # a window that is to leave no trace takes in no NaN
      x = jnp.where(jnp.isnan(x), x.dtype.type(np.inf), x)
    if scale is not None:
      x = _reference.divide(x, _or_one(usable_scale(scale), scale))
    if weight is not None:
      x = _if(counts, x) * by.astype(x.dtype)
    # What the last window left is cleared here rather than when it ended, which saves a pass over the accumulators.
    before = _if(state.micro_step != 0, accumulator).astype(x.dtype)
    # An infinite sum stays as it is: one of the other sign would make it NaN.
    out.append((before + jnp.where(jnp.isfinite(before), x, jnp.zeros_like(x))).astype(accumulator.dtype))
  return out


def _reaches(every_k: int | Callable, state: ClippedMultiStepsState) -> jax.Array:
  """Whether the window holds `every_k` micro-batches with this one."""
  k = jnp.asarray(every_k(state.optimizer_step) if callable(every_k) else every_k)
  return (state.micro_step + 1).astype(jnp.float32) >= k.astype(jnp.float32)


# ----------------------------------------------------------------------------------------------------------------------
# Judge and clip, run the optimizer


class _Closed(NamedTuple):
  numbers: _ops.Numbers           # of the window's gradient; zeros between ends of windows
  runs: jax.Array | bool          # whether `inner` ran
  accumulators: list[jax.Array]   # where they are not the buffers
  buffers: list[jax.Array]        # the optimizer's updates where it ran; else the accumulators, or zeros
  inner_state: Any


def _close(settings: Settings, window: _Window, limit, wide, scaled: bool, placement, inner_state, run_inner) -> _Closed:
  """Where the window ends: its norm and judgement, the clip and, unless it is skipped, the optimizer."""
  # Accumulators have buffers of their own: where nothing is clipped, the kernel leaves them alone.
  options = _ops.Options(
      scales=True, stage="kernel" if settings.accumulates else "auto", on_nonfinite=POLICIES[settings.on_nonfinite],
      leaf_norms=settings.monitor or settings.on_nonfinite == "raise", extremes=settings.monitor,
      divides=settings.accumulates or scaled, out_dtypes=tuple(wide))
  apart = [x.dtype for x in window.gradients] != list(wide) and window.measures is not True

  def runs_after(numbers):
    return ~_reference.is_bad(numbers.ops) if settings.on_nonfinite == "skip" else True

  def close_window(carry):
    _, accumulators, buffers, inner_state = carry
    numbers, clipped = _ops.clip(accumulators if apart else buffers, limit, window.divisor, options, placement)
    buffers, inner_state = _run_if(runs_after(numbers), run_inner, (clipped, inner_state))
    return numbers, [jnp.zeros_like(x) for x in accumulators], buffers, inner_state

  nothing = _ops.Numbers(*(jnp.zeros(x.shape, x.dtype) for x in options.results(window.gradients)[:options.numbers]))
  # One buffer a leaf: the accumulator on the way in, the optimizer's update on the way out.
  accumulators, buffers = [], window.gradients
  if apart:
    accumulators = window.gradients
    buffers = [jnp.zeros_like(x, dtype=dtype) for x, dtype in zip(accumulators, wide)]
  numbers, accumulators, buffers, inner_state = _run_if(window.measures, close_window,
                                                        (nothing, accumulators, buffers, inner_state))
  return _Closed(numbers, window.measures & runs_after(numbers), accumulators if apart else buffers, buffers, inner_state)


# ----------------------------------------------------------------------------------------------------------------------
# Record


def _record(settings: Settings, leaves: Leaves, state: ClippedMultiStepsState, window: _Window, closed: _Closed,
            limit) -> ClippedMultiStepsState:
  def moved_if(condition, new, old):
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)
  clip_state = _monitor.record(state.clip_state, closed.numbers, limit, zeroes=settings.zeroes,
                               skips=settings.on_nonfinite == "skip")
  if settings.dynamic:
    moved = settings.dynamic.update(state.scale_state, ~_reference.is_bad(closed.numbers.ops))
    scale_state = moved_if(window.measures, moved, state.scale_state)
  else:
    scale_state = state.scale_state._replace(loss_scale=settings.static_scale())
  return ClippedMultiStepsState(
      inner_state=closed.inner_state,
      accumulators=leaves.rebuild(closed.accumulators, lambda _: None) if settings.accumulates else state.accumulators,
      weight_sum=jnp.where(window.closes, jnp.zeros_like(window.weight_sum), window.weight_sum),
      micro_step=jnp.where(window.closes, 0, state.micro_step + 1),
      optimizer_step=moved_if(closed.runs, optax.safe_increment(state.optimizer_step), state.optimizer_step),
      updated=jnp.asarray(closed.runs),
      scale_state=scale_state,
      clip_state=moved_if(window.measures, clip_state, state.clip_state))


def _like(settings: Settings, state: ClippedMultiStepsState, params: Any) -> Any:
  """What says in which dtype a gradient reaches `inner`: the accumulators, or parameters, where they are given."""
  if settings.accumulates and (settings.accumulator_dtype is None or params is None):
    return state.accumulators
  return params


def _check_state(settings: Settings, state: Any, leaves: Leaves) -> None:
  if not isinstance(state, ClippedMultiStepsState):
    raise TypeError(f"state: expected the ClippedMultiStepsState that init returned, got {type(state).__name__}")
  again = "call init again (what inner has learned may be kept: new._replace(inner_state=old.inner_state))"
  accumulates, monitor = settings.accumulates, settings.monitor
  holds = bool(jax.tree.leaves(state.accumulators))
  if (holds or leaves.arrays) and holds != accumulates:
    made, wanted = ("above 1", "1") if holds else ("1", "above 1")
    raise ValueError(f"state: made with every_k {made}, expected one made with every_k {wanted}: {again}")
  if monitor != (state.clip_state.leaf_metrics is not None):
    raise ValueError(f"state: made with monitor={not monitor}, expected one made with monitor={monitor}: {again}")
  tolerates = settings.dynamic is not None and settings.dynamic.hysteresis > 1
  if tolerates != (state.scale_state.bad_windows is not None):
    made, wanted = ("1", "above 1") if tolerates else ("above 1", "1")
    raise ValueError(f"state: made with a hysteresis of {made}, expected one made with {wanted}: {again}")
  if accumulates and len(leaves.arrays) < len(jax.tree.leaves(state.accumulators)):
    keyed = jax.tree_util.tree_leaves_with_path(state.accumulators)
    missing = {"updates" + jax.tree_util.keystr(path) for path, _ in keyed} - set(leaves.names)
    raise ValueError(f"{min(missing)}: expected updates of every floating parameter, got none")


def _wide_dtypes(leaves: Leaves, like: Any) -> list[np.dtype]:
  """The dtypes of the gradients that reach `inner`: those of the accumulators or parameters `like`, or their own."""
  likes = leaves.arrays if like is None else leaves.matching(like, "parameters")
  out = []
  for path, gradient, leaf in zip(leaves.names, leaves.arrays, likes):
    dtype = _wide_dtype(path, leaf)
    if gradient.shape != np.shape(leaf):
      raise ValueError(f"{path}: expected shape {np.shape(leaf)}, that of the parameter; got {gradient.shape}")
    if dtype is None or jnp.iscomplexobj(gradient) > jnp.issubdtype(dtype, jnp.complexfloating):
      raise TypeError(f"{path}: expected updates for a parameter of dtype {dtype_of(leaf)}; got {gradient.dtype}")
    out.append(dtype)
  return out


def _out_dtypes(leaves: Leaves, wide_dtypes: list[np.dtype], params: Any, update_dtype) -> list[np.dtype]:
  """The dtypes of the updates: `update_dtype`, else the parameters', else the accumulators'."""
  if update_dtype is not None:
    return [_arguments.out_dtype(name, x, update_dtype, False) for name, x in zip(leaves.names, leaves.arrays)]
  return wide_dtypes if params is None else [dtype_of(leaf) for leaf in leaves.matching(params, "parameters")]
