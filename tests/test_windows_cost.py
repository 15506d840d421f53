"""What a window costs, read from the compiled programs: calls, copies, temporaries, and work between boundaries."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest

pytestmark = pytest.mark.reference_repeats

SHAPE, LEAVES = (512, 256), 6
PARAMS = [jax.ShapeDtypeStruct(SHAPE, np.float32)] * LEAVES + [jax.ShapeDtypeStruct((256,), np.float32)] * LEAVES
LEAF_BYTES = 512 * 256 * 4


def compiled_step(tx, params=PARAMS, gradients=None):
  """A training step on gradients that are given, or found inside the program as a model's are."""
  def step(params, state, *given):
    if not given:
      given = (jax.lax.optimization_barrier(jax.tree.map(jnp.sin, params)),)
    updates, state = tx.update(*given, state, params)
    # In the order of the donated arguments: XLA pairs donated buffers with results of their shape in order.
    return optax.apply_updates(params, updates), state
  args = (params, jax.eval_shape(tx.init, params), *(() if gradients is None else (gradients,)))
  return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()


def temporaries(compiled):
  return compiled.memory_analysis().temp_size_in_bytes


def large_copies(compiled):
  return re.findall(r"= \S*\[512,256\]\S* copy\(", compiled.as_text())


def native_calls(compiled):
  return re.findall(r'custom_call_target="optax_globalclip_(\w+)_cpu_v\d+"', compiled.as_text())


@pytest.mark.parametrize("every_k", [4, lambda step: 2 + step])
def test_a_window_needs_no_copies_and_no_temporaries(path, standard_promotion, every_k):
  tx = ogc.clipped_multi_steps(optax.adamw(1e-3), 1.0, every_k=every_k, loss_scale=ogc.DynamicLossScale())
  compiled = compiled_step(tx, gradients=PARAMS)
  assert not large_copies(compiled)
  assert temporaries(compiled) < LEAF_BYTES


def test_temporaries_are_no_larger_than_those_of_multi_steps(standard_promotion):
  theirs = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 4)
  ours = ogc.clipped_multi_steps(optax.adamw(1e-3), 1.0, every_k=4)
  for dtype in np.float32, jnp.bfloat16:
    params = [jax.ShapeDtypeStruct(p.shape, dtype) for p in PARAMS]
    assert temporaries(compiled_step(ours, params, params)) <= temporaries(compiled_step(theirs, params, params))


def test_a_window_of_one_costs_what_global_clip_costs(path, standard_promotion):
  tx = ogc.clipped_multi_steps(optax.adamw(1e-3), 1.0, loss_scale=ogc.DynamicLossScale())
  window, clip = compiled_step(tx), compiled_step(optax.chain(ogc.global_clip(1.0), optax.adamw(1e-3)))
  assert len(large_copies(window)) <= len(large_copies(clip))
  assert temporaries(window) < (LEAVES + 2) * LEAF_BYTES   # the gradients, and a leaf at work
  assert jax.tree.leaves(jax.eval_shape(tx.init, PARAMS).accumulators) == []


@pytest.mark.parametrize("call, options", [
    ("clip", dict(every_k=4)),
    ("norm", dict(every_k=1, loss_scale=ogc.DynamicLossScale())),
    ("clip", dict(every_k=4, loss_scale=ogc.DynamicLossScale(), on_nonfinite="zero")),
    ("clip", dict(every_k=lambda step: 2 + step, on_nonfinite="propagate")),
])
def test_one_native_call_yields_norm_check_and_factor(monkeypatch, call, options):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  compiled = compiled_step(ogc.clipped_multi_steps(optax.sgd(0.1, momentum=0.9), 1.0, **options))
  assert native_calls(compiled) == [call]
  assert "callback" not in compiled.as_text()


def test_many_leaves_are_measured_in_one_call(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  params = [jax.ShapeDtypeStruct((8,), np.float32)] * 260
  calls = native_calls(compiled_step(ogc.clipped_multi_steps(optax.sgd(0.1), 1.0, every_k=2), params, params))
  assert calls.count("norm") == 1 and set(calls) == {"norm", "scale"}


def test_norm_and_optimizer_are_inside_the_branch_that_boundaries_take(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  tx = ogc.clipped_multi_steps(optax.sgd(0.1, momentum=0.9), 1.0, every_k=4)
  text = compiled_step(tx, gradients=PARAMS).as_text()
  entry = text[text.index("\nENTRY "):]
  assert "custom_call_target" not in entry and entry.count(" while(") == 1
  assert "custom_call_target" in text and text.count(" while(") == 2


def test_only_raise_calls_the_host(path):
  params = [jax.ShapeDtypeStruct((8,), np.float32)]
  for policy in "skip", "zero", "propagate", "raise":
    tx = ogc.clipped_multi_steps(optax.sgd(0.1), 1.0, every_k=2, on_nonfinite=policy)
    assert ("callback" in compiled_step(tx, params, params).as_text()) == (policy == "raise")
