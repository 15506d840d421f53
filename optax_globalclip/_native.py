"""The native libraries: loaded, checked, registered, and one function for each target. The one user of `jax.ffi`."""

import ctypes
import functools
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import numpy as np

from optax_globalclip._leaves import norm_dtype
from optax_globalclip._types import Backend

PLATFORMS = ("cpu", "cuda")
_TARGETS = ("norm", "scale", "clip", "adamw")
_VERSION = 2
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
def load(platform: str) -> Status:
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
  missing = [stage for stage in _TARGETS if not hasattr(library, target_name(stage, platform))]
  if missing:
    return Status(False, f"{path.name} is of another version, without {missing[0]}: build it again (BUILD.md says how)")
  _libraries[platform] = library
  for stage in _TARGETS:
    name = target_name(stage, platform)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)),
                                platform={"cpu": "cpu", "cuda": "CUDA"}[platform])
  return Status(True, str(path))


def load_all() -> None:
  """Registers every library that is there, so that programs compiled in another process find their calls."""
  for platform in PLATFORMS:
    load(platform)


_chosen_backend = jax.make_user_context(None)  # part of the key under which JAX keeps what it has compiled


def use_backend(backend: Backend) -> AbstractContextManager[None]:
  """A context manager within which every computation takes the path that is named, whatever the environment says.

  A jitted function is compiled again where the path changes. The environment variable OPTAX_GLOBALCLIP_BACKEND says the
  same for a whole process. It is read whenever a function is traced, so set it before the first call: JAX does not see
  the environment, and a function that is already jitted keeps its path when the variable changes.

  Args:
    backend: "native", "reference" or "auto", as for OPTAX_GLOBALCLIP_BACKEND.

  Raises:
    ValueError: for another name.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> with ogc.use_backend("reference"):
    ...   print(ogc.backend_info()["setting"])
    reference
  """
  return _chosen_backend(_check_backend("use_backend", backend))


def _check_backend(name: str, value: str) -> str:
  if value not in ("auto", "native", "reference"):
    raise ValueError(f"{name} must be 'auto', 'native' or 'reference', got {value!r}")
  return value


def backend() -> str:
  """The path that is asked for: by `use_backend`, else by OPTAX_GLOBALCLIP_BACKEND."""
  return _chosen_backend.value or _check_backend("OPTAX_GLOBALCLIP_BACKEND",
                                                 os.environ.get("OPTAX_GLOBALCLIP_BACKEND", "auto"))


def use_native(platform: str, mode: str) -> bool:
  """Whether computations lowered for `platform` take the native path; an error where `mode` says so and they cannot."""
  if mode == "reference":
    return False
  found = load(platform)
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


def _like(arrays) -> tuple[jax.ShapeDtypeStruct, ...]:
  return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)


def norm(platform, counted, max_norm, loss_scale, leaves, **attributes):
  """`(rows, nonfinite, norms, ops, extremes)`, as `_lowering.norm` gives them."""
  results = _like(norm_results(leaves, **attributes))
  call = jax.ffi.ffi_call(target_name("norm", platform), results + _workspace(platform, leaves))
  return tuple(call(counted, max_norm, loss_scale, *leaves, **_typed(attributes))[:len(results)])


def scale(platform, ops, leaves, *, per_leaf):
  """The leaves scaled in place, each by the op of its row, or all by the only one."""
  call = jax.ffi.ffi_call(target_name("scale", platform), _like(leaves),
                          input_output_aliases={i + 1: i for i in range(len(leaves))})
  return call(ops, *leaves, per_leaf=per_leaf)


def clip(platform, counted, max_norm, loss_scale, leaves, **attributes):
  """What `norm` gives, then the leaves scaled in place: the three kernels in one call."""
  results = _like(norm_results(leaves, **attributes))
  call = jax.ffi.ffi_call(target_name("clip", platform), results + _like(leaves) + _workspace(platform, leaves),
                          input_output_aliases={i + 3: i + len(results) for i in range(len(leaves))})
  return tuple(call(counted, max_norm, loss_scale, *leaves, **_typed(attributes))[:len(results) + len(leaves)])


def adamw(platform, op, coefficients, quarters, *, decays, skips):
  """`[m, v, p]` after a step, each a list of arrays in place of its operands; `quarters` are the lists of g, m, v, p."""
  leaves = [leaf for quarter in quarters for leaf in quarter]
  n = len(quarters[0])
  call = jax.ffi.ffi_call(target_name("adamw", platform), _like(leaves[n:]),
                          input_output_aliases={2 + n + i: i for i in range(3 * n)})
  out = call(op, coefficients, *leaves, decays=np.asarray(decays, np.int32), skips=skips)
  return [out[i * n:(i + 1) * n] for i in range(3)]


def norm_results(leaves: Sequence[jax.Array], *, per_leaf: bool, leaf_norms: bool, extremes: bool,
                 on_nonfinite: int = 0) -> list[jax.ShapeDtypeStruct]:
  """Shapes and dtypes of `(rows, nonfinite, norms, ops, extremes)`; number 0 is the tree's, 1 + i leaf i's."""
  del on_nonfinite
  m, k = (len(leaves) + 1 if wanted else 1 for wanted in (leaf_norms, per_leaf))
  dtype = norm_dtype(leaves)
  return [jax.ShapeDtypeStruct(shape, kind) for shape, kind in (
      ((m, 3), dtype), ((m,), np.int32), ((m,), dtype), ((k, 3), dtype), ((2 if extremes else 0,), dtype))]


def _typed(attributes: dict) -> dict:
  return attributes | dict(on_nonfinite=np.int32(attributes["on_nonfinite"]))
