"""Which programs are lowered to the CUDA kernels, and which libraries are refused before they can do harm."""

import shutil

import jax
import jax.numpy as jnp
import optax_globalclip as ogc
import pytest
from cuda_on_cpu import build
from optax_globalclip import _lowering, _native
from programs import targets


@pytest.fixture
def installed(tmp_path, monkeypatch):
  """A CUDA library where the package looks for one. Its code runs on the CPU; nothing here calls it."""
  shutil.copy(build.ffi_library(), tmp_path / "optax_globalclip_cuda.so")
  monkeypatch.setattr(_native, "_folders", lambda: [tmp_path])
  monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *args, **kwargs: None)
  monkeypatch.delitem(_native._libraries, "cuda", raising=False)
  monkeypatch.setattr(_native, "load", _native.load.__wrapped__)
  jax.clear_caches()
  yield
  jax.clear_caches()


def lowered_for_cuda(f, *args):
  return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_for_cuda_call_the_kernels_where_the_library_is(installed):
  tree = [jnp.ones(3), jnp.ones(4, jnp.bfloat16)]
  assert targets(lowered_for_cuda(lambda tree: ogc.clip_tree(tree, 1.0), tree)) == {"optax_globalclip_clip_cuda_v2": 1}
  assert targets(lowered_for_cuda(ogc.global_norm, tree)) == {"optax_globalclip_norm_cuda_v2": 1}
  assert ogc.backend_info()["cuda"].startswith("native")


def test_programs_for_cuda_are_the_reference_where_it_is_not(monkeypatch):
  monkeypatch.setattr(_native, "load", lambda platform: _native.Status(False, "was not built"))
  jax.clear_caches()
  text = lowered_for_cuda(lambda tree: ogc.clip_tree(tree, 1.0), [jnp.ones(3)])
  jax.clear_caches()
  assert targets(text) == {} and "sqrt" in text


@pytest.mark.parametrize("driver, available", [(0, True), (12080, False), (12090, False), (13000, True), (13010, True)])
def test_a_driver_that_is_too_old_is_refused_and_none_is_not(installed, monkeypatch, driver, available):
  monkeypatch.setenv("CUDA_ON_CPU_DRIVER", str(driver))
  found = _native.load("cuda")
  assert found.available == available
  if not available:
    assert "needs a driver for CUDA 13.0" in found.reason and "12." in found.reason
    assert ogc.backend_info()["cuda"] == f"reference: {found.reason}"


@pytest.mark.parametrize("running", [None, 0])
def test_a_library_built_with_newer_headers_is_refused(installed, monkeypatch, running):
  monkeypatch.setattr(_native, "_jaxlib_ffi_minor", lambda: running)
  found = _native.load("cuda")
  assert not found.available and "newer than this jaxlib's" in found.reason


def test_a_file_that_is_no_library_is_refused(installed, tmp_path):
  (tmp_path / "optax_globalclip_cuda.so").write_text("no library")
  found = _native.load("cuda")
  assert not found.available and "does not load" in found.reason


@pytest.mark.parametrize("platform", _native.PLATFORMS)
@pytest.mark.parametrize("leaves, want", [(1, "xla"), (148, "xla"), (2000, "xla"), (2001, "kernel")])
def test_auto_scales_in_xla_but_for_very_many_leaves(platform, leaves, want):
  leaves = [jax.ShapeDtypeStruct((768,), jnp.float32)] * leaves
  assert _lowering.scale_stage(platform, "auto", leaves) == want
  assert _lowering.scale_stage(platform, "kernel", leaves) == "kernel"
  assert _lowering.scale_stage(platform, "xla", leaves) == "xla"
  assert _lowering.scale_stage(None, "auto", leaves) == "xla"
