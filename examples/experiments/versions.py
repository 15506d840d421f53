"""Version 1 against version 2: no clip, no decay, no warm-up; all three; and all but one of them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments import shared

PARTS = ("clip", "decay", "warmup")
VERSIONS = {"version 1": (), "version 2": PARTS} | {
  f"without {part}": tuple(p for p in PARTS if p != part) for part in PARTS
}
RATES = (1, 10)  # times the size's own
TOKENS = 64  # drawn after each prompt


def optimizer(parts, rate: float, steps: int):
  schedule = shared.warmed_up(rate, max(2, steps // 10)) if "warmup" in parts else rate
  decay = 0.1 if "decay" in parts else 0.0  # AdamW without decay is Adam
  return shared.clipped_adamw(schedule, 1.0 if "clip" in parts else math.inf, weight_decay=decay)


@functools.partial(jax.jit, static_argnames=("apply_fn", "count"))
def sample(apply_fn, params, prompts, key, count):
  """`count` tokens drawn at temperature 1 after each prompt; prompts are [rows, n]."""
  rows, n = prompts.shape
  tokens = jnp.concatenate([prompts, jnp.zeros((rows, count), prompts.dtype)], 1)

  def draw(i, tokens):
    logits = apply_fn({"params": params}, tokens)[:, i - 1]
    return tokens.at[:, i].set(jax.random.categorical(jax.random.fold_in(key, i), logits).astype(tokens.dtype))

  return jax.lax.fori_loop(n, n + count, draw, tokens)[:, n:]


def largest_share(tokens) -> float:
  """The share of each row's most frequent token, averaged over rows."""
  return float(np.mean([np.bincount(row).max() / len(row) for row in np.asarray(tokens)]))


def run(lab: shared.Lab) -> dict:
  steps, seeds = lab.choose(25, 150), lab.choose((0,), (0, 1, 2))
  rates = lab.choose((10,), RATES)
  count = lab.choose(8, TOKENS)
  held_out = lab.batches(0, 1).held_out(4).tokens
  prompts = jnp.asarray(held_out[:, : lab.size.length - count])
  runs = []
  for times in rates:
    for version, parts in VERSIONS.items():
      tx = optimizer(parts, times * lab.size.learning_rate, steps)
      for seed in seeds:
        batches = lab.batches(seed, steps)
        state, records = shared.train(lab.state(tx, seed), batches, steps)
        norms = [r["norm"] for r in records]
        drawn = sample(state.apply_fn, state.params, prompts, jax.random.key(seed), count)
        runs.append({
          "version": version,
          "rate_times": times,
          "seed": seed,
          "held_out": shared.held_out_loss(state, batches),
          "worst_loss_after_half": max(r["loss"] for r in records[steps // 2 :]),
          "largest_norm": max(norms),
          "clipped_steps": sum(r["factor"] < 1 for r in records),
          "top_token_share": largest_share(drawn),
          "norms": norms,
          "losses": [r["loss"] for r in records],
        })
        print(f"  {version} x{times} seed {seed}: held out {runs[-1]['held_out']:.3f}, "
              f"top token {runs[-1]['top_token_share']:.3f}", flush=True)
  real = largest_share(held_out[:, -count:])
  return {"steps": steps, "seeds": seeds, "learning_rate": lab.size.learning_rate, "weight_decay": 0.1, "max_norm": 1.0,
          "warmup_steps": max(2, steps // 10), "uniform_loss": math.log(lab.size.vocabulary),
          "top_token_share_of_text": real, "runs": runs}


def draw(result: dict):
  """Held-out loss and repetition of every run, at each rate."""
  figure, axes = shared.figure(1, 2, (10, 4))
  rates = sorted({r["rate_times"] for r in result["runs"]})
  for panel, field, label in ((axes[0], "held_out", "held-out loss (nats a token)"),
                              (axes[1], "top_token_share", "share of the commonest token in samples")):
    for times, colour in zip(rates, shared.COLOURS):
      chosen = [r for r in result["runs"] if r["rate_times"] == times]
      places = [list(VERSIONS).index(r["version"]) + 0.25 * rates.index(times) for r in chosen]
      panel.plot(places, [float(r[field]) for r in chosen], "o", color=colour, alpha=0.7,
                 label=f"{times * result['learning_rate']:g} as the rate")
    panel.set_xticks(range(len(VERSIONS)), VERSIONS, rotation=20, ha="right")
    panel.set_title(label, fontsize=10)
  axes[0].axhline(result["uniform_loss"], color="0.6", linestyle=":", label="every token alike")
  axes[1].axhline(result["top_token_share_of_text"], color="0.6", linestyle="--", label="of the text itself")
  for panel in axes:
    panel.legend(fontsize=8)
  return figure
