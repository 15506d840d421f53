"""Trains what train_flax.py trains, sharded over several processes and their devices.

    python examples/train_fsdp.py                             # two processes of two CPU devices each
    python examples/train_fsdp.py --processes 1 --devices 4   # the same training, to the last digits

Parameters, AdamW's moments and the batch are sharded (FSDP); the clip is not told and sends a few numbers. The one
command starts all processes. Step by step it writes `fsdp.jsonl` into `--out`, and now and then a checkpoint: killed
at any moment, the same command goes on from the last one to the same values.

On a cluster start it on every host instead, with `--coordinator HOST:PORT` and the host's own `--process-id`.
"""

import argparse
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import time

import corpus
import jax
import optax_globalclip as ogc
import orbax.checkpoint as ocp
import report
import train_flax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from model import SIZES, row_losses
from train_flax import positive

SHARDED_ELEMENTS = 4096  # of a leaf, at least


def parse_args(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  add = parser.add_argument
  add("--processes", type=positive(int), default=2, help="default: 2")
  add("--devices", type=positive(int), default=2, help="CPU devices of each process started here; default: 2")
  train_flax.add_options(parser)
  add("--steps", type=positive(int), default=100, help="default: 100")
  add("--save-every", type=positive(int), default=20, metavar="STEPS", help="default: 20")
  add("--out", type=pathlib.Path, default=pathlib.Path("runs/train_fsdp"), metavar="FOLDER",
      help="default: runs/train_fsdp")
  add("--coordinator", metavar="HOST:PORT", help="of process 0; without it all processes are started here")
  add("--process-id", type=int, metavar="ID", help="of this process, from 0")
  args = parser.parse_args(argv)
  train_flax.check_options(parser, args)
  if (args.coordinator is None) != (args.process_id is None):
    parser.error("--coordinator and --process-id go together")
  args.out = args.out.absolute()
  return args


def launch(args: argparse.Namespace, argv: list[str]) -> int:
  """Starts every process on this machine and waits for them; where one fails, the others are ended."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    coordinator = f"localhost:{probe.getsockname()[1]}"
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(args.devices)}
  command = [sys.executable, __file__, *argv, "--coordinator", coordinator, "--process-id"]
  processes = [subprocess.Popen([*command, str(i)], env=environment) for i in range(args.processes)]
  try:
    while any(process.poll() is None for process in processes):
      failed = [process.returncode for process in processes if process.returncode]
      if failed:
        return failed[0]
      time.sleep(0.1)
    return max(process.returncode for process in processes)
  except KeyboardInterrupt:
    return 130
  finally:
    for process in processes:
      process.terminate()
      process.wait()


def shard_longest(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
  """Over the longest dimension that the devices divide evenly; replicated where there is none, or little in all.

  So what the clip recorded is whole on every process, and the first one writes it.
  """
  even = [d for d, size in enumerate(shape) if size % mesh.size == 0 and math.prod(shape) >= SHARDED_ELEMENTS]
  longest = max(even, key=lambda d: shape[d], default=None)
  return NamedSharding(mesh, P(*("fsdp" if d == longest else None for d in range(len(shape)))))


def create_sharded_state(args: argparse.Namespace, mesh: Mesh):
  """train_flax.py's state and its shardings; no device ever holds the whole."""

  def create():
    return train_flax.create_state(
      SIZES[args.size], max_norm=args.max_norm, learning_rate=args.learning_rate, steps=args.steps, seed=args.seed
    )

  abstract, treedef = jax.tree.flatten(jax.eval_shape(create))
  shardings = [shard_longest(mesh, leaf.shape) for leaf in abstract]
  leaves = jax.jit(lambda: jax.tree.leaves(create()), out_shardings=shardings)()
  return treedef.unflatten(leaves), treedef.unflatten(shardings)


def train_step(state, tokens: jax.Array):
  """The next state and the mean loss before it: as on one device, without a word of meshes."""
  loss, grads = jax.value_and_grad(lambda params: row_losses(state.apply_fn, params, tokens).mean())(state.params)
  state = state.apply_gradients(grads=grads)
  return state, loss


def saved(state) -> dict:
  """What of a state a checkpoint holds."""
  return {"step": state.step, "params": state.params, "opt_state": state.opt_state}


def train(args: argparse.Namespace) -> None:
  size = SIZES[args.size]
  text = train_flax.load_corpus(args.source, size)
  batches = corpus.Batches(text, rows=args.batch_size, length=size.length, seed=args.seed, steps=args.steps)
  mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
  everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))

  state, shardings = create_sharded_state(args, mesh)
  step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, everywhere))
  options = ocp.CheckpointManagerOptions(save_interval_steps=args.save_every, max_to_keep=2)
  with ocp.CheckpointManager(args.out / "checkpoints", options=options) as manager:
    first = manager.latest_step() or 0
    if first:
      like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
      state = state.replace(**manager.restore(first, args=ocp.args.StandardRestore(saved(like))))
    leader = jax.process_index() == 0
    if leader:
      parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
      where = f"{jax.device_count()} devices of {jax.process_count()} processes"
      what = f"going on after step {first}" if first else "compiling"
      print(f"{args.size}: {parameters:,} parameters on {where}; {what}", flush=True)
    history = ogc.History(args.out / "fsdp.jsonl", max_norm=args.max_norm)
    for step in range(first, args.steps):
      # Every process cuts the same batch and uploads its own devices' rows.
      tokens = batches.batch(step).tokens
      state, loss = step_fn(state, jax.make_array_from_callback(tokens.shape, rows, tokens.__getitem__))
      record = history.write(state.opt_state, step=step + 1, loss=loss)
      if leader and (step == first or (step + 1) % max(1, args.steps // 20) == 0):
        print(f"{step + 1:>5}/{args.steps}  {report.live(record)}", flush=True)
      manager.save(step + 1, args=ocp.args.StandardSave(saved(state)), force=step + 1 == args.steps)


def check_same_run(args: argparse.Namespace) -> None:
  """Refuses to go on with a run of other settings."""
  settings = {name: str(getattr(args, name)) for name in
              ("size", "source", "steps", "batch_size", "max_norm", "learning_rate", "seed")}
  path = args.out / "settings.json"
  if path.exists() and (before := json.loads(path.read_text())) != settings:
    changed = ", ".join(f"{name} {before[name]}" for name in settings if before[name] != settings[name])
    sys.exit(f"{args.out} holds a run with {changed}: give it an --out of its own")
  args.out.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(settings))


def main(argv: list[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = parse_args(argv)
  if args.process_id in (None, 0):
    check_same_run(args)
  if args.process_id is None:
    if args.batch_size % (args.processes * args.devices):
      sys.exit(f"--batch-size {args.batch_size} does not divide over {args.processes} x {args.devices} devices")
    return launch(args, argv)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(args.coordinator, args.processes, args.process_id)
  train(args)
  return 0


if __name__ == "__main__":
  sys.exit(main())
