"""The specification in `jnp`: what every path computes, on every platform, to 1e-6.

A tree is clipped in three steps, each a function here and native code in `ffi/`:

1. `sums`: the sum of squares as rows `(hi, lo, exponent)` that stand for `(hi + lo) * 4**exponent` with hi in [1, 4) or
   0, and the number of non-finite elements. Row 0 is the tree's, row 1 + i leaf i's where they are wanted.
2. `finish`: from rows to norms in true units, and to ops `(mode, a, b)`. The mode is the judgement of an update, made
   here and nowhere else: kept, clipped, or bad.
3. `scale`: the op applied to a leaf.

All arithmetic is in T: float64 where a leaf is float64 or complex128, else float32. Any magnitude is right, because
squares are taken of elements divided by a power of two near the largest. A row is finite whatever the elements are: a
sum that is not has an exponent that says so.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_globalclip._arguments import usable_max_norm, usable_scale
from optax_globalclip._leaves import norm_dtype

# What becomes of an element x. KEEP, UNSCALE, DIVIDE: the norm is at or below the threshold, and x stays bit for bit, is
# multiplied by a power of two, or is divided by the loss scale. CLIP: it is above, and x becomes x * a * b. FILL: the
# update is bad, and x becomes a.
KEEP, UNSCALE, DIVIDE, CLIP, FILL = range(5)
PROPAGATE, ZERO = range(2)
# Exponents of sums that are not ordinary numbers, in an order in which a maximum finds what the whole is.
ZERO_EXPONENT, INFINITE_EXPONENT, NAN_EXPONENT = -4096, 8192, 16384


def _real_parts(leaf: jax.Array) -> list[jax.Array]:
  return [leaf.real, leaf.imag] if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else [leaf]


def two_sum(a, b):
  """`a + b` rounded, and the rounding error, exactly (Knuth)."""
  hi = a + b
  part = hi - a
  return hi, (a - (hi - part)) + (b - part)


def exact_sum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The sum over all elements as a pair: a reduction whose addition keeps its rounding errors."""
  def add(a, b):
    hi, error = two_sum(a[0], b[0])
    # Back to a pair whose second is below the first's last bit: left apart, the errors of 2^25 elements outgrow T too.
    return two_sum(hi, a[1] + b[1] + error)
  zero = jnp.zeros((), x.dtype)
  return lax.reduce((x, jnp.zeros_like(x)), (zero, zero), add, tuple(range(x.ndim)))


def _square(x):
  """`x * x` rounded, and the rounding error, exactly (Dekker)."""
  splitter = x.dtype.type(2**12 + 1 if x.dtype == jnp.float32 else 2**27 + 1)
  wide = splitter * x
  hi = wide - (wide - x)
  lo = x - hi
  square = x * x
  return square, ((hi * hi - square) + x.dtype.type(2) * hi * lo) + lo * lo


def ldexp(x, exponent, steps=4):
  """`x * 2**exponent`, in steps of normal factors, so that nothing is lost or infinite on the way.

  Two steps reach from any number of T to [1, 4), four from any quotient of two.
  """
  info = jnp.finfo(x.dtype)
  for _ in range(steps):
    step = jnp.clip(exponent, info.minexp, info.maxexp - 1)
    x = x * _power_of_two(step, x.dtype)
    exponent = exponent - step
  return x


def _power_of_two(exponent, dtype):
  """`2**exponent` for a normal result, from its bits: `exp2` is not exact everywhere."""
  info = jnp.finfo(dtype)
  word = np.int64 if dtype == np.float64 else np.int32
  bits = (exponent.astype(word) + word(info.maxexp - 1)) << word(info.nmant)
  return lax.bitcast_convert_type(bits, dtype)


def frexp(x):
  """`(mantissa, exponent)` as `jnp.frexp`, the second int32: that of jax 0.12 loses the axes over which `x` varies."""
  info = jnp.finfo(x.dtype)
  word = np.int64 if x.dtype == np.float64 else np.int32
  mask, half = word(2**info.nexp - 1), word(info.maxexp - 2)  # of the exponent's bits; what they hold for [0.5, 1)
  subnormal = jnp.abs(x) < info.tiny
  bits = lax.bitcast_convert_type(jnp.where(subnormal, x * x.dtype.type(2.0**info.nmant), x), word)
  exponent = ((bits >> word(info.nmant)) & mask) - half - jnp.where(subnormal, word(info.nmant), word(0))
  mantissa = lax.bitcast_convert_type((bits & ~(mask << word(info.nmant))) | (half << word(info.nmant)), x.dtype)
  ordinary = (x != 0) & jnp.isfinite(x)
  return jnp.where(ordinary, mantissa, x), jnp.where(ordinary, exponent, word(0)).astype(jnp.int32)


def normalize(hi, lo, exponent):
  """A row `(hi, lo, exponent)` of the same value with hi in [1, 4), or 0; (0, 0, exponent) of a sum that is not finite."""
  nonfinite = exponent >= INFINITE_EXPONENT
  hi, lo = (jnp.where(nonfinite, jnp.zeros_like(x), x) for x in (hi, lo))
  value = hi + lo
  power = frexp(value)[1]
  shift = jnp.where(value > 0, (power - 1) >> 1, 0)
  hi, lo = two_sum(ldexp(hi, -2 * shift, steps=2), ldexp(lo, -2 * shift, steps=2))
  exponent = jnp.where(nonfinite, exponent, jnp.where(value > 0, exponent + shift, ZERO_EXPONENT))
  return jnp.stack([hi, lo, exponent.astype(hi.dtype)], axis=-1)


def _survey(parts: list[jax.Array], extremes: bool) -> tuple[jax.Array, ...]:
  """How many elements are NaN or infinite, the largest magnitude and, with `extremes`, how many are 0: in one pass."""
  def add(a, b):
    return (a[0] + b[0], jnp.maximum(a[1], b[1]), *(x + y for x, y in zip(a[2:], b[2:])))
  def of_part(part):
    return ((~jnp.isfinite(part)).astype(jnp.uint32), jnp.abs(part),
            *([(part == 0).astype(jnp.uint32)] if extremes else []))
  count = jnp.zeros((), jnp.uint32)
  zeros = (count, jnp.zeros((), parts[0].dtype), *([count] if extremes else []))
  of_parts = [lax.reduce(of_part(part), zeros, add, tuple(range(part.ndim))) for part in parts]
  count, *rest = functools.reduce(add, of_parts)
  return jnp.minimum(count, jnp.uint32(2**31 - 1)).astype(jnp.int32), *rest


def _rows(parts: list[list[jax.Array]], nonfinite: jax.Array, largest: jax.Array) -> jax.Array:
  """A row T[3] of each leaf. What is a scalar for each leaf is done for all at once: it compiles faster."""
  dtype = largest.dtype
  usable = (nonfinite == 0) & (largest > 0)
  exponent = frexp(jnp.where(usable, largest, jnp.ones_like(largest)))[1]
  near = jnp.clip(-exponent, jnp.finfo(dtype).minexp, jnp.finfo(dtype).maxexp - 1)
  near, rest = _power_of_two(near, dtype), _power_of_two(-exponent - near, dtype)
  sums = []
  for i, of_leaf in enumerate(parts):
    hi, lo = exact_sum(lax.square(of_leaf[0] * near[i] * rest[i]))
    for part in of_leaf[1:]:
      more, more_lo = exact_sum(lax.square(part * near[i] * rest[i]))
      hi, error = two_sum(hi, more)
      lo = lo + more_lo + error
    sums.append((hi, lo))
  code = jnp.where(jnp.isnan(largest), NAN_EXPONENT, INFINITE_EXPONENT)
  return normalize(jnp.stack([hi for hi, _ in sums]), jnp.stack([lo for _, lo in sums]),
                    jnp.where(nonfinite > 0, code, exponent))


def _add_rows(rows: jax.Array) -> jax.Array:
  """The row T[1, 3] of all `rows` together."""
  exponents = rows[:, 2].astype(jnp.int32)
  top = jnp.max(exponents, initial=ZERO_EXPONENT)
  exponent = jnp.max(jnp.where(exponents >= INFINITE_EXPONENT, ZERO_EXPONENT, exponents), initial=ZERO_EXPONENT)
  shift = jnp.clip(2 * (exponents - exponent), -4 * jnp.finfo(rows.dtype).maxexp, 0)
  hi, lo = exact_sum(ldexp(rows[:, 0], shift))
  lo = lo + jnp.sum(ldexp(rows[:, 1], shift))
  return normalize(hi, lo, jnp.where(top >= INFINITE_EXPONENT, top, exponent))[None]


def sums(counted: jax.Array, leaves: Sequence[jax.Array], *, leaf_norms: bool, extremes: bool):
  """`(rows T[m, 3], nonfinite int32[m], extremes T[e])`: the tree's and, with `leaf_norms`, each leaf's: m is n + 1 or 1.

  `counted` is int32[n], 0 for a leaf that does not count here, or int32[0] where all do. `extremes` has the largest
  magnitude of the operands' elements and the number of zeros among them, or nothing: e is 2 or 0.
  """
  dtype = norm_dtype(leaves)
  rows, nonfinite = jnp.zeros((0, 3), dtype), jnp.zeros(0, jnp.int32)
  largest = zeros = jnp.zeros(0, dtype)
  if leaves:
    parts = [[part.astype(dtype) for part in _real_parts(leaf)] for leaf in leaves]
    nonfinite, largest, *zeros = map(jnp.stack, zip(*(_survey(of_leaf, extremes) for of_leaf in parts)))
    rows = _rows(parts, nonfinite, largest)
  if counted.size:
    here = counted != 0
    rows = jnp.where(here[:, None], rows, jnp.asarray([0, 0, ZERO_EXPONENT], dtype))
    nonfinite, largest = (jnp.where(here, x, jnp.zeros_like(x)) for x in (nonfinite, largest))
    zeros = [jnp.where(here, x, jnp.zeros_like(x)) for x in zeros]
  count = jnp.minimum(jnp.sum(nonfinite, dtype=jnp.uint32), jnp.uint32(2**31 - 1)).astype(jnp.int32)[None]
  found = jnp.zeros(0, dtype)
  if extremes:
    largest = jnp.where(jnp.isnan(largest), jnp.zeros_like(largest), largest)
    found = jnp.stack([jnp.max(largest, initial=0), jnp.sum(jnp.asarray(zeros).astype(dtype))])
  row = _add_rows(rows)
  if leaf_norms:
    return jnp.concatenate([row, rows]), jnp.concatenate([count, nonfinite]), found
  return row, count, found


def _roots(rows):
  """T[m]: of each row the square root of its mantissa."""
  hi, lo = rows[:, 0], rows[:, 1]
  root = jnp.sqrt(hi)
  square, error = _square(root)
  return root + ((hi - square) - error + lo) / (hi.dtype.type(2) * jnp.where(hi > 0, root, jnp.ones_like(root)))


def _norms(rows, loss_scale, on_nonfinite):
  """The norms T[m] in true units."""
  positive, exponent, root = rows[:, 0] > 0, rows[:, 2].astype(jnp.int32), _roots(rows)
  mantissa, scale_exponent = frexp(loss_scale)
  norms = jnp.where(positive, ldexp(root / mantissa, jnp.where(positive, exponent, 0) - scale_exponent),
                    jnp.zeros_like(root))
  return _nonfinite_norms(flush(norms), exponent, on_nonfinite)


def flush(norms: jax.Array) -> jax.Array:
  """Norms, with 0 in the place of a subnormal one: XLA on the CPU takes it for 0 in some operations and not in others."""
  return jnp.where(norms < jnp.finfo(norms.dtype).tiny, jnp.zeros_like(norms), norms)


def _nonfinite_norms(norms, exponent, on_nonfinite):
  """Infinity, or NaN where there is one and it is to be seen, in the place of norms whose sums were not finite."""
  # Constants of the norms' shape: a NaN or an infinity that is made, only to be left out, stops JAX's debuggers.
  infinite, nan = (np.full(norms.shape, value, norms.dtype) for value in (np.inf, np.nan))
  norms = lax.select(exponent >= INFINITE_EXPONENT, infinite, norms)
  return lax.select(exponent >= NAN_EXPONENT, nan, norms) if on_nonfinite == PROPAGATE else norms


def _usable(loss_scale, dtype):
  """The loss scale in the dtype of the norms, or 1 in the place of one that cannot be used."""
  return jnp.where(usable_scale(loss_scale), loss_scale, jnp.ones_like(loss_scale)).astype(dtype)


def finish(rows, max_norm, loss_scale, *, per_leaf: bool, on_nonfinite: int):
  """`(norms T[m], ops T[k, 3])` from `sums`: what `judge` gives, and the norms in true units that it wants."""
  norms = _norms(rows, _usable(loss_scale, rows.dtype), on_nonfinite)
  refused = np.full(norms.shape, np.nan if on_nonfinite == PROPAGATE else np.inf, norms.dtype)
  norms = lax.select(jnp.broadcast_to(usable_scale(loss_scale), norms.shape), norms, refused)
  return norms, judge(rows, norms, max_norm, loss_scale, per_leaf=per_leaf, on_nonfinite=on_nonfinite)


def judge(rows, norms, max_norm, loss_scale, *, per_leaf: bool, on_nonfinite: int):
  """The ops T[k, 3] of sums and norms; k is m with `per_leaf`, where each leaf has an op of its own, else 1.

  `max_norm` is T[], or T[m] of a threshold each. Bad is an update with a non-finite element anywhere in the tree, or
  with a loss scale or a threshold that cannot be used: `ops[0]` says so for the whole tree.
  """
  k, dtype = len(norms) if per_leaf else 1, norms.dtype
  good_max = usable_max_norm(max_norm)
  bad = (rows[0, 2] >= INFINITE_EXPONENT) | ~usable_scale(loss_scale) | ~jnp.all(good_max)
  ops = _ops(norms[:k], _roots(rows[:k]), rows[:k, 2].astype(jnp.int32),
             jnp.broadcast_to(jnp.where(good_max, jnp.abs(max_norm), jnp.ones_like(max_norm)), norms.shape)[:k],  # -0: 0
             _usable(loss_scale, dtype))
  fill = np.tile(np.asarray([FILL, np.nan if on_nonfinite == PROPAGATE else 0, 0], dtype), (k, 1))
  return lax.select(jnp.broadcast_to(bad, fill.shape), fill, ops)


def _ops(norms, roots, exponents, max_norm, loss_scale):
  """The ops T[k, 3] of updates that are not bad.

  Those at or below the threshold are only unscaled: by a multiplication where the scale is a power of two. Above it the
  loss scale cancels: (g / s) * (max / (|g| / s)).
  """
  dtype = norms.dtype
  one = jnp.ones_like(norms)
  scale_mantissa, scale_exponent = frexp(loss_scale)
  max_mantissa, max_exponent = frexp(max_norm)
  clips = norms > max_norm
  mantissa = jnp.where(clips, max_mantissa / jnp.where(clips, roots, one), one)
  power = jnp.where(clips, max_exponent - exponents, 1 - scale_exponent)
  half = jnp.where(jnp.abs(power) > (120 if dtype == np.float32 else 1000), lax.div(power, jnp.full_like(power, 2)), 0)
  divides = ~clips & (scale_mantissa != 0.5)
  mode = jnp.where(clips, CLIP, jnp.where(loss_scale == 1, KEEP, jnp.where(scale_mantissa == 0.5, UNSCALE, DIVIDE)))
  a = jnp.where(divides, loss_scale, ldexp(mantissa, power - half, steps=2))
  b = jnp.where(divides, one, ldexp(one, half, steps=2))
  return jnp.stack([mode.astype(dtype), a, b], axis=-1)


def is_bad(ops: jax.Array) -> jax.Array:
  """bool[]: whether the update of the tree was judged bad."""
  return ops[0, 0] == FILL


def is_clipped(ops: jax.Array) -> jax.Array:
  """bool[]: whether any leaf was clipped."""
  return jnp.any(ops[:, 0] == CLIP) if len(ops) == 1 else jnp.any(ops[1:, 0] == CLIP)


def clip_factors(ops: jax.Array, norms: jax.Array, max_norm: jax.Array) -> jax.Array:
  """T[k]: for each op the factor by which it clips, `max_norm / norm`; 1 where it does not."""
  clips = ops[:, 0] == CLIP
  norms = norms[:len(ops)]
  return jnp.where(clips, max_norm / jnp.where(clips, norms, jnp.ones_like(norms)), jnp.ones_like(norms))


class Op(NamedTuple):
  """A row of ops, taken apart: scalars that many leaves share, so that no leaf makes them anew."""
  a: jax.Array
  b: jax.Array
  keeps: jax.Array           # bool
  divides: jax.Array | None  # bool; None where it cannot divide
  fills: jax.Array | None    # bool; None where nobody asks


def op_of(ops: jax.Array, i: int, *, divides: bool, fills: bool) -> Op:
  """Row i of `ops` (T[k, 3])."""
  mode, a, b = (lax.squeeze(lax.slice(ops, (i, j), (i + 1, j + 1)), (0, 1)) for j in range(3))
  return Op(a, b, mode == KEEP, mode == DIVIDE if divides else None, mode == FILL if fills else None)


def divide(x: jax.Array, scalar: jax.Array, like: jax.Array | None = None) -> jax.Array:
  """`x / scalar` for each element of a real or complex `x`, rounded once.

  XLA turns a division by a scalar into a multiplication by its reciprocal, which rounds twice and flushes 1 / 2^127 to
  zero; a denominator that looks different for every element stays one. It is made from `like` where `x` is a tangent,
  in which the result has to be linear.
  """
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    return lax.complex(divide(x.real, scalar), divide(x.imag, scalar))
  like = x if like is None else like
  return x / jnp.where(like == like, scalar.astype(x.dtype), jnp.ones_like(x))


def scale(leaf: jax.Array, op: Op, out_dtype, *, zeroes: bool) -> jax.Array:
  """The op applied to every element, computed in T and rounded once to `out_dtype`.

  `zeroes` says whether the op can be a filling with zeros: what cannot be is not computed. A filling with NaN is a
  multiplication by it.
  """
  if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
    return lax.complex(*(scale(part, op, part.dtype, zeroes=zeroes) for part in _real_parts(leaf))).astype(out_dtype)
  x = leaf.astype(op.a.dtype)
  if zeroes:
    x = lax.select(op.fills, jnp.zeros_like(x), x)
  if op.divides is None:
    y = x * op.a * op.b
  else:
    one = jnp.ones_like(op.a)
    y = x * jnp.where(op.divides, one, op.a) * op.b
    y = lax.select(op.divides, divide(x, jnp.where(op.divides, op.a, one)), y)
  return lax.select(op.keeps, leaf.astype(out_dtype), y.astype(out_dtype))
