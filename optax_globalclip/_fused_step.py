"""A clip's scaling and AdamW as one pass over g, m, v and p, which writes m, v and p in place.

    step                  what `_adamw` and `_windows` call, with the ops that `_thresholds.clip` found
      custom_vmap         each member of a batch by itself
        on_each_device    `_sharding`: the shards that a device holds
          step_shards
            adamw         native code in batches, or the reference, once the platform is known
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_globalclip import _auto, _lowering, _native, _ops, _reference, _sharding
from optax_globalclip._devices import Layout
from optax_globalclip._leaves import norm_dtype
from optax_globalclip._placement import Placement

# One call with n aliased results, three a leaf, costs XLA's compiler n^2, and every call a launch: up to so many leaves
# are one call; more are calls of so many each.
_ONE_CALL = 160
_LEAVES_A_CALL = 64


class Coefficients(NamedTuple):
  """The numbers of one step, in the order in which native code takes them."""
  b1: Any
  one_minus_b1: Any
  b2: Any
  one_minus_b2: Any
  eps: Any
  eps_root: Any
  correction1: Any    # 1 - b1**t
  correction2: Any    # 1 - b2**t
  learning_rate: Any
  weight_decay: Any


class StepOptions(NamedTuple):
  """What is computed; fixed when a step is traced. Operands are the leaves of g, then those of m, of v and of p."""
  decays: tuple[bool, ...]  # which leaves decay
  zeroes: bool              # whether a bad update is one of zero gradients, else of NaN
  skips: bool               # whether it leaves everything as it is
  divides: bool             # whether there is a loss scale
  backend: str

  numbers = 0
  sets = 4

  def like(self, count: int) -> range:
    return range(count // 4, count)

  def results(self, leaves) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in self.like(len(leaves))]

  def to_json(self) -> list:
    return list(self)

  @classmethod
  def from_json(cls, values: list) -> "StepOptions":
    return cls(tuple(values[0]), *values[1:])


# ----------------------------------------------------------------------------------------------------------------------
# The reference


def _update_leaf(gradient, mu, nu, param, op, of, *, decays: bool, zeroes: bool, skips: bool):
  """`(m, v, p)` after a step, in T and each rounded once to its own dtype; the formula of `clipped_adamw`."""
  dtype = op.a.dtype
  g = _reference.scale(gradient, op, dtype, zeroes=zeroes)
  m = of.b1 * mu.astype(dtype) + of.one_minus_b1 * g
  v = of.b2 * nu.astype(dtype) + of.one_minus_b2 * (g * g)
  root = jnp.sqrt(_reference.divide(v, of.correction2) + of.eps_root)
  p = param.astype(dtype)
  update = _reference.divide(m, of.correction1) / (root + of.eps)
  if decays:
    update = update + of.weight_decay * p
  new = [x.astype(old.dtype) for x, old in zip((m, v, p - of.learning_rate * update), (mu, nu, param))]
  if skips:
    new = [jax.lax.select(op.fills, old, x) for x, old in zip(new, (mu, nu, param))]
  return new


# ----------------------------------------------------------------------------------------------------------------------
# The primitive: (op T[1, 3], coefficients T[10], *g, *m, *v, *p) -> (*m, *v, *p)


def _quarters(leaves: Sequence[Any]) -> list[Sequence[Any]]:
  """The leaves of g, m, v and p apart."""
  n = len(leaves) // 4
  return [leaves[i * n:(i + 1) * n] for i in range(4)]


def _adamw(platform, op, coefficients, *leaves, decays, divides, zeroes, skips):
  of_leaves = list(zip(*_quarters(leaves)))
  out = []
  if platform is None:
    op = _reference.op_of(op, 0, divides=divides, fills=zeroes or skips)
    of = Coefficients(*coefficients)
    out = [_update_leaf(*of_leaf, op, of, decays=decays[i], zeroes=zeroes, skips=skips)
           for i, of_leaf in enumerate(of_leaves)]
  else:
    size = len(of_leaves) if len(of_leaves) <= _ONE_CALL else _LEAVES_A_CALL
    for first in range(0, len(of_leaves), size):
      batch = slice(first, first + size)
      out += zip(*_native.adamw(platform, op, coefficients, [quarter[batch] for quarter in _quarters(leaves)],
                                decays=decays[batch], skips=skips))
  return [x for quarter in zip(*out) for x in quarter]


def _results(op, coefficients, *leaves, **_):
  return [(x.shape, x.dtype) for x in leaves[len(leaves) // 4:]]


_bind = _lowering._define("globalclip_adamw", _adamw, _results)


# ----------------------------------------------------------------------------------------------------------------------
# On one device, and on each of several


@_auto.register(StepOptions)
def step_shards(options: StepOptions, layout: Layout, op, coefficients, *shards, valid=None):
  """`(*m, *v, *p)`."""
  del layout, valid  # an element that is padding steps by itself
  of_leaves = list(zip(*_quarters(shards)))
  # Operands of one call vary alike. A result varies as anything of its leaf does.
  kinds = [_sharding.varying([op, coefficients, *of_leaf]) for of_leaf in of_leaves]
  out = [()] * len(of_leaves)
  for kind in dict.fromkeys(kinds):
    members = [i for i, other in enumerate(kinds) if other == kind]
    vary = functools.partial(_sharding.vary, axes=kind)
    new = _bind(vary(op), vary(coefficients), *(vary(of_leaves[i][j]) for j in range(4) for i in members),
                decays=tuple(options.decays[i] for i in members), divides=options.divides, zeroes=options.zeroes,
                skips=options.skips, backend=options.backend)
    for i, *of_leaf in zip(members, *(new[j * len(members):(j + 1) * len(members)] for j in range(3)), strict=True):
      out[i] = of_leaf
  return tuple(x for quarter in zip(*out) for x in quarter)


@functools.lru_cache(maxsize=None)
def _function(options: StepOptions, placement: Placement) -> Callable:
  @_ops._vmap_one_by_one
  def run(op, coefficients, *leaves):
    return tuple(_sharding.on_each_device(step_shards, options, placement, op, coefficients, *leaves))
  return jax.jit(run, inline=True)


def step(ops: jax.Array, coefficients: Coefficients, grads: Sequence[jax.Array], mu: Sequence[jax.Array],
         nu: Sequence[jax.Array], params: Sequence[jax.Array], placement: Placement = Placement(), *,
         decays: Sequence[bool], zeroes: bool, skips: bool, divides: bool) -> tuple[list, list, list]:
  """`(m, v, p)` after one step of AdamW on gradients that come by `ops`, T[1, 3]."""
  leaves = [*grads, *mu, *nu, *params]
  dtype = norm_dtype(leaves)
  coefficients = jnp.stack([jnp.asarray(x).astype(dtype) for x in coefficients])
  if placement.specs is not None:
    placement = placement._replace(specs=placement.specs * StepOptions.sets)
  options = StepOptions(tuple(map(bool, decays)), zeroes, skips, divides, _native.backend())
  out = _function(options, placement)(ops.astype(dtype), coefficients, *leaves)
  n = len(grads)
  return list(out[:n]), list(out[n:2 * n]), list(out[2 * n:])
