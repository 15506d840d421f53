"""What the package says about itself and about a run: `backend_info`, `clip_metrics`."""

from typing import Any

import jax

from optax_globalclip import _native
from optax_globalclip._clip import ClipState
from optax_globalclip._loss_scale import LossScaleState, find_states, plain


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
    found = _native.status(platform)
    if mode == "reference":
      info[platform] = "reference: OPTAX_GLOBALCLIP_BACKEND=reference"
    elif found.available:
      info[platform] = f"native: {found.reason}"
    else:
      info[platform] = f"{'error' if mode == 'native' else 'reference'}: {found.reason}"
  info["other"] = "reference: native code is for cpu and cuda"
  return info


def clip_metrics(opt_state: Any) -> dict[str, jax.Array]:
  """The numbers of the last clip, found anywhere in an optimizer state.

  Args:
    opt_state: an optimizer state that holds exactly one `clipped_multi_steps` (which records always, once a window), or
      one clip with `monitor=True`; `flax.nnx.Optimizer`'s included.

  Returns:
    Scalars by name: `global_norm` (before the clip, in true units), `clip_factor`, `steps`, `clipped_steps`,
    `nonfinite_steps`, `consecutive_nonfinite`; of `clipped_multi_steps` also `loss_scale`, the one now in
    force. A step is an update, or a window; before the first, all are 0.

  Raises:
    ValueError: where the state holds no monitored clip, or several.

  Examples:
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> tx = ogc.global_clip(1.0, monitor=True)
    >>> _, state = tx.update([jnp.array([3., 4.])], tx.init([jnp.zeros(2)]))
    >>> float(ogc.clip_metrics(state)["global_norm"])
    5.0
  """
  states = find_states(opt_state, ClipState)
  if len(states) != 1:
    raise ValueError(f"clip_metrics: expected one monitored clip in the optimizer state, found {len(states)} "
                     "(global_clip and per_tensor_clip record only with monitor=True)")
  metrics = {name: plain(value) for name, value in states[0]._asdict().items()}
  scales = find_states(opt_state, LossScaleState)
  if len(scales) == 1:
    metrics["loss_scale"] = plain(scales[0].loss_scale)
  return metrics
