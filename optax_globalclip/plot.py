"""Draws what `History` wrote: norm, threshold, factor, spikes and the largest leaves of one or several runs.

    python -m optax_globalclip.plot run.jsonl
    python -m optax_globalclip.plot runs/a runs/b.jsonl --out both.png

A RUN is a file, or a folder whose `.jsonl` files are runs. A spike is a step whose norm is not finite, or above
`--spike` times the median of the norms of up to 100 steps before it. The spikes are printed too, with the leaf that
added most to the norm's square. Needs matplotlib: pip install 'optax_globalclip[plot]'.
"""

import argparse
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from optax_globalclip._history import History

if TYPE_CHECKING:
  from matplotlib.figure import Figure

WINDOW = 100  # steps before a spike that it is compared with
LABELS = 6    # spikes named in the figure; all are printed

# Okabe and Ito's colours, told apart under every common colour blindness.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999999")


class Spike(NamedTuple):
  """A step whose norm stands out."""
  step: int
  norm: float
  ratio: float       # to the median before it; NaN where no norm was finite and positive
  leaf: str          # which added most to the squared norm, or holds NaN or infinity; "" where no leaves were written
  leaf_norm: float


def find_spikes(records: Sequence[Mapping[str, Any]], times: float = 3.0) -> list[Spike]:
  """The steps of a run whose norm is not finite, or above `times` the median of the finite ones before it.

  Examples:
    >>> from optax_globalclip.plot import find_spikes
    >>> records = [{"step": i, "global_norm": 1.0, "leaves": {"a": 0.8, "b": 0.6}} for i in range(10)]
    >>> records.append({"step": 10, "global_norm": 60.0, "leaves": {"b": 60.0, "a": 0.8}})
    >>> find_spikes(records)
    [Spike(step=10, norm=60.0, ratio=60.0, leaf='b', leaf_norm=60.0)]
  """
  spikes = []
  for i, record in enumerate(records):
    before = records[max(0, i - WINDOW):i]
    finite = [r["global_norm"] for r in before if math.isfinite(r["global_norm"])]
    median = statistics.median(finite) if finite else 0.0
    norm = record["global_norm"]
    if not math.isfinite(norm) or norm > times * median > 0:
      leaf = _suspect(record, before)
      spikes.append(Spike(record["step"], norm, norm / median if median else math.nan, leaf,
                          record.get("leaves", {}).get(leaf, math.nan)))
  return spikes


def _suspect(record: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> str:
  """The leaf with non-finite elements, else the one whose squared norm rose most above its median."""
  leaves = record.get("leaves")
  if not leaves:
    return ""
  if bad := record.get("nonfinite"):
    return max(bad, key=bad.get)
  top = max(leaves.values())
  if not math.isfinite(top) or not top:
    return max(leaves, key=leaves.get)

  def added(path):
    # A leaf that was not written was smaller than all that were.
    usual = [norm for r in before if math.isfinite(norm := r.get("leaves", {}).get(path, 0.0))]
    return (leaves[path] / top) ** 2 - ((statistics.median(usual) if usual else 0.0) / top) ** 2
  return max(leaves, key=added)


def find_runs(paths: Sequence[str]) -> dict[str, list[dict]]:
  """The records of every run, by a name that tells it from the others."""
  files = []
  for path in map(pathlib.Path, paths):
    found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.is_file() else []
    if not found:
      raise ValueError(f"{path}: expected a file that a History wrote, or a folder of them (.jsonl)")
    files += found
  files = list(dict.fromkeys(files))
  stems = [file.stem for file in files]
  names = [str(file.with_suffix("")) if stems.count(file.stem) > 1 else file.stem for file in files]
  runs = {name: [r for r in History.read(file) if "global_norm" in r] for name, file in zip(names, files, strict=True)}
  begun = {name: records for name, records in runs.items() if records}
  if not begun:
    raise ValueError(f"{', '.join(runs)}: no step is written yet")
  for name, records in runs.items():
    if not records:
      print(f"{name}: no step is written yet", file=sys.stderr)
  return begun


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], *, times: float = 3.0, leaves: int = 6) -> "Figure":
  """A `matplotlib.figure.Figure` of the runs, by name, as `History.read` gives them.

  Examples:
    >>> from optax_globalclip.plot import draw
    >>> records = [{"step": i, "global_norm": 2.0, "clip_factor": 0.5, "threshold": 1.0} for i in range(1, 9)]
    >>> draw({"run": records}).savefig("run.png")
  """
  from matplotlib.figure import Figure
  detailed = [name for name, records in runs.items() if any(r.get("leaves") for r in records)]
  heights = [3, 1.5] + [2.5] * len(detailed)
  figure = Figure(figsize=(10, 1.1 * sum(heights)), layout="constrained")
  norm, factor, *panels = figure.subplots(len(heights), sharex=True, gridspec_kw={"height_ratios": heights})
  for (name, records), colour in zip(runs.items(), _COLOURS * (1 + len(runs) // len(_COLOURS))):
    _draw_norm(norm, name, records, colour, find_spikes(records, times))
    _plot(factor, records, "clip_factor", color=colour, label=name)
  norm.set_ylabel("gradient norm\nbefore the clip")
  _log(norm)
  factor.set_ylabel("clip factor")
  factor.set_ylim(0, 1.05)
  for axes, name in zip(panels, detailed, strict=True):
    _draw_leaves(axes, runs[name], leaves)
    axes.set_ylabel(f"norm of the\nlargest leaves\n{name}")
  for axes in (norm, factor, *panels):
    axes.margins(x=0.01)
    if axes.get_lines():
      axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
  (panels or [factor])[-1].set_xlabel("step")
  figure.align_ylabels()
  return figure


def _plot(axes, records, field, **style) -> None:
  values = [record.get(field, math.nan) for record in records]
  if any(math.isfinite(value) for value in values):
    axes.plot([record["step"] for record in records], values, linewidth=1, **style)


def _log(axes) -> None:
  if any((line.get_ydata() > 0).any() for line in axes.get_lines()):
    axes.set_yscale("log", nonpositive="mask")


def _draw_norm(axes, name, records, colour, spikes) -> None:
  _plot(axes, records, "global_norm", color=colour, label=name)
  _plot(axes, records, "threshold", color=colour, linestyle="--", label=f"{name}: threshold")
  for step in [spike.step for spike in spikes if not math.isfinite(spike.norm)]:
    axes.axvline(step, color=colour, linestyle=":", linewidth=1)
  drawn = [spike for spike in spikes if math.isfinite(spike.norm)]
  if drawn:
    axes.plot([s.step for s in drawn], [s.norm for s in drawn], "v", color=colour, markersize=5, label=f"{name}: spikes")
  steps = [record["step"] for record in records]
  for spike in sorted(spikes, key=lambda s: -s.norm if math.isfinite(s.norm) else -math.inf)[:LABELS]:
    finite, late = math.isfinite(spike.norm), spike.step > (steps[0] + steps[-1]) / 2
    times = f"{spike.ratio:.3g} ×" if finite else f"{spike.norm}"
    axes.annotate(f"{times} {spike.leaf}", (spike.step, spike.norm if finite else 0.95), fontsize=7,
                  xycoords="data" if finite else axes.get_xaxis_transform(), textcoords="offset points",
                  xytext=(-6 if late else 6, 0), va="center", ha="right" if late else "left")


def _draw_leaves(axes, records, count) -> None:
  """The leaves that were largest at some step, the largest first."""
  peaks: dict[str, float] = {}
  for record in records:
    for path, norm in record.get("leaves", {}).items():
      peaks[path] = max(peaks.get(path, 0.0), norm if math.isfinite(norm) else 0.0)
  steps = [record["step"] for record in records]
  chosen = sorted(peaks, key=peaks.get, reverse=True)[:count]
  for path, colour in zip(chosen, _COLOURS * (1 + count // len(_COLOURS))):
    norms = [record.get("leaves", {}).get(path, math.nan) for record in records]
    axes.plot(steps, norms, ".-", color=colour, linewidth=1, markersize=2, label=path)
  _log(axes)


def table(name: str, records: Sequence[Mapping[str, Any]], times: float) -> str:
  """What a run's norms did, and its spikes, a line each."""
  spikes = find_spikes(records, times)
  last = records[-1]
  counts = ", ".join(f"{last[field]} {words}" for field, words in (
      ("clipped_steps", "clipped"), ("nonfinite_steps", "not finite"), ("spike_steps", "skipped as spikes"))
      if field in last)
  lines = [f"{name}: {len(records)} steps{', ' + counts if counts else ''}, {len(spikes)} above {times:g} x the median"]
  if spikes:
    lines.append(f"{'step':>8}  {'norm':>10}  {'x median':>8}  leaf")
    lines += [f"{s.step:8}  {s.norm:10.4g}  {s.ratio:8.3g}  {s.leaf}" for s in spikes]
  return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m optax_globalclip.plot", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  add = parser.add_argument
  add("runs", nargs="+", metavar="RUN", help="a file that a History wrote, or a folder of them")
  add("--out", type=pathlib.Path, default=pathlib.Path("history.png"), metavar="FILE", help="default: history.png")
  add("--spike", type=float, default=3.0, metavar="TIMES", help="times the median that make a spike; default: 3")
  add("--leaves", type=int, default=6, metavar="N", help="leaves drawn of each run; default: 6")
  args = parser.parse_args(argv)
  try:
    runs = find_runs(args.runs)
  except (OSError, ValueError) as error:
    parser.error(str(error))
  for name, records in runs.items():
    print(table(name, records, args.spike))
  try:
    figure = draw(runs, times=args.spike, leaves=args.leaves)
  except ModuleNotFoundError as error:
    if error.name != "matplotlib":
      raise
    print("no figure: matplotlib is not installed (pip install 'optax_globalclip[plot]')", file=sys.stderr)
    return 1
  figure.savefig(args.out, dpi=120)
  print(f"figure: {args.out}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
