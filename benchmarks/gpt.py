"""The GPT whose gradients the benchmarks clip."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Size(NamedTuple):
  layers: int
  width: int
  vocabulary: int


SMALL = Size(layers=12, width=768, vocabulary=8449)  # 148 leaves of 92,294,400 elements
LARGE = Size(layers=24, width=2048, vocabulary=50257)  # 292 leaves of 1.3 billion
POSITIONS = 1024


def parameters(size=SMALL):
  """A tree of `jax.ShapeDtypeStruct`: 12 leaves a layer and 4 more."""
  def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)
  width = size.width
  layer = {
      "ln_1": {"scale": leaf(width), "bias": leaf(width)}, "ln_2": {"scale": leaf(width), "bias": leaf(width)},
      "attention": {name: leaf(width, width) for name in ("query", "key", "value", "out")},
      "mlp": {"up": leaf(width, 4 * width), "up_bias": leaf(4 * width), "down": leaf(4 * width, width),
              "down_bias": leaf(width)},
  }
  return {"tokens": leaf(size.vocabulary, width), "positions": leaf(POSITIONS, width), "layers": [layer] * size.layers,
          "ln_out": {"scale": leaf(width), "bias": leaf(width)}}


def leaf_shapes(size=SMALL):
  """The shapes alone, as a list."""
  return [leaf.shape for leaf in jax.tree.leaves(parameters(size))]


def random_leaves(shapes, seed=0):
  random = np.random.default_rng(seed)
  return [jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes]
