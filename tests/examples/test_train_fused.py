"""Does the training example train alike with `--fused`?"""

import numpy as np
import pytest
import train_flax


@pytest.fixture
def fused_steps(monkeypatch):
  """How often a step of a `FusedTrainState` was traced."""
  traced, apply = [], train_flax.FusedTrainState.apply_gradients

  def counting(self, **kwargs):
    traced.append(self)
    return apply(self, **kwargs)

  monkeypatch.setattr(train_flax.FusedTrainState, "apply_gradients", counting)
  return traced


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--accumulate", "2"]], ids=["steps", "windows"])
def test_the_fused_step_gives_the_norms_of_the_chain(train, fused_steps, options):
  _, _, chain = train(*options)
  assert not fused_steps
  _, _, fused = train("--fused", *options)
  assert fused_steps
  norms = [[record["global_norm"] for record in run["clipped"]] for run in (chain, fused)]
  np.testing.assert_allclose(norms[1], norms[0], rtol=1e-3)
  assert len(set(norms[0])) > 1
