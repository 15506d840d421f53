"""A tree that is sharded in every way at once, the meshes to put it on, and what a compiled program sends."""

import contextlib
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

# Over both axes, over one, over two in one dimension, over none; a scalar; an empty leaf; one that does not count.
SPECS = {"both": P("x", "y"), "bias": P(), "half": P("x"), "scalar": P(), "empty": P(None, "x"),
         "wide": P(None, ("x", "y")), "other": P("y"), "steps": P()}


def tree(seed: int = 0) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  def normal(*shape, dtype=np.float32):
    return (100 * rng.standard_normal(shape)).astype(dtype)
  return {"both": normal(8, 6), "bias": normal(3), "half": normal(16, dtype=jnp.bfloat16), "scalar": normal(),
          "empty": normal(0, 4), "wide": normal(3, 16), "other": normal(4, 2, dtype=np.float16),
          "steps": np.int32(7)}


def make_mesh(*types: AxisType, shape=(4, 2), names=("x", "y")) -> Mesh:
  types = types * len(shape) if len(types) == 1 else types
  return jax.make_mesh(shape, names, axis_types=types, devices=jax.devices()[:math.prod(shape)])


def line(devices: int = 8, kind: AxisType = AUTO) -> Mesh:
  """The devices along one axis, x."""
  return make_mesh(kind, shape=(devices,), names=("x",))


def put(values: Any, mesh: Mesh, specs: Any) -> Any:
  return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), values, specs)


def axes(specs: Any) -> Any:
  """For each spec the axes it names: what `axis_name` says."""
  def of_spec(spec):
    return tuple(name for entry in spec if entry is not None
                 for name in ((entry,) if isinstance(entry, str) else entry))
  return jax.tree.map(of_spec, specs, is_leaf=lambda spec: isinstance(spec, P))


def only(name: str, specs: Any) -> Any:
  """The specs with the entries of every other axis left out: what a partially manual shard_map is given."""
  def of_entry(entry):
    return name if entry == name or (isinstance(entry, tuple) and name in entry) else None
  return jax.tree.map(lambda spec: P(*map(of_entry, spec)), specs, is_leaf=lambda spec: isinstance(spec, P))


# Each compiles `function(tree, *numbers, **placement) -> (like the tree, scalars)` for eight devices and returns it as
# a function of a tree on the host.


def _on(mesh, run, ambient=False):
  """`run` of trees that lie on `mesh`, which is set around it if it is to be the ambient one."""
  def call(values, *numbers):
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
      return run(put(values, mesh, SPECS), *numbers)
  return call


def on_auto_mesh(function):
  return _on(make_mesh(AUTO), jax.jit(function))


def under_a_set_auto_mesh(function):
  return _on(make_mesh(AUTO), jax.jit(function), ambient=True)


def on_explicit_mesh(function):
  return _on(make_mesh(EXPLICIT), jax.jit(function))


def under_a_set_explicit_mesh(function):
  return _on(make_mesh(EXPLICIT), jax.jit(function), ambient=True)


def _shard_map(function, specs, **settings):
  def mapped(values, *numbers):
    return jax.shard_map(function, in_specs=(specs, *(P() for _ in numbers)), out_specs=(specs, P()), **settings)(
        values, *numbers)
  return jax.jit(mapped)


def in_shard_map(function):
  return _shard_map(function, SPECS, mesh=make_mesh(AUTO))


def in_unchecked_shard_map(function):
  return _shard_map(functools.partial(function, axis_name=axes(SPECS)), SPECS, mesh=make_mesh(AUTO), check_vma=False)


def with_mesh_and_specs(function, kind=AUTO):
  mesh = make_mesh(kind)
  return _on(mesh, jax.jit(functools.partial(function, mesh=mesh, specs=SPECS)))


def with_mesh_and_specs_of_explicit_mesh(function):
  return with_mesh_and_specs(function, EXPLICIT)


def partly_manual_on_auto_mesh(function):
  mesh = make_mesh(AUTO)
  return _on(mesh, _shard_map(function, only("x", SPECS), mesh=mesh, axis_names={"x"}))


def partly_manual_and_unchecked(function):
  mesh, specs = make_mesh(AUTO), only("x", SPECS)
  return _on(mesh, _shard_map(functools.partial(function, axis_name=axes(specs)), specs, mesh=mesh, axis_names={"x"},
                              check_vma=False))


def partly_manual_on_explicit_mesh(function):
  return _on(make_mesh(EXPLICIT), _shard_map(function, only("x", SPECS), axis_names={"x"}), ambient=True)


def on_mixed_mesh(function):
  return _on(make_mesh(EXPLICIT, AUTO), jax.jit(function), ambient=True)


WHOLE = [on_auto_mesh, under_a_set_auto_mesh, on_explicit_mesh, under_a_set_explicit_mesh, in_shard_map,
         in_unchecked_shard_map, with_mesh_and_specs, with_mesh_and_specs_of_explicit_mesh]
PARTLY_AUTO = [partly_manual_on_auto_mesh, partly_manual_and_unchecked, on_mixed_mesh]


def everywhere(number: jax.Array) -> np.ndarray:
  """The one value that a replicated array has on all of its devices, to the bit."""
  shards = [np.asarray(shard.data) for shard in number.addressable_shards]
  assert len(shards) == 8
  for shard in shards:
    assert shard.tobytes() == shards[0].tobytes()
  return shards[0]


# ----------------------------------------------------------------------------------------------------------------------
# Compiled programs

_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce|"
                         r"collective-broadcast)(?:-start)?\(")


def collectives(text: str) -> list[tuple[str, int]]:
  """The collectives of a compiled program with the bytes of what each returns."""
  return [(name, hlo.shape_bytes(shapes)) for shapes, name in _COLLECTIVE.findall(text)]


def compiled(function: Callable, *args, **jit_options) -> str:
  return jax.jit(function, **jit_options).lower(*args).compile().as_text()
