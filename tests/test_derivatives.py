"""The derivatives of norm and clip: forward, backward and of second order, at zero, in a batch, rematerialised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
from seven import NORM, TREE, clip


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
  want = finite_differences(lambda v: everything(v, max_norm, scale)[0], x)
  np.testing.assert_allclose(d_x, want, rtol=1e-5, atol=1e-7)
  up, down = (everything(x, max_norm + h, scale)[0] for h in (1e-4, -1e-4))
  np.testing.assert_allclose(d_max, (up - down) / 2e-4, rtol=1e-5, atol=1e-7)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), (d_x, d_max), backward)


@pytest.mark.parametrize("scale", [1e-37, 1.0, 1e37, 6e37])
def test_derivatives_are_right_up_to_the_largest_norms(scale, path):
  x = np.array([3, 4], np.float32) * np.float32(scale)  # the norm's reciprocal is subnormal from 2^126 on
  np.testing.assert_allclose(jax.grad(lambda x: ogc.global_norm([x]))(x), [0.6, 0.8], rtol=1e-5)
  jacobian = jax.jacobian(lambda x: clip([x], np.float32(2 * scale))[0])(x)
  np.testing.assert_allclose(jacobian, 0.4 * np.array([[0.64, -0.48], [-0.48, 0.36]]), rtol=1e-5)


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
  forward, backward, want = jax.jit(
      lambda p: (jax.jacfwd(real)(p), jax.jacrev(real)(p), jax.jacfwd(reference)(p)))(parts)
  np.testing.assert_allclose(forward, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(backward, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_leaves_have_derivatives_of_their_own_dtype(dtype, path):
  x = np.array([3, 4], dtype)
  jacobian, gradient = jax.jit(
      lambda x: (jax.jacrev(lambda x: clip([x])[0])(x), jax.grad(lambda x: ogc.global_norm([x]))(x)))(x)
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


def test_a_rematerialised_clip_has_the_same_gradient(path):
  def loss(tree, wrap):
    return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(wrap(lambda t: clip(t))(tree)))
  plain, rematerialised = jax.jit(lambda tree: [jax.grad(functools.partial(loss, wrap=wrap))(tree)
                                                for wrap in (lambda f: f, jax.checkpoint)])(TREE)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), plain, rematerialised)
