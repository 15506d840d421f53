"""Of any tree the norm is that of extended precision: to a unit in the last place natively, to 1e-6 in the reference."""

import jax
import numpy as np
import optax_globalclip as ogc
import oracle
import programs
import pytest
import trees
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import on
from trees import STRUCTURE, WIDE_STRUCTURE


def off(norm, want):
  """In units of the last place; of a norm below the normal numbers, which counts as 0, whether it does."""
  if norm.dtype.type(min(want, 1)) < np.finfo(norm.dtype).tiny:
    return 0 if norm == 0 else np.inf
  return oracle.ulps(norm, want)


def check(norm, tree, ulps):
  want = oracle.norm(tree)
  assert norm.dtype == oracle.norm_dtype(tree) and norm.shape == ()
  if np.isinf(norm):
    assert want > np.finfo(norm.dtype).max
  else:
    assert off(norm, want) <= ulps, (norm, want)


def check_all(norms, tree, ulps):
  check(norms[0], tree, ulps)
  for norm, leaf in zip(jax.tree.leaves(norms[1]), jax.tree.leaves(tree), strict=True):
    # A leaf's norm has the dtype of the tree's.
    want = oracle.norm([leaf])
    assert norm.dtype == oracle.norm_dtype(tree)
    assert off(norm, want) <= ulps or np.isinf(norm) and want > np.finfo(norm.dtype).max


@settings(max_examples=35)
@given(trees.trees())
def test_native_norms_are_within_one_unit_in_the_last_place(tree):
  with on("native"):
    check_all(programs.norms("native")(tree), tree, 1)


@settings(max_examples=200)
@given(trees.of_structure(*STRUCTURE))
def test_native_norms_of_one_structure_are_within_one_unit_in_the_last_place(tree):
  with on("native"):
    check_all(programs.norms("native")(tree), tree, 1)


@settings(max_examples=100)
@given(trees.of_structure(*STRUCTURE, centers=st.floats(0.25, 1)))
def test_reference_norms_are_within_1e_6(tree):
  with on("reference"):
    norm, norms = programs.norms("reference")(tree)
  for got, leaves in [(norm, tree), *zip(norms, ([leaf] for leaf in tree), strict=True)]:
    want = oracle.norm(leaves)
    if np.isinf(got):
      assert want > np.finfo(np.float32).max
    else:
      np.testing.assert_allclose(np.longdouble(got), want, rtol=1e-6)


@settings(max_examples=60)
@given(trees.of_structure(*WIDE_STRUCTURE))
def test_native_float64_norms_are_within_four_units_in_the_last_place(tree):
  # The CUDA kernels, which run these cases too, add 32 elements of a thread uncompensated: 1.11 units were seen.
  with on("native"), jax.enable_x64(True):
    check_all(programs.norms("native")(tree), tree, 4)


@settings(max_examples=60)
@given(trees.of_structure(*WIDE_STRUCTURE, centers=st.floats(0.05, 1)))
def test_reference_float64_norms_are_within_1e_6(tree):
  with on("reference"), jax.enable_x64(True):
    norm, _ = programs.norms("reference")(tree)
  assert norm.dtype == np.float64
  want = oracle.norm(tree)
  assert np.isinf(norm) and want > np.finfo(np.float64).max or abs(np.longdouble(norm) - want) <= 1e-6 * want


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.sampled_from([100_000, 262_144, 1_000_001]), st.floats(-100, 100))
def test_the_norm_of_many_elements_keeps_its_last_bit(seed, size, exponent):
  leaf = (np.random.default_rng(seed).standard_normal(size) * 2.0**exponent).astype(np.float32)
  with on("native"):
    check(ogc.global_norm([leaf]), [leaf], 1)


@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_float64_norm_of_equal_elements_keeps_all_but_its_last_bits(value, dtype):
  with on("native"), jax.enable_x64(True):
    tree = [np.full(20_000, value, dtype), np.zeros(1)]
    assert oracle.ulps(ogc.global_norm(tree), oracle.norm(tree)) <= 4


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.floats(-900, 900))
def test_the_norm_of_many_float64_elements_keeps_all_but_its_last_bits(seed, exponent):
  with on("native"), jax.enable_x64(True):
    leaf = np.random.default_rng(seed).standard_normal(300_000) * 2.0**exponent
    check(ogc.global_norm([leaf]), [leaf], 4)


@settings(max_examples=40)
@given(trees.of_structure(*STRUCTURE), st.permutations(range(len(STRUCTURE))))
def test_the_order_of_the_leaves_moves_the_norm_by_a_unit_at_most(tree, order):
  with on("native"):
    one, other = (ogc.global_norm(t) for t in (tree, [tree[i] for i in order]))
  assert one == other or abs(np.float64(one) - np.float64(other)) <= np.spacing(max(one, other))


@settings(max_examples=60)
@given(trees.of_structure(*STRUCTURE), st.integers(0, 4), st.sampled_from([np.nan, np.inf, -np.inf]), st.data())
def test_one_nonfinite_element_is_never_lost(tree, which, bad, data):
  which = [i for i, leaf in enumerate(tree) if leaf.size][which % 4]
  leaf = tree[which].copy()
  leaf.reshape(-1)[data.draw(st.integers(0, leaf.size - 1))] = bad
  with on("native"):
    norm, norms = programs.norms("native")([leaf if i == which else other for i, other in enumerate(tree)])
  assert not np.isfinite(norm) and not np.isfinite(norms[which])
  assert all(np.isfinite(norms[i]) or oracle.norm([tree[i]]) > 3e38 for i in range(len(tree)) if i != which)
