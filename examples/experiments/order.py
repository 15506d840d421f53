"""The clip at the wrong place: before the loss scale is taken off, and inside the window of micro-batches."""

import functools

import jax
import numpy as np
import optax
import optax_globalclip as ogc
import train_flax

from experiments import shared

SCALE, MICRO_BATCHES, MAX_NORM = 2.0**10, 4, 1.0


def inner(kind: str, lab: shared.Lab, steps: int):
  schedule = shared.warmed_up(lab.size.learning_rate, max(2, steps // 10))
  return optax.adamw(schedule, weight_decay=0.1) if kind == "AdamW" else optax.sgd(0.3)


@functools.partial(jax.jit, donate_argnums=0)
def scaled_step(state, tokens):
  """A step on the gradient of `SCALE` times the loss."""
  loss, gradient = shared.loss_and_gradient(state.apply_fn, state.params, tokens, SCALE)
  return state.apply_gradients(grads=gradient), loss


def unscaling(lab: shared.Lab, kind: str, steps: int, seed: int) -> dict:
  """Held-out loss with the clip after unscaling, and before it, with the same threshold."""
  orders = {
    "after unscaling": ogc.global_clip(MAX_NORM, loss_scale=SCALE),
    "before unscaling": optax.chain(ogc.global_clip(MAX_NORM), optax.scale(1 / SCALE)),
  }
  found, batches = {}, lab.batches(seed, steps)
  for name, clip in orders.items():
    state = lab.state(optax.chain(clip, inner(kind, lab, steps)), seed)
    for step in range(steps):
      state, _ = scaled_step(state, batches.batch(step).tokens)
    found[name] = shared.held_out_loss(state, batches)
  return found


def window(lab: shared.Lab, kind: str, steps: int, seed: int) -> dict:
  """Held-out loss, and the share of clips, with the clip once a window, and at each micro-batch."""
  orders = {
    "once a window": ogc.clipped_multi_steps(inner(kind, lab, steps), MAX_NORM, every_k=MICRO_BATCHES),
    "at each micro-batch": optax.chain(
      ogc.global_clip(MAX_NORM, monitor=True),
      optax.MultiSteps(inner(kind, lab, steps), MICRO_BATCHES).gradient_transformation(),
    ),
  }
  found, batches = {}, lab.batches(seed, steps)
  for name, tx in orders.items():
    state = lab.state(tx, seed)
    for step in range(steps):
      state, _, metrics = train_flax.train_step(state, batches.batch(step).tokens, MICRO_BATCHES)
    share = float(metrics["clipped_steps"]) / float(metrics["steps"])
    found[name] = {"held_out": shared.held_out_loss(state, batches), "clipped_share": share}
  return found


def window_angles(lab: shared.Lab, steps: int, count: int, seed: int) -> dict:
  """The angle between the clipped mean and the mean of clipped micro-batches, with and without one that is spiked."""
  batches = lab.batches(seed, steps + count)
  tx = shared.clipped_adamw(shared.warmed_up(lab.size.learning_rate, max(2, steps // 10)))
  state, _ = shared.train(lab.state(tx, seed), batches, steps)
  found = {"ordinary": [], "one micro-batch x 10": [], "one micro-batch x 100": []}
  shares = {name: [] for name in found}
  for step in range(steps, steps + count):
    parts = np.split(batches.batch(step).tokens, MICRO_BATCHES)
    gradients = [shared.flat(shared.loss_and_gradient(state.apply_fn, state.params, p)[1]) for p in parts]
    for name, factor in zip(found, (1, 10, 100), strict=True):
      scaled = [factor * gradients[0], *gradients[1:]]
      mean = np.mean(scaled, 0)
      clipped = [g * min(1, MAX_NORM / np.linalg.norm(g)) for g in scaled]
      found[name].append(shared.angle(np.mean(clipped, 0), mean))
      # How much of the spiked micro-batch's direction is in the sum.
      shares[name].append(shared.angle(mean, gradients[0]))
  return {name: {"angle": float(np.median(angles)), "mean_to_spiked_micro_batch": float(np.median(shares[name]))}
          for name, angles in found.items()}


def run(lab: shared.Lab) -> dict:
  steps, seeds = lab.choose((10, (0,)), (200, (0, 1)))
  kinds = lab.choose(("SGD",), ("SGD", "AdamW"))
  result = {"steps": steps, "seeds": seeds, "loss_scale": SCALE, "micro_batches": MICRO_BATCHES, "max_norm": MAX_NORM,
            "sgd_rate": 0.3, "adamw_rate": lab.size.learning_rate, "unscaling": {}, "window": {}}
  for kind in kinds:
    result["unscaling"][kind] = [unscaling(lab, kind, steps, seed) for seed in seeds]
    print(f"  {kind}: {result['unscaling'][kind]}", flush=True)
    result["window"][kind] = [window(lab, kind, steps, seed) for seed in seeds]
    print(f"  {kind}: {result['window'][kind]}", flush=True)
  result["angles"] = window_angles(lab, steps, lab.choose(2, 10), 0)
  print(f"  {result['angles']}", flush=True)
  return result


def draw(result: dict):
  """Held-out loss of both orders, for each optimizer and seed."""
  figure, axes = shared.figure(1, 2, (9, 3.6), sharey=True)
  for panel, what in zip(axes, ("unscaling", "window"), strict=True):
    ticks = []
    for kind, runs in result[what].items():
      for order, colour in zip(runs[0], shared.COLOURS, strict=False):
        losses = [r[order]["held_out"] if what == "window" else r[order] for r in runs]
        panel.plot([len(ticks)] * len(losses), [float(x) for x in losses], "o", color=colour, alpha=0.7)
        ticks.append(f"{kind}\n{order}")
    panel.set_xticks(range(len(ticks)), ticks, fontsize=8)
    panel.margins(x=0.15)
  axes[0].set_ylabel("held-out loss (nats a token)")
  return figure
