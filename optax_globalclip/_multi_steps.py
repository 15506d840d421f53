"""`clipped_multi_steps`: accumulate, unscale, check for NaN and infinity, clip, and only then run the optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optax_globalclip import _clip, _loss_scale, _norm, _partition, _reference
from optax_globalclip._loss_scale import DynamicLossScale, LossScaleState

_POLICIES = {"skip": _reference.PROPAGATE, **_clip.POLICIES}


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
  clip_state: _clip.ClipState     # of the last window


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
  dtype = _norm.dtype_of(leaf)
  if not jnp.issubdtype(dtype, jnp.inexact):
    return None
  if str(dtype) not in _norm.SUPPORTED:
    raise TypeError(f"{name}: expected one of {', '.join(_norm.SUPPORTED)}, or an integer or bool leaf; got {dtype}")
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


def _check_every_k(every_k: Any) -> None:
  if callable(every_k):
    return
  if isinstance(every_k, jax.Array):
    raise TypeError("every_k: expected an int or a schedule, got a JAX array; under optax.inject_hyperparams name it "
                    "in static_args=('every_k',)")
  if isinstance(every_k, bool) or not isinstance(every_k, (int, np.integer)):
    raise TypeError(f"every_k: expected an int or a schedule of the optimizer step, got {every_k!r}")
  if every_k < 1:
    raise ValueError(f"every_k: expected at least 1, got {every_k}")


def _check_weight(weight: Any) -> None:
  _clip.check_number("weight", weight)
  if not isinstance(weight, jax.Array):
    with np.errstate(over="ignore"):
      as_float32 = np.float32(_clip.to_float(weight))
    if not 0 <= as_float32 < np.inf:
      raise ValueError(f"weight: expected a number that is not negative and finite in float32, got {weight!r}")


def _check_boundary(boundary: Any) -> None:
  if not isinstance(boundary, bool) and (np.shape(boundary) or getattr(boundary, "dtype", None) != np.bool_):
    got = f"dtype {boundary.dtype}, shape {np.shape(boundary)}" if hasattr(boundary, "dtype") else repr(boundary)
    raise TypeError(f"boundary: expected a bool or a bool scalar, got {got}")


def _valid_or_nan(value: jax.Array, lowest_is_valid: bool) -> jax.Array:
  """The value, or NaN where it is negative, infinite or NaN (or 0, unless that is valid)."""
  valid = ((value >= 0) if lowest_is_valid else (value > 0)) & (value < jnp.inf)
  return jnp.where(valid, value, jnp.nan)


def clipped_multi_steps(
    inner: optax.GradientTransformation,
    max_norm,
    *,
    every_k: int | Callable[[jax.Array], Any] = 1,
    loss_scale: Any = None,
    on_nonfinite: str = "skip",
    monitor: bool = False,
    update_dtype=None,
    axis_name: Any = None,
    mesh: Any = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Runs `inner` once a window of micro-batches, on their clipped mean gradient.

  .. math:: \bar g = \frac{\sum_i w_i \, g_i / S_i}{\sum_i w_i}, \qquad
            \text{inner}\big(\bar g \cdot \min(1, \text{max\_norm} / \|\bar g\|)\big)

  In this order by construction: accumulate, unscale, check for NaN and infinity, clip, optimizer. One pass over the
  accumulators yields the norm, the check and the factor. Replaces `optax.MultiSteps`, `optax.apply_if_finite` and a
  loss scaler together. Between the ends of windows updates are exactly zero and `inner` does not run: its moments,
  counts and schedules do not move.

  Args:
    inner: the optimizer. It is initialised and run on parameters cast to float32 (float64 and complex ones stay), so
      bfloat16 parameters get float32 moments: 8 bytes a parameter for adamw, besides 4 for the accumulator.
    max_norm: as for `global_clip`.
    every_k: micro-batches in a window: an int, or a schedule of the number of times `inner` has run. A window of one
      keeps no accumulator.
    loss_scale: the gradients are of `loss_scale * loss`: a positive number, a `DynamicLossScale`, or one for each call
      (`update(..., loss_scale=s)`, which wins). Each micro-batch is divided by the scale in force when it was taken;
      the scale changes only when a window ends.
    on_nonfinite: what a NaN or infinite element of a window's gradient does, one that overflowed while accumulating
      included. "skip": updates are zero, `inner` does not run, a clean window starts. "propagate", "zero" and "raise":
      as for `global_clip`, and `inner` runs. Under each a dynamic scale backs off once.
    monitor: record also the norm and the non-finite elements of each leaf of the last window's gradient, for
      `leaf_report`. What `clip_metrics` reads is always recorded.
    update_dtype: the dtype of the updates, instead of the parameters' own.
    axis_name: as for `global_clip`.
    mesh: as for `global_clip`.
    specs: as for `global_clip`; of the updates, and so of the accumulators.

  Returns:
    A transformation with state `ClippedMultiStepsState`, whose `update` also takes:

    * `loss_scale`: see above.
    * `weight`: the micro-batch's weight w, its number of tokens, say; default 1. One of weight 0 contributes nothing,
      even where it is NaN; a window whose weights sum to 0 gives zero updates, does not run `inner` and leaves the
      scale. A traced weight that is negative or not finite makes the window non-finite, as a traced scale that is not
      finite and positive does.
    * `boundary`: True ends the window with this micro-batch, whatever it holds; may be traced.

    Other extra arguments reach `inner` from the call that ends the window. Updates have the parameters' dtypes (the
    accumulators' where no parameters are given). Accumulators have the parameters' dtypes too, or float32 for narrower
    ones. Integer and bool leaves do not count; they come out as they went in where `inner` runs, and zero elsewhere.

  Raises:
    ValueError: as `global_clip`; an `every_k` below 1; updates of another structure or shape than the parameters'; a
      state made with another `monitor`, or with an `every_k` of 1 where it is not now, or the other way round.
    TypeError: as `global_clip`; an `inner` that is no transformation; an `every_k` that is neither an int nor a
      schedule; complex updates of real parameters; a state that is not that of `init`.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_globalclip as ogc
    >>> tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, every_k=2)
    >>> state = tx.init(jnp.zeros(2))
    >>> updates, state = tx.update(jnp.array([6., 0.]), state)
    >>> updates.tolist()
    [0.0, 0.0]
    >>> updates, state = tx.update(jnp.array([0., 8.]), state)
    >>> updates.tolist(), bool(ogc.has_updated(state))
    ([-0.6000000238418579, -0.800000011920929], True)

  References:
    Micikevicius et al., "Mixed precision training", 2018; Pascanu, Mikolov, Bengio, 2013, algorithm 1.
  """
  if not (hasattr(inner, "init") and hasattr(inner, "update")):
    raise TypeError(f"inner: expected an optax.GradientTransformation, got {inner!r}")
  inner = optax.with_extra_args_support(inner)
  _clip.check_max_norm(max_norm)
  _clip.check_choice("on_nonfinite", on_nonfinite, _POLICIES)
  _check_every_k(every_k)
  dynamic = loss_scale if isinstance(loss_scale, DynamicLossScale) else None
  static = None if dynamic else loss_scale
  if static is not None:
    _clip.check_loss_scale(static)
  update_dtype = _clip.check_update_dtype(update_dtype)
  _partition.check_placement(axis_name, mesh, specs)
  accumulates = callable(every_k) or every_k > 1

  def static_scale() -> jax.Array:
    # A buffer of its own: a donated state must not take the caller's scale with it.
    return jnp.array(_clip.as_scalar(1 if static is None else static, np.float32), copy=True)

  def init_fn(params):
    def accumulator(leaf, dtype):
      return jnp.zeros_like(leaf, dtype=dtype) if accumulates and dtype is not None else None
    inner_state = inner.init(_map_wide(_widen, params))
    return ClippedMultiStepsState(
        inner_state=jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), inner_state),
        accumulators=_map_wide(accumulator, params),
        weight_sum=jnp.zeros((), jnp.float32),
        micro_step=jnp.zeros((), jnp.int32),
        optimizer_step=jnp.zeros((), jnp.int32),
        updated=jnp.zeros((), jnp.bool_),
        scale_state=dynamic.init() if dynamic else LossScaleState(static_scale(), jnp.zeros((), jnp.int32)),
        clip_state=_clip.init_monitor(params, leaves=monitor))

  def update_fn(updates, state, params=None, *, loss_scale=None, weight=None, boundary=None, **extra):
    leaves = _norm.split_leaves(updates)
    _check_state(state, accumulates, monitor, leaves)
    if loss_scale is not None:
      _clip.check_loss_scale(loss_scale)
      scale = _clip.as_scalar(loss_scale, np.float32)
    elif dynamic:
      scale = state.scale_state.loss_scale
    else:
      scale = None if static is None else _clip.as_scalar(static, np.float32)
    if scale is not None:
      scale = _valid_or_nan(scale, lowest_is_valid=False)
    if weight is not None:
      _check_weight(weight)
      weight = _valid_or_nan(_clip.as_scalar(weight, np.float32), lowest_is_valid=True)
    if boundary is not None:
      _check_boundary(boundary)
    wide_dtypes = _wide_dtypes(leaves, state.accumulators if accumulates else params)
    out_dtypes = _out_dtypes(leaves, wide_dtypes, params, update_dtype)

    # The window's gradient is `gradients / divisor`, and a divisor that is not finite makes it NaN.
    added = jnp.float32(1) if weight is None else weight
    if scale is not None:
      added = jnp.where(jnp.isnan(scale) & (added != 0), scale, added)
    weight_sum = state.weight_sum + added
    if accumulates:
      gradients, divisor = _accumulated(leaves, state, scale, weight), weight_sum
      closes = _reaches(every_k, state) if boundary is None else _reaches(every_k, state) | boundary
      measures = closes & (weight_sum != 0)
    else:
      gradients, divisor = leaves.arrays, jnp.float32(1) if scale is None else scale
      closes = measures = True
      if weight is not None:  # (w g / S) / w
        gradients = [x.astype(dtype) for x, dtype in zip(gradients, wide_dtypes)]
        divisor = jnp.where(jnp.isnan(added), added, divisor)
        measures = weight != 0
    limit = _clip.as_scalar(max_norm, _reference.norm_dtype(gradients))
    # Accumulators stand in buffers of their own: where nothing is clipped, the kernel leaves them alone.
    options = _norm.Options(stage="kernel" if accumulates else "auto", on_nonfinite=_POLICIES[on_nonfinite],
                            leaf_norms=monitor or on_nonfinite == "raise", divides=accumulates or scale is not None,
                            out_dtypes=tuple(wide_dtypes), **_partition.place(leaves, axis_name, mesh, specs))

    def run_inner(carry):
      clipped, inner_state = carry
      new, inner_state_after = inner.update(leaves.rebuild(clipped), inner_state, _map_wide(_widen, params), **extra)
      new = [x.astype(dtype) for x, dtype in zip(leaves.matching(new, "updates of inner"), wide_dtypes)]
      return new, jax.tree.map(lambda x, before: jnp.asarray(x, before.dtype), inner_state_after, inner_state)

    def close_window(carry):
      _, gradients, inner_state = carry
      norms, nonfinite, clipped = _norm.clip(gradients, limit, divisor, options)
      bad = jnp.any(nonfinite > 0) | ~jnp.isfinite(divisor)
      runs = ~bad if on_nonfinite == "skip" else True
      return (norms, nonfinite, bad), *_run_if(runs, run_inner, (clipped, inner_state))

    of_leaves = len(gradients) if options.leaf_norms else 0
    nothing = (jnp.zeros(1 + of_leaves, limit.dtype), jnp.zeros(of_leaves if options.leaf_norms else 1, jnp.int32),
               jnp.zeros((), jnp.bool_))
    # One buffer a leaf: the accumulator on the way in, the optimizer's update on the way out.
    carry = nothing, gradients, state.inner_state
    (norms, nonfinite, bad), buffers, inner_state = _run_if(measures, close_window, carry)
    runs = measures & ~bad if on_nonfinite == "skip" else measures
    if on_nonfinite == "raise":
      _clip.raise_if(leaves.paths, nonfinite)
    out = [_if(runs, x).astype(dtype) for x, dtype in zip(buffers, out_dtypes)]

    def moved_if(condition, new, old):
      return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)
    def passed_through(leaf):
      return leaf if _norm.dtype_of(leaf) == jax.dtypes.float0 else _if(runs, jnp.asarray(leaf))
    closed = _clip.monitored(state.clip_state, norms[0], norms[:1], bad, limit, zeroes=on_nonfinite in ("zero", "skip"))
    if monitor:
      closed = _clip.monitored_leaves(closed, norms[1:], nonfinite)
    if dynamic:
      scale_state = moved_if(measures, dynamic.update(state.scale_state, ~bad), state.scale_state)
    else:
      scale_state = state.scale_state._replace(loss_scale=static_scale())
    return leaves.rebuild(out, passed_through), ClippedMultiStepsState(
        inner_state=inner_state,
        accumulators=leaves.rebuild(buffers, lambda _: None) if accumulates else state.accumulators,
        weight_sum=jnp.where(closes, jnp.float32(0), weight_sum),
        micro_step=jnp.where(closes, 0, state.micro_step + 1),
        optimizer_step=moved_if(runs, optax.safe_increment(state.optimizer_step), state.optimizer_step),
        updated=jnp.asarray(runs),
        scale_state=scale_state,
        clip_state=moved_if(measures, closed, state.clip_state))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_state(state: Any, accumulates: bool, monitor: bool, leaves: _norm.Leaves) -> None:
  if not isinstance(state, ClippedMultiStepsState):
    raise TypeError(f"state: expected the ClippedMultiStepsState that init returned, got {type(state).__name__}")
  again = "call init again (what inner has learned may be kept: new._replace(inner_state=old.inner_state))"
  holds = bool(jax.tree.leaves(state.accumulators))
  if (holds or leaves.arrays) and holds != accumulates:
    made, wanted = ("above 1", "1") if holds else ("1", "above 1")
    raise ValueError(f"state: made with every_k {made}, expected one made with every_k {wanted}: {again}")
  if bool(monitor) != (state.clip_state.leaf_metrics is not None):
    raise ValueError(f"state: made with monitor={not monitor}, expected one made with monitor={monitor}: {again}")


def _wide_dtypes(leaves: _norm.Leaves, like: Any) -> list[np.dtype]:
  """The dtypes of the gradients that reach `inner`: those of the accumulators or parameters `like`, or their own."""
  likes = leaves.arrays if like is None else leaves.matching(like, "parameters")
  out = []
  for path, gradient, leaf in zip(leaves.paths, leaves.arrays, likes):
    dtype = _wide_dtype(path, leaf)
    if gradient.shape != np.shape(leaf):
      raise ValueError(f"{path}: expected shape {np.shape(leaf)}, that of the parameter; got {gradient.shape}")
    if dtype is None or jnp.iscomplexobj(gradient) > jnp.issubdtype(dtype, jnp.complexfloating):
      raise TypeError(f"{path}: expected updates for a parameter of dtype {_norm.dtype_of(leaf)}; got {gradient.dtype}")
    out.append(dtype)
  return out


def _out_dtypes(leaves: _norm.Leaves, wide_dtypes: list[np.dtype], params: Any, update_dtype) -> list[np.dtype]:
  """The dtypes of the updates: `update_dtype`, else the parameters', else the accumulators'."""
  if update_dtype is not None:
    return [_clip.out_dtype(path, x, update_dtype, False) for path, x in zip(leaves.paths, leaves.arrays)]
  return wide_dtypes if params is None else [_norm.dtype_of(leaf) for leaf in leaves.matching(params, "parameters")]


def _accumulated(leaves: _norm.Leaves, state: ClippedMultiStepsState, scale, weight) -> list[jax.Array]:
  """The accumulators after this micro-batch; one of weight 0 adds nothing, whatever it holds."""
  accumulators = leaves.matching(state.accumulators, "parameters")
  if len(accumulators) != len(jax.tree.leaves(state.accumulators)):
    keyed = jax.tree_util.tree_leaves_with_path(state.accumulators)
    missing = {"updates" + jax.tree_util.keystr(path) for path, _ in keyed} - set(leaves.paths)
    raise ValueError(f"{min(missing)}: expected updates of every floating parameter, got none")
  out = []
  for gradient, accumulator in zip(leaves.arrays, accumulators):
    x = gradient.astype(accumulator.dtype)
    if scale is not None:
      x = _reference.divide(x, scale)
    if weight is not None:
      x = _if(weight != 0, x * weight.astype(x.dtype))
    # What the last window left is cleared here rather than when it ended, which saves a pass over the accumulators.
    out.append(_if(state.micro_step != 0, accumulator) + x)
  return out


def _reaches(every_k: int | Callable, state: ClippedMultiStepsState) -> jax.Array:
  """Whether the window holds `every_k` micro-batches with this one."""
  k = jnp.asarray(every_k(state.optimizer_step) if callable(every_k) else every_k)
  return (state.micro_step + 1).astype(jnp.float32) >= k.astype(jnp.float32)


def has_updated(opt_state: Any) -> jax.Array:
  """Whether the last call of `clipped_multi_steps`' update ended a window and ran `inner`.

  For what goes by optimizer steps: moving averages of parameters, logging.

  Args:
    opt_state: an optimizer state with one `clipped_multi_steps` anywhere in it, `flax.nnx.Optimizer`'s included.

  Returns:
    A bool scalar; False after `init`, between the ends of windows, and after a skipped window.

  Raises:
    ValueError: where the state holds no `clipped_multi_steps`, or several.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_globalclip as ogc
    >>> tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, every_k=2)
    >>> _, first = tx.update(jnp.ones(2), tx.init(jnp.zeros(2)))
    >>> _, second = tx.update(jnp.ones(2), first)
    >>> bool(ogc.has_updated(first)), bool(ogc.has_updated(second))
    (False, True)
  """
  states = _loss_scale.find_states(opt_state, ClippedMultiStepsState)
  if len(states) != 1:
    raise ValueError(f"has_updated: expected one clipped_multi_steps in the optimizer state, found {len(states)}")
  return _loss_scale.plain(states[0].updated)
