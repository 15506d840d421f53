"""Trainers that clip by a number in their config: the two lines that give them this clip."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest

SPIKE = {"w": jnp.full(4, 1e20)}  # optax makes zeros of it


@pytest.fixture
def entry_point(monkeypatch):
  """`optax.clip_by_global_norm = ogc.global_clip`, taken back afterwards."""
  monkeypatch.setattr(optax, "clip_by_global_norm", ogc.global_clip)


def as_levanter_builds_it(max_grad_norm):
  def optimizer(learning_rate):
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.scale(-learning_rate))
  return optax.inject_hyperparams(optimizer)(learning_rate=lambda step: 1.0 / (1 + step))


def as_easydel_builds_it(clip_grad):
  return optax.MultiSteps(optax.chain(optax.clip_by_global_norm(clip_grad), optax.sgd(1.0)), 1)


@pytest.mark.parametrize("build", [as_levanter_builds_it, as_easydel_builds_it])
def test_an_optimizer_built_by_name_clips_by_it(build, entry_point, path, standard_promotion):
  tx = build(1.0)
  updates, _ = jax.jit(tx.update)(SPIKE, tx.init(SPIKE), SPIKE)
  np.testing.assert_allclose(updates["w"], -0.5, rtol=1e-6)


def test_a_clip_called_by_itself_takes_any_state(entry_point, path):
  clip = optax.clip_by_global_norm(max_norm=1.0)
  updates, _ = jax.jit(lambda grads: clip.update(grads, {"the train state": 1}, None))(SPIKE)
  np.testing.assert_allclose(updates["w"], 0.5, rtol=1e-6)


def test_its_custom_call_is_in_the_program(entry_point, standard_promotion):
  tx = as_levanter_builds_it(1.0)
  with ogc.use_backend("native"):
    text = jax.jit(tx.update).lower(SPIKE, tx.init(SPIKE), SPIKE).as_text()
  assert "optax_globalclip" in text
