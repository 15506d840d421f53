"""Leaves that hold the parameters of several layers, stacked along an axis: taken apart before a clip, stacked after."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_globalclip import _leaves, _placement


class _Axis(NamedTuple):
  """An entry of `stacked_axis`, in a type that no tree of updates holds."""
  axis: int | None


def _read(stacked_axis: Any) -> Any:
  def entry(axis):
    if isinstance(axis, jax.Array):
      raise TypeError("stacked_axis: expected an int, None or a tree of those, got an array; under "
                      "optax.inject_hyperparams name it in static_args=('stacked_axis',)")
    if isinstance(axis, bool) or not isinstance(axis, (int, type(None))):
      raise TypeError(f"stacked_axis: expected an int, None or a tree of those, got {axis!r}")
    return _Axis(axis)
  return jax.tree.map(entry, stacked_axis, is_leaf=lambda x: x is None)


def _checked(name: str, leaf: Any, axis: int) -> int:
  """The axis, counted from the front."""
  if not -leaf.ndim <= axis < leaf.ndim:
    raise ValueError(f"{name}: expected a leaf with the stacked axis {axis}, got one of shape {leaf.shape}")
  axis %= leaf.ndim
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return axis
  if _placement.mesh_of([leaf]).manual_axes:
    raise ValueError(f"{name}: inside shard_map and pmap nothing says whether the stacked axis {axis} is sharded: clip "
                     "outside, or leave stacked_axis out")
  spec = jax.typeof(leaf).sharding.spec
  if axis < len(spec) and spec[axis] is not None:
    raise ValueError(f"{name}: the stacked axis {axis} is sharded over {spec[axis]!r}, so that slices lie on some devices "
                     "only: shard another axis, or move the leaf with jax.reshard")
  return axis


def _slices(leaf: Any, axis: int) -> list[Any]:
  if isinstance(leaf, jax.ShapeDtypeStruct):
    shape = leaf.shape[:axis] + leaf.shape[axis + 1:]
    return [jax.ShapeDtypeStruct(shape, leaf.dtype)] * leaf.shape[axis]
  return list(jnp.unstack(leaf, axis=axis))


def split(tree: Any, stacked_axis: Any) -> tuple[Any, Callable[[Any], Any]]:
  """The tree with the list of its slices in the place of every stacked leaf, and what makes such a tree whole again."""
  keyed, treedef = jax.tree_util.tree_flatten_with_path(tree)
  try:
    entries = jax.tree.broadcast(_read(stacked_axis), tree, is_leaf=lambda x: isinstance(x, _Axis))
  except ValueError as error:
    raise ValueError("stacked_axis: expected an int, None, or a tree of those that is a prefix of the updates: "
                     f"{error}") from None
  out, axes = [], []
  for (path, leaf), entry in zip(keyed, jax.tree.leaves(entries, is_leaf=lambda x: isinstance(x, _Axis)), strict=True):
    name, axis = "updates" + jax.tree_util.keystr(path), None
    if entry.axis is not None and _leaves.counts(name, leaf):
      leaf = _leaves.on_device(leaf)
      axis = _checked(name, leaf, entry.axis)
    # An axis of length 0 has no slices to stack again.
    axis = axis if axis is None or leaf.shape[axis] else None
    axes.append(axis)
    out.append(leaf if axis is None else _slices(leaf, axis))

  def join(split_tree):
    parts = treedef.flatten_up_to(split_tree)
    return treedef.unflatten([part if axis is None else jnp.stack(part, axis=axis) for part, axis in zip(parts, axes)])

  return treedef.unflatten(out), join


def by_slice(tx: optax.GradientTransformationExtraArgs, stacked_axis: Any) -> optax.GradientTransformationExtraArgs:
  """`tx`, to which every slice of a stacked leaf is a leaf of its own."""
  _read(stacked_axis)

  def init_fn(params):
    def shape_of(leaf):
      return leaf if not hasattr(leaf, "dtype") else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return tx.init(None if params is None else split(jax.tree.map(shape_of, params), stacked_axis)[0])

  def update_fn(updates, state, params=None, **extra):
    updates, join = split(updates, stacked_axis)
    updates, state = tx.update(updates, state, params, **extra)
    return join(updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
