"""A decoder-only transformer, and the sizes the examples train it at."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Size(NamedTuple):
  vocabulary: int
  width: int
  layers: int
  heads: int
  length: int  # tokens in a sequence
  learning_rate: float  # the peak, after warm-up


# 12m and 120m have the widths, depths and (120m) vocabulary of the field report's two
# models. Its names are kept; what a run prints is the count of this transformer.
SIZES = {
  "tiny": Size(512, 128, 2, 4, 128, 3e-3),
  "12m": Size(8449, 384, 6, 6, 256, 3e-4),
  "120m": Size(8449, 768, 12, 12, 256, 3e-4),
}


class Block(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)); x is [batch, length, width]."""

  heads: int
  dtype: str

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    width = x.shape[-1]
    attention = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)
    x = x + attention(nn.LayerNorm(dtype=self.dtype)(x), mask=mask)
    hidden = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
    return x + nn.Dense(width, dtype=self.dtype)(hidden)


class Transformer(nn.Module):
  """Next-token logits [batch, length, vocabulary] of int32 tokens [batch, length].

  Computed in `dtype`; the parameters are float32.
  """

  size: Size
  dtype: str = "float32"

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    embed = nn.Embed(self.size.vocabulary, self.size.width, dtype=self.dtype)
    position = self.param(
      "position",
      nn.initializers.normal(0.02),
      (self.size.length, self.size.width),
    )
    x = embed(tokens) + position[None, : tokens.shape[1]].astype(self.dtype)
    mask = nn.make_causal_mask(tokens)
    for _ in range(self.size.layers):
      x = Block(self.size.heads, self.dtype)(x, mask)
    # The output layer is the embedding's transpose.
    return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def row_losses(apply_fn, params, tokens: jax.Array) -> jax.Array:
  """Mean cross-entropy (nats a token) of each row of tokens [rows, length + 1]."""
  logits = apply_fn({"params": params}, tokens[:, :-1]).astype(jnp.float32)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
  return jnp.mean(losses, axis=-1)
