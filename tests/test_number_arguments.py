"""Is a number the same number whichever type it comes in? (Case 65.)"""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest

pytestmark = pytest.mark.reference_repeats

# Powers of two that the type holds; 2^15 is what float16 does.
NUMBERS = {
    "float16": np.float16(2**15), "bfloat16": ml_dtypes.bfloat16(2**15), "float32": np.float32(2**15),
    "float64": np.float64(2**15), "longdouble": np.longdouble(2**15), "int": 2**15, "int8": np.int8(64),
    "uint8": np.uint8(128), "int16": np.int16(2**14), "uint16": np.uint16(2**15), "int32": np.int32(2**15),
    "int64": np.int64(2**15), "uint64": np.uint64(2**15), "small float16": np.float16(2**-14),
    "odd float16": np.float16(0.1), "odd float64": np.float64(0.1), "odd longdouble": np.longdouble(0.1),
}
numbers = pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
TREE = {"a": np.float32([3, 4]), "b": np.float16([12])}  # norm 13


def short(value):
  return getattr(value, "__name__", repr(value)[:24])


@pytest.fixture(autouse=True)
def no_warning():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    yield


# ----------------------------------------------------------------------------------------------------------------------
# The clip's numbers


@numbers
def test_65_a_max_norm_of_any_type_clips_as_the_float(path, number):
  for make in ogc.global_clip, ogc.per_tensor_clip:
    got, want = (make(n).update(TREE, optax.EmptyState())[0] for n in (number, float(number)))
    assert oracle.same_bits(got, want)
  (got, norm), (want, _) = (ogc.clip_tree(TREE, n) for n in (number, float(number)))
  assert oracle.same_bits(got, want) and norm == 13
  np.testing.assert_allclose(got["a"], oracle.clip(TREE, float(number))["a"].astype(np.float64), rtol=1e-6)


@numbers
def test_65_a_loss_scale_of_any_type_unscales_as_the_float(path, number):
  want = ogc.global_clip(1e30, loss_scale=float(number)).update(TREE, optax.EmptyState())[0]
  assert oracle.same_bits(ogc.global_clip(1e30, loss_scale=number).update(TREE, optax.EmptyState())[0], want)
  assert oracle.same_bits(ogc.global_clip(1e30).update(TREE, optax.EmptyState(), loss_scale=number)[0], want)
  np.testing.assert_allclose(want["a"], np.float64([3, 4]) / float(np.float32(number)), rtol=1e-6)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "longdouble", "int8", "odd float16"])
@pytest.mark.parametrize("every_k", [1, 2])
def test_65_numbers_of_a_window_of_any_type_are_the_floats(path, name, every_k):
  def last(number):
    tx = ogc.clipped_multi_steps(optax.sgd(1.0), number, every_k=every_k, loss_scale=number)
    state = tx.init(TREE)
    scale = ogc.current_loss_scale(state)
    assert scale.dtype == np.float32 and scale == np.float32(float(number)) and not scale.weak_type
    for extra in {"weight": number}, {"weight": 1, "loss_scale": number}:
      for _ in range(every_k):
        updates, state = tx.update(TREE, state, TREE, **extra)
    return updates, state
  assert oracle.same_bits(last(NUMBERS[name]), last(float(NUMBERS[name])))


@pytest.mark.parametrize("kind", [int, np.int8, np.int32, np.int64, np.uint8, np.uint64])
def test_65_every_k_may_be_of_any_int_type(kind):
  def last(every_k):
    tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, every_k=every_k)
    state = tx.init(TREE)
    for _ in range(2):
      updates, state = tx.update(TREE, state, TREE)
    assert ogc.has_updated(state)
    return updates, state
  assert oracle.same_bits(last(kind(2)), last(2))


@pytest.mark.parametrize("two", [2, 2.0, np.float16(2), np.float32(2), np.int64(2), np.longdouble(2)])
def test_65_the_norm_type_two_may_be_of_any_type(two):
  assert ogc.clip_tree(TREE, 1.0, norm_type=two)[1] == 13


# ----------------------------------------------------------------------------------------------------------------------
# DynamicLossScale


KINDS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.longdouble, np.int64, np.uint16]
# Of each field a number that all of these types hold, beside which the others are as they are by default.
FIELDS = {"initial": 2**15, "growth_factor": 4, "minimum": 2, "maximum": 2**15}
fields = pytest.mark.parametrize("field", FIELDS)


def history(config):
  """Scales after two good windows and twenty bad ones."""
  state, out = config.init(), []
  update = jax.jit(config.update)
  for finite in [True] * 2 + [False] * 20:
    state = update(state, finite)
    assert state.loss_scale.dtype == np.float32 and not state.loss_scale.weak_type
    assert state.good_windows.dtype == np.int32
    out.append(float(state.loss_scale))
  return out


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@fields
def test_65_a_scale_moves_by_numbers_of_any_type_as_by_floats(kind, field):
  def config(number):
    return ogc.DynamicLossScale(**{field: number}, growth_interval=1)
  number = kind(FIELDS[field])
  assert history(config(number)) == history(config(float(number)))
  assert config(number) == config(float(number)) and hash(config(number)) == hash(config(float(number)))


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.longdouble],
                         ids=lambda kind: kind.__name__)
def test_65_a_scale_backs_off_by_fractions_of_any_type_as_by_floats(kind):
  for fraction in 0.5, 0.1:
    number = kind(fraction)
    assert history(ogc.DynamicLossScale(backoff_factor=number)) == history(
        ogc.DynamicLossScale(backoff_factor=float(number)))
  all_at_once = ogc.DynamicLossScale(kind(2**15), kind(2), kind(0.5), 1, kind(1), kind(2**15))
  assert history(all_at_once) == history(ogc.DynamicLossScale(2.0**15, 2.0, 0.5, 1, 1.0, 2.0**15))


@pytest.mark.parametrize("kind", [int, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64])
def test_65_the_growth_interval_may_be_of_any_int_type(kind):
  assert history(ogc.DynamicLossScale(growth_interval=kind(2))) == history(ogc.DynamicLossScale(growth_interval=2))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_65_a_window_with_a_dynamic_scale_of_any_type_goes_as_with_a_float(path, kind):
  def last(number):
    tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, loss_scale=ogc.DynamicLossScale(number))
    state = tx.init(TREE)
    assert ogc.current_loss_scale(state) == 2**15
    for bad in False, True:
      gradients = TREE | {"a": np.float32([np.inf, 4])} if bad else TREE
      updates, state = tx.update(gradients, state, TREE)
    assert ogc.current_loss_scale(state) == 2**14
    return updates, state
  assert oracle.same_bits(last(kind(2**15)), last(2.0**15))


def outcome(field, number):
  with contextlib.suppress(TypeError):
    config = ogc.DynamicLossScale(**{field: number})
    assert history(config) == history(ogc.DynamicLossScale(**{field: float(number)}))
    return "taken"
  return "refused"


def test_65_jax_scalars_are_refused_or_taken_alike_by_every_field():
  scalars = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32]
  assert len({outcome(field, scalar(FIELDS[field])) for field in FIELDS for scalar in scalars}) == 1


def test_65_numpy_arrays_without_dimensions_are_refused_or_taken_alike_by_every_field():
  kinds = [np.float16, np.float32, np.float64, np.int64]
  assert len({outcome(field, np.asarray(FIELDS[field], kind)) for field in FIELDS for kind in kinds}) == 1


@fields
@pytest.mark.parametrize("number, error", [
    (np.float16(np.inf), ValueError), (np.float16(np.nan), ValueError), (np.float16(-1), ValueError),
    (np.float16(0), ValueError), (np.float64(2.0**128), ValueError), (np.float32(1e-40), ValueError),
    (np.longdouble(2) ** -16000, ValueError), (np.longdouble(2) ** 16000, ValueError), (10**400, ValueError),
    (np.bool_(True), TypeError), (np.complex64(2), TypeError), (np.float16([2]), TypeError), ("2", TypeError),
    (None, TypeError)], ids=short)
def test_65_what_is_no_scale_is_refused_in_every_type_without_a_warning(field, number, error):
  with pytest.raises(error, match=field):
    ogc.DynamicLossScale(**{field: number})


# ----------------------------------------------------------------------------------------------------------------------
# Refusals of the other numbers


@pytest.mark.parametrize("number", [np.float16(np.nan), np.float16(-1), np.longdouble(-1), np.int8(-1),
                                    ml_dtypes.bfloat16(-1), -(10**400)], ids=short)
def test_65_a_max_norm_or_weight_below_zero_is_refused_in_every_type(number):
  with pytest.raises(ValueError, match="max_norm"):
    ogc.global_clip(number)
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0)
  with pytest.raises(ValueError, match="weight"):
    tx.update(TREE, tx.init(TREE), TREE, weight=number)


@pytest.mark.parametrize("number", [np.float16(np.inf), np.float16(0), np.longdouble(2) ** 16000, np.float64(1e39),
                                    np.longdouble(2) ** -16000, np.float64(1e-40), 10**400, np.int8(-1)], ids=short)
def test_65_a_loss_scale_beyond_float32_is_refused_in_every_type(number):
  for make in (lambda: ogc.global_clip(1.0, loss_scale=number),
               lambda: ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, loss_scale=number),
               lambda: ogc.global_clip(1.0).update(TREE, None, loss_scale=number)):
    with pytest.raises(ValueError, match="loss_scale"):
      make()


@pytest.mark.parametrize("number", [1e-40, np.float32(1e-40), np.longdouble(1e-40)], ids=short)
def test_65_a_subnormal_weight_is_refused_as_a_traced_one_is_bad(number):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0)
  with pytest.raises(ValueError, match="weight.*subnormal"):
    tx.update(TREE, tx.init(TREE), TREE, weight=number)


@pytest.mark.parametrize("number", [np.longdouble(2) ** 16000, 10**400, np.float64(1e39), np.float16(np.inf)],
                         ids=short)
def test_65_a_max_norm_beyond_float32_never_clips_in_any_type(path, number):
  clipped, norm = ogc.clip_tree(TREE, number)
  assert oracle.same_bits(clipped, TREE) and norm == 13
