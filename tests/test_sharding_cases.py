"""Cases 46 to 53: sharded trees on which tools of this kind have been seen to go wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
import sharded
from sharded import P, line

pytestmark = pytest.mark.reference_repeats


def clip(tree, max_norm):
  tx = ogc.global_clip(max_norm)
  return tx.update(tree, tx.init(tree))[0]


def test_case_46_a_replicated_leaf_counts_once(path):
  tree = sharded.put({"W": jnp.ones(16), "b": jnp.full(1, 3.0)}, line(4), {"W": P("x"), "b": P()})
  assert float(ogc.global_norm(tree)) == 5.0
  clipped = jax.jit(clip, static_argnums=1)(tree, 1.0)
  np.testing.assert_allclose(clipped["W"], 0.2, rtol=1e-6)
  np.testing.assert_allclose(clipped["b"], 0.6, rtol=1e-6)


def test_case_47_two_devices_with_one_element_each(path):
  grads = sharded.put(jnp.asarray([3.0, 4.0]), line(2), P("x"))
  clipped, norm = jax.jit(lambda g: ogc.clip_tree(g, 1.0))(grads)
  assert [float(shard.data) for shard in norm.addressable_shards] == [5.0, 5.0]
  np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-6)


def test_case_48_no_copy_of_the_whole_is_made(path):
  grads = sharded.put(jnp.ones((8, 1024)), line(8), P("x"))
  assert not [c for c in sharded.collectives(sharded.compiled(lambda g: ogc.clip_tree(g, 1.0), grads))
              if c[0] != "all-reduce"]
  clipped, norm = jax.jit(lambda g: ogc.clip_tree(g, 1.0))(grads)
  assert oracle.ulps(norm, np.sqrt(np.longdouble(8192))) <= 1
  assert clipped.sharding.is_equivalent_to(grads.sharding, 2)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_case_49_bfloat16_on_any_number_of_devices(devices, path):
  grads = sharded.put(jnp.ones(8008, jnp.bfloat16), line(devices), P("x"))
  assert oracle.ulps(ogc.global_norm(grads), np.sqrt(np.longdouble(8008))) <= 1


def test_case_50_squares_beyond_float32_on_every_shard(path):
  grads = sharded.put(jnp.full(4, 1e19), line(4), P("x"))
  clipped, norm = ogc.clip_tree(grads, 1.0)
  assert oracle.ulps(norm, 2 * np.longdouble(np.float32(1e19))) <= 1
  np.testing.assert_allclose(clipped, 0.5, rtol=1e-6)


def test_case_51_a_nan_on_one_shard_skips_everywhere(path):
  mesh = line(4)
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, loss_scale=ogc.DynamicLossScale(8.0))
  params = sharded.put(jnp.ones(8), mesh, P("x"))
  state = jax.device_put(tx.init(params), jax.NamedSharding(mesh, P()))
  grads = sharded.put(jnp.ones(8).at[5].set(jnp.nan), mesh, P("x"))
  updates, state = jax.jit(tx.update)(grads, state, params)
  assert updates.tolist() == [0.0] * 8
  assert [float(s.data) for s in ogc.current_loss_scale(state).addressable_shards] == [4.0] * 4
  assert int(ogc.clip_metrics(state)["nonfinite_steps"]) == 1
  assert not ogc.has_updated(state)


def test_case_52_every_device_clips_by_the_norm_of_all(path):
  run = jax.shard_map(lambda g: ogc.clip_tree(g, 1.0), mesh=line(8), in_specs=P("x"), out_specs=(P("x"), P()))
  clipped, norm = jax.jit(run)(jnp.arange(1.0, 9.0))
  assert oracle.ulps(norm, np.sqrt(np.longdouble(204))) <= 1
  np.testing.assert_allclose(clipped, np.arange(1, 9) / np.sqrt(204), rtol=1e-6)


def test_case_53_leaves_without_a_common_mesh_are_named(path):
  first, second = jax.devices()[:2]
  tree = {"a": jax.device_put(jnp.float32(3), first), "b": jax.device_put(jnp.float32(4), second)}
  for function in (ogc.global_norm, ogc.leaf_norms, lambda t: ogc.clip_tree(t, 1.0), lambda t: clip(t, 1.0)):
    with pytest.raises(ValueError, match=rf"updates\['a'\] on .*{first}.*updates\['b'\] on .*{second}"):
      function(tree)
