"""Does a rule give the same bits on every device of a mesh, and the thresholds of one device?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import sharded
from jax.sharding import PartitionSpec as P
from windows import make

pytestmark = pytest.mark.reference_repeats

RULES = {"ema_clip": ogc.ema_clip(warmup=2, factor=1.1, decay=0.5), "zclip": ogc.zclip(warmup=2),
         "autoclip": ogc.autoclip(50, n=4), "adagc": ogc.adagc(warmup=2, lambda_abs=100.0)}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
GLOBAL = {name: rule for name, rule in RULES.items() if name != "adagc"}


def history():
  return [jax.tree.map(lambda x: (x * (1 + i % 3)).astype(x.dtype), sharded.tree(i)) for i in range(5)]


def thresholds(tx, gradients, place=lambda g: g):
  state, update, seen = tx.init(sharded.tree()), jax.jit(tx.update), []
  for g in gradients:
    updates, state = update(place(g), state)
    seen.append(np.asarray(state.threshold))
  return seen, updates, state


def same_on_every_device(x):
  return len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) == 1


def maker(rule):
  return ogc.per_tensor_clip if isinstance(rule, ogc.adagc) else ogc.global_clip


@rules
@pytest.mark.parametrize("kind", [sharded.AUTO, sharded.EXPLICIT], ids=["auto", "explicit"])
def test_thresholds_on_a_mesh_are_those_of_one_device(path, rule, kind):
  mesh, tx = sharded.make_mesh(kind, shape=(2, 2)), maker(rule)(rule)
  expected, expected_updates, _ = thresholds(tx, history())
  with jax.set_mesh(mesh):
    seen, updates, state = thresholds(tx, history(), lambda g: sharded.put(g, mesh, sharded.SPECS))
  np.testing.assert_allclose(seen, expected, rtol=1e-6)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=1e-2 if x.dtype.itemsize < 4 else 1e-5),
               updates, expected_updates)
  assert all(same_on_every_device(x) for x in jax.tree.leaves(state))


@pytest.mark.parametrize("rule", GLOBAL.values(), ids=GLOBAL)
def test_thresholds_inside_a_shard_map_are_those_of_one_device(path, rule):
  mesh, tx = sharded.line(4), ogc.global_clip(rule)
  gradients = [np.float32(np.random.default_rng(i).standard_normal(16)) * (1 + i % 3) for i in range(5)]
  def run(stacked):
    def step(state, g):
      _, state = tx.update([g], state)
      return state, state.threshold
    return jax.lax.scan(step, tx.init([stacked[0]]), stacked)[1]
  seen = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(None, "x"), out_specs=P()))(np.stack(gradients))
  np.testing.assert_allclose(seen, jax.jit(run)(np.stack(gradients)), rtol=1e-6)


@pytest.mark.parametrize("kind", [sharded.AUTO, sharded.EXPLICIT], ids=["auto", "explicit"])
def test_a_skip_is_every_devices_skip(path, kind):
  mesh = sharded.line(4, kind)
  tx = make(optax.sgd(1.0), ogc.zclip(warmup=1), every_k=1, skip_spikes=ogc.SpikeRule(limit=100.0))
  params = jax.device_put(jnp.zeros(8), jax.sharding.NamedSharding(mesh, P("x")))
  with jax.set_mesh(mesh):
    state, update, seen = tx.init(params), jax.jit(tx.update), []
    for i, x in enumerate([1.0, 1000.0, 1.0]):
      g = jax.device_put(jnp.zeros(8).at[i].set(x), jax.sharding.NamedSharding(mesh, P("x")))
      updates, state = update(g, state, params)
      seen.append(float(jnp.sum(jnp.abs(updates))))
  assert seen == [1, 0, 1]
  assert all(same_on_every_device(x) for x in jax.tree.leaves(state.clip_state))


@rules
def test_a_rule_reads_and_sends_no_more_than_a_constant(path, rule):
  mesh, make_clip = sharded.line(8), maker(rule)
  gradients = [jax.device_put(jnp.ones((8, 4)), jax.sharding.NamedSharding(mesh, P("x")))] * 3
  def sent(max_norm):
    tx = make_clip(max_norm)
    text = jax.jit(tx.update).lower(gradients, tx.init(gradients)).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
    return text.count(" all-reduce("), text.count("optax_globalclip_norm")
  assert sent(rule) == sent(1.0)
