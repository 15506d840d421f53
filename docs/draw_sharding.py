"""Draws sharding.svg: what each device does with its shards, and what crosses between devices.

    python docs/draw_sharding.py
"""

import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

DEVICES = 4
BLUE, PALE_BLUE, ORANGE, PALE_ORANGE, INK = "#2f6db3", "#bcd4ee", "#c8741a", "#f3d9bb", "#222222"
WIDTH, GAP = 2.0, 0.5


def left(device):
  return device * (WIDTH + GAP)


def box(axes, x, y, width, height, text, *, fill, edge, hatch=None, size=10):
  axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, linewidth=1.2, hatch=hatch))
  axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=INK)


def arrow(axes, x, start, end):
  axes.annotate("", (x, end), (x, start), arrowprops=dict(arrowstyle="-|>", color=INK, linewidth=1))


def stage(axes, y, number, text):
  axes.text(-0.35, y, f"{number}", ha="center", va="center", fontsize=12, weight="bold", color=INK)
  axes.text(-0.65, y, text, ha="right", va="center", fontsize=10, color=INK)


def draw():
  figure, axes = plt.subplots(figsize=(11, 5.8))
  whole = left(DEVICES - 1) + WIDTH
  for device in range(DEVICES):
    x, middle = left(device), left(device) + WIDTH / 2
    counts = device == 0
    axes.text(middle, 8.05, f"device {device}", ha="center", fontsize=11, weight="bold", color=INK)
    for top, prime in ((7.0, ""), (0.75, "′")):
      box(axes, x, top, 1.3, 0.8, f"W{prime}[{device}]", fill=PALE_BLUE, edge=BLUE)
      box(axes, x + 1.4, top, 0.6, 0.8, f"b{prime}", fill=PALE_ORANGE, edge=ORANGE,
          hatch=None if counts or prime else "///")
    arrow(axes, middle, 6.95, 6.5)
    box(axes, x, 5.7, WIDTH, 0.75, f"|W[{device}]|²" + (" + |b|²" if counts else ""), fill="white", edge=INK)
    arrow(axes, middle, 5.65, 5.2)
    arrow(axes, middle, 4.5, 4.05)
    arrow(axes, middle, 3.35, 2.9)
    box(axes, x, 2.1, WIDTH, 0.75, "norm, factor", fill="white", edge=INK)
    arrow(axes, middle, 2.05, 1.6)
  box(axes, 0, 4.55, whole, 0.6, "all-reduce, max: 4 bytes", fill="#e8e8e8", edge=INK)
  box(axes, 0, 3.4, whole, 0.6, "all-reduce, sum: 20 bytes of integers", fill="#e8e8e8", edge=INK)
  stage(axes, 7.4, "", "W sharded,\nb replicated")
  stage(axes, 6.07, "1", "squares of its own shards;\nb (hatched) counts once")
  stage(axes, 4.85, "2", "the largest exponent,\nfor a common scale")
  stage(axes, 3.7, "3", "fixed-point limbs and\nnon-finite counts: exact")
  stage(axes, 2.47, "4", "on every device\nthe same bits")
  stage(axes, 1.15, "", "each scales its own shards;\nnone has moved")
  axes.set_xlim(-4.6, whole + 0.1)
  axes.set_ylim(0.6, 8.4)
  axes.axis("off")
  figure.tight_layout(pad=0.3)
  return figure


if __name__ == "__main__":
  # Without a date the file changes only where the picture does.
  plt.rcParams["svg.hashsalt"] = "sharding"
  here = pathlib.Path(__file__).parent
  target = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "sharding.svg"
  draw().savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=110, facecolor="white")
