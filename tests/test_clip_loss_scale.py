"""Cases 24 to 27: gradients of a scaled loss are clipped, measured and returned in true units, g / s rounded once."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import programs
import pytest

pytestmark = pytest.mark.reference_repeats


def paths_and_stages(test):
  """The reference path has one stage only."""
  return pytest.mark.parametrize("path, stage", [("native", "auto"), ("native", "xla"), ("reference", "auto")],
                                 indirect=["path"])(test)


@pytest.mark.parametrize("how", ["at construction", "at each step", "traced"])
def test_the_loss_scale_is_taken_out_before_the_threshold_is_applied(how, path):
  tree = {"w": jnp.array([307.2, 409.6])}
  if how == "traced":
    updates, metrics = programs.clip(path)(tree, 1.0, loss_scale=jnp.float32(1024))
  elif how == "at construction":
    updates, metrics = programs.clip(path, loss_scale=1024)(tree, 1.0)
  else:
    tx = ogc.global_clip(1.0, monitor=True)
    updates, state = tx.update(tree, tx.init(tree), loss_scale=1024)
    metrics = ogc.clip_metrics(state)
  np.testing.assert_allclose(updates["w"], [0.3, 0.4], rtol=1e-6)
  np.testing.assert_allclose(metrics["global_norm"], 0.5, rtol=1e-6)
  assert metrics["clipped_steps"] == 0 and metrics["clip_factor"] == 1


def test_the_metric_and_the_factor_are_in_true_units(path):
  updates, metrics = programs.clip(path)([jnp.float32(240), jnp.float32(320)], 1.0, loss_scale=jnp.float32(8))
  np.testing.assert_allclose(metrics["global_norm"], 50, rtol=1e-6)
  np.testing.assert_allclose(metrics["clip_factor"], 0.02, rtol=1e-6)
  np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)


def test_per_tensor_clip_takes_the_loss_scale_out_too(path):
  updates, metrics = programs.clip(path, per_leaf=True)(
      [jnp.array([24.0, 32.0]), jnp.float32(4)], 1.0, loss_scale=jnp.float32(8))
  np.testing.assert_allclose(updates[0], [0.6, 0.8], rtol=1e-6)
  assert updates[1] == 0.5
  np.testing.assert_allclose(metrics["global_norm"], np.sqrt(25.25), rtol=1e-6)


@paths_and_stages
def test_float16_gradients_of_a_scaled_loss_come_out_as_float32_and_not_as_zero(path, stage):
  tree = {"w": np.full(4, 2**-10, np.float16)}
  updates, metrics = programs.clip(path, scale_stage=stage)(tree, 1.0, loss_scale=jnp.float32(65536))
  assert updates["w"].dtype == jnp.float32
  np.testing.assert_array_equal(updates["w"], np.float32(2**-26))
  np.testing.assert_array_equal(metrics["global_norm"], np.float32(2**-25))


def test_a_python_scale_of_65536_is_not_squeezed_into_float16(path):
  updates, _ = ogc.global_clip(1.0, loss_scale=65536).update({"w": np.full(4, 2**-10, np.float16)}, optax.EmptyState())
  np.testing.assert_array_equal(updates["w"], np.float32(2**-26))


def test_float16_comes_out_as_float16_where_update_dtype_says_so(path):
  updates, _ = programs.clip(path, loss_scale=2, update_dtype="float16")({"w": np.full(4, 2**-4, np.float16)}, 1.0)
  assert updates["w"].dtype == jnp.float16
  np.testing.assert_array_equal(updates["w"], np.float16(2**-5))


@paths_and_stages
@pytest.mark.parametrize("exponent", [127, 64, -20, -120])
def test_powers_of_two_as_loss_scales_change_nothing_but_the_exponent(exponent, path, stage):
  want = [np.array([1, -1.5, 0.5], dtype) for dtype in ("float32", "bfloat16")]
  scaled = [(leaf.astype(np.float64) * 2.0**exponent).astype(leaf.dtype) for leaf in want]
  updates, metrics = programs.clip(path, scale_stage=stage)(scaled, 100.0, loss_scale=jnp.float32(2.0**exponent))
  assert oracle.same_bits(updates, want)
  assert oracle.ulps(metrics["global_norm"], oracle.norm(want)) <= 1


@paths_and_stages
@pytest.mark.parametrize("given", ["static", "traced"])
def test_3000_over_1000_is_3(given, path, stage):
  tree = {"w": jnp.float32(3000)}
  if given == "static":
    updates, _ = programs.clip(path, loss_scale=1000, scale_stage=stage)(tree, 10.0)
  else:
    updates, _ = programs.clip(path, scale_stage=stage)(tree, 10.0, loss_scale=jnp.float32(1000))
  assert updates["w"] == 3.0


@paths_and_stages
@pytest.mark.parametrize("scale", [1000.0, 3.0, 0.7, 12345.678])
def test_every_finite_half_number_is_divided_and_rounded_once(scale, path, stage):
  everything = np.arange(2**16, dtype=np.uint16)
  for dtype in (np.float16, ml_dtypes.bfloat16):
    x = everything.view(dtype)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
      magnitude = np.abs(x.astype(np.float64))
    x = x[(magnitude >= 1e-30) & (magnitude < min(1e30, 0.5 * float(ml_dtypes.finfo(dtype).max)))]
    update_dtype = np.dtype(dtype).name
    updates, _ = programs.clip(path, scale_stage=stage, update_dtype=update_dtype)(
        {"x": x}, np.inf, loss_scale=jnp.float32(scale))
    exact = x.astype(np.float64) / np.float64(np.float32(scale))
    grains = oracle.ulps(np.asarray(updates["x"]), exact)
    assert grains.max() <= 0.5, (dtype, grains.max())


def test_a_scale_given_to_update_wins_over_the_static_one(path):
  clip = programs.clip(path, loss_scale=4)
  assert clip([jnp.float32(8)], 100.0)[0][0] == 2
  assert clip([jnp.float32(8)], 100.0, loss_scale=jnp.float32(2))[0][0] == 4


@pytest.mark.parametrize("scale", [0.0, 1e-40, -1.0, np.inf, np.nan])
def test_a_traced_scale_that_is_not_finite_and_positive_is_a_bad_step(scale, path):
  for policy, fill, norm in (("propagate", np.nan, np.nan), ("zero", 0, np.inf)):
    updates, metrics = programs.clip(path, on_nonfinite=policy)([jnp.array([3.0, 4.0])], 10.0,
                                                                loss_scale=jnp.float32(scale))
    np.testing.assert_array_equal(updates[0], np.full(2, fill, np.float32))
    np.testing.assert_array_equal(metrics["global_norm"], norm)


def test_float64_leaves_are_divided_in_float64(path, x64):
  tree = [np.array([1.0, 1e300]), np.array([3000.0], np.float32)]
  updates, metrics = programs.clip(path)(tree, np.inf, loss_scale=jnp.float32(1000))
  np.testing.assert_array_equal(updates[0], tree[0] / 1000)
  assert updates[1][0] == 3
  np.testing.assert_allclose(metrics["global_norm"], 1e297, rtol=1e-15)


def test_a_scaled_and_clipped_gradient_is_the_clipped_gradient(path):
  tree = [jnp.array([30.0, 40.0]), jnp.array([120.0])]
  clip = programs.clip(path)
  plain, _ = clip(tree, 1.0)
  for scale in (7.0, 2.0**100, 2.0**-100):
    scaled, metrics = clip([leaf * jnp.float32(scale) for leaf in tree], 1.0, loss_scale=jnp.float32(scale))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), plain, scaled)
    np.testing.assert_allclose(metrics["global_norm"], 130, rtol=1e-6)
