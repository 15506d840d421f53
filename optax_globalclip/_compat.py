"""Names of JAX that are private or have moved, for every version supported: nothing else of the package uses such."""

from jax._src import core


def result_aval(shape, dtype, operand_avals):
  """The type of a result that varies over the manual axes over which the operands vary."""
  sharding = core.get_cur_mesh_sharding()
  sharding = sharding.update(spec=type(sharding.spec)(*[None] * len(shape)))
  core.standard_vma_rule("optax_globalclip", *operand_avals)
  like = operand_avals[-1]
  return like.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding)
