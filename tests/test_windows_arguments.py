"""What `clipped_multi_steps` takes, what it refuses and in which words, and what it hands on to the optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import windows
from windows import f32

NAN, INF = np.nan, np.inf
PARAMS = [np.zeros(2, np.float32)]


def make(inner=None, max_norm=10.0, **options):
  return ogc.clipped_multi_steps(inner or optax.sgd(1.0), max_norm, **(dict(every_k=2) | options))


@pytest.mark.parametrize("options, error, words", [
    (dict(every_k=0), ValueError, "every_k: expected at least 1, got 0"),
    (dict(every_k=-3), ValueError, "every_k"),
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


# Weights


def test_the_mean_is_weighted(path):
  run = windows.Run(make(every_k=3), f32(0))
  for gradient, weight in (1, 1), (2, 2), (5, 7):
    updates = run(f32(gradient), weight=weight)
  np.testing.assert_allclose(updates, f32(-4), rtol=1e-6)
  for gradient in 1, 2, 6:
    updates = run(f32(gradient))
  np.testing.assert_allclose(updates, f32(-3), rtol=1e-6)


@pytest.mark.parametrize("weight", [0, 0.0, np.float32(0), jnp.asarray(0), jnp.bfloat16(0)])
def test_weight_zero_contributes_nothing_even_where_it_is_nan(path, weight):
  run = windows.Run(make(every_k=3), f32(0, 0))
  run(f32(2, 4), weight=3)
  run(f32(NAN, INF), weight=weight)
  np.testing.assert_array_equal(run(f32(4, 8), weight=1), f32(-2.5, -5))


@pytest.mark.parametrize("every_k", [1, 2])
def test_a_window_of_no_weight_does_nothing(path, every_k):
  run = windows.Run(make(optax.sgd(1.0, momentum=0.5), every_k=every_k, loss_scale=ogc.DynamicLossScale(8.0)), f32(0))
  for _ in range(every_k):
    updates = run(f32(NAN), weight=0.0)
  np.testing.assert_array_equal(updates, f32(0))
  assert not run.ran and run.scale == 8.0 and run.metrics["steps"] == run.metrics["nonfinite_steps"] == 0
  assert int(run.state.micro_step) == 0 and float(optax.tree.get(run.state, "trace")[0]) == 0
  for _ in range(every_k):
    updates = run(f32(8), weight=2.0)
  np.testing.assert_array_equal(updates, f32(-1))
  assert run.ran


@pytest.mark.parametrize("every_k", [1, 2])
def test_a_window_of_ones_weight_is_the_plain_mean_whatever_the_weight(path, every_k):
  for dtype in np.float32, jnp.bfloat16:
    run = windows.Run(make(every_k=every_k, loss_scale=4.0), jnp.zeros(1, dtype))
    for _ in range(every_k):
      updates = run(jnp.full(1, 12, dtype), weight=np.float32(1000))
    assert updates.dtype == dtype and updates == -3


@pytest.mark.parametrize("on_nonfinite, fill", [("skip", 0), ("zero", 0), ("propagate", NAN)])
@pytest.mark.parametrize("every_k", [1, 2])
def test_a_traced_weight_that_is_no_weight_is_a_non_finite_window(on_nonfinite, fill, every_k):
  run = windows.Run(make(every_k=every_k, on_nonfinite=on_nonfinite), f32(0))
  for weight in -1.0, NAN, INF:
    for _ in range(every_k):
      updates = run(f32(1), weight=jnp.float32(weight))
    np.testing.assert_array_equal(updates, f32(fill))
  assert run.metrics["nonfinite_steps"] == 3


def test_weights_whose_sum_overflows_make_the_window_non_finite():
  run = windows.Run(make(), f32(0))
  for _ in range(2):
    updates = run(f32(2.0**-100), weight=3e38)
  np.testing.assert_array_equal(updates, f32(0))
  assert run.metrics["nonfinite_steps"] == 1


def test_a_finite_window_whose_sum_overflows_is_non_finite(path):
  run = windows.Run(make(loss_scale=ogc.DynamicLossScale(1.0)), f32(0))
  for _ in range(2):
    updates = run(f32(3e38))
  np.testing.assert_array_equal(updates, f32(0))
  assert run.metrics["nonfinite_steps"] == 1


# The ends of windows


def test_boundaries_may_be_traced_and_false_is_as_none(path):
  run = windows.Run(make(every_k=3), f32(0))
  emitted = [run(f32(g), boundary=np.bool_(b)).item() for g, b in
             [(1, False), (3, True), (1, False), (2, False), (3, False), (7, True), (1, False)]]
  assert emitted == [0, -2, 0, 0, -2, -7, 0]
  assert make().update(f32(1), make().init(f32(0)), boundary=True)[0].item() == -1


def test_a_window_may_end_early_and_bad(path):
  run = windows.Run(make(every_k=4, loss_scale=ogc.DynamicLossScale(8.0)), f32(0))
  run(f32(NAN))
  assert run(f32(8), boundary=True).item() == 0 and run.scale == 4.0
  assert run(f32(8), boundary=True).item() == -2


@pytest.mark.parametrize("schedule", [
    lambda step: jnp.where(step < 1, 2, 3),
    lambda step: 2 + (step >= 1),
    optax.piecewise_constant_schedule(2.0, {1: 1.5}),
    lambda step: jnp.where(step < 1, jnp.int8(2), jnp.int8(3)),
])
def test_every_k_may_be_a_schedule_of_the_optimizer_step(schedule, standard_promotion):
  run = windows.Run(make(every_k=schedule), f32(0))
  emitted = [run(f32(g)).item() for g in (1, 1, 1, 1, 1, 1, 1, 1)]
  assert emitted == [0, -1, 0, 0, -1, 0, 0, -1]


def test_skipped_windows_do_not_advance_the_schedule_of_every_k():
  run = windows.Run(make(every_k=lambda step: step + 1), f32(0))
  emitted = [run(f32(g)).item() for g in (NAN, NAN, 1, NAN, 1, 1, 1)]
  assert emitted == [0, 0, -1, 0, 0, 0, -1]
  assert int(run.state.optimizer_step) == 2


def test_a_schedule_may_say_one(path):
  run = windows.Run(make(every_k=lambda step: 1), f32(0))
  assert [run(f32(g)).item() for g in (1, 2)] == [-1, -2]


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
    assert ogc.has_updated(state) == (max_norm >= 0)   # a NaN or a negative one skips the window


# What reaches the optimizer


def recording(log):
  def update(updates, state, params=None, **extra):
    log.append((jax.tree.map(lambda g: g.dtype, updates), jax.tree.map(lambda p: p.dtype, params), sorted(extra)))
    return updates, state
  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def test_the_optimizer_sees_wide_gradients_and_parameters_and_the_other_arguments():
  log = []
  params = {"w": jnp.zeros(2, jnp.bfloat16)}
  for every_k in 1, 2:
    run = windows.Run(make(recording(log), every_k=every_k, loss_scale=2.0), params)
    log.clear()
    for _ in range(every_k):
      updates = run({"w": jnp.ones(2, jnp.bfloat16)}, weight=1.0, boundary=False, loss_scale=2.0, value=1.0)
    assert updates["w"].dtype == jnp.bfloat16
    assert set(map(str, log)) == {str(({"w": np.dtype("float32")}, {"w": np.dtype("float32")}, ["value"]))}


def test_extra_arguments_are_those_of_the_call_that_ends_the_window():
  def update(updates, state, params=None, *, value):
    del params
    return jax.tree.map(lambda g: g * value, updates), state
  inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
  run = windows.Run(make(inner), f32(0))
  run(f32(1), value=jnp.float32(1000))
  assert run(f32(1), value=jnp.float32(3)).item() == 3


def test_an_optimizer_without_extra_arguments_is_not_troubled_by_them(path):
  run = windows.Run(make(), f32(0))
  for _ in range(2):
    updates = run(f32(1), value=jnp.float32(3))
  assert updates.item() == -1


@pytest.mark.parametrize("every_k", [1, 2])
def test_parameters_may_be_left_out(every_k):
  tx = make(every_k=every_k)
  state, update = tx.init(jnp.zeros(1, jnp.bfloat16)), jax.jit(tx.update)
  for _ in range(every_k):
    updates, state = update(jnp.ones(1, jnp.bfloat16), state)
  assert updates.dtype == np.float32 and updates.item() == -1


def test_update_dtype_overrides_the_parameters(path):
  for dtype in "bfloat16", np.float32, jnp.float16:
    run = windows.Run(make(update_dtype=dtype), jnp.zeros(1, jnp.bfloat16))
    for _ in range(2):
      updates = run(jnp.full(1, 0.3, jnp.bfloat16))
      assert updates.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.float32(updates), f32(-0.30078125), rtol=1e-6)


def test_an_optimizer_whose_state_holds_python_numbers_and_keys(standard_promotion):
  def update(updates, state, params=None):
    del params
    return updates, {"calls": state["calls"] + 1, "key": jax.random.split(state["key"])[0]}
  inner = optax.GradientTransformation(lambda params: {"calls": 0, "key": jax.random.key(0)}, update)
  run = windows.Run(make(inner), f32(0))
  types = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), run.state)
  for _ in range(4):
    run(f32(1))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), run.state) == types
  assert int(run.state.inner_state["calls"]) == 2
  assert run.state.inner_state["key"] == jax.random.split(jax.random.split(jax.random.key(0))[0])[0]


# Raising


@pytest.mark.parametrize("every_k", [1, 2])
def test_raise_names_the_leaves_at_the_end_of_the_window(path, every_k):
  tx = make(every_k=every_k, on_nonfinite="raise")
  params = {"a": f32(0, 0), "b": f32(0)}
  state = tx.init(params)
  batch = {"a": f32(NAN, INF), "b": f32(1)}
  for _ in range(every_k - 1):
    _, state = tx.update(batch, state, params)
  with pytest.raises(FloatingPointError, match=r"updates\['a'\] \(2 elements\)$"):
    tx.update(batch, state, params)


@pytest.mark.parametrize("every_k", [1, 2])
def test_raise_under_jit_is_a_runtime_error_that_says_the_same(path, every_k):
  tx = make(every_k=every_k, on_nonfinite="raise")
  params = {"a": f32(0, 0), "b": f32(0)}
  update, state = jax.jit(tx.update), tx.init(params)
  for _ in range(every_k):
    updates, state = update({"a": f32(1, 1), "b": f32(1)}, state, params)
  np.testing.assert_array_equal(updates["a"], f32(-1, -1))
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"FloatingPointError.*updates\['b'\]"):
    for _ in range(every_k):
      updates, state = update({"a": f32(1, 1), "b": f32(NAN)}, state, params)
    jax.block_until_ready(updates)
    jax.effects_barrier()


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


@pytest.mark.parametrize("inner", [1.0, optax.adamw, None])
def test_an_inner_that_is_no_transformation_is_refused(inner):
  with pytest.raises(TypeError, match="inner: expected an optax.GradientTransformation, got"):
    ogc.clipped_multi_steps(inner, 1.0)
