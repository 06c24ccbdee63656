"""A pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Its layers are stacked along L and scanned, so the program's size does not grow with depth.
Names carry their dims: `q_BTNH` is batch, query length, heads, head size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key
from ml_collections import ConfigDict

from models import documents
from models.attention import Cache, causal_attention, layer_of, remember, rotate, with_layer
from models.dtypes import wide_dtype
from partitioning.constraints import constrain
from partitioning.dims import Dim
from partitioning.regions import gathered_products, scattered_lookup, scattered_product


def legend(config: ConfigDict) -> dict[str, Dim]:
  """Returns letter -> Dim for this config."""
  model = config.model
  return {
    "B": Dim("batch", None),
    "T": Dim("sequence", None),
    "R": Dim("residual_sequence", None),
    "S": Dim("key_sequence", None),
    "L": Dim("layers", model.layers),
    "D": Dim("model", model.model_size),
    "F": Dim("feedforward", model.feedforward_size),
    "N": Dim("heads", model.heads),
    "K": Dim("kv_heads", model.kv_heads, may_replicate=True),
    "H": Dim("head", model.head_size),
    "V": Dim("vocabulary", padded_vocabulary(config)),
  }


PARAMETERS = {
  "embed/table": "VD",
  "layers/attention_norm/scale": "LD",
  "layers/attention/query/kernel": "LDNH",
  "layers/attention/(key|value)/kernel": "LDKH",
  "layers/attention/out/kernel": "LNHD",
  "layers/mlp_norm/scale": "LD",
  "layers/mlp/(gate|up)/kernel": "LDF",
  "layers/mlp/down/kernel": "LFD",
  "final_norm/scale": "D",
  "unembed/kernel": "DV",
}


def parameters(config: ConfigDict) -> dict[str, str]:
  """Returns name pattern -> letters of the parameters that this config has."""
  tied = config.model.tied_embeddings
  return {name: dims for name, dims in PARAMETERS.items() if not (tied and "unembed" in name)}


# What the backward pass recomputes, by the value of `training.rematerialization`.
REMATERIALIZATION = {
  "none": None,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}


def padded_vocabulary(config: ConfigDict) -> int:
  """Returns the vocabulary's size, rounded up so that shapes never depend on the mesh."""
  multiple = config.model.vocabulary_multiple
  return -(-config.model.vocabulary_size // multiple) * multiple


def rms_norm(
  x: Float[Array, "*X D"], scale_D: Float[Array, " D"], *, epsilon: float
) -> Float[Array, "*X D"]:
  """Scales x to unit root mean square over D, in float32 or wider. Source: arXiv:1910.07467."""
  wide = wide_dtype(x.dtype)
  x_wide = x.astype(wide)
  inverse = jax.lax.rsqrt(jnp.mean(x_wide * x_wide, axis=-1, keepdims=True) + epsilon)
  scale = scale_D.astype(wide).reshape((1,) * (x.ndim - 1) + scale_D.shape)
  return (x_wide * inverse * scale).astype(x.dtype)


def dropout(x_BRD: Array, rate: float, key: Key[Array, ""] | None) -> Array:
  """Zeroes a share `rate` of x and scales the rest up; without a key it returns x as it is."""
  if key is None or rate == 0.0:
    return x_BRD
  keep_BRD = constrain(jax.random.bernoulli(key, 1.0 - rate, x_BRD.shape), "BRD")
  return jnp.where(keep_BRD, x_BRD / (1.0 - rate), jnp.zeros_like(x_BRD))


class Kernel(nnx.Module):
  """A matrix (of any rank) drawn with standard deviation `scale * fan_in ** -0.5`."""

  def __init__(
    self, letters: str, config: ConfigDict, *, fan_in: int, scale: float = 1.0, rngs: nnx.Rngs
  ):
    """Draws the kernel with the sizes that its letters have in the legend."""
    shape = tuple(legend(config)[letter].size for letter in letters)
    dtype = jnp.dtype(config.training.parameter_dtype)
    deviation = jnp.asarray(scale * fan_in**-0.5, dtype)
    self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)
    self.letters = letters


class Norm(nnx.Module):
  """RMSNorm over D."""

  def __init__(self, config: ConfigDict):
    """Starts with a scale of one."""
    dtype = jnp.dtype(config.training.parameter_dtype)
    self.scale = nnx.Param(jnp.ones((config.model.model_size,), dtype))
    self.epsilon = config.model.norm_epsilon

  def __call__(self, x_BRD: Float[Array, "B R D"]) -> Float[Array, "B R D"]:
    """Returns x, normalised."""
    return rms_norm(x_BRD, constrain(self.scale[...], "D"), epsilon=self.epsilon)


class Embedding(nnx.Module):
  """Token id -> vector."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the table with unit variance per element of D ** 0.5."""
    dtype = jnp.dtype(config.training.parameter_dtype)
    shape = (padded_vocabulary(config), config.model.model_size)
    deviation = jnp.asarray(config.model.embedding_standard_deviation, dtype)
    self.table = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)
    self.dtype = jnp.dtype(config.training.compute_dtype)

  def __call__(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B R D"]:
    """Returns the rows of the table."""
    return scattered_lookup(self.table[...].astype(self.dtype), tokens_BT)


class Attention(nnx.Module):
  """Grouped-query attention with rotary positions. Sources: arXiv:2305.13245, 2104.09864."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the four projections; the last is scaled down by the depth, as in GPT-2."""
    model = config.model
    kernel = functools.partial(Kernel, config=config, rngs=rngs)
    self.query = kernel("DNH", fan_in=model.model_size)
    self.key = kernel("DKH", fan_in=model.model_size)
    self.value = kernel("DKH", fan_in=model.model_size)
    depth = (2 * model.layers) ** -0.5
    self.out = kernel("NHD", fan_in=model.heads * model.head_size, scale=depth)
    self.groups = model.heads // model.kv_heads
    self.rotary_base = model.rotary_base

  def __call__(
    self,
    x_BRD: Float[Array, "B R D"],
    segments_BT: Int[Array, "B T"] | None = None,
    cache: Cache | None = None,
  ) -> tuple[Float[Array, "B R D"], Cache | None]:
    """Returns what each position reads from its past, and the cache with these positions in it.

    Args:
      x_BRD: the normalised residual.
      segments_BT: the documents that do not see one another; None: a row is one.
      cache: this layer's, of one document; None where x is all that there is.
    """
    slots_BT = jnp.arange(x_BRD.shape[1], dtype=jnp.int32)[None, :]
    if cache is not None:
      slots_BT = cache.lengths[:, None] + slots_BT
    positions_BT, segments = slots_BT, None
    if segments_BT is not None:
      positions_BT = documents.positions(segments_BT)
      segments = segments_BT, constrain(segments_BT, "BS")
    q_BTNH, k_BTKH, v_BTKH = gathered_products(
      x_BRD,
      [self.query.kernel[...], self.key.kernel[...], self.value.kernel[...]],
      (("DNH", "BTNH"), ("DKH", "BTKH"), ("DKH", "BTKH")),
    )
    k_BSKH, v_BSKH = constrain(k_BTKH, "BSKH"), constrain(v_BTKH, "BSKH")
    q_BTNH = rotate(q_BTNH, positions_BT, base=self.rotary_base)
    k_BSKH = rotate(k_BSKH, positions_BT, base=self.rotary_base)
    if cache is not None:
      cache = remember(cache, k_BSKH, v_BSKH)
      k_BSKH, v_BSKH = cache.keys, cache.values
    # Each key/value head serves N/K query heads. Repeated, the heads split over tensor even
    # where it does not divide K.
    k_BSNH = constrain(jnp.repeat(k_BSKH, self.groups, axis=2), "BSNH")
    v_BSNH = constrain(jnp.repeat(v_BSKH, self.groups, axis=2), "BSNH")
    mixed_BTNH = causal_attention(q_BTNH, k_BSNH, v_BSNH, slots_BT, segments)
    mixed_BTNH = constrain(mixed_BTNH, "BTNH")
    return scattered_product(mixed_BTNH, self.out.kernel[...], "NHD", "BTNH"), cache


class GatedMLP(nnx.Module):
  """SwiGLU: down(silu(gate(x)) * up(x)). Source: arXiv:2002.05202."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the three projections; the last is scaled down by the depth."""
    model = config.model
    kernel = functools.partial(Kernel, config=config, rngs=rngs)
    self.gate = kernel("DF", fan_in=model.model_size)
    self.up = kernel("DF", fan_in=model.model_size)
    self.down = kernel("FD", fan_in=model.feedforward_size, scale=(2 * model.layers) ** -0.5)

  def __call__(self, x_BRD: Float[Array, "B R D"]) -> Float[Array, "B R D"]:
    """Returns the block's update."""
    gate_BTF, up_BTF = gathered_products(
      x_BRD, [self.gate.kernel[...], self.up.kernel[...]], (("DF", "BTF"), ("DF", "BTF"))
    )
    return scattered_product(jax.nn.silu(gate_BTF) * up_BTF, self.down.kernel[...], "FD", "BTF")


class Block(nnx.Module):
  """One layer: attention and MLP, each on a normalised residual."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the layer's parameters from `rngs.params`."""
    self.attention_norm = Norm(config)
    self.attention = Attention(config, rngs=rngs)
    self.mlp_norm = Norm(config)
    self.mlp = GatedMLP(config, rngs=rngs)
    self.dropout_rate = config.model.dropout_rate

  def __call__(
    self,
    x_BRD: Float[Array, "B R D"],
    key: Key[Array, ""] | None,
    segments_BT: Int[Array, "B T"] | None = None,
    cache: Cache | None = None,
  ) -> tuple[Float[Array, "B R D"], Cache | None]:
    """Returns the residual after this layer, and the layer's cache.

    Args:
      x_BRD: the residual.
      key: draws the dropout; None turns it off.
      segments_BT: the documents that do not see one another; None: a row is one.
      cache: what attention has kept of the past; None where x is all that there is.
    """
    keys = (None, None) if key is None else jax.random.split(key)
    mixed_BRD, cache = self.attention(self.attention_norm(x_BRD), segments_BT, cache)
    x_BRD = x_BRD + dropout(mixed_BRD, self.dropout_rate, keys[0])
    return x_BRD + dropout(self.mlp(self.mlp_norm(x_BRD)), self.dropout_rate, keys[1]), cache


class Transformer(nnx.Module):
  """Tokens in, logits over the padded vocabulary out."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the parameters from `rngs.params`, the layers' stacked along L."""
    self.embed = Embedding(config, rngs=rngs)

    @nnx.split_rngs(splits=config.model.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs: nnx.Rngs) -> Block:
      return Block(config, rngs=rngs)

    self.layers = stack(rngs)
    self.final_norm = Norm(config)
    self.tied = config.model.tied_embeddings
    if not self.tied:
      self.unembed = Kernel("DV", config, fan_in=config.model.model_size, rngs=rngs)
    self.separate_documents = config.model.separate_documents
    self.vocabulary_size = config.model.vocabulary_size
    self.layer_count = config.model.layers
    self.rematerialization = config.training.rematerialization

  def __call__(
    self, tokens_BT: Int[Array, "B T"], key: Key[Array, ""] | None = None
  ) -> Float[Array, "B T V"]:
    """Returns logits in float32 or wider; those of padding tokens are the lowest number.

    Args:
      tokens_BT: token ids.
      key: draws the dropout; None turns it off.
    """
    graphdef, stack = nnx.split(self.layers)
    keys = None if key is None else jax.random.split(key, self.layer_count)

    def layer(x_BRD, inputs):
      params, layer_key = inputs
      return nnx.merge(graphdef, params)(x_BRD, layer_key, segments_BT)

    segments_BT = None
    if self.separate_documents:
      segments_BT = constrain(documents.segments(tokens_BT), "BT")
    if (policy := REMATERIALIZATION[self.rematerialization]) is not None:
      layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
    x_BRD, _ = jax.lax.scan(layer, self.embed(tokens_BT), (stack, keys))
    return self._logits(x_BRD)

  def extend(
    self, tokens_BT: Int[Array, "B T"], counts_B: Int[Array, " B"], cache: Cache
  ) -> tuple[Float[Array, "B V"], Cache]:
    """Reads tokens behind those that the cache holds; nothing is dropped.

    Args:
      tokens_BT: token ids, each row's padded on the right with anything.
      counts_B: int32, how many of a row's T are tokens, at least 1.
      cache: of all layers, with room for T more slots in every row.

    Returns:
      The logits, as `__call__` gives them, of each row's last token; the cache with the tokens.
    """
    graphdef, stack = nnx.split(self.layers)

    def layer(carry, inputs):
      x_BRD, cache = carry
      params, number = inputs
      x_BRD, new = nnx.merge(graphdef, params)(x_BRD, None, cache=layer_of(cache, number))
      return (x_BRD, with_layer(cache, number, new)), None

    numbers_L = jnp.arange(self.layer_count, dtype=jnp.int32)
    # Carried and not scanned over: so a layer is replaced in place, and there is one cache.
    (x_BRD, cache), _ = jax.lax.scan(layer, (self.embed(tokens_BT), cache), (stack, numbers_L))
    last_B11 = (counts_B - 1)[:, None, None]
    last_B1D = constrain(jnp.take_along_axis(x_BRD, last_B11, axis=1), "BRD")
    cache = dataclasses.replace(cache, lengths=constrain(cache.lengths + counts_B, "B"))
    return self._logits(last_B1D)[:, 0], cache

  def _logits(self, x_BRD: Float[Array, "B R D"]) -> Float[Array, "B T V"]:
    normed_BRD = self.final_norm(x_BRD)
    kernel, letters = (
      (self.embed.table[...], "VD") if self.tied else (self.unembed.kernel[...], "DV")
    )
    [logits_BTV] = gathered_products(normed_BRD, [kernel], ((letters, "BTV"),))
    wide = wide_dtype(logits_BTV.dtype)
    logits_BTV = constrain(logits_BTV.astype(wide), "BTV")
    real_V = jnp.arange(logits_BTV.shape[-1]) < self.vocabulary_size
    return jnp.where(real_V[None, None], logits_BTV, jnp.finfo(wide).min)


def empty_cache(config: ConfigDict, rows: int, slots: int) -> Cache:
  """Returns a cache in which nothing has been read.

  Args:
    config: finalized.
    rows: B.
    slots: S, the most tokens that a row can have.
  """
  model = config.model
  shape = (model.layers, rows, slots, model.kv_heads, model.head_size)
  dtype = jnp.dtype(config.training.compute_dtype)
  return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((rows,), jnp.int32))


build = Transformer


def train_flops_per_example(config: ConfigDict) -> float:
  """Returns floating-point operations per sequence, forward and backward.

  6 per token and element of a multiplied matrix, and attention's scores and sums counted in
  full, 12 L N H T per token (arXiv:2204.02311, appendix B; others halve it for the mask).
  """
  m, length = config.model, config.data.sequence_length
  attention = m.model_size * m.head_size * (2 * m.heads + 2 * m.kv_heads)
  elements = m.layers * (attention + 3 * m.model_size * m.feedforward_size)
  elements += m.model_size * padded_vocabulary(config)
  scores = 12 * m.layers * m.heads * m.head_size * length
  return float(length) * (6 * elements + scores)
