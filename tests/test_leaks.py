"""Does any public function leave a tracer behind, as `jax.checking_leaks` reports? (Case 60.)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import sharded
from sharded import AUTO, EXPLICIT, P, make_mesh

pytestmark = [pytest.mark.slow, pytest.mark.reference_repeats]

# Each takes a tree and returns the clipped one, or anything else.


def window(tree, every_k, calls=None, **options):
  """The updates and the state of the last of some calls with the tree."""
  tx = ogc.clipped_multi_steps(optax.sgd(1.0, momentum=0.5), 1.0, every_k=every_k, **options)
  state = tx.init(tree)
  for _ in range(calls or every_k):
    updates, state = tx.update(tree, state, tree, weight=1.0)
  return updates, state


def clipped_by(make, tree, **options):
  tx = make(1.0, **options)
  return tx.update(tree, tx.init(tree))


def total(tree):
  return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(tree))


def derivative_of(function):
  return jax.grad(lambda tree: total(function(tree)[0]))


PUBLIC = {
    "global_clip": functools.partial(clipped_by, ogc.global_clip),
    "global_clip with a monitor": functools.partial(clipped_by, ogc.global_clip, monitor=True),
    "per_tensor_clip": functools.partial(clipped_by, ogc.per_tensor_clip),
    "clip_tree": lambda tree: ogc.clip_tree(tree, 1.0),
    "global_norm": ogc.global_norm,
    "leaf_norms": ogc.leaf_norms,
    "window of one": functools.partial(window, every_k=1),
    "window of two": functools.partial(window, every_k=2),
    "dynamic scale, window of two": functools.partial(window, every_k=2, loss_scale=ogc.DynamicLossScale(2.0)),
    "derivative of global_clip": derivative_of(functools.partial(clipped_by, ogc.global_clip)),
    "derivative of per_tensor_clip": derivative_of(functools.partial(clipped_by, ogc.per_tensor_clip)),
    "derivative of clip_tree": derivative_of(lambda tree: ogc.clip_tree(tree, 1.0)),
    "derivative of global_norm": jax.grad(ogc.global_norm),
}
OPTIONS = {
    "global_clip in the kernel": functools.partial(clipped_by, ogc.global_clip, scale_stage="kernel"),
    "global_clip of a scaled loss": functools.partial(clipped_by, ogc.global_clip, loss_scale=2.0),
    "per_tensor_clip with a monitor": functools.partial(clipped_by, ogc.per_tensor_clip, monitor=True),
    "window of a schedule": functools.partial(window, every_k=lambda step: 2, calls=2),
    "dynamic scale, window of one": functools.partial(window, every_k=1, loss_scale=ogc.DynamicLossScale(2.0)),
    "window with a monitor": functools.partial(window, every_k=2, monitor=True),
    "derivative of leaf_norms": derivative_of(lambda tree: [ogc.leaf_norms(tree)]),
}
LEAKED_FROM = {"w": np.full((4, 2), 2, np.float32), "b": np.float32([3, 4]), "half": np.float16([[0]])}
LEAKED_SPECS = {"w": P("x", "y"), "b": P("y"), "half": P()}


@pytest.mark.parametrize("function", (PUBLIC | OPTIONS).values(), ids=PUBLIC | OPTIONS)
def test_60_no_tracer_leaks_from_a_jitted_call(path, function):
  with jax.checking_leaks():
    jax.block_until_ready(jax.jit(lambda tree: function(tree))(LEAKED_FROM))


@pytest.mark.repeats
@pytest.mark.parametrize("function", PUBLIC.values(), ids=PUBLIC)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
def test_60_no_tracer_leaks_from_a_jitted_call_on_four_devices(path, kind, function):
  mesh = make_mesh(kind, shape=(2, 2))
  tree = sharded.put(LEAKED_FROM, mesh, LEAKED_SPECS)
  def run(tree):
    return function(tree)
  with jax.set_mesh(mesh), jax.checking_leaks():
    jax.block_until_ready(jax.jit(run)(tree))


@pytest.mark.parametrize("name", ["global_clip with a monitor", "per_tensor_clip", "derivative of global_clip"])
def test_60_no_tracer_leaks_inside_shard_map_vmap_scan_or_remat(path, name):
  function = PUBLIC[name]
  def in_shard_map(tree):
    return jax.shard_map(lambda t: total(function(t))[None], mesh=make_mesh(AUTO, shape=(2, 2)),
                         in_specs=(LEAKED_SPECS,), out_specs=P(("x", "y")), check_vma=False)(tree)
  def in_vmap(tree):
    def member(factor):
      return total(function(jax.tree.map(lambda g: g * factor.astype(g.dtype), tree)))
    return jax.vmap(member)(np.float32([1, 2]))
  def in_scan(tree):
    return jax.lax.scan(lambda carry, _: (carry, total(function(tree))), 0.0, length=2)
  def in_remat(tree):
    return jax.checkpoint(function)(tree)
  for wrapped in in_shard_map, in_vmap, in_scan, in_remat:
    with jax.checking_leaks():
      jax.block_until_ready(jax.jit(wrapped)(LEAKED_FROM))
