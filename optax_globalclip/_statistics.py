"""Running statistics of norms and losses: a moving mean and deviation, and the last n numbers.

All work elementwise on arrays of any shape, take in only where they are told to, and overflow for no finite input.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_globalclip import _reference


def as_dtype(number: Any, dtype) -> Any:
  """A number of a rule in the dtype of the norms, rounded once; a traced one is not read."""
  return number.astype(dtype) if isinstance(number, jax.Array) else np.asarray(number, np.float64).astype(dtype)


class Mean(NamedTuple):
  """A mean: of all numbers until there are `warmup` of them, from then on a moving one."""
  mean: jax.Array   # T
  rest: jax.Array   # T: what the mean is short of the true one, so that rounding errors do not add up
  taken: jax.Array  # int32: numbers taken in, up to `warmup`


def init_mean(like) -> Mean:
  return Mean(jnp.zeros(like.shape, like.dtype), jnp.zeros(like.shape, like.dtype), jnp.zeros(like.shape, jnp.int32))


def weight(state: Mean, decay: Any, warmup: int) -> jax.Array:
  """T: how much the next number weighs."""
  dtype = state.mean.dtype
  first = 1 / (state.taken + 1).astype(dtype)
  return jnp.where(state.taken < warmup, first, as_dtype(1 - decay, dtype))


def distance(state: Mean, x: jax.Array) -> jax.Array:
  return (x - state.mean) - state.rest


def add_to_mean(state: Mean, x: jax.Array, enters: jax.Array, decay: Any, warmup: int) -> Mean:
  x = jnp.where(enters, x, state.mean)
  # (1 - w) mean + w x, for what is near the mean: the difference keeps the digits that the products lose.
  mean, error = _reference.two_sum(state.mean, distance(state, x) * weight(state, decay, warmup))
  mean, rest = _reference.two_sum(mean, state.rest + error)
  return Mean(jnp.where(enters, mean, state.mean), jnp.where(enters, rest, state.rest),
              jnp.minimum(state.taken + enters.astype(jnp.int32), max(warmup, 1)))


def hypot(a: jax.Array, b: jax.Array) -> jax.Array:
  """`sqrt(a**2 + b**2)` of two that are not negative, where a square would be beyond the dtype too."""
  large = jnp.maximum(a, b)
  by = jnp.where(large > 0, large, jnp.ones_like(large))
  return large * jnp.sqrt(jnp.square(a / by) + jnp.square(b / by))


class Recent(NamedTuple):
  """The last n numbers, in a ring."""
  recent: jax.Array    # T[n, ...]
  position: jax.Array  # int32[...]: where the next one goes
  filled: jax.Array    # int32[...]: how many there are, up to n


def init_recent(n: int, like) -> Recent:
  return Recent(jnp.zeros((n, *like.shape), like.dtype), jnp.zeros(like.shape, jnp.int32),
                jnp.zeros(like.shape, jnp.int32))


def _places(state: Recent) -> jax.Array:
  n = len(state.recent)
  return jax.lax.broadcasted_iota(jnp.int32, state.recent.shape, 0), n


def add_to_recent(state: Recent, x: jax.Array, enters: jax.Array) -> Recent:
  places, n = _places(state)
  moved = enters.astype(jnp.int32)
  return Recent(jnp.where((places == state.position) & enters, x, state.recent),
                jnp.where(state.position + moved == n, 0, state.position + moved),
                jnp.minimum(state.filled + moved, n))


def percentile(state: Recent, percent: Any) -> jax.Array:
  """The linear percentile of what is there; infinite where nothing is. One sort."""
  places, n = _places(state)
  dtype = state.recent.dtype
  largest = np.asarray(np.finfo(dtype).max, dtype)
  ordered = jnp.sort(jnp.where(places < state.filled, state.recent, largest), axis=0)
  if isinstance(percent, jax.Array):
    at = jnp.maximum(state.filled - 1, 0).astype(dtype) * (percent.astype(dtype) / dtype.type(100))
    below = jnp.floor(at)
    index, fraction = below.astype(jnp.int32), at - below
  else:
    # In float64 and ahead of time: in float32 the fraction of a place among 1,000 would keep four digits.
    at = np.maximum(np.arange(n + 1) - 1, 0) * (np.float64(percent) / 100)
    index = jnp.asarray(np.floor(at).astype(np.int32))[state.filled]
    fraction = jnp.asarray((at - np.floor(at)).astype(dtype))[state.filled]
  def place(i):
    return jnp.sum(jnp.where(places == jnp.minimum(i, n - 1), ordered, jnp.zeros_like(ordered)), axis=0)
  low = place(index)
  high = jnp.where(index + 1 < state.filled, place(index + 1), low)
  return jnp.where(state.filled > 0, low + (high - low) * fraction, np.asarray(np.inf, dtype))


def moments(state: Recent) -> tuple[jax.Array, jax.Array]:
  """The mean and the population's standard deviation of what is there, two scalars; 0 where nothing is."""
  places, _ = _places(state)
  dtype = state.recent.dtype
  there = places < state.filled
  x = jnp.where(there, state.recent, jnp.zeros_like(state.recent))
  # Times a power of two near the largest, so that no square is beyond the dtype.
  exponent = _reference.frexp(jnp.max(jnp.abs(x)))[1]
  x = _reference.ldexp(x, -exponent, steps=2)
  by = jnp.maximum(state.filled, 1).astype(dtype)
  high, low = _reference.exact_sum(x)
  mean, rest = high / by, low / by
  off = jnp.where(there, (x - mean) - rest, jnp.zeros_like(x))
  spread = jnp.sqrt(_reference.exact_sum(jnp.square(off))[0] / by)
  return _reference.ldexp(mean + rest, exponent, steps=2), _reference.ldexp(spread, exponent, steps=2)
