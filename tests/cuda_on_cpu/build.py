"""Compiles the CUDA sources for the host, for XLA and for the sanitizers, and puts them behind the FFI."""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import tempfile

import jax
import pytest
from optax_globalclip import _native

FOLDER = pathlib.Path(__file__).parent
SOURCES = FOLDER.parent.parent / "ffi"
COMMON = ["-std=c++17", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-Wall", "-Wextra",
          "-Wno-unknown-pragmas", "-pthread", "-include", str(FOLDER / "cuda_on_cpu.h")]


def _wheel_folders() -> list[pathlib.Path]:
  """Where NVIDIA's wheels put themselves."""
  found = importlib.util.find_spec("nvidia")
  return [pathlib.Path(p) for p in found.submodule_search_locations] if found else []


@functools.cache
def nvcc() -> str | None:
  """The compiler: of NVCC, of the path, or of the wheel."""
  named = os.environ.get("NVCC") or shutil.which("nvcc")
  wheels = (path for folder in _wheel_folders() for path in folder.glob("cu1*/bin/nvcc"))
  return named or next((str(path) for path in wheels), None)


@functools.cache
def cuda_include() -> pathlib.Path | None:
  """CUDA's headers: beside nvcc, or of the wheels nvidia-cuda-runtime and nvidia-cuda-crt."""
  candidates = [path for folder in _wheel_folders() for path in folder.glob("cu1*/include")]
  if nvcc():
    shown = subprocess.run([nvcc(), "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True)
    candidates += [pathlib.Path(line.split("TOP=", 1)[1].strip()) / "include"
                   for line in shown.stderr.splitlines() if "TOP=" in line]
  return next((path for path in candidates if (path / "crt" / "host_defines.h").exists()), None)


def _run(command: list[str]) -> None:
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def made(name: str, inputs: list[pathlib.Path], make, by: str = "") -> pathlib.Path:
  """The file that `make(path)` wrote, or wrote before from the same inputs, in this process or another.

  `by` tells of what makes it, as far as that is not in this folder: a compiler, flags."""
  key = hashlib.sha256(f"{name}\n{by}".encode())
  for path in [*inputs, *sorted(FOLDER.glob("*.*")), *sorted(SOURCES.glob("*.h"))]:
    key.update(path.read_bytes())
  folder = pathlib.Path(tempfile.gettempdir()) / f"optax_globalclip_tests_{os.getuid()}"
  folder.mkdir(mode=0o700, exist_ok=True)
  path = folder / f"{key.hexdigest()[:16]}_{name}"
  with open(f"{path}.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not path.exists():
      with tempfile.TemporaryDirectory(dir=folder) as work:
        new = pathlib.Path(work) / name
        make(new)
        new.rename(path)
  return path


def _compiled(name: str, inputs: list[pathlib.Path], make, by: str = "") -> pathlib.Path:
  if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the CUDA sources for the host")
  if cuda_include() is None:
    pytest.skip("no CUDA headers: pip install nvidia-cuda-runtime nvidia-cuda-crt, or nvcc, brings them")
  return made(name, inputs, make, by)


def ffi_library() -> pathlib.Path:
  """The kernels and handlers for CUDA as a library whose targets run on the CPU."""
  handlers = [SOURCES / name for name in ("handlers_cuda.cc", "adamw_handler_cuda.cc")]
  kernels = [SOURCES / name for name in ("kernels_cuda.cu", "adamw_cuda.cu")]
  headers = jax.ffi.include_dir()  # a jaxlib refuses what was built with the headers of a newer one

  def make(path):
    flags = [*COMMON, "-fPIC", "-fvisibility=hidden", "-isystem", str(cuda_include()), "-isystem", headers]
    objects = [str(path.with_suffix(f".{source.stem}.o")) for source in [*kernels, *handlers]]
    for source, made in zip([*kernels, *handlers], objects):
      how = ["-O2", "-x", "c++"] if source in kernels else ["-O1", "-include", str(FOLDER / "ffi_on_cpu.h")]
      _run(["g++", *flags, *how, "-c", str(source), "-o", made])
    _run(["g++", "-shared", *objects, "-o", str(path), "-pthread", "-Wl,--no-undefined"])

  return _compiled("cuda_on_cpu.so", [*handlers, *kernels, *sorted(pathlib.Path(headers).rglob("*.h"))], make)


def check_program(name: str, flags: list[str], kernels: pathlib.Path = SOURCES / "kernels_cuda.cu",
                  check: str = "check.cc") -> pathlib.Path:
  """check.cc, or another, with the kernels, as a program."""
  def make(path):
    _run(["g++", *COMMON, "-O1", "-g", *flags, "-isystem", str(cuda_include()), "-I", str(SOURCES), "-x", "c++",
          str(kernels), str(FOLDER / check), "-o", str(path)])
  return _compiled(name, [kernels], make, by=" ".join([check, *flags]))


@functools.cache
def library() -> ctypes.CDLL:
  """The FFI library, its targets registered for the CPU under their CUDA names."""
  loaded = ctypes.CDLL(str(ffi_library()))
  loaded.optax_globalclip_workspace_bytes.restype = ctypes.c_int64
  for stage in _native._TARGETS:
    name = _native.target_name(stage, "cuda")
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
  return loaded


@contextlib.contextmanager
def cuda_on_cpu():
  """Within, what is lowered for the CPU calls the CUDA targets."""
  original = {name: getattr(_native, name) for name in ("target_name", "_workspace")}
  loaded = library()
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(_native._libraries, "cuda", loaded)
    patch.setattr(_native, "target_name", lambda stage, platform: original["target_name"](stage, "cuda"))
    patch.setattr(_native, "_workspace", lambda platform, leaves: original["_workspace"]("cuda", leaves))
    patch.setattr(_native, "load", lambda platform: _native.Status(True, "CUDA on the CPU"))
    patch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
    jax.clear_caches()
    yield loaded
  jax.clear_caches()
