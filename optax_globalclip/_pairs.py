"""Numbers as pairs of T: `hi + lo`, with lo below the last bit of hi. Twice the digits, for running statistics.

Elementwise, and without XLA's float64, which is off by default. Products of the parts must be within T's range.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_globalclip._reference import two_sum


class Pair(NamedTuple):
  hi: jax.Array
  lo: jax.Array


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """x as a sum of two numbers of half its digits. By its bits: no number is too large for that."""
  word, low = (np.uint64, 2**27 - 1) if x.dtype == np.float64 else (np.uint32, 2**12 - 1)
  high = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, word) & ~word(low), x.dtype)
  return high, x - high


def two_product(a: jax.Array, b: jax.Array) -> Pair:
  """`a * b` rounded, and the rounding error (Dekker)."""
  product = a * b
  (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
  return Pair(product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low)


def add(x: Pair, y: Pair) -> Pair:
  hi, error = two_sum(x.hi, y.hi)
  return Pair(*two_sum(hi, error + (x.lo + y.lo)))


def multiply(x: Pair, y: Pair) -> Pair:
  hi, error = two_product(x.hi, y.hi)
  return Pair(*two_sum(hi, error + (x.hi * y.lo + x.lo * y.hi)))


def sqrt(x: Pair) -> Pair:
  root = jnp.sqrt(x.hi)
  square = two_product(root, root)
  rest = ((x.hi - square.hi) - square.lo + x.lo) / (2 * jnp.where(root > 0, root, jnp.ones_like(root)))
  return Pair(*two_sum(root, jnp.where(root > 0, rest, jnp.zeros_like(rest))))


def quotient(a: jax.Array, b: jax.Array) -> Pair:
  """`a / b` for a b that is not 0."""
  hi = a / b
  product = two_product(hi, b)
  return Pair(*two_sum(hi, ((a - product.hi) - product.lo) / b))


def constant(number: float, dtype) -> Pair:
  """A number that is known ahead of time, to as many digits as float64 has."""
  hi = np.float64(number).astype(dtype)
  return Pair(hi, (np.float64(number) - np.float64(hi)).astype(dtype))


def where(condition: jax.Array, x: Pair, y: Any) -> Pair:
  return Pair(*(jnp.where(condition, a, b) for a, b in zip(x, y)))
