"""What each argument may be, what is refused when a transformation is made, and what a traced value does instead."""

import decimal
import fractions

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import programs
import pytest

TREE = {"w": np.array([3, 4], np.float32)}
makers = pytest.mark.parametrize("make", [ogc.global_clip, ogc.per_tensor_clip,
                                          lambda max_norm: ogc.clip_tree(TREE, max_norm)],
                                 ids=["global_clip", "per_tensor_clip", "clip_tree"])


def named(values):
  return pytest.mark.parametrize("value", values, ids=lambda x: f"{type(x).__name__}-{getattr(x, '__name__', x)}")


@makers
@named([-1, -1e-30, -np.inf, np.nan, np.float32(-2), np.float16(np.nan), np.array(-1.0), np.int32(-3),
        ml_dtypes.bfloat16(-1)])
def test_a_negative_or_nan_max_norm_is_a_value_error(make, value):
  with pytest.raises(ValueError, match="max_norm"):
    make(value)


@makers
@named([True, False, np.bool_(True), np.array(True), "1.0", b"1", None, 1j, np.complex64(1), [1.0], (1.0,),
        np.ones(1), np.ones((1, 1)), {"w": 1.0}, decimal.Decimal(1), fractions.Fraction(1, 2), object])
def test_a_max_norm_that_is_no_number_is_a_type_error(make, value):
  with pytest.raises(TypeError, match="max_norm"):
    make(value)


@makers
def test_a_jax_array_that_is_no_scalar_of_a_number_is_a_type_error(make):
  for value in (jnp.ones(1), jnp.array(True), jnp.array(1j), jnp.ones((2, 2))):
    with pytest.raises(TypeError, match="max_norm"):
      make(value)
  with pytest.raises(TypeError, match="max_norm"):
    jax.jit(make)(jnp.ones(2))


@named([0, -0.0, 1, 2**31, 2**70, 10**400, np.inf, 1e300, 1e-45, 1e-300, np.uint8(3), np.float16(2), np.longdouble(2),
        ml_dtypes.bfloat16(2)])
def test_any_other_number_is_a_max_norm(value, path):
  updates, norm = ogc.clip_tree(TREE, value)
  limit = np.inf if isinstance(value, int) and value > 2**1000 else float(value)
  want = np.zeros(2) if limit < 1e-40 else np.array([0.6, 0.8]) * min(limit, 5)
  np.testing.assert_allclose(updates["w"], want, rtol=1e-6, atol=1e-40)
  assert norm == 5


@pytest.mark.parametrize("per_leaf", [False, True])
def test_a_max_norm_of_minus_zero_is_zero_and_flips_no_sign(per_leaf, path):
  updates, _ = programs.clip(path, per_leaf=per_leaf)(TREE, jnp.float32(-0.0))
  np.testing.assert_array_equal(np.signbit(updates["w"]), np.signbit(TREE["w"]))
  assert np.all(updates["w"] == 0)


def test_a_max_norm_beyond_the_dtype_of_the_norm_never_clips(path):
  tree = [np.full(4, 3e38, np.float32)]
  for limit in (1e39, 1e300, 10**60, np.inf):
    updates, norm = ogc.clip_tree(tree, limit)
    assert oracle.same_bits(updates, tree) and norm == np.inf


@named([-1.0, np.nan, -np.inf, -1e-30])
@pytest.mark.parametrize("options, fill", [({}, np.nan), ({"per_leaf": True}, np.nan), ({"on_nonfinite": "zero"}, 0)],
                         ids=str)
def test_a_traced_negative_or_nan_max_norm_is_a_bad_step_and_never_flips_a_sign(value, options, fill, path):
  updates, _ = programs.clip(path, **options)(TREE, jnp.float32(value))
  np.testing.assert_array_equal(updates["w"], np.full_like(updates["w"], fill))


@named([-1.0, np.nan])
def test_a_jax_array_is_never_read(value, path):
  max_norm = jnp.float32(value)
  clip = programs.clip(path)
  clip(TREE, max_norm)  # traced and compiled where transfers are allowed
  tree = jax.device_put(TREE)
  with jax.transfer_guard("disallow"):
    ogc.global_clip(max_norm)
    ogc.global_clip(1, loss_scale=max_norm)
    updates, _ = clip(tree, max_norm)
  assert np.isnan(updates["w"]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "uint8"])
def test_a_jax_scalar_of_any_float_or_int_type_is_a_max_norm(dtype, path):
  updates, _ = programs.clip(path)(TREE, jnp.asarray(1, dtype))
  np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)


def test_max_norm_is_rounded_to_the_dtype_of_the_norm_before_it_is_compared(path):
  tree = [np.array([0.1], np.float32)]
  norm = float(np.float32(0.1))
  just_below = np.nextafter(norm, 0)  # rounds back to float32(0.1)
  updates, _ = ogc.clip_tree(tree, just_below)
  assert oracle.same_bits(updates, tree)
  updates, _ = ogc.clip_tree(tree, np.nextafter(np.float32(0.1), np.float32(0)))
  assert updates[0][0] < np.float32(0.1)


@named([0, 0.0, -0.0, -1, np.inf, np.nan, 1e39, 2.0**128, 10**400, 1e-50, np.float16(np.inf)])
def test_a_loss_scale_that_is_not_finite_and_positive_is_a_value_error(value):
  for make in (ogc.global_clip, ogc.per_tensor_clip):
    with pytest.raises(ValueError, match="loss_scale"):
      make(1.0, loss_scale=value)
    with pytest.raises(ValueError, match="loss_scale"):
      make(1.0).update(TREE, optax.EmptyState(), loss_scale=value)


@named([True, np.bool_(True), "2", 1j, [2.0], np.ones(1), jnp.ones(1), jnp.array(True)])
def test_a_loss_scale_that_is_no_number_is_a_type_error(value):
  for make in (ogc.global_clip, ogc.per_tensor_clip):
    with pytest.raises(TypeError, match="loss_scale"):
      make(1.0, loss_scale=value)
    with pytest.raises(TypeError, match="loss_scale"):
      make(1.0).update(TREE, optax.EmptyState(), loss_scale=value)


@named([2, 2.0, np.float32(2), np.float16(2), np.int64(2), jnp.float32(2), jnp.int32(2), jnp.bfloat16(2)])
def test_any_other_number_is_a_loss_scale(value):
  updates, _ = ogc.global_clip(10.0, loss_scale=value).update(TREE, optax.EmptyState())
  np.testing.assert_array_equal(updates["w"], [1.5, 2])
  updates, _ = ogc.global_clip(10.0).update(TREE, optax.EmptyState(), loss_scale=value)
  np.testing.assert_array_equal(updates["w"], [1.5, 2])


@named(["float31", "int32", jnp.int32, "bool", np.bool_, float, int, bool, 32, 4.0, "float8_e4m3fn", jnp.float8_e5m2,
        "str", object, [jnp.float32], True])
def test_an_update_dtype_that_is_none_of_the_supported_ones_is_a_type_error(value):
  with pytest.raises(TypeError, match="update_dtype"):
    ogc.global_clip(1.0, update_dtype=value)


def test_float64_updates_need_x64():
  with pytest.raises(TypeError, match="update_dtype.*x64"):
    ogc.global_clip(1.0, update_dtype=jnp.float64)
  with jax.enable_x64(True):
    updates, _ = ogc.global_clip(1.0, update_dtype=jnp.float64).update(TREE, optax.EmptyState())
  assert updates["w"].dtype == jnp.float64


@named(["bfloat16", jnp.bfloat16, np.dtype("float16"), ml_dtypes.bfloat16, np.float32])
def test_an_update_dtype_is_a_dtype_or_its_name(value):
  updates, _ = ogc.global_clip(1.0, update_dtype=value).update(TREE, optax.EmptyState())
  assert updates["w"].dtype == jnp.dtype(value)


@named(["fast", "", None, 0, True, "Kernel"])
def test_an_unknown_scale_stage_is_a_value_error(value):
  with pytest.raises(ValueError, match="scale_stage.*'auto', 'kernel', 'xla'"):
    ogc.global_clip(1.0, scale_stage=value)


@named(["ignore", "", None, 0, False, "Raise"])
def test_an_unknown_policy_is_a_value_error(value):
  with pytest.raises(ValueError, match="on_nonfinite.*'propagate'"):
    ogc.global_clip(1.0, on_nonfinite=value)


def test_skip_is_refused_with_the_name_of_what_can_do_it():
  for make in (ogc.global_clip, ogc.per_tensor_clip):
    with pytest.raises(ValueError, match="clipped_multi_steps"):
      make(1.0, on_nonfinite="skip")


@named([1, 1.0, 3, np.inf, "inf", "fro", None, 0, jnp.float32(2)])
def test_other_norms_are_refused_by_name(value):
  with pytest.raises(ValueError, match="norm_type"):
    ogc.clip_tree(TREE, 1.0, norm_type=value)


def test_options_are_keywords_so_that_none_is_taken_for_another():
  with pytest.raises(TypeError, match="positional argument"):
    ogc.global_clip(1.0, 2.0)
  with pytest.raises(TypeError, match="missing .* 'max_norm'"):
    ogc.global_clip()


def test_other_extra_arguments_are_ignored():
  updates, _ = ogc.global_clip(1.0).update(TREE, optax.EmptyState(), None, value=3.0, grad=None)
  np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)
