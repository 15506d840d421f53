"""Which leaves count, which pass through untouched, and which are refused by name."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest

FUNCTIONS = {
    "global_clip": lambda tree: ogc.global_clip(1.0).update(tree, optax.EmptyState())[0],
    "per_tensor_clip": lambda tree: ogc.per_tensor_clip(1.0).update(tree, optax.EmptyState())[0],
    "clip_tree": lambda tree: ogc.clip_tree(tree, 1.0)[0],
    "global_norm": ogc.global_norm,
    "leaf_norms": ogc.leaf_norms,
}
everywhere = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
# Leaves are picked out before the paths part.
clips = pytest.mark.parametrize("path, clip", [
    ("native", "global_clip"), ("native", "per_tensor_clip"), ("native", "clip_tree"), ("reference", "global_clip")],
                                indirect=["path"])
W = np.array([3, 4], np.float32)


class Pair(NamedTuple):
  w: jax.Array
  b: jax.Array


@pytest.mark.parametrize("other", [
    np.array([7, -7], np.int32), np.array(2**31 - 1, np.int32), np.array([255], np.uint8), np.array([True, False]),
    np.zeros((2, 3), jax.dtypes.float0), np.array([-8, 7], jnp.int4), None, optax.MaskedNode(), 7, True, (), {},
], ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', '')}")
@clips
def test_a_leaf_that_is_no_gradient_passes_through_and_does_not_count(other, clip, path):
  updates = FUNCTIONS[clip]({"w": W, "other": other})
  np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)
  got = updates["other"]
  assert type(got) is type(other)
  if isinstance(other, np.ndarray):
    assert got is other
  else:
    assert got == other


@pytest.mark.parametrize("other", [np.array([7], np.int32), np.array([True]), np.zeros(2, jax.dtypes.float0), 7, True],
                         ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', '')}")
def test_the_norm_of_a_leaf_that_does_not_count_is_zero(other, path):
  tree = {"w": W, "other": other}
  assert ogc.global_norm(tree) == 5
  norms = ogc.leaf_norms(tree)
  assert norms["w"] == 5 and norms["other"] == 0
  assert norms["other"].dtype == jnp.float32 and norms["other"].shape == ()


def test_under_jit_integer_leaves_come_back_as_they_went_in(path):
  tree = {"w": W, "n": np.array([7, -7], np.int32), "flag": np.array(True)}
  updates, _ = jax.jit(ogc.global_clip(1.0).update)(tree, optax.EmptyState())
  np.testing.assert_array_equal(updates["n"], [7, -7])
  assert updates["n"].dtype == jnp.int32 and updates["flag"].dtype == jnp.bool_ and updates["flag"]


def test_the_gradient_of_an_integer_parameter_passes_through(path):
  params = {"w": jnp.array([3.0, 4.0]), "n": jnp.array(2)}
  def loss(params):
    return jnp.sum(jnp.square(params["w"])) / 2
  gradients = jax.grad(loss, allow_int=True)(params)
  updates, _ = ogc.global_clip(1.0).update(gradients, optax.EmptyState())
  np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)
  assert updates["n"].dtype == jax.dtypes.float0


def test_python_floats_count_and_come_back_as_arrays(path):
  updates, norm = ogc.clip_tree({"a": 3.0, "b": 4.0}, 1.0)
  assert norm == 5
  np.testing.assert_allclose([updates["a"], updates["b"]], [0.6, 0.8], rtol=1e-6)
  assert updates["a"].dtype == jnp.float32


def test_numpy_leaves_and_scalars_count(path):
  tree = [np.float32(2), np.array(3, np.float16), np.full((), 6, jnp.bfloat16)]
  updates, norm = ogc.clip_tree(tree, 1.0)
  assert norm == 7
  assert [update.dtype for update in updates] == [jnp.float32, jnp.float16, jnp.bfloat16]


def test_float64_numpy_leaves_become_float32_where_x64_is_off(path):
  updates, norm = ogc.clip_tree([np.array([3.0, 4.0])], 1.0)
  assert norm.dtype == jnp.float32 and updates[0].dtype == jnp.float32
  np.testing.assert_allclose(updates[0], [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn"])
@everywhere
def test_a_float8_leaf_is_refused_with_its_path_and_dtype(dtype, function):
  tree = {"w": W, "inner": [{"amax": jnp.zeros(4, dtype)}]}
  with pytest.raises(TypeError, match=rf"\['inner'\]\[0\]\['amax'\].*{dtype}"):
    function(tree)
  with pytest.raises(TypeError, match=dtype):
    jax.jit(function)(tree)


@everywhere
def test_a_string_is_refused_with_its_path(function):
  with pytest.raises(TypeError, match=r"\['name'\].*str"):
    function({"w": W, "name": "adam"})
  with pytest.raises(TypeError, match=r"\['names'\].*<U4"):
    function({"w": W, "names": np.array(["adam"])})


@everywhere
def test_a_random_key_is_refused_with_its_path_and_dtype(function):
  with pytest.raises(TypeError, match=r"\['key'\].*key<fry>"):
    function({"w": W, "key": jax.random.key(0)})


@everywhere
def test_an_object_that_is_no_array_is_refused_with_its_path_and_type(function):
  with pytest.raises(TypeError, match=r"\['w'\]\[1\].*object"):
    function({"w": [W, object()]})


def test_a_masked_node_inside_a_tree_keeps_its_place(path):
  tree = {"a": optax.MaskedNode(), "b": W}
  updates, _ = jax.jit(ogc.global_clip(1.0).update)(tree, optax.EmptyState())
  assert updates["a"] == optax.MaskedNode()
  np.testing.assert_allclose(updates["b"], [0.6, 0.8], rtol=1e-6)


def test_trees_of_classes_keep_their_classes():
  updates, _ = ogc.clip_tree(Pair(jnp.array([6.0]), jnp.array([8.0])), 5.0)
  assert isinstance(updates, Pair)
  np.testing.assert_allclose([updates.w[0], updates.b[0]], [3, 4], rtol=1e-6)


@pytest.mark.parametrize("source, target", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"),
                                            ("float32", "float16"), ("complex64", "complex64")])
@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_update_dtype_is_the_dtype_of_every_update(source, target, max_norm, path):
  tree = [np.array([3, -4], source), np.array([0.1], source)]
  updates, _ = jax.jit(ogc.global_clip(max_norm, update_dtype=target).update)(tree, optax.EmptyState())
  factor = np.longdouble(min(1.0, max_norm / float(oracle.norm(tree))))
  for leaf, update in zip(tree, updates, strict=True):
    assert update.dtype == jnp.dtype(target) and update.shape == leaf.shape
    exact = (leaf.astype(np.clongdouble) if source == "complex64" else oracle.real_elements(leaf)) * factor
    assert np.all(oracle.ulps(update, exact) <= (0.51 if np.dtype(target).itemsize == 2 else 2))


def test_a_complex_leaf_cannot_become_real_nor_a_real_one_complex():
  with pytest.raises(TypeError, match=r"\['z'\].*float32.*complex64"):
    ogc.global_clip(1.0, update_dtype="float32").update({"z": np.ones(2, np.complex64)}, optax.EmptyState())
  with pytest.raises(TypeError, match=r"\['w'\].*complex64.*float32"):
    ogc.global_clip(1.0, update_dtype="complex64").update({"w": W}, optax.EmptyState())
