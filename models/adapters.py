"""Low-rank adapters merged into the kernels of their layers."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from models.spec import LORA_A, LORA_B, ModelSpec
from partitioning.dtypes import wide_dtype


def merge_adapters(spec: ModelSpec, params: Mapping[str, Any]) -> dict[str, Any]:
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
      found["kernel"] = _merged_kernel(spec, prefix, tree)
    return found

  return merged(params, "")


def _merged_kernel(spec: ModelSpec, prefix: str, layer: Mapping[str, Any]) -> Array:
  """Returns the merged kernel of a layer, stacked over the layers."""
  letters = ["L" + spec.optional_letters(f"{prefix}{key}") for key in (LORA_A, LORA_B, "kernel")]
  kernel = layer["kernel"]
  wide = wide_dtype(kernel.dtype)
  a, b = (jnp.asarray(layer[key]).astype(wide) for key in (LORA_A, LORA_B))
  update = jnp.einsum(
    f"{letters[0]},{letters[1]}->{letters[2]}", a, b, precision=jax.lax.Precision.HIGHEST
  )
  return (jnp.asarray(kernel).astype(wide) + spec.lora.scale * update).astype(kernel.dtype)
