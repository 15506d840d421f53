"""Is every element of a fused step right, in every dtype and at every magnitude?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax_globalclip as ogc
import pytest
import stepping
from stepping import Numbers

pytestmark = pytest.mark.reference_repeats

SHAPES = {"a": (33, 5), "b": (), "c": (0, 3), "d": (1030,), "e": (7,)}


def random_tree(seed, dtype, magnitude=1.0):
  rng = np.random.default_rng(seed)
  return {name: jnp.asarray((rng.standard_normal(shape) * magnitude).astype(np.float64 if dtype == "float64" else np.float32)
                            ).astype(dtype) for name, shape in SHAPES.items()}


def make(numbers=Numbers(), max_norm=1.0, **options):
  return ogc.clipped_adamw(numbers.rate, max_norm, b1=numbers.b1, b2=numbers.b2, eps=numbers.eps,
                           eps_root=numbers.eps_root, weight_decay=numbers.decay, **options)


def check_run(tx, gradients, params, numbers=Numbers(), max_norm=1.0, decays=None, **extra):
  """Several steps, each against the model from what the one before it left."""
  step, state = jax.jit(lambda *args: tx.step(*args, **extra)), tx.init(params)
  for t, grads in enumerate(gradients, 1):
    after = step(grads, state, params)
    stepping.check_step((params, state), grads, after, t, numbers, max_norm, decays=decays,
                        loss_scale=extra.get("loss_scale", 1.0))
    params, state = after
  return params, state


DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("mu_dtype", [None, "bfloat16", "float32"])
def test_every_dtype_is_right_whether_it_clips_or_not(path, param_dtype, grad_dtype, mu_dtype):
  tx = make(Numbers(eps=1e-4), 30.0, mu_dtype=mu_dtype)
  gradients = [random_tree(seed, grad_dtype, magnitude) for seed, magnitude in enumerate([1.0, 0.1, 2.0, 1e-3])]
  check_run(tx, gradients, random_tree(9, param_dtype), Numbers(eps=1e-4), 30.0)


@pytest.mark.parametrize("grad_dtype, param_dtype", [("float64", "float64"), ("float32", "float64"),
                                                     ("float64", "float32"), ("bfloat16", "float64")])
def test_float64_leaves_are_stepped_in_float64(path, x64, grad_dtype, param_dtype):
  gradients = [random_tree(seed, grad_dtype) for seed in range(3)]
  check_run(make(max_norm=5.0), gradients, random_tree(9, param_dtype), max_norm=5.0)


def test_leaves_of_different_dtypes_are_stepped_each_in_its_own(path):
  def tree(seed):
    return {name: x.astype(DTYPES[i % 3]) for i, (name, x) in enumerate(random_tree(seed, "float32").items())}
  tx = make(Numbers(eps=1e-4))
  check_run(tx, [tree(seed) for seed in range(3)], tree(9), Numbers(eps=1e-4))


@pytest.mark.parametrize("numbers", [
    Numbers(), Numbers(decay=0.0), Numbers(b1=0.0), Numbers(b1=0.5, b2=0.9), Numbers(eps=1.0), Numbers(eps_root=1e-3),
    Numbers(rate=0.0), Numbers(rate=10.0, decay=0.5)], ids=str)
def test_every_number_has_its_place(path, numbers):
  check_run(make(numbers), [random_tree(seed, "float32") for seed in range(3)], random_tree(9, "float32"), numbers)


@pytest.mark.parametrize("magnitude, max_norm", [(1e-12, np.inf), (1e-10, 1e-11), (1e10, 1.0), (1e15, 1e10), (1e18, np.inf),
                                                 (3e36, 1.0), (1.0, 0.0)])
def test_gradients_of_every_magnitude_are_right(path, magnitude, max_norm):
  gradients = [random_tree(seed, "float32", magnitude) for seed in range(2)]
  numbers = Numbers(eps=magnitude * 1e-3 if magnitude < 1 else 1e-8)
  check_run(make(numbers, max_norm), gradients, random_tree(9, "float32"), numbers, max_norm)


@pytest.mark.parametrize("loss_scale", [8.0, 1000.0, 2.0**100])
@pytest.mark.parametrize("max_norm", [1.0, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_scaled_loss_are_unscaled(path, loss_scale, max_norm, dtype):
  gradients = [random_tree(seed, dtype, loss_scale) for seed in range(2)]
  given = functools.partial(check_run, gradients=gradients, params=random_tree(9, "float32"), max_norm=max_norm,
                            loss_scale=loss_scale)
  given(make(max_norm=max_norm))
  given(make(max_norm=max_norm, loss_scale=3.0))  # what the call says wins


def test_float16_gradients_of_a_scaled_loss_do_not_flush_to_zero(path):
  scale = 2.0**20
  tx = make(max_norm=np.inf, loss_scale=scale)
  params = {"w": jnp.ones(3)}
  _, state = jax.jit(tx.step)({"w": jnp.full(3, 0.5, jnp.float16)}, tx.init(params), params)
  np.testing.assert_allclose(stepping.moments(state)[0]["w"], np.full(3, 0.1 * 0.5 / scale), rtol=1e-6)


def test_a_mask_says_which_leaves_decay(path):
  mask = {"a": True, "b": False, "c": True, "d": False, "e": True}
  for given in mask, (lambda tree: {name: mask[name] for name in tree}):
    tx = make(Numbers(decay=0.5), mask=given)
    check_run(tx, [random_tree(seed, "float32") for seed in range(2)], random_tree(9, "float32"), Numbers(decay=0.5),
              decays=mask)


def test_a_mask_may_be_a_prefix(path):
  tree = lambda seed: {"x": random_tree(seed, "float32"), "y": random_tree(seed + 50, "float32")}
  tx = make(Numbers(decay=0.5), mask={"x": True, "y": False})
  decays = {"x": dict.fromkeys(SHAPES, True), "y": dict.fromkeys(SHAPES, False)}
  check_run(tx, [tree(1), tree(2)], tree(9), Numbers(decay=0.5), decays=decays)


def test_leaves_of_many_chunks_are_stepped_to_the_last_element(path):
  rng = np.random.default_rng(0)
  tree = lambda: [jnp.asarray(rng.standard_normal(n, np.float32)) for n in (16383, 16384, 16385, 70001, 1)]
  check_run(make(), [tree(), tree()], tree())


def test_more_leaves_than_a_call_takes_are_all_stepped(path):
  rng = np.random.default_rng(0)
  tree = lambda: [jnp.asarray(rng.standard_normal(3, np.float32)) for _ in range(333)]
  check_run(make(), [tree()], tree())


def test_a_schedule_is_called_with_the_number_of_steps_so_far(path):
  rates, decays = lambda count: jnp.where(count < 2, np.float32(1), np.float32(0.1)), lambda count: count.astype(jnp.float32) * np.float32(0.1)
  params, state = {"w": jnp.ones(3)}, None
  tx = ogc.clipped_adamw(rates, np.inf, weight_decay=decays)
  state, grads = tx.init(params), {"w": jnp.full(3, 2.0)}
  step = jax.jit(tx.step)
  for t in range(1, 5):
    numbers = Numbers(rate=1.0 if t <= 2 else 0.1, decay=0.1 * (t - 1))
    after = step(grads, state, params)
    stepping.check_step((params, state), grads, after, t, numbers)
    params, state = after
    assert [int(x) for x in (state[1][0].count, state[1][1].count, state[1][2].count)] == [t] * 3


def test_numbers_may_be_traced(path):
  params = random_tree(9, "float32")
  @jax.jit
  def step(rate, max_norm, decay, grads, params):
    tx = ogc.clipped_adamw(rate, max_norm, weight_decay=decay)
    state = tx.init(params)
    return state, tx.step(grads, state, params)
  grads = random_tree(1, "float32")
  state, after = step(0.1, 2.0, 0.3, grads, params)
  stepping.check_step((params, state), grads, after, 1, Numbers(rate=0.1, decay=0.3), 2.0)


def test_outside_of_jit_a_step_is_the_same_and_leaves_what_it_was_given(path):
  params, grads = random_tree(9, "float32"), random_tree(1, "float32")
  tx = make()
  state = tx.init(params)
  copies = jax.tree.map(lambda x: np.array(x), (params, state, grads))
  eager, jitted = tx.step(grads, state, params), jax.jit(tx.step)(grads, state, params)
  for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  for kept, copy in zip(jax.tree.leaves((params, state, grads)), jax.tree.leaves(copies), strict=True):
    np.testing.assert_array_equal(kept, copy)


def test_each_member_of_a_batch_has_its_own_norm(path):
  tx = make()
  rng = np.random.default_rng(0)
  grads, params = ({"w": jnp.asarray(rng.standard_normal((3, 5)), jnp.float32)} for _ in range(2))
  state = jax.vmap(tx.init)(params)
  got = jax.jit(jax.vmap(tx.step))(grads, state, params)
  for i in range(3):
    member = jax.tree.map(lambda x: x[i], (grads, state, params))
    want = jax.jit(tx.step)(*member)
    for a, b in zip(jax.tree.leaves(jax.tree.map(lambda x: x[i], got)), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-6)


def test_steps_in_a_scan_go_as_one_by_one(path):
  tx, params = make(), random_tree(9, "float32")
  gradients = [random_tree(seed, "float32") for seed in range(4)]
  stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *gradients)
  def body(carry, grads):
    return tx.step(grads, carry[1], carry[0]), None
  got, _ = jax.jit(lambda carry: jax.lax.scan(body, carry, stacked))((params, tx.init(params)))
  want = check_run(tx, gradients, params)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)
