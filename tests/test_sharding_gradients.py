"""Is the derivative of a sharded clip that of the whole?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax_globalclip as ogc
import oracle
import pytest
import sharded
from sharded import AUTO, EXPLICIT, P, make_mesh, put

SPECS = {"w": P("x", "y"), "b": P(), "v": P("y"), "empty": P(None, "x")}
AXES = sharded.axes(SPECS)


def values(seed):
  rng = np.random.default_rng(seed)
  return {"w": rng.standard_normal((8, 4)).astype(np.float32), "b": rng.standard_normal(3).astype(np.float32),
          "v": rng.standard_normal(2).astype(np.float32), "empty": np.zeros((0, 4), np.float32)}


def gradient(tree, weights, max_norm):
  """Of sum(weights * clip(tree)) + |tree|^2, in float64: m/|x| (w - x <x, w> / |x|^2) + 2 x."""
  x = np.concatenate([leaf.ravel().astype(np.float64) for leaf in tree.values()])
  w = np.concatenate([leaf.ravel().astype(np.float64) for leaf in weights.values()])
  norm = np.linalg.norm(x)
  flat = max_norm / norm * (w - x * (x @ w) / norm**2) + 2 * x
  out, start = {}, 0
  for name, leaf in tree.items():
    out[name] = flat[start:start + leaf.size].reshape(leaf.shape)
    start += leaf.size
  return out


def loss(tree, weights, total=lambda name, x: x, **placement):
  """`total(name, sum over this device's shard)` is the sum over the leaf."""
  clipped, _ = ogc.clip_tree(tree, 1.0, **placement)
  return sum((total(name, jnp.sum(clipped[name] * weights[name])) for name in tree),
             jnp.square(ogc.global_norm(tree, **placement)))


def over_devices(name, x):
  return jax.lax.psum(x, AXES[name]) if AXES[name] else x


def on_mesh(kind, placed=False):
  def run(tree, weights):
    mesh = make_mesh(kind)
    placement = dict(mesh=mesh, specs=SPECS) if placed else {}
    with jax.set_mesh(mesh):
      return jax.jit(jax.grad(functools.partial(loss, **placement)))(put(tree, mesh, SPECS), put(weights, mesh, SPECS))
  return run


def inside_shard_map(tree, weights):
  return jax.jit(jax.shard_map(jax.grad(functools.partial(loss, total=over_devices)), mesh=make_mesh(AUTO),
                               in_specs=(SPECS, SPECS), out_specs=SPECS))(tree, weights)


def through_shard_map(tree, weights, **settings):
  placement = {} if settings.get("check_vma", True) else dict(axis_name=AXES)
  function = jax.checkpoint(functools.partial(loss, total=over_devices, **placement))
  mapped = jax.shard_map(function, mesh=make_mesh(AUTO), in_specs=(SPECS, SPECS), out_specs=P(), **settings)
  return jax.jit(jax.grad(mapped))(tree, weights)


WAYS = {"auto": on_mesh(AUTO), "explicit": on_mesh(EXPLICIT), "mesh and specs": on_mesh(AUTO, placed=True),
        "inside shard_map": inside_shard_map, "through shard_map": through_shard_map,
        "through unchecked shard_map": functools.partial(through_shard_map, check_vma=False)}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gradient_is_that_of_the_whole(way):
  tree, weights = values(0), values(1)
  want = gradient(tree, weights, 1.0)
  for name, leaf in way(tree, weights).items():
    np.testing.assert_allclose(leaf, want[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_tangent_of_leaf_norms_in_shard_map():
  tree, direction = values(0), values(1)
  run = jax.shard_map(lambda t, d: jax.jvp(ogc.leaf_norms, (t,), (d,)), mesh=make_mesh(AUTO), in_specs=(SPECS, SPECS),
                      out_specs=P())
  norms, tangents = jax.jit(run)(tree, direction)
  for name, leaf in tree.items():
    length = np.linalg.norm(leaf.astype(np.float64))
    assert oracle.ulps(norms[name], oracle.norm(leaf)) <= 1
    want = np.sum(leaf.astype(np.float64) * direction[name]) / length if length else 0.0
    np.testing.assert_allclose(tangents[name], want, rtol=1e-5)


def test_every_member_of_a_batch_has_its_own_norm():
  tree = values(0)
  pair = {name: np.stack([leaf, 3 * leaf]) for name, leaf in tree.items()}
  batch_specs = {name: P(None, *spec) for name, spec in SPECS.items()}
  want = [oracle.norm(tree), 3 * oracle.norm(tree)]
  batched = jax.vmap(lambda t: ogc.clip_tree(t, 1.0))
  mesh = make_mesh(AUTO)
  single = jax.shard_map(lambda t: ogc.clip_tree(t, 1.0), mesh=mesh, in_specs=(SPECS,), out_specs=(SPECS, P()))
  for run in (lambda t: batched(put(t, mesh, batch_specs)), jax.vmap(single),
              jax.shard_map(batched, mesh=mesh, in_specs=(batch_specs,), out_specs=(batch_specs, P()))):
    clipped, norms = jax.jit(run)(pair)
    assert oracle.ulps(norms, np.asarray(want)).max() <= 2
    np.testing.assert_allclose(clipped["w"][1], oracle.clip(tree, 1.0)["w"].astype(np.float64), rtol=1e-6)
