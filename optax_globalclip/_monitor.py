"""What a clip records of its last update, and what it counts: the state behind `clip_metrics` and `leaf_report`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_globalclip import _leaves, _reference
from optax_globalclip._ops import Numbers


class LeafMetrics(NamedTuple):
  """Of the last update, in true units: the norm of each leaf and its number of non-finite elements, for `leaf_report`;
  the largest element and the number of zeros of the whole tree, for `clip_metrics`."""
  norms: jax.Array      # T[n], before the clip
  nonfinite: jax.Array  # int32[n]
  paths: jax.Array      # uint8: the leaves' names, a line each, so that a state says by itself which leaf is which
  largest_element: jax.Array  # T[], a magnitude; infinite where an element is not finite
  zero_elements: jax.Array    # T[], a count, exact to 2**24 (float64: 2**53)


class ClipState(NamedTuple):
  """What `monitor=True` records, in true units: of the last update, and counted since `init`."""
  global_norm: jax.Array           # before the clip
  clip_factor: jax.Array           # 1 where nothing was clipped; of several factors the smallest; 0 before the first
  steps: jax.Array
  clipped_steps: jax.Array
  nonfinite_steps: jax.Array
  consecutive_nonfinite: jax.Array
  leaf_metrics: LeafMetrics | None = None


def init(params: Any, *, leaves: bool) -> ClipState:
  dtype = _leaves.norm_dtype(jax.tree.leaves(params))
  metrics = None
  if leaves:
    keyed = jax.tree_util.tree_flatten_with_path(params)[0]
    names = _leaves.short_names([path for path, leaf in keyed
                                 if _leaves.counts("params" + jax.tree_util.keystr(path), leaf)])
    metrics = LeafMetrics(jnp.zeros(len(names), dtype), jnp.zeros(len(names), jnp.int32),
                          jnp.asarray(np.frombuffer("\n".join(names).encode(), np.uint8)),
                          jnp.zeros((), dtype), jnp.zeros((), dtype))
  # One buffer a field: a donated state must not hold the same one twice.
  return ClipState(jnp.zeros((), dtype), jnp.zeros((), dtype), *(jnp.zeros((), jnp.int32) for _ in range(4)), metrics)


def record(state: ClipState, numbers: Numbers, max_norm: jax.Array, *, zeroes: bool, skips: bool = False) -> ClipState:
  """The state after an update of these numbers; `zeroes` says whether a bad one became zero, instead of NaN.

  `skips` says whether it was skipped. Then the norm on record is infinite, also where only a threshold was bad.
  """
  bad = _reference.is_bad(numbers.ops)
  norm = numbers.norms[0]
  if skips:
    norm = jax.lax.select(bad, np.asarray(np.inf, norm.dtype), norm)
  factors = _reference.clip_factors(numbers.ops, numbers.norms, max_norm)
  smallest = jnp.min(factors[1:] if len(factors) > 1 else factors, initial=1)
  factor = jax.lax.select(bad, np.asarray(0 if zeroes else np.nan, smallest.dtype), smallest)
  def count_if(condition, counter):
    return jnp.where(condition, optax.safe_increment(counter), counter)
  return ClipState(
      global_norm=norm.astype(state.global_norm.dtype),
      clip_factor=factor.astype(state.clip_factor.dtype),
      steps=optax.safe_increment(state.steps),
      clipped_steps=count_if(_reference.is_clipped(numbers.ops), state.clipped_steps),
      nonfinite_steps=count_if(bad, state.nonfinite_steps),
      consecutive_nonfinite=jnp.where(bad, optax.safe_increment(state.consecutive_nonfinite), 0),
      leaf_metrics=None if state.leaf_metrics is None else _record_leaves(state.leaf_metrics, numbers))


def _record_leaves(metrics: LeafMetrics, numbers: Numbers) -> LeafMetrics:
  dtype = metrics.norms.dtype
  norms = numbers.norms[1:]
  if norms.shape != metrics.norms.shape:
    raise ValueError(f"state: init recorded {metrics.norms.size} leaves of its parameters, but the updates have "
                     f"{norms.size}: with monitor=True initialise with the tree that updates are of")
  return LeafMetrics(norms.astype(dtype), numbers.nonfinite[1:], metrics.paths, numbers.extremes[0].astype(dtype),
                     numbers.extremes[1].astype(dtype))
