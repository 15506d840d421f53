"""Which path is taken, what is said about it, and what happens where the native library is missing or too new."""

import json
import pathlib
import re
import shutil

import jax
import numpy as np
import optax
import optax_globalclip as ogc
import processes
import pytest
from optax_globalclip import _native
from programs import targets

PACKAGE = pathlib.Path(ogc.__file__).parent
TREE = [np.array([3, 4], np.float32)]


def in_a_copy(tmp_path, backend, *code, library=None):
  """Runs `code` in a process that finds a copy of the package, with `library` as its native library or with none."""
  shutil.copytree(PACKAGE, tmp_path / "optax_globalclip", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
  if library is not None:
    (tmp_path / "optax_globalclip" / "optax_globalclip_cpu.so").write_bytes(library)
  prelude = """
      import sys
      sys.path.insert(0, {folder!r})
      import importlib.metadata
      def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)
      importlib.metadata.distribution = not_installed
      import json, jax, numpy as np, optax_globalclip as ogc
      assert ogc.__file__.startswith({folder!r})
  """.format(folder=str(tmp_path))
  return processes.run(processes.python(prelude, *code), timeout=120, OPTAX_GLOBALCLIP_BACKEND=backend)


CLIP = """
    updates, norm = ogc.clip_tree([np.array([3, 4], np.float32)], 1.0)
    print(json.dumps([ogc.backend_info(), float(norm), np.asarray(updates[0]).tolist()]))
"""


def test_backend_info_says_which_path_each_platform_takes(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  info = ogc.backend_info()
  assert set(info) == {"cpu", "cuda", "other", "setting"}
  assert info["setting"] == "native"
  assert re.match(r"native: .*optax_globalclip_cpu\.so$", info["cpu"])
  assert re.match(r"native: .*\.so$|error: .+", info["cuda"])
  assert info["other"].startswith("reference: ")
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "reference")
  info = ogc.backend_info()
  assert info["cpu"] == info["cuda"] == "reference: OPTAX_GLOBALCLIP_BACKEND=reference"
  monkeypatch.delenv("OPTAX_GLOBALCLIP_BACKEND")
  info = ogc.backend_info()
  assert info["setting"] == "auto" and info["cpu"].startswith("native: ")


@pytest.mark.parametrize("value", ["", "cpu", "Native", "jnp"])
def test_a_wrong_setting_is_a_value_error_that_names_the_right_ones(value, monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", value)
  for call in (ogc.backend_info, lambda: ogc.global_norm(TREE), lambda: ogc.clip_tree(TREE, 1.0),
               lambda: ogc.global_clip(1.0).update(TREE, optax.EmptyState())):
    with pytest.raises(ValueError, match="'auto', 'native' or 'reference'.*" + repr(value)):
      call()


def test_auto_without_a_library_takes_the_reference_and_says_why(tmp_path):
  done = in_a_copy(tmp_path, "auto", CLIP)
  assert done.returncode == 0, done.stderr
  info, norm, updates = json.loads(done.stdout)
  assert info["cpu"] == "reference: optax_globalclip_cpu.so was not built (BUILD.md says how)"
  assert norm == 5
  np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)


def test_native_without_a_library_is_an_error_that_says_how_to_build_it(tmp_path):
  done = in_a_copy(tmp_path, "native", CLIP)
  assert done.returncode != 0
  assert re.search(r"OPTAX_GLOBALCLIP_BACKEND=native.*was not built.*pip install", done.stderr)


def test_a_library_that_does_not_load_is_said_to(tmp_path):
  done = in_a_copy(tmp_path, "auto", CLIP, library=b"no library")
  assert done.returncode == 0, done.stderr
  info, norm, _ = json.loads(done.stdout)
  assert "does not load" in info["cpu"] and norm == 5


def test_a_library_built_with_newer_headers_is_refused_before_it_can_do_harm(tmp_path):
  older = "from optax_globalclip import _native; _native._jaxlib_ffi_minor = lambda: 0; _native.load.cache_clear()"
  still_works = "print(float(jax.jit(lambda x: x + 1)(1.0)))"
  library = next(folder for folder in _native._folders() if (folder / "optax_globalclip_cpu.so").exists())
  done = in_a_copy(tmp_path, "auto", older, CLIP, still_works,
                   library=(library / "optax_globalclip_cpu.so").read_bytes())
  assert done.returncode == 0, done.stderr
  first, second = done.stdout.splitlines()
  info, norm, updates = json.loads(first)
  assert re.search(r"built with XLA FFI 0\.\d+, newer than this jaxlib's 0\.0: build it against an older jaxlib", info["cpu"])
  assert norm == 5 and float(second) == 2


def test_the_library_in_use_was_built_with_headers_no_newer_than_the_running_jaxlib():
  assert _native.load("cpu").available
  library = _native._libraries["cpu"]
  assert 0 < library.optax_globalclip_xla_ffi_minor() <= _native._jaxlib_ffi_minor()


def test_the_setting_is_read_where_a_function_is_traced(monkeypatch):
  for backend, calls in ("native", {"optax_globalclip_norm_cpu_v2": 1}), ("reference", {}):
    monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", backend)
    assert targets(jax.jit(lambda tree: ogc.global_norm(tree)).lower(TREE).as_text()) == calls


def test_only_the_modules_that_load_and_lower_use_the_ffi():
  users = [path.name for path in PACKAGE.glob("*.py") if "jax.ffi" in path.read_text().replace("`jax.ffi`", "")]
  assert sorted(users) == ["_compat.py", "_native.py"]
