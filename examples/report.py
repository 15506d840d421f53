"""What a training run leaves behind: lines while it goes, a summary and a figure.

A record is one step of one run, as `optax_globalclip.History` wrote it: `step` (from 1),
what `clip_metrics` gives and the largest leaves; with it `run`, `seconds`, `loss` and
`losses` by source (nats a token, before the step), `weights` by source, and at some steps
`held_out`, the loss by source after the step. With a clip rule also
`threshold`, and where spikes are skipped `spike_steps` so far.
"""

import json
import math
import pathlib
import statistics
from collections.abc import Sequence

import matplotlib.figure
import rich.console
import rich.table
from corpus import Phase
from matplotlib import ticker

# Okabe and Ito's colours, told apart under every common colour blindness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
CLIPPED, UNCLIPPED, SKIPPED = "#000000", "#D55E00", "#CC79A7"


def to_json(value, **options) -> str:
  """JSON with null for NaN and infinity, which JSON has no word for."""

  def finite(value):
    if isinstance(value, dict):
      return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
      return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
      return None
    return value

  return json.dumps(finite(value), allow_nan=False, **options)


def live(record: dict) -> str:
  return f"loss {record['loss']:6.3f}  norm {record['global_norm']:8.3g}  factor {record['clip_factor']:5.3f}"


def line(record: dict, steps: int) -> str:
  held_out = "  ".join(f"{k} {loss:.3f}" for k, loss in record["held_out"].items())
  step = f"{record['run']:9} {record['step']:>5}/{steps}"
  return f"{step}  {live(record)}  held out: {held_out}"


def summarise(facts: dict, phases: Sequence[Phase], records: Sequence[dict]) -> dict:
  """The facts of the run, and of each of its training runs what the records say."""
  runs = {}
  for name in dict.fromkeys(record["run"] for record in records):
    rows = [record for record in records if record["run"] == name]
    # A NaN norm is the largest there is, whatever the comparison says.
    largest = max(rows, key=lambda r: math.inf if math.isnan(r["global_norm"]) else r["global_norm"])
    held_out = [row["held_out"] for row in rows if "held_out" in row]
    # The first step's time is the compiler's.
    seconds = sum(row["seconds"] for row in rows[1:])
    tokens = facts["tokens_a_step"] * len(rows[1:])
    runs[name] = {
      "steps": len(rows),
      "clipped_steps": rows[-1]["clipped_steps"],
      "nonfinite_steps": rows[-1]["nonfinite_steps"],
      "skipped_spikes": spikes(rows),
      "last_threshold": rows[-1].get("threshold", facts["max_norm"] if name == "clipped" else math.inf),
      "last_loss_scale": rows[-1].get("loss_scale", 1.0),
      "largest_norm": largest["global_norm"],
      "largest_norm_step": largest["step"],
      "median_norm": statistics.median(row["global_norm"] for row in rows),
      "first_loss": rows[0]["loss"],
      "last_loss": rows[-1]["loss"],
      "first_held_out": held_out[0],
      "last_held_out": held_out[-1],
      "tokens_per_second": tokens / seconds if seconds else None,
    }
  steps = records[-1]["step"]
  return {
    **facts,
    "steps": steps,
    "interrupted": steps < facts["steps_asked"],
    "phases": [
      {"start": p.start + 1, "length": min(p.length, steps - p.start), "weights": p.weights.tolist()}
      for p in phases
      if p.start < steps
    ],
    "runs": runs,
  }


def spikes(rows: Sequence[dict]) -> list[int]:
  """The steps of a run that were skipped as spikes."""
  before = [0, *(row.get("spike_steps", 0) for row in rows)]
  return [row["step"] for row, count in zip(rows, before, strict=False) if row.get("spike_steps", 0) > count]


def draw(summary: dict, records: Sequence[dict]) -> matplotlib.figure.Figure:
  """Held-out loss by source, gradient norm, clip factor and mixture against steps."""
  names = list(records[0]["weights"])
  colours = {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(names)}
  by_run = {run: [record for record in records if record["run"] == run] for run in summary["runs"]}
  facts = summary["runs"]["clipped"]
  rule = f"at norm {summary['max_norm']:g}" if summary["clip_rule"] == "constant" else f"by {summary['clip_rule']}"

  figure = matplotlib.figure.Figure(figsize=(10, 9), layout="constrained")
  loss, norm, factor, mixture = figure.subplots(4, sharex=True, gridspec_kw={"height_ratios": [4, 3, 2, 1]})
  skipped = f", {len(facts['skipped_spikes'])} skipped" if summary["skip_spikes"] else ""
  title = (
    f"{facts['clipped_steps']} of {facts['steps']} updates clipped {rule}{skipped}"
    f"; largest norm {facts['largest_norm']:.3g} at step {facts['largest_norm_step']}"
  )
  figure.suptitle(f"{summary['size']}, {summary['parameters']:,} parameters: {title}")
  _draw_losses(loss, by_run, colours)
  _draw_norms(norm, by_run, facts)
  _draw_factors(factor, by_run["clipped"])
  _draw_mixture(mixture, by_run["clipped"], colours)

  for axes in (loss, norm, factor, mixture):
    for index, phase in enumerate(summary["phases"][1:]):
      axes.axvline(
        phase["start"] - 0.5,
        color="0.8",
        linewidth=0.8,
        zorder=0,
        label="phase boundary" if axes is norm and index == 0 else None,
      )
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.margins(x=0.01)
  figure.align_ylabels()
  return figure


def _column(rows: Sequence[dict], name: str) -> list:
  return [row[name] for row in rows]


def _draw_losses(axes, by_run: dict, colours: dict) -> None:
  for run, style in (("clipped", "-"), ("unclipped", "--")):
    rows = [record for record in by_run.get(run, ()) if "held_out" in record]
    for name in colours if rows else ():
      axes.plot(
        _column(rows, "step"),
        [row["held_out"][name] for row in rows],
        style,
        color=colours[name],
        marker="o" if run == "clipped" else "x",
        markersize=4,
        label=name if len(by_run) == 1 else f"{name}, {run}",
      )
  axes.set_ylabel("held-out loss\n(nats a token)")


def _draw_norms(axes, by_run: dict, facts: dict) -> None:
  for run, colour, label in (("unclipped", UNCLIPPED, "without clipping"), ("clipped", CLIPPED, "before the clip")):
    if run in by_run:
      axes.plot(_column(by_run[run], "step"), _column(by_run[run], "global_norm"), color=colour, linewidth=1, label=label)
  rows = by_run["clipped"]
  if "threshold" in rows[-1]:
    axes.plot(_column(rows, "step"), _column(rows, "threshold"), color="0.4", linestyle="--", label="threshold")
  else:
    axes.axhline(facts["last_threshold"], color="0.4", linestyle="--", label=f"threshold {facts['last_threshold']:g}")
  if facts["skipped_spikes"]:
    skipped = [row for row in rows if row["step"] in facts["skipped_spikes"]]
    axes.plot(_column(skipped, "step"), _column(skipped, "global_norm"), "x", color=SKIPPED, label="skipped")
  axes.set_yscale("log")
  axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
  axes.yaxis.set_major_formatter("{x:g}")
  axes.yaxis.set_minor_formatter(ticker.NullFormatter())
  axes.set_ylabel("gradient norm\n(global L2)")


def _draw_factors(axes, rows: Sequence[dict]) -> None:
  label = "min(1, threshold / norm)"
  axes.plot(_column(rows, "step"), _column(rows, "clip_factor"), color=CLIPPED, linewidth=1, label=label)
  axes.set_ylim(0, 1.05)
  axes.set_ylabel("clip factor")


def _draw_mixture(axes, rows: Sequence[dict], colours: dict) -> None:
  weights = [[row["weights"][name] for row in rows] for name in colours]
  axes.stackplot(_column(rows, "step"), weights, colors=list(colours.values()), labels=list(colours), step="mid")
  axes.set_ylim(0, 1)
  axes.set_ylabel("mixture")
  axes.set_xlabel("step")


def write(out: pathlib.Path, facts: dict, phases: Sequence[Phase], records: Sequence[dict]) -> dict:
  """Writes `summary.json` and `training.png` into `out`; returns the summary."""
  summary = summarise(facts, phases, records)
  (out / "summary.json").write_text(to_json(summary, indent=2) + "\n")
  draw(summary, records).savefig(out / "training.png", dpi=120)
  return summary


def show(console: rich.console.Console, out: pathlib.Path, summary: dict) -> None:
  """Prints the summary as a table, with the difference where there are two runs."""
  runs = summary["runs"]
  table = rich.table.Table(
    title=f"{summary['steps']} of {summary['steps_asked']} steps" + (", interrupted" if summary["interrupted"] else "")
  )
  table.add_column("")
  for run in runs:
    table.add_column(run, justify="right")
  if len(runs) == 2:
    table.add_column("difference", justify="right")

  def row(label, values, form):
    cells = [format(value, form) for value in values]
    if len(values) == 2:
      cells.append(format(values[1] - values[0], "+" + form))
    table.add_row(label, *cells)

  def facts(key):
    return [run[key] for run in runs.values()]

  row("clipped steps", facts("clipped_steps"), "d")
  row("steps with NaN or infinity", facts("nonfinite_steps"), "d")
  if summary["skip_spikes"]:
    row("steps skipped as spikes", list(map(len, facts("skipped_spikes"))), "d")
  if summary["clip_rule"] != "constant":
    row("threshold at the end", facts("last_threshold"), ".3g")
  row("loss scale at the end", facts("last_loss_scale"), "g")
  row("largest norm", facts("largest_norm"), ".3g")
  row("median norm", facts("median_norm"), ".3g")
  for name in facts("last_held_out")[0]:
    losses = [held_out[name] for held_out in facts("last_held_out")]
    row(f"held-out loss, {name}", losses, ".3f")
  if summary["steps"] > 1:
    row("tokens per second", facts("tokens_per_second"), ",.0f")
  console.print(table)
  console.print(f"figure and numbers: {out}/training.png, summary.json, {', '.join(f'{run}.jsonl' for run in runs)}")
