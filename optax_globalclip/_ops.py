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
  """The leaves of a tree that count, how to put others in their place, and the leaves of another tree beside them."""
  arrays: list[jax.Array]
  paths: list[str]        # as error messages name them: updates['a'][0]
  short_paths: list[str]  # as reports do: a/0
  rebuild: Callable[..., Any]
  matching: Callable[[Any, str], list[Any]]
  spread: Callable[..., tuple]  # (name, prefix of the tree, is_leaf) -> the prefix's entry for each of `arrays`


def counts(name: str, leaf: Any) -> bool:
  """Whether a leaf counts; raises `TypeError` for one of a kind that neither counts nor passes through."""
  dtype = getattr(leaf, "dtype", None)
  if dtype is None:
    if not isinstance(leaf, (bool, int, float, complex)):
      raise TypeError(f"{name}: expected an array or a number, got {type(leaf).__name__}")
    dtype = jax.dtypes.canonicalize_dtype(type(leaf))
  if dtype == jax.dtypes.float0 or dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer):
    return False
  if str(dtype) not in SUPPORTED:
    raise TypeError(f"{name}: expected one of {', '.join(SUPPORTED)}, or an integer or bool leaf to pass through; "
                    f"got {dtype}")
  return True


def dtype_of(leaf: Any) -> np.dtype:
  """The dtype that an array or a number has in JAX."""
  return jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", type(leaf)), allow_extended_dtype=True)


def short_path(path: tuple) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/") or "."


def split_leaves(tree: Any) -> Leaves:
  """The floating and complex leaves of `tree`; integer, bool and float0 leaves, `None` and masked nodes stay behind.

  Raises:
    TypeError: for a leaf of any other kind, with its path and dtype.
    ValueError: for leaves on different devices that no mesh joins, with their paths.
  """
  keyed, treedef = jax.tree_util.tree_flatten_with_path(tree)
  everything, counted, arrays, paths, short_paths = [], [], [], [], []
  for i, (path, leaf) in enumerate(keyed):
    name = "updates" + jax.tree_util.keystr(path)
    everything.append(leaf)
    if counts(name, leaf):
      counted.append(i)
      arrays.append(jnp.asarray(leaf))
      paths.append(name)
      short_paths.append(short_path(path))

  def rebuild(new: Sequence[Any], passed_through: Callable = lambda leaf: leaf) -> Any:
    out = [passed_through(leaf) for leaf in everything]
    for i, leaf in zip(counted, new, strict=True):
      out[i] = leaf
    return treedef.unflatten(out)

  def matching(other: Any, what: str) -> list[Any]:
    by_path = dict(jax.tree_util.tree_flatten_with_path(other)[0])
    missing = [name for i, name in zip(counted, paths) if keyed[i][0] not in by_path]
    if missing:
      raise ValueError(f"{missing[0]}: expected the structure of the {what}, which have no such leaf")
    return [by_path[keyed[i][0]] for i in counted]

  def spread(name: str, prefix: Any, is_leaf: Callable[[Any], bool]) -> tuple:
    try:
      entries = jax.tree.leaves(jax.tree.broadcast(prefix, tree, is_leaf=is_leaf), is_leaf=is_leaf)
    except ValueError as error:
      raise ValueError(f"{name}: expected one entry, or a tree that is a prefix of the updates: {error}") from None
    return tuple(entries[i] for i in counted)

  _partition.check_leaves(paths, arrays)
  return Leaves(arrays, paths, short_paths, rebuild, matching, spread)


class Options(NamedTuple):
  """What is fixed when a clip is traced."""
  per_leaf: bool = False
  on_nonfinite: int = _reference.PROPAGATE
  backend: str = "auto"
  stage: str = "auto"
  out_dtypes: tuple[np.dtype, ...] = ()
  divides: bool = False
  # Whether the norm and the count of each leaf are wanted too. On several devices they cost a vector of a few numbers a
  # leaf where the whole tree's cost a few numbers. `per_leaf` needs them.
  leaf_norms: bool = True
  # Where the leaves lie, as `_partition.place` gives it.
  axes: tuple[tuple[str, ...], ...] | None = None
  mesh: Any = None
  specs: tuple[Any, ...] | None = None


def _wide(x: jax.Array, dtype) -> jax.Array:
  """`x` in the norm's dtype; of a complex leaf its real and its imaginary parts, stacked."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag])
  return x.astype(dtype)


def _narrow(x: jax.Array, dtype) -> jax.Array:
  """The leaf of `dtype` that `_wide` made `x` from."""
  if jnp.issubdtype(dtype, jnp.complexfloating):
    return jax.lax.complex(x[0], x[1]).astype(dtype)
  return x.astype(dtype)


def _over(numerator: jax.Array, norm: jax.Array) -> jax.Array:
  """`numerator / norm`, and 0 where the norm is 0: the derivative there, as for `optax.safe_norm`."""
  positive = norm != 0
  quotient = _reference.divide(numerator, jnp.where(positive, norm, jnp.ones_like(norm)))
  return jnp.where(positive, quotient, jnp.zeros_like(numerator))


def _norm_tangents(norms, loss_scale, leaves, d_loss_scale, d_leaves, options):
  """The tangents of `norms`: with x = g / s, d|x| = <x, dg / s> / |x| - |x| ds / s."""
  dtype = norms.dtype
  s, ds = loss_scale.astype(dtype), d_loss_scale.astype(dtype)
  by_leaf = norms[1:] if options.leaf_norms else [norms[0]] * len(leaves)
  of_leaves = []
  for x, dx, norm in zip(leaves, d_leaves, by_leaf):
    x = _wide(x, dtype)
    unit = _over(_reference.divide(x, s), norm)
    of_leaves.append(jnp.sum(unit * _reference.divide(_wide(dx, dtype), s, like=x)))
  of_leaves = _partition.sum_shards(of_leaves, leaves, options)
  if not options.leaf_norms:
    return sum(of_leaves, jnp.zeros((), dtype))[None] - norms * (ds / s)
  whole = sum((_over(norm, norms[0]) * d for norm, d in zip(by_leaf, of_leaves)), jnp.zeros((), dtype))
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
def _norm_function(options: Options) -> Callable:
  """`(loss_scale, *leaves) -> (norms, nonfinite)`."""
  @_vmap_one_by_one
  def run(loss_scale, *leaves):
    infinite = jnp.asarray(np.inf, _reference.norm_dtype(leaves))
    norms, nonfinite, _ = _partition.norm(infinite, loss_scale, *leaves, options=options)
    return norms, nonfinite

  function = jax.custom_jvp(run)

  @function.defjvp
  def rule(primals, tangents):
    norms, nonfinite = function(*primals)
    d_norms = _norm_tangents(norms, primals[0], primals[1:], tangents[0], tangents[1:], options)
    return (norms, nonfinite), (d_norms, np.zeros(nonfinite.shape, jax.dtypes.float0))

  return jax.jit(function, inline=True)


@functools.lru_cache(maxsize=None)
def _clip_function(options: Options) -> Callable:
  """`(max_norm, loss_scale, *leaves) -> (norms, nonfinite, *clipped)`."""
  @_vmap_one_by_one
  def run(max_norm, loss_scale, *leaves):
    return _partition.clip(max_norm, loss_scale, *leaves, options=options)

  function = jax.custom_jvp(run)

  @function.defjvp
  def rule(primals, tangents):
    max_norm, loss_scale, *leaves = primals
    d_max, d_loss_scale, *d_leaves = tangents
    norms, nonfinite, *clipped = function(*primals)
    dtype = norms.dtype
    d_norms = _norm_tangents(norms, loss_scale, leaves, d_loss_scale, d_leaves, options)
    s, ds = loss_scale.astype(dtype), d_loss_scale.astype(dtype)
    bad = jnp.sum((nonfinite > 0).astype(jnp.int32)) > 0
    fill = jnp.asarray(0 if options.on_nonfinite == _reference.ZERO else np.nan, dtype)
    d_clipped = []
    for i, (x, dx) in enumerate(zip(leaves, d_leaves)):
      norm, d_norm = (norms[1 + i], d_norms[1 + i]) if options.per_leaf else (norms[0], d_norms[0])
      factor = jnp.where(norm <= max_norm, jnp.ones_like(norm), _over(max_norm, norm))
      x = _wide(x, dtype)
      x, dx = _reference.divide(x, s), _reference.divide(_wide(dx, dtype), s, like=x)
      along = jnp.where(norm <= max_norm, jnp.zeros_like(norm), d_max - factor * d_norm)
      dy = factor * (dx - x * (ds / s)) + _over(x, norm) * along
      dy = _narrow(jnp.where(bad, fill, dy), clipped[i].dtype)
      d_clipped.append(_partition.vary_as(dy, clipped[i]))
    zeros = np.zeros(nonfinite.shape, jax.dtypes.float0)
    return (norms, nonfinite, *clipped), (d_norms, zeros, *d_clipped)

  return jax.jit(function, inline=True)


def _complete(options: Options) -> Options:
  return options._replace(backend=_native.backend(), leaf_norms=bool(options.leaf_norms or options.per_leaf))


def measure(leaves: Sequence[jax.Array], loss_scale: jax.Array,
            options: Options = Options()) -> tuple[jax.Array, jax.Array]:
  """`(norms T[n + 1], nonfinite int32[n])`: the tree's norm, then each leaf's, of `leaves / loss_scale`.

  With `options.leaf_norms` False they are T[1], the tree's norm, and int32[1], 0 where every element is finite.
  """
  return _norm_function(_complete(options))(loss_scale, *leaves)


def clip(leaves, max_norm, loss_scale, options: Options):
  """`(norms, nonfinite, clipped leaves)`, the first two as from `measure`."""
  max_norm = jnp.asarray(max_norm).astype(_reference.norm_dtype(leaves))
  norms, nonfinite, *clipped = _clip_function(_complete(options))(max_norm, loss_scale, *leaves)
  return norms, nonfinite, clipped


@functools.lru_cache(maxsize=None)
def _op_function(options: Options) -> Callable:
  """`(max_norm, loss_scale, *leaves) -> (norms, nonfinite, ops T[1, 3])`."""
  @_vmap_one_by_one
  def run(max_norm, loss_scale, *leaves):
    return _partition.norm(max_norm, loss_scale, *leaves, options=options)
  return jax.jit(run, inline=True)


def norm_and_op(leaves, max_norm, loss_scale, options: Options):
  """`(norms, nonfinite, op T[3])`: the clip without its last step, for whoever scales later."""
  norms, nonfinite, ops = _op_function(_complete(options))(max_norm, loss_scale, *leaves)
  return norms, nonfinite, ops[0]


def _ones() -> jax.Array:
  return jnp.ones((), jnp.float32)


def global_norm(tree: Any, *, axis_name: Any = None, mesh: Any = None, specs: Any = None) -> jax.Array:
  r"""The L2 norm of all leaves of a tree as one vector.

  .. math:: \sqrt{\sum_{\text{leaves}} \sum_i |x_i|^2}

  Right for every finite input that the dtypes can hold: float16, bfloat16, float32, float64, complex64 and complex128,
  mixed freely, at any magnitude. Native paths accumulate in float64, the reference in pairs of T.

  Args:
    tree: any pytree. Integer, bool and float0 leaves, `None` and `optax.MaskedNode` do not count; an empty tree has
      norm 0.
    axis_name: inside `shard_map` with `check_vma=False` or `pmap`, the axes over which leaves are sharded: a name, a
      tuple of names, or a tree of those that is a prefix of `tree`. Without it each device's leaves count as whole.
    mesh: with `specs`, a mesh outside of `shard_map`, so that the program can be exported and kept in the persistent
      compilation cache; sharded leaves need neither to be right.
    specs: the `PartitionSpec` of every leaf, or a prefix tree of them. Leaves laid out otherwise are moved.

  Returns:
    A scalar, the same on every device: float64 where a leaf is float64 or complex128, else float32. NaN or infinite
    where an element is; `inf` where the true norm is beyond the dtype.

  Raises:
    TypeError: for a leaf of another dtype (float8, say), naming its path.
    ValueError: for leaves on different devices that no mesh joins, and an `axis_name`, `mesh` or `specs` that do not
      fit, naming the leaf.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> float(ogc.global_norm({"w": jnp.full(9, 2000, jnp.float16)}))
    6000.0

  References:
    Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013, algorithm 1.
  """
  leaves = split_leaves(tree)
  _partition.check_placement(axis_name, mesh, specs)
  options = Options(leaf_norms=False, **_partition.place(leaves, axis_name, mesh, specs))
  return measure(leaves.arrays, _ones(), options)[0][0]


def leaf_norms(tree: Any, *, axis_name: Any = None, mesh: Any = None, specs: Any = None) -> Any:
  """The L2 norm of every leaf by itself, from the same pass as `global_norm`.

  Args:
    tree: any pytree, as for `global_norm`.
    axis_name: as for `global_norm`.
    mesh: as for `global_norm`.
    specs: as for `global_norm`.

  Returns:
    A tree of scalars of the same structure, each of the dtype that `global_norm` would return; 0 for leaves that do not
    count.

  Raises:
    TypeError: as `global_norm`.
    ValueError: as `global_norm`.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> norms = ogc.leaf_norms({"b": jnp.array([3., 4.]), "steps": jnp.array(7)})
    >>> float(norms["b"]), float(norms["steps"])
    (5.0, 0.0)
  """
  leaves = split_leaves(tree)
  _partition.check_placement(axis_name, mesh, specs)
  norms = measure(leaves.arrays, _ones(), Options(**_partition.place(leaves, axis_name, mesh, specs)))[0]
  return leaves.rebuild(list(norms[1:]), passed_through=lambda _: jnp.zeros((), norms.dtype))
