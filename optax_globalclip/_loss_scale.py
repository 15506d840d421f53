"""`DynamicLossScale`: its configuration, its moving part, and the one rule that moves it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_globalclip._arguments import as_dtype, to_float, usable_scale


class LossScaleState(NamedTuple):
  """The moving part of a loss scale; for a static one `good_windows` stays 0."""
  loss_scale: jax.Array    # float32, the scale in force
  good_windows: jax.Array  # int32, finite windows since the scale last changed


class HysteresisState(NamedTuple):
  """The same where `hysteresis` is above 1. A class of its own: a checkpoint without the last field still loads."""
  loss_scale: jax.Array
  good_windows: jax.Array
  bad_windows: jax.Array   # int32, non-finite windows since the scale last grew


SCALE_STATES = (LossScaleState, HysteresisState)


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
  r"""A loss scale that backs off after a non-finite window and grows after a run of finite ones.

  .. math:: S \leftarrow \begin{cases}
      \max(S \cdot \text{backoff\_factor}, \text{minimum}) & \text{after a non-finite window} \\
      \min(S \cdot \text{growth\_factor}, \text{maximum}) & \text{after growth\_interval finite ones in a row} \\
      S & \text{otherwise} \end{cases}

  All scales are float32. Defaults are those of `torch.amp.GradScaler`, with a smaller start, a floor and a ceiling.

  Args:
    initial: the first scale, within [minimum, maximum].
    growth_factor: at least 1.
    backoff_factor: above 0, below 1.
    growth_interval: finite windows in a row before the scale grows; a positive int.
    minimum: the scale never falls below it; positive.
    maximum: the scale never grows past it; finite in float32.
    hysteresis: how many non-finite windows it takes, since the scale last grew, before the scale backs off. With 1 it
      does at each; with n the first n - 1 leave it as it is, and each one from then on lowers it, as in Megatron-LM.

  Raises:
    ValueError: a number outside the bounds above, or not finite in float32.
    TypeError: a value that is no number, or a `growth_interval` or `hysteresis` that is no int.

  References:
    Micikevicius et al., "Mixed precision training", 2018, section 3.2.
  """
  initial: float = 2.0**15
  growth_factor: float = 2.0
  backoff_factor: float = 0.5
  growth_interval: int = 2000
  minimum: float = 1.0
  maximum: float = 2.0**127
  hysteresis: int = 1

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      object.__setattr__(self, field.name, _read(field.name, getattr(self, field.name)))
    if not self.minimum <= self.initial <= self.maximum:
      raise ValueError(f"DynamicLossScale: expected minimum <= initial <= maximum, got {self.minimum}, {self.initial}, "
                       f"{self.maximum}")
    if self.growth_factor < 1:
      raise ValueError(f"DynamicLossScale: growth_factor: expected at least 1, got {self.growth_factor}")
    if self.backoff_factor >= 1:
      raise ValueError(f"DynamicLossScale: backoff_factor: expected less than 1, got {self.backoff_factor}")

  def init(self) -> LossScaleState | HysteresisState:
    scale, good = jnp.asarray(self.initial, jnp.float32), jnp.zeros((), jnp.int32)
    return HysteresisState(scale, good, jnp.zeros((), jnp.int32)) if self.hysteresis > 1 else LossScaleState(scale, good)

  def update(self, state: LossScaleState | HysteresisState, finite: jax.Array) -> LossScaleState | HysteresisState:
    """The scale after a window that was finite or not."""
    good = state.good_windows + 1
    grows = finite & (good >= self.growth_interval)
    highest = jnp.float32(self.maximum / self.growth_factor)  # that can grow by the whole factor: no product is infinite
    grown = jnp.where(state.loss_scale >= highest, jnp.float32(self.maximum),
                      jnp.minimum(state.loss_scale, highest) * jnp.float32(self.growth_factor))
    lowered = jnp.maximum(state.loss_scale * jnp.float32(self.backoff_factor), jnp.float32(self.minimum))
    backs_off, moved = ~jnp.asarray(finite), {}
    if self.hysteresis > 1:
      bad = jnp.minimum(state.bad_windows + backs_off.astype(jnp.int32), self.hysteresis)
      backs_off = backs_off & (bad >= self.hysteresis)
      moved["bad_windows"] = jnp.where(grows, 0, bad)
    return state._replace(
        loss_scale=jnp.where(grows, grown, jnp.where(backs_off, lowered, state.loss_scale)),
        good_windows=jnp.where(finite & ~grows, good, 0), **moved)


def _read(name: str, value: Any) -> float | int:
  """A field's value as a Python number."""
  whole = name in ("growth_interval", "hysteresis")
  kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating, jnp.bfloat16.dtype.type)
  if isinstance(value, (bool, np.bool_)) or not isinstance(value, kinds):
    raise TypeError(f"DynamicLossScale: {name}: expected {'an int' if whole else 'a number'}, got {value!r}")
  number = int(value) if whole else to_float(value)
  if not usable_scale(as_dtype(number, np.float32)):
    raise ValueError(f"DynamicLossScale: {name}: expected a positive number that is finite and not subnormal in float32, "
                     f"got {value!r}")
  return number


def find_states(opt_state: Any, kind: type | tuple[type, ...]) -> list[Any]:
  """Every instance of a state class, or of several, anywhere in a nested optimizer state."""
  leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
  return [leaf for leaf in leaves if isinstance(leaf, kind)]


def check_restored(opt_state: Any) -> None:
  """Raises for a state of which a checkpoint's reader made plain dicts, as it does where it has nothing to restore into."""
  for path, _ in jax.tree_util.tree_leaves_with_path(opt_state):
    if jax.tree_util.DictKey("consecutive_nonfinite") in path:  # a field of every `ClipState`, and no parameter's name
      raise ValueError("expected an optimizer state, got one that was restored as plain dicts: restore it into "
                       "jax.eval_shape(tx.init, params)")


def plain(leaf: Any) -> jax.Array:
  """The array in a state's leaf, also where Flax nnx has wrapped it in a variable."""
  return jax.tree.leaves(leaf)[0]


def current_loss_scale(opt_state: Any) -> jax.Array:
  """The loss scale by which the next micro-batch's loss is to be multiplied.

  Args:
    opt_state: an optimizer state with one `clipped_multi_steps` anywhere in it, `flax.nnx.Optimizer`'s included.

  Returns:
    A float32 scalar: the dynamic scale, the constant of a static one, 1.0 for `clipped_multi_steps` without a scale.

  Raises:
    ValueError: where the state holds no loss scale, or several.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_globalclip as ogc
    >>> tx = ogc.clipped_multi_steps(optax.sgd(0.1), 1.0, loss_scale=ogc.DynamicLossScale(2.0**15))
    >>> float(ogc.current_loss_scale(tx.init([jnp.zeros(2)])))
    32768.0
  """
  states = find_states(opt_state, SCALE_STATES)
  if len(states) != 1:
    check_restored(opt_state)
    raise ValueError(f"current_loss_scale: expected one loss scale in the optimizer state, found {len(states)} "
                     "(clipped_multi_steps keeps one)")
  return plain(states[0].loss_scale)
