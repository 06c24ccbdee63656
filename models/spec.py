"""Specs: what a model is made of, resolved once from a config and handed to its modules.

A spec is frozen and hashable, so that a module can keep it. A field that is a key of the config has
the key's name; what follows from several keys is a property, so that it is computed in one place.
"""

import abc
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

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


@dataclasses.dataclass(frozen=True)
class ModelSpec(abc.ABC):
  """The parameters of a model: their dims, how they are drawn, and in which dtypes they are used.

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


@dataclasses.dataclass(frozen=True)
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


Spec = TypeVar("Spec", bound=ModelSpec)


def resolve(kind: type[Spec], config: ConfigDict, **given: Any) -> Spec:
  """Returns the spec of a finalized config.

  Args:
    kind: of spec; its fields are keys of the config's sections, but for those that are given.
    config: finalized.
    **given: fields that are no keys, or have other values.
  """
  training = config.training
  given |= {
    "parameter_dtype": jnp.dtype(training.parameter_dtype),
    "compute_dtype": jnp.dtype(training.compute_dtype),
    "widths": mup.widths(config.model),
    "lora": _of_keys(Lora, [config.lora], {}),
  }
  return _of_keys(kind, [config.model, training, config.partitioning, config.data, config], given)


def _of_keys(kind: type, sections: list[ConfigDict], given: Mapping[str, Any]) -> Any:
  """Returns a dataclass with the value of the first section that has a key of a field's name."""
  names = {field.name for field in dataclasses.fields(kind)} - given.keys()
  found = {name: next(keys[name] for keys in sections if name in keys) for name in names}
  lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
  return kind(**{**found, **lists, **given})
