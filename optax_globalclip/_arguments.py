"""What the public functions are told: numbers, dtypes and policies, read and judged in one place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_globalclip._leaves import SUPPORTED

_TINY = np.finfo(np.float32).tiny


def usable_scale(scale: Any) -> Any:
  """Whether a float32 number can be divided by: finite, positive and not subnormal, which is 0 to XLA on the CPU."""
  return (scale >= _TINY) & (scale < np.inf)


def usable_max_norm(max_norm: Any) -> Any:
  """Whether a norm can be compared with a threshold: it is not negative and not NaN."""
  return max_norm >= 0


def usable_weight(weight: Any) -> Any:
  """Whether a float32 number can weigh a micro-batch: 0, or what can be divided by."""
  return is_zero(weight) | usable_scale(weight)


def is_zero(x: Any) -> Any:
  """Whether a float32 number is 0 or -0: to XLA on the CPU a subnormal number equals 0 too, so its bits are asked."""
  if not isinstance(x, jax.Array):
    return x == 0
  magnitude = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(2**31 - 1)
  # A range that zero is not in: told to compare the bits with 0, the compiler compares the float after all.
  subnormal = magnitude - np.uint32(1) < np.uint32(2**23 - 1)
  return (x == 0) & ~subnormal


def check_number(name: str, value: Any, hint: str = "") -> None:
  """A Python or NumPy scalar, or a JAX scalar of any float or int type; raises `TypeError` otherwise."""
  if isinstance(value, jax.Array):
    array, got = value, f"an array of shape {value.shape} and dtype {value.dtype}"
  else:
    array, got = np.asarray(value), repr(value)
  good = array.ndim == 0 and (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
                              or (isinstance(value, int) and not isinstance(value, bool)))  # an int beyond NumPy's
  if not good:
    raise TypeError(f"{name}: expected a number (a scalar of a float or int type{hint}), got {got}")


def to_float(value: Any) -> float:
  """A Python or NumPy number as a float; infinite where it is beyond one."""
  try:
    return float(value)
  except OverflowError:
    return np.inf if value > 0 else -np.inf


def as_dtype(value: Any, dtype) -> Any:
  """A number in `dtype`, rounded once; a traced one is not read."""
  if isinstance(value, jax.Array):
    return value.astype(dtype)
  with np.errstate(over="ignore"):
    return np.float64(to_float(value)).astype(dtype)


def as_scalar(value: Any, dtype) -> jax.Array:
  return jnp.asarray(as_dtype(value, dtype))


def at(name: str, number: Any, count: Any) -> Any:
  """A number as it is, or what a schedule says at `count`."""
  if not callable(number):
    return number
  number = number(count)
  check_number(f"{name}: what the schedule returned", number)
  return number


def check_max_norm(max_norm: Any, hint: str = "") -> None:
  check_number("max_norm", max_norm, hint)
  if not isinstance(max_norm, jax.Array) and not usable_max_norm(to_float(max_norm)):
    raise ValueError(f"max_norm: expected a number that is not negative and not NaN, got {max_norm!r}")


def check_loss_scale(loss_scale: Any) -> None:
  check_number("loss_scale", loss_scale, "; clipped_multi_steps takes a DynamicLossScale too")
  if not isinstance(loss_scale, jax.Array) and not usable_scale(as_dtype(loss_scale, np.float32)):
    raise ValueError("loss_scale: expected a positive number that is finite and not subnormal in float32, got "
                     f"{loss_scale!r}")


def check_weight(weight: Any) -> None:
  check_number("weight", weight)
  if not isinstance(weight, jax.Array) and not usable_weight(as_dtype(weight, np.float32)):
    raise ValueError("weight: expected a number that is not negative, finite in float32, and 0 or not subnormal there; "
                     f"got {weight!r}")


def check_dtype(name: str, value: Any, supported=SUPPORTED) -> np.dtype | None:
  """The dtype that is meant, or None; raises `TypeError` for what is none of `supported`."""
  if value is None:
    return None
  if isinstance(value, jax.Array):
    raise TypeError(f"{name}: expected a dtype or its name, got an array. A dtype is callable, so optax.inject_hyperparams "
                    f"takes it for a schedule: name it in static_args=({name!r},)")
  try:
    dtype = jnp.dtype(value)
  except TypeError:
    dtype = None
  if isinstance(value, (bool, int, float)) or dtype is None or str(dtype) not in supported:
    raise TypeError(f"{name}: expected a dtype or the name of one of {', '.join(supported)}; got {value!r}")
  if jax.dtypes.canonicalize_dtype(dtype) != dtype:
    raise TypeError(f"{name}: {dtype} needs jax_enable_x64")
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


# ----------------------------------------------------------------------------------------------------------------------
# Numbers of rules


def check_bounds(rule: str, name: str, value: Any, *, low: float = 0.0, high: float = np.inf, above: bool = False,
                 below: bool = False) -> None:
  """A number within bounds; a traced one is not read."""
  check_number(f"{rule}: {name}", value)
  if isinstance(value, jax.Array):
    return
  number = to_float(value)
  if not (low <= number <= high) or (above and number == low) or (below and number == high):
    bounds = f"{'above' if above else 'at least'} {low:g}"
    bounds += "" if high == np.inf else f" and {'below' if below else 'at most'} {high:g}"
    raise ValueError(f"{rule}: {name}: expected a number {bounds}, got {value!r}")


def check_whole(rule: str, name: str, value: Any, low: int) -> None:
  """A length, which shapes depend on: never traced."""
  if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
    raise TypeError(f"{rule}: {name}: expected an int, got {type(value).__name__} {value!r}; under "
                    f"optax.inject_hyperparams name it in static_args=({name!r},)")
  if value < low:
    raise ValueError(f"{rule}: {name}: expected at least {low}, got {value}")


def check_decay(rule: str, value: Any) -> None:
  check_bounds(rule, "decay", value, high=1.0, below=True)


def check_positive(rule: str, name: str, value: Any) -> None:
  check_bounds(rule, name, value, above=True)
