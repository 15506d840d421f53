"""What a window of micro-batches keeps: its settings, its state, and the dtypes and shapes that they demand."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_globalclip import _arguments, _clip, _monitor, _reference, _spikes, _thresholds
from optax_globalclip._leaves import SUPPORTED, Leaves, dtype_of, on_device, strong
from optax_globalclip._loss_scale import DynamicLossScale, HysteresisState, LossScaleState
from optax_globalclip._monitor import ClipState
from optax_globalclip._thresholds import ThresholdState

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
  scale_state: LossScaleState | HysteresisState
  clip_state: ClipState | ThresholdState  # of the last window


class Settings(NamedTuple):
  """The arguments of `clipped_multi_steps`, checked."""
  inner: optax.GradientTransformationExtraArgs
  max_norm: Any
  every_k: Any
  dynamic: DynamicLossScale | None
  static: Any
  on_nonfinite: str
  monitor: bool | str
  skip_spikes: _spikes.SpikeRule | None
  update_dtype: np.dtype | None
  accumulator_dtype: np.dtype | None
  where: _clip.Where

  @property
  def follows(self) -> bool:
    """Whether the state holds a `ThresholdState`."""
    return _thresholds.follows(self.max_norm) or self.skip_spikes is not None

  @property
  def judges_value(self) -> bool:
    return self.skip_spikes is not None and self.skip_spikes.judges_value

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
  return leaf.update(dtype=dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(on_device(leaf), dtype)


def widened(params: Any) -> Any:
  """The parameters as `inner` sees them."""
  return _map_wide(_widen, params)


def init(settings: Settings, params: Any) -> ClippedMultiStepsState:
  def accumulator(leaf, wide):
    if not settings.accumulates or wide is None:
      return None
    return jnp.zeros_like(on_device(leaf), dtype=settings.accumulator(wide))
  inner_state = settings.inner.init(widened(params))
  dynamic = settings.dynamic
  return ClippedMultiStepsState(
      inner_state=jax.tree.map(strong, inner_state),
      accumulators=_map_wide(accumulator, params),
      weight_sum=jnp.zeros((), jnp.float32),
      micro_step=jnp.zeros((), jnp.int32),
      optimizer_step=jnp.zeros((), jnp.int32),
      updated=jnp.zeros((), jnp.bool_),
      scale_state=dynamic.init() if dynamic else LossScaleState(settings.static_scale(), jnp.zeros((), jnp.int32)),
      clip_state=_init_clip_state(settings, params))


def _init_clip_state(settings: Settings, params: Any) -> ClipState | ThresholdState:
  clip_state = _monitor.init(params, settings.monitor)
  if not settings.follows:
    return clip_state
  spikes = settings.skip_spikes
  return _thresholds.init(settings.max_norm, params, counts=False)._replace(
      clip_state=clip_state, spike_state=spikes.init(clip_state.global_norm.dtype) if spikes else None)


def like(settings: Settings, state: ClippedMultiStepsState, params: Any) -> Any:
  """What says in which dtype a gradient reaches `inner`: the accumulators, or parameters, where they are given."""
  if settings.accumulates and (settings.accumulator_dtype is None or params is None):
    return state.accumulators
  return params


def check_state(settings: Settings, state: Any, leaves: Leaves) -> None:
  if not isinstance(state, ClippedMultiStepsState):
    raise TypeError(f"state: expected the ClippedMultiStepsState that init returned, got {type(state).__name__}")
  again = "call init again (what inner has learned may be kept: new._replace(inner_state=old.inner_state))"
  accumulates = settings.accumulates
  holds = bool(jax.tree.leaves(state.accumulators))
  if (holds or leaves.arrays) and holds != accumulates:
    made, wanted = ("above 1", "1") if holds else ("1", "above 1")
    raise ValueError(f"state: made with every_k {made}, expected one made with every_k {wanted}: {again}")
  if settings.follows != isinstance(state.clip_state, ThresholdState):
    made, wanted = ("a number", "a schedule, a rule or skip_spikes") if settings.follows else (
        "a schedule, a rule or skip_spikes", "a number")
    raise ValueError(f"state: made with {made} for max_norm, expected one made with {wanted}: {again}")
  clip_state = state.clip_state
  if settings.follows:
    _thresholds.check_state(settings.max_norm, clip_state, again)
    spikes = settings.skip_spikes
    first = jax.eval_shape(lambda: spikes.init(np.dtype(np.float32))) if spikes else None
    _thresholds.check_part("skip_spikes", spikes, clip_state.spike_state, first, again)
    clip_state = clip_state.clip_state
  _monitor.check_state(clip_state, settings.monitor, again)
  tolerates = settings.dynamic is not None and settings.dynamic.hysteresis > 1
  if tolerates != isinstance(state.scale_state, HysteresisState):
    made, wanted = ("1", "above 1") if tolerates else ("above 1", "1")
    raise ValueError(f"state: made with a hysteresis of {made}, expected one made with {wanted}: {again}")
  if accumulates and len(leaves.arrays) < len(jax.tree.leaves(state.accumulators)):
    keyed = jax.tree_util.tree_leaves_with_path(state.accumulators)
    missing = {"updates" + jax.tree_util.keystr(path) for path, _ in keyed} - set(leaves.names)
    raise ValueError(f"{min(missing)}: expected updates of every floating parameter, got none")


def wide_dtypes(leaves: Leaves, like: Any) -> list[np.dtype]:
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


def out_dtypes(leaves: Leaves, wide_dtypes: list[np.dtype], params: Any, update_dtype) -> list[np.dtype]:
  """The dtypes of the updates: `update_dtype`, else the parameters', else the accumulators'."""
  if update_dtype is not None:
    return [_arguments.out_dtype(name, x, update_dtype, False) for name, x in zip(leaves.names, leaves.arrays)]
  return wide_dtypes if params is None else [dtype_of(leaf) for leaf in leaves.matching(params, "parameters")]
