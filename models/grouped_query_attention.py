"""Grouped-query attention: the projections around `models.attention`.

Names carry their dims: `q_BTNH` is batch, query length, heads, head size.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from models.attention import QUERIES, Attend
from models.kv_cache import Cache, update_cache
from models.layer_pattern import Layer
from models.layers import Linear, Norm, adapter_dropout
from models.rematerialization import named
from models.rope import apply_rope
from models.spec import RESIDUAL, DecoderSpec
from models.token_positions import Rows
from partitioning.constraints import constrain
from partitioning.parallel.matmuls import column_parallel, row_parallel

SINK_DEVIATION = 0.02  # of the initial sinks, as of gpt-oss in the transformers library


def out_dims(spec: DecoderSpec, heads: str) -> dict[str, str]:
  """Returns the rows of the projection `out` of an attention with these letters of values."""
  return {"out/kernel": f"{heads}D", **({"out/bias": "D"} if spec.has_bias("out") else {})}


class GroupedQueryAttention(nnx.Module):
  """Grouped-query attention. Sources: arXiv:2305.13245; 2104.09864 for rotary positions."""

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str = "layers/attention"):
    """Draws the four projections; the last is scaled down by the depth, as in GPT-2."""
    self.spec, linear = spec, functools.partial(Linear, spec=spec, rngs=rngs)
    self.query, self.key = linear(f"{name}/query"), linear(f"{name}/key")
    self.value = linear(f"{name}/value")
    if spec.query_key_norm:
      self.query_norm = Norm(f"{name}/query_norm", spec)
      self.key_norm = Norm(f"{name}/key_norm", spec)
    self.out = linear(f"{name}/out", scale=spec.out_scale)
    if spec.attention_sinks:
      dtype, shape = spec.parameter_dtype, spec.sizes("N")
      deviation = jnp.asarray(SINK_DEVIATION, dtype)
      self.sinks = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)
    self.attend = Attend.of(spec)

  @staticmethod
  def dims(spec: DecoderSpec) -> dict[str, str]:
    """Returns parameter -> letters."""
    found, rows = {"query/kernel": "DNH", "(key|value)/kernel": "DKH"}, {"query": "NH", "key": "KH"}
    biases = {**rows, "value": "KH"}
    found |= {f"{name}/bias": letters for name, letters in biases.items() if spec.has_bias(name)}
    if spec.query_key_norm:
      across = {f"{name}_norm/scale": letters for name, letters in rows.items()}
      found |= across if spec.query_key_norm_across_heads else {"(query|key)_norm/scale": "H"}
    if spec.attention_sinks:
      found["sinks"] = "N"
    return found | out_dims(spec, "NH")

  def __call__(
    self,
    x_BRD: Float[Array, "B R D"],
    layer: Layer,
    rows: Rows,
    cache: Cache | None = None,
    key: Key[Array, ""] | None = None,
  ) -> tuple[Float[Array, "B R D"], Cache | None]:
    """Returns the residual's update, and the cache with these tokens in it.

    Args:
      x_BRD: the normalized residual.
      layer: the numbers that differ between layers.
      rows: slots, positions and documents of the tokens.
      cache: this layer's; None if x has all tokens.
      key: draws the dropout of the adapters' inputs; None turns it off.
    """
    spec, keys = self.spec, (None, None) if key is None else jax.random.split(key)
    dropped = functools.partial(adapter_dropout, spec.lora.dropout, slots_T=rows.slots_BT[0])
    projections = [self.query, self.key, self.value]
    inputs = dropped(key=keys[0], letters=RESIDUAL.inside, shape=x_BRD.shape)
    projected = column_parallel(x_BRD, projections, RESIDUAL, inputs)
    q_BTNH, k_BTKH, v_BTKH = (
      named(linear.add_bias(x), name)
      for linear, x, name in zip(projections, projected, ("query", "key", "value"), strict=True)
    )
    if spec.query_key_norm:
      q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
    if most := spec.clip_qkv:
      q_BTNH, k_BTKH, v_BTKH = (jnp.clip(x, -most, most) for x in (q_BTNH, k_BTKH, v_BTKH))
    if (table_2BTh := rows.rope(layer)) is not None:
      adjacent = spec.rotary_pairs == "adjacent"
      q_BTNH, k_BTKH = (apply_rope(x, table_2BTh, adjacent=adjacent) for x in (q_BTNH, k_BTKH))
    q_BTNH = layer.scaled(q_BTNH)
    if cache is not None:
      cache = update_cache(cache, constrain(k_BTKH, "BSKH"), constrain(v_BTKH, "BSKH"))
      k_BTKH, v_BTKH = cache.keys, cache.values
    sinks_N = constrain(self.sinks[...], "N") if spec.attention_sinks else None
    output_BTNH = self.attend(
      q_BTNH, k_BTKH, v_BTKH, layer, rows, sinks_N, cached=cache is not None
    )
    inputs = dropped(key=keys[1], letters=QUERIES, shape=output_BTNH.shape)
    return self.out.add_bias(row_parallel(output_BTNH, self.out, RESIDUAL, inputs)), cache
