"""A user's file, which pyright accepts in strict mode and Python runs. An ignored line is one that pyright must refuse."""

import tempfile
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc

Tree = dict[str, jax.Array]
params: Tree = {"w": jnp.float32(0), "b": jnp.float32(0)}
grads: Tree = {"w": jnp.float32(3), "b": jnp.float32(4)}

# Numbers of every kind, dtypes by name and by type.
for max_norm in (1, 1.0, np.float32(1), np.int64(1), jnp.float32(1)):
  assert_type(ogc.global_clip(max_norm), optax.GradientTransformationExtraArgs)
  assert_type(ogc.per_tensor_clip(max_norm, loss_scale=2.0, update_dtype="float32"), optax.GradientTransformationExtraArgs)
ogc.global_clip(1.0, on_nonfinite="zero", monitor=True, update_dtype=jnp.float32, scale_stage="kernel")

tx = ogc.clipped_multi_steps(
    optax.scale(-1.0), max_norm=1.0, every_k=2, loss_scale=ogc.DynamicLossScale(2.0**15), on_nonfinite="skip",
    accumulator_dtype=jnp.bfloat16)
assert_type(tx, optax.GradientTransformationExtraArgs)
ogc.clipped_multi_steps(optax.scale(-1.0), 1.0, every_k=lambda step: 2 + step)

# Thresholds that follow the run: schedules, rules, a rule of the user's own.
class Half:
  def init(self, like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.float32(0)

  def update(self, state: jax.Array, norm: jax.Array, finite: jax.Array, *,
             global_norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    return norm / 2, state


ogc.global_clip(lambda count: 1.0 / (1.0 + count))
for rule in (ogc.zclip(), ogc.ema_clip(factor=2.0), ogc.autoclip(percentile=10, n=100), Half()):
  ogc.global_clip(rule)
ogc.per_tensor_clip(ogc.adagc())
ogc.clipped_multi_steps(optax.scale(-1.0), ogc.zclip(), skip_spikes=ogc.SpikeRule(window=128, deviations=6.0))
with tempfile.TemporaryDirectory() as folder:
  with ogc.History(folder + "/history.jsonl") as history:
    history.write(tx.init(params), step=0)
  assert_type(ogc.History.read(folder + "/history.jsonl"), list[dict[str, Any]])

# The fused step.
adamw = ogc.clipped_adamw(lambda count: 1e-3, 1.0, weight_decay=0.1, mu_dtype="float32", on_nonfinite="skip")
new_params, adamw_state = adamw.step(grads, adamw.init(params), params)

# A tree comes back as the type that went in.
clipped, norm = ogc.clip_tree(grads, 1.0)
assert_type(clipped, Tree)
assert_type(norm, jax.Array)
assert_type(ogc.global_norm(grads), jax.Array)
ogc.leaf_norms(grads)

state = tx.init(params)
assert_type(ogc.current_loss_scale(state), jax.Array)
assert_type(ogc.has_updated(state), jax.Array)
assert_type(ogc.clip_metrics(state), dict[str, jax.Array])
for row in ogc.leaf_report(grads).rows:
  assert_type(row, ogc.LeafRow)
  assert_type((row.path, row.norm, row.share, row.nonfinite), tuple[str, float, float, int])
assert_type(ogc.backend_info(), dict[str, str])
assert_type(ogc.custom_call_targets(), tuple[str, ...])
with ogc.use_backend("reference"):
  ogc.global_norm(grads)


def never_called() -> None:
  ogc.global_clip("1.0")  # pyright: ignore[reportArgumentType]
  ogc.global_clip(1.0, on_nonfinite="skip")  # pyright: ignore[reportArgumentType]
  ogc.clipped_multi_steps(optax.scale(-1.0), 1.0, every_k=2.5)  # pyright: ignore[reportArgumentType]
  ogc.clip_tree(grads, None)  # pyright: ignore[reportArgumentType]
  ogc.SpikeRule(limit=5.0, judge="loss")  # pyright: ignore[reportArgumentType]
  ogc.use_backend("gpu")  # pyright: ignore[reportArgumentType]
  ogc.global_clip(1.0, maximum=2.0)  # pyright: ignore[reportCallIssue]
