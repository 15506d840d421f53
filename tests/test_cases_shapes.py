"""Cases 19 to 21: empty leaves, missing leaves, scalars and masked ones keep their place and do not count."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import programs
import pytest


def clips(max_norm):
  """Every function that clips a tree as a whole."""
  return {
      "global_clip": lambda tree: ogc.global_clip(max_norm).update(tree, optax.EmptyState())[0],
      "xla": lambda tree: ogc.global_clip(max_norm, scale_stage="xla").update(tree, optax.EmptyState())[0],
      "clip_tree": lambda tree: ogc.clip_tree(tree, max_norm)[0],
  }


@pytest.mark.parametrize("path, name", [("native", "global_clip"), ("native", "xla"), ("native", "clip_tree"),
                                        ("reference", "global_clip")], indirect=["path"])
def test_empty_leaves_keep_their_shapes_and_do_not_count(path, name):
  tree = [np.ones(4, np.float32), np.zeros(0, np.float32), np.zeros((0, 3), np.float32), np.full(4, 2, np.float32),
          np.full(1, 4, np.float32)]
  updates = jax.jit(clips(1.0)[name])(tree)
  assert [u.shape for u in updates] == [(4,), (0,), (0, 3), (4,), (1,)]
  for update, want in zip(updates, [1 / 6, 0, 0, 1 / 3, 2 / 3], strict=True):
    np.testing.assert_allclose(update, np.full(update.shape, want), rtol=1e-6)


def test_empty_leaves_have_norm_zero_each(path):
  tree = {"a": np.zeros((0, 3), np.float16), "b": np.full(4, 3, np.float32), "c": np.zeros(0, np.complex64)}
  norm, norms = programs.norms(path)(tree)
  assert (norm, norms["a"], norms["b"], norms["c"]) == (6, 0, 6, 0)
  updates, _ = programs.clip(path, per_leaf=True)(tree, 3.0)
  assert updates["a"].shape == (0, 3) and updates["c"].dtype == jnp.complex64
  np.testing.assert_array_equal(updates["b"], 1.5)


def test_a_missing_leaf_stays_missing(path):
  tree = {"a": jnp.array([3.0, 4.0]), "b": None}
  for options in ({}, {"per_leaf": True}):
    updates, _ = programs.clip(path, **options)(tree, 1.0)
    assert updates["b"] is None
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
  assert programs.norms(path)(tree)[1]["b"] is None


@pytest.mark.parametrize("tree", [{}, [], (), None, {"a": None, "b": [None, None]}, {"a": [], "b": {}}], ids=repr)
@pytest.mark.parametrize("path, compiled", [("native", jax.jit), ("native", lambda f: f), ("reference", lambda f: f)],
                         ids=["native-jit", "native-eager", "reference-eager"], indirect=["path"])
def test_a_tree_without_leaves_comes_back_as_it_is_with_norm_zero(tree, path, compiled):
  for clip in clips(1.0).values():
    assert compiled(clip)(tree) == tree
  assert compiled(ogc.per_tensor_clip(1.0).update)(tree, optax.EmptyState())[0] == tree
  norm = compiled(ogc.global_norm)(tree)
  assert norm == 0 and norm.dtype == jnp.float32 and norm.shape == ()
  assert compiled(ogc.leaf_norms)(tree) == tree
  tx = ogc.global_clip(0.0, monitor=True)
  metrics = ogc.clip_metrics(compiled(tx.update)(tree, tx.init(tree))[1])
  assert (metrics["global_norm"], metrics["clip_factor"], metrics["clipped_steps"]) == (0, 1, 0)


def test_only_empty_leaves_have_norm_zero_and_come_back(path):
  tree = [np.zeros((0,), np.float32), np.zeros((2, 0), jnp.bfloat16)]
  updates, norm = jax.jit(ogc.clip_tree)(tree, 0.0)
  assert norm == 0 and oracle.same_bits(updates, [jnp.asarray(leaf) for leaf in tree])


def test_a_leaf_masked_out_is_neither_measured_nor_touched(path):
  tree = {"w": jnp.array([3.0, 4.0]), "amax": jnp.float32(448)}
  tx = optax.masked(ogc.global_clip(1.0, monitor=True), {"w": True, "amax": False})
  updates, state = jax.jit(tx.update)(tree, tx.init(tree))
  np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)
  assert updates["amax"] == 448
  assert ogc.clip_metrics(state)["global_norm"] == 5


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (3, 5, 7), (2, 1, 129), (4099,)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_a_leaf_of_any_shape_is_clipped_whole(shape, dtype, monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  leaf = np.asarray(np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape) % 13 + 1).astype(dtype)
  updates, norm = ogc.clip_tree([leaf], 0.5)
  assert updates[0].shape == shape and updates[0].dtype == dtype
  assert oracle.ulps(norm, oracle.norm([leaf])) <= 1
  wide = np.asarray(updates[0]).astype(np.complex128)
  np.testing.assert_allclose(wide, np.asarray(oracle.clip([leaf], 0.5)[0], np.complex128),
                             rtol=1e-6 if dtype in ("float32", "complex64") else 2**-8)


@pytest.mark.parametrize("size", [*range(1, 36), 16383, 16384, 16385, 32769])
def test_no_element_is_missed_at_the_edges_of_vectors_and_chunks(size, monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  tree = [(np.arange(size) % 7 + 1).astype(dtype) for dtype in (np.float32, np.float16, jnp.bfloat16)]
  norm, norms = programs.norms("native")(tree)
  updates, _ = programs.clip("native")(tree, 1e-2)
  assert oracle.ulps(norm, oracle.norm(tree)) <= 1
  wants, rtols = oracle.clip(tree, 1e-2), (1e-6, 2**-10, 2**-8)
  for leaf, leaf_norm, update, want, rtol in zip(tree, norms, updates, wants, rtols, strict=True):
    assert oracle.ulps(leaf_norm, oracle.norm([leaf])) <= 1
    np.testing.assert_allclose(np.asarray(update, np.float64), np.asarray(want, np.float64), rtol=rtol,
                               atol=2**-25 if update.dtype == np.float16 else 0)
