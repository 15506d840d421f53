"""google-tunix: its `PeftTrainer` trains a small model with the clip in either place. Run by ci/tunix.sh."""

import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest

peft_trainer = pytest.importorskip("tunix.sft.peft_trainer", reason="google-tunix is not installed (ci/tunix.sh brings it)")

from flax import nnx

pytestmark = pytest.mark.usefixtures("as_users_run_it")

RATE, MAX_NORM = 0.1, 1.0


class Model(nnx.Module):
  def __init__(self):
    self.w = nnx.Param(jnp.zeros(3))

  def __call__(self, x):
    return x @ self.w[...]


def loss_fn(model, x, y):
  return jnp.mean(jnp.square(model(x) - y))


def batches(count):
  rng = np.random.default_rng(0)
  return [{"x": rng.normal(size=(4, 3)).astype(np.float32), "y": rng.normal(scale=5, size=4).astype(np.float32)}
          for _ in range(count)]


def expected(data, every_k):
  """The parameters after SGD on the clipped mean gradient of every window, in float64."""
  w = np.zeros(3)
  for i in range(0, len(data), every_k):
    window = [{name: np.float64(value) for name, value in batch.items()} for batch in data[i:i + every_k]]
    g = np.mean([2 * batch["x"].T @ (batch["x"] @ w - batch["y"]) / 4 for batch in window], axis=0)
    w -= RATE * g * min(1, MAX_NORM / np.linalg.norm(g))
  return w


def train(tx, data, **options):
  config = peft_trainer.TrainingConfig(eval_every_n_steps=1000, **options)
  trainer = peft_trainer.PeftTrainer(Model(), tx, config).with_loss_fn(loss_fn)
  trainer.train(data)
  return np.asarray(trainer.model.w[...]), trainer.optimizer.opt_state


def test_windows_in_the_optimizer(path):
  data = batches(8)
  w, opt_state = train(ogc.clipped_multi_steps(optax.sgd(RATE), MAX_NORM, every_k=2, monitor=True), data, max_steps=8)
  np.testing.assert_allclose(w, expected(data, 2), rtol=1e-5)
  assert ogc.clip_metrics(opt_state)["steps"] == 4 and ogc.clip_metrics(opt_state)["clipped_steps"] > 0
  assert [row.path for row in ogc.leaf_report(opt_state).rows] == ["w/value"]


def test_the_clip_inside_of_the_trainers_own_accumulation(path):
  data = batches(8)
  w, _ = train(optax.chain(ogc.global_clip(MAX_NORM), optax.sgd(RATE)), data, max_steps=4, gradient_accumulation_steps=2)
  np.testing.assert_allclose(w, expected(data, 2), rtol=1e-5)


def test_a_batch_with_a_nan_is_skipped_and_training_goes_on(path):
  data = batches(6)
  bad = {"x": data[0]["x"], "y": np.full(4, np.nan, np.float32)}
  w, opt_state = train(ogc.clipped_multi_steps(optax.sgd(RATE), MAX_NORM), [*data[:3], bad, *data[3:]], max_steps=7)
  np.testing.assert_allclose(w, expected(data, 1), rtol=1e-5)
  assert ogc.clip_metrics(opt_state)["nonfinite_steps"] == 1
