"""Names of JAX that are private or have moved, for every version supported: nothing else of the package uses such."""

import functools
from collections.abc import Callable, Sequence

import jax
from jax._src import core, sharding_impls, xla_bridge
from jax._src.custom_partitioning_sharding_rule import sdy_sharding_rule_to_mlir
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.sharding import AbstractMesh

Primitive = core.Primitive  # jax.extend.core has it, but that import brings all of Pallas


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


# ----------------------------------------------------------------------------------------------------------------------
# A custom call that XLA's partitioner asks Python about. `jax.experimental.custom_partitioning` makes such calls too,
# but under a name that is an address in this process, and with the rule that a program has one mesh.


def register_partitioner(name: str, partition: Callable, infer: Callable) -> None:
  """Has XLA ask for the program of each device, where it meets custom calls of this name while it partitions one.

  `partition(config, shapes, shardings)` returns the bytes of a program for one device, for the string `config` of the
  call and its operands' shapes and `HloSharding`s, and the results' shardings. The operands stay as they are.
  `infer(config, shardings)` returns the results' shardings, for the older partitioner, which propagates them by itself.
  """
  def pack(result_shape, shardings):
    if not result_shape.is_tuple():  # a call of one result
      return shardings[0]
    return xla_client.HloSharding.tuple_sharding(result_shape, shardings)
  def on_partition(operand_shapes, operand_shardings, result_shape, result_sharding, config):
    del result_sharding
    program, results = partition(config.decode(), operand_shapes, operand_shardings)
    return program, operand_shardings, pack(result_shape, results)
  def on_infer(operand_shapes, operand_shardings, result_shape, config):
    del operand_shapes
    return pack(result_shape, infer(config.decode(), operand_shardings))
  callbacks = dict(name=name, prop_user_sharding=lambda sharding, shape, config: sharding, partition=on_partition,
                   infer_sharding_from_operands=on_infer, can_side_effecting_have_replicated_sharding=True)
  xla_client.register_custom_call_partitioner(**callbacks)
  xla_bridge.register_plugin_callbacks(functools.partial(xla_client.register_custom_call_partitioner, **callbacks))


def partitioned_call(ctx, name: str, config: str, rule: SdyShardingRule, operands: Sequence):
  """A call to a partitioner registered under `name`, as what a lowering rule returns."""
  results = jax.ffi.ffi_lowering(name, api_version=2, backend_config=config,
                                 skip_ffi_layout_processing=True)(ctx, *operands)
  results[0].owner.attributes["sdy.sharding_rule"] = sdy_sharding_rule_to_mlir(
      rule, [x.type for x in operands], [x.type for x in results])
  return results


def device_count(ctx) -> int:
  """How many devices XLA is to partition the program over that this lowering rule is part of; 1 where it is not."""
  context = ctx.module_context.axis_context
  return context.num_devices if isinstance(context, sharding_impls.ShardingContext) else 1


def program_of_a_device(function: Callable, args: Sequence, axis: str, devices: int, platform: str) -> bytes:
  """`function(*args)` as each of several devices runs it, `axis` being the one over which they communicate."""
  mesh = AbstractMesh((devices,), (axis,))
  jaxpr = jax.make_jaxpr(function, axis_env=[(axis, devices)])(*args)
  with core.extend_axis_env_nd([(axis, devices)]):
    module = mlir.build_mlir_module_helper(
        jaxpr, name="optax_globalclip", platforms=[platform], backend=None,
        axis_context=sharding_impls.SPMDAxisContext(mesh, frozenset({axis})))
  return mlir.module_to_bytecode(module)


def replicated() -> "xla_client.HloSharding":
  return xla_client.HloSharding.replicate()
