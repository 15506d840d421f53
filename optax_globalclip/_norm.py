"""`global_norm` and `leaf_norms`."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_globalclip import _ops, _placement
from optax_globalclip._leaves import Leaves, split_leaves
from optax_globalclip._types import AnyMesh


def placed_leaves(tree: Any, axis_name: Any, mesh: Any, specs: Any) -> tuple[Leaves, _placement.Placement]:
  """The leaves of a tree that count, and what the caller says of where they lie."""
  leaves = split_leaves(tree)
  _placement.check_placement(axis_name, mesh, specs)
  return leaves, _placement.place(leaves, axis_name, mesh, specs)


def global_norm(tree: Any, *, axis_name: Any = None, mesh: AnyMesh | None = None, specs: Any = None) -> jax.Array:
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
    where an element is; `inf` where the true norm is beyond the dtype, 0 where it is below its normal numbers.

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
  leaves, placement = placed_leaves(tree, axis_name, mesh, specs)
  return _ops.measure(leaves.arrays, placement).norms[0]


def leaf_norms(tree: Any, *, axis_name: Any = None, mesh: AnyMesh | None = None, specs: Any = None) -> Any:
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
  leaves, placement = placed_leaves(tree, axis_name, mesh, specs)
  norms = _ops.measure(leaves.arrays, placement, leaf_norms=True).norms
  return leaves.rebuild(list(norms[1:]), passed_through=lambda _: jnp.zeros((), norms.dtype))
