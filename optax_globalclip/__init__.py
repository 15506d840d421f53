"""Global gradient-norm clipping for JAX: right in every dtype and at every magnitude, native on CPU and CUDA."""

from optax_globalclip._adamw import clipped_adamw
from optax_globalclip._clip import clip_tree, global_clip, per_tensor_clip
from optax_globalclip._history import History
from optax_globalclip._loss_scale import DynamicLossScale, LossScaleState, current_loss_scale
from optax_globalclip._monitor import ClipState
from optax_globalclip._multi_steps import clipped_multi_steps, has_updated
from optax_globalclip._native import load_all, use_backend
from optax_globalclip._norm import global_norm, leaf_norms
from optax_globalclip._report import LeafReport, LeafRow, backend_info, clip_metrics, custom_call_targets, leaf_report
from optax_globalclip._rules import ThresholdRule, adagc, autoclip, ema_clip, zclip
from optax_globalclip._spikes import SpikeRule
from optax_globalclip._thresholds import ThresholdState
from optax_globalclip._window_state import ClippedMultiStepsState

__version__ = "0.1.0"
__all__ = [
    "ClipState",
    "ClippedMultiStepsState",
    "DynamicLossScale",
    "History",
    "LeafReport",
    "LeafRow",
    "LossScaleState",
    "SpikeRule",
    "ThresholdRule",
    "ThresholdState",
    "adagc",
    "autoclip",
    "backend_info",
    "clip_metrics",
    "clip_tree",
    "clipped_adamw",
    "clipped_multi_steps",
    "current_loss_scale",
    "custom_call_targets",
    "ema_clip",
    "global_clip",
    "global_norm",
    "has_updated",
    "leaf_norms",
    "leaf_report",
    "per_tensor_clip",
    "use_backend",
    "zclip",
]

load_all()  # a program compiled elsewhere finds its custom calls
del load_all
