"""Trains a small language model on real text with the global clip before AdamW.

    python examples/train_flax.py            # tiny, a few minutes on two cores
    python examples/train_flax.py --compare  # beside it, the same without clipping
    python examples/train_flax.py --size 12m --source mine=~/notes
    python examples/train_flax.py --dtype float16 --loss-scale dynamic --accumulate 4
    python examples/train_flax.py --clip-rule zclip --skip-spikes

The text comes in several kinds whose shares of the mixture jump every few steps, the
shift of data that makes gradients spike. It writes `clipped.jsonl` (a line a step),
`summary.json` and `training.png` into `--out`; Ctrl-C ends the run after the step in
hand and still leaves all three. `python -m optax_globalclip.plot runs/train_flax` draws
the norms of single leaves too.
"""

import argparse
import contextlib
import functools
import math
import pathlib
import signal
import sys
import time

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import report
import rich.console
import rich.progress
from flax.training import train_state
from model import SIZES, Size, Transformer, row_losses

STEPS, QUICK_STEPS = 600, 80
SPIKE_WINDOW = 64  # accepted steps that --skip-spikes compares with
RULES = {"zclip": ogc.zclip, "ema": ogc.ema_clip, "autoclip": ogc.autoclip}
EVALUATIONS = 20  # held-out evaluations a run, evenly spaced


def positive(kind):
  def parse(text):
    value = kind(text)
    if not (value > 0 and math.isfinite(value)):
      raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value

  parse.__name__ = kind.__name__  # argparse names it for text that is no number
  return parse


def name_and_path(text: str) -> tuple[str, pathlib.Path]:
  name, separator, path = text.partition("=")
  if not (name and separator and path):
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
  return name, pathlib.Path(path).expanduser()


def scale(text: str) -> float | ogc.DynamicLossScale:
  return ogc.DynamicLossScale() if text == "dynamic" else positive(float)(text)


def add_options(parser: argparse.ArgumentParser) -> None:
  """What to train and on what text: options of every training example."""
  add = parser.add_argument
  add("--size", choices=SIZES, default="tiny", help="default: tiny")
  add(
    "--source",
    type=name_and_path,
    action="extend",
    nargs="+",
    metavar="NAME=PATH",
    help="train on these files or folders instead of the installed Python's text",
  )
  add("--batch-size", type=positive(int), default=16, metavar="ROWS", help="sequences a step; default: 16")
  add("--max-norm", type=positive(float), default=1.0, help="default: 1.0")
  add("--learning-rate", type=positive(float), help="peak after warm-up; default: the size's own")
  add("--seed", type=int, default=0, help="of parameters and data; default: 0")


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
  """Refuses what no example takes, and fills in what depends on the size."""
  if args.seed < 0:
    parser.error("argument --seed: must not be negative")
  args.learning_rate = args.learning_rate or SIZES[args.size].learning_rate


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  add_options(parser)
  add = parser.add_argument
  add("--steps", type=positive(int), help=f"default: {STEPS}, or {QUICK_STEPS} with --quick")
  add(
    "--accumulate",
    type=positive(int),
    default=1,
    metavar="N",
    help="split each step's sequences into N micro-batches, clipped and applied together; default: 1",
  )
  add(
    "--loss-scale",
    type=scale,
    metavar="dynamic|N",
    help="differentiate N times the loss, or a scale that follows overflows; default: the loss itself",
  )
  add(
    "--dtype",
    choices=("float32", "bfloat16", "float16"),
    default="float32",
    help="what the model computes in; parameters stay float32; default: float32",
  )
  add("--fused", action="store_true", help="clip, step and apply the update in one pass; the same training, faster")
  parser.set_defaults(max_norm=None)
  add(
    "--clip-rule",
    choices=("constant", *RULES),
    default="constant",
    help="a threshold that follows the norms, below --max-norm where that is given; default: --max-norm itself",
  )
  add(
    "--skip-spikes",
    type=positive(float),
    nargs="?",
    const=6.0,
    metavar="DEVIATIONS",
    help=f"skip a step whose norm is this far above the last {SPIKE_WINDOW} accepted ones; 6 standard deviations if no "
    "number is given; default: skip none",
  )
  add("--compare", action="store_true", help="train the same data order without clipping beside it")
  add("--quick", action="store_true", help="a short tiny run: within a minute on two cores")
  add(
    "--out",
    type=pathlib.Path,
    default=pathlib.Path("runs/train_flax"),
    metavar="FOLDER",
    help="default: runs/train_flax",
  )
  return parser


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, corpus.Corpus]:
  """The options and the text they name; anything wrong ends with exit code 2."""
  parser = make_parser()
  args = parser.parse_args(argv)
  check_options(parser, args)
  if args.quick and args.size != "tiny":
    parser.error(f"--quick is for the tiny size, not {args.size}")
  if args.batch_size % args.accumulate:
    parser.error(f"--accumulate: {args.accumulate} does not divide the {args.batch_size} sequences of --batch-size")
  names = [name for name, _ in args.source or ()]
  if len(set(names)) < len(names):
    parser.error("argument --source: two sources have one name")
  if args.clip_rule == "constant":
    args.max_norm = args.max_norm or 1.0
  args.steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
  try:
    args.out.mkdir(parents=True, exist_ok=True)
    text = load_corpus(args.source, SIZES[args.size])
  except (corpus.CorpusError, OSError) as error:
    parser.error(str(error))
  return args, text


def load_corpus(source: list[tuple[str, pathlib.Path]] | None, size: Size) -> corpus.Corpus:
  if source:
    documents = {name: corpus.read_source(name, path) for name, path in source}
  else:
    documents = corpus.installed_sources()
  return corpus.tokenize(documents, size.vocabulary, size.length)


def threshold(args: argparse.Namespace) -> float | ogc.ThresholdRule:
  if args.clip_rule == "constant":
    return args.max_norm
  return RULES[args.clip_rule](maximum=args.max_norm or math.inf)


def spike_rule(deviations: float | None) -> ogc.SpikeRule | None:
  return ogc.SpikeRule(window=SPIKE_WINDOW, deviations=deviations) if deviations else None


class FusedTrainState(train_state.TrainState):
  """A `TrainState` whose optimizer clips, steps and applies the update in one pass."""

  def apply_gradients(self, *, grads, **kwargs):
    params, opt_state = self.tx.step(grads, self.opt_state, self.params)
    return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)


def create_optimizer(
  schedule, *, max_norm, accumulate: int = 1, loss_scale=None, skip_spikes=None, fused: bool = False
):
  """AdamW behind the clip: one transformation before it or, where it needs more than a clip, one around it.

  With `fused` it has a `step` that does what the same without has for `update`.
  """
  if accumulate == 1 and loss_scale is None and skip_spikes is None:
    if fused:
      return ogc.clipped_adamw(schedule, max_norm, monitor=True)
    return optax.chain(ogc.global_clip(max_norm, monitor=True), optax.adamw(schedule))
  return ogc.clipped_multi_steps(
    ogc.clipped_adamw(schedule, math.inf) if fused else optax.adamw(schedule), max_norm, every_k=accumulate, loss_scale=loss_scale, monitor=True,
    skip_spikes=skip_spikes,
  )


def create_state(
  size: Size, *, learning_rate: float, steps: int, seed: int, dtype: str = "float32", fused: bool = False, **options
) -> train_state.TrainState:
  """Parameters from `seed`; AdamW with warm-up and cosine decay, behind the clip of `create_optimizer(**options)`."""
  warmup = max(1, steps // 10)
  schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, max(steps, warmup + 1), 0.1 * learning_rate)
  model = Transformer(size, dtype)
  tx = create_optimizer(schedule, fused=fused, **options)
  kind = FusedTrainState if fused else train_state.TrainState

  @jax.jit
  def init(key):
    tokens = jnp.zeros((1, size.length), jnp.int32)
    params = model.init(key, tokens)["params"]
    return kind.create(apply_fn=model.apply, params=params, tx=tx)

  return init(jax.random.key(seed))


@functools.partial(jax.jit, donate_argnames="state", static_argnames="micro_batches")
def train_step(state: train_state.TrainState, tokens: jax.Array, micro_batches: int = 1):
  """The next state, each row's loss (before the step) and the clip's metrics."""

  def micro_step(state, tokens):
    scaled = isinstance(state.opt_state, ogc.ClippedMultiStepsState)
    factor = ogc.current_loss_scale(state.opt_state) if scaled else 1.0

    def mean_loss(params):
      losses = row_losses(state.apply_fn, params, tokens)
      return factor * losses.mean(), losses

    grads, losses = jax.grad(mean_loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), losses

  if micro_batches == 1:
    state, losses = micro_step(state, tokens)
  else:
    state, losses = jax.lax.scan(micro_step, state, tokens.reshape(micro_batches, -1, tokens.shape[-1]))
  return state, losses.reshape(-1), ogc.clip_metrics(state.opt_state)


@jax.jit
def evaluate(state: train_state.TrainState, tokens: jax.Array) -> jax.Array:
  return row_losses(state.apply_fn, state.params, tokens)


class StopAfterStep:
  """Within it the first Ctrl-C only sets `asked`; a second one interrupts at once."""

  asked = False

  def __enter__(self):
    self._previous = signal.signal(signal.SIGINT, self._ask)
    return self

  def __exit__(self, *exception):
    signal.signal(signal.SIGINT, self._previous)

  def _ask(self, signal_number, frame):
    self.asked = True
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("finishing this step; Ctrl-C again stops at once", file=sys.stderr)


def by_source(names: tuple[str, ...], source: np.ndarray, losses: jax.Array) -> dict:
  """The mean loss of each source's rows; a source without rows is left out."""
  losses = np.asarray(losses)
  return {name: float(losses[source == s].mean()) for s, name in enumerate(names) if (source == s).any()}


def train(
  states: dict[str, train_state.TrainState],
  batches: corpus.Batches,
  steps: int,
  histories: dict[str, ogc.History],
  console: rich.console.Console,
  stop: StopAfterStep,
  accumulate: int = 1,
) -> list[dict]:
  """Trains every state on the same batches, step by step, each in `accumulate` micro-batches.

  Returns:
    The records, one for each state and step, as they were written to its history.
  """
  names, held_out = batches.names, batches.held_out()
  evaluate_every = max(1, steps // EVALUATIONS)
  records = []
  progress = rich.progress.Progress(
    rich.progress.TextColumn("{task.description:9}"),
    rich.progress.BarColumn(bar_width=20),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TextColumn("{task.fields[live]}"),
    rich.progress.TimeRemainingColumn(),
    console=console,
    disable=not console.is_terminal,
  )
  tasks = {run: progress.add_task(run, total=steps, live="") for run in states}
  with progress:
    for step in range(steps):
      batch, weights = batches.batch(step), batches.phase(step).weights
      made = {}
      for run, state in states.items():
        start = time.perf_counter()
        states[run], losses, _ = train_step(state, batch.tokens, accumulate)
        losses = jax.device_get(losses)
        made[run] = {
          "run": run,
          "seconds": time.perf_counter() - start,
          "loss": float(losses.mean()),
          "weights": dict(zip(names, weights.tolist(), strict=True)),
          "losses": by_source(names, batch.source, losses),
        }
      last = stop.asked or step + 1 == steps
      evaluated = last or step == 0 or (step + 1) % evaluate_every == 0
      for run, more in made.items():
        if evaluated:
          more["held_out"] = by_source(names, held_out.source, evaluate(states[run], held_out.tokens))
        record = histories[run].write(states[run].opt_state, step=step + 1, **more)
        if evaluated:
          progress.console.print(report.line(record, steps))
        records.append(record)
        progress.update(tasks[run], advance=1, live=report.live(record))
      if last:
        break
  return records


def first_state(args: argparse.Namespace, size, run: str, max_norm):
  """The state that the run of this name starts from."""
  return create_state(
    size, max_norm=max_norm, learning_rate=args.learning_rate, steps=args.steps, seed=args.seed, dtype=args.dtype,
    accumulate=args.accumulate, loss_scale=args.loss_scale, fused=args.fused,
    skip_spikes=spike_rule(args.skip_spikes) if run == "clipped" else None)


def main(argv: list[str] | None = None) -> int:
  console = rich.console.Console(highlight=False, soft_wrap=True)
  args, text = parse_args(argv)
  size = SIZES[args.size]
  thresholds = {"clipped": threshold(args)}
  if args.compare:
    # An infinite threshold never clips and still measures.
    thresholds["unclipped"] = math.inf
  states = {run: first_state(args, size, run, max_norm) for run, max_norm in thresholds.items()}
  batches = corpus.Batches(text, rows=args.batch_size, length=size.length, seed=args.seed, steps=args.steps)
  parameters = sum(p.size for p in jax.tree.leaves(states["clipped"].params))
  platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
  path = ogc.backend_info().get(platform, "reference").split(":")[0]
  console.print(
    f"{args.size}: {parameters:,} parameters, "
    f"{args.batch_size} x {size.length} tokens a step, computed in {args.dtype} "
    f"on {jax.devices()[0].device_kind}, clipped by the {path} path; text of {', '.join(text.names)}; compiling"
  )
  with StopAfterStep() as stop, contextlib.ExitStack() as files:
    histories = {}
    for run, max_norm in thresholds.items():
      file = args.out / f"{run}.jsonl"
      file.unlink(missing_ok=True)  # a run does not go on from an earlier one
      histories[run] = files.enter_context(ogc.History(file, max_norm=max_norm))
    records = train(states, batches, args.steps, histories, console, stop, args.accumulate)

  facts = {
    "size": args.size,
    "parameters": parameters,
    "device": jax.devices()[0].device_kind,
    "clip": path,
    "seed": args.seed,
    "learning_rate": args.learning_rate,
    "max_norm": args.max_norm,
    "clip_rule": args.clip_rule,
    "skip_spikes": args.skip_spikes,
    "dtype": args.dtype,
    "accumulate": args.accumulate,
    "steps_asked": args.steps,
    "tokens_a_step": args.batch_size * size.length,
  }
  summary = report.write(args.out, facts, batches.phases, records)
  report.show(console, args.out, summary)
  return 130 if summary["interrupted"] else 0


if __name__ == "__main__":
  sys.exit(main())
