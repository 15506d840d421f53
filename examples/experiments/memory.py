"""How long AdamW remembers one bad batch, with and without the clip, beside the closed form."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc

from experiments import shared

SEED, B1, MAX_NORM, CLOSE = 0, 0.9, 1.0, 0.1
B2S, SCALES = (0.95, 0.99, 0.999), (10, 100)


def optimizers(b2s=B2S) -> dict:
  """By (b2, clipped): the clip, or none, and Adam's direction."""
  def make(b2, clipped):
    return optax.chain(ogc.global_clip(MAX_NORM if clipped else math.inf), optax.scale_by_adam(B1, b2))
  return {f"b2 {b2}, {'clip' if clipped else 'no clip'}": make(b2, clipped) for b2 in b2s for clipped in (False, True)}


def distance(a, b):
  """|a - b| / |b| over all leaves."""
  return optax.tree.norm(jax.tree.map(jnp.subtract, a, b)) / optax.tree.norm(b)


def unit(tree):
  norm = optax.tree.norm(tree)
  return jax.tree.map(lambda x: x / norm, tree)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="b2s")
def advance(states, gradient, factors, b2s):
  """Every optimizer, undisturbed and disturbed, one step on; how far each disturbed one is from the undisturbed."""
  new, far = {}, {}
  for name, tx in optimizers(b2s).items():
    outcomes = {}
    for scale, state in states[name].items():
      scaled = jax.tree.map(lambda g, f=factors[scale]: f * g, gradient)
      outcomes[scale] = tx.update(scaled, state)
    new[name] = {scale: state for scale, (_, state) in outcomes.items()}
    update, (_, adam) = outcomes["1"]
    for scale in states[name].keys() - {"1"}:
      disturbed, (_, other) = outcomes[scale]
      far[f"{name}, x{scale}"] = {
        "m": distance(other.mu, adam.mu),
        "v": distance(other.nu, adam.nu),
        "direction": distance(unit(disturbed), unit(update)),
        "length": optax.tree.norm(disturbed) / optax.tree.norm(update),
      }
  return new, far


def closed_form(scale: float, b2: float, gradient_to_m: float, square_to_v: float) -> dict:
  """Steps until m and v are within `CLOSE`, where all batches are alike.

  The surplus is (scale - 1) (1 - b1) |g| in m and (scale² - 1) (1 - b2) |g²| in v; each step keeps b1, b2 of it.
  """
  def steps(surplus, decay):
    return max(0, math.ceil(math.log(CLOSE / surplus) / math.log(decay))) if surplus > CLOSE else 0
  return {"m": steps((scale - 1) * (1 - B1) * gradient_to_m, B1),
          "v": steps((scale**2 - 1) * (1 - b2) * square_to_v, b2)}


def steps_until_close(values) -> int | None:
  """Steps after the bad one from which on all stay within `CLOSE`; None where they do not get there."""
  beyond = [i for i, value in enumerate(values) if not value <= CLOSE]
  last = beyond[-1] if beyond else -1
  return last + 1 if last + 1 < len(values) else None


def follow_states(lab: shared.Lab, trained, batches, first: int, steps: int) -> dict:
  """All optimizers see the gradients of one undisturbed run; of the disturbed ones one gradient is scaled."""
  b2s = lab.choose((0.99,), B2S)
  states = {name: {scale: tx.init(trained.params) for scale in ("1", *map(str, SCALES))}
            for name, tx in optimizers(b2s).items()}
  far, at_disturbance = [], {}
  for step in range(first + 1 + steps):
    _, gradient = shared.loss_and_gradient(trained.apply_fn, trained.params, batches.batch(step).tokens)
    factors = {"1": 1.0} | {str(s): float(s) if step == first else 1.0 for s in SCALES}
    if step == first:
      at_disturbance["norm"] = float(ogc.global_norm(gradient))
      for b2 in b2s:
        _, adam = states[f"b2 {b2}, no clip"]["1"]
        # The mean of v is estimated as Adam does, without its bias towards 0.
        v = jax.tree.map(lambda x, bias=1 - b2**step: x / bias, adam.nu)
        square = optax.tree.norm(jax.tree.map(jnp.square, gradient))
        at_disturbance[str(b2)] = {"gradient_to_m": float(ogc.global_norm(gradient) / optax.tree.norm(adam.mu)),
                                   "square_to_v": float(square / optax.tree.norm(v)),
                                   "square_to_biased_v": float(square / optax.tree.norm(adam.nu))}
    states, measured = advance(states, gradient, factors, b2s)
    if step >= first:
      far.append(jax.device_get(measured))
    trained = shared.apply(trained, gradient)
  found = {}
  for name in sorted(far[0]):
    curves = {key: [float(f[name][key]) for f in far] for key in far[0][name]}
    b2, scale = name.split(",")[0].removeprefix("b2 "), int(name.rpartition("x")[2])
    ratio = at_disturbance[b2]
    found[name] = {
      "steps_until_close": {key: steps_until_close(curves[key]) for key in ("m", "v", "direction")},
      "closed_form_unclipped": closed_form(scale, float(b2), ratio["gradient_to_m"], ratio["square_to_biased_v"]),
      "largest": {key: max(curves[key]) for key in ("m", "v", "direction")},
      "shortest_update": min(curves["length"]), "longest_update": max(curves["length"]),
      "every": lab.choose(1, 5), "curves": {key: values[:: lab.choose(1, 5)] for key, values in curves.items()},
    }
  return {"at_disturbance": at_disturbance, "states": found}


def follow_training(lab: shared.Lab, params, batches, first: int, steps: int) -> dict:
  """Whole runs from the same parameters: 50 steps, then one gradient scaled, with b2 0.999."""
  found, before = {}, lab.choose(3, 50)
  for clipped in (False, True):
    tx = shared.clipped_adamw(lab.size.learning_rate, MAX_NORM if clipped else math.inf)
    for scale in (1, *SCALES):
      state = lab.state(tx, SEED).replace(params=shared.copied(params))
      losses, held_out = [], []
      for i in range(before + steps):
        loss, gradient = shared.loss_and_gradient(state.apply_fn, state.params, batches.batch(first + i).tokens)
        if i == before:
          gradient = jax.tree.map(lambda g, s=scale: s * g, gradient)
        state = shared.apply(state, gradient)
        losses.append(float(loss))
        if i >= before and (i - before) % lab.choose(4, 25) == 0:
          held_out.append(shared.held_out_loss(state, batches))
      found[f"{'clip' if clipped else 'no clip'}, x{scale}"] = {"losses": losses, "held_out": held_out}
  return {"steps_before": before, "held_out_every": lab.choose(4, 25), "runs": found}


def run(lab: shared.Lab) -> dict:
  first, steps, after = lab.choose((10, 10, 8), (200, 800, 200))
  batches = lab.batches(SEED, first + 1 + steps)
  tx = shared.clipped_adamw(shared.warmed_up(lab.size.learning_rate, max(2, first // 4)))
  trained, _ = shared.train(lab.state(tx, SEED), batches, first)
  start = shared.copied(trained.params)
  result = follow_states(lab, lab.state(tx, SEED), batches, first, steps)
  for name, found in result["states"].items():
    print(f"  {name:26} {found['steps_until_close']}", flush=True)
  result["training"] = follow_training(lab, start, batches, first, after)
  return {"seed": SEED, "b1": B1, "max_norm": MAX_NORM, "close": CLOSE, "disturbed_step": first + 1, "followed": steps,
          } | result


def draw(result: dict):
  """How far m, v and the direction are from the undisturbed run's, after a batch scaled by 100; then the losses."""
  figure, axes = shared.figure(1, 4, (14, 3.6))
  for panel, key in zip(axes, ("m", "v", "direction"), strict=False):
    for b2, colour in zip(B2S, shared.COLOURS, strict=False):
      for clip, style in (("no clip", "-"), ("clip", "--")):
        found = result["states"].get(f"b2 {b2}, {clip}, x100")
        if found is None:
          continue
        steps = np.arange(len(found["curves"][key])) * found["every"]
        panel.plot(steps, [max(float(x), 1e-4) for x in found["curves"][key]], style, color=colour,
                   linewidth=1, label=f"β2 {b2}, {clip}")
    panel.axhline(result["close"], color="0.6", linestyle=":")
    panel.set_yscale("log")
    panel.set_title(f"distance of {key}, batch × 100", fontsize=9)
    panel.set_xlabel("steps after the bad batch")
  axes[0].legend(fontsize=7)
  training = result["training"]
  for (name, found), colour in zip(training["runs"].items(), shared.COLOURS, strict=False):
    steps = np.arange(len(found["held_out"])) * training["held_out_every"]
    axes[3].plot(steps, [float(x) for x in found["held_out"]], ".-", color=colour, linewidth=1, label=name)
  axes[3].set_title("held-out loss, β2 0.999", fontsize=9)
  axes[3].set_xlabel("steps after the bad batch")
  axes[3].legend(fontsize=7)
  return figure
