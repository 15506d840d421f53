"""Auto meshes: XLA chooses the shardings, and its partitioner asks here for the program of each device.

A program that XLA partitions holds one custom call, whose text says all that is needed to make the programs of the
devices: nothing of this process. So it can be exported, kept in the persistent compilation cache and compiled in
another process, and what else is in the program may lie on any mesh of the same devices.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule
from jax.interpreters import mlir

from optax_globalclip import _compat, _lowering, _native
from optax_globalclip._devices import Layout

TARGET = "optax_globalclip_partitioned_v1"
_AXIS = "globalclip_devices"  # the one axis over which the devices of a partitioned program communicate
_functions = {}  # by name: what runs on each device


def register(options_type: type) -> Callable:
  """Decorates a function `(options, layout, max_norm or ops, loss_scale, *shards)` that `call` may name."""
  def decorate(function):
    _functions[function.__name__] = function, options_type
    return function
  return decorate


def call(function: Callable, options, max_norm, loss_scale, *leaves):
  """`function` on every device of the program that this becomes part of; as it is where there is one."""
  return _partitioned.bind(max_norm, loss_scale, *leaves, name=function.__name__, options=options)


# ----------------------------------------------------------------------------------------------------------------------
# How XLA laid the leaves over the devices


class _Tiling(NamedTuple):
  """Tables by device, in the order in which a program numbers its devices."""
  groups: tuple[tuple[int, ...], ...]  # of equal size: devices that together hold every tile of every leaf
  counted: np.ndarray                  # int32[devices, kinds]
  kind: np.ndarray                     # int[n]: a leaf's column of `counted`
  tiles: list[np.ndarray]              # of each leaf: int32[devices, ndim]


def _tiles(sharding, ndim: int, devices: int) -> np.ndarray:
  """int[devices, ndim]: which tile each device holds."""
  table = np.zeros((devices, ndim), np.int32)
  if sharding.is_replicated() or not ndim:
    return table
  dims = sharding.tile_assignment_dimensions()
  at = np.indices(dims).reshape(len(dims), -1)[:ndim]
  table[np.asarray(sharding.tile_assignment_devices()).ravel()] = at.T
  return table


def _tiling(shardings: Sequence, ranks: Sequence[int], devices: int) -> _Tiling:
  kinds = {pair: i for i, pair in enumerate(dict.fromkeys(zip(map(str, shardings), ranks)))}
  kind = np.asarray([kinds[str(sharding), rank] for sharding, rank in zip(shardings, ranks)])
  tables = [_tiles(shardings[i], ranks[i], devices) for i in (int(np.argmax(kind == k)) for k in range(len(kinds)))]
  # Devices with the same tile of every leaf are replicas of each other. The r-th replicas of all tiles form group r.
  _, holding = np.unique(np.concatenate(tables, axis=1), axis=0, return_inverse=True)
  holding = holding.ravel()
  members = [np.flatnonzero(holding == h) for h in range(holding.max() + 1)]
  if len({len(same) for same in members}) == 1:
    groups = np.sort(np.stack(members, axis=1), axis=1)
  else:
    groups = np.arange(devices)[None]
  counted = np.zeros((devices, len(kinds)), np.int32)
  for column, table in enumerate(tables):
    for group in groups:
      counted[group[np.unique(table[group], axis=0, return_index=True)[1]], column] = 1
  return _Tiling(tuple(map(tuple, groups.tolist())), counted, kind, [tables[k] for k in kind])


def _valid(shard: jax.Array, shape: tuple[int, ...], tiles: np.ndarray, device) -> jax.Array | None:
  """Which elements of a shard are of the leaf: those of the last tiles of an unevenly divided one may reach beyond."""
  mask = None
  for dim, (size, tile) in enumerate(zip(shape, shard.shape)):
    if tile * (tiles[:, dim].max() + 1) > size:
      # Behind the last element this is negative, and nothing of the tile is left.
      left = jnp.asarray((size - tile * tiles[:, dim]).astype(np.int32))[device]
      inside = jax.lax.broadcasted_iota(jnp.int32, shard.shape, dim) < left
      mask = inside if mask is None else mask & inside
  return mask


# ----------------------------------------------------------------------------------------------------------------------
# What XLA's partitioner asks


def _on_partition(config: str, operand_shapes, operand_shardings):
  config = json.loads(config)
  function, options_type = _functions[config["name"]]
  options = options_type.from_json(config["options"])
  devices, shapes = config["devices"], [shape.dimensions() for shape in operand_shapes[2:]]
  shardings = operand_shardings[2:]
  tiling = _tiling(shardings, [len(shape) for shape in shapes], devices)
  args = [jax.ShapeDtypeStruct(sharding.tile(shape).dimensions(), shape.numpy_dtype())
          for shape, sharding in zip(operand_shapes, operand_shardings)]

  def on_one_of_them(max_norm, loss_scale, *shards):
    if len(tiling.groups[0]) == 1:
      return function(options, Layout(), max_norm, loss_scale, *shards)
    device = jax.lax.axis_index(_AXIS)
    layout = Layout((_AXIS,), tiling.groups if len(tiling.groups) > 1 else None,
                    jnp.asarray(tiling.counted)[device][tiling.kind])
    valid = [_valid(x, shape, tiles, device) for x, shape, tiles in zip(shards, shapes, tiling.tiles)]
    return function(options, layout, max_norm, loss_scale, *shards, valid=valid)

  # XLA compiles on threads of its own, which know nothing of a `with jax.enable_x64(True)` around the caller.
  with jax.enable_x64(config["x64"]):
    program = _compat.program_of_a_device(on_one_of_them, args, _AXIS, devices, config["platform"])
  return program, _result_shardings(options, shardings)


def _on_infer(config: str, operand_shardings):
  config = json.loads(config)
  options = _functions[config["name"]][1].from_json(config["options"])
  return _result_shardings(options, [_compat.replicated() if sharding is None else sharding
                                     for sharding in operand_shardings[2:]])


def _result_shardings(options, of_leaves):
  return [*[_compat.replicated()] * options.numbers, *(of_leaves[i] for i in options.like(len(of_leaves)))]


_compat.register_partitioner(TARGET, _on_partition, _on_infer)


def _sharding_rule(options, operand_ranks: Sequence[int], result_ranks: Sequence[int]) -> SdyShardingRule:
  """Every dimension of every leaf may be sharded in any way, and what is like it then is likewise; numbers may not."""
  ranks = operand_ranks[2:]
  in_a_set = len(ranks) // options.sets
  of_leaves = tuple(ArrayMapping(*(f"leaf{i % in_a_set}_{d}" for d in range(rank))) for i, rank in enumerate(ranks))
  numbers = tuple(ArrayMapping(*(f"number{i}_{d}" for d in range(rank)))
                  for i, rank in enumerate(result_ranks[:options.numbers]))
  given = tuple(ArrayMapping(*(f"given{i}_{d}" for d in range(rank))) for i, rank in enumerate(operand_ranks[:2]))
  return SdyShardingRule((*given, *of_leaves), (*numbers, *(of_leaves[i] for i in options.like(len(ranks)))),
                         need_replication_factors=tuple(factor for number in (*given, *numbers) for factor in number))


# ----------------------------------------------------------------------------------------------------------------------
# The primitive


_partitioned = _compat.Primitive("globalclip_partitioned")
_partitioned.multiple_results = True


def _run(name, options, *args):
  return _functions[name][0](options, Layout(), *args)


@_partitioned.def_abstract_eval
def _abstract_eval(*avals, name, options):
  del name
  leaves, results = avals[2:], options.results(avals[2:])
  # A leaf's type holds its mesh, of which JAX makes the sharding of a result.
  scaled = [leaves[i].update(dtype=x.dtype, weak_type=False)
            for i, x in zip(options.like(len(leaves)), results[options.numbers:], strict=True)]
  return [_compat.result_aval(x.shape, x.dtype, avals) for x in results[:options.numbers]] + scaled


_lowering.make_runnable(_partitioned)


def _lower_for(platform: str | None) -> Callable:
  def rule(ctx, *operands, name, options):
    devices = _compat.device_count(ctx)
    if devices == 1 or len(operands) == 2:
      return mlir.lower_fun(functools.partial(_run, name, options), multiple_results=True)(ctx, *operands)
    config = dict(name=name, options=options.to_json(), devices=devices,
                  platform=platform or ctx.module_context.platforms[0],
                  x64=bool(jax.config.jax_enable_x64 or any(x.dtype.itemsize == 8 for x in ctx.avals_in)))
    rule = _sharding_rule(options, [x.ndim for x in ctx.avals_in], [x.ndim for x in ctx.avals_out])
    return _compat.partitioned_call(ctx, TARGET, json.dumps(config, sort_keys=True), rule, operands)
  return rule


for _platform in _native.PLATFORMS:
  mlir.register_lowering(_partitioned, _lower_for(_platform), platform=_platform)
mlir.register_lowering(_partitioned, _lower_for(None))
