"""What the package says about itself and about a run: `backend_info`, `clip_metrics`, `leaf_report`."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from optax_globalclip import _auto, _leaves, _native, _ops, _stacked
from optax_globalclip._loss_scale import SCALE_STATES, check_restored, find_states, plain
from optax_globalclip._monitor import ClipState, ElementMetrics
from optax_globalclip._thresholds import ThresholdState


def backend_info() -> dict[str, str]:
  """Which path each platform takes and, where native code is off, why.

  Returns:
    A dict from "cpu", "cuda" and "other" to a sentence that begins with "native" or "reference"; "setting" holds the
    value of OPTAX_GLOBALCLIP_BACKEND.

  Raises:
    ValueError: OPTAX_GLOBALCLIP_BACKEND is neither "auto", "native" nor "reference".

  Examples:
    >>> import optax_globalclip as ogc
    >>> sorted(ogc.backend_info())
    ['cpu', 'cuda', 'other', 'setting']
  """
  mode = _native.backend()
  info = {"setting": mode}
  for platform in _native.PLATFORMS:
    found = _native.load(platform)
    if mode == "reference":
      info[platform] = "reference: OPTAX_GLOBALCLIP_BACKEND=reference"
    elif found.available:
      info[platform] = f"native: {found.reason}"
    else:
      info[platform] = f"{'error' if mode == 'native' else 'reference'}: {found.reason}"
  info["other"] = "reference: native code is for cpu and cuda"
  return info


def custom_call_targets() -> tuple[str, ...]:
  """The names of the custom calls that the native paths put into a program, for `jax.export`.

  `jax.export` refuses custom calls it does not know, because whoever loads the program must have them registered.
  Importing this package registers the calls of the native libraries that it finds.

  Returns:
    The names for every platform, whether or not its library was built. A name changes when the call's meaning does.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_globalclip as ogc
    >>> checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ogc.custom_call_targets()]
    >>> norm = jax.export.export(jax.jit(ogc.global_norm), disabled_checks=checks)(jnp.zeros(2))
    >>> float(norm.call(jnp.array([3., 4.])))
    5.0
  """
  return _native.target_names() + (_auto.TARGET,)


def clip_metrics(opt_state: Any) -> dict[str, jax.Array]:
  """The numbers of the last clip, found anywhere in an optimizer state.

  Args:
    opt_state: an optimizer state that holds exactly one `clipped_multi_steps` (which records always, once a window), or
      one clip with `monitor=True`; `flax.nnx.Optimizer`'s included.

  Returns:
    Scalars by name: `global_norm` (before the clip, in true units), `clip_factor`, `steps`, `clipped_steps`,
    `nonfinite_steps`, `consecutive_nonfinite`. A step is an update, or a window; before the first, all are 0. A window
    that was skipped for not being finite has the norm +inf. Besides:

    * of `clipped_multi_steps`, `loss_scale`, the one now in force;
    * with `monitor=True`, `largest_element`, the largest magnitude of an element in true units (of a complex one, of its
      parts), infinite where one is not finite, and `zero_elements`, how many are zero (of a complex leaf parts are
      counted);
    * with a schedule or a rule, `threshold`, what the last norm was compared with. Not with a rule in `per_tensor_clip`,
      whose thresholds are one a leaf: `optax.tree.get(opt_state, "threshold")`;
    * with `skip_spikes`, `spike_steps`, how many windows were skipped as spikes. Such a window counts in `steps`, and
      neither in `clipped_steps` nor in `nonfinite_steps`; its `clip_factor` is 0.

  Raises:
    ValueError: where the state holds no monitored clip, or several; for one that was restored as plain dicts.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> tx = ogc.global_clip(1.0, monitor=True)
    >>> _, state = tx.update([jnp.array([3., 4.])], tx.init([jnp.zeros(2)]))
    >>> float(ogc.clip_metrics(state)["global_norm"])
    5.0
  """
  states = find_states(opt_state, ClipState)
  if len(states) != 1:
    check_restored(opt_state)
    raise ValueError(f"clip_metrics: expected an optimizer state with one monitored clip, found {len(states)} in a "
                     f"{type(opt_state).__name__} (clipped_multi_steps always records, global_clip and per_tensor_clip "
                     "with monitor=True)")
  metrics = {name: plain(value) for name, value in states[0]._asdict().items() if name != "leaf_metrics"}
  if isinstance(states[0].leaf_metrics, ElementMetrics):
    metrics |= {name: plain(getattr(states[0].leaf_metrics, name)) for name in ("largest_element", "zero_elements")}
  followed = find_states(opt_state, ThresholdState)
  if len(followed) == 1:
    threshold, spikes = followed[0].threshold, followed[0].spike_state
    if threshold is not None and not plain(threshold).ndim:
      metrics["threshold"] = plain(threshold)
    if spikes is not None:
      metrics["spike_steps"] = plain(spikes.spike_steps)
  scales = find_states(opt_state, SCALE_STATES)
  if len(scales) == 1:
    metrics["loss_scale"] = plain(scales[0].loss_scale)
  return metrics


class LeafRow(NamedTuple):
  """One leaf in a `LeafReport`."""
  path: str
  norm: float     # L2, before the clip, in true units
  share: float    # of the squared norm of the finite leaves, 0 to 1; NaN for a leaf that is not finite
  nonfinite: int  # elements that are NaN or infinite


class LeafReport(NamedTuple):
  """Leaves in the order of suspicion: non-finite ones first, then by falling norm. Prints as a table."""
  rows: tuple[LeafRow, ...]

  def __str__(self) -> str:
    width = max([len("leaf"), *(len(row.path) for row in self.rows)])
    lines = [f"{'leaf':{width}}  {'norm':>10}  {'share':>7}  {'non-finite':>10}"]
    for row in self.rows:
      share = "" if math.isnan(row.share) else f"{row.share:.1%}"
      lines.append(f"{row.path:{width}}  {row.norm:10.4g}  {share:>7}  {row.nonfinite:10d}")
    return "\n".join(lines)


def _is_optimizer_state(tree: Any) -> bool:
  """Whether a node of the tree is a state of optax or of this package: gradients hold none but masked nodes."""
  def is_state(node):
    return type(node).__module__.split(".")[0] in ("optax", "optax_globalclip") and not isinstance(node, optax.MaskedNode)
  return any(is_state(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_state))


def _check_concrete(arrays: list[jax.Array]) -> None:
  if any(isinstance(x, jax.core.Tracer) for x in arrays):
    raise TypeError("leaf_report: expected concrete arrays, got traced ones: call it outside of jit, on the state or the "
                    "gradients that came out")


def check_one(function: str, batch: tuple[int, ...]) -> None:
  """Raises for the state of a batch of optimizers."""
  if batch:
    raise ValueError(f"{function}: expected the state of one optimizer, got a batch of shape {batch}: take a member, "
                     "jax.tree.map(lambda x: x[i], opt_state)")


_WITH_MONITOR = "global_clip, per_tensor_clip and clipped_multi_steps record leaves with monitor=True"


def leaf_report(opt_state_or_tree: Any, *, stacked_axis: Any = None) -> LeafReport:
  """Which leaf made the gradient spike, or holds NaN or infinity.

  Args:
    opt_state_or_tree: an optimizer state with one `global_clip`, `per_tensor_clip` or `clipped_multi_steps` with
      `monitor=True` in it (`flax.nnx.Optimizer`'s included), which tells of the last update or window, from the pass
      that clipped it; or a tree of gradients, which is measured now. Concrete arrays, not traced ones.
    stacked_axis: of a tree of gradients, the axis along which leaves stack the parameters of several layers: as for
      `per_tensor_clip`. Each slice gets a row, "w/0", "w/1"; stacked leaves are copied into their slices first. (A
      state tells of slices where `per_tensor_clip` was given the axis.)

  Returns:
    A `LeafReport`: its `rows` are `LeafRow(path, norm, share, nonfinite)`, one for each leaf that counts. A share is the
    leaf's part of the squared norm of all finite leaves, 0 where that is 0.

  Raises:
    ValueError: for a state that records no leaves, or for several that do; for one that was restored as plain dicts; for
      a state with `stacked_axis`; for a leaf without the stacked axis, or with a sharded one on an Explicit mesh.
    TypeError: for a leaf of a dtype that `global_norm` does not know, naming its path; inside `jit`.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> print(ogc.leaf_report({"a": jnp.array([3.0]), "b": jnp.array([4.0]), "c": jnp.array([jnp.nan, 1.0])}))
    leaf        norm    share  non-finite
    c            nan                    1
    b              4    64.0%           0
    a              3    36.0%           0
  """
  states = find_states(opt_state_or_tree, ClipState)
  if stacked_axis is not None and (states or _is_optimizer_state(opt_state_or_tree)):
    raise ValueError("leaf_report: stacked_axis is for a tree of gradients; a state holds the slices of per_tensor_clip("
                     "..., stacked_axis=..., monitor=True)")
  if states:
    recorded = [state.leaf_metrics for state in states if state.leaf_metrics is not None]
    if len(recorded) != 1:
      raise ValueError("leaf_report: expected one clip that records leaves in the optimizer state, found "
                       f"{len(recorded)} ({_WITH_MONITOR})")
    fields = [plain(field) for field in recorded[0][:3]]
    _check_concrete(fields)
    norms, nonfinite, encoded = map(np.asarray, fields)
    check_one("leaf_report", norms.shape[:-1])
    paths = encoded.tobytes().decode().split("\n") if norms.size else []
  elif _is_optimizer_state(opt_state_or_tree):
    raise ValueError(f"leaf_report: the optimizer state holds no monitored clip ({_WITH_MONITOR})")
  else:
    tree = opt_state_or_tree
    check_restored(tree)
    _check_concrete(jax.tree.leaves(tree))
    leaves = _leaves.split_leaves(tree if stacked_axis is None else _stacked.split(tree, stacked_axis)[0])
    numbers = _ops.measure(leaves.arrays, leaf_norms=True)
    norms, nonfinite = np.asarray(numbers.norms)[1:], np.asarray(numbers.nonfinite)[1:]
    paths = _leaves.short_names(leaves.paths)
  norms = norms.astype(np.float64)
  finite = nonfinite == 0
  largest = max(norms[finite], default=0.0)
  # A norm beyond its dtype outweighs every other.
  relative = np.isinf(norms) if np.isinf(largest) else norms / (largest or 1.0)
  squares = np.square(relative.astype(np.float64))
  total = squares[finite].sum()
  rows = [LeafRow(path, float(norm), float(square / (total or 1.0)) if ok else math.nan, int(count))
          for path, norm, square, ok, count in zip(paths, norms, squares, finite, nonfinite)]
  return LeafReport(tuple(sorted(rows, key=lambda row: (-row.nonfinite, -row.norm))))
