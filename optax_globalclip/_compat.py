"""Names of JAX that are private or have moved, for every version supported: nothing else of the package uses such."""

import jax
from jax._src import core


def result_aval(shape, dtype, operand_avals):
  """The type of a result that varies over the manual axes over which the operands vary."""
  sharding = core.get_cur_mesh_sharding()
  sharding = sharding.update(spec=type(sharding.spec)(*[None] * len(shape)))
  core.standard_vma_rule("optax_globalclip", *operand_avals)
  like = operand_avals[-1]
  return like.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding)


def varying_axes(x) -> frozenset[str]:
  """The manual axes over which `x` varies by its type; none where the types do not say (`check_vma=False`, `pmap`)."""
  aval = jax.typeof(x)
  return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma


def unreduced_axes(x) -> frozenset[str]:
  """The axes over which `x` is by its type a sum that nobody has taken yet."""
  aval = jax.typeof(x)
  manual = aval.manual_axis_type.unreduced if hasattr(aval, "manual_axis_type") else frozenset()
  return manual | frozenset(getattr(aval.sharding.spec, "unreduced", ()))
