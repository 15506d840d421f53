"""Do padding, empty shards, replicas and shardings that no mesh axis names leave the norm right?"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
import sharded
from jax.sharding import NamedSharding
from sharded import AUTO, EXPLICIT, P, line, make_mesh, put

pytestmark = pytest.mark.reference_repeats


def lie(x, mesh, spec):
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


@pytest.mark.parametrize("shape, spec", [
    ((7, 5), P("x", "y")), ((9,), P(("x", "y"))), ((3,), P("x")), ((1, 11), P("x", "y")),
    ((5, 3, 2), P(None, "x", "y")), ((2,), P(("x", "y")))])
def test_padding_of_uneven_shards_does_not_count(shape, spec, path):
  mesh = make_mesh(AUTO)
  values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  def run(x, even):
    # Ones past the end of the leaf: where padding counts, it is not zero.
    clipped, norm = ogc.clip_tree({"uneven": lie(x + 1, mesh, spec), "even": even}, 1.0)
    return jax.tree.map(lambda leaf: lie(leaf, mesh, P()), clipped), norm
  even = put(jnp.full(8, 2.0), mesh, P("x"))
  whole = {"uneven": values + np.float32(1), "even": np.full(8, 2.0, np.float32)}
  clipped, norm = jax.jit(run)(jnp.asarray(values), even)
  assert oracle.ulps(sharded.everywhere(norm), oracle.norm(whole)) <= 1
  for name, want in oracle.clip(whole, 1.0).items():
    np.testing.assert_allclose(clipped[name], want.astype(np.float64), rtol=1e-6)


def test_nan_in_padding_is_no_nan():
  mesh = line()
  def run(x):
    # 0 / 0 in the padding, where XLA may leave zeros.
    quotient = lie(lie(x, mesh, P("x")) / lie(x, mesh, P("x")), mesh, P("x"))
    return ogc.global_norm(quotient)
  assert oracle.ulps(jax.jit(run, in_shardings=NamedSharding(mesh, P()))(jnp.full(9, 5.0)), np.longdouble(3)) <= 1


def test_leaves_replicated_over_different_axes_count_once():
  mesh = make_mesh(AUTO)
  tree = {"x": np.full(8, 1.0, np.float32), "y": np.full(8, 2.0, np.float32), "none": np.full(3, 3.0, np.float32)}
  placed = put(tree, mesh, {"x": P("x"), "y": P("y"), "none": P()})
  assert oracle.ulps(ogc.global_norm(placed), oracle.norm(tree)) <= 1


def test_axes_along_which_nothing_is_sharded_take_no_part():
  # Eight devices as 4 by 2, everything sharded along y alone: groups of two are summed, four times over.
  mesh = make_mesh(AUTO)
  placed = put({"a": jnp.ones((4, 4)), "b": jnp.ones(3)}, mesh, {"a": P(None, "y"), "b": P()})
  hlo = sharded.compiled(ogc.global_norm, placed)
  assert [size for _, size in sharded.collectives(hlo)] == [4, 20]
  # jaxlib writes groups as lists, as iota, or in the axes of a mesh.
  assert "{{0,1},{2,3},{4,5},{6,7}}" in hlo or "[4,2]<=[8]" in hlo
  assert float(ogc.global_norm(placed)) == np.float32(np.sqrt(19))


def test_a_tree_replicated_everywhere_needs_no_collective():
  placed = put({"a": jnp.ones((4, 4)), "b": jnp.ones(3)}, make_mesh(AUTO), {"a": P(), "b": P()})
  assert not sharded.collectives(sharded.compiled(lambda t: ogc.clip_tree(t, 1.0), placed))


def test_a_sharding_that_splits_a_mesh_axis_is_understood():
  # The reshape leaves its result sharded four ways and two ways along parts of the one axis of eight.
  mesh = line()
  rows = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
  def run(x):
    clipped, norm = ogc.clip_tree(x.reshape(4, 2, 6), 1.0)
    return clipped.reshape(8, 6), norm
  placed = put(rows, mesh, P("x"))
  assert {kind for kind, _ in sharded.collectives(sharded.compiled(run, placed))} == {"all-reduce"}
  clipped, norm = jax.jit(run)(placed)
  assert oracle.ulps(norm, oracle.norm(rows)) <= 1
  np.testing.assert_allclose(clipped, oracle.clip(rows, 1.0).astype(np.float64), rtol=1e-6)


def test_a_tree_of_scalars_has_a_norm():
  scalars = put({"a": np.float32(3), "b": np.float32(4)}, make_mesh(AUTO), {"a": P(), "b": P()})
  assert sharded.everywhere(ogc.global_norm(scalars)) == 5


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_empty_trees_and_empty_leaves_have_norm_zero(kind):
  mesh = make_mesh(kind)
  assert float(ogc.global_norm({})) == 0
  empty = put({"a": jnp.zeros((0, 8)), "b": jnp.zeros((8, 0))}, mesh, {"a": P(None, "x"), "b": P("x")})
  clipped, norm = jax.jit(lambda t: ogc.clip_tree(t, 1.0))(empty)
  assert float(norm) == 0 and jax.tree.map(jnp.shape, clipped) == {"a": (0, 8), "b": (8, 0)}


NO_LEAVES = {
    "global_norm": lambda **k: ogc.global_norm({}, **k),
    "clip_tree": lambda **k: ogc.clip_tree({}, 1.0, **k)[1],
    "leaf_norms": lambda **k: jnp.float32(len(ogc.leaf_norms({}, **k))),
    "global_clip": lambda **k: monitored(ogc.global_clip(1.0, monitor=True, **k)),
    "per_tensor_clip": lambda **k: monitored(ogc.per_tensor_clip(1.0, monitor=True, **k)),
    "clipped_multi_steps": lambda **k: monitored(ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, **k)),
    "clipped_adamw's step": lambda **k: stepped(ogc.clipped_adamw(1.0, 1.0, monitor=True, **k)),
}


def stepped(tx):
  with jax.numpy_dtype_promotion("standard"):  # without leaves a step goes the plain way, through optax's adamw
    params, state = tx.step({}, tx.init({}), {})
  assert params == {}
  return ogc.clip_metrics(state)["global_norm"]


def monitored(tx):
  updates, state = tx.update({}, tx.init({}))
  assert updates == {}
  return ogc.clip_metrics(state)["global_norm"]


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", NO_LEAVES)
@pytest.mark.parametrize("where", ["in a mesh of Auto axes", "in a mesh of Explicit axes", "with mesh= and specs="])
def test_a_tree_without_leaves_has_norm_zero_on_every_mesh(where, name, jitted, path):
  mesh = make_mesh(EXPLICIT if "Explicit" in where else AUTO)
  call = lambda: NO_LEAVES[name](**({"mesh": mesh, "specs": {}} if "specs" in where else {}))
  with contextlib.nullcontext() if "specs" in where else jax.set_mesh(mesh):
    assert float((jax.jit(call) if jitted else call)()) == 0
