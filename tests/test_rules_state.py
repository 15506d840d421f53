"""Is the state of a rule one that JAX, optax and orbax can carry, store and restore, and does an old one still load?"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import orbax.checkpoint
import pytest
from windows import make, types

pytestmark = pytest.mark.reference_repeats

RULES = {"ema_clip": ogc.ema_clip(warmup=2), "zclip": ogc.zclip(warmup=2), "autoclip": ogc.autoclip(50, n=4),
         "adagc": ogc.adagc(warmup=2), "schedule": optax.linear_schedule(1.0, 3.0, 4)}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
GLOBAL = {name: rule for name, rule in RULES.items() if name != "adagc"}
global_rules = pytest.mark.parametrize("rule", GLOBAL.values(), ids=GLOBAL)
TREE = {"a": np.asarray([3, 4], np.float32), "b": np.asarray([1.5], np.float16), "steps": np.int32(1)}
SPIKES = ogc.SpikeRule(window=4, deviations=3.0, judge="either", warmup=2)


def trees(n, seed=0):
  random = np.random.default_rng(seed)
  return [jax.tree.map(lambda x: (x * random.uniform(0.5, 2)).astype(x.dtype), TREE) for _ in range(n)]


def same(a, b):
  return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))


def run(tx, gradients, state=None, **extra):
  state, update = tx.init(TREE) if state is None else state, jax.jit(tx.update)
  for g in gradients:
    updates, state = update(g, state, TREE, **extra)
  return updates, state


@rules
@pytest.mark.parametrize("monitor", [False, True])
def test_a_scan_carries_the_state(path, rule, monitor):
  tx = ogc.per_tensor_clip(rule, monitor=monitor)
  gradients = trees(5)
  stacked = jax.tree.map(lambda *xs: np.stack(xs), *gradients)
  def step(state, g):
    updates, state = tx.update(g, state)
    return state, updates
  state, _ = jax.jit(lambda s, g: jax.lax.scan(step, s, g))(tx.init(TREE), stacked)
  assert types(state) == types(tx.init(TREE))
  expected = run(tx, gradients)[1]
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state, expected)


@rules
def test_a_donated_state_gives_the_same_bits(path, rule):
  tx = ogc.per_tensor_clip(rule, monitor=True)
  state, update = tx.init(TREE), jax.jit(tx.update, donate_argnums=1)
  for g in trees(3):
    updates, state = update(g, state)
  assert same((updates, state), run(tx, trees(3)))


# An optimizer whose state is a weakly typed array.
WEAK = optax.GradientTransformation(lambda params: jnp.asarray(1.0), lambda updates, state, params=None: (updates, state + 1))


class Largest:
  def init(self, like):
    return 0.0

  def update(self, state, norm, finite, *, global_norm):
    return jnp.maximum(state, norm), jnp.maximum(state, norm)


@pytest.mark.parametrize("make", [lambda rule: ogc.global_clip(rule), lambda rule: ogc.clipped_multi_steps(WEAK, rule)],
                         ids=["global_clip", "clipped_multi_steps"])
def test_a_state_of_python_numbers_is_traced_once(make):
  tx = make(Largest())
  update = jax.jit(tx.update)
  state = tx.init([jnp.zeros(1)])
  for _ in range(3):
    _, state = update([jnp.ones(1)], state)
  assert update._cache_size() == 1


@global_rules
def test_each_member_of_a_batch_has_a_rule_of_its_own(path, rule):
  tx = ogc.global_clip(rule)
  members = [trees(4, seed) for seed in range(3)]
  batch = [jax.tree.map(lambda *xs: np.stack(xs), *of_step) for of_step in zip(*members)]
  state = jax.vmap(tx.init)(batch[0])
  for g in batch:
    updates, state = jax.jit(jax.vmap(tx.update))(g, state)
  for i, gradients in enumerate(members):
    expected, expected_state = run(tx, gradients)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[i], y, rtol=1e-6), (updates, state), (expected, expected_state))


@global_rules
def test_multi_steps_around_a_rule_is_right(path, rule, standard_promotion):
  tx = optax.MultiSteps(optax.chain(ogc.global_clip(rule), optax.sgd(1.0)), 2)
  params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
  state, update, seen = tx.init(params), jax.jit(tx.update), []
  gradients = [{name: g[name].astype(np.float32) for name in params} for g in trees(8)]
  for g in gradients:
    updates, state = update(g, state, params)
    seen.append(updates)
  means = [jax.tree.map(lambda x, y: (x + y) / 2, *gradients[i:i + 2]) for i in (0, 2, 4, 6)]
  alone = ogc.global_clip(rule)
  inner = alone.init(params)
  for i, mean in enumerate(means):
    expected, inner = alone.update(mean, inner)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, -y, rtol=1e-5), seen[2 * i + 1], expected)


@global_rules
def test_a_window_is_stored_half_way_and_goes_on_with_the_same_bits(path, tmp_path, rule, standard_promotion):
  tx = make(optax.sgd(1.0, momentum=0.9), rule, skip_spikes=SPIKES, monitor=True)
  gradients = trees(7)
  whole = run(tx, gradients, value=2.0)
  half = run(tx, gradients[:3], value=2.0)[1]
  with orbax.checkpoint.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", half)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", tx.init(TREE))
  assert same(run(tx, gradients[3:], restored, value=2.0), whole)


@pytest.mark.parametrize("make_rule, number", [
    (lambda x: ogc.ema_clip(factor=x, warmup=1), 2.0), (lambda x: ogc.zclip(z_threshold=x, warmup=1), 2.5),
    (lambda x: ogc.ema_clip(decay=x, warmup=1), 0.5), (lambda x: ogc.autoclip(percentile=x, n=4), 30.0),
    (lambda x: ogc.ema_clip(warmup=1, maximum=x), 4.0)], ids=["factor", "z_threshold", "decay", "percentile", "maximum"])
def test_a_number_of_a_rule_may_be_traced(path, make_rule, number):
  tx = optax.inject_hyperparams(lambda number: ogc.global_clip(make_rule(number)))(number=number)
  params = {"a": jnp.zeros(2)}
  state, update = tx.init(params), jax.jit(tx.update)
  plain = ogc.global_clip(make_rule(number))
  expected_state = plain.init(params)
  for g in trees(5):
    updates, state = update({"a": g["a"]}, state)
    expected, expected_state = plain.update({"a": g["a"]}, expected_state)
    np.testing.assert_allclose(updates["a"], expected["a"], rtol=1e-6)


def test_init_of_nothing_counts_as_float32(path, x64):
  tx = ogc.global_clip(ogc.ema_clip(warmup=1))
  state = tx.init(None)
  for _ in range(2):
    updates, state = tx.update([np.asarray([3.0, 4.0])], state)
  assert state.threshold.dtype == np.float32 and float(state.threshold) == 10 and updates[0].dtype == np.float64


def test_a_field_is_found_by_its_name(path, standard_promotion):
  tx = optax.chain(ogc.global_clip(ogc.zclip()), optax.adam(1e-3))
  _, state = run(tx, trees(2))
  assert int(optax.tree.get(state, "count")) == 2 and int(optax.tree.get(state, "clip_count")) == 2
  assert float(optax.tree.get(state, "threshold")) == np.inf
  windows = make(optax.adam(1e-3), ogc.zclip(), skip_spikes=SPIKES)
  state = windows.init(TREE)
  for name in ("count", "loss_scale", "threshold", "rule_state", "spike_state", "optimizer_step"):
    assert optax.tree.get(state, name) is not None


def test_a_gradient_flows_through_the_rule(path):
  # The threshold of autoclip with n=1 is the norm itself, so nothing is clipped; half of it where maximum says so.
  def clipped(x, rule):
    tx = ogc.global_clip(rule)
    return tx.update([x], tx.init([x]))[0][0]
  x = jnp.asarray([3.0, 4.0])
  np.testing.assert_allclose(jax.jacobian(clipped)(x, ogc.autoclip(50, n=1)), np.eye(2), atol=1e-6)
  expected = jax.jacobian(lambda x: ogc.clip_tree([x], 1.0)[0][0])(x)
  np.testing.assert_allclose(jax.jacobian(clipped)(x, ogc.autoclip(50, n=1, maximum=1.0)), expected, rtol=1e-5)
  class HalfOfTheNorm:
    def init(self, like):
      return ()
    def update(self, state, norm, finite, *, global_norm):
      return norm / 2, state
  np.testing.assert_allclose(jax.jacobian(clipped)(x, HalfOfTheNorm()), np.eye(2) / 2, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints of version 0.1.0, stored by tests/checkpoints/store.py at a800ac0

STORED = pathlib.Path(__file__).parent / "checkpoints"
OLD = {
    "windows": make(optax.sgd(0.1, momentum=0.9), 1.0, every_k=3, loss_scale=ogc.DynamicLossScale(8.0)),
    "windows_monitored": make(optax.sgd(0.1, momentum=0.9), 1.0, every_k=3, monitor="leaves"),
    "clip_monitored": optax.chain(ogc.global_clip(1.0, monitor="leaves"), optax.sgd(0.1, momentum=0.9)),
    "clip": optax.chain(ogc.global_clip(1.0), optax.sgd(0.1, momentum=0.9)),
}


def old_gradients(step):
  return {"w": np.full((2, 3), step + 1, np.float32), "b": np.full(3, 0.5 * step, jnp.bfloat16)}


@pytest.mark.parametrize("name", OLD)
def test_a_checkpoint_of_the_version_before_loads_and_goes_on(path, name):
  tx = OLD[name]
  params = jax.tree.map(np.zeros_like, old_gradients(0))
  state, update = tx.init(params), jax.jit(tx.update)
  for step in range(5):
    updates, state = update(old_gradients(step), state, params)
  with orbax.checkpoint.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(STORED / name, tx.init(params))
  assert types(restored) == types(state)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=1e-6), restored, state)
  after, _ = update(old_gradients(5), restored, params)
  expected, _ = update(old_gradients(5), state, params)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=1e-6), after, expected)
