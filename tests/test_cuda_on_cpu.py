"""The CUDA kernels and handlers, compiled for the host and called by XLA: trees of every kind, programs of every shape,
errors. What runs on a GPU is the same source."""

import ctypes
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax_globalclip as ogc
import oracle
import processes
import pytest
from cuda_on_cpu import build
from optax_globalclip import _native

pytestmark = pytest.mark.usefixtures("cuda")


@pytest.fixture(scope="module")
def cuda():
  with build.cuda_on_cpu() as library:
    yield library


def launches_of(library, function, *args):
  before = library.cuda_on_cpu_launches()
  jax.block_until_ready(function(*args))
  return library.cuda_on_cpu_launches() - before


def tree_of(sizes, dtypes, seed=0, magnitude=1.0):
  rng = np.random.default_rng(seed)
  return [jnp.asarray((rng.standard_normal(size) * magnitude).astype(np.float32)).astype(dtype)
          for size, dtype in zip(sizes, dtypes, strict=True)]


def check_clip(tree, max_norm):
  """One program's norm, leaf norms and clipped leaves against the oracle."""
  def program(tree):
    return ogc.clip_tree(tree, max_norm), ogc.leaf_norms(tree)
  (clipped, norm), norms = jax.jit(program)(tree)
  # A float32 norm is the sum's root rounded once; a float64 one carries the roundings of its own sum.
  most = 1 if norm.dtype == np.float32 else 2
  assert oracle.ulps(norm, oracle.norm(tree)) <= most
  for leaf, leaf_norm in zip(tree, norms, strict=True):
    assert oracle.ulps(leaf_norm, oracle.norm([leaf])) <= most
  for got, want in zip(clipped, oracle.clip(tree, max_norm), strict=True):
    assert np.all(oracle.ulps(got, want) <= 3)


# Elements that a tile, a chunk, a warp's share and a thread's begin and end with, and those on either side.
SIZES = [0, 1, 3, 7, 8, 255, 1024, 4095, 4096, 4097, 8193, 16384, 16385, 32768, 32769, 70001]
DTYPES = ["float16", "bfloat16", "float32", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_leaves_of_every_size_are_summed_and_scaled_to_the_last_element(dtype):
  check_clip(tree_of(SIZES, [dtype] * len(SIZES)), 1.0)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_wide_leaves_of_every_size_are_summed_and_scaled_to_the_last_element(dtype, x64):
  check_clip(tree_of(SIZES, [dtype] * len(SIZES)), 1.0)


def test_a_float64_leaf_makes_the_norm_of_narrow_leaves_as_exact(x64):
  check_clip(tree_of([5000, 5001, 5002, 3], ["float16", "bfloat16", "float32", "float64"]), 1.0)


elements = st.floats(-1, 1, width=32)
magnitudes = st.sampled_from([1.0, 1e-3, 1e3, 1e-18, 1e18, 1e-30, 3e30])


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(st.tuples(st.integers(0, 9000), st.sampled_from(DTYPES)), min_size=1, max_size=5),
                  magnitudes, st.integers(0, 2**32 - 1), st.sampled_from([0.5, 1.0, 1e10]))
def test_random_trees_clip_as_the_oracle_says(shape, magnitude, seed, max_norm):
  if any(dtype == "float16" for _, dtype in shape):
    magnitude = min(max(magnitude, 1e-3), 1e3)
  tree = tree_of([size for size, _ in shape], [dtype for _, dtype in shape], seed, magnitude)
  clipped, norm = ogc.clip_tree(tree, max_norm)
  assert oracle.ulps(norm, oracle.norm(tree)) <= 1
  smallest = np.longdouble(np.finfo(np.float32).tiny)
  for got, want in zip(clipped, oracle.clip(tree, max_norm), strict=True):
    assert np.all((oracle.ulps(got, want) <= 3) | (np.abs(want) < smallest))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-20, 1e-19, 1e18, 1e19, 1e30, 1e38])
def test_sums_whose_squares_float32_does_not_hold_are_taken_in_float64(dtype, magnitude):
  tree = [jnp.full(1000, magnitude, dtype), jnp.full(3, magnitude * 3, dtype)]
  norm = ogc.global_norm(tree)
  assert np.isinf(norm) == (oracle.norm(tree) > np.finfo(np.float32).max)
  assert np.isinf(norm) or oracle.ulps(norm, oracle.norm(tree)) <= 1


def test_one_large_element_among_many_small_ones_keeps_them_in_the_sum():
  leaf = np.full(100_001, 1e-3, np.float32)
  leaf[50_000] = 30.0
  assert oracle.ulps(ogc.global_norm([jnp.asarray(leaf)]), oracle.norm([leaf])) <= 1


def test_clip_tree_is_three_launches(cuda):
  clip = jax.jit(lambda tree: ogc.clip_tree(tree, 1.0))
  tree = [jnp.ones(5)] * 150
  clip(tree)
  assert launches_of(cuda, clip, tree) == 3


def test_a_norm_of_as_many_leaves_as_a_table_holds_is_two_launches(cuda):
  norm = jax.jit(ogc.global_norm)
  tree = [jnp.ones(5)] * 1632
  norm(tree)
  assert launches_of(cuda, norm, tree) == 2


@pytest.mark.slow
def test_3000_leaves_take_a_launch_a_stage_for_each_table(cuda):
  tree = [jnp.full(1 + i % 3, 1 + i % 7, "bfloat16" if i % 2 else "float32") for i in range(3000)]
  norm = jax.jit(ogc.global_norm)
  assert launches_of(cuda, norm, tree) == launches_of(cuda, ogc.leaf_report, tree) == 4
  assert oracle.ulps(norm(tree), oracle.norm(tree)) <= 1
  leaf_norms = {row.path: np.float32(row.norm) for row in ogc.leaf_report(tree).rows}
  assert all(oracle.ulps(leaf_norms[str(i)], oracle.norm([leaf])) <= 1 for i, leaf in enumerate(tree))
  transform = ogc.global_clip(1.0, scale_stage="kernel")
  updates, _ = jax.jit(transform.update)(tree, transform.init(tree))
  for got, want in zip(updates, oracle.clip(tree, 1.0), strict=True):
    assert np.all(oracle.ulps(got, want) <= 3)


def test_two_calls_in_one_program_keep_their_workspaces_apart():
  a, b = tree_of([40000], ["float32"], 1), tree_of([40000], ["float32"], 2)
  @jax.jit
  def both(a, b):
    return ogc.clip_tree(a, 1.0), ogc.clip_tree(b, 2.0)
  (clipped_a, norm_a), (clipped_b, norm_b) = both(a, b)
  assert oracle.ulps(norm_a, oracle.norm(a)) <= 1 and oracle.ulps(norm_b, oracle.norm(b)) <= 1
  assert oracle.ulps(ogc.global_norm(clipped_a), 1) <= 2 and oracle.ulps(ogc.global_norm(clipped_b), 2) <= 2


def test_calls_in_a_scan_see_each_steps_data():
  steps = jnp.asarray([[3.0, 4.0], [0.0, 0.0], [30.0, 40.0], [np.nan, 1.0]])
  @jax.jit
  def run(steps):
    return jax.lax.scan(lambda carry, x: (carry, ogc.clip_tree([x], 1.0)), 0, steps)[1]
  (clipped,), norms = run(steps)
  np.testing.assert_array_equal(norms, [5, 0, 50, np.nan])
  np.testing.assert_allclose(clipped, [[0.6, 0.8], [0, 0], [0.6, 0.8], [np.nan, np.nan]], rtol=1e-6)


@pytest.mark.parametrize("branch, want", [(True, 1.0), (False, 2.0)])
def test_calls_in_both_branches_of_a_cond(branch, want):
  @jax.jit
  def run(branch, x):
    return jax.lax.cond(branch, lambda x: ogc.clip_tree(x, 1.0), lambda x: ogc.clip_tree(x, 2.0), x)
  clipped, norm = run(branch, [jnp.asarray([6.0, 8.0])])
  assert norm == 10
  np.testing.assert_allclose(clipped[0], [0.6 * want, 0.8 * want], rtol=1e-6)


def test_below_the_threshold_every_bit_comes_back():
  bits = np.arange(1 << 16, dtype=np.uint16)
  halves = jax.lax.bitcast_convert_type(jnp.asarray(bits[(bits & 0x7c00) != 0x7c00]), jnp.float16)
  clipped, _ = ogc.clip_tree([halves], np.inf)
  np.testing.assert_array_equal(np.asarray(clipped[0]).view(np.uint16), np.asarray(halves).view(np.uint16))


def test_a_tree_that_is_not_donated_is_left_as_it_was():
  tree = tree_of([5000, 3], ["float32", "bfloat16"])
  before = [np.asarray(leaf).copy() for leaf in tree]
  jax.block_until_ready(jax.jit(lambda tree: ogc.clip_tree(tree, 0.5))(tree))
  for leaf, copy in zip(tree, before, strict=True):
    np.testing.assert_array_equal(np.asarray(leaf), copy)


def test_nonfinite_elements_are_counted_by_leaf():
  leaf = np.ones(40000, np.float32)
  leaf[[0, 5, 39999]] = [np.nan, np.inf, -np.inf]
  tree = {"a": jnp.ones(3), "b": jnp.asarray(leaf), "c": jnp.asarray(leaf[:10], jnp.bfloat16)}
  counts = {row.path: row.nonfinite for row in ogc.leaf_report(tree).rows}
  assert [count for _, count in sorted(counts.items())] == [0, 3, 2]


def call(stage, results, *args, **attributes):
  target = _native.target_name(stage, "cuda")
  return jax.jit(lambda *args: jax.ffi.ffi_call(target, results)(*args, **attributes))(*args)


def workspace_bytes(library, leaf_bytes):
  return library.optax_globalclip_workspace_bytes(
      ctypes.c_int64(len(leaf_bytes)), (ctypes.c_int64 * len(leaf_bytes))(*leaf_bytes))


CHUNK_BYTES = 64 * 1024
PARTIAL_BYTES = 48  # a SumSquares, of one chunk
TOTAL_BYTES = 56  # a Total, of one leaf


@pytest.mark.parametrize("leaf_bytes", [
    [], [0], [2], [CHUNK_BYTES - 2], [CHUNK_BYTES], [CHUNK_BYTES + 2], [0, 5 * CHUNK_BYTES, 6, 2 * CHUNK_BYTES - 4],
    [8] * 3000, [2**33 + 16, 4]], ids=lambda sizes: f"{len(sizes)} leaves, {sum(sizes)} bytes")
def test_the_workspace_holds_a_partial_for_each_chunk_and_a_total_for_each_leaf(cuda, leaf_bytes):
  chunks = sum(len(range(0, size, CHUNK_BYTES)) for size in leaf_bytes)
  assert workspace_bytes(cuda, leaf_bytes) == chunks * PARTIAL_BYTES + len(leaf_bytes) * TOTAL_BYTES


ATTRIBUTES = dict(per_leaf=False, leaf_norms=True, extremes=False, on_nonfinite=np.int32(0))
EVERY_LEAF_COUNTS = np.zeros(0, np.int32)


def norm_results(workspace, tree, **attributes):
  return (*_native.norm_results(tree, **ATTRIBUTES | attributes), jax.ShapeDtypeStruct((workspace,), jnp.uint8))


def error_of_norm(leaf, workspace, **attributes):
  one = np.float32(1)
  with pytest.raises(jax.errors.JaxRuntimeError) as error:
    call("norm", norm_results(workspace, [np.ones(3, np.float32)]), EVERY_LEAF_COUNTS, one, one, leaf,
         **ATTRIBUTES | attributes)
  return str(error.value)


@pytest.mark.parametrize("dtype, missing, words", [
    (np.float32, 1, ("norm", "workspace", "with {needed} elements", "shape [{given}]")),
    (np.int32, 0, ("norm", "leaf 0", "float32", "shape [3]")),
])
def test_errors_name_target_operand_expected_and_got(cuda, dtype, missing, words):
  leaf = np.ones(3, dtype)
  needed = workspace_bytes(cuda, [leaf.nbytes])
  message = error_of_norm(leaf, needed - missing)
  for word in words:
    assert word.format(needed=needed, given=needed - missing) in message


@pytest.mark.parametrize("attributes, words", [
    (dict(per_leaf=True, leaf_norms=False), ("norm", "leaf_norms", "true beside per_leaf", "false")),
    (dict(leaf_norms=False), ("norm", "rows", "with 3 elements", "shape [2,3]")),
])
def test_errors_name_the_result_that_an_attribute_does_not_fit(cuda, attributes, words):
  leaf = np.ones(3, np.float32)
  message = error_of_norm(leaf, workspace_bytes(cuda, [leaf.nbytes]), **attributes)
  for word in words:
    assert word in message


def clip_apart(library, tree, per_leaf):
  """The clip target with results that are not its operands' memory."""
  *numbers, workspace = norm_results(workspace_bytes(library, [leaf.nbytes for leaf in tree]), tree, per_leaf=per_leaf)
  like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in tree]
  _, _, norms, _, _, *rest = call("clip", (*numbers, *like, workspace), EVERY_LEAF_COUNTS, np.float32(1), np.float32(1),
                                  *tree, **ATTRIBUTES | dict(per_leaf=per_leaf))
  return norms, rest[:-1]


@pytest.mark.parametrize("per_leaf", [False, True])
def test_two_tables_are_clipped_in_one_call_into_other_memory(cuda, per_leaf):
  tree = [jnp.full(1 + i % 3, 1 + i % 7, "bfloat16" if i % 2 else "float32") for i in range(1700)]
  norms, clipped = clip_apart(cuda, tree, per_leaf)
  assert oracle.ulps(norms[0], oracle.norm(tree)) <= 1
  wants = [oracle.clip([leaf], 1.0)[0] for leaf in tree] if per_leaf else oracle.clip(tree, 1.0)
  for leaf, got, want in zip(tree, clipped, wants, strict=True):
    assert np.all(oracle.ulps(got, want) <= 3) and leaf[0] >= 1


def test_an_error_of_a_copy_names_it(cuda, monkeypatch):
  monkeypatch.setenv("CUDA_ON_CPU_FAIL", "cudaMemcpyAsync")
  with pytest.raises(jax.errors.JaxRuntimeError,
                     match="clip: copy of a leaf that is not donated: cudaErrorInvalidValue"):
    clip_apart(cuda, [jnp.ones(3)], False)


@pytest.mark.parametrize("function, words", [
    ("cudaLaunchKernelEx", "clip: k_grad_norm_partial: cudaErrorInvalidValue"),
    ("cudaGetLastError", "clip: k_grad_norm_partial: cudaErrorInvalidValue"),
    ("cudaGetDevice", "clip: k_grad_scale: cudaErrorInvalidValue"),
])
def test_an_error_of_the_runtime_names_the_kernel(function, words, monkeypatch):
  monkeypatch.setenv("CUDA_ON_CPU_FAIL", function)
  with pytest.raises(jax.errors.JaxRuntimeError, match=words):
    jax.block_until_ready(ogc.clip_tree([jnp.ones(3)], 1.0))


@pytest.mark.parametrize("stage", _native._TARGETS)
def test_handlers_may_be_captured_in_a_command_buffer(cuda, stage):
  command_buffer_compatible = 1
  assert cuda.cuda_on_cpu_traits(getattr(cuda, _native.target_name(stage, "cuda"))) == command_buffer_compatible


@functools.cache
def check_program():
  return build.check_program("check", [])


def run_check(*args, **variables):
  return processes.output([check_program(), *args], **variables)


@pytest.mark.parametrize("seed", range(5))
def test_launchers_agree_with_extended_precision_and_bitwise_at_every_alignment(seed):
  run_check(seed, 40000)


def test_the_order_in_which_threads_run_changes_no_bit():
  digests = {run_check(3, 40000, CUDA_ON_CPU_ORDER=order) for order in ("forward", "reverse", "random:1", "random:9")}
  assert len(digests) == 1
