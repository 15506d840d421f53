"""Do `debug_nans`, `debug_infs` and `checkify` find nothing where nothing is wrong? (Case 61.)

Nothing may compute a NaN, an infinity or a division by zero only for a `where` to throw it away.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
import sharded
from jax.experimental import checkify
from sharded import AUTO, EXPLICIT, P, make_mesh

pytestmark = [pytest.mark.slow, pytest.mark.reference_repeats]

INF, NAN = np.inf, np.nan


def f32(*values):
  return np.float32(values)


# Each makes a function one that raises where it computes what it should not. Eagerly JAX looks at what every operation
# gives, under `jit` at what comes out, and checkify at every operation of the program.


def debugged(*settings):
  def debug(function):
    def run(*args, **extra):
      with contextlib.ExitStack() as stack:
        for setting in settings:
          stack.enter_context(setting(True))
        return jax.block_until_ready(function(*args, **extra))
    return run
  return debug


def eager(function, settings):
  return debugged(*settings)(function)


def jitted(function, settings):
  return debugged(*settings)(jax.jit(lambda *args, **extra: function(*args, **extra)))


def checkified(function, settings):
  del settings
  def call(args, extra):
    return function(*args, **extra)
  run_checked = jax.jit(checkify.checkify(call, errors=checkify.float_checks))
  def run(*args, **extra):
    error, out = run_checked(args, extra)
    error.throw()
    return out
  return run


# What runs jitted and checkified computes as what runs jitted alone, and more of it is looked at.
@pytest.fixture(params=[eager, checkified], ids=lambda how: how.__name__)
def checked(request):
  """Makes a function one that computes neither NaN nor infinities nor divides by zero, or raises."""
  return functools.partial(request.param, settings=(jax.debug_nans, jax.debug_infs))


@pytest.fixture(params=[eager, jitted, checkified], ids=lambda how: how.__name__)
def checked_for_nan(request):
  """The same where an infinity comes in, and may be computed with."""
  return functools.partial(request.param, settings=(jax.debug_nans,))


# Threshold 10: [6, 8] is at it, to the bit. All but the last share their shapes, and so a program.
LIMIT = 10.0
GRADIENTS = {
    "above": {"a": f32(60, 80), "b": f32(0)},
    "at": {"a": f32(6, 8), "b": f32(0)},
    "below": {"a": f32(3, 4), "b": f32(1)},
    "zero": {"a": f32(0, 0), "b": f32(0)},
    "tiny": {"a": f32(1e-36, 1e-36), "b": f32(0)},
    "huge": {"a": f32(1e38, 1e38), "b": f32(1e38)},
    "mixed": {"a": f32(60, 0), "b": np.float16([0, 8]), "c": np.complex64([0, 80j]), "d": jnp.zeros(2, jnp.bfloat16),
              "e": np.zeros((0, 2), np.float32)},
}
# Of which derivatives are taken.
REAL = {name: GRADIENTS[name] for name in ("above", "at", "below", "zero", "tiny")}


def updates_of(tx):
  return lambda tree: tx.update(tree, tx.init(tree))[0]


CLIPS = {
    "global_clip": updates_of(ogc.global_clip(LIMIT)),
    "kernel": updates_of(ogc.global_clip(LIMIT, scale_stage="kernel")),
    "zero": updates_of(ogc.global_clip(LIMIT, on_nonfinite="zero")),
    "loss_scale": updates_of(ogc.global_clip(LIMIT, loss_scale=1.0)),
    "clip_tree": lambda tree: ogc.clip_tree(tree, LIMIT)[0],
    "per_tensor_clip": updates_of(ogc.per_tensor_clip(LIMIT)),
}
DERIVED = ["global_clip", "loss_scale", "per_tensor_clip"]


def oracle_clip(name, tree):
  return jax.tree.map(lambda leaf: oracle.clip(leaf, LIMIT), tree) if name == "per_tensor_clip" else \
      oracle.clip(tree, LIMIT)


@pytest.mark.parametrize("name", CLIPS)
def test_61_a_clip_of_finite_gradients_computes_nothing_but_numbers(path, name, checked):
  run = checked(CLIPS[name])
  for tree in GRADIENTS.values():
    for got, want in zip(*map(jax.tree.leaves, (run(tree), oracle_clip(name, tree))), strict=True):
      rtol = 2**-8 if got.dtype.itemsize == 2 else 1e-6
      np.testing.assert_allclose(oracle.real_elements(got), oracle.real_elements(want), rtol=rtol)


def test_61_norms_of_finite_gradients_compute_nothing_but_numbers(path, checked):
  run = checked(lambda tree: (ogc.global_norm(tree), ogc.leaf_norms(tree)))
  for tree in GRADIENTS.values():
    norm, norms = run(tree)
    np.testing.assert_allclose(norm, np.float64(oracle.norm(tree)), rtol=1e-6)
    for got, leaf in zip(*map(jax.tree.leaves, (norms, tree)), strict=True):
      np.testing.assert_allclose(got, np.float64(oracle.norm(leaf)), rtol=1e-6)


@pytest.mark.parametrize("make", [ogc.global_clip, ogc.per_tensor_clip], ids=["global", "per_tensor"])
def test_61_a_monitor_of_finite_gradients_computes_nothing_but_numbers(path, make, checked):
  tx = make(LIMIT, monitor=True)
  run = checked(lambda tree: ogc.clip_metrics(tx.update(tree, tx.init(tree))[1]))
  for tree in GRADIENTS.values():
    metrics = run(tree)
    judged = jax.tree.leaves(tree) if make is ogc.per_tensor_clip else [tree]
    factors = [min(1.0, LIMIT / float(oracle.norm(x))) if oracle.norm(x) > 0 else 1.0 for x in judged]
    np.testing.assert_allclose(metrics["clip_factor"], min(factors), rtol=1e-6)
    np.testing.assert_allclose(metrics["global_norm"], np.float64(oracle.norm(tree)), rtol=1e-6)
    assert metrics["nonfinite_steps"] == 0


def test_61_traced_thresholds_and_scales_compute_nothing_but_numbers(path, checked):
  @checked
  def run(tree, max_norm, loss_scale):
    tx = ogc.global_clip(max_norm, monitor=True)
    updates, state = tx.update(tree, tx.init(tree), loss_scale=loss_scale)
    return updates, ogc.clip_metrics(state)
  for name, max_norm in itertools.product(("above", "zero"), (0.0, 1e30, 1e-30)):
    updates, metrics = run(GRADIENTS[name], np.float32(max_norm), np.float32(4))
    want = oracle.clip(GRADIENTS[name], max_norm, loss_scale=4)
    np.testing.assert_allclose(updates["a"], want["a"].astype(np.float64), rtol=1e-6)
    assert bool(metrics["clipped_steps"]) == (name == "above" and max_norm < 1)


# Derivatives of sum(weights * clip(tree)): max / |x| (w - x <x, w> / |x|^2) where it clips, else w.


def weights_of(tree):
  return jax.tree.map(lambda leaf: np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape) - np.float32(1), tree)


def derivative(name, tree):
  if name == "per_tensor_clip":
    return jax.tree.map(lambda leaf: derivative("global_clip", [leaf])[0], tree)
  weights, norm = weights_of(tree), float(oracle.norm(tree))
  if norm <= LIMIT:
    return weights
  along = sum(np.sum(np.float64(x) * w) for x, w in zip(jax.tree.leaves(tree), jax.tree.leaves(weights))) / norm**2
  return jax.tree.map(lambda x, w: LIMIT / norm * (w - np.float64(x) * along), tree, weights)


def loss_of(name):
  def loss(tree):
    clipped = CLIPS[name](tree)
    return sum(jnp.sum(x * w) for x, w in zip(jax.tree.leaves(clipped), jax.tree.leaves(weights_of(tree))))
  return loss


def check_derivative(got, name, tree):
  for x, want in zip(*map(jax.tree.leaves, (got, derivative(name, tree))), strict=True):
    np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6)


def test_61_under_jit_the_debuggers_find_nothing_either(path):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), LIMIT, monitor=True)
  @functools.partial(jitted, settings=[jax.debug_nans, jax.debug_infs])
  def run(tree):
    return [clip(tree) for clip in CLIPS.values()], [jax.grad(loss_of(name))(tree) for name in DERIVED], tx.update(
        tree, tx.init(tree))[0], ogc.global_norm(tree), ogc.leaf_norms(tree)
  for tree in REAL.values():
    clipped, derivatives, updates, norm, _ = run(tree)
    for name, got in zip(CLIPS, clipped, strict=True):
      np.testing.assert_allclose(got["a"], oracle_clip(name, tree)["a"].astype(np.float64), rtol=1e-6)
    for name, got in zip(DERIVED, derivatives, strict=True):
      check_derivative(got, name, tree)
    np.testing.assert_allclose(updates["a"], -oracle.clip(tree, LIMIT)["a"].astype(np.float64), rtol=1e-6)
    np.testing.assert_allclose(norm, np.float64(oracle.norm(tree)), rtol=1e-6)


@pytest.mark.parametrize("name", DERIVED)
def test_61_the_gradient_of_a_clip_computes_nothing_but_numbers(path, name, checked):
  run = checked(jax.grad(loss_of(name)))
  for tree in REAL.values():
    check_derivative(run(tree), name, tree)


@pytest.mark.parametrize("name", DERIVED)
def test_61_the_gradients_of_a_batch_of_clips_compute_nothing_but_numbers(path, name, checked):
  batch = jax.tree.map(lambda *leaves: np.stack(leaves), *REAL.values())
  got = checked(jax.vmap(jax.grad(loss_of(name))))(batch)
  for i, tree in enumerate(REAL.values()):
    check_derivative(jax.tree.map(lambda leaf: leaf[i], got), name, tree)


@pytest.mark.parametrize("name", DERIVED)
def test_61_the_tangent_of_a_clip_computes_nothing_but_numbers(path, name, checked):
  run = checked(lambda tree, weights: jax.jvp(CLIPS[name], (tree,), (weights,))[1])
  for tree in REAL.values():
    check_derivative(run(tree, weights_of(tree)), name, tree)   # the Jacobian is symmetric


def test_61_the_derivative_of_mixed_dtypes_computes_nothing_but_numbers(path, checked):
  def loss(tree):
    clipped = CLIPS["clip_tree"](tree)
    return sum(jnp.sum(x.real.astype(jnp.float32) + x.imag.astype(jnp.float32)) for x in jax.tree.leaves(clipped))
  tree = GRADIENTS["mixed"]
  got = checked(jax.grad(loss))(tree)
  # Real parts are 60, 0, 0, 8, 0, 0 and imaginary ones 0, 80 where the leaf is complex; every weight is 1.
  norm = float(oracle.norm(tree))
  def want(x):
    return LIMIT / norm * (1 - x * (60 + 8 + 80) / norm**2)
  np.testing.assert_allclose(got["a"], [want(60), want(0)], rtol=1e-5)
  np.testing.assert_allclose(np.float32(got["b"]), [want(0), want(8)], rtol=2**-9)
  np.testing.assert_allclose(got["c"], [want(0) - 1j * want(0), want(0) - 1j * want(80)], rtol=1e-5)
  np.testing.assert_allclose(np.float32(got["d"]), [want(0)] * 2, rtol=2**-7)


def test_61_the_derivative_of_a_norm_computes_nothing_but_numbers(path, checked):
  of_tree = checked(jax.grad(ogc.global_norm))
  of_leaves = checked(jax.grad(lambda t: sum(jax.tree.leaves(ogc.leaf_norms(t)))))
  for tree in REAL.values():
    norm = float(oracle.norm(tree)) or 1.0
    for name, leaf in of_tree(tree).items():
      np.testing.assert_allclose(leaf, np.float64(tree[name]) / norm, rtol=1e-5, atol=1e-7)
    for name, leaf in of_leaves(tree).items():
      np.testing.assert_allclose(leaf, np.float64(tree[name]) / (float(oracle.norm(tree[name])) or 1.0), rtol=1e-5)


def test_61_a_second_derivative_computes_nothing_but_numbers(path, checked):
  # Of |clip(x)|^2 / 2, which above the threshold is constant.
  run = checked(jax.hessian(lambda x: jnp.sum(jnp.square(CLIPS["clip_tree"]([x])[0])) / 2))
  for x, want in (f32(3, 4), np.eye(2)), (f32(0, 0), np.eye(2)), (f32(60, 80), np.zeros((2, 2))):
    np.testing.assert_allclose(run(x), want, atol=1e-6)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
def test_61_a_sharded_clip_computes_nothing_but_numbers(path, kind, checked):
  mesh, specs = make_mesh(kind, shape=(4,), names=("x",)), {"w": P("x"), "b": P()}
  tx = ogc.global_clip(LIMIT, monitor=True)
  run = checked(lambda tree: tx.update(tree, tx.init(tree)))
  for values in np.arange(8, dtype=np.float32), np.zeros(8, np.float32):
    with jax.set_mesh(mesh):
      updates, state = run(sharded.put({"w": values, "b": f32(0)}, mesh, specs))
    np.testing.assert_allclose(state.global_norm, np.float64(oracle.norm(values)), rtol=1e-6)
    np.testing.assert_allclose(updates["w"], oracle.clip(values, LIMIT).astype(np.float64), rtol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Windows


class Windows:
  """Windows of sgd, each call of whose `update` is checked."""

  def __init__(self, checked, like, **options):
    self.params = jax.tree.map(lambda g: np.zeros(g.shape, np.float32), like)
    tx = ogc.clipped_multi_steps(optax.sgd(1.0, momentum=0.0), LIMIT, **options)
    self.state = tx.init(self.params)
    self.update = checked(tx.update)

  def __call__(self, *micro_batches, weights=None):
    """The last of the updates."""
    for i, batch in enumerate(micro_batches):
      batch = jax.tree.map(jnp.asarray, batch)   # here, for JAX looks also at what it moves to a device
      extra = {} if weights is None else {"weight": np.float32(weights[i])}
      updates, self.state = self.update(batch, self.state, self.params, **extra)
    return updates

  @property
  def ran(self):
    return bool(ogc.has_updated(self.state))

  @property
  def metrics(self):
    return {name: float(value) for name, value in ogc.clip_metrics(self.state).items()}


@pytest.mark.parametrize("options", [
    dict(every_k=1), dict(every_k=2), dict(every_k=1, loss_scale=8.0), dict(every_k=2, on_nonfinite="zero"),
    dict(every_k=1, loss_scale=ogc.DynamicLossScale(8.0), monitor=True),
    dict(every_k=2, loss_scale=ogc.DynamicLossScale(8.0), monitor=True)], ids=str)
def test_61_windows_of_finite_gradients_compute_nothing_but_numbers(path, options, checked):
  scale = 8.0 if "loss_scale" in options else 1.0
  run = Windows(checked, GRADIENTS["zero"], **options)
  for name in "above", "at", "zero":
    tree = GRADIENTS[name]
    updates = run(*[jax.tree.map(lambda g: np.float16(g * scale), tree)] * options["every_k"])
    np.testing.assert_allclose(updates["a"], -oracle.clip(tree, LIMIT)["a"].astype(np.float64), rtol=1e-6)
    norm = float(oracle.norm(tree))
    np.testing.assert_allclose(run.metrics["global_norm"], norm, rtol=1e-6)
    np.testing.assert_allclose(run.metrics["clip_factor"], min(1.0, LIMIT / norm) if norm else 1.0, rtol=1e-6)


@pytest.mark.parametrize("bad", [INF, NAN])
def test_61_what_comes_with_weight_zero_is_not_computed_with(path, bad, checked_for_nan):
  run = Windows(checked_for_nan, f32(0, 0), every_k=3)
  np.testing.assert_allclose(run(f32(3, 4), f32(bad, 1), f32(9, 12), weights=[1, 0, 1]), [-6, -8], rtol=1e-6)
  assert run.ran
  run = Windows(checked_for_nan, f32(0, 0), every_k=1)
  np.testing.assert_array_equal(run(f32(bad, 1), weights=[0]), f32(0, 0))
  assert not run.ran


@pytest.mark.parametrize("every_k", [1, 2])
def test_61_a_window_without_weight_computes_nothing_but_numbers(path, every_k, checked):
  run = Windows(checked, f32(0, 0), every_k=every_k)
  np.testing.assert_array_equal(run(*[f32(3, 4)] * every_k, weights=[0] * every_k), f32(0, 0))
  assert not run.ran and run.metrics["steps"] == 0


def check_skipped(run, updates):
  np.testing.assert_array_equal(updates, f32(0, 0))
  assert not run.ran and ogc.current_loss_scale(run.state) == 4
  assert run.metrics["global_norm"] == INF and run.metrics["nonfinite_steps"] == 1


DYNAMIC = dict(loss_scale=ogc.DynamicLossScale(8.0), monitor=True)


@pytest.mark.parametrize("micro_batches", [
    [[INF, 1]], [[-INF, INF]], [[INF, 1], [1, 1]], [[1, 1], [INF, 1]], [[INF, 1], [-INF, 1]]], ids=str)
def test_61_the_skip_of_an_overflow_computes_no_nan(path, micro_batches, checked_for_nan):
  run = Windows(checked_for_nan, f32(0, 0), every_k=len(micro_batches), **DYNAMIC)
  check_skipped(run, run(*map(np.float16, micro_batches)))
  # The gradients of the next window are of the scale that the skip left.
  np.testing.assert_allclose(run(*[np.float16([12, 16])] * len(micro_batches)), [-3, -4], rtol=1e-6)
  assert run.ran


def test_61_the_skip_of_a_sum_that_overflows_computes_no_nan(path, checked_for_nan):
  run = Windows(checked_for_nan, f32(0, 0), every_k=2, **DYNAMIC)
  check_skipped(run, run(*[f32(3e38, -3e38)] * 2, weights=[8, 8]))


# ----------------------------------------------------------------------------------------------------------------------
# Gradients that hold a NaN


@pytest.mark.parametrize("make", [ogc.global_clip, ogc.per_tensor_clip], ids=["global", "per_tensor"])
def test_61_nothing_that_comes_out_is_nan_where_a_nan_gradient_is_zeroed(path, make):
  tx = make(1.0, on_nonfinite="zero", monitor=True)
  run = jitted(lambda tree: tx.update(tree, tx.init(tree)), [jax.debug_nans])
  updates, state = run({"a": jnp.asarray([NAN, 1]), "b": jnp.asarray([2.0])})
  for leaf in jax.tree.leaves(updates):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
  assert state.global_norm == INF and state.nonfinite_steps == 1


@pytest.mark.parametrize("monitor", [False, True])
@pytest.mark.parametrize("on_nonfinite", ["skip", "zero"])
@pytest.mark.parametrize("every_k, at", [(1, 0), (2, 0), (2, 1)])
def test_61_nothing_that_comes_out_of_a_nan_window_is_nan(path, every_k, at, on_nonfinite, monitor):
  run = Windows(functools.partial(jitted, settings=[jax.debug_nans]), f32(0, 0), every_k=every_k, monitor=monitor,
                on_nonfinite=on_nonfinite)
  updates = run(*(f32(NAN if i == at else 1, 1) for i in range(every_k)))
  np.testing.assert_array_equal(updates, f32(0, 0))
  assert run.metrics["global_norm"] == INF and run.ran == (on_nonfinite == "zero")


@pytest.mark.parametrize("how", [eager, jitted])
@pytest.mark.parametrize("make", [ogc.global_clip, ogc.per_tensor_clip], ids=["global", "per_tensor"])
def test_61_a_nan_that_is_propagated_is_found(path, make, how):
  tx = make(1.0)
  run = how(lambda tree: tx.update(tree, tx.init(tree))[0], [jax.debug_nans])
  for value in jnp.asarray([NAN, 1]), jnp.asarray([INF, 1]):
    with pytest.raises(FloatingPointError, match="nan"):
      run({"a": value})
