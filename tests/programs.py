"""Jitted functions that tests share. The threshold is traced, so that trees of equal structure share one program."""

import functools
import os
from unittest import mock

import jax
import optax_globalclip as ogc


def on(path):
  """Within, programs are traced for this path: "native" or "reference"."""
  return mock.patch.dict(os.environ, OPTAX_GLOBALCLIP_BACKEND=path)


def targets(text):
  """How often a lowered program calls each of the package's native targets."""
  return {name: text.count(f"@{name}(") + text.count(f'"{name}"') for name in ogc.custom_call_targets() if name in text}


@functools.lru_cache(maxsize=None)
def clip(path, per_leaf=False, monitor=True, **options):
  """`(tree, max_norm, **extra) -> (updates, metrics)` on the path that the fixture of that name has put in force.

  Where there is native code it scales too, unless `scale_stage` says otherwise. Without a monitor, which needs the norm
  of each leaf, the metrics are `None`."""
  del path  # part of the key: the path is chosen when a program is traced
  options = dict(scale_stage="kernel") | options
  make = ogc.per_tensor_clip if per_leaf else ogc.global_clip
  @jax.jit
  def run(tree, max_norm, **extra):
    tx = make(max_norm, monitor=monitor, **options)
    updates, state = tx.update(tree, tx.init(tree), **extra)
    return updates, ogc.clip_metrics(state) if monitor else None
  return run


@functools.lru_cache(maxsize=None)
def norms(path):
  """`tree -> (global norm, leaf norms)`."""
  del path
  return jax.jit(lambda tree: (ogc.global_norm(tree), ogc.leaf_norms(tree)))
