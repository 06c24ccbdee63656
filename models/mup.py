"""muP, the maximal update parametrization: what follows from a model's width, by dim.

Embeddings, hidden matrices and unembedding change activations as much at all widths, so that a
learning rate that was tuned at `model.base_width` is right at every width. Source:
arXiv:2203.03466, table 8.

The base model is the config's with all of its widths (model, hidden dims of MLPs and experts, heads
x head) smaller by the same factor, and with as many experts. Which dims of a parameter are widths,
the letters of the legend say.
"""

import dataclasses
import enum
import math
from typing import Any

from ml_collections import ConfigDict

from partitioning.rules import Dim, Legend

# Parameters that are no matrices, by the last part of their name; they have no weight decay either.
VECTORS = ("scale", "bias", "sinks", "log_factor")
_HEADS, _HEAD = ("heads", "kv_heads"), "head"
# Dims that are the inputs of a kernel that begins with them: of the residual, of latent vectors.
INPUTS = ("model", "query_latent", "latent", "decay_latent", "gate_latent")
# Hidden dims of MLPs, of experts, and of experts that all tokens share.
HIDDEN_LAYERS = ("feedforward", "expert_feedforward", "shared_feedforward")
# Dims that grow with the model; all others (vocabulary, positions, inputs, ...) are finite.
WIDTHS = ("model", *HIDDEN_LAYERS, *_HEADS, _HEAD)
# Dims that number separate kernels; no side of them.
STACKS = (
  *("layers", "dense_layers", "mixer_layers", "dense_mixer_layers", "mlp_layers", "mtp_layers"),
  "experts",
)


class Kind(enum.Enum):
  """Which side of a parameter is a width: of its inputs, which a matmul sums over, and outputs."""

  HIDDEN = "hidden matrix"  # both
  INPUT = "embedding, bias or scale"  # the outputs
  OUTPUT = "unembedding"  # the inputs
  FINITE = "of no width"


@dataclasses.dataclass(frozen=True)
class Growth:
  """How a parameter differs from that of the base model.

  Attributes:
    kind: which of its sides are widths.
    inputs: the number of its inputs over that of the base model; of a vector 1.
    outputs: likewise.
  """

  kind: Kind
  inputs: float
  outputs: float


def sides(letters: str, legend: Legend, *, vector: bool = False) -> tuple[list[Dim], list[Dim]]:
  """Returns the dims of a parameter's inputs and of its outputs, those of STACKS apart.

  D (model) is the input if it comes first of the others, else the output; likewise latent dims.

  Args:
    letters: of the parameter.
    legend: letter -> Dim.
    vector: whether it is a scale or a bias, which has outputs only.
  """
  dims = [legend[letter] for letter in letters if legend[letter].name not in STACKS]
  if vector:
    return [], dims
  cut = 1 if dims and dims[0].name in INPUTS else -1
  return dims[:cut], dims[cut:]


@dataclasses.dataclass(frozen=True)
class Widths:
  """The widths of a model beside those of its base model: keys of the section `model`.

  Attributes:
    base_width: 0: muP is off, and the model is its own base model.
    base_head_size: 0: as head_size.
  """

  model_size: int
  base_width: int
  head_size: int
  base_head_size: int

  @property
  def ratio(self) -> float:
    """Returns the model's width over that of the base model; 1 without muP."""
    return self.model_size / self.base_width if self.base_width else 1.0

  @property
  def of_embeddings(self) -> int:
    """Returns the width that embeddings are scaled by: the base model's, at all widths."""
    return self.base_width or self.model_size

  @property
  def differ(self) -> bool:
    """Returns whether any dim has another size than in the base model."""
    return any(self.dim_ratio(dim) != 1.0 for dim in WIDTHS)

  def dim_ratio(self, dim: str) -> float:
    """Returns the size of a dim of the legend over that in the base model.

    Where a head is larger than in the base model, there are the fewer heads more.
    """
    if dim not in WIDTHS or not self.base_width:
      return 1.0
    head = self.head_size / self.base_head_size if self.base_head_size else 1.0
    if dim == _HEAD:
      return head
    return self.ratio / (head if dim in _HEADS else 1.0)

  def growth(self, letters: str, legend: Legend, *, vector: bool = False) -> Growth:
    """Returns how a parameter differs from that of the base model; the arguments are `sides`'."""
    found = sides(letters, legend, vector=vector)
    inputs, outputs = (
      math.prod((self.dim_ratio(dim.name) for dim in side), start=1.0) for side in found
    )
    wide = tuple(any(dim.name in WIDTHS for dim in side) for side in found)
    kinds = {
      (True, True): Kind.HIDDEN,
      (False, True): Kind.INPUT,
      (True, False): Kind.OUTPUT,
      (False, False): Kind.FINITE,
    }
    return Growth(kinds[wide], inputs, outputs)

  def deviation(self, letters: str, legend: Legend, fan_in: int) -> float:
    """Returns the standard deviation of a kernel's initial elements: that of a model of any width.

    fan_in ** -0.5, with an unembedding's fan-in at the base width: its output is divided by
    `ratio` instead.
    """
    found = self.growth(letters, legend)
    return fan_in**-0.5 * (found.inputs**0.5 if found.kind is Kind.OUTPUT else 1.0)


def widths(model: Any) -> Widths:
  """Returns the widths of the section `model` of a finalized config, of any registered model."""
  return Widths(**{one.name: model.get(one.name) or 0 for one in dataclasses.fields(Widths)})


def plain_keys(model: ConfigDict) -> dict[str, Any]:
  """Returns the keys of `model` with which a decoder computes the same without muP.

  Raises:
    ValueError: there are none.
  """
  found = dict(model.items())
  if not (base := found["base_width"]):
    return found
  ratio = found["model_size"] / base
  if found["experts"] and ratio != 1:
    raise ValueError(
      f"model.base_width={base}: muP divides the logits of the routers by model.model_size / "
      f"{base} = {ratio:g}, for which no model folder has a key; train the model with "
      f"model.base_width=0 to export it"
    )
  if found["scaled_embeddings"]:
    found["embedding_multiplier"] *= ratio**-0.5
  return {**found, "base_width": 0, "logits_divisor": found["logits_divisor"] * ratio}
