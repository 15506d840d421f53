"""Random trees for the property tests: any structure, dtypes, magnitudes from subnormal to near the largest."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

NARROW = ("float16", "bfloat16", "float32", "complex64")
WIDE = (*NARROW, "float64", "complex128")
# Of trees that share a compiled program: the reference compiles slowly.
STRUCTURE = (("float32", (33,)), ("float16", (5,)), ("bfloat16", ()), ("complex64", (2, 3)), ("float32", (0,)))
WIDE_STRUCTURE = (("float64", (33,)), ("float32", (5,)), ("complex128", (3,)))
SHAPES = [(), (1,), (0,), (0, 3), (3,), (2, 5), (33,), (7, 1, 19), (1030,)]


def _reals(random, dtype, shape, spread, center):
  """Elements of both signs whose exponents lie about `center` (0: smallest normal, 1: near the largest)."""
  info = ml_dtypes.finfo(dtype)
  low, high = int(info.minexp) - info.nmant, int(info.maxexp) - 2
  at = int(info.minexp) + center * (high - int(info.minexp))
  exponents = np.clip(np.round(at + spread * random.standard_normal(shape)), low, high).astype(int)
  mantissas = random.uniform(1, 2, shape) * random.choice([-1, 1], shape)
  return np.asarray(np.ldexp(mantissas.astype(np.longdouble), exponents)).astype(
      np.float64 if dtype == "float64" else np.float32).astype(dtype)


@st.composite
def leaf(draw, dtypes=NARROW, shapes=SHAPES, centers=st.floats(0, 1)):
  dtype = draw(st.sampled_from(dtypes))
  shape = draw(st.sampled_from(shapes))
  random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  spread, center = draw(st.sampled_from([0, 1, 8, 40])), draw(centers)
  if np.dtype(dtype).kind != "c":
    return _reals(random, dtype, shape, spread, center)
  real = "float32" if dtype == "complex64" else "float64"
  out = np.empty(shape, dtype)
  out.real, out.imag = (_reals(random, real, shape, spread, center) for _ in range(2))
  return out


def trees(dtypes=NARROW, **kwargs):
  some = st.lists(leaf(dtypes, **kwargs), min_size=1, max_size=4)
  return some | some.map(lambda leaves: {"a": leaves[0], "rest": tuple(leaves[1:])})


def of_structure(*dtypes_and_shapes, **kwargs):
  """Trees that all have the same structure, so that they share a compiled program."""
  return st.tuples(*(leaf([dtype], [shape], **kwargs) for dtype, shape in dtypes_and_shapes)).map(list)
