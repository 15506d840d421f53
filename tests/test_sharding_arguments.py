"""Does a wrong `axis_name`, `mesh`, `specs` or place of a leaf end in an error that says what and where?"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
from sharded import AUTO, EXPLICIT, P, make_mesh, put

TREE = {"w": np.ones((8, 4), np.float32), "b": np.ones(3, np.float32)}


def call_global_norm(tree, **placement):
  return ogc.global_norm(tree, **placement)


def call_leaf_norms(tree, **placement):
  return ogc.leaf_norms(tree, **placement)


def call_clip_tree(tree, **placement):
  return ogc.clip_tree(tree, 1.0, **placement)


def call_global_clip(tree, **placement):
  return ogc.global_clip(1.0, **placement).update(tree, optax.EmptyState())


def call_per_tensor_clip(tree, **placement):
  return ogc.per_tensor_clip(1.0, **placement).update(tree, optax.EmptyState())


CALLS = [call_global_norm, call_leaf_norms, call_clip_tree, call_global_clip, call_per_tensor_clip]


@pytest.fixture(params=CALLS, ids=lambda call: call.__name__)
def call(request):
  return request.param


def mesh():
  return make_mesh(AUTO)


@pytest.mark.parametrize("placement, error, words", [
    (lambda: dict(mesh=mesh()), ValueError, "mesh and specs: .* got mesh alone"),
    (lambda: dict(specs=P("x")), ValueError, "mesh and specs: .* got specs alone"),
    (lambda: dict(mesh=mesh(), specs=P(), axis_name="x"), ValueError, "axis_name and mesh"),
    (lambda: dict(mesh="x", specs=P()), TypeError, "mesh: expected a jax.sharding.Mesh .* got str"),
    (lambda: dict(mesh=mesh(), specs={"w": "x", "b": P()}), TypeError, "specs: expected .*PartitionSpec.* got 'x'"),
    (lambda: dict(axis_name=3), TypeError, "axis_name: expected .* got 3"),
    (lambda: dict(mesh=mesh(), specs={"w": P()}), ValueError, "specs: .*prefix of the updates"),
    (lambda: dict(mesh=mesh(), specs={"w": P("z"), "b": P()}), ValueError, r"updates\['w'\].*'z'.* no axis of the"),
    (lambda: dict(mesh=mesh(), specs={"w": P(), "b": P("x")}), ValueError, r"updates\['b'\].*does not divide.*\(3,\)"),
    (lambda: dict(mesh=mesh(), specs={"w": P(), "b": P(None, "x")}), ValueError, r"updates\['b'\].*more entries"),
    (lambda: dict(axis_name="x"), ValueError, "axis_name 'x' is no axis of a shard_map or pmap around this call"),
])
def test_a_placement_that_does_not_fit_is_refused(call, placement, error, words):
  with pytest.raises(error, match=re.compile(words, re.DOTALL)):
    call(TREE, **placement())


def test_transformations_check_when_they_are_made():
  for make in (ogc.global_clip, ogc.per_tensor_clip):
    with pytest.raises(ValueError, match="mesh and specs"):
      make(1.0, mesh=mesh())


def test_an_axis_of_vmap_is_refused():
  # Under vmap every member has a norm of its own; over its axis there is nothing to sum.
  with pytest.raises(ValueError, match="axis_name 'batch' is no axis of a shard_map or pmap"):
    jax.vmap(lambda x: ogc.global_norm(x, axis_name="batch"), axis_name="batch")(jnp.ones((2, 3)))


def test_mesh_inside_shard_map_is_refused():
  def clip(shard):
    return ogc.clip_tree(shard, 1.0, mesh=mesh(), specs=P("x"))[0]
  with pytest.raises(ValueError, match="inside a shard_map or pmap over .*leave mesh and specs out"):
    jax.shard_map(clip, mesh=mesh(), in_specs=P("x"), out_specs=P("x"))(jnp.ones(8))


def test_a_sum_not_yet_taken_is_refused_by_name():
  explicit = make_mesh(EXPLICIT)
  @jax.jit
  def norm(x, y):
    product = jnp.einsum("ij,jk->ik", x, y, out_sharding=P(None, None, unreduced={"x"}))
    return ogc.global_norm({"w": product})
  with jax.set_mesh(explicit):
    x, y = put([jnp.ones((3, 8)), jnp.ones((8, 3))], explicit, [P(None, "x"), P("x", None)])
    with pytest.raises(ValueError, match=r"updates\['w'\]: is unreduced over \['x'\]"):
      norm(x, y)


def test_a_prefix_of_specs_and_axes_serves_whole_subtrees():
  tree = {"layers": [jnp.ones((8, 2)), jnp.ones((8, 3))], "none": None, "masked": optax.MaskedNode(), "count": 7,
          "bias": jnp.ones(4)}
  want = np.float32(np.sqrt(44))
  specs = {"layers": P("x"), "none": P(), "masked": P(), "count": P(), "bias": P()}
  assert float(ogc.global_norm(tree, mesh=mesh(), specs=specs)) == want
  assert float(ogc.global_norm(tree, mesh=mesh(), specs=P())) == want
  axes = {"layers": ("x",), "none": (), "masked": (), "count": (), "bias": ()}
  run = jax.shard_map(lambda t: ogc.global_norm(t, axis_name=axes), mesh=mesh(), in_specs=(specs,), out_specs=P(),
                      check_vma=False)
  assert float(jax.jit(run)(tree)) == want


def test_uncommitted_leaves_join_those_on_a_mesh():
  tree = {"w": put(jnp.ones((8, 2)), mesh(), P("x")), "b": jnp.full(9, 1.0), "host": np.zeros(3, np.float32)}
  assert float(ogc.global_norm(tree)) == 5.0


# ----------------------------------------------------------------------------------------------------------------------
# Under inject_hyperparams, which takes whatever can be called for a schedule: a mesh is a context manager that also
# decorates functions


def inject(make, *static_args, **arguments):
  if make is ogc.clipped_multi_steps:
    arguments, static_args = arguments | {"inner": optax.identity()}, (*static_args, "every_k")
  return optax.inject_hyperparams(make, static_args=static_args)(**arguments)


injected = pytest.mark.parametrize("make", [ogc.global_clip, ogc.per_tensor_clip, ogc.clipped_multi_steps],
                                   ids=lambda make: make.__name__)


@injected
@pytest.mark.parametrize("specs", [{"w": P("x"), "b": P()}, P()], ids=["tree", "one"])
@pytest.mark.parametrize("static_args", [(), ("specs",)], ids=str)
def test_an_injected_mesh_is_refused_in_words_that_name_static_args(make, specs, static_args):
  tx = inject(make, *static_args, max_norm=1.0, mesh=mesh(), specs=specs)
  with pytest.raises((TypeError, ValueError), match=r"(?s)mesh.*inject_hyperparams.*static_args"):
    tx.update(TREE, tx.init(TREE), TREE)


@injected
def test_an_injected_dtype_is_refused_in_words_that_name_static_args(make):
  # Called as a schedule it gives a number of the dtype of the parameters.
  tx = inject(make, max_norm=1.0, update_dtype=jnp.bfloat16)
  with pytest.raises((TypeError, ValueError), match=r"(?s)update_dtype.*inject_hyperparams.*static_args"):
    tx.update(TREE, tx.init(TREE), TREE)


@injected
@pytest.mark.parametrize("static_args", [("mesh",), ("mesh", "specs"), ("mesh", "specs", "axis_name")], ids=str)
def test_with_static_args_a_mesh_goes_through_inject_hyperparams(path, make, static_args):
  specs = {"w": P("x"), "b": P()}
  tx = inject(make, *static_args, max_norm=0.5, mesh=mesh(), specs=specs)
  state = tx.init(TREE)
  assert set(state.hyperparams) == {"max_norm"}
  updates, _ = jax.jit(tx.update)(TREE, state, TREE)
  norms = {"w": 32, "b": 3} if make is ogc.per_tensor_clip else {"w": 35, "b": 35}
  for name, square in norms.items():
    np.testing.assert_allclose(updates[name], np.full(TREE[name].shape, 0.5 / np.sqrt(square)), rtol=1e-6)
