"""The native libraries: loaded, checked, registered, and one function for each target. The one user of `jax.ffi`."""

import ctypes
import functools
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from optax_globalclip import _reference

PLATFORMS = ("cpu", "cuda")
_TARGETS = ("sums", "norm", "scale", "clip")
_VERSION = 1
_libraries: dict[str, ctypes.CDLL] = {}  # those in use, by platform


def _folders() -> list[pathlib.Path]:
  """Where a library may lie: beside this file, and where the package was installed if this file was imported from a
  checkout, as it is by a Python started there."""
  folders = [pathlib.Path(__file__).parent]
  try:
    folders.append(pathlib.Path(importlib.metadata.distribution("optax_globalclip").locate_file("optax_globalclip")))
  except importlib.metadata.PackageNotFoundError:
    pass
  return folders


class Status(NamedTuple):
  """Whether a platform's native library is in use, and if not, why."""
  available: bool
  reason: str


def target_name(stage: str, platform: str) -> str:
  return f"optax_globalclip_{stage}_{platform}_v{_VERSION}"


def target_names() -> tuple[str, ...]:
  return tuple(target_name(stage, platform) for platform in PLATFORMS for stage in _TARGETS)


def _jaxlib_ffi_minor() -> int | None:
  """The XLA FFI minor version of the running jaxlib, from the header it ships; None where it ships none."""
  header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
  found = re.search(r"define XLA_FFI_API_MINOR (\d+)", header.read_text()) if header.exists() else None
  return int(found.group(1)) if found else None


def _cuda_version(version: int) -> str:
  return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def status(platform: str) -> Status:
  """Loads and registers a platform's library on first use."""
  if platform not in PLATFORMS:
    return Status(False, f"no native code for platform {platform!r}")
  name = f"optax_globalclip_{platform}.so"
  path = next((folder / name for folder in _folders() if (folder / name).exists()), None)
  if path is None:
    return Status(False, f"{name} was not built (BUILD.md says how)")
  try:
    library = ctypes.CDLL(str(path))
  except OSError as error:
    return Status(False, f"{path.name} does not load: {error}")
  built, running = library.optax_globalclip_xla_ffi_minor(), _jaxlib_ffi_minor()
  if running is None or built > running:
    return Status(False, f"{path.name} was built with XLA FFI 0.{built}, newer than this jaxlib's "
                         f"{'(unknown)' if running is None else f'0.{running}'}: build it against an older jaxlib")
  if platform == "cuda":
    # No driver at all is no reason: programs are compiled for GPUs on machines that have none.
    driver, needed = library.optax_globalclip_cuda_driver(), library.optax_globalclip_cuda_driver_needed()
    if 0 < driver < needed:
      return Status(False, f"{path.name} needs a driver for CUDA {_cuda_version(needed)} or newer, and this machine's is "
                           f"for {_cuda_version(driver)}: update the driver, or build with an older CUDA toolkit")
    library.optax_globalclip_workspace_bytes.restype = ctypes.c_int64
    library.optax_globalclip_workspace_bytes.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)]
  _libraries[platform] = library
  for stage in _TARGETS:
    name = target_name(stage, platform)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)),
                                platform={"cpu": "cpu", "cuda": "CUDA"}[platform])
  return Status(True, str(path))


def backend() -> str:
  """The value of OPTAX_GLOBALCLIP_BACKEND."""
  value = os.environ.get("OPTAX_GLOBALCLIP_BACKEND", "auto")
  if value not in ("auto", "native", "reference"):
    raise ValueError(f"OPTAX_GLOBALCLIP_BACKEND must be 'auto', 'native' or 'reference', got {value!r}")
  return value


def use_native(platform: str, mode: str) -> bool:
  """Whether computations lowered for `platform` take the native path; an error where `mode` says so and they cannot."""
  if mode == "reference":
    return False
  found = status(platform)
  if mode == "native" and not found.available:
    raise RuntimeError(f"OPTAX_GLOBALCLIP_BACKEND=native, but on {platform}: {found.reason}. Build the native library "
                       "with `pip install .` from a checkout (BUILD.md), or unset the variable.")
  return found.available


def _workspace(platform: str, leaves: Sequence[jax.Array]) -> tuple[jax.ShapeDtypeStruct, ...]:
  """One more result on CUDA, for sums on their way between kernels: what a captured graph may keep the address of."""
  if platform != "cuda":
    return ()
  sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
  size = _libraries[platform].optax_globalclip_workspace_bytes(len(sizes), (ctypes.c_int64 * len(sizes))(*sizes))
  return (jax.ShapeDtypeStruct((size,), np.uint8),)


def _structs(results):
  return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results)


def _like(leaves):
  return _structs((leaf.shape, leaf.dtype) for leaf in leaves)


def sums(platform, counted, leaves, *, per_leaf):
  results = _structs(_reference.sums_results(leaves, per_leaf=per_leaf))
  call = jax.ffi.ffi_call(target_name("sums", platform), results + _workspace(platform, leaves))
  return tuple(call(counted, *leaves, per_leaf=per_leaf)[:2])


def norm(platform, max_norm, loss_scale, leaves, *, per_leaf, leaf_norms, on_nonfinite):
  results = _structs(_reference.norm_results(leaves, per_leaf=per_leaf, leaf_norms=leaf_norms))
  call = jax.ffi.ffi_call(target_name("norm", platform), results + _workspace(platform, leaves))
  return tuple(call(max_norm, loss_scale, *leaves, per_leaf=per_leaf, leaf_norms=leaf_norms,
                    on_nonfinite=np.int32(on_nonfinite))[:3])


def scale(platform, ops, leaves, *, per_leaf):
  call = jax.ffi.ffi_call(target_name("scale", platform), _like(leaves),
                          input_output_aliases={i + 1: i for i in range(len(leaves))})
  return call(ops, *leaves, per_leaf=per_leaf)


def clip(platform, max_norm, loss_scale, leaves, *, per_leaf, leaf_norms, on_nonfinite):
  results = _structs(_reference.norm_results(leaves, per_leaf=per_leaf, leaf_norms=leaf_norms))
  call = jax.ffi.ffi_call(target_name("clip", platform), results + _like(leaves) + _workspace(platform, leaves),
                          input_output_aliases={i + 2: i + 3 for i in range(len(leaves))})
  norms, nonfinite, ops, *rest = call(max_norm, loss_scale, *leaves, per_leaf=per_leaf, leaf_norms=leaf_norms,
                                      on_nonfinite=np.int32(on_nonfinite))
  return norms, nonfinite, ops, tuple(rest[:len(leaves)])
