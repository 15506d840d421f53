"""Global, per-leaf and per-element clips of the same gradients: the angle to the true one, and the leaves' scales."""

import jax
import numpy as np
import optax
import optax_globalclip as ogc

from experiments import shared

SEED = 0
# Of the gradient's norm that each clip leaves.
KEPT = (0.5, 0.1)


def per_element(tree, threshold):
  return optax.clip(threshold).update(tree, optax.EmptyState())[0]


def per_leaf(tree, threshold):
  return ogc.per_tensor_clip(threshold).update(tree, optax.EmptyState())[0]


def overall(tree, threshold):
  return ogc.global_clip(threshold).update(tree, optax.EmptyState())[0]


CLIPS = {"global": jax.jit(overall), "per leaf": jax.jit(per_leaf), "per element": jax.jit(per_element)}


def clip_to(clip, tree, norm: float):
  """The tree clipped at the threshold that leaves it this norm, which is searched for."""
  low, high = 0.0, float(ogc.global_norm(tree))
  for _ in range(30):
    middle = (low + high) / 2
    if float(ogc.global_norm(clip(tree, middle))) < norm:
      low = middle
    else:
      high = middle
  return high, clip(tree, high)


def compare(tree) -> dict:
  """Of each clip, at equal norms of what is left: angle in degrees, and the leaves' factors."""
  true, norm, found = shared.flat(tree), float(ogc.global_norm(tree)), {}
  leaves = np.array([float(n) for n in jax.tree.leaves(ogc.leaf_norms(tree))])
  # Leaves whose gradient is rounding alone (a key's bias) say nothing.
  counted = leaves > 1e-4 * norm
  for kept in KEPT:
    for name, clip in CLIPS.items():
      threshold, clipped = clip_to(clip, tree, kept * norm)
      after = np.array([float(n) for n in jax.tree.leaves(ogc.leaf_norms(clipped))])
      factors = (after / np.where(counted, leaves, 1))[counted]
      found[f"{name}, {kept:g} of the norm kept"] = {
        "threshold": threshold, "angle": shared.angle(shared.flat(clipped), true),
        "smallest_factor": float(factors.min()), "largest_factor": float(factors.max()),
      }
  return {"norm": norm, "clips": found}


def one_leaf_times(tree, path: str, factor: float):
  return jax.tree_util.tree_map_with_path(
    lambda p, x: factor * x if jax.tree_util.keystr(p, simple=True, separator="/") == path else x, tree)


def run(lab: shared.Lab) -> dict:
  steps, count = lab.choose((5, 1), (300, 5))
  batches = lab.batches(SEED, steps + count)
  tx = shared.clipped_adamw(shared.warmed_up(lab.size.learning_rate, max(2, steps // 10)))
  fresh = lab.state(tx, SEED)
  start = shared.copied(fresh.params)
  state, _ = shared.train(fresh, batches, steps)
  rng, leaf = np.random.default_rng(SEED), "Block_1/Dense_0/kernel"
  gradients = {}
  for i in range(count):
    tokens = batches.batch(steps + i).tokens
    gradient = shared.loss_and_gradient(state.apply_fn, state.params, tokens)[1]
    rare = tokens.copy()
    rare[0] = rng.integers(lab.size.vocabulary)  # one token, all along the row
    gradients.setdefault("at the start", []).append(shared.loss_and_gradient(state.apply_fn, start, tokens)[1])
    gradients.setdefault("ordinary batch", []).append(gradient)
    gradients.setdefault("one row of one token", []).append(
      shared.loss_and_gradient(state.apply_fn, state.params, rare)[1])
    gradients.setdefault("one leaf x 100", []).append(one_leaf_times(gradient, leaf, 100.0))
  result = {"seed": SEED, "trained_steps": steps, "gradients": count, "leaf": leaf, "kinds": {}}
  for name, trees in gradients.items():
    compared = [compare(tree) for tree in trees]
    result["kinds"][name] = {clip: {key: float(np.median([c["clips"][clip][key] for c in compared]))
                                    for key in compared[0]["clips"][clip]} for clip in compared[0]["clips"]}
    for clip, found in result["kinds"][name].items():
      print(f"  {name:22} {clip:36} {found['angle']:5.1f} degrees, factors {found['smallest_factor']:.3f} to "
            f"{found['largest_factor']:.3f}", flush=True)
  pair = [np.array([6.0, 8.0], np.float32)]
  result["the note's pair"] = {"global at 5": overall(pair, 5.0)[0].tolist(), "per element at 5": per_element(pair, 5.0)[0].tolist()}
  return result


def draw(result: dict):
  """The angle of each clip to the true gradient, by kind of gradient."""
  figure, axes = shared.figure(1, len(KEPT), (10, 3.5), sharey=True)
  for panel, kept in zip(axes, KEPT, strict=True):
    for i, (clip, colour) in enumerate(zip(CLIPS, shared.COLOURS, strict=False)):
      angles = [kinds[f"{clip}, {kept:g} of the norm kept"]["angle"] for kinds in result["kinds"].values()]
      panel.bar(np.arange(len(angles)) + 0.25 * (i - 1), angles, 0.24, color=colour, label=clip)
    panel.set_xticks(range(len(result["kinds"])), result["kinds"], rotation=15, ha="right", fontsize=8)
    panel.set_title(f"clipped to {kept:g} of the norm", fontsize=10)
  axes[0].set_ylabel("angle to the gradient (degrees)")
  axes[0].legend(fontsize=8)
  return figure
