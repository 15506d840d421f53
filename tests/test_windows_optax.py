"""Windows beside optax's own: `MultiSteps`, `apply_if_finite`, `masked`, `partition`, `chain`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import windows
from windows import f32

pytestmark = pytest.mark.reference_repeats


def test_34_multi_steps_around_the_clip_is_right_and_the_other_nesting_is_not(path, standard_promotion):
  right = {
      "clipped_multi_steps": ogc.clipped_multi_steps(optax.sgd(1.0), 5.0, every_k=2),
      "MultiSteps(chain(global_clip, sgd))": optax.MultiSteps(optax.chain(ogc.global_clip(5.0), optax.sgd(1.0)), 2),
  }
  for tx in right.values():
    run = windows.Run(tx, f32(0))
    assert [run(f32(g)).item() for g in (10, -9)] == [0, -0.5]
  wrong = optax.chain(ogc.global_clip(5.0), optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
  run = windows.Run(wrong, f32(0))
  assert [run(f32(g)).item() for g in (10, -9)] == [0, 0]


@pytest.mark.parametrize("inner, every_k", [
    (lambda: optax.adamw(0.1, weight_decay=0.1), 3),
    (lambda: optax.sgd(0.1, momentum=0.9), lambda step: jnp.where(step < 1, 2, 3)),
    (lambda: optax.sgd(0.1), 1),
])
def test_float32_windows_agree_with_multi_steps(path, standard_promotion, inner, every_k):
  rng = np.random.default_rng(0)
  params = {"w": rng.normal(size=(4, 3)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}
  ours = windows.Run(ogc.clipped_multi_steps(inner(), 2.0, every_k=every_k), params)
  theirs = windows.Run(optax.MultiSteps(optax.chain(optax.clip_by_global_norm(2.0), inner()), every_k), params)
  for _ in range(9):
    # The standard deviations are drawn so that some windows are clipped and some are not.
    spread = rng.choice([0.2, 5.0])
    batch = jax.tree.map(lambda p: rng.normal(scale=spread, size=p.shape).astype(np.float32), params)
    got, want = ours(batch), theirs(batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), got, want)
    for run, updates in (ours, got), (theirs, want):
      run.params = jax.tree.map(lambda p, u: p + u, run.params, updates)
  assert ours.metrics["clipped_steps"] in range(1, int(ours.metrics["steps"]))
  assert int(ours.state.optimizer_step) == int(theirs.state.gradient_step)


def test_the_next_window_is_clean_where_multi_steps_stays_nan(standard_promotion):
  theirs = windows.Run(optax.MultiSteps(optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(1.0)), 2), f32(0))
  ours = windows.Run(ogc.clipped_multi_steps(optax.sgd(1.0), 10.0, every_k=2), f32(0))
  gradients = f32(np.nan), f32(1), f32(2), f32(2)
  assert [ours(g).item() for g in gradients] == [0, 0, 0, -2]
  emitted = [theirs(g).item() for g in gradients]
  assert np.isnan(emitted[-1])


def test_windows_stand_in_a_chain(path):
  tx = optax.chain(optax.scale(2.0), ogc.clipped_multi_steps(optax.sgd(1.0), 5.0, every_k=2), optax.scale(0.5))
  run = windows.Run(tx, f32(0, 0))
  run(f32(6, 0))
  np.testing.assert_allclose(run(f32(0, 8)), f32(-1.5, -2), rtol=1e-6)
  assert run.ran


def test_arguments_of_the_call_go_through_a_chain(path):
  tx = optax.chain(ogc.clipped_multi_steps(optax.sgd(1.0), 5.0, every_k=4), optax.identity())
  run = windows.Run(tx, f32(0))
  run(f32(4), loss_scale=4.0, weight=1.0)
  assert run(f32(8), loss_scale=2.0, weight=3.0, boundary=True).item() == -3.25


def test_apply_if_finite_has_nothing_to_do_behind_skip(standard_promotion):
  tx = optax.apply_if_finite(ogc.clipped_multi_steps(optax.sgd(1.0), 5.0, loss_scale=ogc.DynamicLossScale(8.0)), 3)
  run = windows.Run(tx, f32(0))
  assert [run(f32(g)).item() for g in (8, 16)] == [-1, -2]


def test_54_one_clip_before_a_partition_is_of_the_whole_tree(path):
  params, labels = {"a": f32(0), "b": f32(0)}, {"a": "first", "b": "second"}
  gradients = {"a": f32(3), "b": f32(4)}

  def updates(tx, calls=1):
    run = windows.Run(tx, params)
    return [[float(u[0]) for u in jax.tree.leaves(run(gradients))] for _ in range(calls)][-1]

  sgd = optax.partition({"first": optax.sgd(1.0), "second": optax.sgd(1.0)}, labels)
  of_all = [-0.6, -0.8]
  assert updates(optax.chain(ogc.global_clip(1.0), sgd)) == pytest.approx(of_all, rel=1e-6)
  assert updates(ogc.clipped_multi_steps(sgd, 1.0, every_k=2), calls=2) == pytest.approx(of_all, rel=1e-6)
  clips = {name: optax.chain(ogc.global_clip(1.0), optax.sgd(1.0)) for name in ("first", "second")}
  assert updates(optax.partition(clips, labels)) == [-1, -1]
  steps = {name: ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, every_k=2) for name in ("first", "second")}
  assert updates(optax.partition(steps, labels), calls=2) == [-1, -1]


def test_a_schedule_free_optimizer_and_one_that_reads_the_loss_run_inside(standard_promotion):
  plateau = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
  run = windows.Run(ogc.clipped_multi_steps(plateau, 10.0, every_k=2), f32(0))
  emitted = [run(f32(1), value=jnp.float32(3)).item() for _ in range(8)]
  assert emitted[1] == -1 and -1 < emitted[-1] < 0 and emitted[::2] == [0] * 4
  free = optax.contrib.schedule_free_adamw(0.1)
  run = windows.Run(ogc.clipped_multi_steps(free, 10.0, every_k=2), f32(1, 2))
  for _ in range(4):
    updates = run(f32(1, -1))
  assert run.ran and np.isfinite(updates).all() and (updates != 0).all()
