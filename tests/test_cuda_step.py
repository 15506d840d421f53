"""The CUDA kernel of a fused step by itself: its results at every alignment and in every order, its launches, what the
sanitizers and nvcc say of it, and what its handler refuses. (test_cuda_cases runs it in whole steps.)"""

import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax_globalclip as ogc
import processes
import pytest
from cuda_on_cpu import build
from optax_globalclip import _native

KERNELS = build.SOURCES / "adamw_cuda.cu"


@pytest.fixture(scope="module")
def cuda():
  with build.cuda_on_cpu() as library:
    yield library


@functools.cache
def program(*flags):
  return build.check_program("check_step", list(flags), KERNELS, "check_step.cc")


@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_extended_precision_and_bitwise_at_every_alignment(seed):
  processes.output([program(), seed, 40000])


def test_the_order_in_which_threads_run_changes_no_bit():
  digests = {processes.output([program(), 3, 20000], CUDA_ON_CPU_ORDER=order) for order in ("forward", "reverse", "random:1")}
  assert len(digests) == 1


def test_nothing_is_accessed_out_of_bounds_or_misaligned_and_nothing_is_undefined():
  sanitized = program("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
  done = processes.run([sanitized, 1, 20000], timeout=900)
  assert done.returncode == 0, done.stderr[-4000:]


def run_with_threads(kernels, name):
  threads = build.check_program(name, ["-fsanitize=thread", "-DCUDA_ON_CPU_THREADS"], kernels, "check_step.cc")
  return processes.run([threads, 1, 2000, 1], timeout=900, TSAN_OPTIONS="history_size=7 exitcode=66")


def test_no_thread_races_another():
  done = run_with_threads(KERNELS, "check_step_threads")
  assert done.returncode == 0, done.stderr[-4000:]


def test_threads_that_take_the_same_elements_are_seen(tmp_path):
  text = KERNELS.read_text()
  assert text.count("at = scalars + threadIdx.x;") == 1
  (tmp_path / "adamw_cuda.cu").write_text(text.replace("at = scalars + threadIdx.x;", "at = scalars + threadIdx.x / 2;"))
  done = run_with_threads(tmp_path / "adamw_cuda.cu", "check_step_race")
  assert done.returncode == 66 and "data race" in done.stderr, done.stderr[-4000:]


def test_148_leaves_are_three_launches(cuda):
  tx = ogc.clipped_adamw(0.1, 1.0)
  params = [jnp.ones(5)] * 148
  step, state = jax.jit(tx.step), tx.init(params)
  jax.block_until_ready(step(params, state, params))
  before = cuda.cuda_on_cpu_launches()
  jax.block_until_ready(step(params, state, params))
  assert cuda.cuda_on_cpu_launches() - before == 3


def call(leaves, results=None, decays=(1,), op=np.ones((1, 3), np.float32), coefficients=np.ones(10, np.float32)):
  like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves[len(decays):]]
  target = jax.ffi.ffi_call(_native.target_name("adamw", "cuda"), like if results is None else results)
  return jax.jit(lambda *args: target(*args, decays=np.asarray(decays, np.int32), skips=False))(op, coefficients, *leaves)


def test_more_leaves_than_a_table_holds_take_another_launch_and_results_may_lie_apart(cuda):
  leaves = [jnp.full(1 + i % 3, 1.0) for i in range(700)]
  before = cuda.cuda_on_cpu_launches()
  out = jax.block_until_ready(call(leaves * 4, decays=(1,) * 700))
  assert cuda.cuda_on_cpu_launches() - before == 2
  for leaf in out[:700]:
    np.testing.assert_array_equal(leaf, np.full(leaf.shape, 2.0))  # b1 m + (1 - b1) g, all of them 1
  assert leaves[0][0] == 1


F32 = np.ones(3, np.float32)


@pytest.mark.parametrize("arguments, words", [
    (dict(leaves=[F32, F32, F32, np.ones(4, np.float32)]), ("p of leaf 0", "a real leaf of 3 elements", r"shape \[4\]")),
    (dict(leaves=[F32, np.ones(3, np.int32), F32, F32]), ("float32", r"shape \[3\]")),
    (dict(leaves=[F32, np.ones(3, np.complex64), F32, F32]), ("m of leaf 0", "a real leaf of 3 elements")),
    (dict(leaves=[F32] * 3), ("operands and results", "expected 4 and 3", "got 3 and 2")),
    (dict(leaves=[F32] * 4, op=np.ones((2, 3), np.float32)), ("op", "with 3 elements", r"shape \[2,3\]")),
    (dict(leaves=[F32] * 4, coefficients=np.ones(9, np.float32)), ("coefficients", "with 10 elements", r"shape \[9\]")),
])
def test_errors_name_operand_expected_and_got(cuda, arguments, words):
  with pytest.raises(jax.errors.JaxRuntimeError) as error:
    jax.block_until_ready(call(**arguments))
  for word in ("adamw", *words):
    assert re.search(word, str(error.value))


def test_an_error_of_the_runtime_names_the_kernel(cuda, monkeypatch):
  for function, what in [("cudaLaunchKernelEx", "k_adamw_step"), ("cudaGetLastError", "k_adamw_step"),
                         ("cudaMemcpyAsync", "copy of a leaf that is not donated")]:
    monkeypatch.setenv("CUDA_ON_CPU_FAIL", function)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"adamw: {what}: cudaErrorInvalidValue"):
      jax.block_until_ready(call([F32] * 4))


@pytest.mark.parametrize("architecture", ["90", *(pytest.param(a, marks=pytest.mark.slow) for a in ("75", "80", "86", "89", "100", "120"))])
def test_it_neither_spills_nor_uses_a_stack_and_loads_all_four_before_it_computes(architecture, tmp_path):
  if build.nvcc() is None:
    pytest.skip("no nvcc; BUILD.md says which wheels bring it")
  cubin = tmp_path / "adamw.cubin"
  done = processes.run([build.nvcc(), "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-Werror",
                        "all-warnings", "-cubin", "-o", cubin, KERNELS])
  assert done.returncode == 0, done.stderr[-4000:]
  used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
                    done.stdout + done.stderr, re.DOTALL)
  assert len(used) == 2
  for stack, stores, loads, registers in used:
    assert (stack, stores, loads) == ("0", "0", "0") and int(registers) <= 96
  disassembler = shutil.which("nvdisasm")
  if architecture == "90" and disassembler:
    code = processes.output([disassembler, "-c", cubin])
    assert code.count("LDG.E.128") >= 8 and code.count("STG.E.128") >= 6  # of each kernel four loads and three stores
