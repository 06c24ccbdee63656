"""Low-rank adapters (LoRA): y = x W + s (x A) B, with W frozen and A and B trained.

Sources: arXiv:2106.09685; arXiv:2312.03732 for s = alpha / sqrt(r) instead of alpha / r.

`partitioning.parallel.matmuls` computes it beside the kernel's own matmul, so that neither A B nor
the gradient of W is ever formed.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from models.spec import LORA_A, LORA_B, ModelSpec
from partitioning.dtypes import wide_dtype


def draw(key: Key[Array, ""], shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
  """Draws A as PEFT does: uniformly within fan_in ** -0.5, which is Kaiming's with a = sqrt(5).

  Args:
    key: draws it.
    shape: of A, the rank last.
    dtype: of A.
  """
  bound = jnp.asarray(math.prod(shape[:-1]) ** -0.5, dtype)
  return jax.random.uniform(key, shape, dtype, -1, 1) * bound


def merge(spec: ModelSpec, params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns parameters of the same model without adapters: kernel + s A B.

  The sum is computed in float32 or wider and rounded to the kernel's dtype once.

  Args:
    spec: of the model with adapters.
    params: nested dict, arrays of NumPy or JAX; under `jax.jit` they may be sharded.
  """

  def merged(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found = {
      key: merged(value, f"{prefix}{key}/") if isinstance(value, Mapping) else value
      for key, value in tree.items()
      if key not in (LORA_A, LORA_B)
    }
    if LORA_A in tree:
      found["kernel"] = _sum(spec, prefix, tree)
    return found

  return merged(params, "")


def _sum(spec: ModelSpec, prefix: str, layer: Mapping[str, Any]) -> Array:
  """Returns the merged kernel of a layer, stacked over the layers."""
  letters = ["L" + spec.optional_letters(f"{prefix}{key}") for key in (LORA_A, LORA_B, "kernel")]
  kernel = layer["kernel"]
  wide = wide_dtype(kernel.dtype)
  a, b = (jnp.asarray(layer[key]).astype(wide) for key in (LORA_A, LORA_B))
  update = jnp.einsum(
    f"{letters[0]},{letters[1]}->{letters[2]}", a, b, precision=jax.lax.Precision.HIGHEST
  )
  return (jnp.asarray(kernel).astype(wide) + spec.lora.scale * update).astype(kernel.dtype)
