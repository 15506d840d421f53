"""Cases 1 to 18: the norm and the clip of trees on which tools of this kind have been seen to go wrong."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import programs
import pytest


@dataclasses.dataclass(frozen=True)
class Case:
  name: str
  tree: Any
  max_norm: float
  norm: float
  clipped: Any            # of one element of each leaf, all elements of a leaf being equal
  rtol: float = 1e-6


def f16(*shape, value):
  return np.full(shape, value, np.float16)


def bf16(*shape, value):
  return np.full(shape, value, jnp.bfloat16)


def f32(*shape, value):
  return np.full(shape, value, np.float32)


CASES = [
    Case("1 float16 squares beyond float16", [f16(9, value=2000)], 3.0, 6000.0, [1.0]),
    Case("2 float16 sum beyond float16", [f16(16, value=64)], 2.0, 256.0, [0.5]),
    Case("3 float32 squares beyond float32", [f32(4, value=1e20)], 1.0, 2e20, [0.5]),
    Case("4 float16 squares below float16", [f16(4, value=1e-4)], 1e-4, 2 * float(np.float16(1e-4)), [5e-5], 2**-10),
    Case("6 bfloat16 sum stalls at 128", [bf16(40000, value=0.5)], 1.0, 100.0, [0.0050049], 2**-8),
    Case("8 many small float16", [f16(10000, value=1e-4)], 1.0, 100 * float(np.float16(1e-4)), [np.float16(1e-4)]),
    Case("8 many float16 ones", [f16(1000000, value=1)], 10.0, 1000.0, [0.01], 2**-10),
    Case("9 float32, bfloat16, float16", [f32(1, value=2), bf16(1, value=3), f16(1, value=6)], 1.0, 7.0,
         [2 / 7, 3 / 7, 6 / 7], 2**-8),
    Case("9 float16, bfloat16, float32", [f16(1, value=6), bf16(1, value=3), f32(1, value=2)], 1.0, 7.0,
         [6 / 7, 3 / 7, 2 / 7], 2**-8),
    Case("9 bfloat16, float32, float16", [bf16(1, value=3), f32(1, value=2), f16(1, value=6)], 1.0, 7.0,
         [3 / 7, 2 / 7, 6 / 7], 2**-8),
    Case("13 no epsilon", [f32(1, value=0.03), f32(1, value=0.04)], 0.01, 0.05, [0.006, 0.008]),
    Case("14 below", [f32(1, value=0.3), f32(1, value=0.4)], 10.0, 0.5, [np.float32(0.3), np.float32(0.4)], 0),
    Case("14 equal", [f32(1, value=3), f32(1, value=4)], 5.0, 5.0, [3, 4], 0),
    Case("15 above", [f32(1, value=6), f32(1, value=8)], 5.0, 10.0, [3, 4]),
    Case("16 zeros, max 0", [f32(3, value=0)], 0.0, 0.0, [0], 0),
    Case("16 max 0", [f32(1, value=3), f32(1, value=4)], 0.0, 5.0, [0, 0], 0),
    Case("17 max inf", [f32(1, value=3), f32(1, value=4)], np.inf, 5.0, [3, 4], 0),
    Case("17 max inf, large", [f32(4, value=1e20)], np.inf, 2e20, [np.float32(1e20)], 0),
    Case("norm beyond float32", [f32(4, value=3e38)], 1.0, np.inf, [0.5]),
    Case("factor below the normal range", [f32(1, value=2e38)], 1.0, 2e38, [1.0]),
    Case("1e-25, squares below float32", [f32(4, value=1e-25)], 1e-25, 2e-25, [5e-26]),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def check_clipped(case, tree, updates):
  assert jax.tree.structure(updates) == jax.tree.structure(tree)
  for leaf, update, want in zip(tree, updates, case.clipped, strict=True):
    assert update.dtype == leaf.dtype and update.shape == leaf.shape
    np.testing.assert_allclose(np.asarray(update, np.float64), want, rtol=case.rtol, atol=0)


def program(path):
  """Every function of the package over one tree."""
  @jax.jit
  def everything(tree, limit):
    tx = ogc.global_clip(limit, monitor=True)
    updates, state = tx.update(tree, tx.init(tree))
    out = dict(
        global_clip=updates,
        metrics=ogc.clip_metrics(state),
        clip_tree=ogc.clip_tree(tree, limit),
        global_norm=ogc.global_norm(tree),
        leaf_norms=ogc.leaf_norms(tree),
        per_tensor_clip=ogc.per_tensor_clip(limit).update(tree, optax.EmptyState())[0])
    if path == "native":
      out["scaled_in_xla"] = ogc.global_clip(limit, scale_stage="xla").update(tree, optax.EmptyState())[0]
    return out
  return everything


PROGRAMS = {path: program(path) for path in ("native", "reference")}


@functools.lru_cache(maxsize=None)
def results(case_name, path):
  """What every function makes of a case; `path` is in force already."""
  case = next(case for case in CASES if case.name == case_name)
  return PROGRAMS[path](case.tree, jnp.float32(case.max_norm))


@every_case
def test_global_norm_is_that_of_the_case(case, path):
  norm = results(case.name, path)["global_norm"]
  assert norm.dtype == jnp.float32 and norm.shape == ()
  np.testing.assert_allclose(norm, case.norm, rtol=1e-6)


@every_case
def test_leaf_norms_are_those_of_the_leaves(case, path):
  for leaf, norm in zip(case.tree, results(case.name, path)["leaf_norms"], strict=True):
    np.testing.assert_allclose(norm, oracle.to_norm_dtype(leaf, oracle.norm([leaf])), rtol=1e-6)


@every_case
def test_global_clip_gives_the_updates_of_the_case(case, path):
  check_clipped(case, case.tree, results(case.name, path)["global_clip"])


@every_case
def test_scaling_in_xla_behind_the_native_norm_gives_the_updates_of_the_case(case, monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  check_clipped(case, case.tree, results(case.name, "native")["scaled_in_xla"])


@every_case
def test_clip_tree_gives_the_updates_and_the_norm_of_the_case(case, path):
  updates, norm = results(case.name, path)["clip_tree"]
  check_clipped(case, case.tree, updates)
  np.testing.assert_allclose(norm, case.norm, rtol=1e-6)


@every_case
def test_the_monitor_sees_the_norm_of_the_case_and_whether_it_was_clipped(case, path):
  metrics = results(case.name, path)["metrics"]
  np.testing.assert_allclose(metrics["global_norm"], case.norm, rtol=1e-6)
  assert metrics["clipped_steps"] == int(case.norm > case.max_norm)


@every_case
def test_per_tensor_clip_gives_each_leaf_what_it_would_get_alone(case, path):
  for leaf, update in zip(case.tree, results(case.name, path)["per_tensor_clip"], strict=True):
    assert update.dtype == leaf.dtype
    want = oracle.clip([leaf], case.max_norm)[0]
    rtol = 2**-8 if leaf.dtype.itemsize == 2 else 1e-6
    np.testing.assert_allclose(np.asarray(update, np.float64), np.asarray(want, np.float64), rtol=rtol)


@every_case
def test_eagerly_the_updates_and_the_norm_are_the_same_bits_as_under_jit(case, monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  compiled = results(case.name, "native")
  tx = ogc.global_clip(case.max_norm)  # here a Python number; traced in the program
  assert oracle.same_bits(tx.update(case.tree, tx.init(case.tree))[0], compiled["global_clip"])
  assert oracle.same_bits(ogc.clip_tree(case.tree, case.max_norm), compiled["clip_tree"])
  assert oracle.same_bits(ogc.global_norm(case.tree), compiled["global_norm"])


def test_36_million_float32_ones_are_all_counted(path):
  updates, norm = jax.jit(ogc.clip_tree, donate_argnums=0)(jnp.ones(36_000_000, jnp.float32), 60.0)
  assert norm == 6000
  np.testing.assert_allclose([updates.min(), updates.max()], 0.01, rtol=1e-6)


def test_1024_bfloat16_leaves_of_one_element_have_norm_32(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  tree = [bf16(1, value=1)] * 1024
  updates, norm = jax.jit(ogc.clip_tree)(tree, 1.0)
  assert norm == 32
  assert all(update.dtype == jnp.bfloat16 for update in updates)
  assert oracle.norm(updates) == 1


def test_64_bfloat16_leaves_of_one_element_have_norm_8(path):
  updates, norm = jax.jit(ogc.clip_tree)([bf16(1, value=1)] * 64, 1.0)
  assert norm == 8
  assert oracle.norm(updates) == 1


NUMBERS = [1.0, 1, np.float32(1), np.float64(1), np.int32(1), np.asarray(1.0), jnp.float32(1), jnp.bfloat16(1),
           jnp.asarray(1)]


@pytest.mark.parametrize("one", NUMBERS, ids=lambda x: f"{type(x).__name__}-{np.asarray(x).dtype}")
def test_max_norm_may_be_any_kind_of_number(one, path):
  tree = {"w": jnp.array([3, 4], jnp.bfloat16)}
  updates, _ = ogc.global_clip(one).update(tree, None)
  assert updates["w"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(updates["w"].astype(np.float32), [0.6015625, 0.80078125])
  np.testing.assert_array_equal(ogc.clip_tree(tree, one)[0]["w"].astype(np.float32), [0.6015625, 0.80078125])


@pytest.mark.parametrize("options", [{}, {"per_leaf": True}, {"scale_stage": "xla"}], ids=str)
def test_complex_leaves_count_by_their_modulus(options, path):
  tree = {"z": np.array([1 + 1j, 1 - 1j], np.complex64)}
  updates, metrics = programs.clip(path, **options)(tree, 1.0)
  assert metrics["global_norm"] == 2
  assert updates["z"].dtype == jnp.complex64
  np.testing.assert_array_equal(updates["z"], [0.5 + 0.5j, 0.5 - 0.5j])


def test_the_norms_of_complex_leaves_are_real(path):
  norm, leaf_norms = programs.norms(path)({"z": np.array([3 + 4j], np.complex64)})
  assert norm == 5 and leaf_norms["z"] == 5 and norm.dtype == jnp.float32


@pytest.mark.parametrize("max_norm", [0.0, 1e-39])
@pytest.mark.parametrize("scale", [1.0, 2.0**15])
def test_a_norm_below_the_normal_numbers_is_zero_and_divides_nothing(scale, max_norm, path):
  tree = {"w": np.full(4, 1e-39 * scale, np.float32)}
  updates, metrics = programs.clip(path, loss_scale=scale)(tree, max_norm)
  assert metrics["global_norm"] == 0 and metrics["clip_factor"] == 1 and metrics["clipped_steps"] == 0
  if path == "native" and scale == 1:
    assert oracle.same_bits(updates, tree)
  # XLA flushes subnormals to zero on some of its threads and not on others.
  assert np.allclose(np.asarray(updates["w"], np.float64), 1e-39, rtol=1e-5, atol=0) or not np.any(updates["w"])
  tx = ogc.global_clip(max_norm, loss_scale=scale)
  gradient = jax.jit(jax.grad(lambda x: tx.update(x, optax.EmptyState())[0]["w"].sum()))(tree)
  np.testing.assert_allclose(gradient["w"], 1 / scale, rtol=1e-6)


@pytest.mark.parametrize("tree, max_norm", [([0.3, 0.4], 10), ([3.0, 4.0], 5), ([3.0, 4.0], np.inf)])
def test_at_or_below_the_threshold_nothing_changes_and_nothing_counts_as_clipped(tree, max_norm, path):
  tree = [jnp.float32(x) for x in tree]
  updates, metrics = programs.clip(path)(tree, float(max_norm))
  assert oracle.same_bits(updates, tree)
  assert metrics["clipped_steps"] == 0 and metrics["clip_factor"] == 1


def test_clipping_by_norm_keeps_the_direction_where_clipping_by_value_does_not(path):
  tree = {"w": jnp.array([6.0, 8.0])}
  np.testing.assert_allclose(programs.clip(path)(tree, 5.0)[0]["w"], [3, 4], rtol=1e-6)
  by_value = optax.clip(5.0).update(tree, optax.EmptyState())[0]
  np.testing.assert_array_equal(by_value["w"], [5, 5])
  np.testing.assert_allclose(ogc.global_norm(by_value), np.sqrt(50), rtol=1e-6)


@pytest.mark.parametrize("compiled", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_norm_of_the_output_is_that_of_what_came_out(compiled, path):
  def clip_and_measure(tree):
    return ogc.global_norm(ogc.global_clip(1.0).update(tree, None)[0])
  np.testing.assert_allclose(compiled(clip_and_measure)([jnp.float32(30), jnp.float32(40)]), 1.0, rtol=1e-6)


@pytest.mark.parametrize("magnitude", [1e200, 1e-200, 1e300, 1e-300, 1.0])
def test_float64_leaves_of_any_magnitude_are_measured_and_clipped(magnitude, path, x64):
  tree = [np.full(4, magnitude), np.full(2, 0.5, np.float32)]
  updates, metrics = programs.clip(path)(tree, 1e-3)
  assert metrics["global_norm"].dtype == jnp.float64
  np.testing.assert_allclose(metrics["global_norm"], float(oracle.norm(tree)), rtol=1e-15)
  assert updates[0].dtype == jnp.float64 and updates[1].dtype == jnp.float32
  for update, exact in zip(updates, oracle.clip(tree, 1e-3), strict=True):
    np.testing.assert_allclose(update, np.asarray(exact, np.float64), rtol=1e-6 if update.dtype == np.float32 else 1e-15,
                               atol=1e-37)


@every_case
def test_both_paths_find_the_same_norm(case, monkeypatch):
  norms = []
  for backend in ("native", "reference"):
    monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", backend)
    norms.append(results(case.name, backend)["global_norm"])
  np.testing.assert_allclose(*norms, rtol=1e-6)

