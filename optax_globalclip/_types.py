"""Types of the public functions' arguments."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from optax_globalclip._rules import ThresholdRule

__all__ = ["AnyMesh", "Backend", "DTypeLike", "MaxNorm", "Monitor", "Number", "OnNonfinite", "OnNonfiniteWindow",
           "ScaleStage", "Tree"]

Tree = TypeVar("Tree")
AnyMesh = Mesh | AbstractMesh

# A scalar of Python, NumPy or JAX; traced or not.
Number = float | np.floating[Any] | np.integer[Any] | jax.Array

# A number, a schedule of the count of updates or windows, or a rule.
MaxNorm = Number | Callable[[jax.Array], Any] | ThresholdRule

# What a bad update becomes, in a transformation and in windows.
OnNonfinite = Literal["propagate", "zero", "raise"]
OnNonfiniteWindow = Literal["skip", "propagate", "zero", "raise"]

Monitor = bool | Literal["leaves"]
ScaleStage = Literal["auto", "kernel", "xla"]
Backend = Literal["auto", "native", "reference"]
