"""Meshes: where the shards of the leaves are, and over which axes what is found in them adds up.

`on_each_device` runs a function of shards wherever they are: as they are, on one device; inside a `shard_map` of the
caller's; in one of our own, where types (Explicit axes) or the caller (`mesh=`) tell how leaves are sharded; and, where
XLA chooses the shardings (Auto axes), in the program of each device, which XLA's partitioner asks for (`_auto`).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from optax_globalclip import _auto, _compat
from optax_globalclip._devices import Layout
from optax_globalclip._placement import Placement, axis_names, mesh_of


def on_each_device(function: Callable, options, placement: Placement, max_norm, loss_scale, *leaves):
  """`function(options, layout, max_norm, loss_scale, *shards)` on every device: numbers, then what is like the leaves.

  `options.numbers` is how many of the results are numbers; the same ones are on every device. `options.like` says which
  leaves the others are like.
  """
  mesh = mesh_of(leaves)
  if placement.mesh is not None:
    return _in_shard_map(function, options, placement.mesh, placement.specs, [()] * len(leaves), max_norm, loss_scale,
                         *leaves)
  if mesh.auto_axes and (mesh.manual_axes or mesh.explicit_axes):
    # Inside a manual region that XLA still partitions along other axes, a custom call would get gathered operands.
    options = options._replace(backend="reference")
  outer = _manual_axes_of(leaves, placement) if mesh.manual_axes else [()] * len(leaves)
  if mesh.explicit_axes:
    specs = [jax.typeof(leaf).sharding.spec for leaf in leaves]
    return _in_shard_map(function, options, mesh if jax.sharding.get_abstract_mesh().empty else None, specs, outer,
                         max_norm, loss_scale, *leaves, axis_names=set(mesh.explicit_axes))
  if mesh.manual_axes:
    return function(options, _layout_of_axes(outer), max_norm, loss_scale, *leaves)
  return _auto.call(function, options, max_norm, loss_scale, *leaves)


# ----------------------------------------------------------------------------------------------------------------------
# Named axes: inside a shard_map of the caller's, or of ours


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
  missing = axes - _compat.varying_axes(x)
  return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def vary_as(x: jax.Array, like: jax.Array) -> jax.Array:
  """`x`, of a type that varies over every manual axis over which that of `like` does."""
  return vary(x, _compat.varying_axes(like))


def varying(arrays: Sequence[jax.Array]) -> frozenset[str]:
  return frozenset().union(*map(_compat.varying_axes, arrays))


def _manual_axes_of(leaves: Sequence[jax.Array], placement: Placement) -> list[tuple[str, ...]]:
  """For each leaf the manual axes over which its shards make up the whole."""
  varying = [_compat.varying_axes(leaf) for leaf in leaves]
  if placement.axes is None:
    return [tuple(sorted(axes)) for axes in varying]
  # Where types say how leaves vary, an axis over which one does not vary holds replicas of it. They say it where an
  # axis's index varies.
  axis = next((name for named in placement.axes for name in named), None)
  typed = axis is not None and bool(_compat.varying_axes(jax.lax.axis_index(axis)))
  return [tuple(a for a in named if a in own or not typed) for named, own in zip(placement.axes, varying)]


def _layout_of_axes(axes: Sequence[tuple[str, ...]]) -> Layout:
  """The layout of leaves each of which is sharded over `axes[i]` and replicated over the others' axes."""
  union = tuple(dict.fromkeys(name for names in axes for name in names))
  kinds = {kind: i for i, kind in enumerate(dict.fromkeys(map(frozenset, axes)))}
  def first_replica(kind):
    flag = jnp.ones((), jnp.int32)
    for name in union:
      if name not in kind:
        flag = flag * (jax.lax.axis_index(name) == 0).astype(jnp.int32)
    return flag
  if len(kinds) <= 1:  # none where there are no leaves
    return Layout(union)
  flags = jnp.stack([first_replica(kind) for kind in kinds])
  return Layout(union, None, flags[np.asarray([kinds[frozenset(names)] for names in axes])])


def _in_shard_map(function, options, mesh, specs, outer_axes, max_norm, loss_scale, *leaves, **settings):
  """The leaves split by a shard_map of our own, inside which leaf i is sharded over `outer_axes[i]` too."""
  axes = [(*outer, *(name for entry in spec for name in axis_names(entry))) for outer, spec in zip(outer_axes, specs)]
  def run(max_norm, loss_scale, *shards):
    return function(options, _layout_of_axes(axes), max_norm, loss_scale, *shards)
  scalar = PartitionSpec()
  out_specs = (*[scalar] * options.numbers, *(specs[i] for i in options.like(len(leaves))))
  return jax.shard_map(run, mesh=mesh, in_specs=(scalar, scalar, *specs), out_specs=out_specs, check_vma=False,
                       **settings)(max_norm, loss_scale, *leaves)


def sum_shards(values: Sequence[jax.Array], leaves: Sequence[jax.Array], placement: Placement) -> list[jax.Array]:
  """`values[i]`, a number that each device found from its shard of leaf i, summed over that leaf's shards."""
  values = list(values)
  if placement.mesh is not None or not mesh_of(leaves).manual_axes:
    return values
  axes = _manual_axes_of(leaves, placement)
  for kind in filter(None, dict.fromkeys(axes)):
    members = [i for i, names in enumerate(axes) if names == kind]
    total = jax.lax.psum(jnp.stack([values[i] for i in members]), kind)
    for j, i in enumerate(members):
      values[i] = total[j]
  return values
