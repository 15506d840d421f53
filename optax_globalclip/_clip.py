"""`global_clip`, `per_tensor_clip` and `clip_tree`: clipping by L2 norm as optax transformations, and by itself."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_globalclip import _norm, _partition, _reference

POLICIES = {"propagate": _reference.PROPAGATE, "raise": _reference.PROPAGATE, "zero": _reference.ZERO}


class LeafMetrics(NamedTuple):
  """The norm of each leaf of the last update and its number of non-finite elements, for `leaf_report`."""
  norms: jax.Array      # T[n], before the clip, in true units
  nonfinite: jax.Array  # int32[n]
  paths: jax.Array      # uint8: the leaves' paths, a line each, so that a state says by itself which leaf is which


class ClipState(NamedTuple):
  """What `monitor=True` records, in true units: of the last update, and counted since `init`."""
  global_norm: jax.Array           # before the clip
  clip_factor: jax.Array           # 1 where nothing was clipped; of several factors the smallest; 0 before the first
  steps: jax.Array
  clipped_steps: jax.Array
  nonfinite_steps: jax.Array
  consecutive_nonfinite: jax.Array
  leaf_metrics: LeafMetrics | None = None


def check_number(name: str, value: Any, hint: str = "") -> None:
  """A Python or NumPy scalar, or a JAX scalar of any float or int type; raises `TypeError` otherwise."""
  if isinstance(value, jax.Array):
    good = value.ndim == 0 and (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer))
    got = f"an array of shape {value.shape} and dtype {value.dtype}"
  else:
    array = np.asarray(value)
    good = array.ndim == 0 and (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
                                or (isinstance(value, int) and not isinstance(value, bool)))
    got = repr(value)
  if not good:
    raise TypeError(f"{name}: expected a number (a scalar of a float or int type{hint}), got {got}")


def to_float(value: Any) -> float:
  """A Python or NumPy number as a float; infinite where it is beyond one."""
  try:
    return float(value)
  except OverflowError:
    return np.inf if value > 0 else -np.inf


def check_max_norm(max_norm: Any) -> None:
  check_number("max_norm", max_norm)
  if not isinstance(max_norm, jax.Array) and not to_float(max_norm) >= 0:
    raise ValueError(f"max_norm: expected a number that is not negative and not NaN, got {max_norm!r}")


def check_loss_scale(loss_scale: Any) -> None:
  check_number("loss_scale", loss_scale, "; clipped_multi_steps takes a DynamicLossScale too")
  if not isinstance(loss_scale, jax.Array):
    with np.errstate(over="ignore"):
      as_float32 = np.float32(to_float(loss_scale))
    if not np.finfo(np.float32).tiny <= as_float32 < np.inf:
      raise ValueError("loss_scale: expected a positive number that is finite and not subnormal in float32, got "
                       f"{loss_scale!r}")


def as_scalar(value: Any, dtype) -> jax.Array:
  """A number as a scalar of `dtype`, without reading it where it is traced."""
  if isinstance(value, jax.Array):
    return value.astype(dtype)
  with np.errstate(over="ignore"):
    return jnp.asarray(np.float64(to_float(value)).astype(dtype))


def check_update_dtype(update_dtype: Any) -> np.dtype | None:
  if update_dtype is None:
    return None
  try:
    dtype = jnp.dtype(update_dtype)
  except TypeError:
    dtype = None
  if isinstance(update_dtype, (bool, int, float)) or dtype is None or str(dtype) not in _norm.SUPPORTED:
    raise TypeError(f"update_dtype: expected a dtype or the name of one of {', '.join(_norm.SUPPORTED)}; "
                    f"got {update_dtype!r}")
  if jax.dtypes.canonicalize_dtype(dtype) != dtype:
    raise TypeError(f"update_dtype: {dtype} needs jax_enable_x64")
  return dtype


def check_choice(name: str, value: Any, choices) -> None:
  if value not in choices:
    raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def out_dtype(name: str, leaf: jax.Array, update_dtype: np.dtype | None, scaled: bool) -> np.dtype:
  """The dtype of a leaf's update. A float16 gradient of a scaled loss would flush to zero once unscaled."""
  if update_dtype is None:
    return np.dtype(np.float32) if scaled and leaf.dtype == np.float16 else leaf.dtype
  if jnp.issubdtype(update_dtype, jnp.complexfloating) != jnp.issubdtype(leaf.dtype, jnp.complexfloating):
    raise TypeError(f"{name}: update_dtype {update_dtype} does not hold updates of dtype {leaf.dtype}")
  return update_dtype


def raise_if(paths: list[str], nonfinite: jax.Array) -> None:
  """Raises `FloatingPointError` naming the leaves whose count of non-finite elements is not zero; when run, if traced."""
  def check(counts):
    counts = np.asarray(counts)
    if counts.any():
      named = ", ".join(f"{path} ({count} elements)" for path, count in zip(paths, counts) if count)
      raise FloatingPointError(f"optax_globalclip: non-finite gradients in {named}")
  if isinstance(nonfinite, jax.core.Tracer):
    jax.debug.callback(check, nonfinite)
  else:
    check(nonfinite)


def _clip_leaves(updates, max_norm, loss_scale, *, per_leaf, leaf_norms, on_nonfinite, update_dtype, scale_stage,
                 axis_name, mesh, specs):
  """`(updates, norms, nonfinite, max_norm T[])`; norms and nonfinite as from `_norm.clip`."""
  leaves = _norm.split_leaves(updates)
  scaled = loss_scale is not None
  dtype = _reference.norm_dtype(leaves.arrays)
  options = _norm.Options(
      per_leaf=per_leaf, on_nonfinite=POLICIES[on_nonfinite], stage=scale_stage, divides=scaled,
      leaf_norms=leaf_norms or on_nonfinite == "raise", **_partition.place(leaves, axis_name, mesh, specs),
      out_dtypes=tuple(out_dtype(p, x, update_dtype, scaled) for p, x in zip(leaves.paths, leaves.arrays)))
  max_norm = as_scalar(max_norm, dtype)
  norms, nonfinite, clipped = _norm.clip(leaves.arrays, max_norm, as_scalar(loss_scale if scaled else 1, np.float32),
                                         options)
  if on_nonfinite == "raise":
    raise_if(leaves.paths, nonfinite)
  return leaves.rebuild(clipped), norms, nonfinite, max_norm


def clip_factor(norms, max_norm, nonfinite_factor, any_nonfinite):
  """The smallest factor of those that `norms` and `max_norm` give: max_norm / norm where the norm is above it, else 1."""
  factors = jnp.where(norms <= max_norm, jnp.ones_like(norms), max_norm / norms)
  smallest = jnp.min(factors, initial=1)
  return jnp.where(any_nonfinite, np.asarray(nonfinite_factor, norms.dtype), smallest)


def monitored(state: ClipState, norm, judged, bad, max_norm, *, zeroes: bool) -> ClipState:
  """The record after an update of global norm `norm`; `judged` are the norms that were compared with `max_norm`."""
  clipped = ~bad & jnp.any(judged > max_norm)
  factor = clip_factor(judged, max_norm, 0 if zeroes else jnp.nan, bad)
  def count_if(condition, counter):
    return jnp.where(condition, optax.safe_increment(counter), counter)
  return ClipState(
      global_norm=norm.astype(state.global_norm.dtype),
      clip_factor=factor.astype(state.clip_factor.dtype),
      steps=optax.safe_increment(state.steps),
      clipped_steps=count_if(clipped, state.clipped_steps),
      nonfinite_steps=count_if(bad, state.nonfinite_steps),
      consecutive_nonfinite=jnp.where(bad, optax.safe_increment(state.consecutive_nonfinite), 0),
      leaf_metrics=state.leaf_metrics)


def init_monitor(params: Any, *, leaves: bool) -> ClipState:
  dtypes = set(map(_norm.dtype_of, jax.tree.leaves(params)))
  dtype = np.float64 if dtypes & {np.dtype(np.float64), np.dtype(np.complex128)} else np.float32
  metrics = None
  if leaves:
    keyed = jax.tree_util.tree_flatten_with_path(params)[0]
    paths = [_norm.short_path(path) for path, leaf in keyed
             if _norm.counts("params" + jax.tree_util.keystr(path), leaf)]
    metrics = LeafMetrics(jnp.zeros(len(paths), dtype), jnp.zeros(len(paths), jnp.int32),
                          jnp.asarray(np.frombuffer("\n".join(paths).encode(), np.uint8)))
  # One buffer a field: a donated state must not hold the same one twice.
  return ClipState(jnp.zeros((), dtype), jnp.zeros((), dtype), *(jnp.zeros((), jnp.int32) for _ in range(4)), metrics)


def monitored_leaves(state: ClipState, norms, nonfinite) -> ClipState:
  """The state with the numbers of each leaf, norms T[n] and counts int32[n], recorded."""
  metrics = state.leaf_metrics
  if norms.shape != metrics.norms.shape:
    raise ValueError(f"state: init recorded {metrics.norms.size} leaves of its parameters, but the updates have "
                     f"{norms.size}: with monitor=True initialise with the tree that updates are of")
  return state._replace(leaf_metrics=metrics._replace(norms=norms.astype(metrics.norms.dtype), nonfinite=nonfinite))


def check_options(max_norm: Any, scale_stage: Any) -> None:
  check_max_norm(max_norm)
  check_choice("scale_stage", scale_stage, ("auto", "kernel", "xla"))


def _make(per_leaf, max_norm, *, loss_scale, on_nonfinite, monitor, update_dtype, scale_stage, axis_name, mesh, specs):
  check_options(max_norm, scale_stage)
  _partition.check_placement(axis_name, mesh, specs)
  if loss_scale is not None:
    check_loss_scale(loss_scale)
  if on_nonfinite == "skip":
    raise ValueError("on_nonfinite='skip': a transformation cannot keep the optimizer behind it from running; "
                     "clipped_multi_steps(inner, max_norm) can")
  check_choice("on_nonfinite", on_nonfinite, POLICIES)
  update_dtype = check_update_dtype(update_dtype)
  static_loss_scale = loss_scale

  def init_fn(params):
    return init_monitor(params, leaves=True) if monitor else optax.EmptyState()

  def update_fn(updates, state, params=None, *, loss_scale=None, **extra):
    del params, extra
    if monitor and not isinstance(state, ClipState):
      raise TypeError(f"state: with monitor=True expected the ClipState that init returned, got {type(state).__name__}")
    if loss_scale is None:
      loss_scale = static_loss_scale
    else:
      check_loss_scale(loss_scale)
    updates, norms, nonfinite, limit = _clip_leaves(
        updates, max_norm, loss_scale, per_leaf=per_leaf, leaf_norms=per_leaf or monitor, on_nonfinite=on_nonfinite,
        update_dtype=update_dtype, scale_stage=scale_stage, axis_name=axis_name, mesh=mesh, specs=specs)
    if not monitor:
      return updates, optax.EmptyState()
    state = monitored_leaves(state, norms[1:], nonfinite)
    judged = norms[1:] if per_leaf else norms[:1]
    return updates, monitored(state, norms[0], judged, jnp.any(nonfinite > 0), limit, zeroes=on_nonfinite == "zero")

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def global_clip(
    max_norm,
    *,
    loss_scale=None,
    on_nonfinite: str = "propagate",
    monitor: bool = False,
    update_dtype=None,
    scale_stage: str = "auto",
    axis_name: Any = None,
    mesh: Any = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Clips updates by the L2 norm of all leaves as one vector.

  .. math:: g \leftarrow \begin{cases} g & \|g\| \le \text{max\_norm} \\
                                       g \cdot \text{max\_norm} / \|g\| & \text{otherwise} \end{cases}

  Stands where `optax.clip_by_global_norm` stood. The differences:

  1. The norm is right in every dtype and at every magnitude (there: inf for float16 [2000] * 9 and float32 [1e20] * 4,
     0 for float16 [1e-4] * 4, half of it for 1,024 bfloat16 leaves of [1]).
  2. At or below `max_norm` every update comes back bit for bit.
  3. A non-finite element makes every update NaN (there an infinite one: zeros beside one NaN), or does what
     `on_nonfinite` says.
  4. The gradients may be those of a scaled loss: with `loss_scale` s they are divided by s, rounded once, and `max_norm`
     speaks of the true gradients.

  Args:
    max_norm: a number, at least 0; a Python, NumPy or JAX scalar, traced or not. 0 zeroes every update, `inf` never
      clips. A traced negative or NaN value makes every update NaN.
    loss_scale: the gradients are of `loss_scale * loss`. A positive number here, or one for each call:
      `update(..., loss_scale=s)`, which wins. Float16 updates then come out as float32, where unscaled ones do not
      flush to zero. A traced scale that is not finite and positive makes every update NaN.
    on_nonfinite: what one NaN or infinite element does. "propagate": every update becomes NaN. "zero": every update
      becomes zero, and what follows in the chain still runs. "raise": `FloatingPointError` naming the leaves, inside
      `JaxRuntimeError` under `jit`; costs a host round trip each step.
    monitor: keep a `ClipState` for `clip_metrics` and `leaf_report` instead of `optax.EmptyState`.
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

    On several devices every one gets the same factor, and no update moves: two all-reduces of at most 64 bytes for the
    whole tree (with `monitor=True` or "raise", of a few numbers a leaf).

  Raises:
    ValueError: a negative or NaN `max_norm`, a `loss_scale` that is not finite and positive, an unknown option; `mesh`
      without `specs`; in `update`, an `axis_name`, `mesh` or `specs` that do not fit, naming the leaf, and leaves on
      different devices that no mesh joins.
    TypeError: a `max_norm` or `loss_scale` that is no number, an unknown `update_dtype`, or (in `update`) a leaf of
      another dtype, named by its path.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_globalclip as ogc
    >>> tx = ogc.global_clip(1.0)
    >>> updates, _ = tx.update({"w": jnp.array([6., 8.])}, tx.init(None))
    >>> updates["w"].tolist()
    [0.6000000238418579, 0.800000011920929]

  References:
    Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013, algorithm 1.
  """
  return _make(False, max_norm, loss_scale=loss_scale, on_nonfinite=on_nonfinite, monitor=monitor,
               update_dtype=update_dtype, scale_stage=scale_stage, axis_name=axis_name, mesh=mesh, specs=specs)


def per_tensor_clip(
    max_norm,
    *,
    loss_scale=None,
    on_nonfinite: str = "propagate",
    monitor: bool = False,
    update_dtype=None,
    scale_stage: str = "auto",
    axis_name: Any = None,
    mesh: Any = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Clips every leaf by its own L2 norm.

  .. math:: g_i \leftarrow g_i \cdot \min(1, \text{max\_norm} / \|g_i\|)

  The direction of the whole gradient changes, unlike under `global_clip`. `on_nonfinite` still speaks of the whole
  tree: one non-finite element anywhere reaches every leaf.

  Args:
    max_norm: as for `global_clip`, one number for all leaves.
    loss_scale: as for `global_clip`.
    on_nonfinite: as for `global_clip`.
    monitor: as for `global_clip`; `global_norm` is still that of the whole tree, `clip_factor` the smallest of all.
    update_dtype: as for `global_clip`.
    scale_stage: as for `global_clip`.
    axis_name: as for `global_clip`.
    mesh: as for `global_clip`.
    specs: as for `global_clip`.

  Returns:
    A transformation, as `global_clip`.

  Raises:
    ValueError: as `global_clip`.
    TypeError: as `global_clip`.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> tx = ogc.per_tensor_clip(1.0)
    >>> updates, _ = tx.update({"a": jnp.array([6., 8.]), "b": jnp.array([0.5])}, tx.init(None))
    >>> updates["b"].tolist()
    [0.5]
  """
  return _make(True, max_norm, loss_scale=loss_scale, on_nonfinite=on_nonfinite, monitor=monitor,
               update_dtype=update_dtype, scale_stage=scale_stage, axis_name=axis_name, mesh=mesh, specs=specs)


def clip_tree(
    tree: Any,
    max_norm,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    axis_name: Any = None,
    mesh: Any = None,
    specs: Any = None,
) -> tuple[Any, jax.Array]:
  r"""Clips a tree by its global L2 norm and returns the norm beside it, as `torch.nn.utils.clip_grad_norm_` does.

  .. math:: g \leftarrow g \cdot \min(1, \text{max\_norm} / \|g\|)

  Where it differs from torch's: no epsilon in the denominator, right at every magnitude, and a non-finite element
  makes the whole tree NaN. The scaling is done in place in native code where `tree` is donated.

  Args:
    tree: any pytree of gradients, as for `global_clip`.
    max_norm: as for `global_clip`.
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
  check_max_norm(max_norm)
  if isinstance(norm_type, jax.Array) or norm_type not in (2, 2.0):
    raise ValueError(f"norm_type: clip_tree clips by the L2 norm (norm_type=2) alone, got {norm_type!r}")
  _partition.check_placement(axis_name, mesh, specs)
  tree, norms, _, _ = _clip_leaves(tree, max_norm, None, per_leaf=False, leaf_norms=False,
                                   on_nonfinite="raise" if error_if_nonfinite else "propagate", update_dtype=None,
                                   scale_stage="kernel", axis_name=axis_name, mesh=mesh, specs=specs)
  return tree, norms[0]
