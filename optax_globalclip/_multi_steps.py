"""`clipped_multi_steps`: accumulate, unscale, check for NaN and infinity, clip, and only then run the optimizer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from optax_globalclip import _arguments, _clip, _loss_scale, _monitor, _placement, _thresholds, _window_state, _windows
from optax_globalclip._adamw import SteppedTransformation
from optax_globalclip._arguments import to_float
from optax_globalclip._loss_scale import DynamicLossScale
from optax_globalclip._spikes import SpikeRule
from optax_globalclip._types import AnyMesh, DTypeLike, MaxNorm, Monitor, Number, OnNonfiniteWindow
from optax_globalclip._window_state import ClippedMultiStepsState

_ACCUMULATORS = ("float16", "bfloat16", "float32", "float64")


def _check_every_k(every_k: Any) -> None:
  if callable(every_k):
    return
  if isinstance(every_k, jax.Array):
    raise TypeError("every_k: expected an int or a schedule, got a JAX array; under optax.inject_hyperparams name it "
                    "in static_args=('every_k',)")
  if isinstance(every_k, bool) or not isinstance(every_k, (int, np.integer)):
    raise TypeError(f"every_k: expected an int or a schedule of the optimizer step, got {every_k!r}")
  if not 1 <= every_k < 2**31:
    raise ValueError(f"every_k: expected at least 1 and less than 2**31, got {every_k}")


def clipped_multi_steps(
    inner: optax.GradientTransformation,
    max_norm: MaxNorm,
    *,
    every_k: int | Callable[[jax.Array], Any] = 1,
    loss_scale: Number | DynamicLossScale | None = None,
    on_nonfinite: OnNonfiniteWindow = "skip",
    monitor: Monitor = False,
    skip_spikes: SpikeRule | None = None,
    update_dtype: DTypeLike | None = None,
    accumulator_dtype: DTypeLike | None = None,
    axis_name: Any = None,
    mesh: AnyMesh | None = None,
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
    max_norm: a number, a schedule or a rule, as for `global_clip`. A schedule is called with the number of times that
      `inner` has run, and a rule sees one norm a window, so neither moves with a window that is skipped.
    every_k: micro-batches in a window: an int, or a schedule of the number of times `inner` has run. A window of one
      keeps no accumulator.
    loss_scale: the gradients are of `loss_scale * loss`: a positive number, a `DynamicLossScale`, or one for each call
      (`update(..., loss_scale=s)`, which wins). Each micro-batch is divided by the scale in force when it was taken;
      the scale changes only when a window ends.
    on_nonfinite: what happens where a window's gradient has a NaN or infinite element, or one that overflowed while
      accumulating. "skip": updates are zero, `inner` does not run, a clean window starts, and the norm on record is +inf.
      "propagate", "zero" and "raise": as for `global_clip`, and `inner` runs. Under each a dynamic scale backs off once.
    monitor: record also the norm and the non-finite elements of each leaf of the last window's gradient, for
      `leaf_report`; "leaves" as for `global_clip`. What else `clip_metrics` reads is always recorded.
    skip_spikes: a `SpikeRule`, by which a window whose norm or loss stands out from the last ones is skipped: updates are
      zero, `inner` does not run, and schedules, the loss scale and a threshold rule stay as they were. A window that is
      not finite besides is a non-finite one.
    update_dtype: the dtype of the updates, instead of the parameters' own.
    accumulator_dtype: the dtype of the accumulators of real leaves: "bfloat16" halves their memory, and rounds every
      sum to 8 bits. Default: float32, or the parameter's own where that is wider. `inner` sees float32 all the same.
    axis_name: as for `global_clip`.
    mesh: as for `global_clip`.
    specs: as for `global_clip`; of the updates, and so of the accumulators.

  Returns:
    A transformation with state `ClippedMultiStepsState`, whose `update` also takes:

    * `loss_scale`: see above.
    * `weight`: the micro-batch's weight w, its number of tokens, say; default 1. One of weight 0 contributes nothing,
      even where it is NaN; a window whose weights sum to 0 gives zero updates, does not run `inner` and leaves the
      scale. A traced weight that is negative, not finite or subnormal makes the window bad, as a traced scale or
      threshold that cannot be used does: it counts as a non-finite one.
    * `boundary`: True ends the window with this micro-batch, whatever it holds; may be traced.
    * `value`: the micro-batch's loss, not multiplied by a loss scale and the same on every device. Wanted where
      `skip_spikes` judges it; then `inner` gets the window's mean of it, by the same weights. Elsewhere it is another
      extra argument.

    Other extra arguments reach `inner` from the call that ends the window. Updates have the parameters' dtypes (the
    accumulators' where no parameters are given). Accumulators have the parameters' dtypes too, or float32 for narrower
    ones. Integer and bool leaves do not count; they come out as they went in where `inner` runs, and zero elsewhere.

    The state's `clip_state` is a `ClipState`; with a schedule, a rule or `skip_spikes` a `ThresholdState` that holds one.

    Around a `clipped_adamw(learning_rate, inf, ...)` it has a `step(grads, state, params, **extra)` too: `update` and
    `optax.apply_updates` in one, where a window ends in one pass over accumulators, moments and parameters.

  Raises:
    ValueError: as `global_clip`; an `every_k` below 1; a `clipped_adamw` that would clip again; updates of another
      structure or shape than the parameters'; a state made with another kind of `max_norm`, `skip_spikes` or `monitor`,
      or with an `every_k` of 1 where it is not now, or the other way round.
    TypeError: as `global_clip`; an `inner` that is no transformation; an `every_k` that is neither an int nor a
      schedule; a `skip_spikes` that is no `SpikeRule`; a `value` that is missing where it is judged, that is no number,
      or that varies over devices inside `shard_map`; complex updates of real parameters; a state that is not that of
      `init`.

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
  _thresholds.check(max_norm)
  if skip_spikes is not None and not isinstance(skip_spikes, SpikeRule):
    raise TypeError(f"skip_spikes: expected a SpikeRule, got {skip_spikes!r}")
  _arguments.check_choice("on_nonfinite", on_nonfinite, _window_state.POLICIES)
  _check_every_k(every_k)
  dynamic = loss_scale if isinstance(loss_scale, DynamicLossScale) else None
  static = None if dynamic else loss_scale
  if static is not None:
    _arguments.check_loss_scale(static)
  _placement.check_placement(axis_name, mesh, specs)
  settings = _window_state.Settings(
      inner=optax.with_extra_args_support(inner), max_norm=max_norm, every_k=every_k, dynamic=dynamic, static=static,
      on_nonfinite=on_nonfinite, monitor=_monitor.check(monitor), skip_spikes=skip_spikes,
      update_dtype=_arguments.check_dtype("update_dtype", update_dtype),
      accumulator_dtype=_arguments.check_dtype("accumulator_dtype", accumulator_dtype, _ACCUMULATORS),
      where=_clip.Where(axis_name, mesh, specs))
  functions = [functools.partial(function, settings) for function in (_window_state.init, _windows.update)]
  if not isinstance(inner, SteppedTransformation):
    return optax.GradientTransformationExtraArgs(*functions)
  threshold = inner.settings.clip.max_norm
  if _thresholds.follows(threshold) or isinstance(threshold, jax.Array) or to_float(threshold) != np.inf:
    raise ValueError("inner: the window is clipped already, and a clipped_adamw would clip it again: expected one with "
                     f"max_norm=inf, got {threshold!r}")
  return SteppedTransformation(*functions, functools.partial(_windows.step, settings))


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
    _loss_scale.check_restored(opt_state)
    raise ValueError(f"has_updated: expected one clipped_multi_steps in the optimizer state, found {len(states)}")
  return _loss_scale.plain(states[0].updated)
