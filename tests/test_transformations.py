"""The clip under JAX's transformations: compiled, donated, looped, batched, differentiated, cached and exported."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import processes
import pytest
from programs import targets

TREE = {"a": np.array([3, 4], np.float32), "b": np.full((2, 3), 2, np.float32)}
NORM = 7.0  # 25 + 6 * 4 = 49
MONITORED = ogc.global_clip(1.0, monitor=True)


def clip(tree, max_norm=1.0, scale_stage="kernel"):
  return ogc.global_clip(max_norm, scale_stage=scale_stage).update(tree, optax.EmptyState())[0]


def expect(updates, factor=1 / NORM):
  jax.tree.map(lambda u, g: np.testing.assert_allclose(u, g * factor, rtol=1e-6), updates, TREE)


# ----------------------------------------------------------------------------------------------------------------------
# jit and donation (case 55)


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_what_is_not_donated_is_unchanged_to_the_bit(max_norm, path):
  tree = jax.device_put(TREE)
  updates = jax.jit(functools.partial(clip, max_norm=max_norm))(tree)
  eager = clip(tree, max_norm)
  assert oracle.same_bits(tree, TREE)
  expect(updates, min(1, max_norm / NORM))
  expect(eager, min(1, max_norm / NORM))


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_donated_gradients_are_clipped_in_place(max_norm, monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  tree = jax.tree.map(lambda g: jnp.tile(g, 100), TREE)  # device_put may share NumPy's memory, which is not donated
  addresses = sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree))
  updates = jax.jit(functools.partial(clip, max_norm=max_norm), donate_argnums=0)(tree)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(tree))
  assert sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(updates)) == addresses


def test_gradients_and_monitor_may_be_donated_from_the_first_step_on(path):
  step = jax.jit(MONITORED.update, donate_argnums=(0, 1))
  state = MONITORED.init(TREE)
  for n in range(1, 4):
    updates, state = step(jax.device_put(TREE), state)
    expect(updates)
    assert state.steps == n


def test_the_same_array_may_stand_at_two_leaves(path):
  w = jnp.array([3.0, 4.0])
  updates, norm = jax.jit(ogc.clip_tree)([w, w], 1.0)
  np.testing.assert_allclose(norm, np.sqrt(50), rtol=1e-6)
  np.testing.assert_allclose(updates[1], np.array([3, 4]) / np.sqrt(50), rtol=1e-6)
  np.testing.assert_array_equal(w, [3, 4])


def test_gradients_used_again_after_the_clip_are_the_unclipped_ones(path):
  @jax.jit
  def run(tree):
    gradients = jax.tree.map(lambda g: g * 1, tree)
    return clip(gradients), gradients, ogc.global_norm(gradients)
  updates, gradients, norm = run(TREE)
  expect(updates)
  assert oracle.same_bits(gradients, TREE) and norm == NORM


# ----------------------------------------------------------------------------------------------------------------------
# Control flow


def test_a_monitored_clip_is_a_scan_carry(path):
  def body(state, scale):
    updates, state = MONITORED.update(jax.tree.map(lambda g: g * scale, TREE), state)
    return state, (ogc.global_norm(updates), state.global_norm)
  scales = jnp.array([1.0, 0.1, jnp.nan, jnp.inf, 2.0])
  state, (after, before) = jax.jit(lambda s: jax.lax.scan(body, MONITORED.init(TREE), s))(scales)
  np.testing.assert_allclose(np.asarray(after)[[0, 1, 4]], [1, 0.7, 1], rtol=1e-6)
  np.testing.assert_allclose(np.asarray(before)[[0, 1, 4]], [7, 0.7, 14], rtol=1e-6)
  assert (state.steps, state.clipped_steps, state.nonfinite_steps, state.consecutive_nonfinite) == (5, 2, 2, 0)


def test_a_clip_inside_a_branch(path):
  @jax.jit
  def run(tree, on):
    return jax.lax.cond(on, clip, lambda t: t, tree)
  expect(run(TREE, True))
  assert oracle.same_bits(run(TREE, False), TREE)


def test_a_clip_inside_a_loop_whose_length_is_data(path):
  @jax.jit
  def run(tree, n):
    return jax.lax.fori_loop(0, n, lambda i, t: clip(t, 7.0 / (i + 2)), tree)
  expect(run(TREE, 3), 1 / 4)


def test_outside_of_jit_a_rematerialised_clip_runs_too(path):
  gradient = jax.grad(jax.checkpoint(lambda tree: ogc.global_norm(clip(tree, 0.5))))(TREE)
  jax.tree.map(lambda g: np.testing.assert_allclose(g, np.zeros_like(g), atol=1e-6), gradient)
  norm = jax.checkpoint(ogc.global_norm)(TREE)
  np.testing.assert_allclose(norm, NORM, rtol=1e-6)


def test_with_jit_disabled_everything_runs(path):
  with jax.disable_jit():
    np.testing.assert_allclose(ogc.global_norm(TREE), NORM, rtol=1e-6)
    expect(clip(TREE))
    tx = ogc.clipped_multi_steps(optax.identity(), 1.0, monitor=True)
    expect(tx.update(TREE, tx.init(TREE), TREE)[0])


@pytest.mark.parametrize("make", [ogc.global_clip, lambda m, **o: ogc.clipped_multi_steps(optax.identity(), m, **o)],
                         ids=["global_clip", "clipped_multi_steps"])
def test_finite_gradients_pass_under_debug_nans(make, path):
  tx = make(1.0, monitor=True)
  state = tx.init(TREE)
  with jax.debug_nans(True):
    expect(tx.update(TREE, state, TREE)[0])


@pytest.mark.parametrize("scale", [1e-37, 1.0, 1e37, 6e37])
def test_derivatives_are_right_up_to_the_largest_norms(scale, path):
  x = np.array([3, 4], np.float32) * np.float32(scale)  # the norm's reciprocal is subnormal from 2^126 on
  np.testing.assert_allclose(jax.grad(lambda x: ogc.global_norm([x]))(x), [0.6, 0.8], rtol=1e-5)
  jacobian = jax.jacobian(lambda x: clip([x], np.float32(2 * scale))[0])(x)
  np.testing.assert_allclose(jacobian, 0.4 * np.array([[0.64, -0.48], [-0.48, 0.36]]), rtol=1e-5)


def test_a_rematerialised_clip_has_the_same_gradient(path):
  def loss(tree, wrap):
    return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(wrap(lambda t: clip(t))(tree)))
  plain, rematerialised = jax.jit(lambda tree: [jax.grad(functools.partial(loss, wrap=wrap))(tree)
                                                for wrap in (lambda f: f, jax.checkpoint)])(TREE)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), plain, rematerialised)


# ----------------------------------------------------------------------------------------------------------------------
# vmap


FACTORS = np.array([1, 0.1, 100, np.nan, 0], np.float32)


def test_each_member_of_a_batch_has_its_own_norm(path):
  batch = jax.tree.map(lambda g: np.stack([g * f for f in FACTORS]), TREE)
  updates = jax.jit(jax.vmap(clip))(batch)
  norms = jax.vmap(ogc.global_norm)(batch)
  np.testing.assert_allclose(norms, NORM * FACTORS, rtol=1e-6)
  for i, factor in enumerate(FACTORS):
    member = jax.tree.map(lambda u: u[i], updates)
    if np.isnan(factor):
      assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(member))
    else:
      expect(member, min(factor, 1 / NORM))


def test_each_member_of_a_batch_of_batches_has_its_own_norm(path):
  batch = jax.tree.map(lambda g: np.stack([[g, g * 2, g * 0.1], [g * 3, g * 4, g * 5]]), TREE)
  norms = jax.jit(jax.vmap(jax.vmap(ogc.global_norm)))(batch)
  np.testing.assert_allclose(norms, NORM * np.array([[1, 2, 0.1], [3, 4, 5]]), rtol=1e-6)
  updates = jax.jit(jax.vmap(jax.vmap(clip)))(batch)
  after = jax.vmap(jax.vmap(ogc.global_norm))(updates)
  np.testing.assert_allclose(after, [[1, 1, 0.7], [1, 1, 1]], rtol=1e-6)


def test_a_batch_along_other_axes_or_of_thresholds_alone(path):
  rows = np.array([[3, 6], [4, 8]], np.float32)
  np.testing.assert_allclose(jax.vmap(clip, in_axes=1, out_axes=1)(rows), [[0.6, 0.6], [0.8, 0.8]], rtol=1e-6)
  clipped = jax.vmap(lambda m: ogc.clip_tree([np.array([3, 4], np.float32)], m)[0][0])(jnp.array([1.0, 2.5, 9.0]))
  np.testing.assert_allclose(clipped, [[0.6, 0.8], [1.5, 2.0], [3, 4]], rtol=1e-6)


def test_a_batch_of_which_one_leaf_is_shared(path):
  batched = np.array([[3], [6]], np.float32)
  shared = np.array([4], np.float32)
  norms = jax.vmap(lambda b, s: ogc.global_norm([b, s]), in_axes=(0, None))(batched, shared)
  np.testing.assert_allclose(norms, [5, np.sqrt(52)], rtol=1e-6)
  updates = jax.vmap(lambda b, s: clip([b, s]), in_axes=(0, None))(batched, shared)
  np.testing.assert_allclose(updates[1], 4 / np.array([[5], [np.sqrt(52)]]), rtol=1e-6)


def test_per_example_gradients_are_clipped_one_by_one(path):
  def loss(w, x):
    return jnp.dot(w, x)
  examples = np.array([[3, 4], [0.3, 0.4], [6, 8]], np.float32)
  clipped = jax.jit(jax.vmap(lambda x: clip(jax.grad(loss)(jnp.zeros(2), x))))(examples)
  np.testing.assert_allclose(clipped, [[0.6, 0.8], [0.3, 0.4], [0.6, 0.8]], rtol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives


def as_vector(f):
  """A function of a tree of two leaves as one of a vector of four."""
  def of_vector(x, *args):
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(f({"a": x[:3], "b": x[3]}, *args))])
  return of_vector


def finite_differences(f, x, h=1e-3):
  x = np.asarray(x, np.float64)
  steps = np.eye(x.size).reshape(x.size, *x.shape) * h
  return np.stack([(np.asarray(f(x + s), np.float64) - np.asarray(f(x - s), np.float64)) / (2 * h) for s in steps], -1)


@pytest.mark.parametrize("jacobian", [jax.jacfwd, jax.jacrev])
def test_the_jacobian_at_3_4_is_that_of_a_projection(jacobian, path):
  got = jax.jit(jacobian(lambda x: clip([x])[0]))(jnp.array([3.0, 4.0]))
  np.testing.assert_allclose(got, [[0.128, -0.096], [-0.096, 0.072]], rtol=1e-5)


def test_below_the_threshold_the_jacobian_is_the_identity(path):
  np.testing.assert_array_equal(jax.jit(jax.jacfwd(lambda x: clip([x], 9.0)[0]))(jnp.array([3.0, 4.0])), np.eye(2))


def test_the_gradient_of_the_norm_is_the_unit_vector(path):
  gradient = jax.jit(jax.grad(ogc.global_norm))(TREE)
  jax.tree.map(lambda d, g: np.testing.assert_allclose(d, g / NORM, rtol=1e-6), gradient, TREE)


def test_the_gradients_of_leaf_norms_are_unit_vectors_of_their_leaves(path):
  gradient = jax.jit(jax.grad(lambda tree: ogc.leaf_norms(tree)["a"]))(TREE)
  np.testing.assert_allclose(gradient["a"], [0.6, 0.8], rtol=1e-6)
  np.testing.assert_array_equal(gradient["b"], np.zeros((2, 3)))


def test_at_zero_all_derivatives_are_finite(path):
  def length_after(x):
    return jnp.sum(jnp.square(jnp.concatenate(clip([x[:2], x[2:]]))))
  @jax.jit
  def derivatives(x):
    return (jax.grad(lambda x: ogc.global_norm([x]))(x), jax.hessian(lambda x: ogc.global_norm([x]))(x),
            jax.grad(length_after)(x), jax.hessian(length_after)(x),
            jax.jacrev(lambda x: clip([x], 0.0)[0])(x))
  of_norm, *rest = derivatives(jnp.zeros(3))
  np.testing.assert_array_equal(of_norm, np.zeros(3))
  for derivative in rest:
    assert np.isfinite(derivative).all()


def test_the_hessian_of_the_norm_is_that_of_the_formula(path):
  x = np.array([1, 2, 2], np.float32)
  unit = x / 3
  want = (np.eye(3) - np.outer(unit, unit)) / 3
  np.testing.assert_allclose(jax.jit(jax.hessian(lambda v: ogc.global_norm([v])))(x), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per_leaf", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_all_derivatives_agree_with_finite_differences(per_leaf, scaled, path, x64):
  make = ogc.per_tensor_clip if per_leaf else ogc.global_clip
  def f(tree, max_norm, scale):
    extra = dict(loss_scale=scale) if scaled else {}
    return make(max_norm).update(tree, optax.EmptyState(), **extra)[0]
  flat = as_vector(f)
  @jax.jit
  def everything(x, max_norm, scale):
    return (flat(x, max_norm, scale), jax.jacfwd(flat, argnums=(0, 1))(x, max_norm, scale),
            jax.jacrev(flat, argnums=(0, 1))(x, max_norm, scale))
  x, max_norm, scale = np.array([3.0, -4.0, 1.0, 2.5]), np.array(1.5), np.array(2.0, np.float32)
  _, (d_x, d_max), backward = everything(x, max_norm, scale)
  np.testing.assert_allclose(d_x, finite_differences(lambda v: everything(v, max_norm, scale)[0], x), rtol=1e-5, atol=1e-7)
  up, down = (everything(x, max_norm + h, scale)[0] for h in (1e-4, -1e-4))
  np.testing.assert_allclose(d_max, (up - down) / 2e-4, rtol=1e-5, atol=1e-7)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), (d_x, d_max), backward)


@pytest.mark.parametrize("max_norm", [1.5, 100.0])
def test_the_derivative_with_respect_to_the_loss_scale_agrees_with_finite_differences(max_norm, path, x64):
  x = np.array([3.0, -4.0, 1.0, 2.5])
  def f(scale):
    return as_vector(lambda tree: ogc.global_clip(max_norm).update(tree, optax.EmptyState(), loss_scale=scale)[0])(x)
  h = 2.0**-10
  f_and_derivative = jax.jit(lambda s: (f(s), jax.jacfwd(f)(s)))
  _, got = f_and_derivative(jnp.float32(2))
  want = (f_and_derivative(jnp.float32(2 + h))[0] - f_and_derivative(jnp.float32(2 - h))[0]) / (2 * h)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-8)  # where it clips the scale cancels, and this is zero


def test_complex_leaves_have_the_derivative_of_their_parts(path):
  z = np.array([3 + 4j, 1 - 2j], np.complex64)
  def real(parts):
    out = clip([jax.lax.complex(*parts)])[0]
    return jnp.stack([out.real, out.imag])
  def reference(parts):
    norm = jnp.sqrt(jnp.sum(jnp.square(parts)))
    return parts / norm
  parts = np.stack([z.real, z.imag])
  forward, backward, want = jax.jit(lambda p: (jax.jacfwd(real)(p), jax.jacrev(real)(p), jax.jacfwd(reference)(p)))(parts)
  np.testing.assert_allclose(forward, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(backward, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_leaves_have_derivatives_of_their_own_dtype(dtype, path):
  x = np.array([3, 4], dtype)
  jacobian, gradient = jax.jit(lambda x: (jax.jacrev(lambda x: clip([x])[0])(x), jax.grad(lambda x: ogc.global_norm([x]))(x)))(x)
  assert jacobian.dtype == dtype and gradient.dtype == dtype
  np.testing.assert_allclose(jacobian.astype(np.float32), [[0.128, -0.096], [-0.096, 0.072]], rtol=2**-7)


def test_a_nonfinite_gradient_has_a_nan_derivative_or_none_where_the_updates_are_zero(path):
  x = jnp.array([np.inf, 1.0])
  def f(x, policy):
    return ogc.global_clip(1.0, on_nonfinite=policy).update([x], optax.EmptyState())[0][0]
  of_nan, of_zero = jax.jit(lambda x: [jax.jacfwd(functools.partial(f, policy=p))(x) for p in ("propagate", "zero")])(x)
  assert np.isnan(of_nan).all()
  np.testing.assert_array_equal(of_zero, np.zeros((2, 2)))


def test_derivatives_of_a_batch(path):
  batch = np.array([[3, 4], [0.3, 0.4]], np.float32)
  got, through = jax.jit(lambda b: (
      jax.vmap(jax.jacrev(lambda x: clip([x])[0]))(b),
      jax.grad(lambda b: jnp.sum(jax.vmap(lambda x: clip([x])[0])(b)[:, 0]))(b)))(batch)
  np.testing.assert_allclose(got, [[[0.128, -0.096], [-0.096, 0.072]], np.eye(2)], rtol=1e-5)
  np.testing.assert_allclose(through, [[0.128, -0.096], [1, 0]], rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Programs: what is in them, and where they may be kept


@pytest.mark.parametrize("options", [{}, {"monitor": True}, {"on_nonfinite": "zero"}, {"loss_scale": 2.0}], ids=str)
def test_no_step_moves_anything_to_or_from_the_host(options, path):
  tx = ogc.global_clip(1.0, **options)
  step = jax.jit(tx.update)
  tree, state = jax.device_put(TREE), tx.init(TREE)
  compiled = step.lower(tree, state).compile()
  with jax.transfer_guard("disallow"):
    for _ in range(2):
      updates, state = compiled(tree, state)
  jax.block_until_ready(updates)
  assert "callback" not in compiled.as_text()


def test_clip_tree_and_norms_move_nothing_either(path):
  tree = jax.device_put(TREE)
  for f in (lambda t: ogc.clip_tree(t, 1.0), ogc.global_norm, ogc.leaf_norms):
    compiled = jax.jit(f).lower(tree).compile()
    with jax.transfer_guard("disallow"):
      jax.block_until_ready(compiled(tree))
    assert "callback" not in compiled.as_text()


def test_148_leaves_are_one_native_call(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  tree = [np.ones(8, np.float32)] * 148
  for function, target in ((clip, "clip"), (lambda t: clip(t, scale_stage="auto"), "norm"), (ogc.global_norm, "norm")):
    found = targets(jax.jit(lambda t: function(t)).lower(tree).as_text())
    assert found == {f"optax_globalclip_{target}_cpu_v1": 1}


def test_the_reference_path_makes_no_native_call(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "reference")
  tree = [np.ones(8, np.float32)] * 4
  assert targets(jax.jit(lambda t: clip(t)).lower(tree).as_text()) == {}


PRELUDE = "import json, pathlib, jax, jax.numpy as jnp, numpy as np, optax, optax_globalclip as ogc"


def elsewhere(code, backend):
  return processes.answer(processes.python(PRELUDE, code), timeout=120, OPTAX_GLOBALCLIP_BACKEND=backend)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_second_process_finds_the_program_in_the_persistent_cache(backend, tmp_path):
  code = """
      jax.config.update("jax_compilation_cache_dir", {folder!r})
      jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
      jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
      events = []
      jax.monitoring.register_event_listener(lambda name, **kwargs: events.append(name))
      tx = ogc.global_clip(1.0)
      updates, _ = jax.jit(tx.update)([jnp.array([3.0, 4.0])], optax.EmptyState())
      print(json.dumps(dict(
          hits=events.count("/jax/compilation_cache/cache_hits"), misses=events.count("/jax/compilation_cache/cache_misses"),
          updates=np.asarray(updates[0]).tolist())))
  """.format(folder=str(tmp_path))
  first, second = elsewhere(code, backend), elsewhere(code, backend)
  assert first["misses"] > 0
  assert second["misses"] == 0 and second["hits"] >= first["misses"]
  np.testing.assert_allclose(first["updates"], [0.6, 0.8], rtol=1e-6)
  assert second["updates"] == first["updates"]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_an_exported_program_runs_in_another_process(backend, monkeypatch, tmp_path):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", backend)
  checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ogc.custom_call_targets()]
  exported = jax.export.export(jax.jit(lambda tree: ogc.clip_tree(tree, 1.0)),
                               disabled_checks=checks if backend == "native" else ())(TREE)
  updates, norm = exported.call(TREE)
  expect(updates)
  assert norm == NORM
  pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
  (tmp_path / "clip").write_bytes(exported.serialize())
  norm = elsewhere(f"""
      ogc.custom_call_targets()
      exported = jax.export.deserialize(bytearray(pathlib.Path({str(tmp_path / "clip")!r}).read_bytes()))
      _, norm = exported.call({{"a": np.array([3, 4], np.float32), "b": np.full((2, 3), 2, np.float32)}})
      print(json.dumps(float(norm)))
  """, backend)
  assert norm == NORM


def test_without_disabled_checks_export_names_the_custom_call(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  with pytest.raises(ValueError, match="optax_globalclip_clip_cpu_v1"):
    jax.export.export(jax.jit(lambda t: clip(t)))(TREE)


def test_a_program_lowered_for_other_platforms_takes_the_reference_there(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "auto")
  traced = jax.jit(lambda tree: clip(tree)).trace(TREE)
  assert targets(traced.lower(lowering_platforms=("tpu",)).as_text()) == {}
  assert targets(traced.lower(lowering_platforms=("cpu",)).as_text()) == {"optax_globalclip_clip_cpu_v1": 1}


def test_an_abstract_evaluation_computes_nothing_and_knows_the_types(path):
  out = jax.eval_shape(lambda t: ogc.clip_tree(t, 1.0), jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape, jnp.bfloat16), TREE))
  assert out[1].dtype == jnp.float32 and out[1].shape == ()
  assert {leaf.dtype for leaf in jax.tree.leaves(out[0])} == {jnp.dtype("bfloat16")}
