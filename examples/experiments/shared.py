"""What the experiments share: the text, a model on it, a loop that records norms, and how results are written."""

import functools
import json
import math
import re
import statistics
from typing import NamedTuple

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import train_flax
from flax.training import train_state
from matplotlib.figure import Figure
from model import SIZES, Size, Transformer, row_losses

QUICK = Size(512, 64, 2, 4, 64, 3e-3)
QUICK_CHARACTERS = 200_000  # of each source
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")


class Lab(NamedTuple):
  """What is trained, on what."""

  name: str
  size: Size
  text: corpus.Corpus
  rows: int  # sequences in a batch
  quick: bool

  def choose(self, quick, full):
    return quick if self.quick else full

  def batches(self, seed: int, steps: int, **options) -> corpus.Batches:
    return corpus.Batches(self.text, rows=self.rows, length=self.size.length, seed=seed, steps=steps, **options)

  def state(self, tx: optax.GradientTransformation, seed: int, dtype: str = "float32") -> train_state.TrainState:
    """A model with parameters from `seed`, to be trained by `tx`."""
    model = Transformer(self.size, dtype)
    tokens = jnp.zeros((1, self.size.length), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(seed), tokens)["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@functools.cache
def make_lab(name: str, quick: bool) -> Lab:
  size = QUICK if quick else SIZES[name]
  sources = corpus.installed_sources()
  if quick:
    sources = {key: list(corpus.first_characters(texts, QUICK_CHARACTERS)) for key, texts in sources.items()}
  text = corpus.tokenize(sources, size.vocabulary, size.length)
  return Lab("quick" if quick else name, size, text, rows=4 if name == "12m" else 8, quick=quick)


def warmed_up(rate: float, steps: int) -> optax.Schedule:
  """Linear over `steps` from rate / steps at the first step, then constant."""
  return optax.linear_schedule(rate / steps, rate, steps - 1)


def clipped_adamw(rate, max_norm: float = 1.0, **options) -> optax.GradientTransformation:
  """A clip that records leaves, then AdamW; an infinite threshold only records."""
  options = {"weight_decay": 0.1} | options
  return optax.chain(ogc.global_clip(max_norm, monitor=True), optax.adamw(rate, **options))


def copied(tree):
  """A copy that a donated call leaves alone."""
  return jax.tree.map(jnp.copy, tree)


def record(step: int, state, losses) -> dict:
  metrics = jax.device_get(ogc.clip_metrics(state.opt_state))
  return {
    "step": step,
    "loss": float(np.mean(losses)),
    "norm": float(metrics["global_norm"]),
    "factor": float(metrics["clip_factor"]),
    "leaves": {row.path: row.norm for row in ogc.leaf_report(state.opt_state).rows},
  }


def train(state, batches: corpus.Batches, steps: int, *, first: int = 0, micro_batches: int = 1):
  """The state after `steps` steps from `first` on, and a record of each."""
  records = []
  for step in range(first, first + steps):
    state, losses, _ = train_flax.train_step(state, batches.batch(step).tokens, micro_batches)
    records.append(record(step, state, losses))
  return state, records


@functools.partial(jax.jit, static_argnames="apply_fn")
def loss_and_gradient(apply_fn, params, tokens, scale=1.0):
  """The mean loss of a batch, and the gradient of `scale` times it."""
  loss, gradient = jax.value_and_grad(lambda p: scale * row_losses(apply_fn, p, tokens).mean())(params)
  return loss / scale, gradient


@functools.partial(jax.jit, donate_argnums=0)
def apply(state, gradient):
  return state.apply_gradients(grads=gradient)


def held_out_loss(state, batches: corpus.Batches) -> float:
  return float(train_flax.evaluate(state, batches.held_out(16).tokens).mean())


def ratios(norms, window: int = 50) -> list[float]:
  """Each norm over the median of up to `window` before it; NaN for the first."""
  return [norm / statistics.median(norms[max(0, i - window) : i]) if i else math.nan for i, norm in enumerate(norms)]


def flat(tree) -> np.ndarray:
  """All elements as one float64 vector."""
  return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])


def angle(a: np.ndarray, b: np.ndarray) -> float:
  """Between two vectors, in degrees."""
  a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
  return math.degrees(2 * math.asin(min(1.0, np.linalg.norm(a - b) / 2)))


def rounded(value, digits: int = 4):
  """`value` with floats of so many digits, and strings for what JSON has no word for."""
  if isinstance(value, dict):
    return {key: rounded(item, digits) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [rounded(item, digits) for item in value]
  if isinstance(value, (float, np.floating)):
    value = float(value)
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
  return value


def to_json(result: dict) -> str:
  text = json.dumps(rounded(result), indent=1, allow_nan=False) + "\n"
  # A list of numbers on one line.
  return re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found.group()), text)


def figure(rows: int, columns: int, size=(9, 4), **options):
  """A figure and its axes."""
  made = Figure(figsize=size, layout="constrained")
  return made, made.subplots(rows, columns, **options)
