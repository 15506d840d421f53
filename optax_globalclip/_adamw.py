"""`clipped_adamw`: a clip and AdamW as one optax transformation, whose `step` does both in one pass."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_globalclip import _arguments, _clip, _fused_step, _reference
from optax_globalclip._clip import global_clip
from optax_globalclip._fused_step import Coefficients
from optax_globalclip._leaves import Leaves, dtype_of, on_device
from optax_globalclip._norm import placed_leaves
from optax_globalclip._types import AnyMesh, DTypeLike, MaxNorm, Monitor, Number, OnNonfiniteWindow, ScaleStage

_REAL = ("float16", "bfloat16", "float32", "float64")


class AdamW(NamedTuple):
  """The arguments of `optax.adamw`."""
  learning_rate: Any
  b1: Any
  b2: Any
  eps: Any
  eps_root: Any
  mu_dtype: Any
  weight_decay: Any
  mask: Any
  nesterov: bool

  def transformation(self) -> optax.GradientTransformationExtraArgs:
    return optax.adamw(**self._asdict())

  def coefficients(self, state: "AdamWState") -> Coefficients:
    """The numbers of the step after `state`, as optax computes them."""
    count = optax.safe_increment(state.adam.count).astype(jnp.result_type(float))
    def power(decay):
      decay = decay if isinstance(decay, jax.Array) else jnp.asarray(decay, count.dtype)
      return 1 - decay.astype(count.dtype) ** count
    def at(name, counts):
      return _arguments.at(name, getattr(self, name), next(iter(jax.tree.leaves(counts)), None))
    return Coefficients(self.b1, 1 - self.b1, self.b2, 1 - self.b2, self.eps, self.eps_root, power(self.b1),
                        power(self.b2), at("learning_rate", state.rate), at("weight_decay", state.decay))

  def check(self) -> None:
    for name in ("b1", "b2", "eps", "eps_root"):
      _arguments.check_number(name, getattr(self, name))
    for name in ("learning_rate", "weight_decay"):
      number = getattr(self, name)
      if not callable(number) and not (name == "learning_rate" and number is None):
        _arguments.check_number(name, number, "; a schedule will do too")

  def decays(self, tree: Any) -> list[bool] | None:
    """Which leaves of a tree decay; None where the mask does not say it in Python bools."""
    if isinstance(self.weight_decay, (int, float)) and self.weight_decay == 0:
      return [False] * len(jax.tree.leaves(tree))
    mask = True if self.mask is None else self.mask(tree) if callable(self.mask) else self.mask
    try:
      flags = jax.tree.leaves(jax.tree.broadcast(mask, tree))
    except ValueError:
      return None
    return flags if all(isinstance(flag, (bool, np.bool_)) for flag in flags) else None


class AdamWState(NamedTuple):
  """The state of `optax.adamw`, its parts by name. `decay` and `rate` hold a count where there is a schedule."""
  adam: optax.ScaleByAdamState
  decay: Any
  rate: Any

  @classmethod
  def of(cls, state: Any, adamw: AdamW) -> "AdamWState":
    if not (isinstance(state, tuple) and len(state) == 3 and isinstance(state[0], optax.ScaleByAdamState)):
      raise TypeError(f"state: expected the state of optax.adamw, got {type(state).__name__}: {jax.tree.structure(state)}")
    for name, counts in ("weight_decay", state[1]), ("learning_rate", state[2]):
      if (follows := callable(getattr(adamw, name))) != bool(jax.tree.leaves(counts)):
        made, wanted = ("a number", "a schedule") if follows else ("a schedule", "a number")
        raise TypeError(f"state: made with {made} for {name}, expected one made with {wanted}: call init again")
    return cls(*state)

  def after(self, mu: Any, nu: Any) -> tuple:
    decay, rate = jax.tree.map(optax.safe_increment, (self.decay, self.rate))
    return optax.ScaleByAdamState(optax.safe_increment(self.adam.count), mu, nu), decay, rate


class SteppedTransformation(optax.GradientTransformationExtraArgs):
  """An `optax.GradientTransformationExtraArgs` with a third function, `step`, which stays with what is copied from it."""
  step: Callable[..., tuple[Any, Any]]
  settings: Any

  def __new__(cls, init: Callable[..., Any], update: Callable[..., Any], step: Callable[..., Any] | None = None,
              settings: Any = None) -> Self:
    # `copy` gives the first two, and the others when it is made.
    self = super().__new__(cls, init, update)
    self.step, self.settings = step, settings
    return self

  def _replace(self, **changes: Any) -> Self:
    own = dict(init=self.init, update=self.update, step=self.step, settings=self.settings)
    return type(self)(**(own | changes))


class _Same:
  """Settings in a tree's structure. They may hold arrays, so they are compared by what they are, not by what they hold."""

  def __init__(self, settings: Any) -> None:
    self.settings = settings

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Same) and self.settings is other.settings

  def __hash__(self) -> int:
    return id(self.settings)


# Its functions are leaves, as those of optax's transformations are.
jax.tree_util.register_pytree_node(
    SteppedTransformation, lambda tx: ((tx.init, tx.update, tx.step), _Same(tx.settings)),
    lambda same, functions: SteppedTransformation(*functions, same.settings))


class Settings(NamedTuple):
  """The arguments of `clipped_adamw`, checked."""
  adamw: AdamW
  clip: _clip.Settings


# ----------------------------------------------------------------------------------------------------------------------
# What the kernel can do


class Operands(NamedTuple):
  """The leaves of a step, in the order of the gradients'."""
  mu: list[Any]
  nu: list[Any]
  params: list[Any]
  decays: list[bool]


def check_like_gradients(grads: Any, **trees: Any) -> None:
  """Raises where a tree has another structure than the gradients, or a leaf another shape."""
  shapes = {path: np.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}
  for name, tree in trees.items():
    own = {path: np.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    for path in [path for path in own if path not in shapes] + [path for path in shapes if own.get(path) != shapes[path]]:
      where, (got, want) = name + jax.tree_util.keystr(path), (own.get(path), shapes.get(path))
      if want is None or got is None:
        raise ValueError(f"{where}: expected the structure of the gradients, which have "
                         + ("no such leaf" if want is None else f"a leaf of shape {want} there"))
      raise ValueError(f"{where}: expected shape {want}, that of the gradient; got {got}")
    if jax.tree.structure(tree) != jax.tree.structure(grads):
      raise ValueError(f"{name}: expected the structure of the gradients, {jax.tree.structure(grads)}; got "
                       f"{jax.tree.structure(tree)}")


def find_operands(adamw: AdamW, leaves: Leaves, grads: Any, state: AdamWState, params: Any) -> Operands | None:
  """What the kernel takes; None where the step has to go the plain way."""
  check_like_gradients(grads, params=params, mu=state.adam.mu, nu=state.adam.nu)
  if adamw.nesterov or adamw.learning_rate is None or not leaves.arrays or not leaves.counts_all:
    return None
  decays, kept = adamw.decays(grads), [jax.tree.leaves(tree) for tree in (state.adam.mu, state.adam.nu, params)]
  if decays is None or any(str(dtype_of(x)) not in _REAL for xs in [leaves.arrays, *kept] for x in xs):
    return None
  mu, nu, params = ([on_device(x) for x in xs] for xs in kept)
  mu, nu = (list(map(_laid_out_like, moments, leaves.arrays)) for moments in (mu, nu))
  given = Operands(mu, nu, params, decays)
  return given if all(map(_laid_out_alike, leaves.arrays, *given[:3])) else None


def _laid_out_like(moment: Any, gradient: Any) -> Any:
  """A moment that lies whole on every device, as `init` in an Explicit mesh's program makes them from jax 0.12 on, cut as its
  gradient is; optax's arithmetic would cut it too."""
  ours, sharding = jax.typeof(moment).sharding, jax.typeof(gradient).sharding
  whole = all(axis is None for axis in ours.spec)
  return moment if not whole or ours.spec == sharding.spec else jax.sharding.reshard(moment, sharding)


def _laid_out_alike(*arrays: Any) -> bool:
  """Whether types do not say that the arrays lie differently over a mesh."""
  return len({jax.typeof(x).sharding.spec for x in arrays}) == 1


# ----------------------------------------------------------------------------------------------------------------------
# The step


def _kept_if(condition, old: Any, new: Any) -> Any:
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), old, new)


def fused_step(adamw: AdamW, state: AdamWState, leaves: Leaves, grads: list[jax.Array], operands: Operands,
               ops: jax.Array, placement, *, zeroes: bool, skips: bool, divides: bool) -> tuple[Any, tuple]:
  """`(params, state)` by the kernel, for gradients that were judged; where it skips counts stay too."""
  mu, nu, params = _fused_step.step(
      ops, adamw.coefficients(state), grads, operands.mu, operands.nu, operands.params, placement, decays=operands.decays, zeroes=zeroes, skips=skips, divides=divides)
  adam, *counts = state.after(leaves.rebuild(mu), leaves.rebuild(nu))
  if skips:
    bad = _reference.is_bad(ops)
    adam = adam._replace(count=jnp.where(bad, state.adam.count, adam.count))
    counts = _kept_if(bad, [state.decay, state.rate], counts)
  return leaves.rebuild(params), (adam, *counts)


def plain_step(adamw: AdamW, state: AdamWState, updates: Any, params: Any) -> tuple[Any, tuple]:
  """The same by optax, for gradients that are clipped. Dtypes stay."""
  updates, after = adamw.transformation().update(updates, tuple(state), params)
  after = jax.tree.map(lambda x, old: jnp.asarray(x).astype(old.dtype), after, tuple(state))
  return optax.apply_updates(params, updates), after


def _step(settings: Settings, grads: Any, state: Any, params: Any, *, loss_scale=None, **extra) -> tuple[Any, Any]:
  del extra
  adamw, clip = settings
  if not (isinstance(state, tuple) and len(state) == 2):
    raise TypeError(f"state: expected that of init, of a clip and of optax.adamw, got {jax.tree.structure(state)}")
  adamw_state = AdamWState.of(state[1], adamw)
  loss_scale, followed = _clip.read(clip, state[0], loss_scale)
  leaves, placement = placed_leaves(grads, *clip.where)
  operands = None if clip.update_dtype else find_operands(adamw, leaves, grads, adamw_state, params)
  clipped = _clip.clip_leaves(clip, leaves, placement, loss_scale, followed, scales=operands is None)
  if operands is None:
    before = params, tuple(adamw_state)
    params, after = plain_step(adamw, adamw_state, leaves.rebuild(clipped.leaves), params)
    if clip.skips:
      params, after = _kept_if(_reference.is_bad(clipped.numbers.ops), before, (params, after))
  else:
    params, after = fused_step(adamw, adamw_state, leaves, leaves.arrays, operands, clipped.numbers.ops, placement, zeroes=clip.zeroes,
                               skips=clip.skips, divides=loss_scale is not None)
  return params, (_clip.record(clip, followed, clipped), after)


def clipped_adamw(
    learning_rate: Number | Callable[[jax.Array], Any],
    max_norm: MaxNorm,
    *,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: Number = 1e-4,
    mask: Any = None,
    nesterov: bool = False,
    loss_scale: Number | None = None,
    on_nonfinite: OnNonfiniteWindow = "propagate",
    monitor: Monitor = False,
    update_dtype: DTypeLike | None = None,
    scale_stage: ScaleStage = "auto",
    axis_name: Any = None,
    mesh: AnyMesh | None = None,
    specs: Any = None,
) -> SteppedTransformation:
  r"""A clip by the global norm and AdamW, with a `step` that does both and applies the update in one pass.

  .. math::

    g &\leftarrow g \cdot \min(1, \text{max\_norm} / \|g\|) \\
    m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
    v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
    p &\leftarrow p - \alpha \left( \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t) + \bar\varepsilon}
           + \varepsilon} + \lambda p \right)

  `init` and `update` are those of `optax.chain(global_clip(max_norm, ...), optax.adamw(learning_rate, ...))`. The state
  has the same structure, so checkpoints move both ways.

  `step(grads, state, params, *, loss_scale=None, **extra) -> (params, state)` is `update` and `optax.apply_updates` in
  one. After the norm call, native code reads g, m, v and p once and writes m, v and p in place, where `params` and
  `state` are donated. Arithmetic is float32, or float64 where a gradient, a moment or a parameter is float64. Each
  result is rounded once to its own dtype, and no gradient is rounded on the way. With u = 2^-24 and the coefficients as
  given, m is off by less than 8u of its terms' magnitudes :math:`|\beta_1 m| + |(1-\beta_1) g|` and v by 12u of v,
  besides that last rounding; p by what these make of its update, 12u of the update's terms and one rounding. As in
  optax :math:`1 - \beta^t` is computed in float32. Moments keep the dtypes that `init` gave them.

  These go the plain way under `step`, through `update`: `nesterov`, `update_dtype`, a `learning_rate` of None, a mask
  that is not a tree of Python bools, complex or integer leaves, and leaves whose gradients, moments and parameters lie
  differently on an Explicit mesh. `step` has no derivative; `update` has.

  Args:
    learning_rate: a number or a schedule, as in `optax.adamw`; it may be traced.
    max_norm: as for `global_clip`; `inf` never clips.
    b1: as in `optax.adamw`.
    b2: as in `optax.adamw`.
    eps: as in `optax.adamw`.
    eps_root: as in `optax.adamw`.
    mu_dtype: the dtype of m; by default the parameters'. That of v is always the parameters'.
    weight_decay: as in `optax.adamw`.
    mask: as in `optax.adamw`.
    nesterov: as in `optax.adamw`.
    loss_scale: as for `global_clip`; `step` takes one for each call too.
    on_nonfinite: as for `global_clip`, and "skip": `step` then leaves `params` and `state` bit for bit as they were,
      counts included (with `monitor`, the record still tells of it). `update` cannot, and raises `ValueError`.
    monitor: as for `global_clip`.
    update_dtype: as for `global_clip`.
    scale_stage: as for `global_clip`; for `update` alone.
    axis_name: as for `global_clip`.
    mesh: as for `global_clip`.
    specs: as for `global_clip`; parameters and moments lie as the gradients do.

  Returns:
    An `optax.GradientTransformationExtraArgs` that has `step`. Wrapped in another transformation (`optax.chain`,
    `optax.inject_hyperparams`) it loses it.

  Raises:
    ValueError: as `global_clip`; in `step` for parameters or moments of another structure or shape than the gradients'.
    TypeError: as `global_clip`; a number of AdamW's that is none; in `step` for a state that is not of this structure.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_globalclip as ogc
    >>> tx = ogc.clipped_adamw(0.1, max_norm=1.0, weight_decay=0.0)
    >>> params = {"w": jnp.array([1., 2.])}
    >>> def train_step(params, state, grads):  # donated in the order of the results, so that no leaf is copied
    ...   return tx.step(grads, state, params)
    >>> step = jax.jit(train_step, donate_argnums=(0, 1))
    >>> params, state = step(params, tx.init(params), {"w": jnp.array([3., 4.])})
    >>> [round(float(x), 3) for x in params["w"]]
    [0.9, 1.9]

  References:
    Loshchilov, Hutter, "Decoupled weight decay regularization", 2019; Pascanu, Mikolov, Bengio, 2013, algorithm 1.
  """
  options = dict(loss_scale=loss_scale, monitor=monitor, update_dtype=update_dtype, scale_stage=scale_stage,
                 axis_name=axis_name, mesh=mesh, specs=specs)
  adamw = AdamW(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov)
  adamw.check()
  settings = Settings(adamw, _clip.check(max_norm, on_nonfinite=on_nonfinite, **options))
  in_a_chain = "propagate" if on_nonfinite == "skip" else on_nonfinite
  chain = optax.chain(global_clip(max_norm, on_nonfinite=in_a_chain, **options), adamw.transformation())

  def update(updates, state, params=None, **extra):
    if on_nonfinite == "skip":
      raise ValueError("on_nonfinite='skip': update cannot keep what applies its updates from running; step can")
    return chain.update(updates, state, params, **extra)

  def step(grads, state, params, **extra):
    return _step(settings, grads, state, params, **extra)

  return SteppedTransformation(chain.init, update, step, settings)
