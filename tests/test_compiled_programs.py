"""What is in a compiled program, and where it may be kept: which calls, no transfers, in the cache, exported."""

import jax
import jax.numpy as jnp
import numpy as np
import optax_globalclip as ogc
import processes
import pytest
from programs import targets
from seven import NORM, TREE, clip, expect

pytestmark = pytest.mark.reference_repeats


@pytest.mark.parametrize("options", [{}, {"monitor": True}, {"on_nonfinite": "zero"}, {"loss_scale": 2.0}], ids=str)
def test_no_step_moves_anything_to_or_from_the_host(options, path):
  tx = ogc.global_clip(1.0, **options)
  step = jax.jit(tx.update)
  tree, state = jax.device_put(TREE), tx.init(TREE)
  compiled = step.lower(tree, state).compile()
  with jax.transfer_guard("disallow"):
    for _ in range(2):
      updates, state = compiled(tree, state)
  jax.block_until_ready(updates)
  assert "callback" not in compiled.as_text()


def test_clip_tree_and_norms_move_nothing_either(path):
  tree = jax.device_put(TREE)
  for f in (lambda t: ogc.clip_tree(t, 1.0), ogc.global_norm, ogc.leaf_norms):
    compiled = jax.jit(f).lower(tree).compile()
    with jax.transfer_guard("disallow"):
      jax.block_until_ready(compiled(tree))
    assert "callback" not in compiled.as_text()


def test_148_leaves_are_one_native_call(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  tree = [np.ones(8, np.float32)] * 148
  for function, target in ((clip, "clip"), (lambda t: clip(t, scale_stage="auto"), "norm"), (ogc.global_norm, "norm")):
    found = targets(jax.jit(lambda t: function(t)).lower(tree).as_text())
    assert found == {f"optax_globalclip_{target}_cpu_v2": 1}


def test_the_reference_path_makes_no_native_call(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "reference")
  tree = [np.ones(8, np.float32)] * 4
  assert targets(jax.jit(lambda t: clip(t)).lower(tree).as_text()) == {}


PRELUDE = "import json, pathlib, jax, jax.numpy as jnp, numpy as np, optax, optax_globalclip as ogc"


def elsewhere(code, backend):
  return processes.answer(processes.python(PRELUDE, code), timeout=120, OPTAX_GLOBALCLIP_BACKEND=backend)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_second_process_finds_the_program_in_the_persistent_cache(backend, tmp_path):
  code = f"""
      jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
      jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
      jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
      events = []
      jax.monitoring.register_event_listener(lambda name, **kwargs: events.append(name))
      tx = ogc.global_clip(1.0)
      updates, _ = jax.jit(tx.update)([jnp.array([3.0, 4.0])], optax.EmptyState())
      print(json.dumps(dict(
          hits=events.count("/jax/compilation_cache/cache_hits"),
          misses=events.count("/jax/compilation_cache/cache_misses"),
          updates=np.asarray(updates[0]).tolist())))
  """
  first, second = elsewhere(code, backend), elsewhere(code, backend)
  assert first["misses"] > 0
  assert second["misses"] == 0 and second["hits"] >= first["misses"]
  np.testing.assert_allclose(first["updates"], [0.6, 0.8], rtol=1e-6)
  assert second["updates"] == first["updates"]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_an_exported_program_runs_in_another_process(backend, monkeypatch, tmp_path):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", backend)
  checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ogc.custom_call_targets()]
  exported = jax.export.export(jax.jit(lambda tree: ogc.clip_tree(tree, 1.0)),
                               disabled_checks=checks if backend == "native" else ())(TREE)
  updates, norm = exported.call(TREE)
  expect(updates)
  assert norm == NORM
  pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
  (tmp_path / "clip").write_bytes(exported.serialize())
  norm = elsewhere(f"""
      ogc.custom_call_targets()
      exported = jax.export.deserialize(bytearray(pathlib.Path({str(tmp_path / "clip")!r}).read_bytes()))
      _, norm = exported.call({{"a": np.array([3, 4], np.float32), "b": np.full((2, 3), 2, np.float32)}})
      print(json.dumps(float(norm)))
  """, backend)
  assert norm == NORM


def test_without_disabled_checks_export_names_the_custom_call(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  with pytest.raises(ValueError, match="optax_globalclip_clip_cpu_v2"):
    jax.export.export(jax.jit(lambda t: clip(t)))(TREE)


def test_a_program_lowered_for_other_platforms_takes_the_reference_there(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "auto")
  traced = jax.jit(lambda tree: clip(tree)).trace(TREE)
  assert targets(traced.lower(lowering_platforms=("tpu",)).as_text()) == {}
  assert targets(traced.lower(lowering_platforms=("cpu",)).as_text()) == {"optax_globalclip_clip_cpu_v2": 1}


def test_an_abstract_evaluation_computes_nothing_and_knows_the_types(path):
  shapes = jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape, jnp.bfloat16), TREE)
  out = jax.eval_shape(lambda t: ogc.clip_tree(t, 1.0), shapes)
  assert out[1].dtype == jnp.float32 and out[1].shape == ()
  assert {leaf.dtype for leaf in jax.tree.leaves(out[0])} == {jnp.dtype("bfloat16")}
