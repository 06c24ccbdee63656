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
from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from interop import hf_folder, name_maps, read_weights, safetensors_file
from interop.hf_families import FAMILIES
from interop.hf_parts import short
from interop.name_maps import Part, Tensor
from interop.safetensors_file import DTYPES
from models.spec import LORA_A, LORA_B, RESIDUAL, DecoderSpec
from runtime import files, forms
from runtime.forms import ABOVE_0, SIZE, Each, OrNull

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
    target: the shortest ending of its name that no module without an adapter has.
  """

  name: str
  layers: tuple[str, ...]
  adapted: tuple[str, ...]
  transposed: bool
  target: str


def modules(spec: DecoderSpec, model_type: str) -> list[Module]:
  """Returns the modules of a family in which a model has adapters."""
  found, others = [], []
  for name, (dims, *parameters) in FAMILIES[model_type].names.rows.items():
    layers = tuple(one.removesuffix(_KERNEL) for one in parameters if one.endswith(_KERNEL))
    adapted = tuple(one for one in layers if spec.adapts(one))
    if adapted:
      inputs = spec.letters_of(f"{adapted[0]}/{LORA_A}").removesuffix("r")
      found.append((name.removesuffix(".weight"), layers, adapted, dims.split(" ")[0] == inputs))
    else:
      others.append(name.removesuffix(".weight"))
  return [Module(*one, _target(one[0], others)) for one in found]


def _target(name: str, others: list[str]) -> str:
  parts = name.split(".")
  endings = (".".join(parts[-count:]) for count in range(1, len(parts)))
  return next(
    ending for ending in endings if not any(f".{one}".endswith(f".{ending}") for one in others)
  )


def adapter_config(spec: DecoderSpec, model_type: str, base: str | None) -> dict[str, Any]:
  """Returns the adapter_config.json of a model with adapters.

  Args:
    spec: of the model.
    model_type: the family of its base.
    base: folder or name of the base; None: it has none that others know.
  """
  lora, found = spec.lora, modules(spec, model_type)
  ranks, alphas = {}, {}
  for module in found:
    if (count := len(module.adapted)) > 1:
      ranks[module.target] = count * lora.rank
      alphas[module.target] = _number(lora.alpha * (math.sqrt(count) if lora.rs else count))
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": lora.rank,
    "lora_alpha": _number(lora.alpha),
    "lora_dropout": lora.dropout,
    "use_rslora": lora.rs,
    "target_modules": sorted({module.target for module in found}),
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


# ------------------------------ tensors ------------------------------


def tensors(spec: DecoderSpec, model_type: str) -> dict[str, Tensor]:
  """Returns the tensors of the adapters by name, layer after layer."""
  adapted = modules(spec, model_type)
  pairs = (_pair(spec, module, layer) for layer in range(spec.layers) for module in adapted)
  return {tensor.name: tensor for pair in pairs for tensor in pair}


def _pair(spec: DecoderSpec, module: Module, layer: int) -> tuple[Tensor, Tensor]:
  """Returns A and B, which of a fused module has a block for each part, and zeros elsewhere."""
  sizes, rank, width = name_maps.sizes_of(spec), spec.lora.rank, RESIDUAL.width
  start, row, inputs = f"{PREFIX}{module.name.format(layer)}", 0, ""
  a: list[Part] = []
  b: list[Part] = []
  for one in module.layers:
    kernel = spec.letters_of(f"{one}{_KERNEL}")
    # Of its kernel's letters, those that its inputs do not have.
    outputs = kernel.removeprefix(width) if kernel.startswith(width) else width
    height = name_maps.size_of(outputs, sizes)
    if one in module.adapted:
      inputs = spec.letters_of(f"{one}/{LORA_A}").removesuffix("r")
      ranks = range(len(a) * rank, len(a) * rank + rank)
      across, down = range(name_maps.size_of(inputs, sizes)), range(row, row + height)
      a.append(Part(f"{one}/{LORA_A}", (layer,), f"{inputs}r", ("r", inputs), (ranks, across)))
      b.append(Part(f"{one}/{LORA_B}", (layer,), f"r{outputs}", (outputs, "r"), (down, ranks)))
    row += height
  every = len(a) * rank
  return (
    Tensor(f"{start}.lora_A.weight", (every, name_maps.size_of(inputs, sizes)), tuple(a)),
    Tensor(f"{start}.lora_B.weight", (row, every), tuple(b)),
  )


# ------------------------------ reading for a config with adapters ------------------------------

KEY = "checkpoint.initialize_from"
TARGETS, DIGEST, DTYPE = "targets", "base_digest", "base_dtype"  # in the metadata of the weights
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
  path = folder / hf_folder.ADAPTER
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
    raise forms.refusal(f"{path} describes an adapter that cannot be read:", wrong)
  return Adapter(
    folder,
    given["r"],
    float(given["lora_alpha"]),
    bool(given.get("use_rslora")),
    float(given.get("lora_dropout") or 0.0),
    given.get("rank_pattern") or {},
    given.get("alpha_pattern") or {},
  )


def adopt(lora: ConfigDict, location: str, model_type: str) -> None:
  """Fills in the section `lora` for an adapter; it is unlocked.

  Raises:
    ValueError: keys of it are set and contradict the adapter.
  """
  adapter = read_config(location)
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
  stored = [*safetensors_file.read_header(adapter.folder / hf_folder.ADAPTER_WEIGHTS)]
  names = "\n".join(stored)
  found: list[str] = []
  for name, (_, *parameters) in FAMILIES[model_type].names.rows.items():
    module = re.escape(name.removesuffix(".weight")).replace(r"\{\}", r"\d+")
    if re.search(rf"^{re.escape(PREFIX)}{module}\.lora_A\.weight$", names, re.M):
      found += [one.removesuffix(_KERNEL) for one in parameters if one.endswith(_KERNEL)]
  if not found:
    raise ValueError(
      f"{KEY}={adapter.folder}: it is an adapter of another base: it has no tensor of a "
      f"{model_type!r} model, only such as {next(iter(stored), 'none')}"
    )
  return tuple(found)


def metadata(adapter: Adapter) -> dict[str, str]:
  """Returns what the file of weights says of itself: of ours, the digest of the base."""
  return safetensors_file.read_metadata(adapter.folder / hf_folder.ADAPTER_WEIGHTS)


def read(adapter: Adapter, spec: DecoderSpec, model_type: str) -> dict[str, np.ndarray]:
  """Returns our names -> arrays of the adapters, stacked over the layers.

  A fused module's adapter is that of each of its parts with the same A; one with a block for each
  part, as `peft_adapter` writes it, is taken apart.

  Args:
    adapter: read.
    spec: of the model, with adapters of the same rank, scale and targets.
    model_type: the family of the base.

  Raises:
    ValueError: its tensors are not those of the model's adapters; all in one message.
  """
  stored = safetensors_file.read_header(adapter.folder / hf_folder.ADAPTER_WEIGHTS)
  wanted, sizes, rank = tensors(spec, model_type), name_maps.sizes_of(spec), spec.lora.rank
  ours = adapter_config(spec, model_type, None)
  blocks = bool(adapter.ranks or adapter.alphas)
  parts: dict[str, list[tuple[safetensors_file.Stored, Part]]] = {}
  wrong = [f"{name} is not known" for name in stored if name not in wanted]
  if blocks and (adapter.ranks, adapter.alphas) != (ours["rank_pattern"], ours["alpha_pattern"]):
    wrong.append("rank_pattern and alpha_pattern: only one rank for all kernels is read")
  for name, tensor in wanted.items():
    of_ranks = int(name.endswith("lora_B.weight"))  # the axis
    shape = tuple(
      rank if axis == of_ranks and not blocks else n for axis, n in enumerate(tensor.shape)
    )
    one = stored.get(name)
    if one is None or one.shape != shape or one.dtype not in DTYPES:
      is_there = f"{one.dtype}{list(one.shape)}" if one else "missing"
      wrong.append(f"{name} is {is_there}; the base and lora.rank={rank} need {list(shape)}")
      continue
    for part in tensor.parts:
      if not blocks:  # one A for all parts of a fused module, and B without zeros
        where = [*part.where]
        where[of_ranks] = range(rank)
        part = dataclasses.replace(part, where=tuple(where))
      parts.setdefault(part.parameter, []).append((one, part))
  if wrong:
    head = f"{KEY}={adapter.folder}: it is an adapter of another base:"
    raise forms.refusal(head, wrong, _NAMED)
  source = read_weights.Source(adapter.folder, None, parts, sizes)
  found = {}
  with safetensors_file.Reader() as reader:
    for name, [(one, part), *_] in parts.items():
      index = [(0, spec.layers), *((0, sizes[letter]) for letter in part.letters)]
      [found[name]] = read_weights.local_shards(reader, source, name, DTYPES[one.dtype], [index])
  return found
