"""The GPT whose gradients the benchmarks clip."""

import jax
import jax.numpy as jnp

VOCABULARY, POSITIONS, WIDTH, LAYERS = 8449, 1024, 768, 12


def parameters(layers=LAYERS, width=WIDTH, vocabulary=VOCABULARY):
  """A tree of `jax.ShapeDtypeStruct`: 12 leaves a layer and 4 more, by default 148 of 92,294,400 elements."""
  def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)
  layer = {
      "ln_1": {"scale": leaf(width), "bias": leaf(width)}, "ln_2": {"scale": leaf(width), "bias": leaf(width)},
      "attention": {name: leaf(width, width) for name in ("query", "key", "value", "out")},
      "mlp": {"up": leaf(width, 4 * width), "up_bias": leaf(4 * width), "down": leaf(4 * width, width),
              "down_bias": leaf(width)},
  }
  return {"tokens": leaf(vocabulary, width), "positions": leaf(POSITIONS, width), "layers": [layer] * layers,
          "ln_out": {"scale": leaf(width), "bias": leaf(width)}}


def leaf_shapes(*args):
  """The shapes alone, as a list."""
  return [leaf.shape for leaf in jax.tree.leaves(parameters(*args))]
