"""Do scans and gradient accumulation over a sharded tree give what they give on one device?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
import sharded
from jax.sharding import NamedSharding
from sharded import AUTO, EXPLICIT, P, make_mesh, put

SPECS = {"w": P("x", "y"), "b": P(), "v": P("y")}


def batches(steps=6):
  """Gradients of `steps` micro-batches, stacked."""
  rng = np.random.default_rng(0)
  return {"w": rng.standard_normal((steps, 8, 4)).astype(np.float32),
          "b": rng.standard_normal((steps, 3)).astype(np.float32),
          "v": rng.standard_normal((steps, 2)).astype(np.float32)}


def first(stacked):
  return jax.tree.map(lambda leaf: leaf[0], stacked)


def train(make, **placement):
  """`(params, stacked gradients) -> (params, norms)`: one update a gradient, in a scan."""
  tx = make(**placement)
  def run(params, gradients):
    def step(carry, grads):
      params, state = carry
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), ogc.global_norm(grads, **placement)
    (params, _), norms = jax.lax.scan(step, (params, tx.init(params)), gradients)
    return params, norms
  return run


TRANSFORMATIONS = {
    "global_clip": lambda **placement: optax.chain(ogc.global_clip(1.0, **placement), optax.sgd(0.1, momentum=0.9)),
    "clipped_multi_steps": lambda **placement: ogc.clipped_multi_steps(optax.sgd(0.1, momentum=0.9), 1.0, every_k=3,
                                                                       **placement),
    "dynamic_loss_scale": lambda **placement: ogc.clipped_multi_steps(
        optax.sgd(0.1), 1.0, every_k=2, loss_scale=ogc.DynamicLossScale(8.0), **placement),
}


def stacked(specs):
  return {name: P(None, *spec) for name, spec in specs.items()}


def on_mesh(kind, placed=False):
  def run(make, params, gradients):
    mesh = make_mesh(kind)
    placement = dict(mesh=mesh, specs=SPECS) if placed else {}
    with jax.set_mesh(mesh):
      return jax.jit(train(make, **placement))(put(params, mesh, SPECS), put(gradients, mesh, stacked(SPECS)))
  return run


def in_shard_map(make, params, gradients, check_vma=True):
  placement = {} if check_vma else dict(axis_name=sharded.axes(SPECS))
  return jax.jit(jax.shard_map(train(make, **placement), mesh=make_mesh(AUTO), in_specs=(SPECS, stacked(SPECS)),
                               out_specs=(SPECS, P()), check_vma=check_vma))(params, gradients)


RUNS = {"auto": on_mesh(AUTO), "explicit": on_mesh(EXPLICIT), "mesh and specs": on_mesh(AUTO, placed=True),
        "shard_map": in_shard_map, "unchecked shard_map": functools.partial(in_shard_map, check_vma=False)}


@pytest.mark.slow
@pytest.mark.parametrize("name, transformation", [
    ("auto", "global_clip"), ("auto", "clipped_multi_steps"), ("auto", "dynamic_loss_scale"),
    ("explicit", "global_clip"), ("explicit", "clipped_multi_steps"),
    ("shard_map", "global_clip"), ("shard_map", "clipped_multi_steps"),
    ("unchecked shard_map", "clipped_multi_steps"), ("mesh and specs", "clipped_multi_steps")])
def test_training_in_a_scan_goes_as_on_one_device(name, transformation):
  run, make = RUNS[name], TRANSFORMATIONS[transformation]
  gradients = batches()
  params = first(gradients)
  want, want_norms = jax.jit(train(make))(params, gradients)
  got, norms = run(make, params, gradients)
  assert oracle.ulps(sharded.everywhere(norms), np.asarray(want_norms).astype(np.longdouble)).max() <= 1
  layout = make_mesh(AUTO)
  for leaf in want:
    np.testing.assert_allclose(got[leaf], want[leaf], rtol=2e-6, atol=1e-7)
    assert got[leaf].sharding.is_equivalent_to(NamedSharding(layout, SPECS[leaf]), got[leaf].ndim)


def test_micro_steps_send_nothing():
  # Between the ends of windows there is nothing to agree on: the all-reduces lie in the branch that closes one.
  mesh = make_mesh(AUTO)
  tx = ogc.clipped_multi_steps(optax.sgd(0.1), 1.0, every_k=4)
  grads = put(first(batches()), mesh, SPECS)
  hlo = sharded.compiled(lambda g, s: tx.update(g, s), grads, tx.init(grads))
  entry = hlo[hlo.index("\nENTRY "):]
  assert sharded.collectives(hlo) and not sharded.collectives(entry)


def test_donated_shards_are_clipped_in_place():
  mesh = make_mesh(AUTO)
  grads = put({"w": jnp.ones((512, 128))}, mesh, {"w": P("x", "y")})
  tx = ogc.global_clip(1.0, scale_stage="kernel")
  compiled = jax.jit(lambda g: tx.update(g, tx.init(g))[0], donate_argnums=0).lower(grads).compile()
  shard = 512 * 128 * 4 // 8
  assert compiled.memory_analysis().alias_size_in_bytes >= shard
  assert compiled.memory_analysis().temp_size_in_bytes < shard // 8


@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize("weight", [None, 1.0])
def test_gradients_that_are_constants_of_the_program_keep_their_sharding(every_k, weight):
  with jax.set_mesh(sharded.line(kind=EXPLICIT)):
    tree = {"w": jax.device_put(np.full(8, 2, np.float32), P("x")), "steps": jax.device_put(np.arange(8), P("x"))}
    tx = ogc.clipped_multi_steps(optax.identity(), 1.0, every_k=every_k)
    state = tx.init(tree)
    for _ in range(every_k):
      updates, state = jax.jit(lambda state: tx.update(tree, state, tree, weight=weight))(state)
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(updates)} == {P("x")}
  np.testing.assert_allclose(updates["w"], np.full(8, 8**-0.5), rtol=1e-6)
  np.testing.assert_array_equal(updates["steps"], np.arange(8))
