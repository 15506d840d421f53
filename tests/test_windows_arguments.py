"""What `clipped_multi_steps` takes, what it refuses, and in which words."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import windows
from windows import f32, make

NAN, INF = np.nan, np.inf
PARAMS = [np.zeros(2, np.float32)]


@pytest.mark.parametrize("options, error, words", [
    (dict(every_k=0), ValueError, "every_k: expected at least 1 and less than 2\\*\\*31, got 0"),
    (dict(every_k=-3), ValueError, "every_k"),
    (dict(every_k=2**40), ValueError, "every_k: .*less than 2\\*\\*31"),
    (dict(every_k=2.0), TypeError, "every_k: expected an int or a schedule"),
    (dict(every_k=True), TypeError, "every_k"),
    (dict(every_k="2"), TypeError, "every_k"),
    (dict(every_k=jnp.asarray(2)), TypeError, "static_args"),
    (dict(max_norm=-1.0), ValueError, "max_norm"),
    (dict(max_norm=NAN), ValueError, "max_norm"),
    (dict(max_norm="1"), TypeError, "max_norm"),
    (dict(max_norm=True), TypeError, "max_norm"),
    (dict(loss_scale=0), ValueError, "loss_scale"),
    (dict(loss_scale=-2.0), ValueError, "loss_scale"),
    (dict(loss_scale=INF), ValueError, "loss_scale"),
    (dict(loss_scale=2.0**128), ValueError, "loss_scale"),
    (dict(loss_scale=1e-40), ValueError, "loss_scale: expected .* not subnormal"),
    (dict(loss_scale="dynamic"), TypeError, "loss_scale.*DynamicLossScale"),
    (dict(loss_scale=ogc.DynamicLossScale), TypeError, "loss_scale"),
    (dict(on_nonfinite="ignore"), ValueError, "'skip', 'propagate', 'raise', 'zero'"),
    (dict(update_dtype="float7"), TypeError, "update_dtype"),
    (dict(update_dtype=3), TypeError, "update_dtype"),
    (dict(specs=jax.P()), ValueError, "specs"),
])
def test_construction_refuses_and_says_what_it_expected(options, error, words):
  with pytest.raises(error, match=words):
    make(**options)


@pytest.mark.parametrize("extra, error, words", [
    (dict(weight=-1.0), ValueError, "weight"),
    (dict(weight=NAN), ValueError, "weight"),
    (dict(weight=INF), ValueError, "weight"),
    (dict(weight=1e39), ValueError, "weight"),
    (dict(weight="3"), TypeError, "weight"),
    (dict(weight=jnp.ones(2)), TypeError, "weight"),
    (dict(boundary=1), TypeError, "boundary"),
    (dict(boundary=jnp.zeros(1, bool)), TypeError, "boundary"),
    (dict(boundary="yes"), TypeError, "boundary"),
    (dict(loss_scale=0.0), ValueError, "loss_scale"),
    (dict(loss_scale=jnp.ones(2)), TypeError, "loss_scale"),
    (dict(loss_scale=ogc.DynamicLossScale()), TypeError, "loss_scale"),
])
@pytest.mark.parametrize("every_k", [1, 2])
def test_update_refuses_and_says_what_it_expected(extra, error, words, every_k):
  tx = make(every_k=every_k)
  with pytest.raises(error, match=words):
    tx.update(f32(1), tx.init(f32(0)), **extra)


@pytest.mark.parametrize("updates, error, words", [
    ({"w": f32(1, 2)}, ValueError, r"updates\['b'\]: expected updates of every floating parameter"),
    ({"w": f32(1, 2), "b": None}, ValueError, r"updates\['b'\]"),
    ({"w": f32(1, 2), "b": np.int32(1)}, ValueError, r"updates\['b'\]"),
    ({"w": f32(1, 2), "b": np.float32(1), "c": f32(1)}, ValueError, r"updates\['c'\]: expected the structure"),
    ({"w": f32(1), "b": np.float32(1)}, ValueError, r"updates\['w'\]: expected shape \(2,\)"),
    ({"w": np.complex64([1, 2]), "b": np.float32(1)}, TypeError, r"updates\['w'\].*float32.*complex64"),
    ({"w": jnp.ones(2, jnp.float8_e4m3fn), "b": np.float32(1)}, TypeError, r"updates\['w'\].*float8_e4m3fn"),
])
def test_updates_must_fit_the_parameters(updates, error, words):
  tx = make()
  params = {"w": f32(0, 0), "b": np.float32(0)}
  with pytest.raises(error, match=words):
    tx.update(updates, tx.init(params), params)


def test_a_parameter_of_an_unknown_dtype_is_named_at_init():
  with pytest.raises(TypeError, match=r"params\['w'\].*float8_e4m3fn"):
    make().init({"w": jnp.ones(2, jnp.float8_e4m3fn)})


def test_an_inner_that_loses_a_leaf_is_named():
  inner = optax.GradientTransformation(optax.init_empty_state, lambda g, s, p=None: ({"w": g["w"]}, s))
  tx = make(inner, every_k=1)
  params = {"w": f32(0), "b": f32(0)}
  with pytest.raises(ValueError, match=r"updates\['b'\].*updates of inner"):
    tx.update(params, tx.init(params))


@pytest.mark.parametrize("inner", [1.0, optax.adamw, None])
def test_an_inner_that_is_no_transformation_is_refused(inner):
  with pytest.raises(TypeError, match="inner: expected an optax.GradientTransformation, got"):
    ogc.clipped_multi_steps(inner, 1.0)


@pytest.mark.parametrize("state, got", [
    (None, "NoneType"), ({"accumulators": None}, "dict"), (optax.adamw(1e-3).init(PARAMS), "tuple"),
    (optax.MultiSteps(optax.sgd(0.1), 2).init(PARAMS), "MultiStepsState")], ids=["none", "dict", "adamw", "MultiSteps"])
def test_another_state_is_refused_by_its_name(state, got):
  tx = ogc.clipped_multi_steps(optax.sgd(0.1), 1.0, every_k=2)
  with pytest.raises(TypeError, match=f"state: expected the ClippedMultiStepsState that init returned, got {got}"):
    tx.update(PARAMS, state, PARAMS)


@pytest.mark.parametrize("made, wanted, words", [
    (dict(every_k=1), dict(every_k=2), "made with every_k 1, expected one made with every_k above 1"),
    (dict(every_k=2), dict(every_k=1), "made with every_k above 1, expected one made with every_k 1"),
    (dict(monitor=True), {}, "made with monitor=True, expected one made with monitor=False"),
    ({}, dict(monitor=True), "made with monitor=False, expected one made with monitor=True")], ids=str)
def test_a_state_made_with_other_options_is_refused(made, wanted, words):
  old = ogc.clipped_multi_steps(optax.sgd(0.1, momentum=0.9), 1.0, **made).init(PARAMS)
  tx = ogc.clipped_multi_steps(optax.sgd(0.1, momentum=0.9), 1.0, **wanted)
  with pytest.raises(ValueError, match=f"state: {words}: call init again"):
    tx.update(PARAMS, old, PARAMS)
  tx.update(PARAMS, tx.init(PARAMS)._replace(inner_state=old.inner_state), PARAMS)


def test_empty_trees_are_windows_too(path):
  for tree in {}, [], {"a": None}, {"a": np.zeros((0, 2), np.float32)}:
    run = windows.Run(make(), tree)
    for _ in range(2):
      updates = run(tree)
    assert jax.tree.structure(updates) == jax.tree.structure(tree)
    assert run.metrics["global_norm"] == 0 and run.metrics["steps"] == 1


def test_masked_nodes_pass_by(path):
  tx = optax.masked(make(), {"w": True, "amax": False})
  run = windows.Run(tx, {"w": f32(0, 0), "amax": f32(0)})
  for gradient in f32(6, 0), f32(0, 8):
    updates = run({"w": gradient, "amax": f32(448)})
  np.testing.assert_array_equal(updates["w"], f32(-3, -4))
  np.testing.assert_array_equal(updates["amax"], f32(448))
  assert run.metrics["global_norm"] == 5


# Under inject_hyperparams


@pytest.mark.parametrize("every_k", [2, lambda step: jnp.where(step < 1, 2, 3)])
def test_a_traced_every_k_names_static_args(every_k):
  tx = optax.inject_hyperparams(ogc.clipped_multi_steps)(optax.sgd(1.0), max_norm=1.0, every_k=every_k)
  with pytest.raises(TypeError, match=r"inject_hyperparams.*static_args=\('every_k',\)"):
    tx.init(f32(0))


def test_max_norm_and_loss_scale_may_be_injected(path):
  inject = optax.inject_hyperparams(ogc.clipped_multi_steps, static_args=("every_k",))
  tx = inject(optax.sgd(1.0), max_norm=5.0, loss_scale=2.0, every_k=2)
  run = windows.Run(tx, f32(0, 0))
  def window():
    run(f32(24, 0))
    return run(f32(0, 32))
  np.testing.assert_allclose(window(), f32(-3, -4), rtol=1e-6)
  run.state.hyperparams["max_norm"] = jnp.float32(1)
  np.testing.assert_allclose(window(), f32(-0.6, -0.8), rtol=1e-6)
  run.state.hyperparams["loss_scale"] = jnp.float32(64)
  np.testing.assert_allclose(window(), f32(-0.1875, -0.25), rtol=1e-6)
  assert run.scale == 64.0
  run.state.hyperparams["max_norm"] = jnp.float32(NAN)
  np.testing.assert_array_equal(window(), f32(0, 0))
  assert not run.ran and run.metrics["nonfinite_steps"] == 1


def test_a_dynamic_scale_goes_through_inject_hyperparams_as_it_is(path):
  inject = optax.inject_hyperparams(ogc.clipped_multi_steps, static_args=("every_k",))
  tx = inject(optax.sgd(1.0), max_norm=lambda count: jnp.float32(1.0), every_k=1, loss_scale=ogc.DynamicLossScale(8.0))
  run = windows.Run(tx, f32(0, 0))
  np.testing.assert_allclose(run(f32(24, 32)), f32(-0.6, -0.8), rtol=1e-6)
  run(f32(NAN, 0))
  assert run.scale == 4.0


@pytest.mark.parametrize("every_k", [1, 2])
def test_max_norm_may_be_traced_or_infinite_or_zero(path, every_k):
  update = jax.jit(lambda max_norm, g, s: make(max_norm=max_norm, every_k=every_k).update(g, s))
  state = make(every_k=every_k).init(f32(0, 0))
  as_it_is, zeros = (-3, -4), (0, 0)
  for max_norm, want in (1, (-0.6, -0.8)), (5, as_it_is), (INF, as_it_is), (0, zeros), (NAN, zeros), (-1, zeros):
    for _ in range(every_k):
      updates, state = update(jnp.float32(max_norm), f32(3, 4), state)
    np.testing.assert_allclose(updates, f32(*want), rtol=1e-6)
    assert ogc.has_updated(state) == (max_norm >= 0)  # a NaN or a negative one skips the window
