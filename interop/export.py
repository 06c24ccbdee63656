"""Writes a model as a folder that transformers, vLLM and others load.

Each file of weights is written by one process, from its start to its end, so that folders on
network file systems and in buckets work. The parts of a tensor are brought to it by a collective,
which all processes run; a process has one tensor in memory that it writes, and one that comes next.

The folder is complete under its name, or not there at all. On a file system everything is written
to FOLDER.exporting, which is renamed at the end. In a bucket there is no rename: there the files
without which nothing loads, the index of the weights and config.json, are written last.

A run's own copies of the tokenizer's files are taken as they are. What is missing is written, as
transformers 4.57 and 5 load it: tokens that are bytes become a tokenizer.json that encodes alike,
and a bare tokenizer.json gets its tokenizer_config.json.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from interop import hf_config, hf_folder, name_maps, peft_adapter, read_weights, safetensors_file
from interop.hf_families import FAMILIES
from interop.hf_folder import CONFIG
from interop.hf_parts import UNSCALED, named_scaling
from interop.safetensors_file import WeightFile, write_file
from models import adapters
from models.spec import LORA_A, LORA_B, DecoderSpec
from partitioning.rules import named_leaves, nested
from runtime import files
from runtime.exit_codes import ExportError
from runtime.printable import few
from training.checkpointing.consensus import Together, join_reports

# ------------------------------ the files of the tokenizer ------------------------------

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
SENTENCEPIECE_FILE = "tokenizer.model"
TEMPLATE_FILE, TEMPLATE_KEY = "chat_template.jinja", "chat_template"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
# As version 5 calls that class where it saves one; 4.57 does not know the name.
_NEW_TOKENIZER_CLASS = "TokenizersBackend"
# The token of byte 0, which ends a document. The format's own character for this byte would be
# found as a special token in texts that have that character.
_END_OF_BYTES = "\0"


def tokenizer_files(
  copies: Mapping[str, bytes], *, end: int, start: int | None, special: Mapping[str, int]
) -> dict[str, bytes]:
  """Returns name -> content of the files to write.

  Args:
    copies: name -> content of the run's own copies; none where tokens are bytes.
    end: the id that ends a document.
    start: the id of the BOS that the tokenizer puts before a text; None: it puts none.
    special: name -> id of the special tokens.
  """
  found = dict(copies)
  if not {TOKENIZER_FILE, SENTENCEPIECE_FILE} & {*found}:
    found[TOKENIZER_FILE] = bytes_tokenizer().encode()
    special = {_END_OF_BYTES: end}
  if "chat_template.json" in found:  # whose form belongs to other classes
    template = json.loads(found.pop("chat_template.json"))[TEMPLATE_KEY]
    if not isinstance(template, str):  # several, by name
      template = next(one["template"] for one in template if one["name"] == "default")
    found[TEMPLATE_FILE] = template.encode()
  names = {id_: name for name, id_ in special.items()}
  if TOKENIZER_FILE in found and TOKENIZER_CONFIG_FILE not in found:
    named = {"bos_token": names.get(start), "eos_token": names.get(end)}
    config = {"tokenizer_class": TOKENIZER_CLASS, "clean_up_tokenization_spaces": False}
    found[TOKENIZER_CONFIG_FILE] = json_bytes(
      config | {k: name for k, name in named.items() if name}
    )
  elif TOKENIZER_CONFIG_FILE in found:
    config = json.loads(found[TOKENIZER_CONFIG_FILE])
    if config.get("tokenizer_class") == _NEW_TOKENIZER_CLASS:
      found[TOKENIZER_CONFIG_FILE] = json_bytes(config | {"tokenizer_class": TOKENIZER_CLASS})
  if hf_folder.GENERATION not in found:
    ids = {"bos_token_id": start, "eos_token_id": end}
    found[hf_folder.GENERATION] = json_bytes({k: id_ for k, id_ in ids.items() if id_ is not None})
  return found


def bytes_tokenizer() -> str:
  """Returns the tokenizer.json of a tokenizer whose ids are the bytes of a text."""
  characters = _byte_characters()
  vocabulary = {_END_OF_BYTES: 0} | {characters[byte]: byte for byte in range(1, 256)}
  found = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  found.decoder = tokenizers.decoders.ByteLevel()
  found.add_special_tokens([tokenizers.AddedToken(_END_OF_BYTES, normalized=False)])
  return found.to_str()


def _byte_characters() -> list[str]:
  """Returns the character that stands for each byte in a byte-level vocabulary. Source: GPT-2."""
  plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in plain]
  return [chr(byte if byte in plain else 256 + others.index(byte)) for byte in range(256)]


def json_bytes(value: Any) -> bytes:
  """Returns a value as a file of JSON."""
  return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


# ------------------------------ the folder ------------------------------

ENDING = ".exporting"
# What an export writes, also where a kill has left a part of it.
_EXPORTED = re.compile(r"[\w.-]+\.(safetensors|json|jinja|model|txt)(\.tmp)?|\.preflight-\w+")
_LISTED = 5


def check_folder(to: str, checkpoints: epath.Path | None) -> epath.Path:
  """Returns the folder of an export, absolute and without links; changes nothing.

  Args:
    to: as the user gives it.
    checkpoints: the folder of the checkpoints of the run that is exported, if it is one.

  Raises:
    ValueError: something is there already, another export is writing it, or it is among the
      checkpoints.
    OSError: it cannot be looked at.
  """
  folder = epath.Path(to).expanduser()
  if files.is_local(folder):
    folder = epath.Path(os.path.realpath(folder))
  if checkpoints is not None and checkpoints.resolve() in (folder, *folder.parents):
    raise ValueError(
      f"--to={to}: it is among the checkpoints of the run, in {checkpoints}, whose folders are "
      f"checked and removed by the run; give another folder"
    )
  if folder.exists():
    if not folder.is_dir():
      raise ValueError(f"--to={to}: {folder} is a file; give a folder that is new or empty")
    if there := sorted(path.name for path in folder.iterdir()):
      raise ValueError(
        f"--to={to}: {folder} is not empty (it has {few(there, _LISTED)}); an export "
        f"is written to a folder that is new or empty"
      )
  if files.is_local(folder):
    partial = folder.with_name(folder.name + ENDING)
    if os.path.lexists(partial):
      _require_left(partial)
      os.close(_lock(partial))
  return folder


def _require_left(partial: epath.Path) -> None:
  """Raises ValueError where a folder is not what an export leaves that was killed."""
  plain = os.path.isdir(partial) and not os.path.islink(partial)
  foreign = [
    entry.name
    for entry in (os.scandir(partial) if plain else ())
    if not (entry.is_file(follow_symlinks=False) and _EXPORTED.fullmatch(entry.name))
  ]
  if not plain or foreign:
    what = f"has {min(foreign)}, which no export writes" if foreign else "is not a folder"
    raise ValueError(
      f"{partial} {what}; an export writes there before it renames it: move it, or give another "
      f"--to"
    )


def _lock(partial: epath.Path) -> int:
  """Returns a descriptor that holds the lock of a folder; the kernel releases it at a kill.

  Raises:
    ValueError: another export holds it.
  """
  descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(descriptor)
    raise ValueError(
      f"another export is writing {partial}; wait for its end, or give another --to"
    ) from None
  except OSError:  # a file system without locks
    pass
  return descriptor


class ExportFolder:
  """The folder while it is written; process 0 alone begins, commits and removes it.

  Attributes:
    final: where the export will be.
    path: where the files are written until then.
  """

  def __init__(self, final: epath.Path):
    """Takes what `check_folder` returned; changes nothing."""
    self.final, self.local = final, files.is_local(final)
    self.path = final.with_name(final.name + ENDING) if self.local else final
    self._lock: int | None = None

  def begin(self) -> None:
    """Makes the folder to write to, empty; what a killed export has left is removed.

    Raises:
      ValueError: another export is writing there.
      OSError: it cannot be made.
    """
    self.path.mkdir(parents=True, exist_ok=True)
    if self.local:
      _require_left(self.path)
      self._lock = _lock(self.path)
      self._empty()

  def write(self, name: str, content: str | bytes) -> None:
    """Writes a small file; raises OSError, which names it."""
    files.replace(self.path / name, content)

  def commit(self) -> None:
    """Gives the folder its name, on the disk.

    Raises:
      OSError: something has appeared there meanwhile.
    """
    if not self.local:
      return
    files.sync([self.path])
    try:
      os.rename(self.path, self.final)  # also over an empty folder
    except OSError as error:
      if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
        raise
      raise FileExistsError(
        error.errno, "something has been written there meanwhile", str(self.final)
      ) from error
    files.sync([self.final.parent])
    os.close(self._lock)

  def remove(self) -> None:
    """Removes what was written so far; for an export that has failed or is stopped."""
    if not self.local:
      self._empty()
    elif self._lock is not None:
      with contextlib.suppress(OSError):
        self._empty()
        os.rmdir(self.path)

  def _empty(self) -> None:
    for child in self.path.iterdir():
      child.unlink(missing_ok=True)


# ------------------------------ what is written ------------------------------

# Keys of a config.json that are about the folder it was in, not about the model.
_DROPPED = (
  *("_name_or_path", "name_or_path", "auto_map", "torch_dtype", "dtype"),
  "quantization_config",  # what is written is not
)
# (parameter, place, dtype, whether it is needed here) -> its part there in this dtype, a key of
# `safetensors_file.NAMES`, or None. A place is the indices along its first dims, which the part
# does not have: none, the layer, or layer and expert.
Place = tuple[int, ...]
Fetch = Callable[[str, Place, str, bool], np.ndarray | None]


def model_config(
  ours: Mapping[str, Any],
  length: int,
  dtype: str,
  *,
  end: int,
  start: int | None,
  source: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns the config.json of a model.

  Args:
    ours: the section `model` of a finalized config, in which muP is written out.
    length: of the longest row that the model was trained for, at least, in tokens.
    dtype: of the tensors.
    end: the id that ends a document.
    start: the id of the BOS that the tokenizer puts before a text; None: it puts none.
    source: the config.json that the model came from; {}: it was not imported.

  Raises:
    ValueError: transformers has no class for this model; with the keys that no family has.
  """
  if source:
    length = max(length, hf_config.read(source, CONFIG).positions)
  else:
    length = _scaled_length(tuple(ours["rotary_scaling"]), length)
  written = hf_config.write(ours, length, source.get("model_type", ""))
  ids = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": None}
  if written["model_type"] == "gpt2":  # whose own defaults are not 0
    ids.update(resid_pdrop=ours["dropout_rate"], embd_pdrop=0.0, attn_pdrop=0.0)
  kept = {key: value for key, value in source.items() if key not in _DROPPED}
  found = {**ids, **written, **kept}
  if hf_config.read(found, CONFIG) != hf_config.read(written, CONFIG):
    found |= written  # something was overridden since
  further = FAMILIES[written["model_type"]].names.further
  if further and ours["mtp_layers"]:
    found[further.key] = ours["mtp_layers"]
  # 4.57 reads torch_dtype, 5 reads dtype.
  return {**found, "torch_dtype": dtype, "dtype": dtype}


def _scaled_length(scaling: tuple, length: int) -> int:
  """Returns the longest row that rotary positions with this scaling are for, in tokens."""
  kind, numbers = named_scaling(scaling)
  if kind == UNSCALED:
    return length
  if kind == "dynamic":  # whose original length has no key of its own
    return int(numbers["original_length"])
  return max(length, int(numbers.get("factor", 1) * numbers.get("original_length", length)))


@dataclasses.dataclass(frozen=True)
class Plan:
  """What an export writes.

  Attributes:
    files: of weights.
    tensors: name -> the parameters that it holds.
    sizes: letter -> size in the folder.
    small: name -> content of the other files, the last of which is written last.
    zeros: biases that the model does not have and its family does.
  """

  files: Sequence[WeightFile]
  tensors: Mapping[str, name_maps.Tensor]
  sizes: Mapping[str, int]
  small: Mapping[str, bytes]
  zeros: frozenset[str] = frozenset()

  @property
  def bytes(self) -> int:
    """Returns the space that it needs."""
    return sum(file.bytes + len(file.header()) for file in self.files) + sum(
      map(len, self.small.values())
    )


def planned(
  spec: DecoderSpec,
  described: Mapping[str, Any],
  dtype: str,
  small: Mapping[str, bytes],
  dtypes: Mapping[str, str] | None = None,
) -> Plan:
  """Returns the plan of a model.

  Args:
    spec: of the model.
    described: its config.json.
    dtype: of the tensors.
    small: name -> content of files that are written as they are.
    dtypes: name -> dtype of tensors that have another.
  """
  biases = hf_config.read(described, CONFIG).model["biases"]
  biased = dataclasses.replace(spec, biases=biases)
  tensors = name_maps.tensors(biased, described["model_type"])
  parts = (part.parameter for tensor in tensors.values() for part in tensor.parts)
  zeros = frozenset(name for name in parts if not spec.optional_letters(name))
  found = [
    (name, tensor.shape, (dtypes or {}).get(name, dtype)) for name, tensor in tensors.items()
  ]
  files = safetensors_file.split(
    [safetensors_file.Tensor(*one) for one in found], safetensors_file.MOST_BYTES
  )
  last = {hf_folder.INDEX: json_bytes(safetensors_file.index(files))}
  last = (last if len(files) > 1 else {}) | {CONFIG: json_bytes(described)}
  return Plan(files, tensors, name_maps.sizes_of(spec), {**small, **last}, zeros)


def stored_dtypes(location: str, spec: DecoderSpec, key: str) -> dict[str, str]:
  """Returns name -> dtype of the tensors of a model folder, under the names of an export.

  Args:
    location: of the folder.
    spec: of its model.
    key: names the location in messages.

  Raises:
    ValueError: the folder cannot be read, or its tensors are not the model's.
  """
  source = read_weights.open_folder(location, spec, key)
  found = {
    (part.parameter, part.place): safetensors_file.DTYPES[stored.dtype].name
    for entries in source.parts.values()
    for stored, part in entries
  }
  tensors = name_maps.tensors(spec, source.described.model_type)
  return {
    name: found[tensor.parts[0].parameter, tensor.parts[0].place]
    for name, tensor in tensors.items()
  }


def planned_adapter(
  spec: DecoderSpec, model_type: str, dtype: str, base: str | None, metadata: Mapping[str, str]
) -> Plan:
  """Returns the plan of a model's adapters alone, in PEFT's two files.

  Args:
    spec: of a model with adapters.
    model_type: the family of the base.
    dtype: of the tensors.
    base: folder or name of the base; None: it has none that others know.
    metadata: what the file of weights says of itself.
  """
  tensors = peft_adapter.tensors(spec, model_type)
  found = (safetensors_file.Tensor(n, tensor.shape, dtype) for n, tensor in tensors.items())
  file = WeightFile(hf_folder.ADAPTER_WEIGHTS, tuple(found), tuple(metadata.items()))
  small = {hf_folder.ADAPTER: json_bytes(peft_adapter.adapter_config(spec, model_type, base))}
  return Plan([file], tensors, name_maps.sizes_of(spec), small)


def fetcher(params: Any, spec: DecoderSpec) -> Fetch:
  """Returns what brings a layer's or expert's part of a parameter to the processes that need it.

  All processes call it in the same order. On one process the devices' shards are put together on
  the host. Among several, each device gets all of the part, by an all-gather. Kernels that have an
  adapter are merged with it.

  Args:
    params: the placed parameters of the model.
    spec: of the model.
  """
  every = named_leaves(params)

  @functools.cache
  def program(name: str, indices: int, wanted: np.dtype) -> Callable:
    """Returns (the parameter, or with its adapter; place) -> the parameter at this place."""
    array = every[name]
    axes = (*array.sharding.spec, *[None] * array.ndim)[: array.ndim]
    kept = PartitionSpec(*axes[indices:]) if array.is_fully_addressable else PartitionSpec()
    # Rounded on the devices, so that less is sent; widened on the host, where float64 is always on.
    narrower = wanted.itemsize < array.dtype.itemsize

    def part(arrays: dict[str, jax.Array], place: Place) -> jax.Array:
      for dim, index in enumerate(place):
        arrays = {n: jax.lax.dynamic_slice_in_dim(x, index, 1, dim) for n, x in arrays.items()}
      if len(arrays) > 1:
        arrays = named_leaves(adapters.merge_adapters(spec, nested(arrays)))
      one = arrays[name].reshape(arrays[name].shape[indices:])
      return one.astype(wanted) if narrower else one

    return jax.jit(part, out_shardings=NamedSharding(array.sharding.mesh, kept))

  def fetch(name: str, place: Place, dtype: str, here: bool) -> np.ndarray | None:
    wanted, layer = jnp.dtype(dtype), name.removesuffix("/kernel")
    siblings = (name, *(f"{layer}/{one}" for one in (LORA_A, LORA_B)))
    arrays = {one: every[one] for one in siblings if one in every}
    found = program(name, len(place), wanted)(arrays, place)
    if here:
      return np.asarray(found).astype(wanted, copy=False)
    found.block_until_ready()  # one at a time: collectives on simulated devices block one another
    return None

  return fetch


# ------------------------------ writing ------------------------------


def write(folder: ExportFolder, plan: Plan, fetch: Fetch, together: Together) -> None:
  """Writes a model; all processes call it. The folder appears when everything is written.

  Args:
    folder: where, begun by process 0.
    plan: what.
    fetch: gives the parameters.
    together: the processes.

  Raises:
    ExportError: on all processes, where one of them cannot write; nothing is left.
  """
  _agree(_tried(folder.begin) if together.first else "", folder, together)
  for first in range(0, len(plan.files), together.count):
    files = plan.files[first : first + together.count]
    _agree(_write_files(folder, plan, files, fetch, together.index), folder, together)
  _agree(_tried(lambda: _finish(folder, plan)) if together.first else "", folder, together)


def _finish(folder: ExportFolder, plan: Plan) -> None:
  """Writes the small files, the last of which is the config.json; without it nothing loads."""
  for name, content in plan.small.items():
    folder.write(name, content)
  folder.commit()


def _tried(do: Callable[[], None]) -> str:
  """Returns why something has failed, else ""."""
  try:
    do()
  except (OSError, ValueError) as error:
    return str(error)
  return ""


def _agree(why: str, folder: ExportFolder, together: Together) -> None:
  """Raises ExportError on all processes if one of them says why it has failed."""
  if text := join_reports(together.exchange(why)):
    if together.first:
      folder.remove()
    raise ExportError(f"the export to {folder.final} failed, and nothing of it is left: {text}")


def _write_files(
  folder: ExportFolder, plan: Plan, files: Sequence[WeightFile], fetch: Fetch, index: int
) -> str:
  """Writes one file on each process; returns why that of this process failed, else ""."""
  failed: list[str] = []
  arrays = _arrays(plan, files, fetch, index, lambda: not failed)
  try:
    if index < len(files):
      write_file(folder.path, files[index], arrays)
  except (OSError, ValueError) as error:
    failed.append(str(error))
  for _ in arrays:  # the other processes wait for the collectives
    pass
  return "".join(failed)


def _arrays(
  plan: Plan,
  files: Sequence[WeightFile],
  fetch: Fetch,
  index: int,
  wanted: Callable[[], bool],
) -> Iterator[np.ndarray]:
  """Yields the tensors of this process's file, and takes part in fetching those of the others.

  Args:
    plan: what is written.
    files: one for each process, the first for process 0.
    fetch: gives the parameters.
    index: of this process.
    wanted: whether this process still needs its tensors.
  """
  for row in itertools.zip_longest(*(file.tensors for file in files)):
    for number, one in enumerate(row):
      if one is None:
        continue
      tensor, here = plan.tensors[one.name], number == index and wanted()
      parts = {}
      for part in tensor.parts:
        if part.parameter in plan.zeros:
          array = np.zeros([plan.sizes[letter] for letter in part.letters], jnp.dtype(one.dtype))
        else:
          array = fetch(part.parameter, part.place, one.dtype, here)
        parts[part.parameter, part.place] = array
      if here:
        yield name_maps.joined(tensor, plan.sizes, lambda *key, parts=parts: parts[key])
