"""Do two processes with two devices each clip, skip, save and resume as one?"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import optax_globalclip as ogc
import oracle
import processes
import pytest

EXAMPLE = processes.ROOT / "examples" / "train_fsdp.py"
STEPS, SAVE_EVERY = 8, 3


# ----------------------------------------------------------------------------------------------------------------------
# The library by itself

WORKER = """
    import sys, json
    import jax, jax.numpy as jnp, numpy as np, optax
    import optax_globalclip as ogc
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    coordinator, process = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, process)
    out = {}

    def spread(mesh, value, spec):
      return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), value.__getitem__)

    values = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.full(3, 9, np.float32)}
    for kind in (AxisType.Auto, AxisType.Explicit):
      mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
      tree = {"w": spread(mesh, values["w"], P("x", "y")), "b": spread(mesh, values["b"], P())}
      with jax.set_mesh(mesh):
        clipped, norm = jax.jit(lambda t: ogc.clip_tree(t, 1.0))(tree)
      out[kind.name] = [float(shard.data).hex() for shard in norm.addressable_shards]
      out[kind.name + " b"] = np.asarray(clipped["b"]).tolist()
      out[kind.name + " w"] = {str(shard.index): np.asarray(shard.data).tolist()
                               for shard in clipped["w"].addressable_shards}

    # A NaN in the last row, which only process 1 holds.
    tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, loss_scale=ogc.DynamicLossScale(8.0))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    params = spread(mesh, np.ones(8, np.float32), P("x"))
    grads = spread(mesh, np.asarray([1] * 7 + [np.nan], np.float32), P("x"))
    updates, state = jax.jit(lambda g, p: tx.update(g, jax.jit(tx.init)(p), p))(grads, params)
    out["updates"] = [np.asarray(shard.data).tolist() for shard in updates.addressable_shards]
    out["loss_scale"] = [float(shard.data) for shard in ogc.current_loss_scale(state).addressable_shards]
    print("RESULT", json.dumps(out), flush=True)
"""


def run_workers():
  """What each of the two processes found."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    coordinator = f"localhost:{probe.getsockname()[1]}"
  workers = [processes.start(processes.python(WORKER, arguments=[coordinator, i]), JAX_PLATFORMS="cpu",
                             JAX_NUM_CPU_DEVICES="2") for i in range(2)]
  for worker in workers:
    stdout, stderr = worker.communicate(timeout=180)
    assert worker.returncode == 0, stderr
    yield json.loads(next(line for line in stdout.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))


def test_every_device_of_both_processes_has_the_same_norm_and_skips_the_same_step():
  results = list(run_workers())
  values = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.full(3, 9, np.float32)}
  want = oracle.clip(values, 1.0)
  for kind in ("Auto", "Explicit"):
    norms = {norm for result in results for norm in result[kind]}
    assert len(norms) == 1
    assert oracle.ulps(np.float32(float.fromhex(norms.pop())), oracle.norm(values)) <= 1
    for result in results:
      np.testing.assert_allclose(result[kind + " b"], want["b"].astype(np.float64), rtol=1e-6)
    got = np.concatenate([np.ravel(shard) for result in results for shard in result[kind + " w"].values()])
    np.testing.assert_allclose(np.sort(got), np.sort(want["w"].astype(np.float64).ravel()), rtol=1e-6)
  for result in results:
    assert np.ravel(result["updates"]).tolist() == [0.0] * 4
    assert result["loss_scale"] == [4.0, 4.0]


# ----------------------------------------------------------------------------------------------------------------------
# The example


def start(out, source, *options):
  command = [sys.executable, EXAMPLE, "--out", out, "--source", f"numbers={source}", "--steps", STEPS, "--save-every",
             SAVE_EVERY, "--batch-size", 8, *options]
  return processes.start(command, stderr=subprocess.STDOUT, new_session=True, JAX_PLATFORMS="cpu")


def finish(process):
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output
  return output


def records(out):
  path = out / "fsdp.jsonl"
  return ogc.History.read(path) if path.exists() else []


def kill_after(process, out, steps):
  """Ends launcher and processes at once, as a machine that goes down does."""
  while len(records(out)) < steps:
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.05)
  os.killpg(process.pid, signal.SIGKILL)
  process.communicate()
  return records(out)


def column(rows, name):
  return [row[name] for row in rows]


@pytest.mark.slow
def test_fsdp_killed_and_resumed_trains_as_one_process_does(tmp_path):
  rng = np.random.default_rng(0)
  source = tmp_path / "text"
  source.mkdir()
  (source / "numbers.txt").write_text("\n".join(" ".join(map(str, row)) for row in rng.integers(0, 1000, (400, 20))))
  finish(start(tmp_path / "one", source, "--processes", "1", "--devices", "1"))
  before = kill_after(start(tmp_path / "two", source), tmp_path / "two", SAVE_EVERY + 2)
  output = finish(start(tmp_path / "two", source))
  one, two = records(tmp_path / "one"), records(tmp_path / "two")

  assert f"going on after step {SAVE_EVERY}" in output
  assert column(two, "step") == list(range(1, STEPS + 1))
  for name in ("loss", "global_norm", "clip_factor"):
    np.testing.assert_allclose(column(two, name), column(one, name), rtol=1e-5, err_msg=name)
  assert min(column(one, "clip_factor")) < 1
  # The steps after the checkpoint were taken twice, to the same bits.
  assert len(before) > SAVE_EVERY and two[:len(before)] == before
