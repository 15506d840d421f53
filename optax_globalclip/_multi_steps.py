"""`clipped_multi_steps`: accumulate, unscale, check for NaN and infinity, clip, and only then run the optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optax_globalclip import _clip, _loss_scale, _norm, _reference
from optax_globalclip._loss_scale import DynamicLossScale, LossScaleState

_POLICIES = {"skip": _reference.PROPAGATE, **_clip.POLICIES}


class ClippedMultiStepsState(NamedTuple):
  """Structure and dtypes never change from `init` on."""
  inner_state: Any
  accumulators: Any               # sum of weight * gradient / loss_scale; None where a leaf does not count or k is 1
  weight_sum: jax.Array           # float32, of the window so far
  micro_step: jax.Array           # int32, micro-batches in the window so far
  optimizer_step: jax.Array       # int32, times that `inner` ran: what a schedule of `every_k` is called with
  updated: jax.Array              # bool, whether the last call ran `inner`
  scale_state: LossScaleState
  clip_state: _clip.ClipState     # of the last window


def _run_if(condition: jax.Array | bool, body: Callable, carry: Any) -> Any:
  """`body(carry)` where the condition holds (or is True outright), else `carry`.

  A loop of one trip or none works on its carry in place, where `lax.cond` copies the carry through the branch not taken.
  """
  if condition is True:
    return body(carry)
  def once(state):
    return jnp.zeros_like(condition), body(state[1])
  return lax.while_loop(lambda state: state[0], once, (condition, carry))[1]


def _accumulator_dtype(dtype: np.dtype) -> np.dtype:
  return np.promote_types(dtype, np.float32) if dtype != jnp.bfloat16 else np.dtype(np.float32)


def _cast(leaf: Any) -> Any:
  """A floating leaf in its accumulator's dtype; any other as it is."""
  dtype = getattr(leaf, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jnp.inexact) or _accumulator_dtype(dtype) == dtype:
    return leaf
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf.update(dtype=_accumulator_dtype(dtype))
  return leaf.astype(_accumulator_dtype(dtype))


def _true_divide(x: jax.Array, scale: jax.Array) -> jax.Array:
  """`x / scale`, rounded once: a denominator of the same shape, which XLA cannot turn into a reciprocal."""
  return x / jnp.where(x == x, scale.astype(x.real.dtype), 1).astype(x.dtype)


def _check_every_k(every_k: Any) -> None:
  if callable(every_k):
    return
  if isinstance(every_k, jax.Array):
    raise TypeError("every_k: expected an int or a schedule, got a JAX array; under optax.inject_hyperparams name it in "
                    "static_args=('every_k',)")
  if isinstance(every_k, bool) or not isinstance(every_k, (int, np.integer)):
    raise TypeError(f"every_k: expected an int or a schedule of the optimizer step, got {every_k!r}")
  if every_k < 1:
    raise ValueError(f"every_k: expected at least 1, got {every_k}")


def _check_weight(weight: Any) -> None:
  _clip.check_number("weight", weight)
  if not isinstance(weight, jax.Array) and not 0 <= _clip.to_float(weight) < np.inf:
    raise ValueError(f"weight: expected a finite number that is not negative, got {weight!r}")


def _valid_or_nan(scale: jax.Array, lowest_is_valid: bool) -> jax.Array:
  """The value, or NaN where it is negative, infinite or NaN (or 0, unless that is valid)."""
  valid = ((scale >= 0) if lowest_is_valid else (scale > 0)) & (scale < jnp.inf)
  return jnp.where(valid, scale, jnp.nan)


def clipped_multi_steps(
    inner: optax.GradientTransformation,
    max_norm,
    *,
    every_k: int | Callable[[jax.Array], Any] = 1,
    loss_scale: Any = None,
    on_nonfinite: str = "skip",
    update_dtype=None,
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
    update_dtype: the dtype of the updates, instead of the parameters' own.

  Returns:
    A transformation with state `ClippedMultiStepsState`, whose `update` also takes:

    * `loss_scale`: see above.
    * `weight`: the micro-batch's weight w, its number of tokens, say; default 1. One of weight 0 contributes nothing,
      even where it is NaN; a window whose weights sum to 0 gives zero updates, does not run `inner` and leaves the
      scale. Negative and NaN weights make the window non-finite.
    * `boundary`: True ends the window with this micro-batch, whatever it holds; may be traced.

    Other extra arguments reach `inner` from the call that ends the window. Updates have the parameters' dtypes (the
    accumulators' where no parameters are given). Accumulators are float32, or float64 for float64 leaves.

  Raises:
    ValueError: as `global_clip`; an `every_k` below 1; updates of another structure than the parameters'.
    TypeError: as `global_clip`; an `every_k` that is neither an int nor a schedule.

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
  inner = optax.with_extra_args_support(inner)
  _clip.check_max_norm(max_norm)
  _clip.check_choice("on_nonfinite", on_nonfinite, _POLICIES)
  _check_every_k(every_k)
  dynamic = loss_scale if isinstance(loss_scale, DynamicLossScale) else None
  if loss_scale is not None and dynamic is None:
    _clip.check_loss_scale(loss_scale)
  update_dtype = _clip.check_update_dtype(update_dtype)
  constructed_scale = loss_scale
  accumulates = callable(every_k) or every_k > 1

  def initial_scale() -> LossScaleState:
    if dynamic is not None:
      return dynamic.init()
    constant = 1 if constructed_scale is None else constructed_scale
    return LossScaleState(_clip.as_scalar(constant, np.float32), jnp.zeros((), jnp.int32))

  def init_fn(params):
    def accumulator(leaf):
      counts = accumulates and jnp.issubdtype(getattr(leaf, "dtype", np.int32), jnp.inexact)
      return jnp.zeros_like(leaf, dtype=_accumulator_dtype(leaf.dtype)) if counts else None
    return ClippedMultiStepsState(
        inner_state=inner.init(jax.tree.map(_cast, params)),
        accumulators=jax.tree.map(accumulator, params),
        weight_sum=jnp.zeros((), jnp.float32),
        micro_step=jnp.zeros((), jnp.int32),
        optimizer_step=jnp.zeros((), jnp.int32),
        updated=jnp.zeros((), jnp.bool_),
        scale_state=initial_scale(),
        clip_state=_clip.init_monitor(params))

  def update_fn(updates, state, params=None, *, loss_scale=None, weight=None, boundary=None, **extra):
    leaves = _norm.split_leaves(updates)
    if loss_scale is not None:
      _clip.check_loss_scale(loss_scale)
      scale = _clip.as_scalar(loss_scale, np.float32)
    elif dynamic is not None:
      scale = state.scale_state.loss_scale
    else:
      scale = None if constructed_scale is None else _clip.as_scalar(constructed_scale, np.float32)
    if scale is not None:
      scale = _valid_or_nan(scale, lowest_is_valid=False)
    if weight is not None:
      _check_weight(weight)
      weight = _valid_or_nan(_clip.as_scalar(weight, np.float32), lowest_is_valid=True)
    wide_dtypes = [_accumulator_dtype(x.dtype) for x in leaves.arrays]
    out_dtypes = _out_dtypes(leaves, wide_dtypes, params, update_dtype)

    weight_sum = state.weight_sum + (jnp.float32(1) if weight is None else weight)
    if accumulates:
      gradients, divisor = _accumulated(leaves, state.accumulators, scale, weight), weight_sum
      closes = _closes(state, boundary)
      measures = closes & (weight_sum != 0)
    else:
      gradients, divisor = leaves.arrays, scale
      closes = measures = True
      if weight is not None:  # (w g / S) / w, where w is not 0
        divisor = jnp.where(jnp.isnan(weight), weight, jnp.float32(1) if scale is None else scale)
        measures = weight != 0
    divides = divisor is not None
    divisor = divisor if divides else jnp.ones((), jnp.float32)
    limit = _clip.as_scalar(max_norm, _reference.norm_dtype(gradients))
    options = _norm.Options(on_nonfinite=_POLICIES[on_nonfinite])

    def measure(_):
      norms, nonfinite, op = _norm.norm_and_op(gradients, limit, divisor, options)
      if on_nonfinite == "raise":
        _clip.raise_if(leaves.paths, nonfinite)
      return norms[0], jnp.any(nonfinite > 0) | jnp.isnan(divisor), op

    def run_inner(carry):
      buffers, inner_state = carry
      clipped = [_reference.scale(x, op, dtype, divides=divides, zeroes=on_nonfinite == "zero")
                 for x, dtype in zip(buffers if accumulates else gradients, wide_dtypes)]
      new, inner_state_after = inner.update(leaves.rebuild(clipped), inner_state, jax.tree.map(_cast, params), **extra)
      new = [x.astype(dtype) for x, dtype in zip(leaves.matching(new, "updates of inner"), wide_dtypes)]
      return new, jax.tree.map(lambda x, before: jnp.asarray(x).astype(before.dtype), inner_state_after, inner_state)

    nothing = (jnp.zeros((), limit.dtype), jnp.zeros((), jnp.bool_), jnp.zeros((3,), limit.dtype))
    norm, bad, op = _run_if(measures, measure, nothing)
    runs = measures & ~bad if on_nonfinite == "skip" else measures
    # One buffer a leaf: the accumulator on the way in, the optimizer's update on the way out.
    buffers = gradients if accumulates else [jnp.zeros_like(x, dtype=d) for x, d in zip(leaves.arrays, wide_dtypes)]
    buffers, inner_state = _run_if(runs, run_inner, (buffers, state.inner_state))
    out = [jnp.where(runs, x, 0).astype(dtype) for x, dtype in zip(buffers, out_dtypes)]

    def moved_if(condition, new, old):
      return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)
    closed = _clip.monitored(state.clip_state, norm, norm[None], bad, limit, zeroes=on_nonfinite in ("zero", "skip"))
    scale_state = state.scale_state
    if dynamic is not None:
      scale_state = moved_if(measures, dynamic.update(scale_state, ~bad), scale_state)
    elif constructed_scale is not None:
      scale_state = scale_state._replace(loss_scale=_clip.as_scalar(constructed_scale, np.float32))
    return leaves.rebuild(out), ClippedMultiStepsState(
        inner_state=inner_state,
        accumulators=leaves.rebuild([jnp.where(closes, 0, x) for x in buffers], passed_through=lambda _: None)
        if accumulates else state.accumulators,
        weight_sum=jnp.where(closes, jnp.float32(0), weight_sum),
        micro_step=jnp.where(closes, 0, state.micro_step + 1),
        optimizer_step=moved_if(runs, optax.safe_increment(state.optimizer_step), state.optimizer_step),
        updated=jnp.asarray(runs),
        scale_state=scale_state,
        clip_state=moved_if(measures, closed, state.clip_state))

  def _closes(state, boundary):
    k = every_k(state.optimizer_step) if callable(every_k) else every_k
    closes = state.micro_step + 1 >= k
    if boundary is None:
      return closes
    boundary = jnp.asarray(boundary)
    if boundary.dtype != jnp.bool_ or boundary.ndim:
      raise TypeError(f"boundary: expected a bool or a bool scalar, got dtype {boundary.dtype}, shape {boundary.shape}")
    return closes | boundary

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _out_dtypes(leaves: _norm.Leaves, accumulator_dtypes, params: Any, update_dtype) -> list[np.dtype]:
  """The dtypes of the updates: `update_dtype`, else the parameters', else the accumulators'."""
  if update_dtype is not None:
    return [_clip.out_dtype(p, x, update_dtype, False) for p, x in zip(leaves.paths, leaves.arrays)]
  if params is None:
    return list(accumulator_dtypes)
  return [x.dtype for x in leaves.matching(params, "params")]


def _accumulated(leaves: _norm.Leaves, accumulators: Any, scale, weight) -> list[jax.Array]:
  """The accumulators after this micro-batch; one of weight 0 leaves them as they are, whatever it holds."""
  out = []
  for path, gradient, accumulator in zip(leaves.paths, leaves.arrays, leaves.matching(accumulators, "accumulators")):
    if gradient.shape != accumulator.shape:
      raise ValueError(f"{path}: expected shape {accumulator.shape}, that of the parameter; got {gradient.shape}")
    x = gradient.astype(accumulator.dtype)
    if scale is not None:
      x = _true_divide(x, scale)
    if weight is not None:
      weighted = x * weight.astype(x.real.dtype)
      x = jnp.where(weight == 0, jnp.zeros_like(x), weighted)
    out.append(accumulator + x)
  return out


def has_updated(opt_state: Any) -> jax.Array:
  """Whether the last call of `clipped_multi_steps`' update ended a window and ran `inner`.

  For what goes by optimizer steps: moving averages of parameters, logging.

  Args:
    opt_state: an optimizer state with one `clipped_multi_steps` anywhere in it, `flax.nnx.Optimizer`'s included.

  Returns:
    A bool scalar; False after `init`, between the ends of windows, and after a skipped window.

  Raises:
    ValueError: where the state holds no `clipped_multi_steps`, or several.
  """
  states = _loss_scale.find_states(opt_state, ClippedMultiStepsState)
  if len(states) != 1:
    raise ValueError(f"has_updated: expected one clipped_multi_steps in the optimizer state, found {len(states)}")
  return _loss_scale.plain(states[0].updated)
