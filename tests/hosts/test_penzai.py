"""Penzai: a `StatefulTrainer`, whose gradients are a tuple of named parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest

pytest.importorskip("penzai", reason="penzai is not installed (pip install '.[hosts]')")

from penzai import pz
from penzai.toolshed import basic_training

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def weights(model):
  _, params = pz.unbind_params(model)
  return {param.label: np.asarray(param.value.unwrap(*param.value.named_axes), np.float64) for param in params}


def loss_fn(model, rng, state, x):
  loss = 10 * model(x).unwrap("out").sum()
  return loss, state, {"loss": loss}


@pytest.mark.parametrize("make", [
    lambda sgd: optax.chain(ogc.global_clip(1.0, monitor=True), sgd),
    lambda sgd: ogc.clipped_multi_steps(sgd, 1.0, monitor=True),
], ids=["global_clip", "clipped_multi_steps"])
def test_a_stateful_trainer_clips_over_all_parameters(make, path):
  model = pz.nn.Linear.from_config("linear", init_base_rng=jax.random.key(0), input_axes={"in": 2}, output_axes={"out": 1})
  before = weights(model)
  trainer = basic_training.StatefulTrainer.build(jax.random.key(1), model, make(optax.sgd(1.0)), loss_fn)
  trainer.step(x=pz.nx.wrap(jnp.array([3.0, 4.0]), "in"))
  moved = {name: before[name] - value for name, value in weights(model).items()}
  assert sorted(moved) == ["linear.weights"]
  np.testing.assert_allclose(moved["linear.weights"].ravel(), [0.6, 0.8], rtol=1e-6)
  opt_state = trainer.state.value.opt_state
  np.testing.assert_allclose(ogc.clip_metrics(opt_state)["global_norm"], 50, rtol=1e-6)
  assert len(ogc.leaf_report(opt_state).rows) == 1
