"""Stores the checkpoints beside it. Run at a800ac0, version 0.1.0: `python store.py tests/checkpoints`."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import orbax.checkpoint

SGD = optax.sgd(0.1, momentum=0.9)
STATES = {
    "windows": ogc.clipped_multi_steps(SGD, 1.0, every_k=3, loss_scale=ogc.DynamicLossScale(8.0)),
    "windows_monitored": ogc.clipped_multi_steps(SGD, 1.0, every_k=3, monitor=True),
    "clip_monitored": optax.chain(ogc.global_clip(1.0, monitor=True), SGD),
    "clip": optax.chain(ogc.global_clip(1.0), SGD),
}


def gradients(step):
  return {"w": np.full((2, 3), step + 1, np.float32), "b": np.full(3, 0.5 * step, jnp.bfloat16)}


for name, tx in STATES.items():
  params = jax.tree.map(np.zeros_like, gradients(0))
  state = tx.init(params)
  for step in range(5):
    _, state = jax.jit(tx.update)(gradients(step), state, params)
  with orbax.checkpoint.StandardCheckpointer() as checkpointer:
    checkpointer.save(pathlib.Path(sys.argv[1]).resolve() / name, state)
