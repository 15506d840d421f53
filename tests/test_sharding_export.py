"""With `mesh=` and `specs=`, is a program for several devices cached across processes, and can it be exported?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax_globalclip as ogc
import oracle
import processes
import pytest
from sharded import AUTO, EXPLICIT, P, make_mesh, put

SPECS = {"w": P("x", "y"), "b": P()}


def values():
  return {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.full(3, 2, np.float32)}


def export(mesh):
  tx = ogc.global_clip(1.0, mesh=mesh, specs=SPECS)
  checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ogc.custom_call_targets()]
  return jax.export.export(jax.jit(lambda t: tx.update(t, tx.init(t))[0]), disabled_checks=checks)(
      put(values(), mesh, SPECS))


def check(exported, mesh):
  with jax.set_mesh(mesh):
    clipped = jax.jit(exported.call)(put(values(), mesh, SPECS))
  for name, want in oracle.clip(values(), 1.0).items():
    np.testing.assert_allclose(clipped[name], want.astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_program_for_eight_devices_is_exported(kind, path):
  mesh = make_mesh(kind)
  exported = export(mesh)
  assert exported.nr_devices == 8
  assert ("optax_globalclip_norm_cpu" in exported.mlir_module()) == (path == "native")
  check(exported, mesh)


def test_an_exported_program_is_stored_and_loaded():
  pytest.importorskip("flatbuffers", reason="jax.export stores programs with flatbuffers, which is not installed")
  mesh = make_mesh(AUTO)
  check(jax.export.deserialize(export(mesh).serialize()), mesh)


def test_without_published_names_export_refuses_the_native_calls(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  with pytest.raises(ValueError, match="optax_globalclip_norm_cpu"):
    jax.export.export(jax.jit(ogc.global_norm))(jnp.ones(4))


def test_the_reference_path_is_exported_without_ado(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "reference")
  mesh = make_mesh(AUTO)
  tree = put(values(), mesh, SPECS)
  exported = jax.export.export(jax.jit(lambda t: ogc.global_norm(t, mesh=mesh, specs=SPECS)))(tree)
  assert oracle.ulps(jax.jit(exported.call)(tree), oracle.norm(values())) <= 1


HITS = """
    import json
    import jax, optax_globalclip as ogc, sharded
    from jax import monitoring
    from sharded import AUTO, P, make_mesh
    from test_sharding_export import SPECS, values
    hits = []
    monitoring.register_event_listener(lambda event, **_: hits.append(event))
    mesh = make_mesh(AUTO)
    tx = ogc.global_clip(1.0, mesh=mesh, specs=SPECS)
    tree = sharded.put(values(), mesh, SPECS)
    del hits[:]
    jax.jit(lambda t: tx.update(t, tx.init(t))[0]).lower(tree).compile()
    print(json.dumps([hits.count("/jax/compilation_cache/cache_" + kind) for kind in ("hits", "misses")]))
"""


def hits_and_misses(folder):
  return processes.answer(
      processes.python(HITS), timeout=120, XLA_FLAGS=processes.EIGHT_DEVICES, JAX_COMPILATION_CACHE_DIR=str(folder),
      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1")


def test_a_second_process_finds_the_program_in_the_persistent_cache(tmp_path):
  assert hits_and_misses(tmp_path) == [0, 1]
  assert hits_and_misses(tmp_path) == [1, 0]
