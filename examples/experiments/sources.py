"""Where spikes come from: the gradient's norm by cause, and in which leaf."""

import itertools
import math
import statistics

import numpy as np
import optax_globalclip as ogc
from corpus import PHASE_LENGTHS, Phase

from experiments import shared

SEED = 0
# The share of a source in one phase, and in the next.
JUMPS = {"mixture 0.1 to 0.6": (0.1, 0.6), "mixture 0 to 1": (0.0, 1.0)}
EMBEDDING, POSITION = "Embed_0", "position"


def jumping_phases(low: float, high: float, sources: int, seed: int):
  """Each source in turn goes from `low` to `high` of the mixture; the others share what is left."""
  rng, start = np.random.default_rng([seed, 3]), 0
  for turn in itertools.count():
    favourite, following = turn % sources, (turn + 1) % sources
    weights = np.full(sources, (1 - high - low) / max(1, sources - 2))
    weights[favourite], weights[following] = high, low
    length = int(rng.choice(PHASE_LENGTHS))
    yield Phase(start, length, weights / weights.sum())
    start += length


def suspects(before: dict, after: dict) -> dict:
  """The leaf with the largest share of the squared norm, and of those with a hundredth or more the one that grew most
  against its usual norm."""
  share = {path: norm for path, norm in after.items() if math.isfinite(norm)}
  total = math.fsum(norm**2 for norm in share.values()) or 1.0
  largest = max(share, key=share.get, default="")
  grown = {path: norm / before[path] for path, norm in share.items() if before[path] and norm**2 >= 0.01 * total}
  most = max(grown, key=grown.get, default="")
  return {
    "largest_leaf": largest,
    "its_share": share.get(largest, 0.0) ** 2 / total,
    "most_grown_leaf": most,
    "its_growth": grown.get(most, math.nan),
  }


def usual(records: list[dict]) -> dict:
  return {path: statistics.median(r["leaves"][path] for r in records) for path in records[0]["leaves"]}


def measure_jumps(lab: shared.Lab, steps: int, ignored: int):
  """A clipped run under each kind of jump; the state after the first, and what its boundaries did."""
  found, first = {}, None
  for name, (low, high) in JUMPS.items():
    schedule = jumping_phases(low, high, len(lab.text.names), SEED)
    batches = lab.batches(SEED, steps, schedule=schedule)
    tx = shared.clipped_adamw(shared.warmed_up(lab.size.learning_rate, steps // 10))
    state, records = shared.train(lab.state(tx, SEED), batches, steps)
    ratios = shared.ratios([r["norm"] for r in records])
    starts = [p.start for p in batches.phases if p.start >= ignored]
    others = [r for i, r in enumerate(ratios) if i >= ignored and i not in starts]
    worst = max(starts, key=lambda i: ratios[i])
    found[name] = {
      "boundaries": len(starts),
      "ratios": [ratios[i] for i in starts],
      "largest_of_other_steps": max(others),
      "other_steps": len(others),
      "worst_step": worst + 1,
      "norm_there": records[worst]["norm"],
      "clipped_steps_after_ignored": sum(r["factor"] < 1 for r in records[ignored:]),
      "norms": [r["norm"] for r in records],
    } | suspects(usual(records[max(0, worst - 50) : worst]), records[worst]["leaves"])
    first = first or (state, records)
  return found, *first


class Probe:
  """Measures gradients at fixed parameters against those of ordinary batches."""

  def __init__(self, lab: shared.Lab, state, count: int):
    self.lab, self.state = lab, state
    self.batches = [lab.batches(SEED + 1, count).batch(step).tokens for step in range(count)]
    measured = [self._measure(tokens) for tokens in self.batches]
    self.norm = statistics.median(norm for norm, _ in measured)
    self.leaves = usual([{"leaves": leaves} for _, leaves in measured])
    self.ordinary = [norm / self.norm for norm, _ in measured]

  def _measure(self, tokens, params=None, apply_fn=None, scale=1.0):
    params = self.state.params if params is None else params
    _, gradient = shared.loss_and_gradient(apply_fn or self.state.apply_fn, params, tokens, scale)
    self.gradient = gradient
    report = ogc.leaf_report(gradient)
    return float(ogc.global_norm(gradient)) / scale, {row.path: row.norm / scale for row in report.rows}

  def disturbed(self, change) -> dict:
    """The ratios over all batches where `change(tokens, rng)` has changed them."""
    rng = np.random.default_rng(SEED)
    measured = [self._measure(change(tokens.copy(), rng)) for tokens in self.batches]
    _, leaves = max(measured, key=lambda m: m[0])
    return {"ratios": [norm / self.norm for norm, _ in measured]} | suspects(self.leaves, leaves)

  def changed(self, **options) -> dict:
    """The ratio on the first batch, with other parameters, another computation or another scale."""
    norm, leaves = self._measure(self.batches[0], **options)
    elements = shared.flat(self.gradient)
    bad = [row.path for row in ogc.leaf_report(self.gradient).rows if row.nonfinite]
    return {"ratios": [norm / self.norm], "nonfinite_share": float((~np.isfinite(elements)).mean()),
            "nonfinite_leaves": len(bad), "of_leaves": len(leaves), "zero_share": float((elements == 0).mean())} | suspects(self.leaves, leaves)


def measure_outliers(lab: shared.Lab, probe: Probe) -> dict:
  counts = np.bincount(np.concatenate(lab.text.train), minlength=lab.size.vocabulary)
  rare = np.argsort(counts)[:16]
  length = lab.size.length + 1

  def rows(number, make):
    def change(tokens, rng):
      tokens[:number] = [make(rng) for _ in range(number)]
      return tokens
    return change

  every = len(probe.batches[0])
  changes = {
    "one row of rare tokens": rows(1, lambda rng: rng.choice(rare, length)),
    "one row of one rare token": rows(1, lambda rng: np.full(length, rng.choice(rare))),
    "one row of random tokens": rows(1, lambda rng: rng.integers(lab.size.vocabulary, size=length)),
    "a batch of rare tokens": rows(every, lambda rng: rng.choice(rare, length)),
  }
  return {name: probe.disturbed(change) for name, change in changes.items()}


def flattened(params, alpha: float):
  """Inputs `alpha` times as large, so that the first layer norm divides by so much less; the output undoes it."""
  changed = dict(params)
  changed[EMBEDDING] = {"embedding": alpha * params[EMBEDDING]["embedding"]}
  changed[POSITION] = alpha * params[POSITION]
  changed["LayerNorm_0"] = {name: leaf / alpha for name, leaf in params["LayerNorm_0"].items()}
  return changed


def measure_edges(lab: shared.Lab, probe: Probe) -> dict:
  half = lab.state(shared.clipped_adamw(1.0), SEED, "float16").apply_fn
  found = {}
  for power in lab.choose((0, 20), (0, 4, 8, 12, 16, 20, 24)):
    found[f"float16, loss scale 2^{power}"] = probe.changed(apply_fn=half, scale=2.0**power)
  for alpha in lab.choose((1e-2,), (1e-1, 1e-2, 1e-3, 1e-4)):
    found[f"layer norm's input x {alpha:g}"] = probe.changed(params=flattened(probe.state.params, alpha))
  return found


def measure_rates(lab: shared.Lab, state, records: list[dict], steps: int, first: int) -> dict:
  """From the trained state on, at a higher rate and with no clip."""
  median, found = statistics.median(r["norm"] for r in records[-50:]), {}
  batches = lab.batches(SEED, first + steps)
  for times in lab.choose((30,), (1, 10, 30, 100)):
    tx = shared.clipped_adamw(times * lab.size.learning_rate, math.inf)
    fresh = lab.state(tx, SEED)
    fresh = fresh.replace(params=shared.copied(state.params))
    _, went = shared.train(fresh, batches, steps, first=first)
    worst = max(went, key=lambda r: r["norm"])
    found[f"rate x {times}"] = {
      "ratios": [r["norm"] / median for r in went], "first_loss": went[0]["loss"], "last_loss": went[-1]["loss"],
      "largest_loss": max(r["loss"] for r in went), "worst_step": worst["step"] - first + 1,
    } | suspects(usual(records[-50:]), worst["leaves"])
  return found


def run(lab: shared.Lab) -> dict:
  large = lab.name == "12m"
  steps, ignored = (300, 60) if large else lab.choose((40, 15), (600, 100))
  jumps, state, records = measure_jumps(lab, steps, ignored)
  probe = Probe(lab, state, lab.choose(4, 10 if large else 30))
  causes = {"ordinary batch": {"ratios": probe.ordinary}} | jumps
  causes |= measure_outliers(lab, probe) | measure_edges(lab, probe)
  if not large:
    causes |= measure_rates(lab, state, records, lab.choose(10, 100), steps)
  for name, cause in causes.items():
    print(f"  {name:28} largest ratio {max(cause['ratios']):.4g}  {cause.get('most_grown_leaf', '')}", flush=True)
  return {"seed": SEED, "steps": steps, "ignored_steps": ignored, "learning_rate": lab.size.learning_rate,
          "max_norm": 1.0, "median_norm": probe.norm, "causes": causes}


def draw(result: dict):
  """A row for each cause: every ratio to the median as a dot."""
  causes = result["causes"]
  figure, axes = shared.figure(1, 1, (9, 0.3 * len(causes) + 1.5))
  end = max((r for c in causes.values() for r in map(float, c["ratios"]) if math.isfinite(r)), default=100)
  for place, cause in enumerate(causes.values()):
    ratios = np.array([float(r) for r in cause["ratios"]])
    finite = ratios[np.isfinite(ratios)]
    axes.plot(finite, np.full(len(finite), place), "o", color=shared.COLOURS[0], alpha=0.5, markersize=4)
    if len(finite) < len(ratios):
      axes.plot([max(200, 2 * end)], [place], "x", color=shared.COLOURS[5])
      axes.annotate("not finite", (max(200, 2 * end), place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
  axes.axvspan(10, 100, color="0.93", zorder=0)
  axes.text(31.6, -1, "10 to 100 ×", ha="center", va="center", fontsize=8)
  axes.set_xscale("log")
  axes.set_yticks(range(len(causes)), causes)
  axes.set_ylim(len(causes) - 0.5, -1.6)
  axes.set_xlabel("gradient norm over the median of ordinary steps")
  axes.set_title(f"{result['size']}: gradient norms by cause", fontsize=10)
  return figure
