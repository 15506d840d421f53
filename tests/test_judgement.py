"""Is a traced loss scale, threshold or weight that is none judged alike by updates, monitor, skip and dynamic scale?"""

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
from windows import leaves_with_nan

pytestmark = pytest.mark.reference_repeats

NAN, INF = np.nan, np.inf
# Not finite, not positive, or subnormal: zero to XLA, and so the divisor of a NaN.
BAD_SCALES = [1e-40, 0.0, INF, NAN, -1.0]
BAD_THRESHOLDS = [NAN, -1.0]
BAD_WEIGHTS = [NAN, -1.0, INF, 1e-40]
BAD = [("loss_scale", value) for value in BAD_SCALES] + [("max_norm", value) for value in BAD_THRESHOLDS]
GOOD = {"max_norm": 1.0, "loss_scale": 2.0}

bad_numbers = pytest.mark.parametrize("name, value", BAD, ids=lambda value: str(value))
jitted_or_not = pytest.mark.parametrize("jitted", [True, False], ids=["jitted", "eager"])

# Norm 10, 5 once unscaled. A leaf of zeros is no less NaN than others.
TREE = {"a": np.float32([6, 8]), "zeros": np.float16([0]), "c": np.complex64([0])}


def arrays(**numbers):
  """Numbers as arrays, which nobody reads before the program runs."""
  return {name: jnp.asarray(np.float32(value)) for name, value in numbers.items()}


def real(leaf):
  return oracle.real_elements(leaf).astype(np.float64)


def expect(updates, want):
  """All elements of `updates` are those of the tree `want`, or all are the number `want`."""
  if np.ndim(want) == 0 and not isinstance(want, dict):
    want = jax.tree.map(lambda u: np.full_like(np.asarray(u), want), updates)
  for got, leaf in zip(map(real, jax.tree.leaves(updates)), jax.tree.leaves(want), strict=True):
    if np.isnan(leaf).any():
      assert np.isnan(got).all()
    else:
      np.testing.assert_allclose(got, real(leaf), rtol=1e-6)


def metrics_of(state):
  return {name: float(value) for name, value in ogc.clip_metrics(state).items()}


# ----------------------------------------------------------------------------------------------------------------------
# Clips


MAKES = {"global": ogc.global_clip, "per_tensor": ogc.per_tensor_clip}


@functools.cache
def clip(path, make, jitted, **options):
  """`(tree, state, numbers) -> (updates, state)`; `path` is part of the key because it is read when tracing."""
  del path
  def run(tree, state, numbers):
    numbers = dict(numbers)
    return MAKES[make](numbers.pop("max_norm"), monitor=True, **options).update(tree, state, **numbers)
  return jax.jit(run) if jitted else run


@bad_numbers
@pytest.mark.parametrize("stage, jitted", [("kernel", True), ("xla", True), ("auto", False)])
@pytest.mark.parametrize("policy, fill", [("propagate", NAN), ("zero", 0)])
@pytest.mark.parametrize("make", MAKES)
def test_a_bad_number_is_a_non_finite_step(path, make, policy, fill, stage, jitted, name, value):
  step = clip(path, make, jitted, on_nonfinite=policy, scale_stage=stage)
  state = ogc.global_clip(1.0, monitor=True).init(TREE)
  good, bad = arrays(**GOOD), arrays(**GOOD | {name: value})
  counts = []
  for numbers in good, bad, bad, good:
    updates, state = step(TREE, state, numbers)
    expect(updates, oracle.clip(TREE, 1.0, loss_scale=2.0) if numbers is good else fill)
    metrics = metrics_of(state)
    counts.append([metrics[key] for key in ("steps", "clipped_steps", "nonfinite_steps", "consecutive_nonfinite")])
    if numbers is good:
      np.testing.assert_allclose([metrics["global_norm"], metrics["clip_factor"]], [5, 0.2], rtol=1e-6)
    else:
      np.testing.assert_array_equal(metrics["clip_factor"], fill)
  assert counts == [[1, 1, 0, 0], [2, 1, 1, 1], [3, 1, 2, 2], [4, 2, 2, 0]]


@pytest.mark.parametrize("value", BAD_SCALES)
@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("make", MAKES)
def test_the_norm_of_a_step_of_a_bad_scale_is_not_finite(path, make, policy, value):
  step = clip(path, make, True, on_nonfinite=policy, scale_stage="xla")
  _, state = step(TREE, ogc.global_clip(1.0, monitor=True).init(TREE), arrays(max_norm=1.0, loss_scale=value))
  norm = metrics_of(state)["global_norm"]
  assert norm == INF if policy == "zero" else not np.isfinite(norm)


@pytest.mark.parametrize("value", BAD_THRESHOLDS)
@pytest.mark.parametrize("policy, fill", [("propagate", NAN), ("zero", 0)])
@pytest.mark.parametrize("make", MAKES)
def test_a_bad_threshold_is_judged_without_a_loss_scale_too(path, make, policy, fill, value):
  step = clip(path, make, True, on_nonfinite=policy)
  updates, state = step(TREE, ogc.global_clip(1.0, monitor=True).init(TREE), arrays(max_norm=value))
  expect(updates, fill)
  assert metrics_of(state)["nonfinite_steps"] == 1


@pytest.mark.parametrize("value", BAD_SCALES)
@pytest.mark.parametrize("make", MAKES)
def test_a_bad_array_given_at_construction_is_judged_when_it_is_used(path, make, value):
  tx = MAKES[make](1.0, loss_scale=jnp.asarray(np.float32(value)), monitor=True)
  updates, state = jax.jit(tx.update)(TREE, tx.init(TREE))
  expect(updates, NAN)
  assert metrics_of(state)["nonfinite_steps"] == 1


@pytest.mark.parametrize("numbers, want", [
    (dict(loss_scale=2.0**-126), 2.0**126 * real(TREE["a"]) / (2.0**126 * 10)),
    (dict(loss_scale=2.0**127), real(TREE["a"]) / 2.0**127),
    (dict(max_norm=0.0), [0, 0]),
    (dict(max_norm=-0.0), [0, 0]),
    (dict(max_norm=INF), [3, 4]),
    (dict(max_norm=1e-40), [0, 0]),
], ids=str)
def test_numbers_at_the_edge_of_what_is_good_are_good(path, numbers, want):
  for policy, jitted in itertools.product(("propagate", "zero"), (True, False)):
    step = clip(path, "global", jitted, on_nonfinite=policy, scale_stage="xla")
    updates, state = step(TREE, ogc.global_clip(1.0, monitor=True).init(TREE), arrays(**GOOD | numbers))
    # 2^127 divides 6 and 8 into subnormal numbers, and so does a subnormal threshold: the CPU flushes those.
    np.testing.assert_allclose(updates["a"], np.float32(want), rtol=1e-6, atol=2e-38)
    assert metrics_of(state)["nonfinite_steps"] == 0


@bad_numbers
@jitted_or_not
@pytest.mark.parametrize("make", MAKES)
def test_raise_says_which_number_was_bad(path, make, jitted, name, value):
  def run(tree, numbers):
    numbers = dict(numbers)
    tx = MAKES[make](numbers.pop("max_norm"), on_nonfinite="raise")
    return tx.update(tree, optax.EmptyState(), **numbers)[0]
  error, words = FloatingPointError, name
  if jitted:
    run, error, words = jax.jit(run), jax.errors.JaxRuntimeError, f"FloatingPointError.*{name}"
  expect(run(TREE, arrays(**GOOD)), oracle.clip(TREE, 1.0, loss_scale=2.0))
  with pytest.raises(error, match=words):
    jax.block_until_ready(run(TREE, arrays(**GOOD | {name: value})))
    jax.effects_barrier()


@pytest.mark.parametrize("value", BAD_THRESHOLDS)
def test_clip_tree_raises_for_a_bad_threshold_where_asked_to(path, value):
  clipped, norm = ogc.clip_tree(TREE, jnp.float32(value))
  expect(clipped, NAN)
  assert norm.dtype == np.float32
  with pytest.raises(FloatingPointError, match="max_norm"):
    ogc.clip_tree(TREE, jnp.float32(value), error_if_nonfinite=True)


def test_each_member_of_a_batch_is_judged_by_its_own_number(path):
  tx = ogc.global_clip(1.0, monitor=True, on_nonfinite="zero")
  scales = np.float32([2, *BAD_SCALES, 4])
  updates, states = jax.jit(jax.vmap(lambda scale: tx.update(TREE, tx.init(TREE), loss_scale=scale)))(scales)
  np.testing.assert_array_equal(states.nonfinite_steps, [0, *[1] * len(BAD_SCALES), 0])
  want = np.zeros((len(scales), 2))
  want[[0, -1]] = 0.6, 0.8
  np.testing.assert_allclose(updates["a"], want, rtol=1e-6)


@pytest.mark.parametrize("mesh", [sharded.on_auto_mesh, sharded.on_explicit_mesh, sharded.in_shard_map],
                         ids=lambda mesh: mesh.__name__)
def test_every_device_of_a_mesh_judges_alike(path, mesh):
  def run(tree, max_norm, loss_scale, **placement):
    tx = ogc.global_clip(max_norm, monitor=True, **placement)
    updates, state = tx.update(tree, tx.init(tree), loss_scale=loss_scale)
    return updates, ogc.clip_metrics(state)
  run, tree = mesh(run), sharded.tree()
  for name, value in BAD:
    numbers = GOOD | {name: value}
    updates, metrics = run(tree, np.float32(numbers["max_norm"]), np.float32(numbers["loss_scale"]))
    assert sharded.everywhere(metrics["nonfinite_steps"]) == 1, (name, value)
    updates = {key: leaf for key, leaf in updates.items() if key not in ("steps", "empty")}
    expect(updates, NAN)


# ----------------------------------------------------------------------------------------------------------------------
# Windows


RATE, MOMENTUM = 0.1, 0.9
PARAMS = {"a": np.float32([1, 2]), "b": np.float16([3])}
GRADIENTS = {"a": np.float32([24, 32]), "b": np.float16([0])}  # norm 40, 5 at scale 8
WINDOW = {"max_norm": 1.0, "loss_scale": 8.0, "weight": 1.0}
BAD_IN_A_WINDOW = BAD + [("weight", value) for value in BAD_WEIGHTS]

bad_in_a_window = pytest.mark.parametrize("name, value", BAD_IN_A_WINDOW, ids=lambda value: str(value))
# With the only micro-batch of a window, the first, or the last. Of thresholds only that of the last is used.
PLACES = [(every_k, at, name, value) for every_k in (1, 2) for at in range(every_k) for name, value in BAD_IN_A_WINDOW
          if name != "max_norm" or at == every_k - 1]


@functools.cache
def window_update(path, every_k, jitted, on_nonfinite, dynamic, monitor):
  """`(gradients, state, numbers) -> (updates, state)`, and the state to begin with."""
  del path
  options = dict(every_k=every_k, on_nonfinite=on_nonfinite, monitor=monitor,
                 loss_scale=ogc.DynamicLossScale(64.0) if dynamic else None)
  def make(max_norm):
    return ogc.clipped_multi_steps(optax.sgd(RATE, momentum=MOMENTUM), max_norm, **options)
  def run(gradients, state, numbers):
    numbers = dict(numbers)
    return make(numbers.pop("max_norm")).update(gradients, state, PARAMS, **numbers)
  return jax.jit(run) if jitted else run, make(1.0).init(PARAMS)


class Windows:
  """Windows of `GRADIENTS`, one of whose micro-batches may come with a bad number."""

  def __init__(self, path, every_k, *, jitted=True, on_nonfinite="skip", dynamic=False, monitor=False):
    self.update, self.state = window_update(path, every_k, jitted, on_nonfinite, dynamic, monitor)
    self.every_k = every_k

  def __call__(self, at=None, **bad):
    """The updates of one window; those of its other micro-batches are zero."""
    for i in range(self.every_k):
      numbers = arrays(**WINDOW | (bad if i == at else {}))
      updates, self.state = self.update(GRADIENTS, self.state, numbers)
      if i + 1 < self.every_k:
        expect(updates, 0)
    return jax.tree.map(np.asarray, updates)


def applied(*traces):
  """The updates of sgd after windows whose clipped gradients have these factors."""
  trace = 0.0
  for factor in traces:
    trace = MOMENTUM * trace + factor
  return {"a": -RATE * trace * np.float64([0.6, 0.8]), "b": np.zeros(1)}


@pytest.mark.parametrize("every_k, at, name, value", PLACES, ids=lambda value: str(value))
@jitted_or_not
def test_a_window_with_a_bad_number_is_skipped(path, every_k, at, jitted, name, value):
  run = Windows(path, every_k, jitted=jitted)
  expect(run(), applied(1))
  inner, optimizer_step = run.state.inner_state, run.state.optimizer_step
  updates = run(at=at, **{name: value})
  for leaf in jax.tree.leaves(updates):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
  assert not ogc.has_updated(run.state)
  assert oracle.same_bits(run.state.inner_state, inner) and run.state.optimizer_step == optimizer_step
  metrics = metrics_of(run.state)
  counts = [metrics[key] for key in ("steps", "clipped_steps", "nonfinite_steps", "consecutive_nonfinite")]
  assert counts == [2, 1, 1, 1]
  assert metrics["global_norm"] == INF and metrics["clip_factor"] == 0
  assert leaves_with_nan(run.state) == []
  # A clean window follows, and its momentum is that of the first alone.
  expect(run(), applied(1, 1))
  metrics = metrics_of(run.state)
  assert ogc.has_updated(run.state) and metrics["nonfinite_steps"] == 1 and metrics["consecutive_nonfinite"] == 0
  np.testing.assert_allclose([metrics["global_norm"], metrics["clip_factor"]], [5, 0.2], rtol=1e-6)


@bad_in_a_window
@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize("on_nonfinite", ["skip", "propagate"])
def test_a_bad_number_makes_a_dynamic_scale_back_off_once(path, every_k, on_nonfinite, name, value):
  run = Windows(path, every_k, dynamic=True, on_nonfinite=on_nonfinite)
  run()
  assert ogc.current_loss_scale(run.state) == 64 and run.state.scale_state.good_windows == 1
  run(at=every_k - 1, **{name: value})
  assert ogc.current_loss_scale(run.state) == 32 and run.state.scale_state.good_windows == 0
  run()
  assert ogc.current_loss_scale(run.state) == 32 and run.state.scale_state.good_windows == 1


@bad_in_a_window
@pytest.mark.parametrize("every_k", [1, 2])
def test_a_monitor_changes_no_judgement(path, every_k, name, value):
  run = Windows(path, every_k, monitor=True)
  run()
  run(at=0 if name != "max_norm" else every_k - 1, **{name: value})
  assert metrics_of(run.state)["nonfinite_steps"] == 1 and not ogc.has_updated(run.state)
  assert leaves_with_nan(run.state) == []
  expect(run(), applied(1, 1))


@bad_in_a_window
@pytest.mark.parametrize("every_k", [1, 2])
def test_where_a_bad_window_is_not_skipped_the_optimizer_gets_nan_or_zeros(path, every_k, name, value):
  for on_nonfinite, want in ("propagate", NAN), ("zero", applied(1, 0)):
    run = Windows(path, every_k, on_nonfinite=on_nonfinite)
    expect(run(), applied(1))
    expect(run(at=every_k - 1, **{name: value}), want)
    metrics = metrics_of(run.state)
    assert ogc.has_updated(run.state) and metrics["nonfinite_steps"] == 1 == metrics["consecutive_nonfinite"]
    np.testing.assert_array_equal(metrics["clip_factor"], NAN if on_nonfinite == "propagate" else 0)


@pytest.mark.parametrize("name, value", [("loss_scale", 1e-40), ("loss_scale", NAN), ("max_norm", NAN),
                                         ("max_norm", -1.0)])
@jitted_or_not
@pytest.mark.parametrize("every_k", [1, 2])
def test_raise_at_the_end_of_a_window_says_which_number_was_bad(path, every_k, jitted, name, value):
  run = Windows(path, every_k, jitted=jitted, on_nonfinite="raise")
  expect(run(), applied(1))
  error, words = (jax.errors.JaxRuntimeError, f"FloatingPointError.*{name}") if jitted else (FloatingPointError, name)
  with pytest.raises(error, match=words):
    jax.block_until_ready(run(at=every_k - 1, **{name: value}))
    jax.effects_barrier()


@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize("value", BAD_SCALES)
def test_what_came_with_weight_zero_is_not_judged(path, every_k, value):
  run = Windows(path, every_k)
  run()
  updates = run(at=0, loss_scale=value, weight=0.0)
  expect(updates, applied(1, 1) if every_k == 2 else 0)
  metrics = metrics_of(run.state)
  assert metrics["nonfinite_steps"] == 0 and metrics["steps"] == every_k


@pytest.mark.parametrize("numbers", [dict(loss_scale=2.0**-120), dict(weight=2.0**-126), dict(weight=2.0**60),
                                     dict(max_norm=0.0), dict(max_norm=INF)], ids=str)
@pytest.mark.parametrize("every_k", [1, 2])
def test_windows_with_numbers_at_the_edge_of_what_is_good_are_not_skipped(path, every_k, numbers):
  run = Windows(path, every_k)
  want = {"max_norm": lambda: applied(5 if numbers["max_norm"] else 0)}.get(next(iter(numbers)), lambda: applied(1))()
  expect(run(at=every_k - 1, **numbers), want)
  assert ogc.has_updated(run.state) and metrics_of(run.state)["nonfinite_steps"] == 0
