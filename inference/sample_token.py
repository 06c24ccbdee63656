"""Sampling of the next token by temperature, top-k and top-p, the same on every mesh."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def filter_logits(
  logits_BV: Float[Array, "B V"],
  *,
  temperature: Float[Array, ""],
  top_k: Int[Array, ""],
  top_p: Float[Array, ""],
) -> Float[Array, "B V"]:
  """Returns (logits - the largest) / temperature, with excluded tokens set to -inf.

  First the `top_k` likeliest are kept (0: all), then of these the smallest set of likeliest tokens
  whose renormalized probabilities reach `top_p` (1: all; arXiv:1904.09751). Tokens as likely as the
  last one kept are also kept, so no id is preferred.

  Args:
    logits_BV: -inf is allowed, though not throughout a row.
    temperature: above 0.
    top_k: 0 to V.
    top_p: above 0, at most 1.
  """
  dtype = logits_BV.dtype
  largest_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
  scaled_BV = (logits_BV - largest_B1) / temperature.astype(dtype)  # so nothing overflows to inf
  sorted_BV = jnp.sort(scaled_BV, axis=-1, descending=True)
  ranks_V = jnp.arange(logits_BV.shape[-1], dtype=top_k.dtype)
  kept_V = (top_k == 0) | (ranks_V < top_k)
  sorted_BV = jnp.where(kept_V[None], sorted_BV, -jnp.inf)
  probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
  before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
  # A separate case: rounded sums reach 1 before the last token.
  kept_BV = kept_V[None] & ((before_BV < top_p.astype(dtype)) | (top_p >= 1))
  cutoff_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
  return jnp.where(scaled_BV >= cutoff_B1, scaled_BV, -jnp.inf)


def draw(
  logits_BV: Float[Array, "B V"], positions_B: Int[Array, " B"], settings: Mapping[str, Array]
) -> Int[Array, " B"]:
  """Returns each row's next token.

  A row's random keys are folded from (seed, number of the prompt, position), independent of the
  batch, padding and mesh.

  Args:
    logits_BV: of the tokens that may be drawn.
    positions_B: int32, of the tokens to draw.
    settings: as `Sampler` passes them.
  """

  def noise(number: Array, position: Array) -> Array:
    key = jax.random.fold_in(jax.random.key(settings["seed"]), number)
    key = jax.random.fold_in(key, position)
    return jax.random.gumbel(key, logits_BV.shape[1:], logits_BV.dtype)

  temperature = settings["temperature"]
  kept_BV = filter_logits(
    logits_BV,
    temperature=jnp.maximum(temperature, jnp.finfo(temperature.dtype).tiny),
    top_k=settings["top_k"],
    top_p=settings["top_p"],
  )
  # Gumbel-max: the argmax of logit + Gumbel noise is a sample of the softmax (arXiv:1411.0030, 2).
  noisy_BV = kept_BV + jax.vmap(noise)(settings["numbers"], positions_B)
  return jax.lax.argmax(jnp.where(temperature == 0, logits_BV, noisy_BV), 1, jnp.int32)
