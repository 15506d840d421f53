"""Running statistics of norms and losses: a moving mean and deviation, and the last n numbers.

All work elementwise on arrays of any shape, take in only where they are told to, and overflow for no finite input.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_globalclip import _reference
from optax_globalclip._arguments import as_dtype


class Mean(NamedTuple):
  """A mean: of all numbers until there are `warmup` of them, from then on a moving one."""
  mean: jax.Array   # T
  rest: jax.Array   # T: what the mean is short of the true one, so that rounding errors do not add up
  taken: jax.Array  # int32: numbers taken in, up to `warmup`


def init_mean(like) -> Mean:
  return Mean(jnp.zeros(like.shape, like.dtype), jnp.zeros(like.shape, like.dtype), jnp.zeros(like.shape, jnp.int32))


def _weights(state: Mean, decay: Any, warmup: int) -> tuple[jax.Array, jax.Array]:
  """How much the mean so far weighs beside the next number, and that: n / (n + 1) and 1 / (n + 1), then the decay."""
  before = state.taken.astype(state.mean.dtype)
  keep, take = decay_weights(decay, before.dtype)
  warm = state.taken >= warmup
  first = 1 / (before + 1)
  return jnp.where(warm, keep, 1 - first), jnp.where(warm, take, first)


def decay_weights(decay: Any, dtype) -> tuple[Any, Any]:
  """The decay, and 1 less it: subtracted in float64, unless it is traced."""
  if isinstance(decay, jax.Array):
    return decay.astype(dtype), 1 - decay.astype(dtype)
  return as_dtype(decay, dtype), as_dtype(1 - np.float64(decay), dtype)


def distance(state: Mean, x: jax.Array) -> jax.Array:
  """How far above the mean x is."""
  return (x - state.mean) - state.rest


def move(mean: jax.Array, rest: jax.Array, x: jax.Array, keep: Any, take: Any) -> tuple[jax.Array, jax.Array]:
  """`keep * mean + take * x`, and what that is short of the true number, for weights that add up to 1.

  The mean moves by a part of its distance to x, which has digits to spare; only the sum is rounded, and its rounding
  error is kept. Where little of the mean is kept the products are right to the last digit by themselves.
  """
  moved, error = _reference.two_sum(mean, take * ((x - mean) - rest))
  by_distance = _reference.two_sum(moved, rest + error)
  products = keep * mean + take * x
  little = keep < 0.5
  return jnp.where(little, products, by_distance[0]), jnp.where(little, jnp.zeros_like(rest), by_distance[1])


def add_to_mean(state: Mean, x: jax.Array, enters: jax.Array, decay: Any, warmup: int) -> Mean:
  x = jnp.where(enters, x, state.mean)
  mean, rest = move(state.mean, state.rest, x, *_weights(state, decay, warmup))
  return Mean(jnp.where(enters, mean, state.mean), jnp.where(enters, rest, state.rest),
              jnp.minimum(state.taken + enters.astype(jnp.int32), max(warmup, 1)))


def add_to_deviation(state: Mean, deviation: jax.Array, rest: jax.Array, x: jax.Array, decay: Any,
                     warmup: int) -> tuple[jax.Array, jax.Array]:
  """The standard deviation after x, about the mean that `state` has without it, and what it is short of the true one.

  The variance V becomes keep * (V + take * off^2), the population's, while the mean is one of all numbers; when it moves,
  keep * V + take * (x - new mean)^2, and the distance to the new mean is keep * off. The deviation moves by
  (new V - V) / (new deviation + deviation), which is small, so that rounding it does not matter.
  """
  keep, take = _weights(state, decay, warmup)
  off = jnp.abs(distance(state, x))
  share = jnp.where(state.taken < warmup, keep, keep * keep)
  # Times a power of two where they are large or small, so that no square is beyond the dtype.
  largest, number = jnp.maximum(deviation, off), deviation.dtype.type
  far, power = (40, 70) if deviation.dtype == np.float32 else (480, 600)
  by = jnp.where(largest > number(2.0**far), number(2.0**-power),
                 jnp.where(largest < number(2.0**-far), number(2.0**power), number(1)))
  before, off = deviation * by, off * by
  gained = share * take * (off * off)
  both = jnp.sqrt(keep * (before * before) + gained) + before
  step = (gained - take * (before * before)) / jnp.where(both > 0, both, jnp.ones_like(both)) / by
  moved, error = _reference.two_sum(deviation, step)
  return _reference.two_sum(moved, rest + error)


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
  return Recent(jnp.where((places == state.position[None]) & enters[None], x[None], state.recent),
                jnp.where(state.position + moved == n, 0, state.position + moved),
                jnp.minimum(state.filled + moved, n))


def percentile(state: Recent, percent: Any) -> jax.Array:
  """The linear percentile of what is there; 0 where nothing is. One sort."""
  places, n = _places(state)
  dtype = state.recent.dtype
  largest = np.asarray(np.finfo(dtype).max, dtype)
  ordered = jnp.sort(jnp.where(places < state.filled[None], state.recent, largest), axis=0)
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
    return jnp.take_along_axis(ordered, jnp.minimum(i, n - 1)[None], axis=0, mode="clip")[0]
  low = place(index)
  high = jnp.where(index + 1 < state.filled, place(index + 1), low)
  return jnp.where(state.filled > 0, low + (high - low) * fraction, jnp.zeros_like(low))


def moments(state: Recent) -> tuple[jax.Array, jax.Array]:
  """The mean and the population's standard deviation of what is there, two scalars; 0 where nothing is."""
  places, _ = _places(state)
  dtype = state.recent.dtype
  there = places < state.filled[None]
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
