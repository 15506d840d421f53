"""What the caller says about a mesh: `axis_name`, `mesh` and `specs`, checked and spread over the leaves."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

# A mesh is callable, so optax takes it for a schedule; what a schedule gives is an array.
_INJECTED = ". Under optax.inject_hyperparams name it in static_args=('mesh', 'specs')"


def check_placement(axis_name: Any, mesh: Any, specs: Any) -> None:
  """Raises where `axis_name`, `mesh` and `specs` do not go together, whatever the tree."""
  if (mesh is None) != (specs is None):
    raise ValueError("mesh and specs: one says nothing without the other, got "
                     + ("specs alone" if mesh is None else "mesh alone"))
  if mesh is not None and axis_name is not None:
    raise ValueError("axis_name and mesh: axis_name is for use inside shard_map and pmap, mesh and specs for use "
                     "outside; got both")
  if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
    raise TypeError(f"mesh: expected a jax.sharding.Mesh or AbstractMesh, got {type(mesh).__name__}"
                    + _INJECTED)
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


class Placement(NamedTuple):
  """What the caller says of where the leaves lie, leaf by leaf; nothing where JAX knows it."""
  axes: tuple[tuple[str, ...], ...] | None = None
  mesh: Any = None
  specs: tuple[Any, ...] | None = None


def place(leaves, axis_name: Any, mesh: Any, specs: Any) -> Placement:
  """The placement of each leaf.

  Raises:
    ValueError: for trees that are no prefix of the updates, unknown axes, and specs that do not fit a leaf.
  """
  if axis_name is not None:
    entries = leaves.spread("axis_name", axis_name, _is_axis_names)
    axes = tuple((entry,) if isinstance(entry, str) else entry for entry in entries)
    bound = mesh_of(leaves.arrays).manual_axes
    for name, names in zip(leaves.names, axes):
      if unknown := [axis for axis in names if axis not in bound]:
        raise ValueError(f"{name}: axis_name {unknown[0]!r} is no axis of a shard_map or pmap around this call; "
                         f"those are {list(bound)}")
    return Placement(axes=axes)
  if mesh is None:
    return Placement()
  if bound := mesh_of(leaves.arrays).manual_axes:
    raise ValueError(f"mesh: this call is inside a shard_map or pmap over {list(bound)}, where leaves are shards "
                     "already: leave mesh and specs out, or use axis_name")
  specs = leaves.spread("specs", specs, _is_spec)
  for name, leaf, spec in zip(leaves.names, leaves.arrays, specs):
    if len(spec) > leaf.ndim:
      raise ValueError(f"{name}: {spec} has more entries than the leaf of shape {leaf.shape} has dimensions")
    for size, names in zip(leaf.shape, map(axis_names, spec)):
      if unknown := [axis for axis in names if axis not in mesh.shape]:
        raise ValueError(f"{name}: {spec} names {unknown[0]!r}, which is no axis of the mesh {dict(mesh.shape)}")
      if size % math.prod(mesh.shape[axis] for axis in names):
        raise ValueError(f"{name}: {spec} does not divide the leaf of shape {leaf.shape} evenly over the mesh "
                         f"{dict(mesh.shape)}; uneven shards are fine on an Auto mesh without mesh and specs")
  return Placement(mesh=mesh, specs=specs)


def axis_names(entry: Any) -> tuple[str, ...]:
  """The axes in one entry of a PartitionSpec."""
  return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def mesh_of(leaves: Sequence[jax.Array]):
  """The mesh around this call or, without one, that of the leaves' types; empty where neither is known."""
  mesh = jax.sharding.get_abstract_mesh()
  for leaf in leaves if mesh.empty else ():
    if not jax.typeof(leaf).sharding.mesh.empty:
      return jax.typeof(leaf).sharding.mesh
  return mesh
