"""Low-rank adapters in the two files of PEFT: adapter_config.json and adapter_model.safetensors.

PEFT finds a tensor by the module that it belongs to, behind a prefix; a name without the prefix is
passed over, and B stays zero. Where a family's tensor is fused of several of our kernels, PEFT has
one adapter for it: A is then that of all parts, one below the other, and B has a block for each,
so that the product is the same with a rank that is as many times as large.

Source of the format: github.com/huggingface/peft, "PEFT checkpoint format".
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from interop import hf_folder, name_maps, safetensors_file
from interop.hf_family import short
from interop.name_maps import Part, Tensor
from interop.safetensors_file import DTYPES, Stored
from models import model_spec
from models.spec import LORA_A, LORA_B, RESIDUAL
from runtime import files, forms
from runtime.forms import ABOVE_0, SIZE, Each, OrNull

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
  for name, (dims, parameters) in name_maps.FAMILIES[model_type].rows.items():
    kernels = (parameters,) if isinstance(parameters, str) else parameters
    layers = tuple(one.removesuffix(_KERNEL) for one in kernels if one.endswith(_KERNEL))
    adapted = tuple(one for one in layers if model_spec(config).lora.adapts(one))
    if adapted:
      inputs = _letters(config, adapted[0], LORA_A).removesuffix("r")
      transposed = dims.split(" ")[0] == inputs
      found.append(Module(name.removesuffix(".weight"), layers, adapted, transposed))
  return found


def _letters(config: ConfigDict, layer: str, part: str) -> str:
  return model_spec(config).letters_of(f"{layer}/{part}")


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
  names = {name.removesuffix(".weight") for name in name_maps.FAMILIES[model_type].rows}
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
  kernel = model_spec(config).letters_of(f"{layer}{_KERNEL}")
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


# ------------------------------ reading for a config with adapters ------------------------------

KEY = "checkpoint.initialize_from"
TARGETS, DIGEST, DTYPE = "targets", "base_digest", "base_dtype"  # in the metadata of the weights
WEIGHTS_FILE = f"{WEIGHTS}.safetensors"
# Keys of adapter_config.json that would change what is computed -> the values that change nothing.
_OFF: dict[str, tuple] = {
  "peft_type": ("LORA",),
  "bias": ("none", None),
  "use_dora": (False, None),
  "use_qalora": (False, None),
  "lora_bias": (False, None),
  "modules_to_save": (None, []),
  "layers_to_transform": (None,),
  "layer_replication": (None,),
  "target_parameters": (None, []),
  "trainable_token_indices": (None,),
  "exclude_modules": (None, []),
  "alora_invocation_tokens": (None,),
  "megatron_config": (None,),
}
_FORM = {
  "r": SIZE,
  "lora_alpha": ABOVE_0,
  "lora_dropout": OrNull(forms.Kind("a share", lambda x: forms.is_number(x) and 0 <= x < 1)),
  "use_rslora": OrNull(forms.FLAG),
  "rank_pattern": OrNull(Each(SIZE)),
  "alpha_pattern": OrNull(Each(ABOVE_0)),
}
_NAMED = 12


@dataclasses.dataclass(frozen=True)
class Adapter:
  """What an adapter_config.json says.

  Attributes:
    folder: of the two files.
    rank: of each kernel's adapter, and `alpha` and `rs` as of `lora`.
    alpha: likewise.
    rs: likewise.
    dropout: of the adapters' inputs.
    ranks: of modules with another rank.
    alphas: likewise.
  """

  folder: pathlib.Path
  rank: int
  alpha: float
  rs: bool
  dropout: float
  ranks: Mapping[str, int]
  alphas: Mapping[str, float]


def read_config(location: str) -> Adapter:
  """Returns what the adapter_config.json of a folder says.

  Raises:
    ValueError: there is none, or it describes adapters that are not there; all in one message.
  """
  folder = hf_folder.local(location, KEY, weights=True)
  path = folder / CONFIG_FILE
  try:
    given = files.read_json(path, follow=True)
  except FileNotFoundError:
    raise ValueError(f"{KEY}={location}: it has no {path.name}; name an adapter's folder") from None
  except (OSError, ValueError) as error:
    raise ValueError(f"{KEY}: {path} cannot be read ({error})") from error
  forms.check(given, {}, f"{KEY}: {path}")
  wrong = [
    f"{key}={short(given[key])}: adapters of this kind are not there"
    for key, off in _OFF.items()
    if key in given and given[key] not in off
  ]
  wrong += forms.first([*forms.wrong({"r": None, "lora_alpha": None, **given}, _FORM)], _NAMED)
  if wrong:
    lines = "\n".join(f"  {line}" for line in wrong)
    raise ValueError(f"{path} describes an adapter that cannot be read:\n{lines}")
  return Adapter(
    folder,
    given["r"],
    float(given["lora_alpha"]),
    bool(given.get("use_rslora")),
    float(given.get("lora_dropout") or 0.0),
    given.get("rank_pattern") or {},
    given.get("alpha_pattern") or {},
  )


def adopt(config: ConfigDict, location: str, model_type: str) -> None:
  """Fills in `lora` for an adapter; `config` is unlocked.

  Raises:
    ValueError: keys of `lora` are set and contradict the adapter.
  """
  adapter, lora = read_config(location), config.lora
  given = {key: getattr(adapter, key) for key in ("rank", "alpha", "rs")}
  if not lora.rank:
    lora.update(given)
    lora.targets = _targets(adapter, model_type)
    lora.dropout = lora.dropout or adapter.dropout
  wrong = [
    f"lora.{key}={lora[key]!r}, and {given[key]!r} there"
    for key in given
    if lora[key] != given[key]
  ]
  if wrong:
    raise ValueError(f"{KEY}={location}: {'; '.join(wrong)}; leave lora.rank and these unset")


def _targets(adapter: Adapter, model_type: str) -> tuple[str, ...]:
  """Returns our layers that an adapter's tensors belong to."""
  if said := metadata(adapter).get(TARGETS):  # of one that was exported here
    return tuple(said.split(","))
  names = "\n".join(_stored(adapter))
  found: list[str] = []
  for name, (_, parameters) in name_maps.FAMILIES[model_type].rows.items():
    kernels = (parameters,) if isinstance(parameters, str) else parameters
    module = re.escape(name.removesuffix(".weight")).replace(r"\{\}", r"\d+")
    if re.search(rf"^{re.escape(PREFIX)}{module}\.lora_A\.weight$", names, re.M):
      found += [one.removesuffix("/kernel") for one in kernels if one.endswith("/kernel")]
  if not found:
    raise ValueError(
      f"{KEY}={adapter.folder}: it is an adapter of another base: it has no tensor of a "
      f"{model_type!r} model, only such as {next(iter(_stored(adapter)), 'none')}"
    )
  return tuple(found)


def metadata(adapter: Adapter) -> dict[str, str]:
  """Returns what the file of weights says of itself: of ours, the digest of the base."""
  return safetensors_file.read_metadata(adapter.folder / WEIGHTS_FILE)


def _stored(adapter: Adapter) -> dict[str, Stored]:
  try:
    return safetensors_file.read_header(adapter.folder / WEIGHTS_FILE)
  except OSError as error:
    raise ValueError(f"{KEY}: {adapter.folder / WEIGHTS_FILE} cannot be read ({error})") from error


def read(adapter: Adapter, config: ConfigDict, model_type: str) -> dict[str, np.ndarray]:
  """Returns our names -> arrays of the adapters, stacked over the layers.

  A fused module's adapter is that of each of its parts with the same A; one with a block for each
  part, as `peft_adapter` writes it, is taken apart.

  Args:
    adapter: read.
    config: finalized, with adapters of the same rank, scale and targets.
    model_type: the family of the base.

  Raises:
    ValueError: its tensors are not those of the config's adapters; all in one message.
  """
  stored, wanted = _stored(adapter), tensors(config, model_type)
  sizes, rank = name_maps.sizes_of(config), config.lora.rank
  ours = adapter_config(config, model_type, None)
  blocks = bool(adapter.ranks or adapter.alphas)
  found: dict[str, np.ndarray] = {}
  wrong = [f"{name} is not known" for name in stored if name not in wanted]
  if blocks and (adapter.ranks, adapter.alphas) != (ours["rank_pattern"], ours["alpha_pattern"]):
    wrong.append("rank_pattern and alpha_pattern: only one rank for all kernels is read")
  with safetensors_file.Reader() as reader:
    for name, tensor in wanted.items():
      shape = tensor.shape
      if not blocks:  # one A for all parts of a fused module
        shape = (shape[0], rank) if name.endswith("lora_B.weight") else (rank, shape[1])
      one = stored.get(name)
      if one is None or one.shape != shape or one.dtype not in DTYPES:
        is_there = f"{one.dtype}{list(one.shape)}" if one else "missing"
        wrong.append(f"{name} is {is_there}; the base and lora.rank={rank} need {list(shape)}")
        continue
      array = np.array(reader.block(one, slice(0, shape[0]), slice(0, shape[1])))
      _take_apart(tensor, array, sizes, config.model.layers, found)
  if wrong:
    lines = [*wrong[:_NAMED], *([f"and {len(wrong) - _NAMED} more"] if len(wrong) > _NAMED else [])]
    listed = "\n".join(f"  {line}" for line in lines)
    raise ValueError(f"{KEY}={adapter.folder}: it is an adapter of another base:\n{listed}")
  return found


def _take_apart(
  tensor: name_maps.Tensor,
  array: np.ndarray,
  sizes: Mapping[str, int],
  layers: int,
  found: dict[str, np.ndarray],
) -> None:
  """Puts a tensor's parts into the arrays of a model."""
  shared = array.shape != tensor.shape
  for number, part in enumerate(tensor.parts):
    row, column = tensor.starts[number] if isinstance(tensor, Blocks) else (part.start, 0)
    if shared and isinstance(tensor, Blocks):
      column = 0
    elif shared:
      row = 0
    height, width = (math.prod(sizes[letter] for letter in axis) for axis in part.axes)
    letters = "".join(part.axes)
    one = array[row : row + height, column : column + width]
    one = one.reshape([sizes[letter] for letter in letters])
    one = one.transpose([letters.index(letter) for letter in part.letters])
    found.setdefault(part.parameter, np.zeros((layers, *one.shape), array.dtype))[part.place] = one
