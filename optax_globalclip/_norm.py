"""Norms and the clip as differentiable, batchable functions of a list of leaves; `global_norm` and `leaf_norms`.

The layers, outermost first: a tree's floating leaves are picked out (`split_leaves`); `custom_jvp` states the
derivative in `jnp`; `custom_vmap` gives each member of a batch its own norm; `_partition` deals with meshes and
`_platform` with platforms.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_globalclip import _native, _partition, _reference

SUPPORTED = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


class Leaves(NamedTuple):
  """The leaves of a tree that count, and how to put others in their place."""
  arrays: list[jax.Array]
  paths: list[str]
  rebuild: Callable[..., Any]


def split_leaves(tree: Any) -> Leaves:
  """The floating and complex leaves of `tree`; integer, bool and float0 leaves, `None` and masked nodes stay behind.

  Raises:
    TypeError: for a leaf of any other kind, with its path and dtype.
  """
  keyed, treedef = jax.tree_util.tree_flatten_with_path(tree)
  everything, counted, arrays, paths = [], [], [], []
  for i, (path, leaf) in enumerate(keyed):
    name = "updates" + jax.tree_util.keystr(path)
    everything.append(leaf)
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
      if not isinstance(leaf, (bool, int, float, complex)):
        raise TypeError(f"{name}: expected an array or a number, got {type(leaf).__name__}")
      dtype = jax.dtypes.canonicalize_dtype(type(leaf))
    if dtype == jax.dtypes.float0 or dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer):
      continue
    if str(dtype) not in SUPPORTED:
      raise TypeError(f"{name}: expected one of {', '.join(SUPPORTED)}, or an integer or bool leaf to pass through; "
                      f"got {dtype}")
    counted.append(i)
    arrays.append(jnp.asarray(leaf))
    paths.append(name)

  def rebuild(new: Sequence[Any], passed_through: Callable = lambda leaf: leaf) -> Any:
    out = [passed_through(leaf) for leaf in everything]
    for i, leaf in zip(counted, new, strict=True):
      out[i] = leaf
    return treedef.unflatten(out)

  return Leaves(arrays, paths, rebuild)


class Options(NamedTuple):
  """What is fixed when a clip is traced."""
  per_leaf: bool = False
  on_nonfinite: int = _reference.PROPAGATE
  backend: str = "auto"
  stage: str = "auto"
  out_dtypes: tuple[np.dtype, ...] = ()
  divides: bool = False


def _inner(x: jax.Array, dx: jax.Array, dtype) -> jax.Array:
  """Re <x, dx>, summed in `dtype`."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    return _inner(x.real, dx.real, dtype) + _inner(x.imag, dx.imag, dtype)
  return jnp.sum(x.astype(dtype) * dx.astype(dtype))


def _wide(x: jax.Array, dtype) -> jax.Array:
  """`x` in the norm's dtype, or in the complex dtype of its width."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    return x.astype(np.complex128 if dtype == np.float64 else np.complex64)
  return x.astype(dtype)


def _over(numerator: jax.Array, norm: jax.Array) -> jax.Array:
  """`numerator / norm`, and 0 where the norm is 0: the derivative there, as for `optax.safe_norm`."""
  positive = norm != 0
  return jnp.where(positive, numerator / jnp.where(positive, norm, jnp.ones_like(norm)).astype(numerator.dtype),
                   jnp.zeros_like(numerator))


def _norm_tangents(norms, loss_scale, leaves, d_loss_scale, d_leaves):
  """The tangents of `norms` (T[n + 1]): with x = g / s, d|x| = <x, dg / s> / |x| - |x| ds / s."""
  dtype = norms.dtype
  s, ds = loss_scale.astype(dtype), d_loss_scale.astype(dtype)
  of_leaves = []
  for i, (x, dx) in enumerate(zip(leaves, d_leaves)):
    unit = _over(_wide(x, dtype) / s, norms[1 + i])
    of_leaves.append(_inner(unit, _wide(dx, dtype) / s, dtype))
  whole = sum((_over(norms[1 + i], norms[0]) * d for i, d in enumerate(of_leaves)), jnp.zeros((), dtype))
  return jnp.stack([whole, *of_leaves]) - norms * (ds / s)


def _vmap_one_by_one(function: Callable) -> Callable:
  """Batches `function` by a loop over members, each computed as it would be alone."""
  batched = jax.custom_batching.custom_vmap(function)

  @batched.def_vmap
  def rule(axis_size, in_batched, *args):
    del axis_size
    def member(mapped):
      mapped = iter(mapped)
      return batched(*(next(mapped) if b else a for a, b in zip(args, in_batched)))
    out = jax.lax.map(member, [a for a, b in zip(args, in_batched) if b])
    return out, jax.tree.map(lambda _: True, out)

  return batched


@functools.lru_cache(maxsize=None)
def _norm_function(backend: str) -> Callable:
  """`(loss_scale, *leaves) -> (norms T[n + 1], nonfinite int32[n])`."""
  @_vmap_one_by_one
  def run(loss_scale, *leaves):
    infinite = jnp.asarray(np.inf, _reference.norm_dtype(leaves))
    norms, nonfinite, _ = _partition.norm(infinite, loss_scale, *leaves, per_leaf=False,
                                          on_nonfinite=_reference.PROPAGATE, backend=backend)
    return norms, nonfinite

  function = jax.custom_jvp(run)

  @function.defjvp
  def rule(primals, tangents):
    norms, nonfinite = function(*primals)
    d_norms = _norm_tangents(norms, primals[0], primals[1:], tangents[0], tangents[1:])
    return (norms, nonfinite), (d_norms, np.zeros(nonfinite.shape, jax.dtypes.float0))

  return jax.jit(function, inline=True)


@functools.lru_cache(maxsize=None)
def _clip_function(options: Options) -> Callable:
  """`(max_norm, loss_scale, *leaves) -> (norms T[n + 1], nonfinite int32[n], *clipped)`."""
  @_vmap_one_by_one
  def run(max_norm, loss_scale, *leaves):
    norms, nonfinite, _, *clipped = _partition.clip(max_norm, loss_scale, *leaves, **options._asdict())
    return norms, nonfinite, *clipped

  function = jax.custom_jvp(run)

  @function.defjvp
  def rule(primals, tangents):
    max_norm, loss_scale, *leaves = primals
    d_max, d_loss_scale, *d_leaves = tangents
    norms, nonfinite, *clipped = function(*primals)
    dtype = norms.dtype
    d_norms = _norm_tangents(norms, loss_scale, leaves, d_loss_scale, d_leaves)
    s, ds = loss_scale.astype(dtype), d_loss_scale.astype(dtype)
    bad = jnp.sum((nonfinite > 0).astype(jnp.int32)) > 0
    fill = jnp.asarray(0 if options.on_nonfinite == _reference.ZERO else np.nan, dtype)
    d_clipped = []
    for i, (x, dx) in enumerate(zip(leaves, d_leaves)):
      norm, d_norm = (norms[1 + i], d_norms[1 + i]) if options.per_leaf else (norms[0], d_norms[0])
      factor = jnp.where(norm <= max_norm, jnp.ones_like(norm), _over(max_norm, norm))
      x, dx = _wide(x, dtype) / s, _wide(dx, dtype) / s
      along = jnp.where(norm <= max_norm, jnp.zeros_like(norm), d_max - factor * d_norm)
      dy = factor * (dx - x * (ds / s)) + _over(x, norm) * along
      d_clipped.append(jnp.where(bad, fill.astype(dy.dtype), dy).astype(clipped[i].dtype))
    zeros = np.zeros(nonfinite.shape, jax.dtypes.float0)
    return (norms, nonfinite, *clipped), (d_norms, zeros, *d_clipped)

  return jax.jit(function, inline=True)


def measure(leaves: Sequence[jax.Array], loss_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
  """`(norms T[n + 1], nonfinite int32[n])`: the tree's norm, then each leaf's, of `leaves / loss_scale`."""
  return _norm_function(_native.backend())(loss_scale, *leaves)


def clip(leaves, max_norm, loss_scale, options: Options):
  """`(norms T[n + 1], nonfinite int32[n], clipped leaves)`."""
  max_norm = jnp.asarray(max_norm).astype(_reference.norm_dtype(leaves))
  norms, nonfinite, *clipped = _clip_function(options._replace(backend=_native.backend()))(
      max_norm, loss_scale, *leaves)
  return norms, nonfinite, clipped


def _ones() -> jax.Array:
  return jnp.ones((), jnp.float32)


def global_norm(tree: Any) -> jax.Array:
  r"""The L2 norm of all leaves of a tree as one vector.

  .. math:: \sqrt{\sum_{\text{leaves}} \sum_i |x_i|^2}

  Right for every finite input that the dtypes can hold: float16, bfloat16, float32, float64, complex64 and complex128,
  mixed freely, at any magnitude. Native paths accumulate in float64, the reference in pairs of T.

  Args:
    tree: any pytree. Integer, bool and float0 leaves, `None` and `optax.MaskedNode` do not count; an empty tree has
      norm 0.

  Returns:
    A scalar: float64 where a leaf is float64 or complex128, else float32. NaN or infinite where an element is; `inf`
    where the true norm is beyond the dtype.

  Raises:
    TypeError: for a leaf of another dtype (float8, say), naming its path.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> float(ogc.global_norm({"w": jnp.full(9, 2000, jnp.float16)}))
    6000.0

  References:
    Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013, algorithm 1.
  """
  leaves = split_leaves(tree)
  return measure(leaves.arrays, _ones())[0][0]


def leaf_norms(tree: Any) -> Any:
  """The L2 norm of every leaf by itself, from the same pass as `global_norm`.

  Args:
    tree: any pytree, as for `global_norm`.

  Returns:
    A tree of scalars of the same structure, each of the dtype that `global_norm` would return; 0 for leaves that do not
    count.

  Raises:
    TypeError: as `global_norm`.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> norms = ogc.leaf_norms({"b": jnp.array([3., 4.]), "steps": jnp.array(7)})
    >>> float(norms["b"]), float(norms["steps"])
    (5.0, 0.0)
  """
  leaves = split_leaves(tree)
  norms = measure(leaves.arrays, _ones())[0]
  return leaves.rebuild(list(norms[1:]), passed_through=lambda _: jnp.zeros((), norms.dtype))
