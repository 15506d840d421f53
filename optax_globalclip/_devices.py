"""Where devices add up: the sums of squares of all shards of a tree, with the same bits on every device.

One maximum over devices, of the exponents, so that all rows can be written on one scale; then one sum, of the rows as
fixed-point numbers in int32 limbs, with the non-finite counts beside them. Integers add up exactly, whatever the order
in which a network adds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_globalclip import _reference

_LIMB_BITS = 12  # leaves 19 bits for carries: sums over 2**18 devices fit in int32
_COUNT_BITS = 16


class Layout(NamedTuple):
  """How the leaves lie on the devices that run this together. On one device there are no axes, and nothing to add."""
  axes: tuple[str, ...] = ()                         # to sum over
  groups: tuple[tuple[int, ...], ...] | None = None  # of the axes' indices, those that sum together; None: all
  counted: jax.Array = np.zeros(0, np.int32)         # int32[n]: 1 where this device's shard of a leaf counts; [0]: all do


class Sums(NamedTuple):
  """What `_reference.sums` gives: of the tree first, then of each leaf where they are wanted."""
  rows: jax.Array
  nonfinite: jax.Array
  extremes: jax.Array


def sum_over_devices(local: Sums, layout: Layout) -> Sums:
  """The sums of all devices of the layout together: the same bits on each of them."""
  rows, dtype = local.rows, local.rows.dtype
  devices = len(layout.groups[0]) if layout.groups else jax.lax.axis_size(layout.axes)
  over = dict(axis_name=layout.axes, axis_index_groups=layout.groups)
  word = np.dtype(np.int64 if dtype == np.float64 else np.int32)
  largest, zeros = local.extremes[:1], local.extremes[1:]
  # A float that is not negative and the integer of its bits are in the same order.
  tops = jax.lax.pmax(jnp.concatenate([rows[:, 2].astype(word), jax.lax.bitcast_convert_type(largest, word)]), **over)
  exponent = tops[:len(rows)].astype(jnp.int32)
  finite = exponent < _reference.INFINITE_EXPONENT
  limbs = _to_limbs(rows, jnp.where(finite, exponent, _reference.INFINITE_EXPONENT))
  counts = jnp.minimum(local.nonfinite, (2**31 - 1) // devices)
  high = jnp.floor(zeros * dtype.type(2.0**-_COUNT_BITS))
  parts = [high, zeros - high * dtype.type(2.0**_COUNT_BITS)]
  total = jax.lax.psum(jnp.concatenate([limbs.ravel(), counts, *(part.astype(jnp.int32) for part in parts)]), **over)
  at = np.cumsum([limbs.size, len(rows), len(zeros)])
  limbs, counts, high, low = (total[i:j] for i, j in zip([0, *at], [*at, len(total)]))
  zeros = high.astype(dtype) * dtype.type(2.0**_COUNT_BITS) + low.astype(dtype)
  largest = jax.lax.bitcast_convert_type(tops[len(rows):], dtype)
  return Sums(_from_limbs(limbs.reshape(len(rows), -1), exponent, dtype), counts, jnp.concatenate([largest, zeros]))


def _limb_count(dtype: np.dtype) -> int:
  return 6 if dtype == np.float64 else 4


def _to_limbs(rows: jax.Array, exponent: jax.Array) -> jax.Array:
  """int32[k, limbs]: the rows T[k, 3] as fixed-point numbers in units of `4**exponent`, at least each row's own.

  Limb j is worth 2**(-10 - 12 j). What is cut off is below 2**-46 of the largest row (float64: 2**-70).
  """
  shift = jnp.clip(2 * (rows[:, 2].astype(jnp.int32) - exponent), -256, 0) + (_LIMB_BITS - 2)
  limbs = [jnp.zeros(exponent.shape, jnp.int32)] * _limb_count(rows.dtype)
  for part in (rows[:, 0], rows[:, 1]):
    rest = _reference.ldexp(part, shift, steps=2)
    for j in range(len(limbs)):
      # Towards zero, for then the difference is exact: of a tiny negative number floor would leave 1 minus it, rounded.
      whole = jnp.trunc(rest)
      limbs[j] = limbs[j] + whole.astype(jnp.int32)
      rest = (rest - whole) * rest.dtype.type(2**_LIMB_BITS)
  return jnp.stack(limbs, axis=-1)


def _from_limbs(limbs: jax.Array, exponent: jax.Array, dtype: np.dtype) -> jax.Array:
  """The rows T[k, 3] that sums of limbs stand for."""
  mask = (1 << _LIMB_BITS) - 1
  digits, carry = [], jnp.zeros(exponent.shape, jnp.int32)
  for j in reversed(range(limbs.shape[1])):
    limb = limbs[:, j] + carry
    carry = limb >> _LIMB_BITS
    digits.insert(0, limb & mask)
  hi, lo = jnp.zeros(exponent.shape, dtype), jnp.zeros(exponent.shape, dtype)
  for j, digit in enumerate([carry, *digits]):
    hi, error = _reference.two_sum(hi, digit.astype(dtype) * dtype.type(2.0 ** (2 - _LIMB_BITS * j)))
    lo = lo + error
  return _reference.normalize(hi, lo, exponent)
