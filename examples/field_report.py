"""Measures the claims of the field report; docs/field_report.md says what came out.

    python examples/field_report.py sources              # one experiment; a few minutes to half an hour on two cores
    python examples/field_report.py all --quick          # all of them, small: about half a minute each
    python examples/field_report.py sources --size 12m   # of the larger model, as far as the experiment has a form for it

Each writes its numbers with seeds, versions and machine (NAME.json) and its figure (NAME.png) into `--out`.
"""

import argparse
import importlib
import json
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from experiments import shared
from machine import machine

EXPERIMENTS = {
  "sources": "gradient norms by cause",
  "memory": "how long AdamW remembers one bad batch",
  "warmup": "the worst first updates with and without warm-up and clip",
  "kinds": "global, per leaf and per element clips of the same gradients",
  "versions": "training without protection, with all of it, and with one part removed",
  "order": "before or after unscaling, inside or outside the window",
  "rules": "constant, ema_clip, zclip and skipped spikes, with planted spikes and without",
}


def run(name: str, lab: shared.Lab, out: pathlib.Path) -> dict:
  """The result of one experiment, written into `out` with its figure."""
  experiment = importlib.import_module(f"experiments.{name}")
  facts, start, cpu = machine(), time.perf_counter(), time.process_time()
  result = experiment.run(lab)
  seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
  facts = {"experiment": name, "size": lab.name, "rows": lab.rows, "length": lab.size.length, "machine": facts}
  result = facts | {"seconds": round(seconds), "cpu_seconds": round(cpu)} | result
  stem = name if lab.name != "12m" else f"{name}_12m"
  out.mkdir(parents=True, exist_ok=True)
  (out / f"{stem}.json").write_text(shared.to_json(result))
  experiment.draw(json.loads(shared.to_json(result))).savefig(out / f"{stem}.png", dpi=110)
  print(f"{name}: {seconds:.0f} s, {out / stem}.json and .png", flush=True)
  return result


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    epilog="\n".join(f"{name:10}{what}" for name, what in EXPERIMENTS.items()),
  )
  add = parser.add_argument
  add("experiment", choices=[*EXPERIMENTS, "all"])
  add("--quick", action="store_true", help="a small model for a few steps: shows that it runs, not what comes out")
  add("--size", choices=("tiny", "12m"), default="tiny", help="default: tiny; 12m for sources alone")
  add("--out", type=pathlib.Path, default=pathlib.Path("runs/field_report"), metavar="FOLDER",
      help="default: runs/field_report")
  args = parser.parse_args(argv)
  if args.size == "12m" and (args.quick or args.experiment != "sources"):
    parser.error("--size 12m is for the full form of sources alone")
  lab = shared.make_lab(args.size, args.quick)
  for name in EXPERIMENTS if args.experiment == "all" else [args.experiment]:
    run(name, lab, args.out)
  return 0


if __name__ == "__main__":
  sys.exit(main())
