"""Gradients in pinned host memory: right, or refused in words that say what to do?"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from sharded import AUTO, EXPLICIT, P, make_mesh

VALUES = {"a": np.full(8, 2, np.float32), "b": np.ones(4, np.float32)}  # norm 6
WEIGHTS = {"a": np.arange(8, dtype=np.float32), "b": np.float32([1, -1, 2, -2])}


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


CLIPS = {global_clip: clipped, clip_tree: clipped, monitored_clip: clipped, per_tensor_clip: clipped_by_leaf}
WINDOWS = {window_of_one: clipped, window_of_two: clipped}


def check(got, want):
  for name, leaf in got.items():
    np.testing.assert_allclose(np.asarray(leaf), want[name].astype(np.float64), rtol=1e-5, atol=1e-6)


REFUSED = re.compile(r"(?s)^(?=.*optax_globalclip)(?=.*updates\['[ab]'\])(?=.*pinned_host)")


def right_or_refused(function, want, *args):
  try:
    got = jax.block_until_ready(function(*args))
  except (ValueError, NotImplementedError) as error:
    assert REFUSED.match(str(error)), f"from deep inside: {error}"
  else:
    check(got, want)


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", CLIPS | WINDOWS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("jitted", [True, False], ids=["jitted", "eager"])
@helds
@places
def test_a_clip_is_right_or_refused_by_name(path, place, held, jitted, function):
  want = (CLIPS | WINDOWS)[function]()
  right_or_refused(jax.jit(lambda tree: function(tree)) if jitted else function, want, put(VALUES, place, held))


@helds
@places
def test_norms_are_right_or_refused_by_name(path, place, held):
  tree = put(VALUES, place, held)
  right_or_refused(jax.jit(lambda t: {"norm": ogc.global_norm(t)}), {"norm": np.float64(6)}, tree)
  right_or_refused(jax.jit(ogc.leaf_norms), {"a": oracle.norm(VALUES["a"]), "b": oracle.norm(VALUES["b"])}, tree)


@places
def test_the_derivative_of_a_clip_is_right_or_refused_by_name(path, place):
  tree = put(VALUES, place, "all")
  ones = {name: np.ones_like(leaf) for name, leaf in VALUES.items()}
  for clip in global_clip, clip_tree, monitored_clip:
    def loss(tree):
      return sum(map(jnp.sum, clip(tree).values()))
    right_or_refused(jax.jit(jax.grad(loss)), derivative(ones), tree)
    right_or_refused(jax.grad(loss), derivative(ones), tree)


@helds
@places
def test_the_tangent_of_a_clip_is_right_or_refused_by_name(path, place, held):
  def tangents(tree, weights):
    return jax.jvp(global_clip, (tree,), (weights,))[1]
  right_or_refused(jax.jit(tangents), derivative(WEIGHTS), put(VALUES, place, held), put(WEIGHTS, place, held))


@helds
@places
def test_the_derivative_of_a_norm_is_right_or_refused_by_name(path, place, held):
  tree = put(VALUES, place, held)
  want = {name: leaf / np.float64(6) for name, leaf in VALUES.items()}
  right_or_refused(jax.jit(jax.grad(ogc.global_norm)), want, tree)


# What was right before stays so: native code does not ask where its operands lie.
@pytest.mark.parametrize("place, held", [("one device", "all"), ("one device", "mixed"), ("Auto", "all"),
                                         ("Auto", "mixed"), ("Explicit", "mixed")])
def test_on_the_native_path_these_are_right(place, held, monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  tree = put(VALUES, place, held)
  for function in global_clip, clip_tree:
    check(jax.jit(lambda t: function(t))(tree), clipped())
  assert jax.jit(lambda t: ogc.global_norm(t))(tree) == 6


@helds
def test_a_clip_of_what_was_moved_to_the_device_first_is_right(path, held):
  for place in "one device", "Auto", "Explicit":
    there = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind("device"), put(VALUES, place, held))
    @jax.jit
    def run(tree):
      return global_clip(jax.device_put(tree, there))
    check(run(put(VALUES, place, held)), clipped())
