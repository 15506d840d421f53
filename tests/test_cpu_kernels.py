"""Do both instruction sets of the CPU kernels give the same bits, and stay within a chunk?"""

import pathlib
import shutil

import processes
import pytest

HERE = pathlib.Path(__file__).parent
SOURCES = HERE.parent / "ffi"
# As CMakeLists.txt has them.
TABLES = {"Baseline": [], "Avx2": ["-march=x86-64-v3"]}


def compiled(folder, flags, kernels, check):
  common = ["g++", "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", *flags, "-I", SOURCES]
  objects = []
  for table, options in TABLES.items():
    objects.append(folder / f"{table}.o")
    names = [f"-DOGC_CPU_KERNELS=kCpuKernels{table}", f"-DOGC_ADAMW_KERNELS=kAdamwKernels{table}"]
    run([*common, *options, *names, "-c", SOURCES / kernels, "-o", objects[-1]])
  program = folder / "check"
  run([*common, HERE / "cpu_kernels" / check, *objects, "-o", program])
  return program


def run(command):
  done = processes.run(command)
  if done.returncode == 77:
    pytest.skip("this machine has no AVX2")
  assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]],
                         ids=["plain", "sanitized"])
@pytest.mark.parametrize("kernels, check", [("kernels_cpu.cc", "check.cc"), ("adamw_cpu.cc", "check_step.cc")],
                         ids=["clip", "step"])
def test_both_instruction_sets_give_the_same_bits(flags, kernels, check, tmp_path):
  if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the kernels with")
  run([compiled(tmp_path, flags, kernels, check)])
