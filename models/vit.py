"""The vision transformer (ViT): an encoder over the patches of an image, which classifies it.

Patches are embedded linearly; layers of bidirectional attention and an MLP, each behind a norm,
follow; the mean over the patches is classified. Sources: arXiv:2010.11929; 2205.01580 for the mean
in place of a class token.

The layers are stacked along L and scanned. Names carry their dims: `q_BTNH` is batch, patches,
heads, head size; `x_BRD` is the residual between blocks, whose patches sequence parallelism splits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from models import activations, losses
from models.layers import MLP, Linear, Norm, dropout
from models.losses import Batch, Sums
from models.rematerialization import rematerialized
from models.spec import RESIDUAL, LayersSpec
from partitioning.constraints import constrain
from partitioning.dims import Dim
from partitioning.dtypes import scaled, wide_dtype
from partitioning.parallel.matmuls import column_parallel, row_parallel

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionSpec(LayersSpec):
  """What a vision transformer is made of; the fields are keys of the config."""

  input_size: int
  channels: int
  image_size: int
  patch_size: int
  output_size: int
  attention: str = "bidirectional"
  experts: int = 0
  norm: str = "layer"
  pre_norms: bool = True
  post_norms: bool = False
  residual_multiplier: float = 1.0
  biases: str = "all"
  gated: bool = False
  activation: str = "gelu"
  norm_scale_from_one: bool = False

  @functools.cached_property
  def legend(self) -> dict[str, Dim]:
    """Returns letter -> Dim."""
    patches = (self.image_size // self.patch_size) ** 2
    return {
      "B": Dim("batch", None),
      "I": Dim("inputs", self.input_size),
      "X": Dim("patch", self.patch_size**2 * self.channels),
      "P": Dim("positions", patches),
      "T": Dim("sequence", patches),
      "R": Dim("residual_sequence", patches),
      "S": Dim("key_sequence", patches),
      "L": Dim("layers", self.layers),
      "D": Dim("model", self.model_size),
      "F": Dim("feedforward", self.feedforward_size),
      "N": Dim("heads", self.heads),
      "H": Dim("head", self.model_size // self.heads),
      "O": Dim("outputs", self.output_size),
    }

  @property
  def parameters(self) -> dict[str, str]:
    """Returns name pattern -> letters."""
    return PARAMETERS

  def train_flops_per_example(self, *, causal: bool = False) -> float:
    """Returns floating-point operations per image, forward and backward.

    6 per patch and element of a kernel, and 12 per layer, pair of patches and width for attention.
    """
    del causal  # there is no mask
    patches, pixels, width = *self.sizes("TX"), self.model_size
    layer = 4 * width**2 + 2 * width * self.feedforward_size
    kernels = patches * (pixels * width + self.layers * layer) + width * self.output_size
    return 6.0 * kernels + 12.0 * self.layers * patches**2 * width


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

  def __init__(self, spec: VisionSpec, *, rngs: nnx.Rngs):
    """Draws the four projections; the last is scaled down by the depth, as in GPT-2."""
    linear = functools.partial(Linear, spec=spec, rngs=rngs)
    self.query, self.key = linear("layers/attention/query"), linear("layers/attention/key")
    self.value = linear("layers/attention/value")
    self.out = linear("layers/attention/out", scale=spec.out_scale)

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


class Layer(nnx.Module):
  """One layer of the encoder: attention and MLP, each of the normalized residual."""

  def __init__(self, spec: VisionSpec, *, rngs: nnx.Rngs):
    """Draws the layer's parameters from `rngs.params`."""
    self.attention_norm = Norm("layers/attention_norm", spec)
    self.attention = Attention(spec, rngs=rngs)
    self.mlp_norm, self.mlp = Norm("layers/mlp_norm", spec), MLP(spec, rngs=rngs)
    self.dropout_rate = spec.dropout_rate

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
    update_BRD = self.mlp(self.mlp_norm(x_BRD), None, slots_R)
    activations.record("mlp", update_BRD)
    x_BRD = x_BRD + dropout(update_BRD, self.dropout_rate, keys[1], slots_R)
    activations.record("residual", x_BRD)
    return x_BRD


class PositionEmbedding(nnx.Module):
  """A learned vector for each patch of the image."""

  def __init__(self, spec: VisionSpec, *, rngs: nnx.Rngs):
    """Draws the table with a standard deviation of D ** -0.5."""
    self.letters, self.dtype = spec.letters_of("positions/table"), spec.compute_dtype
    dtype, shape = spec.parameter_dtype, spec.sizes(self.letters)
    deviation = jnp.asarray(spec.model_size**-0.5, dtype)
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

  def __init__(self, spec: VisionSpec, *, rngs: nnx.Rngs):
    """Draws the parameters from `rngs.params`, the layers' stacked along L."""
    self.spec = spec
    self.patches = Linear("patches", spec, rngs=rngs)
    self.positions = PositionEmbedding(spec, rngs=rngs)

    @nnx.split_rngs(splits=spec.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs: nnx.Rngs) -> Layer:
      return Layer(spec, rngs=rngs)

    self.layers = stacked(rngs)
    self.final_norm = Norm("final_norm", spec)
    self.head = Linear("head", spec, rngs=rngs)

  def __call__(
    self, inputs_BI: Float[Array, "B I"], key: Key[Array, ""] | None = None
  ) -> Float[Array, "B O"]:
    """Returns the logits of the classes, in float32 or wider.

    Args:
      inputs_BI: images, their values in the order row, column, channel.
      key: draws the dropout; None turns it off.
    """
    spec = self.spec
    x_BRD = self._embedded(constrain(inputs_BI.astype(spec.compute_dtype), "BI"))
    activations.record("embedding", x_BRD)
    keys = None if key is None else jax.random.split(key, spec.layers)
    graphdef, stack = nnx.split(self.layers)

    def step(x_BRD, inputs):
      params, key = inputs
      with activations.layer() as recorded:
        x_BRD = nnx.merge(graphdef, params)(x_BRD, key)
      return x_BRD, recorded

    step = rematerialized(step, spec.rematerialization, reshard=spec.reshard_after_forward)
    x_BRD, recorded = jax.lax.scan(step, x_BRD, (stack, keys), unroll=spec.scan_unroll)
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
    size, channels = self.spec.patch_size, self.spec.channels
    count = self.spec.image_size // size
    x = inputs_BI.reshape(-1, count, size, count, size, channels).swapaxes(2, 3)
    x_BTX = constrain(x.reshape(len(inputs_BI), count**2, size**2 * channels), "BTX")
    kernel_XD = constrain(self.patches.effective_kernel().astype(self.spec.compute_dtype), "XD")
    x_BRD = constrain(x_BTX @ kernel_XD, "BRD")
    return self.positions(self.patches.add_bias(x_BRD))

  def _classified(self, normed_BRD: Float[Array, "B R D"]) -> Float[Array, "B O"]:
    """Returns the logits of the mean over the patches."""
    dtype, wide = self.spec.compute_dtype, wide_dtype(self.spec.compute_dtype)
    mean_BD = constrain(jnp.mean(normed_BRD.astype(wide), axis=1).astype(dtype), "BD")
    kernel_DO = constrain(self.head.effective_kernel().astype(dtype), "DO")
    logits_BO = constrain(self.head.add_bias((mean_BD @ kernel_DO).astype(wide)), "BO")
    activations.record("logits", logits_BO)
    return logits_BO


SPEC, build = VisionSpec, VisionTransformer
