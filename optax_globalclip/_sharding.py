"""Meshes: what happens to a norm and a clip when leaves live on several devices.

No gradient moves. Each device sums the squares of its own shards (a leaf that several devices hold counts on one of
them), the devices add up those sums, a few integers, and each scales its own shards:

1. `_platform.sums`: the device's row `(hi, lo, exponent)` and its number of non-finite elements.
2. One maximum over devices: of the exponents, so that all rows can be written on one scale.
3. One sum over devices: of the rows as fixed-point numbers in int32 limbs, with the non-finite counts beside them.
   Integers add up exactly, so every device holds the same bits, whatever the order in which a network adds.
4. `_reference.finish` on every device, then `_platform.scale` on its shards.

What differs between meshes is only how the shards are come by: by `custom_partitioning` where XLA chooses shardings
(Auto), by `shard_map` where types or the caller give them (Explicit, `mesh=`), or they are what the caller already
holds (inside `shard_map` and `pmap`).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optax_globalclip import _compat, _platform, _reference

_LIMB_BITS = 12                  # leaves 19 bits for carries: sums over 2**18 devices fit in int32
_DEVICES = "globalclip_devices"  # the one axis of the mesh that `custom_partitioning` runs on
# Of any number of devices: the callbacks of `custom_partitioning` are not told how many there are.
_REPLICATED = NamedSharding(AbstractMesh((1,), (_DEVICES,)), PartitionSpec())


# ----------------------------------------------------------------------------------------------------------------------
# What the caller says about a mesh


def check_placement(axis_name: Any, mesh: Any, specs: Any) -> None:
  """Raises where `axis_name`, `mesh` and `specs` do not go together, whatever the tree."""
  if (mesh is None) != (specs is None):
    raise ValueError("mesh and specs: one says nothing without the other, got "
                     + ("specs alone" if mesh is None else "mesh alone"))
  if mesh is not None and axis_name is not None:
    raise ValueError("axis_name and mesh: axis_name is for use inside shard_map and pmap, mesh and specs for use "
                     "outside; got both")
  if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
    raise TypeError(f"mesh: expected a jax.sharding.Mesh or AbstractMesh, got {type(mesh).__name__}")
  for entry in jax.tree.leaves(axis_name, is_leaf=_is_axis_names):
    if not _is_axis_names(entry):
      raise TypeError(f"axis_name: expected the name of an axis, a tuple of names or a tree of those, got {entry!r}")
  for entry in jax.tree.leaves(specs, is_leaf=_is_spec):
    if not _is_spec(entry):
      raise TypeError(f"specs: expected a jax.sharding.PartitionSpec or a tree of them, got {entry!r}")


def _is_axis_names(entry: Any) -> bool:
  return isinstance(entry, str) or (isinstance(entry, tuple) and all(isinstance(name, str) for name in entry))


def _is_spec(entry: Any) -> bool:
  return isinstance(entry, PartitionSpec)


def place(leaves, axis_name: Any, mesh: Any, specs: Any) -> dict[str, Any]:
  """The fields `axes`, `mesh` and `specs` of `_norm.Options`: what the caller says, leaf by leaf.

  Raises:
    ValueError: for trees that are no prefix of the updates, unknown axes, and specs that do not fit a leaf.
  """
  if axis_name is not None:
    entries = leaves.spread("axis_name", axis_name, _is_axis_names)
    axes = tuple((entry,) if isinstance(entry, str) else entry for entry in entries)
    bound = _mesh_of(leaves.arrays).manual_axes
    for name, names in zip(leaves.paths, axes):
      if unknown := [axis for axis in names if axis not in bound]:
        raise ValueError(f"{name}: axis_name {unknown[0]!r} is no axis of a shard_map or pmap around this call; "
                         f"those are {list(bound)}")
    return dict(axes=axes)
  if mesh is None:
    return {}
  if bound := _mesh_of(leaves.arrays).manual_axes:
    raise ValueError(f"mesh: this call is inside a shard_map or pmap over {list(bound)}, where leaves are shards "
                     "already: leave mesh and specs out, or use axis_name")
  specs = leaves.spread("specs", specs, _is_spec)
  for name, leaf, spec in zip(leaves.paths, leaves.arrays, specs):
    if len(spec) > leaf.ndim:
      raise ValueError(f"{name}: {spec} has more entries than the leaf of shape {leaf.shape} has dimensions")
    for size, names in zip(leaf.shape, map(_names, spec)):
      if unknown := [axis for axis in names if axis not in mesh.shape]:
        raise ValueError(f"{name}: {spec} names {unknown[0]!r}, which is no axis of the mesh {dict(mesh.shape)}")
      if size % math.prod(mesh.shape[axis] for axis in names):
        raise ValueError(f"{name}: {spec} does not divide the leaf of shape {leaf.shape} evenly over the mesh "
                         f"{dict(mesh.shape)}; uneven shards are fine on an Auto mesh without mesh and specs")
  return dict(mesh=mesh, specs=specs)


def check_leaves(paths: Sequence[str], arrays: Sequence[jax.Array]) -> None:
  """Raises where no computation could hold all `arrays`, naming them, or where one is a sum still to be taken."""
  first = None
  for i, array in enumerate(arrays):
    if axes := _compat.unreduced_axes(array):
      raise ValueError(f"{paths[i]}: is unreduced over {sorted(axes)}, a sum over devices not yet taken, whose norm "
                       "its shards do not tell: reduce it first (jax.reshard, jax.lax.psum)")
    if isinstance(array, jax.core.Tracer) or not array.committed:
      continue
    if first is None:
      first = i
    elif array.sharding != arrays[first].sharding and array.sharding.device_set != arrays[first].sharding.device_set:
      def devices(j):
        return f"{paths[j]} on {sorted(map(str, arrays[j].sharding.device_set))}"
      raise ValueError(f"leaves lie on different devices and no mesh joins them: {devices(first)}, {devices(i)}. Put "
                       "them on one mesh with jax.device_put")


# ----------------------------------------------------------------------------------------------------------------------
# Sums over devices


class _Layout(NamedTuple):
  """How the leaves lie on the devices that run this together."""
  axes: tuple[str, ...]                       # to sum over
  groups: tuple[tuple[int, ...], ...] | None  # of the axes' indices, those that sum together; None: all
  counted: jax.Array                          # int32[n]: 1 where this device's shard of a leaf counts


def _vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
  missing = axes - _compat.varying_axes(x)
  return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def vary_as(x: jax.Array, like: jax.Array) -> jax.Array:
  """`x`, of a type that varies over every manual axis over which that of `like` does."""
  return _vary(x, _compat.varying_axes(like))


def _varying(arrays: Sequence[jax.Array]) -> frozenset[str]:
  return frozenset().union(*map(_compat.varying_axes, arrays))


def _limb_count(dtype: np.dtype) -> int:
  return 6 if dtype == np.float64 else 4


def _to_limbs(rows: jax.Array, exponent: jax.Array) -> jax.Array:
  """int32[k, limbs]: the rows T[k, 3] as fixed-point numbers in units of `4**exponent`, at least each row's own.

  Limb j is worth 2**(-10 - 12 j). What is cut off is below 2**-46 of the largest row (float64: 2**-70).
  """
  shift = jnp.maximum(2 * (rows[:, 2].astype(jnp.int32) - exponent), -256) + (_LIMB_BITS - 2)
  limbs = [jnp.zeros(exponent.shape, jnp.int32)] * _limb_count(rows.dtype)
  for part in (rows[:, 0], rows[:, 1]):
    rest = _reference._ldexp(part, shift, steps=2)
    for j in range(len(limbs)):
      # Towards zero, for then the difference is exact: of a tiny negative number floor would leave 1 minus it, rounded.
      whole = jnp.trunc(rest)
      limbs[j] = limbs[j] + whole.astype(jnp.int32)
      rest = (rest - whole) * rest.dtype.type(2**_LIMB_BITS)
  return jnp.stack(limbs, axis=-1)


def _from_limbs(limbs: jax.Array, exponent: jax.Array, nonfinite: jax.Array, dtype: np.dtype) -> jax.Array:
  """The rows T[k, 3] that sums of limbs stand for."""
  mask = (1 << _LIMB_BITS) - 1
  digits, carry = [], jnp.zeros(exponent.shape, jnp.int32)
  for j in reversed(range(limbs.shape[1])):
    limb = limbs[:, j] + carry
    carry = limb >> _LIMB_BITS
    digits.insert(0, limb & mask)
  hi, lo = jnp.zeros(exponent.shape, dtype), jnp.zeros(exponent.shape, dtype)
  for j, digit in enumerate([carry, *digits]):
    hi, error = _reference._two_sum(hi, digit.astype(dtype) * dtype.type(2.0 ** (2 - _LIMB_BITS * j)))
    lo = lo + error
  return _reference.normalize(hi, lo, exponent, nonfinite)


def _sum_over_devices(rows: jax.Array, nonfinite: jax.Array, layout: _Layout) -> tuple[jax.Array, jax.Array]:
  """The rows T[k, 3] and counts int32[k] of all devices of the layout together: the same bits on each of them."""
  usable = nonfinite == 0
  exponents = jnp.where(usable, rows[:, 2], rows.dtype.type(_reference.ZERO_EXPONENT)).astype(jnp.int32)
  exponent = jax.lax.pmax(exponents, layout.axes, axis_index_groups=layout.groups)
  limbs = _to_limbs(jnp.where(usable[:, None], rows, jnp.zeros_like(rows)), exponent)
  devices = len(layout.groups[0]) if layout.groups else jax.lax.axis_size(layout.axes)
  counts = jnp.minimum(nonfinite, (2**31 - 1) // devices)
  total = jax.lax.psum(jnp.concatenate([limbs, counts[:, None]], axis=1), layout.axes,
                       axis_index_groups=layout.groups)
  counts = total[:, -1]
  return _from_limbs(total[:, :-1], exponent, counts, rows.dtype), counts


# ----------------------------------------------------------------------------------------------------------------------
# The clip on one device, and on each of several. Both return (norms, nonfinite, *clipped), or (norms, nonfinite, ops)
# where `scales` is False.


def _on_one(max_norm, loss_scale, *leaves, options, scales):
  fixed = dict(per_leaf=options.per_leaf, leaf_norms=options.leaf_norms, on_nonfinite=options.on_nonfinite,
               backend=options.backend)
  if not scales:
    return tuple(_platform.norm(max_norm, loss_scale, *leaves, **fixed))
  norms, nonfinite, _, *clipped = _platform.clip(max_norm, loss_scale, *leaves, stage=options.stage,
                                                 out_dtypes=options.out_dtypes, divides=options.divides, **fixed)
  return norms, nonfinite, *clipped


def _on_shards(max_norm, loss_scale, *leaves, options, scales, layout, summed=None):
  """`summed`: the leaves with padding masked out, where there is any."""
  summed = leaves if summed is None else summed
  over = _varying(leaves) | frozenset(layout.axes if _varying(leaves) else ())
  rows, nonfinite = _platform.sums(_vary(layout.counted, over), *(_vary(x, over) for x in summed),
                                   per_leaf=options.leaf_norms, backend=options.backend)
  if layout.axes:
    rows, nonfinite = _sum_over_devices(rows, nonfinite, layout)
  if options.leaf_norms:
    norms, ops = _reference.finish_all(rows, nonfinite, max_norm, loss_scale, per_leaf=options.per_leaf,
                                       on_nonfinite=options.on_nonfinite)
  else:
    norms, ops = _reference.finish_tree(rows, nonfinite, max_norm, loss_scale, on_nonfinite=options.on_nonfinite)
  if not scales:
    return norms, nonfinite, ops
  # A result varies as its leaf does, or as the op where that still varies.
  clipped = list(leaves)
  kinds = [_compat.varying_axes(leaf) | _compat.varying_axes(ops) for leaf in leaves]
  for kind in dict.fromkeys(kinds):
    members = [i for i, other in enumerate(kinds) if other == kind]
    scaled = _platform.scale(_vary(ops[np.asarray(members)] if options.per_leaf else ops, kind),
                             *(_vary(leaves[i], kind) for i in members), per_leaf=options.per_leaf,
                             stage=options.stage, out_dtypes=tuple(options.out_dtypes[i] for i in members),
                             divides=options.divides, zeroes=options.on_nonfinite == _reference.ZERO,
                             backend=options.backend)
    for i, leaf in zip(members, scaled, strict=True):
      clipped[i] = leaf
  return norms, nonfinite, *clipped


# ----------------------------------------------------------------------------------------------------------------------
# Named axes: inside a shard_map of the caller's, or of ours


def _names(entry: Any) -> tuple[str, ...]:
  """The axes in one entry of a PartitionSpec."""
  return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _axes_of_spec(spec: PartitionSpec) -> tuple[str, ...]:
  return tuple(name for entry in spec for name in _names(entry))


def _mesh_of(leaves: Sequence[jax.Array]):
  """The mesh around this call or, without one, that of the leaves' types; empty where neither is known."""
  mesh = jax.sharding.get_abstract_mesh()
  for leaf in leaves if mesh.empty else ():
    if not jax.typeof(leaf).sharding.mesh.empty:
      return jax.typeof(leaf).sharding.mesh
  return mesh


def _manual_axes_of(leaves: Sequence[jax.Array], options) -> list[tuple[str, ...]]:
  """For each leaf the manual axes over which its shards make up the whole."""
  varying = [_compat.varying_axes(leaf) for leaf in leaves]
  if options.axes is None:
    return [tuple(sorted(axes)) for axes in varying]
  # Where types say how leaves vary, an axis over which one does not vary holds replicas of it. They say it where an
  # axis's index varies.
  axis = next((name for named in options.axes for name in named), None)
  typed = axis is not None and bool(_compat.varying_axes(jax.lax.axis_index(axis)))
  return [tuple(a for a in named if a in own or not typed) for named, own in zip(options.axes, varying)]


def _layout_of_axes(axes: Sequence[tuple[str, ...]]) -> _Layout:
  """The layout of leaves each of which is sharded over `axes[i]` and replicated over the others' axes."""
  union = tuple(dict.fromkeys(name for names in axes for name in names))
  kinds = {kind: i for i, kind in enumerate(dict.fromkeys(map(frozenset, axes)))}
  def first_replica(kind):
    flag = jnp.ones((), jnp.int32)
    for name in union:
      if name not in kind:
        flag = flag * (jax.lax.axis_index(name) == 0).astype(jnp.int32)
    return flag
  if len(kinds) == 1:
    return _Layout(union, None, jnp.ones(len(axes), jnp.int32))
  flags = jnp.stack([first_replica(kind) for kind in kinds])
  return _Layout(union, None, flags[np.asarray([kinds[frozenset(names)] for names in axes])])


def _on_named_axes(max_norm, loss_scale, *leaves, options, scales, axes):
  """With manual axes around: `axes[i]` are those that shard leaf i."""
  layout = _layout_of_axes(axes)
  kinds = {_compat.varying_axes(leaf) for leaf in leaves}
  if not layout.axes and len(kinds) <= 1:
    kind = frozenset().union(*kinds, _varying([max_norm, loss_scale]))
    leaves = [_vary(leaf, kind) for leaf in leaves]
    return _on_one(_vary(max_norm, kind), _vary(loss_scale, kind), *leaves, options=options, scales=scales)
  return _on_shards(max_norm, loss_scale, *leaves, options=options, scales=scales, layout=layout)


def _in_shard_map(mesh, specs, outer_axes, max_norm, loss_scale, *leaves, options, scales, **settings):
  """The leaves split by a shard_map of our own, inside which leaf i is sharded over `outer_axes[i]` too."""
  axes = [(*outer, *_axes_of_spec(spec)) for outer, spec in zip(outer_axes, specs)]
  run = functools.partial(_on_named_axes, options=options, scales=scales, axes=axes)
  scalar = PartitionSpec()
  return jax.shard_map(run, mesh=mesh, in_specs=(scalar, scalar, *specs),
                       out_specs=(scalar, scalar, *(specs if scales else (scalar,))), **settings)(
                           max_norm, loss_scale, *leaves)


# ----------------------------------------------------------------------------------------------------------------------
# Auto meshes: XLA chooses the shardings, and `custom_partitioning` tells of them while the program is compiled


def _tiles(sharding: jax.sharding.Sharding, ndim: int) -> np.ndarray:
  """int[devices, ndim]: which tile each device holds, in the order of the devices' assignment."""
  # Every number of tiles divides the number of devices, so this shape divides evenly.
  shape = (sharding.num_devices,) * ndim
  indices = sharding.devices_indices_map(shape).values()
  def tile(part, size):
    start, stop, _ = part.indices(size)
    return start // (stop - start)
  return np.asarray([[tile(part, size) for part, size in zip(index, shape)] for index in indices],
                    dtype=np.int32).reshape(sharding.num_devices, ndim)


class _Tiling(NamedTuple):
  """How XLA laid the leaves over all devices: tables by device, in the order of the devices' assignment."""
  devices: list[jax.Device]
  groups: tuple[tuple[int, ...], ...]  # of equal size: devices that together hold every tile of every leaf
  counted: np.ndarray                  # int32[devices, kinds]
  kind: np.ndarray                     # int[n]: a leaf's column of `counted`
  tiles: list[np.ndarray]              # of each leaf: int32[devices, ndim]


def _tiling(shardings: Sequence[jax.sharding.Sharding], ranks: Sequence[int]) -> _Tiling:
  kinds = {pair: i for i, pair in enumerate(dict.fromkeys(zip(shardings, ranks)))}
  tables = [_tiles(sharding, rank) for sharding, rank in kinds]
  kind = np.asarray([kinds[pair] for pair in zip(shardings, ranks)])
  devices = list(shardings[0].devices_indices_map((shardings[0].num_devices,) * ranks[0]))
  # Devices with the same tile of every leaf are replicas of each other. The r-th replicas of all tiles form group r.
  _, holding = np.unique(np.concatenate(tables, axis=1), axis=0, return_inverse=True)
  members = [np.flatnonzero(holding == h) for h in range(holding.max() + 1)]
  if len({len(same) for same in members}) == 1:
    groups = np.sort(np.stack(members, axis=1), axis=1)
  else:
    groups = np.arange(len(devices))[None]
  counted = np.zeros((len(devices), len(kinds)), np.int32)
  for column, table in enumerate(tables):
    for group in groups:
      counted[group[np.unique(table[group], axis=0, return_index=True)[1]], column] = 1
  return _Tiling(devices, tuple(map(tuple, groups.tolist())), counted, kind, [tables[k] for k in kind])


def _without_padding(shard: jax.Array, shape: tuple[int, ...], tiles: np.ndarray, device) -> jax.Array:
  """Zeros where the last tiles of an unevenly divided leaf of `shape` reach beyond it."""
  for dim, (size, tile) in enumerate(zip(shape, shard.shape)):
    if tile * (tiles[:, dim].max() + 1) > size:
      # Behind the last element this is negative, and nothing of the tile is left.
      valid = jnp.asarray((size - tile * tiles[:, dim]).astype(np.int32))[device]
      inside = jax.lax.broadcasted_iota(jnp.int32, shard.shape, dim) < valid
      shard = jnp.where(inside, shard, jnp.zeros_like(shard))
  return shard


def _on_auto_mesh(max_norm, loss_scale, *leaves, options, scales):
  run = functools.partial(_on_one, options=options, scales=scales)
  x64 = jax.config.jax_enable_x64

  @custom_partitioning
  def partitioned(max_norm, loss_scale, *leaves):
    return run(max_norm, loss_scale, *leaves)

  def rule(mesh, operand_types, result_types):
    del mesh
    # Every dimension of every leaf may be sharded in any way, and its clipped leaf then is likewise.
    of_leaves = tuple(ArrayMapping(*(f"leaf{i}_{d}" for d in range(leaf.ndim))) for i, leaf in enumerate(leaves))
    numbers = (ArrayMapping("norms"), ArrayMapping("nonfinite"))
    ops = ArrayMapping("ops", "numbers")
    return SdyShardingRule((ArrayMapping(), ArrayMapping(), *of_leaves), (*numbers, *(of_leaves if scales else (ops,))),
                           need_replication_factors=("norms", "nonfinite", *(() if scales else ("ops", "numbers"))))

  def infer_sharding(mesh, operand_shapes, result_shapes):
    del mesh
    of_leaves = [_REPLICATED if leaf.sharding is None else leaf.sharding for leaf in operand_shapes[2:]]
    return (_REPLICATED, _REPLICATED, *(of_leaves if scales else (_REPLICATED,)))

  def partition(mesh, operand_shapes, result_shapes):
    shapes = [leaf.shape for leaf in operand_shapes[2:]]
    of_leaves = [leaf.sharding for leaf in operand_shapes[2:]]
    tiling = _tiling(of_leaves, [len(shape) for shape in shapes])

    def on_each_device(max_norm, loss_scale, *shards):
      # XLA compiles on threads of its own, which know nothing of a `with jax.enable_x64(True)` around the caller.
      with jax.enable_x64(x64):
        if len(tiling.groups[0]) == 1:
          return run(max_norm, loss_scale, *shards)
        device = jax.lax.axis_index(_DEVICES)
        layout = _Layout((_DEVICES,), tiling.groups if len(tiling.groups) > 1 else None,
                         jnp.asarray(tiling.counted)[device][tiling.kind])
        summed = [_without_padding(x, shape, tiles, device) for x, shape, tiles in zip(shards, shapes, tiling.tiles)]
        return _on_shards(max_norm, loss_scale, *shards, options=options, scales=scales, layout=layout, summed=summed)

    flat = Mesh(np.asarray(tiling.devices), (_DEVICES,))
    results = (_REPLICATED, _REPLICATED, *(of_leaves if scales else (_REPLICATED,)))
    return flat, on_each_device, results, (_REPLICATED, _REPLICATED, *of_leaves)

  # Shardings are asked for as XLA holds them: not every one can be written in the names of a mesh.
  partitioned.def_partition(partition, infer_sharding_from_operands=infer_sharding, sharding_rule=rule,
                            decode_shardings=False)
  return partitioned(max_norm, loss_scale, *leaves)


# ----------------------------------------------------------------------------------------------------------------------
# Dispatch


def _run(max_norm, loss_scale, *leaves, options, scales):
  mesh = _mesh_of(leaves)
  fixed = dict(options=options, scales=scales)
  if options.mesh is not None:
    return _in_shard_map(options.mesh, options.specs, [()] * len(leaves), max_norm, loss_scale, *leaves, **fixed,
                         check_vma=False)
  if mesh.auto_axes and (mesh.manual_axes or mesh.explicit_axes):
    # Inside a manual region that XLA still partitions along other axes, a custom call would get gathered operands.
    fixed["options"] = options._replace(backend="reference")
  if mesh.explicit_axes:
    specs = [jax.typeof(leaf).sharding.spec for leaf in leaves]
    outer = _manual_axes_of(leaves, options) if mesh.manual_axes else [()] * len(leaves)
    return _in_shard_map(mesh if jax.sharding.get_abstract_mesh().empty else None, specs, outer, max_norm, loss_scale,
                         *leaves, **fixed, axis_names=set(mesh.explicit_axes), check_vma=False)
  if mesh.manual_axes:
    return _on_named_axes(max_norm, loss_scale, *leaves, axes=_manual_axes_of(leaves, options), **fixed)
  return (_on_auto_mesh if leaves else _on_one)(max_norm, loss_scale, *leaves, **fixed)


def clip(max_norm, loss_scale, *leaves, options):
  """`(norms, nonfinite, *clipped)`; see `_norm.clip`."""
  return _run(max_norm, loss_scale, *leaves, options=options, scales=True)


def norm(max_norm, loss_scale, *leaves, options):
  """`(norms, nonfinite, ops T[k, 3])`; see `_norm.norm_and_op`."""
  return _run(max_norm, loss_scale, *leaves, options=options, scales=False)


def sum_shards(values: Sequence[jax.Array], leaves: Sequence[jax.Array], options) -> list[jax.Array]:
  """`values[i]`, a number that each device found from its shard of leaf i, summed over that leaf's shards."""
  values = list(values)
  if options.mesh is not None or not _mesh_of(leaves).manual_axes:
    return values
  axes = _manual_axes_of(leaves, options)
  for kind in filter(None, dict.fromkeys(axes)):
    members = [i for i, names in enumerate(axes) if names == kind]
    total = jax.lax.psum(jnp.stack([values[i] for i in members]), kind)
    for j, i in enumerate(members):
      values[i] = total[j]
  return values
