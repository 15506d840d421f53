"""Is the norm of a tree that holds an infinity infinite, and that of one that holds a NaN a NaN?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
import sharded
from sharded import AUTO, EXPLICIT, P, make_mesh

pytestmark = pytest.mark.reference_repeats

NAN, INF = np.nan, np.inf
# What is put where, and the norm that IEEE arithmetic gives.
BAD = {
    "inf": ([1, INF], INF), "-inf": ([-INF, 1], INF), "inf and -inf": ([INF, -INF], INF), "nan": ([1, NAN], NAN),
    "nan and inf": ([NAN, INF], NAN), "inf and nan": ([INF, NAN], NAN),
}


def tree_with(values):
  """Leaves of norms 5, bad, 12 and 0."""
  return {"a": np.float32([3, 4]), "bad": np.float32([1, *values, 2]), "c": np.float16([12]), "zeros": np.float32([0])}


def leaf_norms_of(norm):
  return {"a": 5, "bad": norm, "c": 12, "zeros": 0}


def all_are(tree, value):
  return all(np.array_equal(leaf, np.full_like(leaf, value), equal_nan=True) for leaf in jax.tree.leaves(tree))


def expect(got, norm, name):
  np.testing.assert_array_equal(got, norm, err_msg=name)


def expect_leaves(got, norm, name):
  want = leaf_norms_of(norm)
  assert sorted(got) == sorted(want)
  for leaf, n in got.items():
    np.testing.assert_allclose(n, want[leaf], rtol=1e-6, err_msg=f"{name}: {leaf}")


makes = pytest.mark.parametrize("make", [ogc.global_clip, ogc.per_tensor_clip], ids=["global", "per_tensor"])


# ----------------------------------------------------------------------------------------------------------------------
# On one device


@pytest.mark.parametrize("jitted", [True, False], ids=["jitted", "eager"])
def test_the_norm_is_what_ieee_arithmetic_gives(path, jitted):
  def run(tree):
    return ogc.global_norm(tree), ogc.leaf_norms(tree)
  run = jax.jit(run) if jitted else run
  for name, (values, norm) in BAD.items():
    whole, of_leaves = run(tree_with(values))
    expect(whole, norm, name)
    expect_leaves(of_leaves, norm, name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "float64", "complex128"])
def test_so_it_is_in_every_dtype(path, dtype, x64):
  for name, (values, norm) in BAD.items():
    leaf = jnp.asarray([1, *values], dtype)
    expect(ogc.global_norm([leaf, jnp.ones(2, jnp.float32)]), norm, name)
    if "complex" in dtype:
      imaginary = jax.lax.complex(jnp.ones_like(leaf.real), leaf.real)
      expect(ogc.global_norm([imaginary, jnp.ones(2, jnp.float32)]), norm, name)


def test_clip_tree_returns_that_norm_beside_nan(path):
  for clip in ogc.clip_tree, jax.jit(ogc.clip_tree, static_argnums=1):
    for name, (values, norm) in BAD.items():
      clipped, got = clip(tree_with(values), 1.0)
      expect(got, norm, name)
      assert all_are(clipped, NAN)


@makes
@pytest.mark.parametrize("stage", ["kernel", "xla"])
@pytest.mark.parametrize("on_nonfinite", ["propagate", "zero"])
def test_a_monitor_records_that_norm_or_infinity_where_the_update_is_zeroed(path, make, stage, on_nonfinite):
  tx = make(1.0, monitor=True, scale_stage=stage, on_nonfinite=on_nonfinite)
  update = jax.jit(tx.update)
  for name, (values, norm) in BAD.items():
    tree = tree_with(values)
    updates, state = update(tree, tx.init(tree))
    assert all_are(updates, NAN if on_nonfinite == "propagate" else 0)
    norm = norm if on_nonfinite == "propagate" else INF
    expect(state.global_norm, norm, name)
    expect_leaves({row.path: row.norm for row in ogc.leaf_report(state).rows}, norm, name)


@pytest.mark.parametrize("on_nonfinite", ["skip", "zero", "propagate"])
@pytest.mark.parametrize("monitor", [False, True])
@pytest.mark.parametrize("every_k", [1, 2])
def test_a_window_records_that_norm_or_infinity_where_it_is_not_propagated(path, every_k, monitor, on_nonfinite):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, every_k=every_k, on_nonfinite=on_nonfinite, monitor=monitor)
  update = jax.jit(tx.update)
  for name, (values, norm) in BAD.items():
    tree = tree_with(values)
    state = tx.init(tree)
    for _ in range(every_k):
      updates, state = update(tree, state, tree)
    assert all_are(updates, NAN if on_nonfinite == "propagate" else 0)
    norm = norm if on_nonfinite == "propagate" else INF
    expect(state.clip_state.global_norm, norm, name)
    if monitor:
      expect_leaves({row.path: row.norm for row in ogc.leaf_report(state).rows}, norm, name)


def test_the_report_of_a_tree_says_it_too(path):
  for name, (values, norm) in BAD.items():
    first, *rest = ogc.leaf_report(tree_with(values)).rows
    assert (first.path, first.nonfinite) == ("bad", np.sum(~np.isfinite(values)))
    expect(first.norm, norm, name)
    assert [(row.path, row.norm) for row in rest] == [("c", 12), ("a", 5), ("zeros", 0)]


def test_each_member_of_a_batch_has_its_own(path):
  members, norms = zip(*BAD.values(), ([3, 4], 5))
  np.testing.assert_array_equal(jax.vmap(ogc.global_norm)(np.float32(members)), norms)


def test_a_finite_tree_whose_norm_is_beyond_float32_is_still_clipped_right(path):
  clipped, norm = ogc.clip_tree([np.full(4, 3e38, np.float32)], 1.0)
  assert norm == INF
  np.testing.assert_allclose(clipped[0], np.full(4, 0.5), rtol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# On one of several devices


SPECS = {"bad": P("x"), "b": P()}


def values_with(values, at):
  """Eight shards of two ones, but for a value on each of two shards."""
  leaf = np.ones(16, np.float32)
  for i, (value, shard) in enumerate(zip(values, at, strict=True)):
    leaf[2 * shard + i] = value
  return {"bad": leaf, "b": np.float32([3])}


def on_mesh(kind):
  def make(function):
    run, mesh = jax.jit(function), make_mesh(kind, shape=(8,), names=("x",))
    def call(tree):
      with jax.set_mesh(mesh):
        return run(sharded.put(tree, mesh, SPECS))
    return call
  return make


def in_shard_map(function):
  return jax.jit(jax.shard_map(function, mesh=make_mesh(AUTO, shape=(8,), names=("x",)), in_specs=(SPECS,),
                               out_specs=P()))


def in_unchecked_shard_map(function):
  return jax.jit(jax.shard_map(lambda tree: function(tree, axis_name={"bad": "x", "b": ()}), in_specs=(SPECS,),
                               mesh=make_mesh(AUTO, shape=(8,), names=("x",)), out_specs=P(), check_vma=False))


def by_specs(function):
  mesh = make_mesh(AUTO, shape=(8,), names=("x",))
  run = jax.jit(lambda tree: function(tree, mesh=mesh, specs=SPECS))
  return lambda tree: run(sharded.put(tree, mesh, SPECS))


WAYS = {"Auto": on_mesh(AUTO), "Explicit": on_mesh(EXPLICIT), "shard_map": in_shard_map,
        "unchecked shard_map": in_unchecked_shard_map, "mesh and specs": by_specs}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
def test_on_every_device_the_norm_is_what_ieee_arithmetic_gives(path, way):
  def run(tree, **placement):
    tx = ogc.global_clip(1.0, monitor=True, **placement)
    _, state = tx.update(tree, tx.init(tree))
    norms = ogc.leaf_norms(tree, **placement)
    return {"global_norm": ogc.global_norm(tree, **placement), "leaf": norms["bad"], "other": norms["b"],
            "clip_tree": ogc.clip_tree(tree, 1.0, **placement)[1], "monitor": state.global_norm}
  run = way(run)
  for values, norm in BAD.values():
    for at in (0, 1), (7, 3), (5, 5):
      got = {name: sharded.everywhere(x) for name, x in run(values_with(values, at)).items()}
      assert got.pop("other") == 3
      for name, x in got.items():
        np.testing.assert_array_equal(x, norm, err_msg=f"{name} with {values} at {at}")


@ways
def test_on_every_device_infinity_is_recorded_where_updates_are_zeroed(path, way):
  def run(tree, **placement):
    tx = ogc.global_clip(1.0, monitor=True, on_nonfinite="zero", **placement)
    _, state = tx.update(tree, tx.init(tree))
    return {"norm": state.global_norm, "steps": state.nonfinite_steps}
  run = way(run)
  for values, _ in BAD.values():
    got = {name: sharded.everywhere(x) for name, x in run(values_with(values, (6, 2))).items()}
    assert got == {"norm": INF, "steps": 1}, values


@ways
def test_finite_shards_have_the_norm_of_the_whole(path, way):
  run = way(lambda tree, **placement: {"norm": ogc.global_norm(tree, **placement)})
  norm = sharded.everywhere(run(values_with([1, 1], (0, 1)))["norm"])
  assert oracle.ulps(norm, np.sqrt(np.longdouble(25))) <= 1
