"""Multi-head latent attention. Source: arXiv:2405.04434, section 2.1 (DeepSeek-V2).

Keys and values of all heads are projections of one latent vector per token, and of a rotary key
that all heads share; generation caches these two alone.

Names carry their dims: `latent_BRC` is batch, sequence, latent size. A head has H dims in queries
and keys, of which the last I are rotated and the first G = H - I are not, and U in values.
"""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from models.attention import (
  Attend,
  Cache,
  causal_mask,
  masked_softmax,
  out_dims,
  update_cache,
)
from models.layers import Linear, Norm, named
from models.positions import Layer, Rows, apply_rope
from models.spec import RESIDUAL, DecoderSpec
from partitioning.constraints import constrain
from partitioning.dtypes import scaled, wide_dtype
from partitioning.parallel.matmuls import column_parallel, for_each_head, row_parallel
from partitioning.parallel.sharded_function import Residual

# The latent vectors of queries and of keys and values, and the rotary key. A down-projection's own
# output dim has another letter, since its kernel is sharded otherwise.
QUERY_LATENT = Residual(between="BRQ", inside="BTQ")
LATENT = Residual(between="BRC", inside="BTC")
ROTARY_KEY = Residual(between="BRI", inside="BTI")
# Letters of the stacked kernels that give what latent attention computes of each token.
DOWN_PROJECTIONS = ("LDq", "LDc", "LDI")
# Down-projections of each token, where it is: latent vectors are gathered, not the residual.
_IN_PLACE = Residual(between=RESIDUAL.between, inside=RESIDUAL.between)
_CACHED = Residual(between="BSC", inside="BSC")


class LatentAttention(nnx.Module):
  """Multi-head latent attention: keys and values of all heads follow from one latent vector."""

  cached = "latents", "rotary_keys"

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str = "layers/attention"):
    """Draws the projections; the last is scaled down by the depth, as in GPT-2."""
    linear = functools.partial(Linear, spec=spec, rngs=rngs)
    norm = functools.partial(Norm, spec=spec, epsilon=spec.latent_norm_epsilon)
    self.has_query_latent = spec.query_latent_size > 0
    if self.has_query_latent:
      self.query_latent = linear(f"{name}/query_latent")
      self.query_latent_norm = norm(f"{name}/query_latent_norm")
    self.query = linear(f"{name}/query")
    self.latent = linear(f"{name}/latent")
    self.latent_norm = norm(f"{name}/latent_norm")
    self.rotary_key = linear(f"{name}/rotary_key")
    self.key_value = linear(f"{name}/key_value")
    self.out = linear(f"{name}/out", scale=spec.out_scale)
    self.unrotated_size = spec.head_size - spec.rotary_size
    self.attend = Attend.of(spec, value_head="U")
    self.adjacent_pairs = spec.rotary_pairs == "adjacent"

  @staticmethod
  def dims(spec: DecoderSpec) -> dict[str, str]:
    """Returns parameter -> letters; the bias of `out` stands for the down-projections' too."""
    down, found = {"latent": "c", "rotary_key": "I"}, {}
    if spec.query_latent_size:
      down = {"query_latent": "q", **down}
      found["query_latent_norm/scale"] = "Q"
    found["query/kernel"] = "QNH" if spec.query_latent_size else "DNH"
    found |= {f"{name}/kernel": f"D{letter}" for name, letter in down.items()}
    if spec.has_bias("out"):
      found |= {f"{name}/bias": letter for name, letter in down.items()}
    found |= {"latent_norm/scale": "C", "key_value/kernel": "CKJ"}
    return found | out_dims(spec, "NU")

  def __call__(
    self,
    x_BRD: Float[Array, "B R D"],
    layer: Layer,
    rows: Rows,
    cache: Cache | None = None,
    key: Key[Array, ""] | None = None,
  ) -> tuple[Float[Array, "B R D"], Cache | None]:
    """Returns the residual's update and the cache, as `GroupedQueryAttention`; draws nothing."""
    del key
    table_2BTh = rows.rope(layer)
    q_BTNH, latent_BRC, rotary_BRI = self._down(x_BRD)
    q_BTNH = layer.scaled(self._rotated_last(q_BTNH, table_2BTh), rows)
    if cache is not None:
      rotary_BTI = self._rotated(rotary_BRI[:, :, None], table_2BTh)[:, :, 0]
      latent_BSC, rotary_BSI = constrain(latent_BRC, "BSC"), constrain(rotary_BTI, "BSI")
      cache = update_cache(cache, latents=latent_BSC, rotary_keys=rotary_BSI)
      output_BTNU = self._cached(q_BTNH, layer, rows, cache)
    else:
      [found_BTKJ] = column_parallel(latent_BRC, [self.key_value], LATENT)
      found_BTKJ = named(found_BTKJ, "key_value")
      # Rotated where the sequence is not split: else the rope table would be, and gathered again.
      rotary_BTKI = self._rotated(for_each_head(rotary_BRI, "K", ROTARY_KEY), table_2BTh)
      k_BTKH, v_BTKU = self._keys_and_values(found_BTKJ, rotary_BTKI)
      output_BTNU = self.attend(q_BTNH, k_BTKH, v_BTKU, layer, rows)
    return self.out.add_bias(row_parallel(output_BTNU, self.out, RESIDUAL)), cache

  def _down(
    self, x_BRD: Float[Array, "B R D"]
  ) -> tuple[Float[Array, "B T N H"], Float[Array, "B R C"], Float[Array, "B R I"]]:
    """Returns the queries, the normalized latent vectors and the rotary keys, before RoPE."""
    layers, names = [self.latent, self.rotary_key], ["latent", "rotary_key"]
    if self.has_query_latent:
      layers, names = [*layers, self.query_latent], [*names, "query_latent"]
    found = column_parallel(x_BRD, layers, _IN_PLACE)
    latent_BRC, rotary_BRI, *query = (
      named(linear.add_bias(x), name) for linear, x, name in zip(layers, found, names, strict=True)
    )
    if query:
      query_BRQ = constrain(self.query_latent_norm(query[0]), QUERY_LATENT.between)
      [q_BTNH] = column_parallel(query_BRQ, [self.query], QUERY_LATENT)
    else:
      [q_BTNH] = column_parallel(x_BRD, [self.query], RESIDUAL)
    latent_BRC = constrain(self.latent_norm(latent_BRC), LATENT.between)
    return named(q_BTNH, "query"), latent_BRC, rotary_BRI

  def _rotated(self, x_BTNI: Float[Array, "B T N I"], table_2BTh: Array | None) -> Array:
    if table_2BTh is None:  # no layer rotates
      return x_BTNI
    return apply_rope(x_BTNI, table_2BTh, adjacent=self.adjacent_pairs)

  def _rotated_last(self, q_BTNH: Float[Array, "B T N H"], table_2BTh: Array | None) -> Array:
    """Returns queries of which the last dims are rotated."""
    unrotated, rotary = q_BTNH[..., : self.unrotated_size], q_BTNH[..., self.unrotated_size :]
    return jnp.concatenate([unrotated, self._rotated(rotary, table_2BTh)], axis=-1)

  def _keys_and_values(
    self, found_BSKJ: Float[Array, "B S K J"], rotary_BSKI: Float[Array, "B S K I"]
  ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K U"]]:
    """Returns keys and values of the projected latent vectors and of the rotary keys."""
    k_BSKG, v_BSKU = found_BSKJ[..., : self.unrotated_size], found_BSKJ[..., self.unrotated_size :]
    return jnp.concatenate([k_BSKG, rotary_BSKI], axis=-1), v_BSKU

  def _cached(
    self, q_BTNH: Float[Array, "B T N H"], layer: Layer, rows: Rows, cache: Cache
  ) -> Float[Array, "B T N U"]:
    """Returns the attention output over the slots of a cache, in the cheaper of two ways."""
    shapes = q_BTNH.shape, cache["latents"].shape, self.key_value.kernel.shape
    # In 8 bits the projection of each latent vector is rounded, as in training.
    if not self.key_value.in_8_bits and _absorbs(*shapes):
      return self._absorbed(q_BTNH, layer.window, rows.slots_BT, cache)
    [found_BSKJ] = column_parallel(cache["latents"], [self.key_value], _CACHED)
    rotary_BSKI = cache["rotary_keys"][:, :, None]
    rotary_BSKI = jnp.broadcast_to(rotary_BSKI, (*found_BSKJ.shape[:3], rotary_BSKI.shape[-1]))
    k_BSKH, v_BSKU = self._keys_and_values(found_BSKJ, constrain(rotary_BSKI, "BSKI"))
    return self.attend(q_BTNH, k_BSKH, v_BSKU, layer, rows, cached=True)

  def _absorbed(
    self,
    q_BTNH: Float[Array, "B T N H"],
    window: Int[Array, ""] | None,
    slots_BT: Int[Array, "B T"],
    cache: Cache,
  ) -> Float[Array, "B T N U"]:
    """Returns the same with the projections applied to queries and outputs.

    So attention is over latent vectors, of which all heads have the same. Source: the paper's
    appendix B.
    """
    size, wide = self.unrotated_size, wide_dtype(q_BTNH.dtype)
    kernel_CKJ = constrain(self.key_value.effective_kernel().astype(q_BTNH.dtype), "CKJ")
    q_BTNH = scaled(q_BTNH, self.attend.scale)
    q_BTNC = jnp.einsum("BTNG,CNG->BTNC", q_BTNH[..., :size], kernel_CKJ[..., :size])
    scores = functools.partial(jnp.einsum, preferred_element_type=wide)
    scores_BNTS = scores("BTNC,BSC->BNTS", constrain(q_BTNC, "BTNC"), cache["latents"])
    scores_BNTS += scores("BTNI,BSI->BNTS", q_BTNH[..., size:], cache["rotary_keys"])
    slots_S = jnp.arange(cache["latents"].shape[1], dtype=slots_BT.dtype)
    mask_BTS = causal_mask(slots_BT, slots_S, window)
    weights_BNTS = masked_softmax(scores_BNTS, mask_BTS, cap=self.attend.cap).astype(q_BTNH.dtype)
    out_BTNC = jnp.einsum("BNTS,BSC->BTNC", weights_BNTS, cache["latents"])
    out_BTNU = jnp.einsum("BTNC,CNU->BTNU", out_BTNC, kernel_CKJ[..., size:])
    return constrain(out_BTNU, "BTNU")


def _absorbs(
  q_BTNH: tuple[int, ...], latents_BSC: tuple[int, ...], kernel_CKJ: tuple[int, ...]
) -> bool:
  """Returns whether fewer multiplications are needed with the projections absorbed.

  Of a row and head: C J for each query, and 2 C + I for each pair of query and slot; else C J for
  each slot, and J + I (which is G + I + U) for each pair.

  Args:
    q_BTNH: shape of the queries.
    latents_BSC: of the cache.
    kernel_CKJ: of the projection to keys and values.
  """
  (_, queries, _, _), (_, slots, latent), (*_, both) = q_BTNH, latents_BSC, kernel_CKJ
  pairs = queries * slots
  return queries * latent * both + pairs * 2 * latent < slots * latent * both + pairs * both
