"""A constant threshold, thresholds that follow the run, and skipped spikes: with planted spikes and without."""

import math
import statistics

import jax
import optax
import optax_globalclip as ogc

from experiments import shared

TIMES = 100.0  # what a planted spike multiplies the gradient by
B2 = 0.999


def optimizers(inner, warmup: int) -> dict:
  """Every rule before the same AdamW."""
  def clip(max_norm):
    return optax.chain(ogc.global_clip(max_norm, monitor=True), inner)

  spikes = ogc.SpikeRule(window=4 * warmup, deviations=6.0, warmup=warmup)
  return {
    "no clip": clip(math.inf),
    "constant 1": clip(1.0),
    "constant 0.1": clip(0.1),
    "ema_clip, factor 1.5": clip(ogc.ema_clip(factor=1.5, warmup=warmup)),
    "zclip": clip(ogc.zclip(warmup=warmup)),
    "constant 1, spikes skipped": ogc.clipped_multi_steps(inner, 1.0, skip_spikes=spikes, monitor=True),
  }


def follow(lab: shared.Lab, tx, spikes, steps: int, seed: int) -> dict:
  state, batches, records = lab.state(tx, seed), lab.batches(seed, steps), []
  for step in range(steps):
    loss, gradient = shared.loss_and_gradient(state.apply_fn, state.params, batches.batch(step).tokens)
    if step in spikes:
      gradient = jax.tree.map(lambda g: TIMES * g, gradient)
    state = shared.apply(state, gradient)
    metrics = jax.device_get(ogc.clip_metrics(state.opt_state))
    records.append({"loss": float(loss), "norm": float(metrics["global_norm"]), "factor": float(metrics["clip_factor"]),
                    "threshold": float(metrics.get("threshold", math.nan))})
  ordinary = [r for i, r in enumerate(records) if i not in spikes]
  return {
    "seed": seed,
    "held_out": shared.held_out_loss(state, batches),
    "worst_loss_after_first_spike": max(r["loss"] for r in records[min(spikes, default=steps // 3) + 1 :]),
    "ordinary_steps_clipped": sum(0 < r["factor"] < 1 for r in ordinary) / len(ordinary),
    "steps_skipped": int(metrics.get("spike_steps", 0)),
    # The norm that reached AdamW, over the median of ordinary steps.
    "spikes_passed_on": [records[i]["norm"] * records[i]["factor"] / statistics.median(r["norm"] for r in ordinary)
                         for i in spikes],
    "norms": [r["norm"] for r in records],
    "thresholds": [r["threshold"] for r in records],
  }


def run(lab: shared.Lab) -> dict:
  steps, warmup, seeds = lab.choose((16, 4, (0,)), (150, 25, (0, 1)))
  spikes = lab.choose((8, 12), (60, 80, 100, 120))
  rate = shared.warmed_up(lab.size.learning_rate, max(2, steps // 10))
  runs = {"none": {}, f"gradient x {TIMES:g}": {}}
  for planted, where in zip(runs, ((), spikes), strict=True):
    for name, tx in optimizers(optax.adamw(rate, b2=B2, weight_decay=0.1), warmup).items():
      if lab.quick and not where and name != "zclip":
        continue
      runs[planted][name] = [follow(lab, tx, where, steps, seed) for seed in seeds]
      print(f"  spikes: {planted}; {name:27} held out {[round(r['held_out'], 3) for r in runs[planted][name]]}, clipped "
            f"{runs[planted][name][0]['ordinary_steps_clipped']:.0%} of ordinary steps", flush=True)
  return {"steps": steps, "seeds": seeds, "b2": B2, "spike_steps": [s + 1 for s in spikes], "times": TIMES,
          "rule_warmup": warmup, "learning_rate": lab.size.learning_rate, "runs": runs}


def draw(result: dict):
  """Held-out losses with and without spikes; then norm and thresholds of one run with them."""
  figure, (losses, norms) = shared.figure(1, 2, (12, 4))
  names = list(list(result["runs"].values())[1])
  for (planted, found), colour, shift in zip(result["runs"].items(), shared.COLOURS, (-0.1, 0.1), strict=False):
    points = [(names.index(name) + shift, float(r["held_out"])) for name, runs in found.items() for r in runs]
    losses.plot(*zip(*points, strict=True), "o", color=colour, alpha=0.7, label=f"planted: {planted}")
  losses.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
  losses.set_ylabel("held-out loss (nats a token)")
  losses.legend(fontsize=8)
  spiked = list(result["runs"].values())[1]
  for name, colour in zip(names, shared.COLOURS, strict=False):
    first, steps = spiked[name][0], range(1, result["steps"] + 1)
    if name == "zclip":
      norms.plot(steps, [float(x) for x in first["norms"]], color="0.7", linewidth=1, label="norm (zclip's run)")
    thresholds = [float(x) for x in first["thresholds"]]
    if any(math.isfinite(x) for x in thresholds):
      norms.plot(steps, thresholds, color=colour, linewidth=1, label=f"threshold of {name}")
  norms.set_yscale("log")
  norms.set_xlabel("step")
  norms.legend(fontsize=8)
  return figure
