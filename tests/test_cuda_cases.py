"""What the native path computes, computed by the CUDA kernels: compiled for the host, and called by XLA through the CUDA
handlers.

Every test of MODULES runs here, and fails if it launches no kernel, or is in LEFT_OUT with the reason. Cases of the
reference path are not collected (`native_cases`): `native` in the name of a case means the kernels."""

import importlib

import programs
import pytest
import test_cases_numerics
from cuda_on_cpu import build

pytestmark = pytest.mark.native_cases

MODULES = [importlib.import_module(name) for name in (
    "test_cases_numerics", "test_cases_nonfinite", "test_cases_shapes", "test_cases_loss_scale",
    "test_cases_windows", "test_clip_loss_scale", "test_property_clip", "test_property_norm", "test_leaf_report",
    "test_monitor", "test_raise", "test_determinism", "test_step_numerics", "test_step_policies")]

LEFT_OUT = {
    "is about the reference path": [
        "test_reference_norms_are_within_1e_6",
        "test_reference_float64_norms_are_within_1e_6",
    ],
    "is about what is made, refused or read before anything is computed": [
        "test_a_state_of_a_rule_is_refused_by_a_number_and_not_dropped",
        "test_a_state_that_was_restored_as_plain_dicts_is_an_error_that_says_how_to_restore_it",
        "test_a_state_with_another_record_is_refused_and_not_dropped",
        "test_a_state_without_a_monitored_clip_is_an_error_that_names_monitor",
        "test_a_window_without_a_monitor_is_an_error_that_names_it",
        "test_before_the_first_step_all_are_zero",
        "test_current_loss_scale_finds_the_scale_of_every_kind",
        "test_current_loss_scale_refuses_none_and_several",
        "test_dynamic_loss_scale_refuses_what_is_no_configuration",
        "test_growth_is_bounded_by_the_maximum_even_where_the_product_is_infinite",
        "test_inside_jit_it_is_an_error_that_says_so",
        "test_none_or_several_monitors_are_an_error_that_says_how_many",
    ],
    "compiles a program and does not run it": [
        "test_45_no_copy_of_a_large_bfloat16_tree",
    ],
    "starts processes, which find the library for the CPU": [
        "test_many_calls_at_once_neither_deadlock_nor_disturb_each_other",
        "test_many_devices_of_one_process_clip_at_once",
        "test_the_same_bits_come_from_any_number_of_threads",
        "test_two_clips_in_one_program_neither_deadlock_nor_disturb_each_other",
    ],
}


def _tests():
  """`(name, test)` of everything in MODULES that pytest collects there."""
  return [(name, value) for module in MODULES for name, value in vars(module).items() if name.startswith("test_")]


def _left_out():
  return {name for names in LEFT_OUT.values() for name in names}


globals().update((name, test) for name, test in _tests() if name not in _left_out())


def test_every_test_of_the_modules_runs_here_or_is_left_out_with_a_reason():
  names = [name for name, _ in _tests()]
  assert len(set(names)) == len(names), "two tests have one name, and only one of them runs"
  assert {name for name, test in _tests() if globals().get(name) is not test} == _left_out()


def _forget_results():
  for module in [*MODULES, programs]:
    for value in vars(module).values():
      if hasattr(value, "cache_clear"):
        value.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def library():
  _forget_results()
  with build.cuda_on_cpu() as loaded:
    yield loaded
  _forget_results()


@pytest.fixture(autouse=True)
def kernels_are_launched(library, request):
  test_cases_numerics.results.cache_clear()  # what another test has computed
  before = library.cuda_on_cpu_launches()
  yield
  if request.function.__module__ != __name__:
    assert library.cuda_on_cpu_launches() > before, "no kernel was launched: say why in LEFT_OUT"


@pytest.fixture
def path():
  """What is native here are the CUDA kernels."""
  return "native"
