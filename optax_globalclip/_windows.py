"""What a window of micro-batches does: accumulate, judge and clip, run the optimizer, record."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding

from optax_globalclip import _adamw, _arguments, _clip, _monitor, _ops, _reference, _spikes, _thresholds, _window_state
from optax_globalclip._arguments import is_zero, usable_scale, usable_weight
from optax_globalclip._leaves import Leaves, dtype_of, split_leaves
from optax_globalclip._norm import placed_leaves
from optax_globalclip._placement import Placement
from optax_globalclip._thresholds import ThresholdState
from optax_globalclip._window_state import POLICIES, ClippedMultiStepsState, Settings


def _run_if(condition: jax.Array | bool, body: Callable, carry: Any) -> Any:
  """`body(carry)` where the condition holds (or is True outright), else `carry`.

  A loop of one trip or none works on its carry in place, where `lax.cond` copies it through the branch not taken.
  """
  if condition is True:
    return body(carry)
  def once(state):
    return jnp.zeros_like(condition), body(state[1])
  def loop(condition, carry):
    return lax.while_loop(lambda state: state[0], once, (condition, carry))[1]
  return _on_their_own_meshes(loop, carry)(condition, carry)


def _on_their_own_meshes(function: Callable, like: Any) -> Callable:
  """`function`, whose results outside of jit lie as the arrays `like`; JAX puts all on the mesh of the first operand."""
  shardings = jax.tree.map(lambda x: None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None), like)
  named = [sharding.mesh for sharding in jax.tree.leaves(shardings) if isinstance(sharding, NamedSharding)]
  if len(set(named)) < 2:
    return function
  # The others are numbers, which may lie on any mesh.
  return jax.jit(function, out_shardings=jax.tree.map(lambda x: x if isinstance(x, NamedSharding) else None, shardings))


# Outside of jit JAX takes a result's mesh from the first operand: of a leaf and a number of another mesh, the leaf.
_keep_if = jax.jit(lambda x, condition: jnp.where(condition, x, np.zeros((), x.dtype)), inline=True)


def _if(condition: jax.Array, x: jax.Array) -> jax.Array:
  """`x` where the condition holds, else zeros: laid out as `x`, also where that is a constant to the tracer."""
  return _keep_if(x, condition)


def _check_boundary(boundary: Any) -> None:
  if not isinstance(boundary, bool) and (np.shape(boundary) or getattr(boundary, "dtype", None) != np.bool_):
    got = f"dtype {boundary.dtype}, shape {np.shape(boundary)}" if hasattr(boundary, "dtype") else repr(boundary)
    raise TypeError(f"boundary: expected a bool or a bool scalar, got {got}")


def update(settings: Settings, updates, state, params=None, **extra):
  begun = _begin(settings, updates, state, params, **extra)
  leaves, wide = begun.leaves, begun.wide
  out_dtypes = _window_state.out_dtypes(leaves, wide, params, settings.update_dtype)

  def run_inner(clipped, carry):
    del clipped  # the carry has its leaves: captured beside it, they would be copied
    buffers, inner_state = carry
    new, after = settings.inner.update(leaves.rebuild(buffers), inner_state, _window_state.widened(params),
                                       **begun.extra)
    new = [x.astype(dtype) for x, dtype in zip(leaves.matching(new, "updates of inner"), wide)]
    return new, jax.tree.map(lambda x, before: jnp.asarray(x, before.dtype), after, inner_state)

  closed = _close(settings, state, begun, state.inner_state, run_inner)
  out = [_if(closed.runs, x).astype(dtype) for x, dtype in zip(closed.buffers, out_dtypes)]
  def passed_through(leaf):
    return leaf if dtype_of(leaf) == jax.dtypes.float0 else _if(closed.runs, jnp.asarray(leaf))
  return leaves.rebuild(out, passed_through), _end(settings, state, begun, closed, closed.kept)


def step(settings: Settings, grads, state, params, **extra):
  """`(params, state)`: the optimizer, a `clipped_adamw`, works on the accumulators in place where the window ends."""
  inner = settings.inner.settings
  adamw_state = (_adamw.AdamWState.of(state.inner_state[1], inner.adamw) if isinstance(state, ClippedMultiStepsState)
                 else None)
  operands = None
  if adamw_state and not (inner.clip.monitor or inner.clip.update_dtype or inner.clip.loss_scale is not None
                          or settings.update_dtype):
    operands = _adamw.find_operands(inner.adamw, split_leaves(grads), grads, adamw_state, params)
  if operands is None:
    updates, after = update(settings, grads, state, params, **extra)
    moved = optax.apply_updates(params, updates)
    return jax.tree.map(lambda new, old: jnp.where(after.updated, new, old), moved, params), after
  begun = _begin(settings, grads, state, params, **extra)

  def run_inner(clipped, carry):
    accumulators, (adamw_state, params) = carry
    own = operands._replace(mu=jax.tree.leaves(adamw_state.adam.mu), nu=jax.tree.leaves(adamw_state.adam.nu), params=params)
    params, after = _adamw.fused_step(inner.adamw, adamw_state, begun.leaves, accumulators, own, clipped.numbers.ops,
                                      begun.placement, zeroes=settings.zeroes, skips=False, divides=begun.divides)
    return accumulators, (_adamw.AdamWState(*after), jax.tree.leaves(params))

  closed = _close(settings, state, begun, (adamw_state, operands.params), run_inner, scales=False)
  after, params = closed.kept
  return begun.leaves.rebuild(params), _end(settings, state, begun, closed, (state.inner_state[0], tuple(after)))


class _Begun(NamedTuple):
  """A micro-batch, read and added to its window."""
  leaves: Leaves
  placement: Placement
  wide: list[np.dtype]       # in which gradients reach the optimizer
  followed: ThresholdState
  window: "_Window"
  divides: bool              # whether there is a divisor
  value: jax.Array | None    # the mean loss of the window so far, where it is judged,
  value_sum: jax.Array | None  # and the sum that it is made from
  extra: dict[str, Any]      # for the optimizer


def _begin(settings: Settings, updates, state, params, *, loss_scale=None, weight=None, boundary=None, **extra) -> _Begun:
  leaves, placement = placed_leaves(updates, *settings.where)
  _window_state.check_state(settings, state, leaves)
  wide = _window_state.wide_dtypes(leaves, _window_state.like(settings, state, params))
  if boundary is not None:
    _check_boundary(boundary)
  scale, weight = _read_scale(settings, state, loss_scale), _read_weight(weight)
  window = _accumulate(settings, leaves, state, scale, weight, boundary, wide)
  value = value_sum = None
  if settings.judges_value:
    value, value_sum = _window_value(settings, state, window, weight, extra.get("value"))
    extra["value"] = value
  followed = state.clip_state if settings.follows else _thresholds.CONSTANT._replace(clip_state=state.clip_state)
  return _Begun(leaves, placement, wide, followed, window, settings.accumulates or scale is not None, value, value_sum,
                extra)


def _end(settings: Settings, state: ClippedMultiStepsState, begun: _Begun, closed: "_Closed",
         inner_state: Any) -> ClippedMultiStepsState:
  if settings.on_nonfinite == "raise":
    _clip.raise_if_bad(begun.leaves, closed.numbers, begun.window.divisor, closed.limit)
  after = _followed(settings, begun.followed, begun.window, closed, begun.value)
  if settings.judges_value:
    after = after._replace(spike_state=after.spike_state._replace(value_sum=begun.value_sum))
  return _record(settings, begun.leaves, state, begun.window, closed, after)._replace(inner_state=inner_state)


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
  limit: jax.Array                # T[]: what its norm was compared with
  rule_state: Any                 # of the threshold
  verdict: _spikes.Verdict | None
  runs: jax.Array | bool          # whether `inner` ran
  accumulators: list[jax.Array]   # where they are not the buffers
  buffers: list[jax.Array]        # the optimizer's updates where it ran; else the accumulators, or zeros
  kept: Any                       # what the optimizer keeps


def _close(settings: Settings, state: ClippedMultiStepsState, begun: _Begun, kept: Any, run: Callable, *,
           scales: bool = True) -> _Closed:
  """Where the window ends: its norm and judgement, the clip and, unless it is skipped, the optimizer.

  `run(clipped, (buffers, kept))` is the optimizer: it returns the buffers as its updates, and what it keeps. Without
  `scales` the buffers are the accumulators, which it leaves as they are.
  """
  followed, window, wide, value = begun.followed, begun.window, begun.wide, begun.value
  # Accumulators have buffers of their own: where nothing is clipped, the kernel leaves them alone.
  options = _ops.Options(
      scales=scales, stage="kernel" if settings.accumulates else "auto", on_nonfinite=POLICIES[settings.on_nonfinite],
      leaf_norms=bool(settings.monitor) or settings.on_nonfinite == "raise", extremes=settings.monitor is True,
      divides=begun.divides, out_dtypes=tuple(wide))
  apart = scales and [x.dtype for x in window.gradients] != list(wide) and window.measures is not True
  spikes, spike_state = settings.skip_spikes, followed.spike_state

  def verdict_of(numbers):
    return spikes.verdict(spike_state, numbers.norms[0], value) if spikes else None

  def runs_after(numbers):
    bad, runs = _reference.is_bad(numbers.ops), True
    if settings.on_nonfinite == "skip":
      runs = ~bad
    return runs & (~verdict_of(numbers).skipped | bad) if spikes else runs

  def close_window(carry):
    *_, accumulators, buffers, kept = carry
    clipped = _thresholds.clip(
        settings.max_norm, followed.rule_state, state.optimizer_step, accumulators if apart else buffers, window.divisor,
        options, begun.placement, is_spike=lambda numbers: verdict_of(numbers).skipped if spikes else False,
        like=followed.threshold)
    buffers, kept = _run_if(runs_after(clipped.numbers), functools.partial(run, clipped),
                            (clipped.leaves if scales else buffers, kept))
    return clipped.numbers, clipped.limit, clipped.rule_state, [jnp.zeros_like(x) for x in accumulators], buffers, kept

  nothing = _ops.Numbers(*(jnp.zeros(x.shape, x.dtype) for x in options.results(window.gradients)[:options.numbers]))
  # One buffer a leaf: the accumulator on the way in, the optimizer's update on the way out.
  accumulators, buffers = [], window.gradients
  if apart:
    accumulators = window.gradients
    buffers = [jnp.zeros_like(x, dtype=dtype) for x, dtype in zip(accumulators, wide)]
  numbers, limit, rule_state, accumulators, buffers, kept = _run_if(
      window.measures, close_window, (nothing, jnp.zeros_like(nothing.norms[0]), followed.rule_state, accumulators,
                                      buffers, kept))
  runs = window.measures & runs_after(numbers)
  return _Closed(numbers, limit, rule_state, verdict_of(numbers), runs, accumulators if apart else buffers, buffers,
                 kept)


# ----------------------------------------------------------------------------------------------------------------------
# Record


def _moved_if(condition, new, old):
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)


def _window_value(settings: Settings, state: ClippedMultiStepsState, window: _Window, weight, value):
  """The mean loss of the window so far, by the weights of its micro-batches, and the sum that it is made from."""
  value = _spikes.read_value(value)
  if not settings.accumulates:
    return value, value
  weighs = None if weight is None else ~is_zero(weight)
  added = value if weight is None else _if(weighs, value) * _or_one(weighs, weight)
  before = _if(state.micro_step != 0, state.clip_state.spike_state.value_sum)
  total = before + added
  by = _or_one(jnp.isfinite(window.weight_sum) & ~is_zero(window.weight_sum), window.weight_sum)
  return total / by, total


def _followed(settings: Settings, state: ThresholdState, window: _Window, closed: _Closed, value) -> ThresholdState:
  """What is on record of the window that ended here, and what the next threshold goes by."""
  bad = _reference.is_bad(closed.numbers.ops)
  spike = closed.verdict.skipped if closed.verdict else False
  clip_state = _monitor.record(state.clip_state, closed.numbers, closed.limit, zeroes=settings.zeroes,
                               skips=settings.on_nonfinite == "skip", spike=spike)
  after = state._replace(clip_state=clip_state)
  if state.threshold is not None:
    # A skipped window leaves no trace in a rule of any kind.
    after = after._replace(threshold=closed.limit.astype(state.threshold.dtype),
                           rule_state=_moved_if(closed.runs, closed.rule_state, state.rule_state))
  if settings.skip_spikes:
    after = after._replace(spike_state=settings.skip_spikes.update(state.spike_state, closed.verdict,
                                                                   closed.numbers.norms[0], value, bad))
  return _moved_if(window.measures, after, state)


def _record(settings: Settings, leaves: Leaves, state: ClippedMultiStepsState, window: _Window, closed: _Closed,
            followed: ThresholdState) -> ClippedMultiStepsState:
  if settings.dynamic:
    bad = _reference.is_bad(closed.numbers.ops)
    moves = window.measures if closed.verdict is None else window.measures & (bad | ~closed.verdict.skipped)
    scale_state = _moved_if(moves, settings.dynamic.update(state.scale_state, ~bad), state.scale_state)
  else:
    scale_state = state.scale_state._replace(loss_scale=settings.static_scale())
  return ClippedMultiStepsState(
      inner_state=state.inner_state,
      accumulators=leaves.rebuild(closed.accumulators, lambda _: None) if settings.accumulates else state.accumulators,
      weight_sum=jnp.where(window.closes, jnp.zeros_like(window.weight_sum), window.weight_sum),
      micro_step=jnp.where(window.closes, 0, state.micro_step + 1),
      optimizer_step=_moved_if(closed.runs, optax.safe_increment(state.optimizer_step), state.optimizer_step),
      updated=jnp.asarray(closed.runs),
      scale_state=scale_state,
      clip_state=followed if settings.follows else followed.clip_state)
