"""What the package must compute, restated in NumPy: float64 for the narrow dtypes, extended precision for float64."""

import jax
import ml_dtypes  # noqa: F401  NumPy learns of bfloat16 from it
import numpy as np

WIDE = ("float64", "complex128")


def real_elements(leaf) -> np.ndarray:
  """The elements of a leaf as one long real vector of extended precision."""
  leaf = np.asarray(leaf)
  if np.issubdtype(leaf.dtype, np.complexfloating):
    return np.stack([leaf.real, leaf.imag]).astype(np.longdouble).ravel()
  return leaf.astype(np.float32 if leaf.dtype.itemsize == 2 else leaf.dtype).astype(np.longdouble).ravel()


def norm(tree) -> np.longdouble:
  """The root of the sum of squares of all elements. Extended precision holds the square of every float64."""
  return np.sqrt(sum((np.sum(np.square(real_elements(leaf))) for leaf in jax.tree.leaves(tree)), np.longdouble(0)))


def norm_dtype(tree) -> np.dtype:
  return np.dtype(np.float64 if any(str(leaf.dtype) in WIDE for leaf in jax.tree.leaves(tree)) else np.float32)


def to_norm_dtype(tree, value):
  """A number rounded to the dtype of the tree's norm."""
  with np.errstate(over="ignore"):
    return norm_dtype(tree).type(np.longdouble(value))


def clip(tree, max_norm, of=None, loss_scale=1.0):
  """Every leaf of `tree / loss_scale` times `max_norm / |of / loss_scale|` where that is below one; not rounded."""
  scale = np.longdouble(np.float32(loss_scale))
  length = norm(tree if of is None else of) / scale
  limit = to_norm_dtype(tree, max_norm)
  clips = to_norm_dtype(tree, length) > limit
  def of_leaf(leaf):
    leaf = np.asarray(leaf)
    if np.issubdtype(leaf.dtype, np.complexfloating):
      wide = leaf.astype(np.clongdouble) / scale
    else:
      wide = real_elements(leaf).reshape(leaf.shape) / scale
    return wide * (np.longdouble(limit) / length) if clips else wide
  return jax.tree.map(of_leaf, tree)


def ulps(got, want) -> np.ndarray:
  """The distance of `got` from the real number `want`, in units of the last place of `want` in `got`'s dtype."""
  got = np.asarray(got)
  if np.issubdtype(got.dtype, np.complexfloating):
    return np.maximum(ulps(got.real, np.real(want)), ulps(got.imag, np.imag(want)))
  info = ml_dtypes.finfo(got.dtype)
  want = np.asarray(want, np.longdouble)
  _, exponent = np.frexp(np.maximum(np.abs(want), np.longdouble(info.tiny)))
  grain = np.ldexp(np.longdouble(1), exponent - 1 - info.nmant)
  return np.abs(got.astype(np.float32 if got.dtype.itemsize == 2 else got.dtype).astype(np.longdouble) - want) / grain


def bits(leaf) -> np.ndarray:
  """The bytes of a leaf, so that NaN payloads and the signs of zeros compare."""
  leaf = np.ascontiguousarray(np.asarray(leaf))
  return np.frombuffer(leaf.tobytes(), np.uint8)


def same_bits(a, b) -> bool:
  """Whether two trees have the same structure, shapes, dtypes and bytes."""
  if jax.tree.structure(a) != jax.tree.structure(b):
    return False
  return all(np.shape(x) == np.shape(y) and np.asarray(x).dtype == np.asarray(y).dtype
             and np.array_equal(bits(x), bits(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
