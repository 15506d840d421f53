"""The leaves of a tree that count in a norm: which they are, what they are called, how others take their places."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_globalclip import _compat

SUPPORTED = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def dtype_of(leaf: Any) -> np.dtype:
  """The dtype that an array or a number has in JAX."""
  return jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", type(leaf)), allow_extended_dtype=True)


def norm_dtype(leaves: Sequence[Any]) -> np.dtype:
  """The dtype of the leaves' norm: float64 where one is float64 or complex128, else float32."""
  wide = {np.dtype(np.float64), np.dtype(np.complex128)}
  return np.dtype(np.float64 if any(dtype_of(leaf) in wide for leaf in leaves) else np.float32)


def strong(leaf: Any) -> Any:
  """A state's leaf, as an array whose dtype no later number moves: a weak type would have a step traced twice."""
  if hasattr(leaf, "dtype") and not getattr(leaf, "weak_type", False):
    return leaf
  array = jnp.asarray(leaf)
  return jax.lax.convert_element_type(array, array.dtype)


def counts(name: str, leaf: Any) -> bool:
  """Whether a leaf counts; raises `TypeError` for one of a kind that neither counts nor passes through."""
  if getattr(leaf, "dtype", None) is None and not isinstance(leaf, (bool, int, float, complex)):
    raise TypeError(f"{name}: expected an array or a number, got {type(leaf).__name__}")
  dtype = dtype_of(leaf)
  if dtype == jax.dtypes.float0 or dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer):
    return False
  if str(dtype) not in SUPPORTED:
    raise TypeError(f"{name}: expected one of {', '.join(SUPPORTED)}, or an integer or bool leaf to pass through; "
                    f"got {dtype}")
  return True


def short_names(paths: Sequence[tuple]) -> list[str]:
  """Names of leaves for reports: a/0, of one line and of no two leaves; where that fails the full path, ['a'][0]."""
  names = [jax.tree_util.keystr(path, simple=True, separator="/") or "." for path in paths]
  taken = collections.Counter(names)
  full = [jax.tree_util.keystr(path) for path in paths]
  mixed = [name if taken[name] == 1 and name.isprintable() else path for name, path in zip(names, full)]
  return mixed if len(set(mixed)) == len(mixed) else full


@dataclasses.dataclass(frozen=True)
class Leaves:
  """The floating and complex leaves of a tree. Integer, bool and float0 leaves, `None` and masked nodes stay behind."""
  arrays: list[jax.Array]
  paths: list[tuple]
  _keyed: list[tuple]
  _treedef: Any
  _counted: list[int]

  @property
  def counts_all(self) -> bool:
    """Whether no leaf is left behind."""
    return len(self.arrays) == len(self._keyed)

  @property
  def names(self) -> list[str]:
    """As error messages name them: updates['a'][0]."""
    return ["updates" + jax.tree_util.keystr(path) for path in self.paths]

  def rebuild(self, new: Sequence[Any], passed_through: Callable = lambda leaf: leaf) -> Any:
    """The tree with `new` in the places of `arrays`."""
    own = dict(zip(self._counted, new, strict=True))
    return self._treedef.unflatten([own[i] if i in own else passed_through(leaf)
                                    for i, (_, leaf) in enumerate(self._keyed)])

  def matching(self, other: Any, what: str) -> list[Any]:
    """The leaves of another tree at the same paths."""
    by_path = dict(jax.tree_util.tree_flatten_with_path(other)[0])
    missing = [name for path, name in zip(self.paths, self.names) if path not in by_path]
    if missing:
      raise ValueError(f"{missing[0]}: expected the structure of the {what}, which have no such leaf")
    return [by_path[path] for path in self.paths]

  def spread(self, name: str, prefix: Any, is_leaf: Callable[[Any], bool]) -> tuple:
    """The entry for each of `arrays` in a tree that is a prefix of this one."""
    tree = self._treedef.unflatten([leaf for _, leaf in self._keyed])
    try:
      entries = jax.tree.leaves(jax.tree.broadcast(prefix, tree, is_leaf=is_leaf), is_leaf=is_leaf)
    except ValueError as error:
      raise ValueError(f"{name}: expected one entry, or a tree that is a prefix of the updates: {error}") from None
    return tuple(entries[i] for i in self._counted)


def on_device(leaf: Any) -> Any:
  """The leaf as an array in the device's memory, where JAX computes; what is in the host's (`pinned_host`) is copied."""
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf
  array = jnp.asarray(leaf)
  if jax.typeof(array).memory_space != jax.memory.Space.Host:
    return array
  return jax.device_put(array, jax.memory.Space.Device)


def split_leaves(tree: Any) -> Leaves:
  """The leaves of `tree` that count, in the memory of their devices.

  Raises:
    TypeError: for a leaf of a kind that neither counts nor passes through, with its path and dtype.
    ValueError: for leaves that no one program can hold, with their paths.
  """
  keyed, treedef = jax.tree_util.tree_flatten_with_path(tree)
  counted = [i for i, (path, leaf) in enumerate(keyed) if counts("updates" + jax.tree_util.keystr(path), leaf)]
  leaves = Leaves([on_device(keyed[i][1]) for i in counted], [keyed[i][0] for i in counted], keyed, treedef, counted)
  _check_together(leaves)
  return leaves


def _check_together(leaves: Leaves) -> None:
  """Raises where no computation could hold all leaves, naming them, or where one is a sum still to be taken."""
  first = meshed = None
  for i, array in enumerate(leaves.arrays):
    if axes := _compat.unreduced_axes(array):
      raise ValueError(f"{leaves.names[i]}: is unreduced over {sorted(axes)}, a sum over devices not yet taken, whose "
                       "norm its shards do not tell: reduce it first (jax.reshard, jax.lax.psum)")
    mesh = jax.typeof(array).sharding.mesh
    if not mesh.empty:
      meshed = i if meshed is None else meshed
      other = jax.typeof(leaves.arrays[meshed]).sharding.mesh
      if mesh != other and (mesh.explicit_axes or other.explicit_axes):
        raise ValueError(_apart(leaves.names, (meshed, other), (i, mesh), "meshes, not all of Auto axes"))
    if isinstance(array, jax.core.Tracer) or not array.committed:
      continue
    first = i if first is None else first
    here, there = array.sharding, leaves.arrays[first].sharding
    if here != there and (here.device_set != there.device_set or _devices(here) != _devices(there)):
      raise ValueError(_apart(leaves.names, *((j, list(map(str, _devices(sharding)))) for j, sharding in ((first, there), (i, here))),
                              "devices"))


def _devices(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
  """The devices in the order in which a program would number them, where the sharding tells it."""
  if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
    return tuple(sharding.mesh.devices.flat)
  return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _apart(names: list[str], one: tuple, other: tuple, what: str) -> str:
  return (f"optax_globalclip: leaves lie on different {what}, and no mesh joins them: "
          + ", ".join(f"{names[j]} on {where}" for j, where in (one, other))
          + ". Put them on one mesh with jax.device_put, or name one with mesh= and specs=")
