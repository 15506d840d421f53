"""What a clip records of its last update, and what it counts: the state behind `clip_metrics` and `leaf_report`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_globalclip import _leaves, _reference
from optax_globalclip._ops import Numbers


class LeafMetrics(NamedTuple):
  """Of the last update, for `leaf_report`, in true units."""
  norms: jax.Array      # T[n], before the clip
  nonfinite: jax.Array  # int32[n]: elements that are NaN or infinite
  paths: jax.Array      # uint8: the leaves' names, a line each, so that a state says by itself which leaf is which


class ElementMetrics(NamedTuple):
  """The same and, of the whole tree, for `clip_metrics`, what its elements are. A class of its own: a checkpoint of the
  first three fields still loads, with `monitor="leaves"`."""
  norms: jax.Array
  nonfinite: jax.Array
  paths: jax.Array
  largest_element: jax.Array  # T[], a magnitude; infinite where an element is not finite
  zero_elements: jax.Array    # T[], a count, exact to 2**24 (float64: 2**53)


_KINDS = {False: None, "leaves": LeafMetrics, True: ElementMetrics}


def check(monitor: Any) -> bool | str:
  """What is monitored: a key of `_KINDS`."""
  if isinstance(monitor, str):
    if monitor != "leaves":
      raise ValueError(f"monitor: expected True, False or 'leaves', got {monitor!r}")
    return monitor
  return bool(monitor)


class ClipState(NamedTuple):
  """What `monitor=True` records, in true units: of the last update, and counted since `init`."""
  global_norm: jax.Array           # before the clip
  clip_factor: jax.Array           # 1 where nothing was clipped; of several factors the smallest; 0 before the first
  steps: jax.Array
  clipped_steps: jax.Array
  nonfinite_steps: jax.Array
  consecutive_nonfinite: jax.Array
  leaf_metrics: LeafMetrics | ElementMetrics | None = None


def check_state(state: ClipState, monitor: bool | str, again: str = "call init again") -> None:
  """Raises for a state that was made with another `monitor`."""
  made = next(monitor for monitor, kind in _KINDS.items() if isinstance(state.leaf_metrics, kind or type(None)))
  if made != monitor:
    raise ValueError(f"state: made with monitor={made!r}, expected one made with monitor={monitor!r}: {again}")


def init(params: Any, monitor: bool | str) -> ClipState:
  dtype = _leaves.norm_dtype(jax.tree.leaves(params))
  metrics = None
  if monitor:
    keyed = jax.tree_util.tree_flatten_with_path(params)[0]
    names = _leaves.short_names([path for path, leaf in keyed
                                 if _leaves.counts("params" + jax.tree_util.keystr(path), leaf)])
    elements = [jnp.zeros((), dtype), jnp.zeros((), dtype)] if _KINDS[monitor] is ElementMetrics else []
    metrics = _KINDS[monitor](jnp.zeros(len(names), dtype), jnp.zeros(len(names), jnp.int32),
                              jnp.asarray(np.frombuffer("\n".join(names).encode(), np.uint8)), *elements)
  # One buffer a field: a donated state must not hold the same one twice.
  return ClipState(jnp.zeros((), dtype), jnp.zeros((), dtype), *(jnp.zeros((), jnp.int32) for _ in range(4)), metrics)


def record(state: ClipState, numbers: Numbers, max_norm: jax.Array, *, zeroes: bool, skips: bool = False,
           spike: Any = False) -> ClipState:
  """The state after an update of these numbers; `zeroes` says whether a bad one became zero, instead of NaN.

  `skips` says whether a bad one was skipped. Then the norm on record is infinite, also where only a threshold was bad.
  `spike` says whether this one was, without being bad.
  """
  bad = _reference.is_bad(numbers.ops)
  spike = jnp.asarray(spike) & ~bad
  norm = numbers.norms[0]
  if skips:
    norm = jax.lax.select(bad, np.asarray(np.inf, norm.dtype), norm)
  factors = _reference.clip_factors(numbers.ops, numbers.norms, max_norm)
  smallest = jnp.min(factors[1:] if len(factors) > 1 else factors, initial=1)
  factor = jax.lax.select(bad, np.asarray(0 if zeroes else np.nan, smallest.dtype), smallest)
  factor = jnp.where(spike, jnp.zeros_like(factor), factor)
  def count_if(condition, counter):
    return jnp.where(condition, optax.safe_increment(counter), counter)
  return ClipState(
      global_norm=norm.astype(state.global_norm.dtype),
      clip_factor=factor.astype(state.clip_factor.dtype),
      steps=optax.safe_increment(state.steps),
      clipped_steps=count_if(_reference.is_clipped(numbers.ops) & ~spike, state.clipped_steps),
      nonfinite_steps=count_if(bad, state.nonfinite_steps),
      consecutive_nonfinite=jnp.where(bad, optax.safe_increment(state.consecutive_nonfinite), 0),
      leaf_metrics=None if state.leaf_metrics is None else _record_leaves(state.leaf_metrics, numbers))


def _record_leaves(metrics: LeafMetrics | ElementMetrics, numbers: Numbers) -> LeafMetrics | ElementMetrics:
  dtype = metrics.norms.dtype
  norms = numbers.norms[1:]
  if norms.shape != metrics.norms.shape:
    raise ValueError(f"state: init recorded {metrics.norms.size} leaves of its parameters, but the updates have "
                     f"{norms.size}: with monitor=True initialise with the tree that updates are of")
  recorded = metrics._replace(norms=norms.astype(dtype), nonfinite=numbers.nonfinite[1:])
  if isinstance(metrics, ElementMetrics):
    recorded = recorded._replace(largest_element=numbers.extremes[0].astype(dtype),
                                 zero_elements=numbers.extremes[1].astype(dtype))
  return recorded
