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

from models.attention import Cache, causal_attention, layer_of, remember, rotate, with_layer
from models.dtypes import wide_dtype
from partitioning.constraints import constrain
from partitioning.dims import Dim


def legend(config: ConfigDict) -> dict[str, Dim]:
  """Returns letter -> Dim for this config."""
  model = config.model
  return {
    "B": Dim("batch", None),
    "T": Dim("sequence", None),
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


def dropout(x_BTD: Array, rate: float, key: Key[Array, ""] | None) -> Array:
  """Zeroes a share `rate` of x and scales the rest up; without a key it returns x as it is."""
  if key is None or rate == 0.0:
    return x_BTD
  keep_BTD = constrain(jax.random.bernoulli(key, 1.0 - rate, x_BTD.shape), "BTD")
  return jnp.where(keep_BTD, x_BTD / (1.0 - rate), jnp.zeros_like(x_BTD))


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
    self.dtype = jnp.dtype(config.training.compute_dtype)

  def __call__(self, equation: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `einsum(equation, x, kernel)`, the kernel laid out as activations are."""

    # What the backward pass keeps is the parameter as it lies. Without the checkpoint it would
    # keep the cast and gathered kernel of every layer: all of the model on each fsdp device.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def product(kernel: Array, x: Array) -> Array:
      return jnp.einsum(equation, x, constrain(kernel.astype(self.dtype), self.letters))

    return product(self.kernel[...], x)


class Norm(nnx.Module):
  """RMSNorm over D."""

  def __init__(self, config: ConfigDict):
    """Starts with a scale of one."""
    dtype = jnp.dtype(config.training.parameter_dtype)
    self.scale = nnx.Param(jnp.ones((config.model.model_size,), dtype))
    self.epsilon = config.model.norm_epsilon

  def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns x, normalised."""
    return rms_norm(x_BTD, constrain(self.scale[...], "D"), epsilon=self.epsilon)


class Embedding(nnx.Module):
  """Token id -> vector."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the table with unit variance per element of D ** 0.5."""
    dtype = jnp.dtype(config.training.parameter_dtype)
    shape = (padded_vocabulary(config), config.model.model_size)
    deviation = jnp.asarray(config.model.embedding_standard_deviation, dtype)
    self.table = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)
    self.dtype = jnp.dtype(config.training.compute_dtype)

  def __call__(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns the rows of the table."""
    # Gathered over fsdp before the lookup: a lookup in a table that is split over D as well
    # makes XLA copy the whole batch ("involuntary full rematerialization").
    table_VD = constrain(self.table[...].astype(self.dtype), "VD")
    return constrain(table_VD[tokens_BT], "BTD")


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
    self, x_BTD: Float[Array, "B T D"], cache: Cache | None = None
  ) -> tuple[Float[Array, "B T D"], Cache | None]:
    """Returns what each position reads from its past, and the cache with these positions in it.

    Args:
      x_BTD: the normalised residual.
      cache: this layer's; None where x is all that there is.
    """
    positions_BT = jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None, :]
    if cache is not None:
      positions_BT = cache.lengths[:, None] + positions_BT
    q_BTNH = constrain(self.query("BTD,DNH->BTNH", x_BTD), "BTNH")
    k_BSKH = constrain(self.key("BTD,DKH->BTKH", x_BTD), "BSKH")
    v_BSKH = constrain(self.value("BTD,DKH->BTKH", x_BTD), "BSKH")
    q_BTNH = rotate(q_BTNH, positions_BT, base=self.rotary_base)
    k_BSKH = rotate(k_BSKH, positions_BT, base=self.rotary_base)
    if cache is not None:
      cache = remember(cache, k_BSKH, v_BSKH)
      k_BSKH, v_BSKH = cache.keys, cache.values
    # Each key/value head serves N/K query heads. Repeated, the heads split over tensor even
    # where it does not divide K.
    k_BSNH = constrain(jnp.repeat(k_BSKH, self.groups, axis=2), "BSNH")
    v_BSNH = constrain(jnp.repeat(v_BSKH, self.groups, axis=2), "BSNH")
    mixed_BTNH = constrain(causal_attention(q_BTNH, k_BSNH, v_BSNH, positions_BT), "BTNH")
    return constrain(self.out("BTNH,NHD->BTD", mixed_BTNH), "BTD"), cache


class GatedMLP(nnx.Module):
  """SwiGLU: down(silu(gate(x)) * up(x)). Source: arXiv:2002.05202."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the three projections; the last is scaled down by the depth."""
    model = config.model
    kernel = functools.partial(Kernel, config=config, rngs=rngs)
    self.gate = kernel("DF", fan_in=model.model_size)
    self.up = kernel("DF", fan_in=model.model_size)
    self.down = kernel("FD", fan_in=model.feedforward_size, scale=(2 * model.layers) ** -0.5)

  def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns the block's update."""
    gate_BTF = constrain(self.gate("BTD,DF->BTF", x_BTD), "BTF")
    up_BTF = constrain(self.up("BTD,DF->BTF", x_BTD), "BTF")
    return constrain(self.down("BTF,FD->BTD", jax.nn.silu(gate_BTF) * up_BTF), "BTD")


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
    self, x_BTD: Float[Array, "B T D"], key: Key[Array, ""] | None, cache: Cache | None = None
  ) -> tuple[Float[Array, "B T D"], Cache | None]:
    """Returns the residual after this layer, and the layer's cache.

    Args:
      x_BTD: the residual.
      key: draws the dropout; None turns it off.
      cache: what attention has kept of the past; None where x is all that there is.
    """
    keys = (None, None) if key is None else jax.random.split(key)
    mixed_BTD, cache = self.attention(self.attention_norm(x_BTD), cache)
    x_BTD = x_BTD + dropout(mixed_BTD, self.dropout_rate, keys[0])
    return x_BTD + dropout(self.mlp(self.mlp_norm(x_BTD)), self.dropout_rate, keys[1]), cache


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
    self.unembed = Kernel("DV", config, fan_in=config.model.model_size, rngs=rngs)
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

    def layer(x_BTD, inputs):
      params, layer_key = inputs
      return nnx.merge(graphdef, params)(x_BTD, layer_key)

    if (policy := REMATERIALIZATION[self.rematerialization]) is not None:
      layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
    x_BTD, _ = jax.lax.scan(layer, self.embed(tokens_BT), (stack, keys))
    return self._logits(x_BTD)

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
      x_BTD, cache = carry
      params, number = inputs
      x_BTD, new = nnx.merge(graphdef, params)(x_BTD, None, layer_of(cache, number))
      return (x_BTD, with_layer(cache, number, new)), None

    numbers_L = jnp.arange(self.layer_count, dtype=jnp.int32)
    # Carried and not scanned over: so a layer is replaced in place, and there is one cache.
    (x_BTD, cache), _ = jax.lax.scan(layer, (self.embed(tokens_BT), cache), (stack, numbers_L))
    last_B11 = (counts_B - 1)[:, None, None]
    last_B1D = constrain(jnp.take_along_axis(x_BTD, last_B11, axis=1), "BTD")
    cache = dataclasses.replace(cache, lengths=constrain(cache.lengths + counts_B, "B"))
    return self._logits(last_B1D)[:, 0], cache

  def _logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    logits_BTV = self.unembed("BTD,DV->BTV", self.final_norm(x_BTD))
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
