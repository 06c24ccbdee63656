"""Adapters in PEFT's two files, read for a config with adapters; see `peft_adapter`."""

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping

import numpy as np
from ml_collections import ConfigDict

from interop import hf_folder, name_maps, name_tables, peft_adapter, safetensors_file
from interop.hf_family import short
from interop.peft_adapter import Blocks
from interop.safetensors_file import DTYPES, Stored
from runtime import files, forms
from runtime.forms import ABOVE_0, SIZE, Each, OrNull

KEY = "checkpoint.initialize_from"
TARGETS, DIGEST, DTYPE = "targets", "base_digest", "base_dtype"  # in the metadata of the weights
WEIGHTS_FILE = f"{peft_adapter.WEIGHTS}.safetensors"
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
  path = folder / peft_adapter.CONFIG_FILE
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
  for name, (_, parameters) in name_tables.FAMILIES[model_type].rows.items():
    kernels = (parameters,) if isinstance(parameters, str) else parameters
    module = re.escape(name.removesuffix(".weight")).replace(r"\{\}", r"\d+")
    if re.search(rf"^{re.escape(peft_adapter.PREFIX)}{module}\.lora_A\.weight$", names, re.M):
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
  stored, wanted = _stored(adapter), peft_adapter.tensors(config, model_type)
  sizes, rank = name_maps.sizes_of(config), config.lora.rank
  ours = peft_adapter.adapter_config(config, model_type, None)
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
