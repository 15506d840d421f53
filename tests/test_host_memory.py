"""Are gradients in pinned host memory clipped rightly, on one device and on meshes?"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from sharded import AUTO, EXPLICIT, P, make_mesh

pytestmark = [pytest.mark.slow, pytest.mark.reference_repeats]

VALUES = {"a": np.full(8, 2, np.float32), "b": np.ones(4, np.float32)}  # norm 6
WEIGHTS = {"a": np.arange(8, dtype=np.float32), "b": np.float32([1, -1, 2, -2])}


@pytest.fixture(autouse=True)
def without_what_jax_lacks(request):
  if jax.__version_info__ < (0, 10) and request.node.callspec.params.get("place") == "Explicit":
    pytest.skip("jax 0.9 cannot move an array between memories on an Explicit mesh")


def shardings(place):
  """Of "a" and "b", as functions of a kind of memory."""
  if place == "one device":
    one = lambda kind: SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    return {"a": one, "b": one}
  mesh = make_mesh({"Auto": AUTO, "Explicit": EXPLICIT}[place], shape=(4,), names=("x",))
  return {"a": lambda kind: NamedSharding(mesh, P("x"), memory_kind=kind),
          "b": lambda kind: NamedSharding(mesh, P(), memory_kind=kind)}


def put(values, place, held):
  """All of the leaves in pinned host memory, or "a" alone."""
  kinds = {"all": ("pinned_host", "pinned_host"), "mixed": ("pinned_host", "device")}[held]
  of_name = shardings(place)
  return {name: jax.device_put(values[name], of_name[name](kind)) for name, kind in zip("ab", kinds)}


places = pytest.mark.parametrize("place", ["one device", "Auto", "Explicit"])
helds = pytest.mark.parametrize("held", ["all", "mixed"])


# ----------------------------------------------------------------------------------------------------------------------
# Each takes gradients, and gives what is checked against the value beside it.


def global_clip(tree):
  return ogc.global_clip(1.0).update(tree, optax.EmptyState())[0]


def clip_tree(tree):
  return ogc.clip_tree(tree, 1.0)[0]


def monitored_clip(tree):
  tx = ogc.global_clip(1.0, monitor=True)
  return tx.update(tree, tx.init(VALUES))[0]


def per_tensor_clip(tree):
  return ogc.per_tensor_clip(1.0).update(tree, optax.EmptyState())[0]


def window_of_one(tree):
  tx = ogc.clipped_multi_steps(optax.identity(), 1.0)
  return tx.update(tree, tx.init(VALUES))[0]


def window_of_two(tree):
  tx = ogc.clipped_multi_steps(optax.identity(), 1.0, every_k=2)
  _, state = tx.update(tree, tx.init(VALUES))
  return tx.update(tree, state)[0]


def clipped():
  return oracle.clip(VALUES, 1.0)


def clipped_by_leaf():
  return {name: oracle.clip(leaf, 1.0) for name, leaf in VALUES.items()}


def derivative(weights):
  """Of sum(weights * clip(tree)): max / |x| (w - x <x, w> / |x|^2)."""
  along = sum(np.sum(np.float64(VALUES[name]) * weights[name]) for name in VALUES) / 36
  return {name: (weights[name] - VALUES[name] * along) / 6 for name in VALUES}


CLIPS = {global_clip: clipped, monitored_clip: clipped, per_tensor_clip: clipped_by_leaf, window_of_one: clipped,
         window_of_two: clipped}


def check(got, want):
  for name, leaf in got.items():
    np.testing.assert_allclose(np.asarray(leaf), want[name].astype(np.float64), rtol=1e-5, atol=1e-6)


def run(function, jitted, *args):
  return (jax.jit(lambda *args: function(*args)) if jitted else function)(*args)


jitted_or_not = pytest.mark.parametrize("jitted", [True, False], ids=["jitted", "eager"])


@pytest.mark.parametrize("function", CLIPS, ids=lambda function: function.__name__)
@jitted_or_not
@places
def test_a_clip_is_right(path, place, jitted, function):
  check(run(function, jitted, put(VALUES, place, "all")), CLIPS[function]())


@jitted_or_not
@helds
@places
def test_norms_are_right(path, place, held, jitted):
  tree = put(VALUES, place, held)
  assert run(ogc.global_norm, jitted, tree) == 6
  check(run(ogc.leaf_norms, jitted, tree), {name: oracle.norm(leaf) for name, leaf in VALUES.items()})


@places
def test_a_report_and_an_error_name_the_leaf(path, place):
  bad = VALUES | {"b": np.float32([1, np.nan, 1, np.inf])}
  tree = put(bad, place, "all")
  assert ogc.leaf_report(tree).rows[0][::3] == ("b", 2)
  with pytest.raises(FloatingPointError, match=r"updates\['b'\] \(2 elements\)"):
    ogc.clip_tree(tree, 1.0, error_if_nonfinite=True)


@pytest.mark.repeats
@pytest.mark.parametrize("clip", [global_clip, clip_tree, monitored_clip], ids=lambda function: function.__name__)
@jitted_or_not
@places
def test_the_derivative_of_a_clip_is_right(path, place, jitted, clip):
  tree = put(VALUES, place, "all")
  ones = {name: np.ones_like(leaf) for name, leaf in VALUES.items()}
  def loss(tree):
    return sum(map(jnp.sum, clip(tree).values()))
  # Outside of jit JAX differentiates a sum over an Explicit mesh only where that mesh is in force.
  in_force = jax.set_mesh(tree["a"].sharding.mesh) if place == "Explicit" and not jitted else contextlib.nullcontext()
  with in_force:
    check(run(jax.grad(loss), jitted, tree), derivative(ones))


@helds
@places
def test_the_tangent_of_a_clip_is_right(path, place, held):
  def tangents(tree, weights):
    return jax.jvp(global_clip, (tree,), (weights,))[1]
  check(run(tangents, True, put(VALUES, place, held), put(WEIGHTS, place, held)), derivative(WEIGHTS))


@helds
@places
def test_the_derivative_of_a_norm_is_right(path, place, held):
  want = {name: leaf / np.float64(6) for name, leaf in VALUES.items()}
  check(run(jax.grad(ogc.global_norm), True, put(VALUES, place, held)), want)


@pytest.mark.parametrize("every_k", [1, 2])
@jitted_or_not
@places
def test_a_window_of_parameters_that_lie_there_too_is_right(path, place, every_k, jitted):
  tree = put(VALUES, place, "all")
  tx = ogc.clipped_multi_steps(optax.sgd(1.0, momentum=0.5), 1.0, every_k=every_k)
  state = tx.init(tree)
  for _ in range(every_k):
    updates, state = run(tx.update, jitted, tree, state, tree)
  check(updates, {name: -leaf for name, leaf in clipped().items()})


@helds
@places
def test_updates_come_out_in_the_memory_of_the_devices(path, place, held):
  tree = put(VALUES, place, held)
  for name, leaf in global_clip(tree).items():
    assert leaf.sharding.memory_kind == "device" and leaf.sharding.device_set == tree[name].sharding.device_set


@helds
@places
def test_below_the_threshold_every_bit_stays(path, place, held):
  assert oracle.same_bits(ogc.clip_tree(put(VALUES, place, held), 6.0)[0], VALUES)
