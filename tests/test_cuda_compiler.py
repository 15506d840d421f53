"""What nvcc makes of kernels_cuda.cu: no spills and no stack on any architecture, 16-byte loads in the streaming kernels, and
a library that exports the handlers and needs no CUDA library to load."""

import importlib.util
import pathlib
import re
import shutil

import jax
import processes
import pytest
from cuda_on_cpu import build
from optax_globalclip import _native

KERNELS = ("k_grad_norm_partial", "k_grad_norm_final", "k_grad_scale")


def need_nvcc():
  if build.nvcc() is None:
    pytest.skip("no nvcc; BUILD.md says which wheels bring it")


def nvcc(*args):
  need_nvcc()
  done = processes.run([build.nvcc(), *args])
  assert done.returncode == 0, done.stderr[-4000:]
  return done.stdout + done.stderr


def compiled(architecture):
  """`(machine code, what ptxas reported)`: a file and a text."""
  if f"compute_{architecture}" not in nvcc("--list-gpu-arch").split():
    pytest.skip(f"this nvcc does not know sm_{architecture}")
  kernels = build.SOURCES / "kernels_cuda.cu"
  flags = ["-std=c++17", "-O3", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-Werror", "all-warnings", "-cubin"]
  def make(folder):
    folder.mkdir()
    (folder / "report").write_text(nvcc(*flags, "-o", folder / "kernels.cubin", kernels))
  folder = build.made(f"sm_{architecture}", [kernels], make, by=" ".join([nvcc("--version"), *flags]))
  return folder / "kernels.cubin", (folder / "report").read_text()


def default_architectures():
  """The longest list of CMakeLists.txt."""
  lists = re.findall(r"set\(CMAKE_CUDA_ARCHITECTURES ([^)]*)\)", (build.SOURCES / "CMakeLists.txt").read_text())
  return re.findall(r"\d+", max(lists, key=len))


@pytest.mark.parametrize("architecture", [
    architecture if architecture == "90" else pytest.param(architecture, marks=pytest.mark.slow)
    for architecture in default_architectures()])
def test_kernels_neither_spill_nor_use_a_stack(architecture):
  _, report = compiled(architecture)
  used = re.findall(r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
                    r"(\d+) bytes spill loads.*?Used (\d+) registers", report, re.DOTALL)
  assert {kernel for kernel in KERNELS for name, *_ in used if kernel in name} == set(KERNELS), report
  for name, stack, stores, loads, registers in used:
    assert (stack, stores, loads) == ("0", "0", "0"), name
    # At least three blocks of the streaming kernels on a multiprocessor, of 65,536 registers.
    assert int(registers) <= (128 if "final" in name else 80), (name, registers)


def disassembler():
  wheels = importlib.util.find_spec("nvidia")
  folders = [pathlib.Path(p) for p in wheels.submodule_search_locations] if wheels else []
  found = shutil.which("nvdisasm") or next((p for f in folders for p in f.glob("*/bin/nvdisasm")), None)
  if found is None:
    pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm brings it")
  return found


def machine_code(cubin):
  """Instructions by kernel, in order; labels among them."""
  text = processes.output([disassembler(), "-c", cubin])
  code = {}
  for part in re.split(r"\.section\s+\.text\.", text)[1:]:
    name = next(kernel for kernel in KERNELS if kernel in part.split("\n", 1)[0])
    code.setdefault(name, []).extend(re.findall(r"^\s*(\.L_x_\d+):|/\*[0-9a-f]{4,5}\*/\s+(.*?);", part, re.MULTILINE))
  return code


def loops(code):
  """The bodies of the loops of a kernel, innermost ones among them."""
  instructions, labels = [], {}
  for label, instruction in code:
    if label:
      labels[label] = len(instructions)
    else:
      instructions.append(instruction)
  for end, instruction in enumerate(instructions):
    target = re.search(r"BRA.*?(\.L_x_\d+)", instruction)
    if target and labels.get(target.group(1), end) < end:
      yield instructions[labels[target.group(1)]:end]


@pytest.mark.parametrize("kernel, dtypes", [("k_grad_norm_partial", 4), ("k_grad_scale", 4)])
def test_streaming_kernels_have_four_16_byte_loads_in_flight_on_sm_90(kernel, dtypes):
  """Four loads in a row in a loop for each dtype: none waits for what another brought."""
  cubin, _ = compiled("90")
  streaming = 0
  for body in loops(machine_code(cubin)[kernel]):
    if any("BSSY" in instruction for instruction in body):
      continue
    loads = [i for i, instruction in enumerate(body) if "LDG.E.128" in instruction]
    if len(loads) != 4:
      continue
    between = body[loads[0]:loads[3]]
    streaming += not any(re.search(r"FADD|FFMA|FMUL|DADD|DFMA|DMUL|HADD|STG", instruction) for instruction in between)
  assert streaming >= dtypes


def library(tmp_path, architecture="90"):
  if shutil.which("cmake") is None:
    pytest.skip("no cmake to build the library with")
  need_nvcc()
  configure = ["cmake", "-S", build.SOURCES, "-B", tmp_path, "-DCMAKE_BUILD_TYPE=Release",
               f"-DCMAKE_CUDA_COMPILER={build.nvcc()}", f"-DCMAKE_CUDA_ARCHITECTURES={architecture}",
               "-DOPTAX_GLOBALCLIP_CUDA=ON", f"-DXLA_FFI_INCLUDE_DIR={jax.ffi.include_dir()}"]
  for command in (configure, ["cmake", "--build", tmp_path, "--target", "optax_globalclip_cuda"]):
    processes.output(command)
  return tmp_path / "optax_globalclip_cuda.so"


@pytest.mark.slow
def test_the_library_exports_the_handlers_and_needs_no_cuda_library(tmp_path):
  path = library(tmp_path)
  exported = processes.output(["nm", "-D", "--defined-only", path])
  for stage in _native._TARGETS:
    assert f" T {_native.target_name(stage, 'cuda')}\n" in exported
  needed = processes.output(["readelf", "-d", path])
  libraries = set(re.findall(r"NEEDED.*\[(.*?)\.so", needed))
  assert libraries and libraries <= {"libstdc++", "libgcc_s", "libm", "libc", "ld-linux-x86-64"}
