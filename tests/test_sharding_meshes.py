"""Does every kind of mesh give the clip and the norms that one device gives?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax_globalclip as ogc
import oracle
import processes
import pytest
import sharded

MESHES = [*sharded.WHOLE, sharded.partly_manual_on_explicit_mesh, *sharded.PARTLY_AUTO]
# What XLA still partitions takes the reference path in any case.
BOTH_PATHS = [sharded.on_auto_mesh, sharded.on_explicit_mesh, sharded.in_shard_map, sharded.with_mesh_and_specs]


def counted(tree):
  return {name: leaf for name, leaf in tree.items() if name != "steps"}


def check(got, tree, want):
  for name, leaf in got.items():
    assert leaf.shape == tree[name].shape and leaf.dtype == tree[name].dtype
    if name == "steps":
      assert leaf == tree[name]
    elif leaf.size:
      rtol = {2: 2**-8, 4: 1e-6}[leaf.dtype.itemsize]
      np.testing.assert_allclose(np.asarray(leaf).astype(np.float64), want[name].astype(np.float64), rtol=rtol,
                                 err_msg=name)


def whole_clip(tree, max_norm, **placement):
  tx = ogc.global_clip(max_norm, **placement)
  return tx.update(tree, tx.init(tree))[0], ogc.global_norm(tree, **placement)


@pytest.fixture(scope="module", ids=lambda pair: f"{pair[0].__name__}-{pair[1]}",
                params=[(mesh, "native") for mesh in MESHES] + [(mesh, "reference") for mesh in BOTH_PATHS])
def clip(request):
  """The whole clip, compiled once on each mesh and path: a function of a tree on the host and the threshold."""
  mesh, path = request.param
  if mesh is sharded.partly_manual_on_explicit_mesh and jax.__version_info__ < (0, 10):
    pytest.skip("jax 0.9 cannot lower axis_index in a shard_map inside a shard_map")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("OPTAX_GLOBALCLIP_BACKEND", path)
    yield mesh(whole_clip)


def test_clip_is_that_of_one_device(clip):
  tree = sharded.tree()
  clipped, norm = clip(tree, 2.0)
  check(clipped, tree, oracle.clip(counted(tree), 2.0))
  assert oracle.ulps(sharded.everywhere(norm), oracle.norm(counted(tree))) <= 1


def test_updates_below_the_threshold_keep_their_bits(clip):
  tree = sharded.tree()
  tree["half"][:2] = [-0.0, 1e-40]
  kept, _ = clip(tree, 1e9)
  assert oracle.same_bits(kept, tree)


def test_one_nan_reaches_every_update_on_every_device(clip):
  tree = sharded.tree()
  tree["both"][7, 5] = np.nan
  updates, norm = clip(tree, 2.0)
  assert not np.isfinite(sharded.everywhere(norm))
  for name in counted(tree):
    assert np.isnan(np.asarray(updates[name]).astype(np.float32)).all(), name


@pytest.mark.parametrize("mesh", [sharded.on_auto_mesh, sharded.in_unchecked_shard_map,
                                  sharded.partly_manual_on_auto_mesh], ids=lambda mesh: mesh.__name__)
def test_every_leaf_is_clipped_by_its_own_norm(mesh):
  tree = sharded.tree()
  def clip(leaves, max_norm, **placement):
    tx = ogc.per_tensor_clip(max_norm, **placement)
    return tx.update(leaves, tx.init(leaves))[0], ()
  clipped, _ = mesh(clip)(tree, 150.0)
  check(clipped, tree, {name: oracle.clip(leaf, 150.0) for name, leaf in counted(tree).items()})


@pytest.mark.parametrize("mesh", [sharded.on_auto_mesh, sharded.in_shard_map, sharded.with_mesh_and_specs],
                         ids=lambda mesh: mesh.__name__)
def test_leaf_norms_are_those_of_one_device(mesh):
  tree = sharded.tree()
  _, norms = mesh(lambda leaves, **placement: (leaves, ogc.leaf_norms(leaves, **placement)))(tree)
  for name, norm in norms.items():
    assert oracle.ulps(sharded.everywhere(norm), 0 if name == "steps" else oracle.norm(tree[name])) <= 1, name


@pytest.mark.parametrize("mesh, stage", [
    (sharded.on_auto_mesh, "kernel"), (sharded.on_auto_mesh, "xla"), (sharded.under_a_set_explicit_mesh, "xla"),
    (sharded.in_shard_map, "kernel")], ids=lambda value: getattr(value, "__name__", value))
def test_loss_scale_dtype_and_stage_mean_what_they_mean_on_one_device(mesh, stage):
  tree = sharded.tree()
  def clip(leaves, **placement):
    tx = ogc.global_clip(2.0, loss_scale=1000.0, update_dtype="float32", scale_stage=stage, **placement)
    return tx.update(leaves, tx.init(leaves))[0], ()
  updates, _ = mesh(clip)(tree)
  want = oracle.clip(counted(tree), 2.0, loss_scale=1000.0)
  for name in want:
    assert updates[name].dtype == np.float32
    np.testing.assert_allclose(updates[name], want[name].astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("mesh", [sharded.on_auto_mesh, sharded.partly_manual_on_auto_mesh],
                         ids=lambda mesh: mesh.__name__)
def test_the_older_partitioner_of_xla_agrees(mesh):
  tree = sharded.tree(3)
  jax.config.update("jax_use_shardy_partitioner", False)
  try:
    clipped, norm = mesh(whole_clip)(tree, 2.0)
  finally:
    jax.config.update("jax_use_shardy_partitioner", True)
  check(clipped, tree, oracle.clip(counted(tree), 2.0))
  assert oracle.ulps(sharded.everywhere(norm), oracle.norm(counted(tree))) <= 1


def test_float64_is_reduced_in_float64(x64, path):
  rng = np.random.default_rng(0)
  tree = {"a": rng.standard_normal(64) * 1e200, "b": rng.standard_normal(24).astype(np.float32)}
  mesh = sharded.line()
  placed = sharded.put(tree, mesh, {"a": sharded.P("x"), "b": sharded.P()})
  clipped, norm = ogc.clip_tree(placed, 1.0)
  assert oracle.ulps(sharded.everywhere(norm), oracle.norm(tree)) <= 1
  assert oracle.ulps(clipped["a"], oracle.clip(tree, 1.0)["a"]).max() <= 3


@pytest.mark.parametrize("mesh", [sharded.on_auto_mesh, sharded.on_explicit_mesh, sharded.in_shard_map],
                         ids=lambda mesh: mesh.__name__)
def test_what_monitor_records_is_the_same_on_every_device(mesh):
  tree = sharded.tree()
  def clip(leaves, **placement):
    tx = ogc.global_clip(2.0, monitor=True, **placement)
    updates, state = tx.update(leaves, tx.init(leaves))
    return updates, ogc.clip_metrics(state)
  _, metrics = mesh(clip)(tree)
  assert oracle.ulps(sharded.everywhere(metrics["global_norm"]), oracle.norm(counted(tree))) <= 1
  factor = 2 / float(oracle.norm(counted(tree)))
  np.testing.assert_allclose(sharded.everywhere(metrics["clip_factor"]), factor, rtol=1e-6)
  assert sharded.everywhere(metrics["clipped_steps"]) == 1


@pytest.mark.parametrize("kind", [sharded.AUTO, sharded.EXPLICIT])
def test_raise_names_the_leaf_of_which_one_shard_is_bad(kind):
  tree = sharded.tree()
  tree["wide"][2, 15] = np.inf
  placed = sharded.put(tree, sharded.make_mesh(kind), sharded.SPECS)
  with pytest.raises(FloatingPointError, match=r"non-finite gradients in updates\['wide'\] \(1 elements\)$"):
    ogc.clip_tree(placed, 1.0, error_if_nonfinite=True)


RAISE = """
    import jax, numpy as np, optax_globalclip as ogc, sharded
    tree = sharded.tree()
    tree["wide"][2, 15] = np.inf
    def clip(leaves, **placement):
      return ogc.clip_tree(leaves, 1.0, error_if_nonfinite=True, **placement)
    jax.block_until_ready(sharded.on_auto_mesh(clip)(tree))
    jax.effects_barrier()
"""


def test_raise_ends_a_jitted_step_on_several_devices():
  # In a process of its own: every device's failed callback stays behind for the next one to wait on.
  done = processes.run(processes.python(RAISE), timeout=120, XLA_FLAGS=processes.EIGHT_DEVICES)
  assert done.returncode != 0
  assert "FloatingPointError: optax_globalclip: non-finite gradients in updates['wide'] (1 elements)" in done.stderr


def test_pmap_sums_over_its_axis(path):
  tree = {"w": jnp.arange(32, dtype=jnp.float32).reshape(8, 4), "b": jnp.full((8, 3), 2.0)}
  whole = {"w": np.asarray(tree["w"]), "b": np.full(3, 2.0, np.float32)}
  def clip(leaves):
    return ogc.clip_tree(leaves, 1.0, axis_name={"w": "devices", "b": ()})
  clipped, norm = jax.pmap(clip, axis_name="devices")(tree)
  assert (np.asarray(norm) == np.asarray(norm)[0]).all()
  assert oracle.ulps(norm[0], oracle.norm(whole)) <= 1
  np.testing.assert_allclose(clipped["w"], oracle.clip(whole, 1.0)["w"].astype(np.float64), rtol=1e-6)


def test_without_axis_names_pmap_takes_each_devices_leaves_for_whole():
  norms = jax.pmap(lambda leaves: ogc.global_norm(leaves))(jnp.arange(8, dtype=jnp.float32)[:, None])
  assert norms.tolist() == list(range(8))


def test_axis_name_counts_a_replica_once_where_types_say_that_it_is_one():
  run = jax.shard_map(lambda x: ogc.global_norm(x, axis_name=("x", "y")), mesh=sharded.make_mesh(sharded.AUTO),
                      in_specs=sharded.P(), out_specs=sharded.P())
  assert float(jax.jit(run)(jnp.asarray([3.0, 4.0]))) == 5.0


def test_axis_name_leaves_out_an_axis_of_independent_members():
  # Two members of an ensemble along y, each with a norm of its own.
  mesh = sharded.make_mesh(sharded.AUTO)
  members = jnp.asarray([[3.0, 0, 0, 0], [0, 0, 0, 5.0]]).T
  def clip(shard):
    clipped, norm = ogc.clip_tree(shard, 1.0, axis_name="x")
    return clipped, norm[None]
  clipped, norms = jax.jit(jax.shard_map(clip, mesh=mesh, in_specs=sharded.P("x", "y"),
                                         out_specs=(sharded.P("x", "y"), sharded.P("y"))))(members)
  assert norms.tolist() == [3.0, 5.0]
  assert clipped.T.tolist() == [[1.0, 0, 0, 0], [0, 0, 0, 1.0]]
