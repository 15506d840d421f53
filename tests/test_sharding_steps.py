"""Do scans and gradient accumulation over a sharded tree give what they give on one device?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
import sharded
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


def train(tx):
  """`(params, stacked gradients) -> (params, norms)`: one update a gradient, in a scan."""
  def run(params, gradients):
    def step(carry, grads):
      params, state = carry
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), ogc.global_norm(grads)
    (params, _), norms = jax.lax.scan(step, (params, tx.init(params)), gradients)
    return params, norms
  return run


TRANSFORMATIONS = {
    "global_clip": lambda: optax.chain(ogc.global_clip(1.0), optax.sgd(0.1, momentum=0.9)),
    "clipped_multi_steps": lambda: ogc.clipped_multi_steps(optax.sgd(0.1, momentum=0.9), 1.0, every_k=3),
    "dynamic_loss_scale": lambda: ogc.clipped_multi_steps(optax.sgd(0.1), 1.0, every_k=2,
                                                          loss_scale=ogc.DynamicLossScale(8.0)),
}


def stacked(specs):
  return {name: P(None, *spec) for name, spec in specs.items()}


def on_mesh(kind):
  def run(function, params, gradients):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
      return jax.jit(function)(put(params, mesh, SPECS), put(gradients, mesh, stacked(SPECS)))
  return run


def in_shard_map(function, params, gradients):
  return jax.jit(jax.shard_map(function, mesh=make_mesh(AUTO), in_specs=(SPECS, stacked(SPECS)),
                               out_specs=(SPECS, P())))(params, gradients)


@pytest.mark.parametrize("make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
@pytest.mark.parametrize("run", [on_mesh(AUTO), on_mesh(EXPLICIT), in_shard_map], ids=["auto", "explicit", "shard_map"])
def test_training_in_a_scan_goes_as_on_one_device(run, make):
  gradients = batches()
  params = first(gradients)
  want, want_norms = jax.jit(train(make()))(params, gradients)
  got, norms = run(train(make()), params, gradients)
  assert oracle.ulps(sharded.everywhere(norms), np.asarray(want_norms).astype(np.longdouble)).max() <= 1
  for name in want:
    np.testing.assert_allclose(got[name], want[name], rtol=2e-6, atol=1e-7)
    if run is not in_shard_map:
      assert got[name].sharding.spec == SPECS[name] or got[name].sharding.is_fully_replicated


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
