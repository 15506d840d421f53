"""What `max_norm` may be: a number, a schedule of a count, or a rule that follows the norms; and the clip by it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_globalclip import _arguments, _leaves, _ops, _reference
from optax_globalclip._monitor import ClipState
from optax_globalclip._spikes import SpikeRule, SpikeState


class ThresholdState(NamedTuple):
  """What a clip keeps whose threshold is a schedule or a rule, or that skips spikes. What is not needed is None.

  Structure, shapes and dtypes never change from `init` on. T is the dtype of the norms: float32, or float64 where a
  parameter is float64 or complex128.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_globalclip as ogc
    >>> tx = ogc.global_clip(lambda count: 2.0 + count)
    >>> _, state = tx.update([jnp.array([5.0])], tx.init([jnp.zeros(1)]))
    >>> isinstance(state, ogc.ThresholdState), int(state.clip_count), float(optax.tree.get(state, "threshold"))
    (True, 1, 2.0)
  """
  clip_count: jax.Array | None     # int32: updates so far, what a schedule is called with; windows have optimizer_step
  rule_state: Any
  threshold: jax.Array | None      # T[] or, under `per_tensor_clip`, T[n]: what the last norm was compared with
  spike_state: SpikeState | None
  clip_state: ClipState | None     # where the clip is monitored


CONSTANT = ThresholdState(None, None, None, None, None)


def check(max_norm: Any, *, per_leaf: bool = False) -> None:
  """Raises for what is neither a number, nor a schedule, nor a rule."""
  if isinstance(max_norm, type):
    raise TypeError(f"max_norm: expected a number, a schedule or a rule, got the class {max_norm.__name__}"
                    + (f": make an instance of it, {max_norm.__name__}()" if hasattr(max_norm, "update") else ""))
  if isinstance(max_norm, optax.GradientTransformation):
    raise TypeError("max_norm: expected a number, a schedule or a rule, got a GradientTransformation")
  if isinstance(max_norm, SpikeRule):
    raise TypeError("max_norm: a SpikeRule gives no threshold, it says which windows to leave out: expected it as "
                    "clipped_multi_steps(..., skip_spikes=...)")
  if is_rule(max_norm):
    if callable(max_norm):
      raise TypeError(f"max_norm: the rule {type(max_norm).__name__} must not be callable: what is, is a schedule, and "
                      "optax.inject_hyperparams calls it")
    if getattr(max_norm, "leaves_only", False) and not per_leaf:
      raise ValueError(f"max_norm: {type(max_norm).__name__} has a threshold for each leaf: expected per_tensor_clip")
  elif not callable(max_norm):
    _arguments.check_max_norm(max_norm, "; a schedule or a rule will do too")


def is_rule(max_norm: Any) -> bool:
  return not isinstance(max_norm, jax.Array) and hasattr(max_norm, "init") and hasattr(max_norm, "update")


def follows(max_norm: Any) -> bool:
  """Whether the threshold is no constant, and needs a state."""
  return is_rule(max_norm) or callable(max_norm)


def init(max_norm: Any, params: Any, *, per_leaf: bool = False, counts: bool = True) -> ThresholdState:
  """The first state, less what others put into it: `spike_state` and `clip_state`."""
  if not follows(max_norm):
    return CONSTANT
  like = _like(params, per_leaf)
  rule_state = jax.tree.map(lambda x: _leaves.strong(jnp.asarray(x)), max_norm.init(like)) if is_rule(max_norm) else None
  # A schedule has one threshold for all leaves.
  threshold = jnp.zeros(like.shape if is_rule(max_norm) else (), like.dtype)
  return ThresholdState(jnp.zeros((), jnp.int32) if counts else None, rule_state, threshold, None, None)


def _like(params: Any, per_leaf: bool) -> jax.ShapeDtypeStruct:
  keyed = jax.tree_util.tree_flatten_with_path(params)[0]
  n = sum(_leaves.counts("params" + jax.tree_util.keystr(path), leaf) for path, leaf in keyed)
  return jax.ShapeDtypeStruct((n,) if per_leaf else (), _leaves.norm_dtype([leaf for _, leaf in keyed]))


def check_state(max_norm: Any, state: ThresholdState, again: str = "call init again") -> None:
  """Raises for a state that was made with another kind of threshold."""
  if follows(max_norm) != (state.threshold is not None):
    made, wanted = ("a number", "a schedule or a rule") if follows(max_norm) else ("a schedule or a rule", "a number")
    raise ValueError(f"state: made with {made} for max_norm, expected one made with {wanted}: {again}")
  if is_rule(max_norm):
    like = jax.ShapeDtypeStruct(state.threshold.shape, state.threshold.dtype)
    check_part("max_norm", max_norm, state.rule_state, jax.eval_shape(lambda: max_norm.init(like)), again)


def check_part(argument: str, rule: Any, got: Any, first: Any, again: str) -> None:
  """Raises for a rule's part of a state that has another structure or shape than its `init` gives it."""
  made = f"state: made with another {argument} than {rule!r}"
  if jax.tree.structure(got) != jax.tree.structure(first):
    raise ValueError(f"{made}: expected the structure {jax.tree.structure(first)}, got {jax.tree.structure(got)}: {again}")
  for (path, x), like in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(first)):
    if np.shape(x) != like.shape:
      raise ValueError(f"{made}: {jax.tree_util.keystr(path).lstrip('.')}: expected shape {like.shape}, got {np.shape(x)}: "
                       f"{again}")


class Clipped(NamedTuple):
  numbers: _ops.Numbers
  leaves: list[jax.Array]
  limit: jax.Array      # T[], or T[1 + n]: what norms were compared with
  rule_state: Any       # of a rule, after this update
  threshold: jax.Array  # as the state keeps it


def clip(max_norm: Any, rule_state: Any, count: jax.Array | None, leaves: list[jax.Array], loss_scale: jax.Array,
         options: _ops.Options, placement, *, is_spike: Callable[[_ops.Numbers], Any] = lambda numbers: False,
         like: jax.Array | None = None) -> Clipped:
  """The leaves clipped by a number, by what a schedule says at `count`, or by what a rule says of their norms.

  The first two are one call; a rule stands between the call that measures and the scaling. `like` is the threshold in
  the state, whose dtype a rule works in.
  """
  dtype = _leaves.norm_dtype(leaves)
  if not is_rule(max_norm):
    limit = _arguments.as_scalar(_arguments.at("max_norm", max_norm, count), dtype)
    numbers, clipped = _ops.clip(leaves, limit, loss_scale, options, placement)
    return Clipped(numbers, clipped, limit, rule_state, limit)
  numbers = _ops.clip(leaves, 0, loss_scale, options._replace(scales=False), placement)[0]
  threshold, rule_state = _of_rule(max_norm, rule_state, numbers, options.per_leaf, is_spike(numbers), like)
  limit = threshold.astype(dtype)
  if options.per_leaf:
    limit = jnp.concatenate([jnp.ones((1,), dtype), limit])  # the tree as a whole is not clipped
  ops, clipped = _ops.clip_at(numbers, limit, loss_scale, leaves, options, placement)
  return Clipped(numbers._replace(ops=ops), clipped, limit, rule_state, threshold)


def _of_rule(rule: Any, state: Any, numbers: _ops.Numbers, per_leaf: bool, spike: Any, like: jax.Array):
  norms = _reference.flush((numbers.norms[1:] if per_leaf else numbers.norms[0]).astype(like.dtype))
  if norms.shape != like.shape:
    raise ValueError(f"state: init made a rule for {like.size} leaves of its parameters, but the updates have {norms.size}: "
                     "initialise with the tree that updates are of")
  # An infinity stays one, and is not taken for a number, in a dtype that norms are narrowed to.
  enters = ~_reference.is_bad(numbers.ops) & ~jnp.asarray(spike) & (norms < np.inf)
  threshold, after = rule.update(state, norms, enters, global_norm=_reference.flush(numbers.norms[0].astype(like.dtype)))
  name = type(rule).__name__
  return _checked(f"max_norm: the threshold of {name}", threshold, like), _checked_state(name, after, state)


def _checked(what: str, x: Any, like: jax.Array) -> jax.Array:
  x = jnp.asarray(x)
  weak = getattr(x, "weak_type", False)
  if x.shape != like.shape or (x.dtype != like.dtype and not weak):
    raise TypeError(f"{what}: expected shape {like.shape} and dtype {like.dtype}, got {x.shape} and {x.dtype}")
  return x.astype(like.dtype)


def _checked_state(name: str, after: Any, before: Any) -> Any:
  if jax.tree.structure(after) != jax.tree.structure(before):
    raise TypeError(f"max_norm: the state of {name}: expected the structure that its init returned, "
                    f"{jax.tree.structure(before)}, got {jax.tree.structure(after)}")
  return jax.tree_util.tree_map_with_path(
      lambda path, x, like: _checked(f"max_norm: the state of {name}{jax.tree_util.keystr(path)}", x, like), after, before)
