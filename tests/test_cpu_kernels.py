"""Do both instruction sets of the CPU kernels give the same bits, and stay within a chunk?"""

import pathlib
import shutil

import processes
import pytest

HERE = pathlib.Path(__file__).parent
SOURCES = HERE.parent / "ffi"
# As CMakeLists.txt has them.
TABLES = {"kCpuKernelsBaseline": [], "kCpuKernelsAvx2": ["-march=x86-64-v3"]}


def compiled(folder, flags):
  common = ["g++", "-std=c++17", "-O3", "-ffp-contract=off", "-Wno-psabi", *flags, "-I", SOURCES]
  objects = []
  for table, options in TABLES.items():
    objects.append(folder / f"{table}.o")
    run([*common, *options, f"-DOGC_CPU_KERNELS={table}", "-c", SOURCES / "kernels_cpu.cc", "-o", objects[-1]])
  program = folder / "check"
  run([*common, HERE / "cpu_kernels" / "check.cc", *objects, "-o", program])
  return program


def run(command):
  done = processes.run(command)
  if done.returncode == 77:
    pytest.skip("this machine has no AVX2")
  assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("flags", [[], ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]],
                         ids=["plain", "sanitized"])
def test_both_instruction_sets_give_the_same_bits(flags, tmp_path):
  if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the kernels with")
  run([compiled(tmp_path, flags)])
