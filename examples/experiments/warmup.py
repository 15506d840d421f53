"""The first updates with and without warm-up and clip: what holds for AdamW, and what for SGD."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc

from experiments import shared

SEED, RATE, WARMUP, MAX_NORM, NORM = 0, 3e-4, 2000, 1.0, 50.0


def optimizer(kind: str, warmup: bool, max_norm: float):
  rate = shared.warmed_up(RATE, WARMUP) if warmup else RATE
  inner = optax.adamw(rate, weight_decay=0.0) if kind == "AdamW" else optax.sgd(rate)
  return optax.chain(ogc.global_clip(max_norm), inner)


def size_of(updates) -> dict:
  values = np.abs(shared.flat(updates))
  return {"largest_element": float(values.max()), "norm": float(np.linalg.norm(values))}


def first_updates(params, gradients) -> dict:
  """Of each optimizer and combination the largest element and the norm of the worst of the first updates."""
  found = {}
  for kind, warmup, clip in itertools.product(("SGD", "AdamW"), (False, True), (False, True)):
    tx = optimizer(kind, warmup, MAX_NORM if clip else math.inf)
    state, sizes = tx.init(params), []
    update = jax.jit(tx.update)
    for gradient in gradients:
      updates, state = update(gradient, state, params)
      sizes.append(size_of(updates))
    name = f"{kind}, {'warm-up' if warmup else 'no warm-up'}, {'clip' if clip else 'no clip'}"
    found[name] = {"first": sizes[0], "worst": {key: max(s[key] for s in sizes) for key in sizes[0]}}
  return found


def smallest_threshold(params, gradient) -> dict:
  """AdamW's first update behind ever lower thresholds: its largest element does not follow."""
  found = {}
  for max_norm in (math.inf, 1.0, 1e-2, 1e-4, 1e-6, 1e-8):
    tx = optimizer("AdamW", False, max_norm)
    updates, _ = jax.jit(tx.update)(gradient, tx.init(params), params)
    found[f"{max_norm:g}"] = size_of(updates) | {"bound_of_the_report": RATE * max_norm}
  return found


def after_quiet(steps: int) -> dict:
  """The largest update of one parameter after `steps` small gradients and one large, over the rate."""
  found = {}
  for b2 in (0.95, 0.99, 0.999):
    for name, max_norm in (("no clip", math.inf), ("clip", MAX_NORM)):
      tx = optax.chain(ogc.global_clip(max_norm), optax.scale_by_adam(0.9, b2))
      param = jnp.zeros(1)
      state, _ = jax.lax.scan(lambda s, _, tx=tx: (tx.update(jnp.full(1, 1e-4), s)[1], None), tx.init(param), length=steps)
      found[f"b2 {b2}, {name}"] = {
        f"gradient {size:g}": float(tx.update(jnp.full(1, size), state)[0][0]) for size in (1e-2, 1.0, 100.0)
      } | {"bound": 0.1 / math.sqrt(1 - b2)}
  return found


def run(lab: shared.Lab) -> dict:
  count = lab.choose(3, 20)
  state, batches = lab.state(optax.identity(), SEED), lab.batches(SEED, count)
  gradients = [shared.loss_and_gradient(state.apply_fn, state.params, batches.batch(i).tokens)[1] for i in range(count)]
  norms = [float(ogc.global_norm(g)) for g in gradients]
  # The report's 0.015 is 3e-4 times a norm of 50.
  spiked = [jax.tree.map(lambda x, n=n: (NORM / n) * x, g) for g, n in zip(gradients, norms, strict=True)]
  result = {"seed": SEED, "rate": RATE, "warmup_steps": WARMUP, "max_norm": MAX_NORM, "updates": count,
            "norms": norms, "as_they_are": first_updates(state.params, gradients),
            f"scaled_to_norm_{NORM:g}": first_updates(state.params, spiked),
            "adamw_first_update_by_threshold": smallest_threshold(state.params, spiked[0]),
            "adam_after_quiet_over_rate": after_quiet(lab.choose(200, 20_000))}
  for name, found in result[f"scaled_to_norm_{NORM:g}"].items():
    print(f"  {name:28} first update: largest element {found['first']['largest_element']:.3g}, "
          f"norm {found['first']['norm']:.3g}", flush=True)
  return result


def draw(result: dict):
  """Largest element and norm of the first update of a gradient of norm 50, for every combination."""
  found = result[f"scaled_to_norm_{NORM:g}"]
  figure, axes = shared.figure(1, 1, (8, 3.6))
  for key, marker, colour in (("norm", "s", shared.COLOURS[0]), ("largest_element", "o", shared.COLOURS[1])):
    axes.plot([f["first"][key] for f in found.values()], range(len(found)), marker, color=colour,
              label=f"{key.replace('_', ' ')} of the first update")
  for value in (1.5e-7, 0.015):
    axes.axvline(value, color="0.6", linestyle=":")
    axes.text(value, -0.8, f"{value:g}", ha="center", fontsize=8)
  axes.set_xscale("log")
  axes.set_yticks(range(len(found)), found)
  axes.set_ylim(len(found) - 0.5, -1.3)
  axes.set_title(f"first update of a gradient of norm {NORM:g}, rate {RATE:g}, warm-up {WARMUP} steps", fontsize=10)
  axes.legend(fontsize=8)
  return figure
