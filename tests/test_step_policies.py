"""What does a fused step do with a bad update: leave no trace, be loud, or go on with zeros?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax_globalclip as ogc
import oracle
import pytest

pytestmark = pytest.mark.reference_repeats

NAN, INF = np.nan, np.inf
PARAMS = {"a": jnp.asarray([1.0, -2.0, 3.0]), "b": jnp.asarray([0.5, 0.25], jnp.bfloat16)}
GRADS = {"a": jnp.asarray([0.5, 1.0, -1.0]), "b": jnp.asarray([2.0, -1.0], jnp.bfloat16)}
BAD = {"nan": {"a": NAN}, "inf": {"a": INF}, "-inf": {"b": -INF}, "inf and -inf": {"a": INF, "b": -INF},
       "nan in a half": {"b": NAN}}
BAD_NUMBERS = {"scale nan": dict(loss_scale=NAN), "scale 0": dict(loss_scale=0.0), "subnormal scale": dict(loss_scale=1e-40)}


def with_elements(elements):
  return {name: leaf.at[1].set(elements[name]) if name in elements else leaf for name, leaf in GRADS.items()}


@functools.cache
def make(backend, donated, **options):
  """A transformation and its jitted step; `backend` is part of the key because it is read when tracing."""
  del backend
  tx = ogc.clipped_adamw(lambda count: 0.1 / (1 + count.astype(jnp.float32)), 1.0, weight_decay=0.5, **options)
  step = lambda params, state, grads, scale: tx.step(grads, state, params, loss_scale=scale)
  return tx, jax.jit(step, donate_argnums=(0, 1) if donated else ())


class Run:
  def __init__(self, on_nonfinite, donated=False, **options):
    tx, self.step = make(ogc.backend_info()["setting"], donated, on_nonfinite=on_nonfinite, **options)
    self.params, self.state = jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS)

  def __call__(self, grads=GRADS, loss_scale=1.0):
    self.params, self.state = self.step(self.params, self.state, grads, np.float32(loss_scale))
    return self

  @property
  def kept(self):
    return self.params, self.state


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("bad", [*BAD, *BAD_NUMBERS])
def test_a_skip_leaves_parameters_and_state_bit_for_bit_counts_included(path, bad, donated):
  run = Run("skip", donated)
  run()
  before = jax.tree.map(np.array, run.kept)
  run(with_elements(BAD.get(bad, {})), **BAD_NUMBERS.get(bad, {}))
  assert oracle.same_bits(jax.tree.map(np.array, run.kept), before)
  assert oracle.same_bits(run().kept, Run("skip")()().kept)


def test_a_skip_keeps_bits_that_no_arithmetic_would(path):
  run = Run("skip")
  odd = np.array([1e-40, -0.0, 1.0], np.float32)
  run.params = {"a": jnp.asarray(odd), "b": PARAMS["b"]}
  before = jax.tree.map(np.array, run.kept)
  assert oracle.same_bits(jax.tree.map(np.array, run({"a": jnp.full(3, NAN), "b": GRADS["b"]}).kept), before)


@pytest.mark.parametrize("max_norm", [NAN, -1.0])
def test_a_traced_threshold_that_cannot_be_used_skips(path, max_norm):
  @jax.jit
  def step(max_norm):
    tx = ogc.clipped_adamw(0.1, max_norm, on_nonfinite="skip")
    state = tx.init(PARAMS)
    return state, tx.step(GRADS, state, PARAMS)
  state, (params, after) = step(np.float32(max_norm))
  assert oracle.same_bits((params, after), (PARAMS, state))


@pytest.mark.parametrize("bad", [*BAD, *BAD_NUMBERS])
def test_propagate_makes_every_moment_and_parameter_nan(path, bad):
  run = Run("propagate")()(with_elements(BAD.get(bad, {})), **BAD_NUMBERS.get(bad, {}))
  _, (adam, _, rate) = run.state
  for leaf in jax.tree.leaves((run.params, adam.mu, adam.nu)):
    assert np.all(np.isnan(oracle.real_elements(leaf)))
  assert adam.count == rate.count == 2


@pytest.mark.parametrize("bad", [*BAD, *BAD_NUMBERS])
def test_zero_steps_on_with_zero_gradients(path, bad):
  run, want = Run("zero"), Run("zero")
  run()(with_elements(BAD.get(bad, {})), **BAD_NUMBERS.get(bad, {}))
  want()(jax.tree.map(jnp.zeros_like, GRADS))
  assert oracle.same_bits(run.kept, want.kept)


def test_raise_names_the_leaf(path):
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"updates\['b'\] \(1 elements\)"):
    jax.block_until_ready(Run("raise")(with_elements({"b": INF})).kept)
  assert np.all(np.isfinite(Run("raise")().params["a"]))


def test_a_monitor_tells_of_what_was_skipped(path):
  run = Run("skip", monitor=True)
  run()(with_elements({"b": NAN}))
  metrics = {name: float(value) for name, value in ogc.clip_metrics(run.state).items()}
  assert (metrics["steps"], metrics["nonfinite_steps"], metrics["consecutive_nonfinite"]) == (2, 1, 1)
  assert metrics["global_norm"] == INF and metrics["clip_factor"] == 0
  assert ogc.leaf_report(run.state).rows[0][::3] == ("b", 1)
  run()
  metrics = {name: float(value) for name, value in ogc.clip_metrics(run.state).items()}
  assert metrics["global_norm"] == pytest.approx(np.sqrt(7.25)) and metrics["consecutive_nonfinite"] == 0
  assert metrics["clipped_steps"] == 2
  assert run.state[1][0].count == 2


@pytest.mark.parametrize("policy", ["skip", "zero", "propagate"])
def test_what_goes_the_plain_way_is_judged_alike(path, standard_promotion, policy):
  def kept(nesterov, elements):
    run = Run(policy, nesterov=nesterov)
    run()
    before = jax.tree.map(np.array, run.kept)
    return before, jax.tree.map(np.array, run(with_elements(elements)).kept)
  for elements in BAD.values():
    before, plain = kept(True, elements)
    _, fused = kept(False, elements)
    if policy == "skip":
      assert oracle.same_bits(plain, before)
    finite = [[bool(np.all(np.isfinite(oracle.real_elements(x)))) for x in jax.tree.leaves(tree)] for tree in (plain, fused)]
    assert finite[0] == finite[1]


def test_nothing_of_it_talks_to_the_host(path):
  run = Run("skip", monitor=True)
  given = jax.device_put((run.params, run.state, GRADS, np.float32(1)))
  run.step(*given)
  with jax.transfer_guard("disallow"):
    run.step(*given)


def test_a_rule_moves_the_threshold_and_a_skip_leaves_no_trace_in_it(path):
  # Norms 1, 3: the average is 2, and the third threshold 2 * factor.
  tx = ogc.clipped_adamw(0.1, ogc.ema_clip(0.5, decay=0.5, warmup=2), on_nonfinite="skip", monitor=True)
  step = jax.jit(lambda params, state, g: tx.step({"w": g}, state, params))
  params = {"w": jnp.zeros(2)}
  state = tx.init(params)
  for g in [1.0, 0.0], [0.0, 3.0]:
    params, state = step(params, state, jnp.asarray(g))
  before = params, state[1], state[0]._replace(clip_state=None)
  params, state = step(params, state, jnp.asarray([NAN, 1.0]))
  assert oracle.same_bits((params, state[1], state[0]._replace(clip_state=None)), before)
  params, state = step(params, state, jnp.asarray([6.0, 8.0]))
  metrics = ogc.clip_metrics(state)
  assert metrics["threshold"] == 1 and metrics["nonfinite_steps"] == 1 and state[0].clip_count == 3
  m = 0.9 * (0.9 * 0.1 * np.asarray([1, 0]) + 0.1 * np.asarray([0, 3])) + 0.1 * np.asarray([0.6, 0.8])
  np.testing.assert_allclose(state[1][0].mu["w"], m, rtol=1e-6)


def test_a_schedule_of_thresholds_counts_steps(path):
  tx = ogc.clipped_adamw(0.1, lambda count: jnp.where(count == 0, np.float32(1), np.float32(2)), b1=0.0)
  step = jax.jit(lambda params, state, g: tx.step([g], state, params))
  params, g = [jnp.zeros(2)], jnp.asarray([6.0, 8.0])
  params, first = step(params, tx.init(params), g)
  _, second = step(params, first, g)
  np.testing.assert_allclose(first[1][0].mu[0], [0.6, 0.8], rtol=1e-6)
  np.testing.assert_allclose(second[1][0].mu[0], [1.2, 1.6], rtol=1e-6)
