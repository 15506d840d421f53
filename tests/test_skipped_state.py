"""Does a window that was skipped leave a NaN, or anything else, behind? (Case 62.)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
from windows import leaves_with_nan

pytestmark = pytest.mark.reference_repeats

NAN, INF = np.nan, np.inf
DTYPES = {"bf16": jnp.bfloat16, "f16": np.float16, "f32": np.float32}
PARAMS = {name: np.asarray([1, 2, 3]).astype(dtype) for name, dtype in DTYPES.items()}
SCALE = 8.0
EVERY_K = {"1": 1, "2": 2, "schedule": lambda step: jnp.where(step < 100, 2, 3)}
SCALES = {"none": None, "static": SCALE, "dynamic": ogc.DynamicLossScale(SCALE)}

# What each micro-batch of a window has beside good gradients: an element of a leaf, or a number.
BAD = {
    "nan": [{"element": NAN}], "inf": [{"element": INF}], "-inf": [{"element": -INF}],
    "nan, then good": [{"element": NAN}, {}], "good, then nan": [{}, {"element": NAN}],
    "inf, then good": [{"element": INF}, {}], "good, then inf": [{}, {"element": INF}],
    "inf, then -inf": [{"element": INF}, {"element": -INF}], "nan, then inf": [{"element": NAN}, {"element": INF}],
    "scale": [{"loss_scale": 0.0}], "subnormal scale": [{"loss_scale": 1e-40}],
    "scale, then good": [{"loss_scale": NAN}, {}], "good, then scale": [{}, {"loss_scale": INF}],
    "weight": [{"weight": NAN}],
    "weight, then good": [{"weight": INF}, {}], "good, then weight": [{}, {"weight": -1.0}],
}


def bad_windows(every_k):
  return {name: window for name, window in BAD.items() if len(window) == (1 if every_k == "1" else 2)}


WINDOWS = [(every_k, name) for every_k in EVERY_K for name in bad_windows(every_k)]
OF_ELEMENTS = [(every_k, name) for every_k, name in WINDOWS if "scale" not in name and "weight" not in name]


@functools.cache
def make(path, every_k, scale, monitor, on_nonfinite="skip"):
  """A transformation and its jitted update; `path` is part of the key because it is read when tracing."""
  del path
  tx = ogc.clipped_multi_steps(optax.sgd(0.5, momentum=0.75), 1.0, every_k=EVERY_K[every_k], loss_scale=SCALES[scale],
                               monitor=monitor, on_nonfinite=on_nonfinite)
  return tx, jax.jit(tx.update)


class Run:
  def __init__(self, *key):
    tx, self.update = make(*key)
    self.state, self.micro_batches = tx.init(PARAMS), 1 if key[1] == "1" else 2

  def __call__(self, window=None, bad_leaf="f32"):
    """The updates of a window whose true gradients are [1, 2, 2] in every leaf but for what `window` says."""
    for numbers in window or [{}] * self.micro_batches:
      gradients = {}
      for name, dtype in DTYPES.items():
        gradients[name] = np.asarray(np.float32([1, 2, 2]) * np.float32(self.scale)).astype(dtype)
      if "element" in numbers:
        gradients[bad_leaf][1] = numbers["element"]
      extra = {"weight": 1.0, "loss_scale": self.scale} | {k: v for k, v in numbers.items() if k != "element"}
      extra = {name: jnp.asarray(np.float32(value)) for name, value in extra.items()}
      updates, self.state = self.update(gradients, self.state, PARAMS, **extra)
    return jax.tree.map(np.asarray, updates)

  @property
  def scale(self):
    return float(ogc.current_loss_scale(self.state))

  @property
  def metrics(self):
    return {name: float(value) for name, value in ogc.clip_metrics(self.state).items()}


def check_skipped(run, updates):
  assert leaves_with_nan(run.state) == []
  assert not ogc.has_updated(run.state)
  for leaf in jax.tree.leaves(updates):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
  assert run.metrics["global_norm"] == INF and run.metrics["clip_factor"] == 0


@pytest.mark.parametrize("every_k, bad", WINDOWS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("monitor", [False, True], ids=["plain", "monitored"])
def test_62_a_skip_leaves_no_nan_and_the_next_window_goes_as_if_it_had_not_been(path, every_k, bad, scale, monitor):
  run, fresh = Run(path, every_k, scale, monitor), Run(path, every_k, scale, monitor)
  for one in run, fresh:
    one()
  before = run.state
  check_skipped(run, run(BAD[bad]))
  assert oracle.same_bits(run.state.inner_state, before.inner_state)
  assert run.metrics["nonfinite_steps"] == 1 and run.state.optimizer_step == before.optimizer_step
  # Gradients are of the scale that the skip left; a power of two changes no bit of the true ones.
  assert run.scale == (SCALE / 2 if scale == "dynamic" else fresh.scale)
  for _ in range(2):
    assert oracle.same_bits(run(), fresh())
    assert oracle.same_bits(run.state.inner_state, fresh.state.inner_state)
    assert run.metrics["global_norm"] == fresh.metrics["global_norm"] == pytest.approx(np.sqrt(27), rel=1e-6)
    assert leaves_with_nan(run.state) == []
  assert run.metrics["consecutive_nonfinite"] == 0


@pytest.mark.parametrize("every_k, bad", OF_ELEMENTS)
@pytest.mark.parametrize("leaf", DTYPES)
def test_62_a_monitor_names_the_leaf_and_holds_no_nan(path, every_k, bad, leaf):
  run = Run(path, every_k, "dynamic", True)
  check_skipped(run, run(BAD[bad], leaf))
  rows = ogc.leaf_report(run.state).rows
  assert [(row.path, row.nonfinite) for row in rows][0] == (leaf, 1)
  assert rows[0].norm == INF
  assert {row.path: row.nonfinite for row in rows[1:]} == {name: 0 for name in DTYPES if name != leaf}
  np.testing.assert_allclose([row.norm for row in rows[1:]], [3, 3], rtol=1e-6)


@pytest.mark.parametrize("every_k, bad", [pair for pair in WINDOWS if pair not in OF_ELEMENTS])
def test_62_a_monitor_of_finite_gradients_under_a_bad_number_blames_no_leaf(path, every_k, bad):
  run = Run(path, every_k, "dynamic", True)
  check_skipped(run, run(BAD[bad]))
  rows = ogc.leaf_report(run.state).rows
  assert {row.path: row.nonfinite for row in rows} == {name: 0 for name in DTYPES}
  assert not any(np.isnan(row.norm) for row in rows)


@pytest.mark.parametrize("every_k, bad", WINDOWS)
def test_62_windows_that_are_skipped_one_after_another_leave_no_nan(path, every_k, bad):
  run, fresh = Run(path, every_k, "dynamic", True), Run(path, every_k, "dynamic", True)
  for skips in range(1, 4):
    check_skipped(run, run(BAD[bad]))
    assert run.metrics["consecutive_nonfinite"] == skips and run.scale == SCALE / 2**skips
  # The gradients come as the scale goes.
  assert oracle.same_bits(run(), fresh())


@pytest.mark.parametrize("bad", [NAN, INF])
def test_62_a_window_that_ends_early_and_bad_leaves_no_nan(path, bad):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0, momentum=0.5), 1.0, every_k=4)
  update, state = jax.jit(tx.update), tx.init(np.zeros(2, np.float32))
  for boundary in False, True:
    updates, state = update(np.float32([3, bad]), state, None, boundary=np.bool_(boundary))
  np.testing.assert_array_equal(updates, np.float32([0, 0]))
  assert leaves_with_nan(state) == [] and state.clip_state.global_norm == INF
  updates, state = update(np.float32([6, 8]), state, None, boundary=np.bool_(True))
  np.testing.assert_allclose(updates, [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize("every_k, bad", [(every_k, bad) for every_k, bad in WINDOWS if every_k != "schedule"])
def test_62_where_bad_windows_are_zeroed_they_leave_no_nan_either(path, every_k, bad):
  run = Run(path, every_k, "dynamic", True, "zero")
  updates = run(BAD[bad])
  assert leaves_with_nan(run.state) == [] and ogc.has_updated(run.state)
  for leaf in jax.tree.leaves(updates):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
  assert run.metrics["global_norm"] == INF


@pytest.mark.parametrize("every_k", [1, 2])
def test_62_a_sum_that_overflows_leaves_no_nan(path, every_k):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, every_k=every_k, monitor=True)
  update, state = jax.jit(tx.update), tx.init(np.zeros(2, np.float32))
  # Of one micro-batch the quotient overflows: 3e38 at a scale of 1/8.
  for gradient, scale in ((3e38, 0.125), (-3e38, 0.125))[:every_k]:
    updates, state = update(np.float32([gradient, 1]), state, None, loss_scale=jnp.float32(scale))
  if every_k == 2:
    np.testing.assert_array_equal(updates, np.float32([0, 0]))
    assert state.clip_state.nonfinite_steps == 1
  assert leaves_with_nan((updates, state)) == [] and state.clip_state.global_norm == INF


def test_62_a_skip_in_float64_leaves_no_nan(path, x64):
  for every_k in 1, 2:
    tx = ogc.clipped_multi_steps(optax.sgd(1.0, momentum=0.5), 1.0, every_k=every_k, monitor=True)
    update, state = jax.jit(tx.update), tx.init({"a": np.zeros(2), "b": np.zeros(1, np.complex128)})
    for _ in range(every_k):
      updates, state = update({"a": np.asarray([NAN, 1]), "b": np.asarray([complex(1, -INF)])}, state)
    assert leaves_with_nan((updates, state)) == []
    assert state.clip_state.global_norm == INF and state.clip_state.global_norm.dtype == np.float64
    for _ in range(every_k):
      updates, state = update({"a": np.asarray([3e200, 0]), "b": np.asarray([4e200j])}, state)
    np.testing.assert_allclose(updates["a"], [-0.6, 0], rtol=1e-15)
    np.testing.assert_allclose(updates["b"], [-0.8j], rtol=1e-15)


def test_62_a_skip_within_a_scan_leaves_no_nan(path):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0, momentum=0.5), 1.0, every_k=2, loss_scale=ogc.DynamicLossScale(8.0))
  batches = np.float32([[24, 32], [24, 32], [NAN, 1], [INF, 1], [INF, 1], [-INF, 1], [12, 16], [0, 0]])
  def body(state, batch):
    updates, state = tx.update(batch, state)
    return state, (updates, state)
  _, (updates, states) = jax.jit(lambda state: jax.lax.scan(body, state, batches))(tx.init(np.zeros(2, np.float32)))
  at_ends = jax.tree.map(lambda leaf: leaf[1::2], states)
  assert leaves_with_nan(at_ends) == []
  np.testing.assert_array_equal(at_ends.clip_state.nonfinite_steps, [0, 1, 2, 2])
  np.testing.assert_array_equal(at_ends.scale_state.loss_scale, [8, 4, 2, 2])
  # [6, 8] / 2 is clipped to [0.6, 0.8]; half of the momentum of the first window is still there.
  np.testing.assert_allclose(updates[-1], [-0.9, -1.2], rtol=1e-6)
