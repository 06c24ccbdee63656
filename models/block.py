"""One layer of the decoder: attention and MLP, or a mixture of experts, with their norms.

Names carry their dims: `x_BRD` is batch, residual sequence, width.
"""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float, Key

from models import activations
from models.grouped_query_attention import GroupedQueryAttention
from models.kv_cache import Cache, LatentCache
from models.layer_pattern import Layer
from models.layers import MLP, Norm, dropout
from models.losses import Sums
from models.rematerialization import named
from models.spec import LATENT_ATTENTION, LAYERS, DecoderSpec, under
from models.token_positions import Rows
from partitioning.dtypes import scaled


def _latent_attention() -> type[nnx.Module]:
  from models.latent_attention import LatentAttention  # of such models alone

  return LatentAttention


# By `model.attention`: what returns the class.
ATTENTION: dict[str, Callable[[], type[nnx.Module]]] = {
  "grouped_query": lambda: GroupedQueryAttention,
  LATENT_ATTENTION: _latent_attention,
}


class Block(nnx.Module):
  """One layer: attention and MLP, each with a norm before it, after it, or both.

  In place of the MLP it may have a mixture of experts.
  """

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, stack: str = LAYERS):
    """Draws the layer's parameters from `rngs.params`.

    Args:
      spec: of the model.
      rngs: draws them.
      stack: how their names begin. Of a model with experts the layers in `dense_layers/` have none.
    """
    self.spec = spec
    if spec.pre_norms:
      self.attention_norm = Norm(f"{stack}attention_norm", spec)
    self.attention = ATTENTION[spec.attention]()(spec, rngs=rngs, name=f"{stack}attention")
    if spec.pre_norms:
      self.mlp_norm = Norm(f"{stack}mlp_norm", spec)
    self.sparse = spec.experts > 0 and stack == LAYERS
    if self.sparse:
      from models.experts import Experts  # of such models alone

      self.experts = Experts(spec, rngs=rngs)
    else:
      self.mlp = MLP(spec, rngs=rngs, name=f"{stack}mlp")
    if spec.post_norms:
      self.attention_post_norm = Norm(f"{stack}attention_post_norm", spec)
      self.mlp_post_norm = Norm(f"{stack}mlp_post_norm", spec)

  @staticmethod
  def dims(spec: DecoderSpec, stack: str = LAYERS) -> dict[str, str]:
    """Returns parameter -> letters, of a layer of a stack."""
    if spec.experts > 0 and stack == LAYERS:
      from models.experts import Experts

      feedforward = under("experts", Experts.dims(spec))
    else:
      feedforward = under("mlp", MLP.dims(spec) | MLP.bias_dims(spec))
    found = under("attention", ATTENTION[spec.attention]().dims(spec)) | feedforward
    for kind, there in (("norm", spec.pre_norms), ("post_norm", spec.post_norms)):
      for part in ("attention", "mlp") if there else ():
        found |= under(f"{part}_{kind}", Norm.dims(spec))
    return found

  def __call__(
    self,
    x_BRD: Float[Array, "B R D"],
    layer: Layer,
    key: Key[Array, ""] | None,
    rows: Rows,
    cache: Cache | LatentCache | None = None,
  ) -> tuple[Float[Array, "B R D"], Cache | LatentCache | None, Sums]:
    """Returns the residual after this layer, the layer's cache, and numbers of each row.

    Args:
      x_BRD: the residual.
      layer: the numbers that differ between layers.
      key: draws the dropout; None turns it off.
      rows: slots, positions and documents of the tokens.
      cache: keys and values of earlier tokens; None if x has all tokens.

    Returns:
      The residual; the cache; numbers of each row [B, ...], by name: of a sparse layer, those of
      `models.experts`.
    """
    spec, keys = self.spec, (None,) * 4
    if key is not None:
      count = 4 if spec.lora.dropout else 2
      keys = (*jax.random.split(key, count), None, None)[:4]
    x_BRD = named(x_BRD, "layer_input")
    normed_BRD = x_BRD
    if spec.pre_norms:
      normed_BRD = named(self.attention_norm(x_BRD), "attention_input")
    update_BRD, cache = self.attention(normed_BRD, layer, rows, cache, keys[2])
    update_BRD = named(update_BRD, "attention_update")
    if spec.post_norms:
      update_BRD = self.attention_post_norm(update_BRD)
    update_BRD = self._scaled(update_BRD)
    activations.record("attention", update_BRD)
    x_BRD = x_BRD + dropout(update_BRD, spec.dropout_rate, keys[0], rows.slots_BT[0])
    normed_BRD = named(self.mlp_norm(x_BRD), "mlp_input") if spec.pre_norms else x_BRD
    numbers = {}
    if self.sparse:
      update_BRD, numbers = self.experts(normed_BRD, rows)
    else:
      update_BRD = self.mlp(normed_BRD, keys[3], rows.slots_BT[0])
    update_BRD = named(update_BRD, "mlp_update")
    if spec.post_norms:
      update_BRD = self.mlp_post_norm(update_BRD)
    update_BRD = self._scaled(update_BRD)
    activations.record("mlp", update_BRD)
    x_BRD = x_BRD + dropout(update_BRD, spec.dropout_rate, keys[1], rows.slots_BT[0])
    activations.record("residual", x_BRD)
    return x_BRD, cache, numbers

  def _scaled(self, update_BRD: Float[Array, "B R D"]) -> Float[Array, "B R D"]:
    """Returns what is added to the residual, times `model.residual_multiplier` (Granite)."""
    factor = self.spec.residual_multiplier
    return update_BRD if factor == 1.0 else scaled(update_BRD, factor)


def stacked(spec: DecoderSpec, rngs: nnx.Rngs, count: int, name: str) -> Block:
  """Returns `count` layers with their parameters stacked along the first dim."""

  @nnx.split_rngs(splits=count)
  @nnx.vmap(in_axes=0, out_axes=0)
  def stack(rngs: nnx.Rngs) -> Block:
    return Block(spec, rngs=rngs, stack=name)

  return stack(rngs)
