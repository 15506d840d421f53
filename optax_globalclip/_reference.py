"""The specification in `jnp`: what every path computes, on every platform, to 1e-6.

A tree is clipped in four steps, each a function here and a native one in `_native`:

1. `sums`: the sum of squares of each leaf, or of the tree, as rows `(hi, lo, exponent)` that stand for
   `(hi + lo) * 4**exponent` with hi in [1, 4) or 0, and the number of non-finite elements.
2. `finish`: from a row, the norm in true units and the op `(mode, a, b)` that says what happens to an element.
3. `scale`: the op applied to a leaf.

`norm` is 1 and 2, `clip` all of them. All arithmetic is in T: float64 where a leaf is float64 or complex128, else
float32. Any magnitude is right, because squares are taken of elements divided by a power of two near the largest.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

KEEP, MULTIPLY, DIVIDE, FILL = range(4)
PROPAGATE, ZERO = range(2)
ZERO_EXPONENT = -4096  # of a zero sum: below every other, so that a maximum passes it over


def norm_dtype(leaves: Sequence[jax.Array]) -> np.dtype:
  wide = any(leaf.dtype in (jnp.float64, jnp.complex128) for leaf in leaves)
  return np.dtype(np.float64 if wide else np.float32)


def sums_results(leaves: Sequence[jax.Array], *, per_leaf: bool) -> list[tuple]:
  """Shapes and dtypes of what `sums` gives."""
  k = len(leaves) if per_leaf else 1
  return [((k, 3), norm_dtype(leaves)), ((k,), jnp.int32)]


def norm_results(leaves: Sequence[jax.Array], *, per_leaf: bool, leaf_norms: bool) -> list[tuple]:
  """Shapes and dtypes of what `norm` gives."""
  n, dtype = len(leaves), norm_dtype(leaves)
  return [((n + 1 if leaf_norms else 1,), dtype), ((n if leaf_norms else 1,), jnp.int32),
          ((n if per_leaf else 1, 3), dtype)]


def _real_parts(leaf: jax.Array) -> list[jax.Array]:
  return [leaf.real, leaf.imag] if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else [leaf]


def _two_sum(a, b):
  """`a + b` rounded, and the rounding error, exactly (Knuth)."""
  hi = a + b
  part = hi - a
  return hi, (a - (hi - part)) + (b - part)


def _exact_sum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The sum over all elements as a pair: a reduction whose addition keeps its rounding errors."""
  def add(a, b):
    hi, error = _two_sum(a[0], b[0])
    # Back to a pair whose second is below the first's last bit: left apart, the errors of 2^25 elements outgrow T too.
    return _two_sum(hi, a[1] + b[1] + error)
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


def _ldexp(x, exponent, steps=4):
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


def _frexp(x):
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


def normalize(hi, lo, exponent, nonfinite):
  """A row `(hi, lo, exponent)` of the same value with hi in [1, 4), or 0; (NaN, 0, 0) where an element is not finite."""
  value = hi + lo
  power = _frexp(value)[1]
  shift = jnp.where(value > 0, (power - 1) >> 1, 0)
  hi, lo = _two_sum(_ldexp(hi, -2 * shift, steps=2), _ldexp(lo, -2 * shift, steps=2))
  exponent = jnp.where(value > 0, exponent + shift, ZERO_EXPONENT)
  bad = nonfinite > 0
  nan = jnp.full_like(hi, jnp.nan)
  hi = jnp.where(bad, nan, hi)
  lo = jnp.where(bad, jnp.zeros_like(lo), lo)
  return jnp.stack([hi, lo, jnp.where(bad, 0, exponent).astype(hi.dtype)], axis=-1)


def _survey(parts: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
  """How many elements are NaN or infinite, and the largest magnitude, from one pass."""
  def add(a, b):
    return a[0] + b[0], jnp.maximum(a[1], b[1])
  zeros = jnp.zeros((), jnp.uint32), jnp.zeros((), parts[0].dtype)
  of_parts = [lax.reduce(((~jnp.isfinite(part)).astype(jnp.uint32), jnp.abs(part)), zeros, add, tuple(range(part.ndim)))
              for part in parts]
  count, largest = functools.reduce(add, of_parts)
  return jnp.minimum(count, jnp.uint32(2**31 - 1)).astype(jnp.int32), largest


def _rows(leaves: Sequence[jax.Array], dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
  """`(rows T[n, 3], nonfinite int32[n])`. What is a scalar for each leaf is done for all at once: it compiles faster."""
  parts = [[part.astype(dtype) for part in _real_parts(leaf)] for leaf in leaves]
  nonfinite, largest = map(jnp.stack, zip(*map(_survey, parts)))
  usable = (nonfinite == 0) & (largest > 0)
  exponent = _frexp(jnp.where(usable, largest, jnp.ones_like(largest)))[1]
  near = jnp.clip(-exponent, jnp.finfo(dtype).minexp, jnp.finfo(dtype).maxexp - 1)
  near, rest = _power_of_two(near, dtype), _power_of_two(-exponent - near, dtype)
  sums = []
  for i, of_leaf in enumerate(parts):
    hi, lo = _exact_sum(lax.square(of_leaf[0] * near[i] * rest[i]))
    for part in of_leaf[1:]:
      more, more_lo = _exact_sum(lax.square(part * near[i] * rest[i]))
      hi, error = _two_sum(hi, more)
      lo = lo + more_lo + error
    sums.append((hi, lo))
  hi, lo = jnp.stack([hi for hi, _ in sums]), jnp.stack([lo for _, lo in sums])
  return normalize(hi, lo, exponent, nonfinite), nonfinite


def add_rows(rows: jax.Array, nonfinite: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The row and the count of all `rows` (T[n, 3]) together."""
  bad = jnp.minimum(jnp.sum(nonfinite, dtype=jnp.uint32), jnp.uint32(2**31 - 1)).astype(jnp.int32)
  if not rows.shape[0]:
    return jnp.asarray([0, 0, ZERO_EXPONENT], rows.dtype), bad
  exponents = jnp.where(nonfinite > 0, 0, rows[:, 2]).astype(jnp.int32)
  exponent = jnp.max(exponents)
  shift = jnp.maximum(2 * (exponents - exponent), -4 * jnp.finfo(rows.dtype).maxexp)
  hi, lo = _exact_sum(_ldexp(rows[:, 0], shift))
  return normalize(hi, lo + jnp.sum(_ldexp(rows[:, 1], shift)), exponent, bad), bad


def sums(counted, leaves, *, per_leaf):
  """`(rows T[k, 3], nonfinite int32[k])`, k = number of leaves with `per_leaf`, else 1; of the leaves counted."""
  dtype = norm_dtype(leaves)
  rows, nonfinite = _rows(leaves, dtype) if leaves else (jnp.zeros((0, 3), dtype), jnp.zeros(0, jnp.int32))
  rows = jnp.where((counted != 0)[:, None], rows, jnp.asarray([0, 0, ZERO_EXPONENT], dtype))
  nonfinite = jnp.where(counted != 0, nonfinite, 0)
  if per_leaf:
    return rows, nonfinite
  row, count = add_rows(rows, nonfinite)
  return row[None], count[None]


def finish(row, any_nonfinite, max_norm, loss_scale, *, on_nonfinite):
  """`(norm T[], op T[3])` of one row. `any_nonfinite` speaks of the whole tree."""
  dtype = row.dtype
  one, zero, nan = (jnp.asarray(v, dtype) for v in (1, 0, jnp.nan))
  hi, lo, exponent = row[0], row[1], row[2].astype(jnp.int32)
  root = jnp.sqrt(hi)
  square, error = _square(root)
  root = jnp.where(hi > 0, root + ((hi - square) - error + lo) / (jnp.asarray(2, dtype) * root), root)
  scale_mantissa, scale_exponent = _frexp(loss_scale.astype(dtype))
  norm = jnp.where(root == 0, zero, _ldexp(root / scale_mantissa, exponent - scale_exponent))
  max_mantissa, max_exponent = _frexp(jnp.abs(max_norm))  # -0 is 0

  def op(mode, a, b=one):
    return jnp.stack([jnp.asarray(mode, dtype), a, b])

  # Unclipped gradients of a scaled loss are multiplied by a power of two or divided. Where they are clipped the loss
  # scale cancels: (g / s) * (max / (|g| / s)).
  unclipped = norm <= max_norm
  mantissa = jnp.where(unclipped, one, max_mantissa / root)
  power = jnp.where(unclipped, 1 - scale_exponent, max_exponent.astype(jnp.int32) - exponent)
  half = jnp.where(jnp.abs(power) > (120 if dtype == np.float32 else 1000), lax.div(power, np.int32(2)), 0)
  result = op(MULTIPLY, _ldexp(mantissa, power - half, steps=2), _ldexp(one, half, steps=2))
  result = jnp.where(unclipped & (scale_mantissa != 0.5), op(DIVIDE, loss_scale.astype(dtype)), result)
  result = jnp.where(unclipped & (loss_scale == 1), op(KEEP, one), result)
  result = jnp.where(any_nonfinite, op(FILL, zero if on_nonfinite == ZERO else nan), result)
  bad_scale = ~((loss_scale >= jnp.finfo(np.float32).tiny) & jnp.isfinite(loss_scale))  # a subnormal one is 0 to XLA
  result = jnp.where(bad_scale | ~(max_norm >= 0), op(FILL, nan), result)
  return jnp.where(bad_scale, nan, norm), result


def finish_all(rows, nonfinite, max_norm, loss_scale, *, per_leaf, on_nonfinite):
  """`(norms T[n + 1], ops T[k, 3])`: the tree's norm, then each leaf's."""
  row, count = add_rows(rows, nonfinite)
  one = functools.partial(finish, on_nonfinite=on_nonfinite)
  norms, ops = jax.vmap(one, in_axes=(0, None, None, None))(
      jnp.concatenate([row[None], rows]), count > 0, max_norm, loss_scale)
  return norms, ops[1:] if per_leaf else ops[:1]


def finish_tree(row, nonfinite, max_norm, loss_scale, *, on_nonfinite):
  """`(norms T[1], ops T[1, 3])` from the row T[1, 3] and the count int32[1] of a whole tree."""
  norm, op = finish(row[0], nonfinite[0] > 0, max_norm, loss_scale, on_nonfinite=on_nonfinite)
  return norm[None], op[None]


def norm(max_norm, loss_scale, leaves, *, per_leaf, leaf_norms, on_nonfinite):
  """`(norms T[n + 1], nonfinite int32[n], ops T[k, 3])`; without `leaf_norms` norms T[1] and nonfinite int32[1]."""
  rows, nonfinite = sums(np.ones(len(leaves), np.int32), leaves, per_leaf=leaf_norms)
  if leaf_norms:
    norms, ops = finish_all(rows, nonfinite, max_norm, loss_scale, per_leaf=per_leaf, on_nonfinite=on_nonfinite)
  else:
    norms, ops = finish_tree(rows, nonfinite, max_norm, loss_scale, on_nonfinite=on_nonfinite)
  return norms, nonfinite, ops


def op_of(ops: jax.Array, i: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Row i of `ops` (T[k, 3]) as three scalars: taken apart once for all leaves, not again for each."""
  return tuple(lax.squeeze(lax.slice(ops, (i, j), (i + 1, j + 1)), (0, 1)) for j in range(3))


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


def scale(leaf: jax.Array, op, out_dtype, *, divides: bool, zeroes: bool) -> jax.Array:
  """The op (T[3], or its three numbers) applied to every element, computed in T and rounded once to `out_dtype`.

  `divides` and `zeroes` say whether the op can be a division, as with a loss scale, and a filling with zeros: what
  cannot be is not computed. A filling with NaN is a multiplication by it.
  """
  mode, a, b = op
  if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
    parts = [scale(part, op, part.dtype, divides=divides, zeroes=zeroes) for part in _real_parts(leaf)]
    return lax.complex(*parts).astype(out_dtype)
  x = leaf.astype(a.dtype)
  y = x * a * b
  if divides:
    y = lax.select(mode == DIVIDE, divide(x, a), y)
  if zeroes:
    y = lax.select((mode == FILL) & (a == 0), jnp.zeros_like(y), y)
  return lax.select(mode == KEEP, leaf.astype(out_dtype), y.astype(out_dtype))
