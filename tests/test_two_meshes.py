"""May leaves, batch, outputs and constraints of one program lie on different meshes of the same devices?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
import sharded
from jax.sharding import NamedSharding
from sharded import AUTO, EXPLICIT, P, make_mesh

pytestmark = [pytest.mark.slow, pytest.mark.reference_repeats]

# A dense layer and an expert, each on a mesh of its own. Norm sqrt(108 + 100).
VALUES = {"dense": np.full(12, 3, np.float32), "expert": np.full((2, 2), 5, np.float32)}
SPECS = {"dense": P("d"), "expert": P("x", "y")}


def line(kind=AUTO, devices=slice(4)):
  return jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices()[devices])


def square(kind=AUTO, devices=slice(4)):
  return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[devices])


def place(dense_mesh, expert_mesh, values=VALUES):
  meshes = {"dense": dense_mesh, "expert": expert_mesh}
  return {name: jax.device_put(x, NamedSharding(meshes[name], SPECS[name])) for name, x in values.items()}


# ----------------------------------------------------------------------------------------------------------------------
# What takes a tree. Each returns the clipped tree, or None, and the norm, or norms, that the package found.


def global_clip(tree, max_norm):
  return ogc.global_clip(max_norm).update(tree, optax.EmptyState())[0], None


def global_clip_in_the_kernel(tree, max_norm):
  return ogc.global_clip(max_norm, scale_stage="kernel").update(tree, optax.EmptyState())[0], None


def monitored_clip(tree, max_norm):
  tx = ogc.global_clip(max_norm, monitor=True)
  updates, state = tx.update(tree, tx.init(tree))
  return updates, state.global_norm


def clip_tree(tree, max_norm):
  return ogc.clip_tree(tree, max_norm)


def window_of(every_k):
  def window(tree, max_norm):
    """Of micro-batches whose mean is the tree."""
    tx = ogc.clipped_multi_steps(optax.identity(), max_norm, every_k=every_k)
    state = tx.init(tree)
    for _ in range(every_k):
      updates, state = tx.update(tree, state, tree)
    return updates, state.clip_state.global_norm
  window.__name__ = f"window_of_{every_k}"
  return window


def global_norm(tree, max_norm):
  del max_norm
  return None, ogc.global_norm(tree)


WHOLE_CLIPS = [global_clip, global_clip_in_the_kernel, monitored_clip, clip_tree, window_of(1), window_of(2)]
whole_clips = pytest.mark.parametrize("function", [*WHOLE_CLIPS, global_norm], ids=lambda function: function.__name__)
jitted_or_not = pytest.mark.parametrize("jitted", [True, False], ids=["jitted", "eager"])


def call(function, jitted, tree, max_norm=1.0):
  return (jax.jit(function, static_argnums=1) if jitted else function)(tree, max_norm)


def per_tensor_clip(tree, max_norm):
  return ogc.per_tensor_clip(max_norm).update(tree, optax.EmptyState())[0]


def check_norm(norm, want):
  for shard in norm.addressable_shards:
    assert oracle.ulps(np.asarray(shard.data), want) <= 1


def check_clipped(clipped, tree, want):
  for name, leaf in clipped.items():
    np.testing.assert_allclose(leaf, want[name].astype(np.float64), rtol=1e-6)
    assert leaf.sharding.is_equivalent_to(tree[name].sharding, leaf.ndim), name


def check(result, tree, max_norm=1.0):
  clipped, norm = result
  if norm is not None:
    check_norm(norm, oracle.norm(tree))
  if clipped is not None:
    check_clipped(clipped, tree, oracle.clip(tree, max_norm))


# ----------------------------------------------------------------------------------------------------------------------
# Leaves on two meshes (case 58)


@whole_clips
@jitted_or_not
def test_58_leaves_on_two_meshes_are_clipped_as_one_tree(path, function, jitted):
  tree = place(line(), square())
  check(call(function, jitted, tree), tree)
  assert oracle.norm(VALUES) == np.sqrt(np.longdouble(208))


@jitted_or_not
def test_below_the_threshold_leaves_on_two_meshes_keep_their_bits(path, jitted):
  tree = place(line(), square())
  for function in WHOLE_CLIPS:
    clipped, _ = call(function, jitted, tree, 15.0)
    assert oracle.same_bits(clipped, VALUES)


@jitted_or_not
def test_leaves_on_two_meshes_are_clipped_each_by_its_own_norm(path, jitted):
  tree = place(line(), square())
  clipped = (jax.jit(per_tensor_clip, static_argnums=1) if jitted else per_tensor_clip)(tree, 1.0)
  check_clipped(clipped, tree, {name: oracle.clip(leaf, 1.0) for name, leaf in VALUES.items()})
  norms = (jax.jit(ogc.leaf_norms) if jitted else ogc.leaf_norms)(tree)
  for name, leaf in VALUES.items():
    check_norm(norms[name], oracle.norm(leaf))


@jitted_or_not
def test_a_nan_on_one_of_two_meshes_reaches_the_other(path, jitted):
  values = {"dense": VALUES["dense"], "expert": np.float32([[5, 5], [5, np.nan]])}
  tree = place(line(), square(), values)
  updates, _ = call(global_clip, jitted, tree)
  assert np.isnan(updates["dense"]).all() and np.isnan(updates["expert"]).all()


def own_shardings(tree):
  """Of what lies on a mesh; JAX takes every other result's mesh from the first operand, which may not divide it."""
  def of_leaf(leaf):
    return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
  return jax.tree.map(of_leaf, tree)


@jitted_or_not
def test_a_window_of_bad_gradients_on_two_meshes_is_skipped_and_the_next_is_right(path, jitted):
  tree = place(line(), square())
  bad = place(line(), square(), VALUES | {"dense": np.full(12, np.inf, np.float32)})
  tx = ogc.clipped_multi_steps(optax.sgd(0.5, momentum=0.5), 1.0, every_k=2, loss_scale=ogc.DynamicLossScale(4.0))
  state = tx.init(tree)
  update = tx.update
  if jitted:
    update = jax.jit(update, out_shardings=(own_shardings(tree), own_shardings(state)))
  for gradients, scale in (bad, 4), (tree, 2):
    for _ in range(2):
      updates, state = update(gradients, state, tree)
    assert ogc.current_loss_scale(state) == 2
    if gradients is bad:
      assert not ogc.has_updated(state) and not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(updates))
    else:
      check_clipped(updates, tree, jax.tree.map(lambda leaf: -0.5 * leaf, oracle.clip(VALUES, 1.0, loss_scale=scale)))


def test_no_gradient_moves_between_two_meshes(path):
  tree = place(line(), square())
  sent = sharded.collectives(sharded.compiled(lambda t: global_clip(t, 1.0)[0], tree))
  assert {kind for kind, _ in sent} <= {"all-reduce"}
  if path == "native":
    assert len(sent) <= 2 and all(size <= 64 for _, size in sent)


# Of sum(weights * clip(tree)) it is max / |x| (w - x <x, w> / |x|^2).
WEIGHTS = {"dense": np.arange(12, dtype=np.float32), "expert": np.float32([[1, -2], [3, -4]])}


def derivative(max_norm):
  x, w = (np.concatenate([leaf.ravel().astype(np.float64) for leaf in tree.values()]) for tree in (VALUES, WEIGHTS))
  norm = np.sqrt(208)
  flat = max_norm / norm * (w - x * (x @ w) / norm**2)
  return {"dense": flat[:12], "expert": flat[12:].reshape(2, 2)}


@pytest.mark.parametrize("function", [global_clip, monitored_clip, clip_tree], ids=lambda function: function.__name__)
def test_the_derivative_of_a_clip_on_two_meshes_is_that_on_one(path, function):
  tree, weights = place(line(), square()), place(line(), square(), WEIGHTS)
  def loss(tree, weights):
    clipped, _ = function(tree, 2.0)
    return sum(jnp.sum(clipped[name] * weights[name]) for name in tree)
  got = jax.jit(jax.grad(loss))(tree, weights)
  for name, want in derivative(2.0).items():
    np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6)


def test_the_tangent_of_an_eager_clip_on_two_meshes_is_that_on_one(path):
  tree, weights = place(line(), square()), place(line(), square(), WEIGHTS)
  _, tangents = jax.jvp(lambda t: global_clip(t, 2.0)[0], (tree,), (weights,))  # the Jacobian is symmetric
  for name, want in derivative(2.0).items():
    np.testing.assert_allclose(tangents[name], want, rtol=1e-5, atol=1e-6)


def test_the_derivative_of_each_leafs_clip_on_two_meshes_is_that_on_one(path):
  tree, weights = place(line(), square()), place(line(), square(), WEIGHTS)
  def loss(tree, weights):
    clipped = per_tensor_clip(tree, 2.0)
    return sum(jnp.sum(clipped[name] * weights[name]) for name in tree)
  got = jax.jit(jax.grad(loss))(tree, weights)
  for name in VALUES:
    x, w = (tree[name].astype(np.float64) for tree in (VALUES, WEIGHTS))
    norm = np.linalg.norm(x.ravel())
    np.testing.assert_allclose(got[name], 2 / norm * (w - x * np.sum(x * w) / norm**2), rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Parameters on one mesh, the rest of the program on another (case 59)


def model_mesh():
  return make_mesh(AUTO, names=("fsdp", "tp"))


def data_mesh():
  return make_mesh(AUTO, shape=(8,), names=("devices",))


PARAMS = {"w": np.arange(32, dtype=np.float32).reshape(8, 4) / 16 - 1, "b": np.float32([1, -1, 2, 0.5])}
PARAM_SPECS = {"w": P("fsdp", "tp"), "b": P("tp")}
LIMIT, RATE = 1.0, 0.125


def batches():
  rng = np.random.default_rng(0)
  return [rng.standard_normal((16, 8)).astype(np.float32) for _ in range(2)]


def loss_of(params, batch):
  return jnp.sum(jnp.square(batch @ params["w"] + params["b"][None]))


def gradient_of(batch):
  """In float64."""
  x, w, b = (leaf.astype(np.float64) for leaf in (batch, PARAMS["w"], PARAMS["b"]))
  residual = 2 * (x @ w + b)
  return {"w": x.T @ residual, "b": residual.sum(0)}


def clipped(gradients, per_leaf=False):
  def factor(leaves):
    return min(1.0, LIMIT / np.sqrt(sum(np.sum(np.square(leaf)) for leaf in leaves)))
  common = factor(gradients.values())
  return {name: (factor([leaf]) if per_leaf else common) * leaf for name, leaf in gradients.items()}


def sgd(make, **options):
  return lambda: optax.chain(make(LIMIT, **options), optax.sgd(RATE))


TRANSFORMATIONS = {
    "global_clip": sgd(ogc.global_clip), "monitored": sgd(ogc.global_clip, monitor=True),
    "per_tensor_clip": sgd(ogc.per_tensor_clip),
    "window_of_1": lambda: ogc.clipped_multi_steps(optax.sgd(RATE), LIMIT, loss_scale=1.0),
    "window_of_2": lambda: ogc.clipped_multi_steps(optax.sgd(RATE), LIMIT, every_k=2),
}


def wanted_parameters(name):
  """After two calls of the update with gradients at `PARAMS`."""
  first, second = map(gradient_of, batches())
  if name == "window_of_2":
    steps = [clipped(jax.tree.map(lambda a, b: (a + b) / 2, first, second))]
  else:
    steps = [clipped(gradients, name == "per_tensor_clip") for gradients in (first, second)]
  return {key: leaf - RATE * sum(step[key] for step in steps) for key, leaf in PARAMS.items()}


def train(name, compute=lambda gradients: gradients, finish=lambda updates: updates, wrap=jax.jit):
  """Two calls, their updates added up; `compute` and `finish` say where gradients and updates have to lie."""
  tx = TRANSFORMATIONS[name]()
  placed = sharded.put(PARAMS, model_mesh(), PARAM_SPECS)
  @wrap
  def step(total, state, params, batch):
    gradients = compute(jax.grad(loss_of)(params, batch))
    updates, state = tx.update(gradients, state, params)
    return jax.tree.map(jnp.add, total, finish(updates)), state
  total, state = placed, tx.init(placed)
  for batch in batches():
    total, state = step(total, state, placed, jax.device_put(batch, NamedSharding(data_mesh(), P("devices"))))
  return total


def check_training(total, name):
  for key, want in wanted_parameters(name).items():
    np.testing.assert_allclose(total[key], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_59_the_batch_may_lie_on_a_mesh_of_its_own(path, name):
  total = train(name)
  check_training(total, name)
  for key, spec in PARAM_SPECS.items():
    assert total[key].sharding.is_equivalent_to(NamedSharding(model_mesh(), spec), total[key].ndim)


@pytest.mark.parametrize("spec", [P(), P("devices")], ids=str)
@pytest.mark.parametrize("name", ["global_clip", "window_of_2"])
def test_gradients_may_be_constrained_to_another_mesh(path, name, spec):
  def constrain(tree):
    sharding = NamedSharding(data_mesh(), spec)
    return tree | {"w": jax.lax.with_sharding_constraint(tree["w"], sharding)}
  check_training(train(name, compute=constrain), name)


@pytest.mark.parametrize("name", ["global_clip", "window_of_2"])
def test_updates_may_be_constrained_to_another_mesh(path, name):
  constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(data_mesh(), P()))
  check_training(train(name, finish=constrain), name)


@pytest.mark.parametrize("name", ["global_clip", "window_of_2"])
def test_outputs_may_be_asked_for_on_another_mesh(path, name):
  replicated = NamedSharding(data_mesh(), P())
  total = train(name, wrap=functools.partial(jax.jit, out_shardings=(replicated, None)))
  check_training(total, name)
  assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(total))


def test_the_mesh_in_force_may_be_another(path):
  # Without out_shardings JAX writes those of the results in the names of the mesh in force, which cannot hold them.
  wanted = {key: NamedSharding(model_mesh(), spec) for key, spec in PARAM_SPECS.items()}
  with jax.set_mesh(data_mesh()):
    check_training(train("global_clip", wrap=functools.partial(jax.jit, out_shardings=(wanted, None))), "global_clip")


def test_gradients_through_the_clip_and_a_batch_on_another_mesh(path):
  """As in meta-learning: the derivative of a loss after one clipped step."""
  first, second = batches()
  def after(params, first, second):
    gradients, _ = ogc.clip_tree(jax.grad(loss_of)(params, first), LIMIT)
    return loss_of(jax.tree.map(lambda p, g: p - RATE * g, params, gradients), second)
  want = jax.jit(jax.grad(after))(PARAMS, first, second)
  placed = sharded.put(PARAMS, model_mesh(), PARAM_SPECS)
  spread = [jax.device_put(batch, NamedSharding(data_mesh(), P("devices"))) for batch in (first, second)]
  got = jax.jit(jax.grad(after))(placed, *spread)
  for key in PARAMS:
    np.testing.assert_allclose(got[key], want[key], rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------------------
# What no program can hold


def right_or_refused(function, jitted, tree):
  """Some of this JAX itself refuses. Then the error says whose it is, which leaves, and what helps."""
  try:
    result = call(function, jitted, tree)
  except ValueError as error:
    for words in ("optax_globalclip", "updates['dense']", "updates['expert']", "mesh="):
      assert words in str(error)
  else:
    clipped, norm = result
    if norm is not None:
      check_norm(norm, oracle.norm(tree))
    for name, want in oracle.clip(tree, 1.0).items() if clipped is not None else ():
      np.testing.assert_allclose(clipped[name], want.astype(np.float64), rtol=1e-6)


@whole_clips
@pytest.mark.parametrize("devices", [slice(4, 8), slice(2, 6)], ids=["disjoint", "overlapping"])
def test_leaves_on_different_devices_are_refused_by_name(path, function, devices):
  tree = place(line(), square(devices=devices))
  with pytest.raises(ValueError, match=r"(?s)optax_globalclip.*updates\['dense'\].*updates\['expert'\].*mesh="):
    function(tree, 1.0)


def test_leaves_on_different_devices_are_refused_by_name_for_their_own_norms_too(path):
  tree = place(line(), square(devices=slice(4, 8)))
  for function in (ogc.leaf_norms, functools.partial(per_tensor_clip, max_norm=1.0), ogc.leaf_report):
    with pytest.raises(ValueError, match=r"(?s)optax_globalclip.*updates\['dense'\].*updates\['expert'\].*mesh="):
      function(tree)


@whole_clips
def test_leaves_on_the_same_devices_in_another_order_are_right_or_refused_by_name(path, function):
  right_or_refused(function, False, place(line(), square(devices=slice(3, None, -1))))


@whole_clips
@jitted_or_not
@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (AUTO, EXPLICIT), (EXPLICIT, AUTO)],
                         ids=lambda kinds: "-".join(kind.name for kind in kinds))
def test_leaves_on_explicit_meshes_are_right_or_refused_by_name(path, function, jitted, kinds):
  right_or_refused(function, jitted, place(line(kinds[0]), square(kinds[1])))
