"""A network of four layers, [I, D, F, D, O] with ReLU between them.

With D = F = W it is the network [784, W, W, W, 10] of JAX's distributed-arrays tutorial: under
`tensor`, the second kernel is column-parallel, the third row-parallel, and the outer two are
replicated.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from models import activations, losses, mup
from models.losses import Batch, Sums
from models.spec import ModelSpec
from partitioning.constraints import constrain
from partitioning.dtypes import wide_dtype
from partitioning.rules import Dim

PARAMETERS = {
  "layer_1/kernel": "ID",
  "layer_1/bias": "D",
  "layer_2/kernel": "DF",
  "layer_2/bias": "F",
  "layer_3/kernel": "FD",
  "layer_3/bias": "D",
  "layer_4/kernel": "DO",
  "layer_4/bias": "O",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerceptronSpec(ModelSpec):
  """What the network is made of; the fields are keys of the config."""

  kind = "mlp"

  input_size: int
  model_size: int
  feedforward_size: int
  output_size: int
  bias_standard_deviation: float
  task: str

  @functools.cached_property
  def legend(self) -> dict[str, Dim]:
    """Returns letter -> Dim."""
    return {
      "B": Dim("batch", None),
      "I": Dim("inputs", self.input_size),
      "D": Dim("model", self.model_size),
      "F": Dim("feedforward", self.feedforward_size),
      "O": Dim("outputs", self.output_size),
    }

  @property
  def parameters(self) -> dict[str, str]:
    """Returns name -> letters."""
    return PARAMETERS

  def train_flops_per_example(self, *, causal: bool = False) -> float:
    """Returns floating-point operations per example, forward and backward: 6 per kernel element."""
    del causal  # there is no attention
    return 6.0 * sum(math.prod(self.sizes(letters)) for letters in ("ID", "DF", "FD", "DO"))


class Dense(nnx.Module):
  """`x @ kernel + bias`, sharded by constraints; kernel of standard deviation fan_in ** -0.5.

  Under muP the last layer's product is divided by the width over that of the base model.
  """

  def __init__(self, letters: str, spec: PerceptronSpec, *, rngs: nnx.Rngs):
    """Draws kernel and bias of the sizes that the two letters have in the legend."""
    shape, dtype = spec.sizes(letters), spec.parameter_dtype
    scale = jnp.asarray(spec.deviation(letters), dtype)
    self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * scale)
    scale = jnp.asarray(spec.bias_standard_deviation, dtype)
    self.bias = nnx.Param(jax.random.normal(rngs.params(), shape[1:], dtype) * scale)
    self.letters = letters
    output = spec.widths.growth(letters, spec.legend).kind is mup.Kind.OUTPUT
    self.divisor = spec.widths.ratio if output else 1.0
    self.dtype = spec.compute_dtype

  def __call__(self, x: Float[Array, "B X"]) -> Float[Array, "B Y"]:
    """Returns the layer's output, sharded by its letters."""
    kernel = constrain(self.kernel[...].astype(self.dtype), self.letters)
    # In float32 or wider: the bias' gradient is a sum over all rows.
    wide = wide_dtype(self.dtype)
    bias = constrain(self.bias[...].astype(wide), self.letters[1])
    product = (x @ kernel).astype(wide)
    if self.divisor != 1.0:
      product = product / jnp.asarray(self.divisor, wide)
    product = product + bias[None, :]
    return constrain(product.astype(self.dtype), "B" + self.letters[1])


# By `config.task`.
LOSSES = {"classification": losses.classification, "regression": losses.squared_error}


class MLP(nnx.Module):
  """The four layers."""

  def __init__(self, spec: PerceptronSpec, *, rngs: nnx.Rngs):
    """Draws the parameters from `rngs.params`."""
    self.spec = spec
    self.layer_1 = Dense("ID", spec, rngs=rngs)
    self.layer_2 = Dense("DF", spec, rngs=rngs)
    self.layer_3 = Dense("FD", spec, rngs=rngs)
    self.layer_4 = Dense("DO", spec, rngs=rngs)

  def __call__(self, inputs_BI: Float[Array, "B I"]) -> Float[Array, "B O"]:
    """Returns the outputs (logits, or values to regress on)."""
    x_BI = constrain(inputs_BI.astype(self.spec.compute_dtype), "BI")
    hidden = x_BI
    for number, layer in enumerate((self.layer_1, self.layer_2, self.layer_3), start=1):
      hidden = nnx.relu(layer(hidden))
      activations.record(f"layer_{number}", hidden)
    outputs_BO = self.layer_4(hidden)
    activations.record("outputs", outputs_BO)
    return outputs_BO

  def loss_sums(self, batch: Batch, key: Key[Array, ""] | None = None) -> Sums:
    """Returns the sums of the task; see `models.Network`.

    Args:
      batch: `inputs` [B, I]; `targets`, labels [B] or values [B, O]; `weights` [B].
      key: not used, nothing is random.
    """
    del key
    return LOSSES[self.spec.task](self(batch["inputs"]), batch)


SPEC, build = PerceptronSpec, MLP
