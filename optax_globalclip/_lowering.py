"""Platform dispatch: one primitive a step, lowered to native code or to the reference when the platform is known.

Only the path that is taken is ever traced: a branch for each platform, as `lax.platform_dependent` traces them, would
trace the reference for every leaf of every tree.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.interpreters import ad, mlir

from optax_globalclip import _compat, _leaves, _native, _reference

# One call with n aliased results costs XLA's compiler n^2: past this many, calls of a batch each.
_ALIASED_LEAVES_A_CALL = 64
_FUSED_LEAVES = 256
_XLA_SCALED_LEAVES = 2000


def _norm(platform, counted, max_norm, loss_scale, *leaves, **options):
  if platform is not None:
    return _native.norm(platform, counted, max_norm, loss_scale, leaves, **options)
  rows, nonfinite, extremes = _reference.sums(counted, leaves, leaf_norms=options["leaf_norms"],
                                              extremes=options["extremes"])
  norms, ops = _reference.finish(rows, max_norm, loss_scale, per_leaf=options["per_leaf"],
                                 on_nonfinite=options["on_nonfinite"])
  return rows, nonfinite, norms, ops, extremes


def scale_stage(platform: str | None, scale_stage: str, leaves) -> str:
  """Where the scaling happens, "kernel" or "xla": the one rule behind `scale_stage="auto"`."""
  if platform is None:
    return "xla"
  if scale_stage != "auto":
    return scale_stage
  # XLA folds the scale into an elementwise optimizer's loops for free, where the kernel reads and writes everything once
  # more, and copies it first where it is not donated. On a GPU XLA also fuses the loops of many leaves into one:
  # chain(clip, adamw) over 148 leaves takes 20 launches with "xla" and 153 with "kernel" (600 leaves: 55 and 614),
  # however large they are. Compile time is optax's, and grows with the leaves; past this many the kernel keeps it down.
  return "kernel" if len(leaves) > _XLA_SCALED_LEAVES else "xla"


def scale_leaves(platform, ops, leaves, *, per_leaf, stage, out_dtypes, divides, zeroes):
  """The op applied to every leaf: by aliased calls of the kernel where dtypes stay, else by XLA."""
  in_kernel = [i for i, leaf in enumerate(leaves) if stage == "kernel" and leaf.dtype == out_dtypes[i]]
  out = list(leaves)
  for first in range(0, len(in_kernel), _ALIASED_LEAVES_A_CALL):
    batch = in_kernel[first:first + _ALIASED_LEAVES_A_CALL]
    op = ops[np.asarray(batch)] if per_leaf else ops
    for i, scaled in zip(batch, _native.scale(platform, op, [leaves[i] for i in batch], per_leaf=per_leaf)):
      out[i] = scaled
  in_xla = sorted(set(range(len(leaves))) - set(in_kernel))
  op_of = functools.partial(_reference.op_of, ops, divides=divides, fills=zeroes)
  common = op_of(0) if in_xla and not per_leaf else None
  for i in in_xla:
    out[i] = _reference.scale(leaves[i], op_of(i) if per_leaf else common, out_dtypes[i], zeroes=zeroes)
  return tuple(out)


def _clip(platform, counted, max_norm, loss_scale, *leaves, stage, out_dtypes, divides, **options):
  stage = scale_stage(platform, stage, leaves)
  same_dtypes = all(leaf.dtype == dtype for leaf, dtype in zip(leaves, out_dtypes))
  if stage == "kernel" and same_dtypes and len(leaves) <= _FUSED_LEAVES:
    return _native.clip(platform, counted, max_norm, loss_scale, leaves, **options)
  numbers = _norm(platform, counted, max_norm, loss_scale, *leaves, **options)
  ops, per_leaf = numbers[3], options["per_leaf"]
  return *numbers, *scale_leaves(platform, ops[1:] if per_leaf else ops, leaves, per_leaf=per_leaf, stage=stage,
                                 out_dtypes=out_dtypes, divides=divides,
                                 zeroes=options["on_nonfinite"] == _reference.ZERO)


def _scale(platform, ops, *leaves, stage, **options):
  return scale_leaves(platform, ops, leaves, stage=scale_stage(platform, stage, leaves), **options)


def _norm_results(counted, max_norm, loss_scale, *leaves, **options):
  return [(x.shape, x.dtype) for x in _native.norm_results(leaves, **options)]


def _scale_results(ops, *leaves, out_dtypes, **_):
  return [(leaf.shape, dtype) for leaf, dtype in zip(leaves, out_dtypes)]


def _clip_results(*operands, stage, out_dtypes, divides, **options):
  return _norm_results(*operands, **options) + _scale_results(None, *operands[3:], out_dtypes=out_dtypes)


def _refuse_derivative(*_: object, **__: object) -> None:
  # The clips and norms have derivatives of their own and ask for none here: it is a fused step that does.
  raise NotImplementedError("optax_globalclip: clipped_adamw(...).step has no derivative: differentiate its update and "
                            "optax.apply_updates")


def make_runnable(primitive: _compat.Primitive) -> None:
  """Has a primitive compiled where it is run outside of jit, and also where the functions around it are not compiled.
  A derivative of it is an error that says so."""
  ad.primitive_jvps[primitive] = _refuse_derivative

  @functools.lru_cache(maxsize=None)
  def compiled(**params):
    return jax.jit(functools.partial(primitive.bind, **params))

  @primitive.def_impl
  def run_now(*args, **params):
    with jax.disable_jit(False):
      return compiled(**params)(*args)


def _define(name: str, run: Callable, results: Callable) -> Callable:
  primitive = _compat.Primitive(name)
  primitive.multiple_results = True

  def abstract_eval(*avals, backend, **params):
    return [_compat.result_aval(shape, dtype, avals) for shape, dtype in results(*avals, **params)]

  def lower_for(platform):
    def rule(ctx, *operands, backend, **params):
      chosen = platform if _native.use_native(platform or "this platform", backend) else None
      # A partitioned program is lowered on a thread of XLA's, which knows nothing of a `with jax.enable_x64(True)`.
      x64 = jax.config.jax_enable_x64 or _leaves.norm_dtype(ctx.avals_in) == np.float64
      def run_chosen(*args):
        with jax.enable_x64(x64):
          return run(chosen, *args, **params)
      return mlir.lower_fun(run_chosen, multiple_results=True)(ctx, *operands)
    return rule

  make_runnable(primitive)
  primitive.def_abstract_eval(abstract_eval)
  for platform in _native.PLATFORMS:
    mlir.register_lowering(primitive, lower_for(platform), platform=platform)
  mlir.register_lowering(primitive, lower_for(None))
  return primitive.bind


# Called with arrays, leaves last; the options by name, `backend` (auto, native, reference) among them.
#
# norm:  (counted, max_norm, loss_scale, *leaves) -> (rows, nonfinite, norms, ops, extremes): `_reference.sums`, `finish`
# clip:  the same -> the same, then the leaves, scaled
# scale: (ops T[1 or n, 3], *leaves) -> the leaves, scaled
norm = _define("globalclip_norm", _norm, _norm_results)
scale = _define("globalclip_scale", _scale, _scale_results)
clip = _define("globalclip_clip", _clip, _clip_results)
