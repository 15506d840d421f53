"""Eight host devices, strict promotion of dtypes and ranks, and the two paths every case runs on."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis
import jax
import optax_globalclip as ogc
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci")


@pytest.fixture(params=["native", "reference"])
def path(request, monkeypatch):
  """Runs the test on the native path and on the reference path."""
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", request.param)  # for processes that the test starts
  with ogc.use_backend(request.param):
    yield request.param


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


@pytest.fixture
def standard_promotion():
  """For tests that name optax's adam, adamw or MultiSteps, which add float32 to int32."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture
def as_users_run_it():
  """Promotion of dtypes and ranks as it is by default."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


@pytest.hookimpl(tryfirst=True)  # before `-m` is asked
def pytest_collection_modifyitems(config, items):
  """What a module's marker says of cases that name the reference path: `native_cases` leaves them out,
  `reference_repeats` marks them as repeats. Repeats are slow."""
  def on_reference(item):
    return hasattr(item, "callspec") and item.callspec.params.get("path") == "reference"
  left_out = [item for item in items if on_reference(item) and item.get_closest_marker("native_cases")]
  config.hook.pytest_deselected(items=left_out)
  gone = set(left_out)
  items[:] = [item for item in items if item not in gone]
  for item in items:
    if on_reference(item) and item.get_closest_marker("reference_repeats"):
      item.add_marker(pytest.mark.repeats)
    if item.get_closest_marker("repeats"):
      item.add_marker(pytest.mark.slow)
