"""A tree whose norm is 7, the clip of it, and what is expected of that."""

import jax
import numpy as np
import optax
import optax_globalclip as ogc

TREE = {"a": np.array([3, 4], np.float32), "b": np.full((2, 3), 2, np.float32)}
NORM = 7.0  # 25 + 6 * 4 = 49


def clip(tree, max_norm=1.0, scale_stage="kernel"):
  return ogc.global_clip(max_norm, scale_stage=scale_stage).update(tree, optax.EmptyState())[0]


def expect(updates, factor=1 / NORM):
  """The updates are `TREE` times `factor`."""
  jax.tree.map(lambda u, g: np.testing.assert_allclose(u, g * factor, rtol=1e-6), updates, TREE)
