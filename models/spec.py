"""Specs: what a model is made of, resolved once from a config and handed to its modules.

A spec is frozen and hashable, so that a module can keep it. A field that is a key of the config has
the key's name; what follows from several keys is a property, so that it is computed in one place.
"""

import abc
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from models import mup
from partitioning.dims import Dim
from partitioning.parallel.sharded_function import Residual

# The residual stream of layers, between blocks and inside.
RESIDUAL = Residual(between="BRD", inside="BTD")
# How the names of stacked layers begin. Where a decoder has sparse layers, its dense ones are a
# stack of their own.
LAYERS, DENSE_LAYERS = "layers/", "dense_layers/"


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters: the section `lora`; there are none of rank 0."""

  rank: int
  alpha: float
  rs: bool
  targets: tuple[str, ...]
  dropout: float

  @property
  def scale(self) -> float:
    """Returns s, the factor of an adapter's output; see `models.lora`."""
    return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)

  def adapts(self, layer: str) -> bool:
    """Returns whether a linear layer, such as `layers/mlp/up`, has an adapter."""
    return self.rank > 0 and layer in self.targets


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec(abc.ABC):
  """What a model is made of: its dims, how its parameters are drawn, in which dtypes they are used.

  A model's own is a frozen dataclass (`kw_only=True`) whose fields have the names of keys in the
  sections `model`, `training`, `partitioning`, `data` and the top of the config; a field that is no
  key needs a default.

  Attributes:
    widths: for muP.
    lora: the adapters of linear layers.
  """

  parameter_dtype: jnp.dtype
  compute_dtype: jnp.dtype
  matmul_dtype: str
  matmul_scaling: str
  widths: mup.Widths
  lora: Lora

  @property
  @abc.abstractmethod
  def legend(self) -> dict[str, Dim]:
    """Returns letter -> Dim."""

  @property
  @abc.abstractmethod
  def parameters(self) -> dict[str, str]:
    """Returns name pattern -> letters of the parameters that the model has."""

  @abc.abstractmethod
  def train_flops_per_example(self, *, causal: bool = False) -> float:
    """Returns floating-point operations per row of a batch, forward and backward.

    Args:
      causal: count only the unmasked half of attention.
    """

  @staticmethod
  def in_compute_dtype(name: str) -> bool:
    """Returns whether a parameter is only ever read in the compute dtype; by default none is."""
    del name
    return False

  @classmethod
  def of_sections(cls, sections: ConfigDict) -> "ModelSpec":
    """Returns the spec of a finalized config, which is a mapping of sections."""
    training = sections["training"]
    given = {
      "parameter_dtype": jnp.dtype(training["parameter_dtype"]),
      "compute_dtype": jnp.dtype(training["compute_dtype"]),
      "widths": mup.widths(sections["model"]),
      "lora": Lora(**_fields(Lora, [sections["lora"]])),
    }
    every = (sections["model"], training, sections["partitioning"], sections["data"], sections)
    return cls(**{**_fields(cls, every), **given})

  def letters_of(self, name: str) -> str:
    """Returns the letters of a parameter within its layer, so without the stack's L.

    Args:
      name: such as `layers/mlp/up/kernel`.

    Raises:
      ValueError: no row of the table matches the name.
    """
    if found := self.optional_letters(name):
      return found
    file = type(self).__module__.replace(".", "/")
    raise ValueError(f"{name}: no row of {file}.py says which dims it has; add one")

  def optional_letters(self, name: str) -> str:
    """Returns the letters of an optional parameter; "" if the model does not have it."""
    found = matched(name, self.parameters)
    return found[1:] if name.startswith((LAYERS, DENSE_LAYERS)) else found

  def sizes(self, letters: str) -> tuple[int, ...]:
    """Returns the shape of a parameter with these letters."""
    return tuple(self.legend[letter].size for letter in letters)

  def inputs_of(self, letters: str) -> str:
    """Returns the letters of the inputs of a kernel with these letters.

    A kernel whose first dim is the width of the residual or of latent vectors reads them; any other
    writes the residual.
    """
    letters = letters.removeprefix("E")  # experts are kernels side by side
    reads = self.legend[letters[0]].name in mup.INPUTS
    return letters[0] if reads else letters.removesuffix(RESIDUAL.width)

  def fan_in(self, letters: str) -> int:
    """Returns the number of inputs of a kernel with these letters."""
    return math.prod(self.sizes(self.inputs_of(letters)))

  def deviation(self, letters: str) -> float:
    """Returns the standard deviation of a kernel's initial elements."""
    return self.widths.deviation(letters, self.legend, self.fan_in(letters))

  def in_8_bits(self, name: str) -> bool:
    """Returns whether activations are multiplied by a parameter in 8 bits."""
    return in_8_bits(name, self.matmul_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersSpec(ModelSpec):
  """A model with stacked layers of attention and MLP: what they have in common."""

  layers: int
  model_size: int
  feedforward_size: int
  heads: int
  norm_epsilon: float
  norm_scale_from_one: bool
  gated: bool
  activation: str
  dropout_rate: float
  rematerialization: str
  scan_unroll: int
  reshard_after_forward: bool

  @property
  def out_scale(self) -> float:
    """Returns the factor of the deviation of kernels that write the residual, as in GPT-2."""
    return (2 * self.layers) ** -0.5


def in_8_bits(name: str, matmul_dtype: str) -> bool:
  """Returns whether activations are multiplied by a parameter in 8 bits.

  The kernels of the layers are; not the unembedding, since logits tell tokens apart by small
  differences, nor adapters, which are small.

  Args:
    name: of the parameter.
    matmul_dtype: `training.matmul_dtype`.
  """
  kernel = name.startswith((LAYERS, DENSE_LAYERS)) and name.endswith("/kernel")
  return kernel and matmul_dtype != "compute"


def matched(name: str, parameters: Mapping[str, str]) -> str:
  """Returns the letters of a parameter in a table of patterns; "" if no row matches."""
  return next((found for row, found in parameters.items() if re.fullmatch(row, name)), "")


def _fields(kind: type, sections: Sequence[ConfigDict]) -> dict[str, Any]:
  """Returns name -> the value of the first section that has a key of a field's name."""
  found = {}
  for field in dataclasses.fields(kind):
    if keys := next((keys for keys in sections if field.name in keys), None):
      found[field.name] = hashable(keys[field.name])
  return found


def hashable(value: Any) -> Any:
  """Returns a key's value; lists as tuples, and names with values as sorted pairs."""
  if isinstance(value, Mapping | ConfigDict):
    return tuple(sorted((name, hashable(one)) for name, one in value.items()))
  return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value
