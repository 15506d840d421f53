"""The clip as a differentiable, batchable function of a list of leaves: the one way through.

    clip, clip_at, measure       what `_thresholds` and `_norm` call; `clip_at` where the threshold follows from the norm
      custom_jvp                 the derivative, in `jnp`
        custom_vmap              each member of a batch has its own norm
          on_each_device         `_sharding`: the shards that a device holds, and the axes over which they add up
            clip_shards          norm -> sum over devices -> finish -> scale
            scale_shards         scale alone, by ops that are there
              norm, scale, clip  `_lowering`: native code or the reference, once the platform is known
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_globalclip import _auto, _compat, _lowering, _native, _reference, _sharding
from optax_globalclip._arguments import usable_scale
from optax_globalclip._devices import Layout, Sums, sum_over_devices
from optax_globalclip._leaves import norm_dtype
from optax_globalclip._placement import Placement


class Options(NamedTuple):
  """What is computed; fixed when a clip is traced."""
  measures: bool = True         # whether numbers are wanted; else the ops are there, in the place of the threshold
  scales: bool = False          # whether the leaves are wanted too, scaled
  per_leaf: bool = False        # whether each leaf is judged by its own norm
  # Whether the norm and the count of each leaf are wanted too. On several devices they cost a vector of a few numbers a
  # leaf where the whole tree's cost a few numbers. `per_leaf` needs them.
  leaf_norms: bool = False
  extremes: bool = False        # whether the largest element and the number of zeros are wanted
  on_nonfinite: int = _reference.PROPAGATE
  divides: bool = False         # whether there is a loss scale
  stage: str = "auto"
  out_dtypes: tuple[str, ...] = ()
  backend: str = "auto"

  @property
  def numbers(self) -> int:
    """How many of the results are numbers."""
    return len(Numbers._fields) if self.measures else 0

  def results(self, leaves) -> list[jax.ShapeDtypeStruct]:
    out = [jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)) for leaf, dtype in zip(leaves, self.out_dtypes)]
    return [*(_native.norm_results(leaves, **self.of_norm()) if self.measures else []), *(out if self.scales else [])]

  def of_norm(self) -> dict[str, Any]:
    return dict(per_leaf=self.per_leaf, leaf_norms=self.leaf_norms, extremes=self.extremes,
                on_nonfinite=self.on_nonfinite)

  def of_scale(self) -> dict[str, Any]:
    return dict(stage=self.stage, out_dtypes=tuple(map(jnp.dtype, self.out_dtypes)), divides=self.divides)

  sets = 1  # of leaves among the operands that lie alike, one set after another

  def like(self, count: int) -> range:
    """Of `count` leaves those that the results behind the numbers are like, and lie like."""
    return range(count if self.scales else 0)

  def to_json(self) -> list:
    return list(self)

  @classmethod
  def from_json(cls, values: list) -> "Options":
    return cls(*(tuple(value) if isinstance(value, list) else value for value in values))


class Numbers(NamedTuple):
  """What one pass finds; number 0 is the tree's, 1 + i leaf i's where they are wanted."""
  rows: jax.Array       # T[m, 3], see `_reference`: the sums, not in true units
  nonfinite: jax.Array  # int32[m]: elements that are NaN or infinite
  norms: jax.Array      # T[m], in true units
  ops: jax.Array        # T[k, 3], see `_reference`: what was judged, and what is done
  extremes: jax.Array   # T[2]: the largest magnitude and the number of zeros, where they are wanted; else T[0]


# ----------------------------------------------------------------------------------------------------------------------
# On one device, and on each of several


@_auto.register(Options)
def clip_shards(options: Options, layout: Layout, max_norm, loss_scale, *shards, valid=None):
  """`(*Numbers, *scaled shards)`. `valid` has for each shard which elements are of the leaf, or None where all are."""
  kinds = [_compat.varying_axes(x) for x in shards]
  axes = _sharding.varying([max_norm, loss_scale, *shards]) | frozenset(layout.axes if any(kinds) else ())
  vary = functools.partial(_sharding.vary, axes=axes)
  operands = [vary(jnp.asarray(layout.counted)), vary(max_norm), vary(loss_scale)]
  fixed = dict(**options.of_norm(), backend=options.backend)

  if options.scales and not layout.axes and len(set(kinds)) <= 1:
    rows, nonfinite, norms, ops, extremes, *scaled = _lowering.clip(*operands, *map(vary, shards), **fixed,
                                                                    **options.of_scale())
    return rows, nonfinite, norms, ops, _true_extremes(extremes, nonfinite, loss_scale), *scaled

  summed, padding = _without_padding(shards, valid, layout)
  rows, nonfinite, norms, ops, extremes = _lowering.norm(*operands, *map(vary, summed), **fixed)
  if layout.axes:
    extremes = extremes if padding is None else extremes - jnp.stack([jnp.zeros_like(padding), padding])[:len(extremes)]
    rows, nonfinite, extremes = sum_over_devices(Sums(rows, nonfinite, extremes), layout)
    norms, ops = _reference.finish(rows, max_norm, loss_scale, per_leaf=options.per_leaf,
                                   on_nonfinite=options.on_nonfinite)
  extremes = _true_extremes(extremes, nonfinite, loss_scale)
  return rows, nonfinite, norms, ops, extremes, *(_scale_shards(options, ops, shards, kinds) if options.scales else ())


@_auto.register(Options)
def scale_shards(options: Options, layout: Layout, ops, loss_scale, *shards, valid=None):
  """The scaled shards."""
  del layout, loss_scale, valid
  return tuple(_scale_shards(options, ops, shards, [_compat.varying_axes(x) for x in shards]))


def _true_extremes(extremes, nonfinite, loss_scale):
  """The largest element in true units; infinite where one is not finite."""
  if not extremes.size:
    return extremes
  good = (nonfinite[0] == 0) & usable_scale(loss_scale)
  scale = jnp.where(good, loss_scale, jnp.ones_like(loss_scale)).astype(extremes.dtype)
  largest = jax.lax.select(good, _reference.divide(extremes[0], scale), np.asarray(np.inf, extremes.dtype))
  return jnp.stack([largest, extremes[1]])


def _without_padding(shards, valid, layout: Layout):
  """The shards with zeros for what is not of their leaves, and how many of those count here; None where there are none."""
  if valid is None or all(mask is None for mask in valid):
    return shards, None
  dtype = norm_dtype(shards)
  padding = [jnp.zeros((), dtype) if mask is None else
             jnp.sum(~mask, dtype=jnp.float32).astype(dtype) * (2 if jnp.iscomplexobj(x) else 1)
             for x, mask in zip(shards, valid)]
  shards = [x if mask is None else jnp.where(mask, x, jnp.zeros_like(x)) for x, mask in zip(shards, valid)]
  return shards, jnp.sum(jnp.stack(padding) * (layout.counted != 0).astype(dtype))


def _scale_shards(options: Options, ops, shards, kinds):
  """A result varies as its leaf does, or as the op where that still varies."""
  scaled = list(shards)
  kinds = [kind | _compat.varying_axes(ops) for kind in kinds]
  for kind in dict.fromkeys(kinds):
    members = [i for i, other in enumerate(kinds) if other == kind]
    of_members = options._replace(out_dtypes=tuple(options.out_dtypes[i] for i in members))
    own_ops = ops[1 + np.asarray(members)] if options.per_leaf else ops
    out = _lowering.scale(_sharding.vary(own_ops, kind), *(_sharding.vary(shards[i], kind) for i in members),
                          per_leaf=options.per_leaf, zeroes=options.on_nonfinite == _reference.ZERO,
                          backend=options.backend, **of_members.of_scale())
    for i, leaf in zip(members, out, strict=True):
      scaled[i] = leaf
  return scaled


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives


def _wide(x: jax.Array, dtype) -> jax.Array:
  """`x` in the norm's dtype; of a complex leaf its real and its imaginary parts, stacked."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag])
  return x.astype(dtype)


def _narrow(x: jax.Array, dtype) -> jax.Array:
  """The leaf of `dtype` that `_wide` made `x` from."""
  if jnp.issubdtype(dtype, jnp.complexfloating):
    return jax.lax.complex(x[0], x[1]).astype(dtype)
  return x.astype(dtype)


def _over(numerator: jax.Array, norm: jax.Array) -> jax.Array:
  """`numerator / norm`, and 0 where the norm is 0: the derivative there, as for `optax.safe_norm`."""
  positive = norm != 0
  quotient = _reference.divide(numerator, jnp.where(positive, norm, jnp.ones_like(norm)))
  return jnp.where(positive, quotient, jnp.zeros_like(numerator))


def _norm_tangents(norms, s, ds, leaves, d_leaves, options, placement):
  """The tangents of `norms`: with x = g / s, d|x| = <x, dg / s> / |x| - |x| ds / s."""
  dtype = norms.dtype
  by_leaf = norms[1:] if options.leaf_norms else [norms[0]] * len(leaves)
  of_leaves = []
  for x, dx, norm in zip(leaves, d_leaves, by_leaf):
    unit = _over(_reference.divide(x, s), norm)
    of_leaves.append(jnp.sum(unit * _reference.divide(dx, s, like=x)))
  of_leaves = _sharding.sum_shards(of_leaves, leaves, placement)
  if not options.leaf_norms:
    return sum(of_leaves, jnp.zeros((), dtype))[None] - norms * (ds / s)
  whole = sum((_over(norm, norms[0]) * d for norm, d in zip(by_leaf, of_leaves)), jnp.zeros((), dtype))
  return jnp.stack([whole, *of_leaves]) - norms * (ds / s)


def _leaf_tangents(numbers, d_norms, max_norm, d_max, units, options):
  """The tangents of the scaled leaves, in the norm's dtype."""
  s, ds, leaves, d_leaves = units
  bad, clips = _reference.is_bad(numbers.ops), numbers.ops[:, 0] == _reference.CLIP
  factors = _reference.clip_factors(numbers.ops, numbers.norms, max_norm)
  d_max = jnp.broadcast_to(d_max, factors.shape)
  # A NaN that is made only to be left out stops JAX's debuggers: this one is a constant.
  fill = np.asarray(0 if options.on_nonfinite == _reference.ZERO else np.nan, factors.dtype)
  out = []
  for i, (x, dx) in enumerate(zip(leaves, d_leaves)):
    i = 1 + i if options.per_leaf else 0
    factor = jax.lax.select(bad, fill, factors[i])
    along = jnp.where(clips[i], d_max[i] - factors[i] * d_norms[i], jnp.zeros_like(factor))
    x, dx = _reference.divide(x, s), _reference.divide(dx, s, like=x)
    out.append(factor * (dx - x * (ds / s)) + _over(x, numbers.norms[i]) * along)
  return out


class _Units(NamedTuple):
  """What a derivative is taken of and along, in the norm's dtype; of a bad update that becomes zero, zeros."""
  scale: jax.Array
  d_scale: jax.Array
  leaves: list[jax.Array]
  d_leaves: list[jax.Array]


def _units(options, numbers, loss_scale, leaves, d_loss_scale, d_leaves):
  """`(_Units, numbers)`."""
  dtype = numbers.norms.dtype
  bad = _reference.is_bad(numbers.ops)
  s = loss_scale.astype(dtype)
  s, ds = jnp.where(bad, jnp.ones_like(s), s), d_loss_scale.astype(dtype)
  wide, d_wide = [_wide(x, dtype) for x in leaves], [_wide(dx, dtype) for dx in d_leaves]
  if options.on_nonfinite == _reference.ZERO:
    wide, d_wide = ([jnp.where(bad, jnp.zeros_like(x), x) for x in xs] for xs in (wide, d_wide))
    numbers = numbers._replace(norms=jnp.where(bad, jnp.zeros_like(numbers.norms), numbers.norms))
  return _Units(s, ds, wide, d_wide), numbers


def _narrowed(tangents, scaled):
  return tuple(_sharding.vary_as(_narrow(dy, y.dtype), y) for dy, y in zip(tangents, scaled))


def _tangents(options, placement, primals, tangents, numbers, scaled):
  (max_norm, loss_scale, *leaves), (d_max, d_loss_scale, *d_leaves) = primals, tangents
  units, numbers = _units(options, numbers, loss_scale, leaves, d_loss_scale, d_leaves)
  d_norms = _norm_tangents(numbers.norms, *units, options, placement)
  d_numbers = Numbers(*map(jnp.zeros_like, numbers))._replace(
      nonfinite=np.zeros(numbers.nonfinite.shape, jax.dtypes.float0), norms=d_norms)
  if not options.scales:
    return tuple(d_numbers)
  return *d_numbers, *_narrowed(_leaf_tangents(numbers, d_norms, max_norm, d_max, units, options), scaled)


# ----------------------------------------------------------------------------------------------------------------------
# The functions


def _vmap_one_by_one(function: Callable) -> Callable:
  """Batches `function` by a loop over members, each computed as it would be alone."""
  batched = jax.custom_batching.custom_vmap(function)

  @batched.def_vmap
  def rule(axis_size, in_batched, *args):
    del axis_size
    def member(mapped):
      mapped = iter(mapped)
      return batched(*(next(mapped) if b else a for a, b in zip(args, in_batched)))
    out = jax.lax.map(member, [a for a, b in zip(args, in_batched) if b])
    return out, jax.tree.map(lambda _: True, out)

  return batched


@functools.cache
def _function(options: Options, placement: Placement) -> Callable:
  """`(max_norm, loss_scale, *leaves) -> (*Numbers, *scaled leaves)`."""
  @_vmap_one_by_one
  def run(max_norm, loss_scale, *leaves):
    return tuple(_sharding.on_each_device(clip_shards, options, placement, max_norm, loss_scale, *leaves))

  function = jax.custom_jvp(run)

  @function.defjvp
  def rule(primals, tangents):
    out = function(*primals)
    numbers, scaled = Numbers(*out[:options.numbers]), out[options.numbers:]
    return out, _tangents(options, placement, primals, tangents, numbers, scaled)

  return jax.jit(function, inline=True)


@functools.cache
def _function_at(options: Options, placement: Placement) -> Callable:
  """`(rows, norms, max_norm, loss_scale, *leaves) -> (ops, *scaled leaves)`."""
  def judge(rows, norms, max_norm, loss_scale):
    return _reference.judge(rows, norms, max_norm, loss_scale, per_leaf=options.per_leaf,
                            on_nonfinite=options.on_nonfinite)

  @_vmap_one_by_one
  def run(rows, norms, max_norm, loss_scale, *leaves):
    ops = judge(rows, norms, max_norm, loss_scale)
    if not options.scales:
      return (ops,)
    return ops, *_sharding.on_each_device(scale_shards, options, placement, ops, loss_scale, *leaves)

  function = jax.custom_jvp(run)

  @function.defjvp
  def rule(primals, tangents):
    (rows, norms, max_norm, loss_scale, *leaves), (_, d_norms, d_max, d_loss_scale, *d_leaves) = primals, tangents
    ops, *scaled = function(*primals)
    numbers = Numbers(rows, None, norms, ops, None)
    units, numbers = _units(options, numbers, loss_scale, leaves, d_loss_scale, d_leaves)
    d_scaled = _leaf_tangents(numbers, d_norms, max_norm, d_max, units, options)
    return (ops, *scaled), (jnp.zeros_like(ops), *_narrowed(d_scaled, scaled))

  return jax.jit(function, inline=True)


def _traced(options: Options) -> Options:
  """The options as a key of what was traced."""
  return options._replace(backend=_native.backend(), leaf_norms=bool(options.leaf_norms or options.per_leaf),
                          extremes=bool(options.extremes), out_dtypes=tuple(map(str, options.out_dtypes)))


def clip(leaves: Sequence[jax.Array], max_norm, loss_scale, options: Options,
         placement: Placement = Placement()) -> tuple[Numbers, list[jax.Array]]:
  """The numbers of `leaves / loss_scale` and, with `options.scales`, the leaves clipped to `max_norm`."""
  options = _traced(options)
  out = _function(options, placement)(jnp.asarray(max_norm).astype(norm_dtype(leaves)), loss_scale, *leaves)
  return Numbers(*out[:options.numbers]), list(out[options.numbers:])


def clip_at(numbers: Numbers, max_norm, loss_scale, leaves: Sequence[jax.Array], options: Options,
            placement: Placement = Placement()) -> tuple[jax.Array, list[jax.Array]]:
  """`(ops, clipped leaves)` for numbers that `clip` found with the same options: nothing is measured again. Without
  `options.scales` the ops alone.

  `max_norm` is T[] or, with `options.per_leaf`, T[1 + n], of which the first is the tree's.
  """
  function = _function_at(_traced(options)._replace(measures=False, leaf_norms=False, extremes=False), placement)
  ops, *scaled = function(numbers.rows, numbers.norms, max_norm, loss_scale, *leaves)
  return ops, scaled


def measure(leaves: Sequence[jax.Array], placement: Placement = Placement(), *, leaf_norms: bool = False) -> Numbers:
  """The numbers of the leaves alone."""
  return clip(leaves, 0, jnp.ones((), jnp.float32), Options(leaf_norms=leaf_norms), placement)[0]
