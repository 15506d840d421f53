"""`global_clip`, `per_tensor_clip` and `clip_tree`: clipping by L2 norm as optax transformations, and by itself."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_globalclip import (
  _arguments,
  _monitor,
  _ops,
  _placement,
  _reference,
  _stacked,
  _thresholds,
)
from optax_globalclip._leaves import Leaves
from optax_globalclip._monitor import ClipState
from optax_globalclip._norm import placed_leaves
from optax_globalclip._thresholds import Clipped, ThresholdState
from optax_globalclip._types import AnyMesh, DTypeLike, MaxNorm, Monitor, Number, OnNonfinite, ScaleStage, Tree

# What becomes of a bad update.
POLICIES = {"propagate": _reference.PROPAGATE, "raise": _reference.PROPAGATE, "zero": _reference.ZERO}


class Where(NamedTuple):
  """What the caller says of meshes, before it is spread over the leaves."""
  axis_name: Any
  mesh: Any
  specs: Any


def raise_if_bad(leaves: Leaves, numbers: _ops.Numbers, loss_scale: jax.Array, max_norm: jax.Array) -> None:
  """Raises `FloatingPointError` for a bad update, naming what made it so; when run, if traced. Wants leaf norms."""
  names = leaves.names
  def check(bad, counts, loss_scale, max_norm):
    if bad:
      raise FloatingPointError("optax_globalclip: " + _reason(names, np.asarray(counts)[1:], loss_scale, max_norm))
  operands = _reference.is_bad(numbers.ops), numbers.nonfinite, loss_scale, max_norm
  if any(isinstance(x, jax.core.Tracer) for x in operands):
    jax.debug.callback(check, *operands)
  else:
    check(*operands)


def _reason(names: list[str], counts: np.ndarray, loss_scale, max_norm) -> str:
  if counts.any():
    return "non-finite gradients in " + ", ".join(f"{name} ({count} elements)"
                                                  for name, count in zip(names, counts) if count)
  if not _arguments.usable_scale(np.float32(loss_scale)):
    return f"loss_scale: expected a positive number that is finite and not subnormal in float32, got {loss_scale}"
  return f"max_norm: expected a number that is not negative and not NaN, got {max_norm}"


class Settings(NamedTuple):
  """The arguments of a clip, checked."""
  max_norm: Any
  loss_scale: Any
  on_nonfinite: str
  monitor: bool | str
  update_dtype: np.dtype | None
  where: Where
  options: _ops.Options

  @property
  def follows(self) -> bool:
    return _thresholds.follows(self.max_norm)

  @property
  def skips(self) -> bool:
    """Whether a bad update is to leave no trace: a step can see to that, a transformation in a chain can't."""
    return self.on_nonfinite == "skip"

  @property
  def zeroes(self) -> bool:
    return self.skips or POLICIES[self.on_nonfinite] == _reference.ZERO


def clip_leaves(settings: Settings, leaves: Leaves, placement: _placement.Placement, loss_scale: Any,
                state: ThresholdState = _thresholds.CONSTANT, *, scales: bool = True) -> Clipped:
  """What was found, and with `scales` the clipped leaves."""
  scaled = loss_scale is not None
  options = settings.options._replace(
      scales=scales, on_nonfinite=_reference.ZERO if settings.zeroes else _reference.PROPAGATE, divides=scaled,
      leaf_norms=settings.options.leaf_norms or settings.on_nonfinite == "raise",
      out_dtypes=tuple(_arguments.out_dtype(name, x, settings.update_dtype, scaled)
                       for name, x in zip(leaves.names, leaves.arrays)))
  loss_scale = _arguments.as_scalar(loss_scale if scaled else 1, np.float32)
  clipped = _thresholds.clip(settings.max_norm, state.rule_state, state.clip_count, leaves.arrays, loss_scale, options,
                             placement, like=state.threshold)
  if settings.on_nonfinite == "raise":
    raise_if_bad(leaves, clipped.numbers, loss_scale, clipped.limit)
  return clipped


def _check_state(max_norm: Any, state: Any, monitor: bool | str) -> None:
  """Raises for a state that is not one of `init`."""
  follows = _thresholds.follows(max_norm)
  if follows and not isinstance(state, ThresholdState):
    raise TypeError("state: with a schedule or rule for max_norm expected the ThresholdState that init returned, got "
                    f"{type(state).__name__}")
  if isinstance(state, ThresholdState):
    _thresholds.check_state(max_norm, state)
  clip_state = state.clip_state if follows else state
  if monitor and not isinstance(clip_state, ClipState):
    raise TypeError(f"state: with monitor={monitor!r} expected the ClipState that init returned, got "
                    f"{type(clip_state).__name__}")
  if isinstance(clip_state, ClipState):
    _monitor.check_state(clip_state, monitor)


def check(max_norm, *, per_leaf=False, loss_scale, on_nonfinite, monitor, update_dtype, scale_stage, axis_name, mesh,
          specs) -> Settings:
  """The arguments of `global_clip`, or of a step, which may skip. Raises for those that are none."""
  _thresholds.check(max_norm, per_leaf=per_leaf)
  _arguments.check_choice("scale_stage", scale_stage, ("auto", "kernel", "xla"))
  _placement.check_placement(axis_name, mesh, specs)
  if loss_scale is not None:
    _arguments.check_loss_scale(loss_scale)
  _arguments.check_choice("on_nonfinite", on_nonfinite, ("skip", *POLICIES))
  monitor = _monitor.check(monitor)
  options = _ops.Options(per_leaf=per_leaf, leaf_norms=bool(per_leaf or monitor), extremes=monitor is True,
                         stage=scale_stage)
  return Settings(max_norm, loss_scale, on_nonfinite, monitor, _arguments.check_dtype("update_dtype", update_dtype),
                  Where(axis_name, mesh, specs), options)


def init(settings: Settings, params: Any) -> Any:
  clip_state = _monitor.init(params, settings.monitor) if settings.monitor else None
  if settings.follows:
    first = _thresholds.init(settings.max_norm, params, per_leaf=settings.options.per_leaf)
    return first._replace(clip_state=clip_state)
  return clip_state if settings.monitor else optax.EmptyState()


def read(settings: Settings, state: Any, loss_scale: Any) -> tuple[Any, ThresholdState]:
  """The loss scale that is in force, and the state as a `ThresholdState`, whatever it is."""
  _check_state(settings.max_norm, state, settings.monitor)
  if loss_scale is None:
    loss_scale = settings.loss_scale
  else:
    _arguments.check_loss_scale(loss_scale)
  return loss_scale, state if settings.follows else _thresholds.CONSTANT._replace(clip_state=state)


def record(settings: Settings, state: ThresholdState, clipped: Clipped) -> Any:
  """The state after an update. Of one that was skipped only a monitor tells."""
  clip_state = optax.EmptyState()
  if settings.monitor:
    clip_state = _monitor.record(state.clip_state, clipped.numbers, clipped.limit, zeroes=settings.zeroes,
                                 skips=settings.skips)
  if not settings.follows:
    return clip_state
  before, after = state._replace(clip_state=None), state._replace(
      clip_count=optax.safe_increment(state.clip_count), rule_state=clipped.rule_state,
      threshold=clipped.threshold.astype(state.threshold.dtype), clip_state=None)
  if settings.skips:
    bad = _reference.is_bad(clipped.numbers.ops)
    after = jax.tree.map(lambda old, new: jnp.where(bad, old, new), before, after)
  return after._replace(clip_state=clip_state if settings.monitor else None)


def _make(per_leaf, max_norm, **arguments):
  settings = check(max_norm, per_leaf=per_leaf, **arguments)
  if settings.skips:
    raise ValueError("on_nonfinite='skip': a transformation cannot keep the optimizer behind it from running; "
                     "clipped_multi_steps(inner, max_norm) can, and clipped_adamw(...).step")

  def update_fn(updates, state, params=None, *, loss_scale=None, **extra):
    del params, extra
    loss_scale, followed = read(settings, state, loss_scale)
    leaves, placement = placed_leaves(updates, *settings.where)
    clipped = clip_leaves(settings, leaves, placement, loss_scale, followed)
    return leaves.rebuild(clipped.leaves), record(settings, followed, clipped)

  return optax.GradientTransformationExtraArgs(functools.partial(init, settings), update_fn)


def global_clip(
    max_norm: MaxNorm,
    *,
    loss_scale: Number | None = None,
    on_nonfinite: OnNonfinite = "propagate",
    monitor: Monitor = False,
    update_dtype: DTypeLike | None = None,
    scale_stage: ScaleStage = "auto",
    axis_name: Any = None,
    mesh: AnyMesh | None = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Clips updates by the L2 norm of all leaves as one vector.

  .. math:: g \leftarrow \begin{cases} g & \|g\| \le \text{max\_norm} \\
                                       g \cdot \text{max\_norm} / \|g\| & \text{otherwise} \end{cases}

  Replaces `optax.clip_by_global_norm`. The differences:

  1. The norm is right in every dtype and at every magnitude (there: inf for float16 [2000] * 9 and float32 [1e20] * 4,
     0 for float16 [1e-4] * 4, half of it for 1,024 bfloat16 leaves of [1]).
  2. At or below `max_norm` every update comes back bit for bit.
  3. A non-finite element makes every update NaN (there an infinite one: zeros beside one NaN), or does what
     `on_nonfinite` says.
  4. The gradients may be those of a scaled loss: with `loss_scale` s they are divided by s, rounded once, and `max_norm`
     speaks of the true gradients.

  Args:
    max_norm: the threshold, one of three. A number, at least 0: a Python, NumPy or JAX scalar, traced or not; 0 zeroes
      every update, `inf` never clips. A schedule, as optax has them: a function of the count of updates, 0 for the
      first and one more with each, bad ones too. Or a rule that follows the norms: `zclip`, `ema_clip`, `autoclip`, a
      `ThresholdRule` of your own. A traced number, or what a schedule or a rule returns, that is negative or NaN makes
      the update bad: see `on_nonfinite`.
    loss_scale: the gradients are of `loss_scale * loss`. A positive number here, or one for each call:
      `update(..., loss_scale=s)`, which wins. Float16 updates then come out as float32, where unscaled ones do not
      flush to zero. A traced scale that is not finite and positive, or is subnormal, makes the update bad: see
      `on_nonfinite`.
    on_nonfinite: what a bad update becomes: one with a NaN or infinite element anywhere, or with a traced scale or
      threshold that cannot be used. "propagate": NaN everywhere. "zero": zeros, and what follows in the chain still
      runs. "raise": `FloatingPointError` naming the leaves, inside `JaxRuntimeError` under `jit`; costs a host round
      trip each step.
    monitor: True keeps a `ClipState`, for `clip_metrics` and `leaf_report`. "leaves" keeps the same without
      `largest_element` and `zero_elements`: what version 0.1.0 kept under True, so that its checkpoints load.
    update_dtype: the dtype of the updates, instead of each leaf's own.
    scale_stage: "kernel" scales in place in native code, and touches nothing where nothing is clipped: for a clip on its
      own, as `clip_tree` is. "xla" leaves the scaling to XLA, which folds it into an elementwise optimizer that follows.
      "auto" chooses (BUILD.md has the rule).
    axis_name: inside `shard_map` with `check_vma=False` or `pmap`, the axes over which leaves are sharded: a name, a
      tuple of names, or a tree of those that is a prefix of the updates. Without it each device's leaves are taken for
      whole there, as they are after `pmean`. Under `check_vma=True` types say it, and `axis_name` can only restrict it.
    mesh: with `specs`, a mesh outside of `shard_map`. Sharded updates need neither to be right; with them the program
      can be exported by `jax.export` and kept in the persistent compilation cache (docs/sharding.md).
    specs: the `PartitionSpec` of every leaf, or a tree of them that is a prefix of the updates. Updates laid out
      otherwise are moved.

  Returns:
    A transformation whose `update(updates, state, params=None, *, loss_scale=None, **extra)` returns updates of the
    same structure and shapes. Leaves: float16, bfloat16, float32, float64, complex64, complex128 in any mixture;
    integer, bool and float0 leaves, `None`, masked nodes and empty leaves pass through.

    Its state is `optax.EmptyState`, or a `ClipState` with `monitor`. With a schedule or a rule it is a `ThresholdState`,
    which holds the last threshold, what the rule goes by, and that `ClipState`.

    On several devices every one gets the same factor, and no update moves: two all-reduces of at most 64 bytes for the
    whole tree (with `monitor=True` or "raise", of a few numbers a leaf).

  Raises:
    ValueError: a `max_norm` that is negative or NaN, or the rule `adagc`, which is for `per_tensor_clip`; a `loss_scale`
      that is not finite and positive, an unknown option; `mesh` without `specs`; in `update`, an `axis_name`, `mesh` or
      `specs` that do not fit, naming the leaf, leaves on different devices that no mesh joins, and the state of another
      rule.
    TypeError: a `max_norm` that is neither number, schedule nor rule: a rule's class, say, or a rule that is callable; a
      `loss_scale` that is no number; an unknown `update_dtype`; in `update`, a leaf of another dtype, named by its path,
      no state where there is a schedule, a rule or `monitor`, and a rule's result of another shape, dtype or structure.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_globalclip as ogc
    >>> tx = ogc.global_clip(1.0)
    >>> updates, _ = tx.update({"w": jnp.array([6., 8.])}, tx.init(None))
    >>> updates["w"].tolist()
    [0.6000000238418579, 0.800000011920929]

    The threshold falls from 2 to 1 over 100 updates:

    >>> tx = ogc.global_clip(optax.linear_schedule(2.0, 1.0, 100))
    >>> _, state = tx.update({"w": jnp.array([6., 8.])}, tx.init({"w": jnp.zeros(2)}))
    >>> float(state.threshold), int(state.clip_count)
    (2.0, 1)

  References:
    Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013, algorithm 1.
  """
  return _make(False, max_norm, loss_scale=loss_scale, on_nonfinite=on_nonfinite, monitor=monitor,
               update_dtype=update_dtype, scale_stage=scale_stage, axis_name=axis_name, mesh=mesh, specs=specs)


def per_tensor_clip(
    max_norm: MaxNorm,
    *,
    loss_scale: Number | None = None,
    on_nonfinite: OnNonfinite = "propagate",
    monitor: Monitor = False,
    update_dtype: DTypeLike | None = None,
    scale_stage: ScaleStage = "auto",
    stacked_axis: Any = None,
    axis_name: Any = None,
    mesh: AnyMesh | None = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Clips every leaf by its own L2 norm.

  .. math:: g_i \leftarrow g_i \cdot \min(1, \text{max\_norm} / \|g_i\|)

  The direction of the whole gradient changes, unlike under `global_clip`. `on_nonfinite` still speaks of the whole
  tree: one non-finite element anywhere reaches every leaf.

  Args:
    max_norm: as for `global_clip`. A number or a schedule is one threshold for all leaves; a rule (`adagc` too) has one
      for each leaf, by that leaf's own norms.
    loss_scale: as for `global_clip`.
    on_nonfinite: as for `global_clip`.
    monitor: as for `global_clip`; `global_norm` is still that of the whole tree, `clip_factor` the smallest of all.
    update_dtype: as for `global_clip`.
    scale_stage: as for `global_clip`.
    stacked_axis: the axis along which leaves stack the parameters of several layers, as those of `flax.linen.scan` do:
      an int, or a tree of ints and None that is a prefix of the updates, None for leaves that are not stacked. Each
      slice is then clipped by its own norm, and is a leaf of its own to a rule and to `leaf_report`, as "w/0", "w/1".
      This copies a stacked leaf twice: into its slices, and back into one array. The stacked axis of a leaf on an
      Explicit mesh must not be sharded; on an Auto mesh XLA then moves the slices between devices.
    axis_name: as for `global_clip`.
    mesh: as for `global_clip`.
    specs: as for `global_clip`.

  Returns:
    A transformation, as `global_clip`.

  Raises:
    ValueError: as `global_clip`; a leaf without the stacked axis, or with a sharded one on an Explicit mesh;
      `stacked_axis` with `axis_name` or `mesh`, and inside `shard_map` or `pmap`.
    TypeError: as `global_clip`; a `stacked_axis` that is neither an int, nor None, nor a tree of those.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> tx = ogc.per_tensor_clip(1.0)
    >>> updates, _ = tx.update({"a": jnp.array([6., 8.]), "b": jnp.array([0.5])}, tx.init(None))
    >>> updates["b"].tolist()
    [0.5]

    A threshold for each leaf, in the order of `jax.tree.leaves`:

    >>> tx = ogc.per_tensor_clip(ogc.ema_clip(factor=2.0, warmup=1))
    >>> params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    >>> _, state = tx.update({"a": jnp.array([3.]), "b": jnp.array([1.])}, tx.init(params))
    >>> updates, state = tx.update({"a": jnp.array([3.]), "b": jnp.array([3.])}, state)
    >>> updates["b"].tolist(), state.threshold.tolist()
    ([2.0], [6.0, 2.0])

    Two layers in one leaf:

    >>> tx = ogc.per_tensor_clip(1.0, stacked_axis=0)
    >>> updates, _ = tx.update(jnp.array([[6., 8.], [0.5, 0.]]), tx.init(None))
    >>> updates.tolist()
    [[0.6000000238418579, 0.800000011920929], [0.5, 0.0]]
  """
  if stacked_axis is not None and (axis_name is not None or mesh is not None):
    raise ValueError("stacked_axis: expected neither axis_name nor mesh with it, which do not say whether the stacked axis "
                     "is sharded")
  tx = _make(True, max_norm, loss_scale=loss_scale, on_nonfinite=on_nonfinite, monitor=monitor,
             update_dtype=update_dtype, scale_stage=scale_stage, axis_name=axis_name, mesh=mesh, specs=specs)
  return tx if stacked_axis is None else _stacked.by_slice(tx, stacked_axis)


def clip_tree(
    tree: Tree,
    max_norm: Number,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    axis_name: Any = None,
    mesh: AnyMesh | None = None,
    specs: Any = None,
) -> tuple[Tree, jax.Array]:
  r"""Clips a tree by its global L2 norm and returns the norm beside it, as `torch.nn.utils.clip_grad_norm_` does.

  .. math:: g \leftarrow g \cdot \min(1, \text{max\_norm} / \|g\|)

  Where it differs from torch's: no epsilon in the denominator, right at every magnitude, and a non-finite element
  makes the whole tree NaN. The scaling is done in place in native code where `tree` is donated.

  Args:
    tree: any pytree of gradients, as for `global_clip`.
    max_norm: a number, as for `global_clip`.
    norm_type: 2; other norms are refused.
    error_if_nonfinite: raise `FloatingPointError` naming the leaves where one holds NaN or infinity (inside
      `JaxRuntimeError` under `jit`).
    axis_name: as for `global_clip`.
    mesh: as for `global_clip`.
    specs: as for `global_clip`.

  Returns:
    `(clipped tree, norm before the clip)`; the norm is float32, or float64 where a leaf is float64 or complex128.

  Raises:
    ValueError: a `norm_type` other than 2, a negative or NaN `max_norm`; leaves and meshes as for `global_clip`.
    TypeError: as `global_clip`.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> clipped, norm = ogc.clip_tree([jnp.array([3., 4.])], 1.0)
    >>> float(norm)
    5.0
  """
  _arguments.check_max_norm(max_norm)
  if isinstance(norm_type, jax.Array) or norm_type not in (2, 2.0):
    raise ValueError(f"norm_type: clip_tree clips by the L2 norm (norm_type=2) alone, got {norm_type!r}")
  settings = check(max_norm, loss_scale=None, on_nonfinite="raise" if error_if_nonfinite else "propagate", monitor=False,
                   update_dtype=None, scale_stage="kernel", axis_name=axis_name, mesh=mesh, specs=specs)
  leaves, placement = placed_leaves(tree, *settings.where)
  clipped = clip_leaves(settings, leaves, placement, None)
  return leaves.rebuild(clipped.leaves), clipped.numbers.norms[0]
