"""Windows over sharded gradients, where the caller says how they lie: one norm, one skip, one move of the scale."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.reference_repeats

SPECS = {"w": P("x"), "b": P()}


def make(every_k, **options):
  return ogc.clipped_multi_steps(optax.sgd(1.0, momentum=0.5), 1.0, every_k=every_k,
                                 loss_scale=ogc.DynamicLossScale(8.0), **options)


def mesh():
  return jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])


def specs_of(state):
  return jax.tree.map(lambda leaf: P("x") if leaf.shape == (8,) else P(), state)


def in_shard_map(every_k, **options):
  """The update inside a shard_map of the caller's."""
  checked = not options
  tx = make(every_k, **options)
  def update(gradients, state, params):
    specs = SPECS, specs_of(state), SPECS
    return jax.shard_map(tx.update, mesh=mesh(), in_specs=specs, out_specs=specs[:2], check_vma=checked)(
        gradients, state, params)
  return tx.init, update


def by_specs(every_k):
  tx = make(every_k, mesh=mesh(), specs=SPECS)
  return tx.init, tx.update


WAYS = {
    "check_vma": in_shard_map,
    "axis_name": lambda every_k: in_shard_map(every_k, axis_name={"w": "x", "b": ()}),
    "mesh and specs": by_specs,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("every_k", [1, 2])
def test_51_a_nan_on_one_shard_skips_everywhere_and_halves_the_scale_once(path, way, every_k):
  init, update = WAYS[way](every_k)
  params = {"w": jnp.zeros(8), "b": jnp.zeros(1)}
  state, update = init(params), jax.jit(update)
  gradient = {"w": np.float32([0, 8, 16, 24, 0, 0, 0, 0]), "b": np.float32([40])}
  bad = {"w": np.float32([0, 0, 0, 0, 0, np.nan, 0, 0]), "b": np.float32([0])}
  for _ in range(every_k):
    updates, state = update(bad, state, params)
  assert ogc.current_loss_scale(state) == 4 and not ogc.has_updated(state)
  assert not np.asarray(updates["w"]).any() and int(state.optimizer_step) == 0
  for _ in range(every_k):
    updates, state = update(gradient, state, params)
  norm = np.sqrt(4.0 + 16 + 36 + 100)   # unscaled by 4; b counts once
  assert ogc.clip_metrics(state)["global_norm"] == pytest.approx(norm, rel=1e-6)
  np.testing.assert_allclose(updates["w"], -gradient["w"] / 4 / norm, rtol=1e-6)
  np.testing.assert_allclose(updates["b"], -gradient["b"] / 4 / norm, rtol=1e-6)
  assert ogc.current_loss_scale(state) == 4 and ogc.has_updated(state)
