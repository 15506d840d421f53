"""Every case that the native path passes on the CPU, on the CUDA kernels: the same tests, with the kernels compiled for
the host and called by XLA through the CUDA handlers."""

import importlib
import inspect

import pytest
from cuda_on_cpu import build

MODULES = [importlib.import_module(name) for name in (
    "test_cases_numerics", "test_cases_nonfinite", "test_cases_shapes", "test_cases_loss_scale",
    "test_clip_loss_scale", "test_property_clip", "test_property_norm")]


def _forget_results():
  shared = [importlib.import_module(name) for name in ("programs", "windows")]
  for module in MODULES + shared:
    for value in vars(module).values():
      if hasattr(value, "cache_clear"):
        value.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def cuda_on_cpu():
  _forget_results()
  with build.cuda_on_cpu():
    yield
  _forget_results()


@pytest.fixture
def path():
  """What is native here are the CUDA kernels."""
  return "native"


def _is_native(name, test):
  return "path" in inspect.signature(test).parameters or test.__module__ == "test_property_norm"


def _collect():
  for module in MODULES:
    for name, value in vars(module).items():
      if name.startswith("test_") and "reference" not in name and inspect.isfunction(value) and _is_native(name, value):
        assert name not in globals(), f"two tests are called {name}"
        globals()[name] = value


_collect()
