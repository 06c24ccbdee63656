"""The vision transformer (ViT): an encoder over the patches of an image, which classifies it.

Patches are embedded linearly; layers of bidirectional attention and an MLP, each behind a norm,
follow; the mean over the patches is classified. Sources: arXiv:2010.11929; 2205.01580 for the mean
in place of a class token.

The layers are stacked along L and scanned. Names carry their dims: `q_BTNH` is batch, patches,
heads, head size; `x_BRD` is the residual between blocks, whose patches sequence parallelism splits.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key
from ml_collections import ConfigDict

from models import activations, losses
from models.layers import dropout, layer_norm
from models.losses import Batch, Sums
from models.rematerialization import rematerialized
from partitioning.constraints import constrain
from partitioning.dims import Dim
from partitioning.dtypes import scaled, wide_dtype
from partitioning.parallel.matmuls import column_parallel, row_parallel
from partitioning.parallel.sharded_function import Residual

RESIDUAL = Residual(between="BRD", inside="BTD")


def legend(config: ConfigDict) -> dict[str, Dim]:
  """Returns letter -> Dim for this config."""
  model = config.model
  patches = (model.image_size // model.patch_size) ** 2
  return {
    "B": Dim("batch", None),
    "I": Dim("inputs", model.input_size),
    "X": Dim("patch", model.patch_size**2 * model.channels),
    "P": Dim("positions", patches),
    "T": Dim("sequence", patches),
    "R": Dim("residual_sequence", patches),
    "S": Dim("key_sequence", patches),
    "L": Dim("layers", model.layers),
    "D": Dim("model", model.model_size),
    "F": Dim("feedforward", model.feedforward_size),
    "N": Dim("heads", model.heads),
    "H": Dim("head", model.model_size // model.heads),
    "O": Dim("outputs", model.output_size),
  }


PARAMETERS = {
  "patches/kernel": "XD",
  "patches/bias": "D",
  "positions/table": "PD",
  "layers/(attention|mlp)_norm/(scale|bias)": "LD",
  "layers/attention/(query|key|value)/kernel": "LDNH",
  "layers/attention/(query|key|value)/bias": "LNH",
  "layers/attention/out/kernel": "LNHD",
  "layers/attention/out/bias": "LD",
  "layers/mlp/up/kernel": "LDF",
  "layers/mlp/up/bias": "LF",
  "layers/mlp/down/kernel": "LFD",
  "layers/mlp/down/bias": "LD",
  "final_norm/(scale|bias)": "D",
  "head/kernel": "DO",
  "head/bias": "O",
}


def parameters(config: ConfigDict) -> dict[str, str]:
  """Returns name pattern -> letters of the parameters that this config has."""
  del config
  return PARAMETERS


def _letters_of(name: str) -> str:
  """Returns the letters of a parameter, within its layer."""
  found = next(dims for pattern, dims in PARAMETERS.items() if re.fullmatch(pattern, name))
  return found.removeprefix("L")


class Projection(nnx.Module):
  """A kernel of any rank with a bias; the kernel's deviation is `scale * fan_in ** -0.5`.

  Attributes:
    letters: of the kernel, without the stack's L.
  """

  def __init__(self, name: str, config: ConfigDict, *, scale: float = 1.0, rngs: nnx.Rngs):
    """Draws the kernel; the bias is zero.

    Args:
      name: of the layer among the parameters, such as `layers/mlp/up`.
      config: finalized.
      scale: of the standard deviation.
      rngs: draws the kernel.
    """
    self.letters, self.bias_letters = _letters_of(f"{name}/kernel"), _letters_of(f"{name}/bias")
    dims = legend(config)
    sizes = {letter: dims[letter].size for letter in self.letters}
    summed = self.letters.removesuffix(self.bias_letters)
    dtype = jnp.dtype(config.training.parameter_dtype)
    deviation = jnp.asarray(scale * math.prod(sizes[x] for x in summed) ** -0.5, dtype)
    shape = tuple(sizes.values())
    self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)
    self.bias = nnx.Param(jnp.zeros([sizes[x] for x in self.bias_letters], dtype))

  def effective_kernel(self) -> Array:
    """Returns the kernel, in the dtype of the parameters."""
    return self.kernel[...]

  def add_bias(self, x: Array) -> Array:
    """Returns x plus the bias, in the dtype of x.

    Added in float32 or wider: the gradient of the bias is a sum over all patches.
    """
    wide = wide_dtype(x.dtype)
    bias = constrain(self.bias[...].astype(wide), self.bias_letters)
    bias = bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape)
    return (x.astype(wide) + bias).astype(x.dtype)


class LayerNorm(nnx.Module):
  """LayerNorm over D, in float32 or wider."""

  def __init__(self, config: ConfigDict):
    """Initializes scale and bias as the plain normalization."""
    dtype, shape = jnp.dtype(config.training.parameter_dtype), (config.model.model_size,)
    self.scale, self.bias = nnx.Param(jnp.ones(shape, dtype)), nnx.Param(jnp.zeros(shape, dtype))
    self.epsilon = config.model.norm_epsilon

  def __call__(self, x: Float[Array, "*X D"]) -> Float[Array, "*X D"]:
    """Returns x, normalized."""
    scale_D, bias_D = constrain(self.scale[...], "D"), constrain(self.bias[...], "D")
    return layer_norm(x, scale_D, bias_D, epsilon=self.epsilon)


def attention(
  q_BTNH: Float[Array, "B T N H"], k_BSNH: Float[Array, "B S N H"], v_BSNH: Float[Array, "B S N H"]
) -> Float[Array, "B T N H"]:
  """Returns bidirectional attention, its softmax in float32 or wider.

  Source: arXiv:1706.03762, section 3.2.1, without a mask.
  """
  wide = wide_dtype(q_BTNH.dtype)
  q_BTNH = scaled(q_BTNH, q_BTNH.shape[-1] ** -0.5)
  scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH, preferred_element_type=wide)
  weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1).astype(v_BSNH.dtype)
  return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BSNH)


class Attention(nnx.Module):
  """Bidirectional multi-head attention over the patches."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the four projections; the last is scaled down by the depth, as in GPT-2."""
    projection = functools.partial(Projection, config=config, rngs=rngs)
    self.query, self.key = projection("layers/attention/query"), projection("layers/attention/key")
    self.value = projection("layers/attention/value")
    self.out = projection("layers/attention/out", scale=(2 * config.model.layers) ** -0.5)

  def __call__(self, x_BRD: Float[Array, "B R D"]) -> Float[Array, "B R D"]:
    """Returns the update of the residual, given its normalized value."""
    projections = [self.query, self.key, self.value]
    projected = column_parallel(x_BRD, projections, RESIDUAL)
    q_BTNH, k_BTNH, v_BTNH = (
      linear.add_bias(x) for linear, x in zip(projections, projected, strict=True)
    )
    k_BSNH, v_BSNH = constrain(k_BTNH, "BSNH"), constrain(v_BTNH, "BSNH")
    output_BTNH = constrain(attention(q_BTNH, k_BSNH, v_BSNH), "BTNH")
    return self.out.add_bias(row_parallel(output_BTNH, self.out, RESIDUAL))


class MLP(nnx.Module):
  """down(gelu(up(x))), of each patch."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the projections; the last is scaled down by the depth, as in GPT-2."""
    projection = functools.partial(Projection, config=config, rngs=rngs)
    self.up = projection("layers/mlp/up")
    self.down = projection("layers/mlp/down", scale=(2 * config.model.layers) ** -0.5)

  def __call__(self, x_BRD: Float[Array, "B R D"]) -> Float[Array, "B R D"]:
    """Returns the update of the residual, given its normalized value."""
    [hidden_BTF] = column_parallel(x_BRD, [self.up], RESIDUAL)
    hidden_BTF = jax.nn.gelu(self.up.add_bias(hidden_BTF), approximate=True)
    return self.down.add_bias(row_parallel(hidden_BTF, self.down, RESIDUAL))


class Layer(nnx.Module):
  """One layer of the encoder: attention and MLP, each of the normalized residual."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the layer's parameters from `rngs.params`."""
    self.attention_norm, self.mlp_norm = LayerNorm(config), LayerNorm(config)
    self.attention, self.mlp = Attention(config, rngs=rngs), MLP(config, rngs=rngs)
    self.dropout_rate = config.model.dropout_rate

  def __call__(
    self, x_BRD: Float[Array, "B R D"], key: Key[Array, ""] | None
  ) -> Float[Array, "B R D"]:
    """Returns the residual after this layer.

    Args:
      x_BRD: the residual.
      key: draws the dropout; None turns it off.
    """
    keys = (None, None) if key is None else jax.random.split(key)
    slots_R = jnp.arange(x_BRD.shape[1], dtype=jnp.int32)
    update_BRD = self.attention(self.attention_norm(x_BRD))
    activations.record("attention", update_BRD)
    x_BRD = x_BRD + dropout(update_BRD, self.dropout_rate, keys[0], slots_R)
    update_BRD = self.mlp(self.mlp_norm(x_BRD))
    activations.record("mlp", update_BRD)
    x_BRD = x_BRD + dropout(update_BRD, self.dropout_rate, keys[1], slots_R)
    activations.record("residual", x_BRD)
    return x_BRD


class PositionEmbedding(nnx.Module):
  """A learned vector for each patch of the image."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the table with a standard deviation of D ** -0.5."""
    dims, self.letters = legend(config), _letters_of("positions/table")
    self.dtype = jnp.dtype(config.training.compute_dtype)
    dtype = jnp.dtype(config.training.parameter_dtype)
    shape = tuple(dims[letter].size for letter in self.letters)
    deviation = jnp.asarray(config.model.model_size**-0.5, dtype)
    self.table = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)

  def __call__(self, x_BRD: Float[Array, "B R D"]) -> Float[Array, "B R D"]:
    """Returns x plus the table, which are added in float32 or wider.

    The gradient of the table is a sum over the batch.
    """
    wide = wide_dtype(self.dtype)
    table_PD = constrain(self.table[...].astype(self.dtype), self.letters).astype(wide)
    return constrain((x_BRD.astype(wide) + table_PD[None]).astype(self.dtype), "BRD")


class VisionTransformer(nnx.Module):
  """Images in, logits of the classes out."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the parameters from `rngs.params`, the layers' stacked along L."""
    model = config.model
    self.patches = Projection("patches", config, rngs=rngs)
    self.positions = PositionEmbedding(config, rngs=rngs)

    @nnx.split_rngs(splits=model.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs: nnx.Rngs) -> Layer:
      return Layer(config, rngs=rngs)

    self.layers = stacked(rngs)
    self.final_norm = LayerNorm(config)
    self.head = Projection("head", config, rngs=rngs)
    self.image = (model.image_size, model.patch_size, model.channels)
    self.layer_count = model.layers
    self.dtype = jnp.dtype(config.training.compute_dtype)
    self.rematerialization = config.training.rematerialization
    self.reshard = config.partitioning.reshard_after_forward
    self.unroll = config.training.scan_unroll

  def __call__(
    self, inputs_BI: Float[Array, "B I"], key: Key[Array, ""] | None = None
  ) -> Float[Array, "B O"]:
    """Returns the logits of the classes, in float32 or wider.

    Args:
      inputs_BI: images, their values in the order row, column, channel.
      key: draws the dropout; None turns it off.
    """
    x_BRD = self._embedded(constrain(inputs_BI.astype(self.dtype), "BI"))
    activations.record("embedding", x_BRD)
    keys = None if key is None else jax.random.split(key, self.layer_count)
    graphdef, stack = nnx.split(self.layers)

    def step(x_BRD, inputs):
      params, key = inputs
      with activations.layer() as recorded:
        x_BRD = nnx.merge(graphdef, params)(x_BRD, key)
      return x_BRD, recorded

    step = rematerialized(step, self.rematerialization, reshard=self.reshard)
    x_BRD, recorded = jax.lax.scan(step, x_BRD, (stack, keys), unroll=self.unroll)
    activations.record_layers(recorded)
    return self._classified(self.final_norm(x_BRD))

  def loss_sums(self, batch: Batch, key: Key[Array, ""] | None = None) -> Sums:
    """Returns the summed cross-entropy and the number of correct labels; see `models.Network`.

    Args:
      batch: `inputs` [B, I]; `targets`, labels [B]; `weights` [B].
      key: draws the dropout; None turns it off.
    """
    return losses.classification(self(batch["inputs"], key), batch)

  def _embedded(self, inputs_BI: Float[Array, "B I"]) -> Float[Array, "B R D"]:
    """Returns the embedded patches with their positions, in the order of rows and columns."""
    side, size, channels = self.image
    count = side // size
    x = inputs_BI.reshape(-1, count, size, count, size, channels).swapaxes(2, 3)
    x_BTX = constrain(x.reshape(len(inputs_BI), count**2, size**2 * channels), "BTX")
    kernel_XD = constrain(self.patches.effective_kernel().astype(self.dtype), "XD")
    x_BRD = constrain(x_BTX @ kernel_XD, "BRD")
    return self.positions(self.patches.add_bias(x_BRD))

  def _classified(self, normed_BRD: Float[Array, "B R D"]) -> Float[Array, "B O"]:
    """Returns the logits of the mean over the patches."""
    wide = wide_dtype(self.dtype)
    mean_BD = constrain(jnp.mean(normed_BRD.astype(wide), axis=1).astype(self.dtype), "BD")
    kernel_DO = constrain(self.head.effective_kernel().astype(self.dtype), "DO")
    logits_BO = constrain(self.head.add_bias((mean_BD @ kernel_DO).astype(wide)), "BO")
    activations.record("logits", logits_BO)
    return logits_BO


build = VisionTransformer


def train_flops_per_example(config: ConfigDict, *, causal: bool = False) -> float:
  """Returns floating-point operations per image, forward and backward.

  6 per patch and element of a kernel, and 12 per layer, pair of patches and width for attention.
  """
  del causal  # there is no mask
  model, dims = config.model, legend(config)
  patches, width = dims["T"].size, model.model_size
  layer = 4 * width**2 + 2 * width * model.feedforward_size
  kernels = patches * (dims["X"].size * width + model.layers * layer) + width * model.output_size
  return 6.0 * kernels + 12.0 * model.layers * patches**2 * width
