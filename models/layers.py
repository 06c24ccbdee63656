"""What the decoder is made of: kernels, norms, embeddings, attention, the MLPs.

Names carry their dims: `q_BTNH` is batch, query length, heads, head size.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key
from ml_collections import ConfigDict

from models.dtypes import wide_dtype
from models.transformer_dims import legend, padded_vocabulary
from partitioning.constraints import constrain
from partitioning.parallel.products import gathered_products, scattered_lookup, scattered_product

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": functools.partial(jax.nn.gelu, approximate=True)}


def rms_norm(
  x: Float[Array, "*X D"], scale_D: Float[Array, " D"], *, epsilon: float
) -> Float[Array, "*X D"]:
  """Scales x to unit root mean square over D, in float32 or wider. Source: arXiv:1910.07467."""
  wide = wide_dtype(x.dtype)
  x_wide = x.astype(wide)
  inverse = jax.lax.rsqrt(jnp.mean(x_wide * x_wide, axis=-1, keepdims=True) + epsilon)
  return (x_wide * inverse * _beside(scale_D.astype(wide), x)).astype(x.dtype)


def layer_norm(
  x: Float[Array, "*X D"],
  scale_D: Float[Array, " D"],
  bias_D: Float[Array, " D"],
  *,
  epsilon: float,
) -> Float[Array, "*X D"]:
  """Scales x to mean 0 and variance 1 over D, in float32 or wider. Source: arXiv:1607.06450."""
  wide = wide_dtype(x.dtype)
  x_wide = x.astype(wide)
  centred = x_wide - jnp.mean(x_wide, axis=-1, keepdims=True)
  inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
  scale, bias = (_beside(vector.astype(wide), x) for vector in (scale_D, bias_D))
  return (centred * inverse * scale + bias).astype(x.dtype)


def _beside(vector: Array, x: Array) -> Array:
  """Returns a vector over the last dims of x with dims of 1 before them."""
  return vector.reshape((1,) * (x.ndim - vector.ndim) + vector.shape)


def dropout(
  x_BRD: Array, rate: float, key: Key[Array, ""] | None, slots_R: Int[Array, " R"]
) -> Array:
  """Zeroes a share `rate` of x and scales the rest up; without a key it returns x as it is.

  Args:
    x_BRD: the rows.
    rate: at least 0, below 1.
    key: draws what is zeroed.
    slots_R: where the tokens stand in the text: what is drawn for one does not depend on where in
      the array it lies, so that any order drops the same.
  """
  if key is None or rate == 0.0:
    return x_BRD
  batch, _, width = x_BRD.shape
  keys_R = jax.vmap(jax.random.fold_in, (None, 0))(key, slots_R)
  keep_RBD = jax.vmap(lambda one: jax.random.bernoulli(one, 1.0 - rate, (batch, width)))(keys_R)
  keep_BRD = constrain(jnp.swapaxes(keep_RBD, 0, 1), "BRD")
  return jnp.where(keep_BRD, x_BRD / (1.0 - rate), jnp.zeros_like(x_BRD))


class Kernel(nnx.Module):
  """A matrix (of any rank) drawn with standard deviation `scale * fan_in ** -0.5`."""

  def __init__(
    self,
    letters: str,
    config: ConfigDict,
    *,
    fan_in: int,
    scale: float = 1.0,
    bias: str = "",
    rngs: nnx.Rngs,
  ):
    """Draws the kernel with the sizes that its letters have in the legend; a bias starts at 0.

    Args:
      letters: the kernel's dims.
      config: finalized.
      fan_in: how many numbers are summed for one of the product.
      scale: of the standard deviation.
      bias: its dims; "" for none.
      rngs: draws the kernel.
    """
    sizes = legend(config)
    shape = tuple(sizes[letter].size for letter in letters)
    dtype = jnp.dtype(config.training.parameter_dtype)
    deviation = jnp.asarray(scale * fan_in**-0.5, dtype)
    self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)
    self.bias_letters = bias
    if bias:
      self.bias = nnx.Param(jnp.zeros([sizes[letter].size for letter in bias], dtype))
    self.dtype = jnp.dtype(config.training.compute_dtype)

  def biased(self, x: Array) -> Array:
    """Returns a product with the bias added, where there is one.

    Added in float32 or wider: the bias' gradient is a sum over all tokens.
    """
    if not self.bias_letters:
      return x
    wide = wide_dtype(x.dtype)
    bias = constrain(self.bias[...].astype(wide), self.bias_letters)
    return (x.astype(wide) + _beside(bias, x)).astype(x.dtype)


class Norm(nnx.Module):
  """RMSNorm or LayerNorm over the last dim."""

  def __init__(self, config: ConfigDict, letter: str = "D"):
    """Starts as the plain normalisation.

    Args:
      config: finalized.
      letter: the last dim's; over H it is always RMSNorm.
    """
    model, dtype = config.model, jnp.dtype(config.training.parameter_dtype)
    shape = (legend(config)[letter].size,)
    # Gemma stores what is added to one, so that weight decay pulls towards one.
    self.offset = 1.0 if model.norm_scale_from_one else 0.0
    self.scale = nnx.Param(jnp.full(shape, 1.0 - self.offset, dtype))
    self.centred = model.norm == "layer" and letter == "D"
    if self.centred:
      self.bias = nnx.Param(jnp.zeros(shape, dtype))
    self.epsilon, self.letter = model.norm_epsilon, letter

  def __call__(self, x: Float[Array, "*X D"]) -> Float[Array, "*X D"]:
    """Returns x, normalised."""
    scale = constrain(self.scale[...], self.letter)
    if self.offset:
      scale = scale + self.offset
    if self.centred:
      return layer_norm(x, scale, constrain(self.bias[...], self.letter), epsilon=self.epsilon)
    return rms_norm(x, scale, epsilon=self.epsilon)


class Embedding(nnx.Module):
  """Token id -> vector."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the table with unit variance per element of D ** 0.5."""
    dtype = jnp.dtype(config.training.parameter_dtype)
    shape = (padded_vocabulary(config), config.model.model_size)
    deviation = jnp.asarray(config.model.embedding_standard_deviation, dtype)
    self.table = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)
    self.dtype = jnp.dtype(config.training.compute_dtype)
    self.scale = config.model.model_size**0.5 if config.model.scaled_embeddings else 1.0

  def __call__(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B R D"]:
    """Returns the rows of the table."""
    x_BRD = scattered_lookup(self.table[...], tokens_BT, self.dtype)
    return x_BRD * jnp.asarray(self.scale, self.dtype) if self.scale != 1.0 else x_BRD


class Positions(nnx.Module):
  """Position -> vector, learned. Source: GPT-2."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws a row for each position of a training sequence, as small as GPT-2's."""
    dtype = jnp.dtype(config.training.parameter_dtype)
    shape = (config.data.sequence_length, config.model.model_size)
    self.table = nnx.Param(
      jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(0.02, dtype)
    )
    self.dtype = jnp.dtype(config.training.compute_dtype)

  def __call__(
    self, x_BRD: Float[Array, "B R D"], positions_BT: Int[Array, "#B T"]
  ) -> Float[Array, "B R D"]:
    """Returns x with the rows of the table added.

    The table is gathered in the compute dtype, but looked up and added in float32 or wider: its
    gradient is a sum over all rows and documents of the batch.
    """
    wide = wide_dtype(self.dtype)
    table_PD = constrain(self.table[...].astype(self.dtype), "PD").astype(wide)
    return constrain((x_BRD.astype(wide) + table_PD[positions_BT]).astype(self.dtype), "BRD")


class MLP(nnx.Module):
  """down(f(up(x))), or gated: down(f(gate(x)) * up(x)). Source of the latter: arXiv:2002.05202."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the projections; the last is scaled down by the depth."""
    model, biased = config.model, config.model.biases == "all"
    kernel = functools.partial(Kernel, config=config, rngs=rngs)
    self.gated = model.gated
    if self.gated:
      self.gate = kernel("DF", fan_in=model.model_size)
    self.up = kernel("DF", fan_in=model.model_size, bias="F" if biased else "")
    depth = (2 * model.layers) ** -0.5
    self.down = kernel("FD", fan_in=model.feedforward_size, scale=depth, bias="D" if biased else "")
    self.activation = ACTIVATIONS[model.activation]

  def __call__(self, x_BRD: Float[Array, "B R D"]) -> Float[Array, "B R D"]:
    """Returns the block's update."""
    kernels = [kernel.kernel[...] for kernel in ([self.gate, self.up] if self.gated else [self.up])]
    products = gathered_products(x_BRD, kernels, (("DF", "BTF"),) * len(kernels))
    up_BTF = self.up.biased(products[-1])
    hidden_BTF = self.activation(products[0]) * up_BTF if self.gated else self.activation(up_BTF)
    return self.down.biased(scattered_product(hidden_BTF, self.down.kernel[...], "FD", "BTF"))
