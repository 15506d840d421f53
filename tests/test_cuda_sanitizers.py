"""The CUDA kernels on the host under the sanitizers: no race between barriers, no access out of bounds, nothing
undefined; and the harness sees a barrier that is missing."""

import re

import processes
import pytest
from cuda_on_cpu import build

slow = pytest.mark.slow  # ThreadSanitizer needs an OS thread for each CUDA thread: seconds a launch
BARRIER = "  __syncthreads();"


def source(thread_chunks=1, warp_chunks=2):
  """kernels_cuda.cu with every way to sum a leaf's partials within reach of a small leaf."""
  text = (build.SOURCES / "kernels_cuda.cu").read_text()
  for name, value in (("kThreadChunks", thread_chunks), ("kWarpChunks", warp_chunks)):
    text, found = re.subn(rf"(constexpr uint32_t {name} = )\d+;", rf"\g<1>{value};", text)
    assert found == 1, f"kernels_cuda.cu has no {name}"
  return text


def without_barrier(which):
  parts = source().split(BARRIER)
  return BARRIER.join(parts[:which + 1]) + "  " + BARRIER.join(parts[which + 1:])


def compiled(tmp_path, name, text, flags):
  kernels = tmp_path / "kernels_cuda.cu"
  kernels.write_text(text)
  return build.check_program(name, flags, kernels)


def run(program, *args, **variables):
  return processes.run([program, *args], timeout=900, **variables)


def run_with_threads(tmp_path, text, elements):
  program = compiled(tmp_path, "check_threads", text, ["-fsanitize=thread", "-DCUDA_ON_CPU_THREADS"])
  return run(program, 1, elements, 1, TSAN_OPTIONS="history_size=7 exitcode=66")


def test_nothing_is_accessed_out_of_bounds_or_misaligned_and_nothing_is_undefined(tmp_path):
  program = compiled(tmp_path, "check_addresses", source(),
                     ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"])
  done = run(program, 1, 50000)
  assert done.returncode == 0, done.stderr[-4000:]


def test_no_thread_races_another(tmp_path):
  done = run_with_threads(tmp_path, source(), 40000)
  assert done.returncode == 0, done.stderr[-4000:]


def number_of_barriers():
  return source().count(BARRIER)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=slow), pytest.param(2, marks=slow)])
def test_a_barrier_taken_away_is_missed(tmp_path, which):
  assert number_of_barriers() == 3, "one test for each barrier"
  done = run_with_threads(tmp_path, without_barrier(which), 50000)
  assert done.returncode == 66 and "data race" in done.stderr, done.stderr[-4000:]


@slow
def test_a_vote_that_is_no_barrier_is_missed(tmp_path):
  text = source(warp_chunks=2048)
  assert text.count("__syncthreads_or(too_long)") == 1
  done = run_with_threads(tmp_path, text.replace("__syncthreads_or(too_long)", "too_long"), 50000)
  assert done.returncode == 66 and "data race" in done.stderr, done.stderr[-4000:]


@slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_no_thread_races_another_in_other_trees(tmp_path, seed):
  program = compiled(tmp_path, "check_threads", source(), ["-fsanitize=thread", "-DCUDA_ON_CPU_THREADS"])
  done = run(program, seed, 10000, 4, TSAN_OPTIONS="history_size=7 exitcode=66")
  assert done.returncode == 0, done.stderr[-4000:]
