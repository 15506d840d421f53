"""Types of the public functions' arguments."""

from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

__all__ = ["AnyMesh", "Backend", "DTypeLike", "Number", "OnNonfinite", "OnNonfiniteWindow", "ScaleStage", "Tree"]

Tree = TypeVar("Tree")
AnyMesh = Mesh | AbstractMesh

# A scalar of Python, NumPy or JAX; traced or not.
Number = float | np.floating[Any] | np.integer[Any] | jax.Array

# What a bad update becomes, in a transformation and in windows.
OnNonfinite = Literal["propagate", "zero", "raise"]
OnNonfiniteWindow = Literal["skip", "propagate", "zero", "raise"]

ScaleStage = Literal["auto", "kernel", "xla"]
Backend = Literal["auto", "native", "reference"]
