"""The vision transformer (ViT): an encoder over the patches of an image, which classifies it.

Patches are embedded linearly; layers of bidirectional attention and an MLP, each behind a norm,
follow; the mean over the patches is classified. Sources: arXiv:2010.11929; 2205.01580 for the mean
in place of a class token.

The layers are those of the decoder with another attention, stacked along L and scanned. Names carry
their dims: `x_BRD` is the residual between blocks, whose patches sequence parallelism splits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from models import activations, losses
from models.layer_stack import Block, over_layers, stacked
from models.layers import LearnedPositions, Linear, Norm, rematerialized
from models.losses import Batch, Sums
from models.positions import Layer, Rows
from models.spec import LayersSpec, under
from partitioning.constraints import constrain
from partitioning.dtypes import wide_dtype
from partitioning.rules import Dim
from runtime.layer_kinds import LAYERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionSpec(LayersSpec):
  """What a vision transformer is made of; the fields are keys of the config."""

  kind = "vit"

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
  normed_residual: float = 0.0
  biases: str = "all"
  mlp: str = "feedforward"
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

  @functools.cached_property
  def parameters(self) -> dict[str, str]:
    """Returns name pattern -> letters."""
    return {
      **{"patches/kernel": "XD", "patches/bias": "D", "positions/table": "PD"},
      **under("layers", Block.dims(self), "L"),
      **under("final_norm", Norm.dims(self)),
      **{"head/kernel": "DO", "head/bias": "O"},
    }

  def train_flops_per_example(self, *, causal: bool = False) -> float:
    """Returns floating-point operations per image, forward and backward.

    6 per patch and element of a kernel, and 12 per layer, pair of patches and width for attention.
    """
    del causal  # there is no mask
    patches, pixels, width = *self.sizes("TX"), self.model_size
    layer = 4 * width**2 + 2 * width * self.feedforward_size
    kernels = patches * (pixels * width + self.layers * layer) + width * self.output_size
    return 6.0 * kernels + 12.0 * self.layers * patches**2 * width


class VisionTransformer(nnx.Module):
  """Images in, logits of the classes out."""

  def __init__(self, spec: VisionSpec, *, rngs: nnx.Rngs):
    """Draws the parameters from `rngs.params`, the layers' stacked along L."""
    self.spec = spec
    self.patches = Linear("patches", spec, rngs=rngs)
    self.positions = LearnedPositions(spec, spec.model_size**-0.5, rngs=rngs)
    self.layers = stacked(spec, rngs, spec.layers, LAYERS)
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
    slots_1R = jnp.arange(x_BRD.shape[1], dtype=jnp.int32)[None]
    rows, same = Rows(slots_1R, slots_1R, None), Layer()

    def layer(block, x_BRD, key):
      with activations.layer() as recorded:
        x_BRD, _, _ = block(x_BRD, same, key, rows)
      return x_BRD, recorded

    def wrapped(step):
      return rematerialized(step, spec.rematerialization, reshard=spec.reshard_after_forward)

    how = {"wrapped": wrapped, "unroll": spec.scan_unroll}
    x_BRD, found = over_layers(layer, {LAYERS: self.layers}, (), x_BRD, keys, **how)
    activations.record_layers(found[LAYERS])
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
