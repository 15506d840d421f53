"""Does a program compiled in one process run in another that has only imported the package? (Case 64.)"""

import json
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap

import jax
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
import sharded
from jax.experimental import serialize_executable
from sharded import AUTO, EXPLICIT, P, make_mesh

pytestmark = [pytest.mark.slow, pytest.mark.reference_repeats]

HERE = str(pathlib.Path(__file__).parent)
SPECS = {"w": P("x", "y"), "b": P()}
VALUES = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.full(3, 2, np.float32)}


def mesh_of(kind):
  return make_mesh(kind, shape=(2, 2))


def on_one_device(values):
  return jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), values)


def on_auto_mesh(values):
  return sharded.put(values, mesh_of(AUTO), SPECS)


def on_explicit_mesh(values):
  return sharded.put(values, mesh_of(EXPLICIT), SPECS)


PLACES = {"one device": (on_one_device, {}), "Auto mesh": (on_auto_mesh, {}), "Explicit mesh": (on_explicit_mesh, {}),
          "mesh and specs": (on_auto_mesh, lambda: dict(mesh=mesh_of(AUTO), specs=SPECS))}


def placed(place):
  """Gradients, and what a clip is told of where they lie."""
  put, placement = PLACES[place]
  return put(VALUES), placement() if callable(placement) else placement


def program(place, kind):
  """`tree -> clipped tree`: by one call that clips, by a norm and XLA's scaling, or at the end of a window."""
  _, placement = placed(place)
  if kind == "window":
    tx = ogc.clipped_multi_steps(optax.identity(), 1.0, **placement)
  else:
    tx = ogc.global_clip(1.0, scale_stage=kind, **placement)
  return lambda tree: tx.update(tree, tx.init(tree))[0]


def check(clipped):
  for name, want in oracle.clip(VALUES, 1.0).items():
    np.testing.assert_allclose(clipped[name], want.astype(np.float64), rtol=1e-6)


def run_python(code, *arguments, **variables):
  """What a process prints last, as JSON. It has the devices of this one unless `XLA_FLAGS` says otherwise."""
  done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), HERE, *map(str, arguments)], text=True,
                        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}, capture_output=True, timeout=180)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


# ----------------------------------------------------------------------------------------------------------------------
# Executables


# Nothing of the package is called here: to have imported it is enough.
LOAD = """
    import json, pathlib, pickle, sys
    import jax, numpy as np
    from jax.experimental import serialize_executable
    import optax_globalclip
    out = []
    for payload, in_tree, out_tree, axis_type, specs, values in pickle.loads(pathlib.Path(sys.argv[2]).read_bytes()):
      devices = jax.devices()[:4 if axis_type else 1]
      run = serialize_executable.deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)
      def put(name, x):
        if axis_type is None:
          return jax.device_put(x, devices[0])
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2, devices=devices)
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*specs[name])))
      clipped = run({name: put(name, x) for name, x in values.items()})
      out.append({name: np.asarray(leaf).tolist() for name, leaf in clipped.items()})
    print(json.dumps(out))
"""
AXIS_TYPES = {"one device": None, "Explicit mesh": EXPLICIT}


def serialized(place, kind):
  tree, _ = placed(place)
  compiled = jax.jit(program(place, kind)).lower(tree).compile()
  check(compiled(tree))
  specs = {name: tuple(spec) for name, spec in SPECS.items()}
  return *serialize_executable.serialize(compiled), AXIS_TYPES.get(place, AUTO), specs, VALUES


@pytest.mark.parametrize("place", PLACES)
def test_64_an_executable_runs_in_another_process_after_the_import_alone(path, place, tmp_path):
  kinds = ["kernel", "xla", "window"]
  file = tmp_path / "executables"
  file.write_bytes(pickle.dumps([serialized(place, kind) for kind in kinds]))
  # The setting is that of the program; the process that loads it has its own.
  for clipped in run_python(LOAD, file, OPTAX_GLOBALCLIP_BACKEND="auto"):
    check(clipped)


# ----------------------------------------------------------------------------------------------------------------------
# Exported programs


EXPORTED = """
    import json, pathlib, sys
    sys.path.insert(0, sys.argv[1])
    import jax, numpy as np
    import optax_globalclip
    import test_aot
    tree, _ = test_aot.placed(sys.argv[3])
    exported = jax.export.deserialize(bytearray(pathlib.Path(sys.argv[2]).read_bytes()))
    clipped = jax.jit(exported.call)(tree)
    print(json.dumps({name: np.asarray(leaf).tolist() for name, leaf in clipped.items()}))
"""


def export(place, kind="kernel"):
  tree, _ = placed(place)
  checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ogc.custom_call_targets()]
  return jax.export.export(jax.jit(program(place, kind)), disabled_checks=checks)(tree)


@pytest.mark.parametrize("place", PLACES)
def test_a_program_is_exported_wherever_its_leaves_lie(path, place):
  exported = export(place)
  assert exported.nr_devices == (1 if place == "one device" else 4)
  tree, _ = placed(place)
  check(jax.jit(exported.call)(tree))


@pytest.mark.parametrize("place", ["one device", "Auto mesh"])
def test_an_exported_program_runs_in_another_process_after_the_import_alone(path, place, tmp_path):
  pytest.importorskip("flatbuffers", reason="jax.export stores programs with flatbuffers, which is not installed")
  file = tmp_path / "exported"
  file.write_bytes(export(place).serialize())
  check(run_python(EXPORTED, file, place, OPTAX_GLOBALCLIP_BACKEND="auto"))


# ----------------------------------------------------------------------------------------------------------------------
# The persistent compilation cache


HITS = """
    import json, sys
    sys.path.insert(0, sys.argv[1])
    import jax, test_aot
    tree, _ = test_aot.placed(sys.argv[2])
    run = jax.jit(test_aot.program(sys.argv[2], sys.argv[3]))
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    clipped = run.lower(tree).compile()(tree)
    found = [events.count("/jax/compilation_cache/cache_" + kind) for kind in ("hits", "misses")]
    test_aot.check(clipped)
    print(json.dumps(found))
"""


@pytest.mark.parametrize("place", ["Auto mesh", "Explicit mesh"])
def test_a_second_process_finds_the_program_in_the_persistent_cache(path, place, tmp_path):
  variables = dict(JAX_COMPILATION_CACHE_DIR=str(tmp_path), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
                   JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1")
  assert run_python(HITS, place, "xla", **variables) == [0, 1]
  assert run_python(HITS, place, "xla", **variables) == [1, 0]


# ----------------------------------------------------------------------------------------------------------------------
# The import


IMPORT = """
    import json
    import optax_globalclip
    import jax
    jax.config.update("jax_num_cpu_devices", 3)   # an error once a backend has started
    print(json.dumps([len(jax.devices()), sorted(optax_globalclip.backend_info())]))
"""


def test_the_import_starts_no_backend():
  assert run_python(IMPORT, XLA_FLAGS="") == [3, ["cpu", "cuda", "other", "setting"]]
