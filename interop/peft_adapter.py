"""Low-rank adapters in the two files of PEFT: adapter_config.json and adapter_model.safetensors.

PEFT finds a tensor by the module that it belongs to, behind a prefix; a name without the prefix is
passed over, and B stays zero. Where a family's tensor is fused of several of our kernels, PEFT has
one adapter for it: A is then that of all parts, one below the other, and B has a block for each,
so that the product is the same with a rank that is as many times as large.

Source of the format: github.com/huggingface/peft, "PEFT checkpoint format".
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from interop import name_maps, name_tables
from interop.name_maps import Part, Tensor
from models.spec import RESIDUAL
from models.transformer_dims import LORA_A, LORA_B, decoder_spec

CONFIG_FILE, WEIGHTS = "adapter_config.json", "adapter_model"
PREFIX = "base_model.model."
_KERNEL = "/kernel"


@dataclasses.dataclass(frozen=True)
class Module:
  """A module of the family that has an adapter: a linear layer, of one layer of the model.

  Attributes:
    name: as in the tensor's name, with {} for the number of the layer.
    layers: our names of the layers that it is fused of, those without an adapter, too.
    adapted: those of them that have one.
    transposed: it stores its kernel as [in, out].
  """

  name: str
  layers: tuple[str, ...]
  adapted: tuple[str, ...]
  transposed: bool


def modules(config: ConfigDict, model_type: str) -> list[Module]:
  """Returns the modules of a family in which a config has adapters."""
  found = []
  for name, (dims, parameters) in name_tables.FAMILIES[model_type].rows.items():
    kernels = (parameters,) if isinstance(parameters, str) else parameters
    layers = tuple(one.removesuffix(_KERNEL) for one in kernels if one.endswith(_KERNEL))
    adapted = tuple(one for one in layers if decoder_spec(config).lora.adapts(one))
    if adapted:
      inputs = _letters(config, adapted[0], LORA_A).removesuffix("r")
      transposed = dims.split(" ")[0] == inputs
      found.append(Module(name.removesuffix(".weight"), layers, adapted, transposed))
  return found


def _letters(config: ConfigDict, layer: str, part: str) -> str:
  return decoder_spec(config).letters_of(f"{layer}/{part}")


def adapter_config(config: ConfigDict, model_type: str, base: str | None) -> dict[str, Any]:
  """Returns the adapter_config.json of a model with adapters.

  Args:
    config: finalized.
    model_type: the family of its base.
    base: folder or name of the base; None: it has none that others know.
  """
  lora, found = config.lora, modules(config, model_type)
  ranks, alphas = {}, {}
  for module in found:
    if (count := len(module.adapted)) > 1:
      name = _target(module, found, model_type)
      ranks[name] = count * lora.rank
      alphas[name] = _number(lora.alpha * (math.sqrt(count) if lora.rs else count))
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": lora.rank,
    "lora_alpha": _number(lora.alpha),
    "lora_dropout": lora.dropout,
    "use_rslora": lora.rs,
    "target_modules": sorted({_target(module, found, model_type) for module in found}),
    "rank_pattern": ranks,
    "alpha_pattern": alphas,
    "fan_in_fan_out": found[0].transposed,
    "bias": "none",
    "modules_to_save": None,
    "init_lora_weights": True,
    "inference_mode": True,
  }


def _number(value: float) -> float | int:
  return int(value) if float(value).is_integer() else value


def _target(module: Module, targets: list[Module], model_type: str) -> str:
  """Returns the shortest ending of a module's name that no module without an adapter has."""
  names = {name.removesuffix(".weight") for name in name_tables.FAMILIES[model_type].rows}
  others = names - {one.name for one in targets}
  parts = module.name.split(".")
  for count in range(1, len(parts)):
    ending = ".".join(parts[-count:])
    if not any(f".{one}".endswith(f".{ending}") for one in others):
      return ending
  raise AssertionError(module)


# ------------------------------ tensors ------------------------------


@dataclasses.dataclass(frozen=True)
class Blocks(Tensor):
  """B of a fused module: a block for each part, zeros elsewhere.

  Attributes:
    starts: of each part, its first row and column.
  """

  starts: tuple[tuple[int, int], ...] = ()


def tensors(config: ConfigDict, model_type: str) -> dict[str, Tensor]:
  """Returns the tensors of the adapters by name, layer after layer."""
  found = {}
  for layer in range(config.model.layers):
    for module in modules(config, model_type):
      start = f"{PREFIX}{module.name.format(layer)}"
      for one in (
        _a(config, module, layer, f"{start}.lora_A.weight"),
        _b(config, module, layer, f"{start}.lora_B.weight"),
      ):
        found[one.name] = one
  return found


def _a(config: ConfigDict, module: Module, layer: int, name: str) -> Tensor:
  letters = [_letters(config, one, LORA_A) for one in module.adapted]
  rank, sizes = config.lora.rank, name_maps.sizes_of(config)
  width = math.prod(sizes[letter] for letter in letters[0].removesuffix("r"))
  parts = tuple(
    Part(f"{one}/{LORA_A}", (layer,), own, ("r", own.removesuffix("r")), number * rank)
    for number, (one, own) in enumerate(zip(module.adapted, letters, strict=True))
  )
  return Tensor(name, (len(parts) * rank, width), 0, parts)


def _b(config: ConfigDict, module: Module, layer: int, name: str) -> Tensor:
  sizes, rank = name_maps.sizes_of(config), config.lora.rank
  parts, starts, row = [], [], 0
  for one in module.layers:
    outputs = _outputs(config, one)
    if one in module.adapted:
      starts.append((row, len(parts) * rank))
      parts.append(Part(f"{one}/{LORA_B}", (layer,), f"r{outputs}", (outputs, "r")))
    row += math.prod(sizes[letter] for letter in outputs)
  shape = (row, len(parts) * rank)
  if len(module.layers) == 1:
    return Tensor(name, shape, 0, tuple(parts))
  return Blocks(name, shape, 0, tuple(parts), tuple(starts))


def _outputs(config: ConfigDict, layer: str) -> str:
  """Returns the letters of a layer's output: of its kernel's, those that its inputs do not have."""
  kernel = decoder_spec(config).letters_of(f"{layer}{_KERNEL}")
  width = RESIDUAL.width
  return kernel.removeprefix(width) if kernel.startswith(width) else width


def joined(
  tensor: Tensor, sizes: Mapping[str, int], array: Callable[[str, tuple[int, ...]], np.ndarray]
) -> np.ndarray:
  """Returns a tensor as it is stored; as `name_maps.joined`, also of `Blocks`."""
  if not isinstance(tensor, Blocks):
    return name_maps.joined(tensor, sizes, array)
  found = None
  for part, (row, column) in zip(tensor.parts, tensor.starts, strict=True):
    one = name_maps.joined(Tensor(tensor.name, tensor.shape, 0, (part,)), sizes, array)
    if found is None:
      found = np.zeros(tensor.shape, one.dtype)
    found[row : row + one.shape[0], column : column + one.shape[1]] = one
  return found
