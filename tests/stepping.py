"""Steps of `clipped_adamw`: what they must give in float64 NumPy, and how far float32 may be from it."""

import math
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import oracle


class Numbers(NamedTuple):
  """The numbers of AdamW."""
  rate: float = 1e-2
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  eps_root: float = 0.0
  decay: float = 1e-2


class Leaf(NamedTuple):
  m: np.ndarray
  v: np.ndarray
  p: np.ndarray


def wide(x) -> np.ndarray:
  return oracle.real_elements(x).reshape(np.shape(x))


def exact(gradient, before: Leaf, t: int, numbers: Numbers, *, decays: bool = True, unit: float, of_factor: float):
  """`(after, bound)` of a leaf whose gradient, already clipped, is a real array: exact, and how far each may be off
  before it is rounded to its own dtype. `unit` is half of the last place of 1 in the arithmetic, `of_factor` in the norm.

  The bounds are those of the docstring of `clipped_adamw`, with the rounding of the coefficients, of which that of
  1 - b^t is the largest: optax takes it in float32.
  """
  g, m, v, p = (np.asarray(x, np.longdouble) for x in (gradient, *map(wide, before)))
  terms = abs(numbers.b1 * m) + abs((1 - numbers.b1) * g)
  m = numbers.b1 * m + (1 - numbers.b1) * g
  v = numbers.b2 * v + (1 - numbers.b2) * g * g
  c1, c2 = 1 - numbers.b1**t, 1 - numbers.b2**t
  root = np.sqrt(v / c2 + numbers.eps_root) + numbers.eps
  decayed = numbers.decay * p if decays else 0 * p
  update = m / c1 / root + decayed
  of_corrections = 2 * unit * (1 / c1 + 1 / c2) * t  # of b^t, a power of a rounded number
  rounded = 12 * unit + 8 * of_factor + of_corrections
  off = numbers.rate * (rounded * terms / c1 / root + 4 * unit * abs(decayed))
  after = Leaf(m, v, p - numbers.rate * update)
  return after, Leaf((4 * unit + 4 * of_factor) * terms, (4 * unit + 8 * of_factor) * v, off + unit * abs(after.p))


def check_leaf(name, got: Leaf, after: Leaf, bound: Leaf):
  """Every element is within its bound and half a unit in the last place of its dtype; subnormal ones may be 0."""
  for field in Leaf._fields:
    x, want, far = wide(getattr(got, field)), getattr(after, field), getattr(bound, field)
    info = ml_dtypes.finfo(getattr(got, field).dtype)
    grain = np.maximum(np.abs(want) + far, float(info.tiny)) * float(info.eps)
    off = np.abs(x - want)
    assert np.all(off <= far + grain), (name, field, float(np.max(off / (far + grain))))


def moments(state):
  """`(mu, nu)` in a state of a clip and adamw."""
  return state[1][0].mu, state[1][0].nu


def check_step(before: tuple[Any, Any], grads: Any, after: tuple[Any, Any], t: int, numbers: Numbers, max_norm=math.inf, *,
               loss_scale=1.0, decays: Any = None):
  """The parameters and state after step `t` of `grads`, from those before: leaf by leaf against the model."""
  (params, state), (new_params, new_state) = before, after
  clipped = oracle.clip(grads, max_norm, loss_scale=loss_scale)
  of_factor, unit = (np.finfo(oracle.norm_dtype(tree)).eps / 2 for tree in (grads, (grads, params, *moments(state))))
  flags = jax.tree.map(lambda _: True, params) if decays is None else decays
  trees = (params, clipped, *moments(state), new_params, *moments(new_state), flags)
  for path, p, g, m, v, new_p, new_m, new_v, flag in zip(
      [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)],
      *map(jax.tree.leaves, trees), strict=True):
    want, bound = exact(g, Leaf(m, v, p), t, numbers, decays=flag, unit=unit, of_factor=of_factor)
    assert (new_p.dtype, new_m.dtype, new_v.dtype) == (p.dtype, m.dtype, v.dtype), path
    check_leaf(path, Leaf(new_m, new_v, new_p), want, bound)
