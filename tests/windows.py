"""A transformation at work: its state from call to call, and its state on disk."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle


def f32(*values):
  return np.asarray(values, np.float32)


def make(inner=None, max_norm=10.0, **options):
  """Windows of two around sgd at rate 1, unless told otherwise."""
  return ogc.clipped_multi_steps(inner or optax.sgd(1.0), max_norm, **(dict(every_k=2) | options))


class Run:
  """Parameters and the optimizer state, one micro-batch after another through one jitted update."""

  def __init__(self, tx: optax.GradientTransformation, params: Any):
    self.params, self.state = params, tx.init(params)
    self.update = jax.jit(tx.update)

  def __call__(self, gradients: Any, **extra) -> Any:
    """The updates of a micro-batch; the parameters stay as they are."""
    updates, self.state = self.update(gradients, self.state, self.params, **extra)
    return jax.tree.map(np.asarray, updates)

  @property
  def scale(self) -> float:
    return float(ogc.current_loss_scale(self.state))

  @property
  def metrics(self) -> dict[str, float]:
    return {name: float(value) for name, value in ogc.clip_metrics(self.state).items()}

  @property
  def ran(self) -> bool:
    """Whether the last call ran the optimizer."""
    return bool(ogc.has_updated(self.state))


def through_numpy(state: Any) -> Any:
  """The state as it comes back from a file of NumPy arrays."""
  leaves, structure = jax.tree.flatten(state)
  file = io.BytesIO()
  np.savez(file, **{str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)})
  file.seek(0)
  saved = np.load(file)
  return structure.unflatten([saved[str(i)].view(np.asarray(leaf).dtype) for i, leaf in enumerate(leaves)])


def types(tree: Any) -> Any:
  """The shape and dtype of every leaf."""
  return jax.tree.map(lambda leaf: (np.shape(leaf), np.dtype(leaf.dtype)), tree)


def leaves_with_nan(state: Any) -> list[str]:
  """The paths of the leaves that hold a NaN."""
  return [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(state)
          if jnp.issubdtype(leaf.dtype, jnp.inexact) and np.isnan(oracle.real_elements(leaf)).any()]
