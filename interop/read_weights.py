"""The weights of a model folder, read directly into the shards of a mesh.

Each process reads what its devices hold, parameter by parameter and piece by piece, so that the
host's memory is at most the shards, one more shard, and a piece.

Quantized tensors are made of several entries of the files, and decoded when they are read.
DeepSeek-V3's files have float8_e4m3fn with a scale for each block of a matrix: `NAME.weight` [R, C]
is multiplied by `NAME.weight_scale_inv`, float32 with an element for each 128 x 128 elements; the
last blocks of a row and of a column may be smaller. Source: arXiv:2412.19437, section 3.3.2; the
names are those of the published files.

gpt-oss's have MXFP4, 4-bit values, 32 of which share a power of two. A matrix [R, C] is `_blocks`,
bytes [R, C / 32, 16] with two values each, the low four bits first, and `_scales`, bytes
[R, C / 32]: the exponent plus 127. Every value is one of bfloat16's. Source: OCP Microscaling
Formats (MX) Specification 1.0, sections 5.3.3 and 6.3.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from interop import hf_config, hf_folder, name_maps
from interop.hf_folder import INDEX, SINGLE
from interop.name_maps import Part
from interop.safetensors_file import DTYPES, Reader, Stored, pieces, read_header
from models.spec import DecoderSpec
from partitioning.rules import named_leaves
from runtime import forms

PIECE_BYTES = 2**23  # read at a time
_MOST_LINES, _NAMED = 30, 8  # of a message
_MOST_FILES = 2**12  # of weights; a terabyte in files of 5 GB are 200
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")

# ------------------------------ a folder's tensors ------------------------------


def stored_tensors(folder: pathlib.Path, key: str) -> dict[str, Stored]:
  """Returns name -> array of a folder's weights, of which only the headers are read.

  Raises:
    ValueError: there are none, files are missing or damaged, or the index names other arrays than
      the files have; everything in one message.
  """
  if not (folder / INDEX).exists():
    if not (folder / SINGLE).exists():
      raise ValueError(_no_weights(folder, key))
    return read_header(folder / SINGLE)
  content = hf_folder.read_object(folder / INDEX, key)
  places = content.get("weight_map") if isinstance(content, Mapping) else None
  plain = isinstance(places, Mapping) and all(
    isinstance(name, str) and name == os.path.basename(name) for name in places.values()
  )
  if not plain or not places:
    raise ValueError(f"{key}: {folder / INDEX} has no weight_map of names of files beside it")
  names = sorted(set(places.values()))
  if len(names) > _MOST_FILES:
    raise ValueError(
      f"{key}: {folder / INDEX} names {len(names):,} files, and at most {_MOST_FILES:,} are read"
    )
  if missing := [name for name in names if not (folder / name).exists()]:
    listed = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
    raise ValueError(
      f"{key}={folder}: {len(missing)} of the {len(names)} files that {INDEX} names are missing: "
      f"{listed}; download them too"
    )
  found, wrong = {}, []
  for name in names:
    header = read_header(folder / name)
    wrong += [
      f"{tensor} is in {name}, and the index says {places.get(tensor, 'nothing of it')}"
      for tensor in header
      if places.get(tensor) != name
    ]
    found.update(header)
  wrong += [f"{tensor} is not in {name}" for tensor, name in places.items() if tensor not in found]
  if wrong:
    raise forms.refusal(f"{folder / INDEX} does not fit the files beside it:", wrong, _NAMED)
  return found


def digest(folder: pathlib.Path) -> str:
  """Returns a digest of the config and of the weights' headers of a model or an adapter."""
  if hf_folder.is_adapter(folder):
    tensors = read_header(folder / hf_folder.ADAPTER_WEIGHTS)
  else:
    tensors = stored_tensors(folder, "checkpoint.initialize_from")
  facts = {
    name: [one.dtype, one.shape, one.size, os.path.basename(one.path)]
    for name, one in tensors.items()
  }
  return hf_folder.digest(folder, json.dumps(facts, sort_keys=True))


def _no_weights(folder: pathlib.Path, key: str) -> str:
  names = sorted(path.name for path in folder.iterdir())
  if (folder / hf_folder.ADAPTER).exists():
    return hf_folder.not_a_model(folder, key)
  if pickles := [name for name in names if name.endswith(_PICKLES)]:
    return (
      f"{key}={folder}: its weights are pickled ({pickles[0]}), and reading a pickle runs code. "
      f"Write them as safetensors, where transformers is installed: `python -c 'from "
      f'transformers import AutoModelForCausalLM as M; M.from_pretrained("{folder}")'
      f'.save_pretrained("{folder}")\'`'
    )
  if shards := [name for name in names if name.endswith(".safetensors")]:
    return (
      f"{key}={folder}: it has {shards[0]}, and neither {SINGLE} nor {INDEX}; download that too"
    )
  return f"{key}={folder}: it has no weights ({SINGLE}), only {hf_folder.listed(folder)}"


# ------------------------------ quantized weights ------------------------------


def decoded_fp8(
  weights: np.ndarray, scales: np.ndarray, block: tuple[int, int], first: tuple[int, int] = (0, 0)
) -> np.ndarray:
  """Returns float32 [rows, columns]: each value times the scale of its block.

  Args:
    weights: uint8 [rows, columns], the bits of float8_e4m3fn.
    scales: those of the blocks that have a value here.
    block: rows and columns of a block.
    first: row and column of the first value, in its block.
  """
  for axis, (size, start) in enumerate(zip(block, first, strict=True)):
    of_each = (start + np.arange(weights.shape[axis])) // size
    scales = np.take(scales, of_each, axis=axis)
  return weights.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales.astype(np.float32)


MXFP4_GROUP = 32  # values of one scale
_MXFP4_BYTES = MXFP4_GROUP // 2
_MXFP4_BIAS = 127
_MXFP4_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the highest bit is the sign


def decoded_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Returns bfloat16 [..., 32 G], exactly; beyond bfloat16's largest number, infinity.

  Args:
    blocks: uint8 [..., G, 16].
    scales: uint8 [..., G].
  """
  pairs = _mxfp4_pairs()[(scales[..., None].astype(np.uint16) << 8) | blocks]
  return pairs.view(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)


@functools.cache
def _mxfp4_pairs() -> np.ndarray:
  """Returns the two values of each scale and byte, 2 * bfloat16 as uint32 [65536]."""
  values = np.array([*_MXFP4_POSITIVE, *(-one for one in _MXFP4_POSITIVE)], np.float64)
  exponents = np.arange(256) - _MXFP4_BIAS
  every = np.ldexp(values, exponents[:, None])  # [scale, four bits]
  both = np.stack([np.tile(every, 16), np.repeat(every, 16, axis=1)], axis=-1)
  with np.errstate(over="ignore"):
    return both.astype(ml_dtypes.bfloat16).reshape(-1).view(np.uint32)


@dataclasses.dataclass(frozen=True)
class Quantized:
  """Matrices along any leading dims, which are decoded where they are read, like a `Stored`.

  Attributes:
    values: of FP8 uint8 [..., R, C], of MXFP4 uint8 [..., R, G, 16].
    scales: of FP8 [..., ceil(R / rows), ceil(C / columns)], of MXFP4 uint8 [..., R, G].
    group: rows and columns of the values with one scale.
  """

  values: Stored
  scales: Stored
  group: tuple[int, int]
  dtype = "BF16"  # in which the model is published otherwise

  @property
  def in_4_bits(self) -> bool:
    """Returns whether it is MXFP4."""
    return self.values.dtype == "U8"

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns that of the decoded values."""
    mxfp4 = (*self.scales.shape[:-1], MXFP4_GROUP * self.scales.shape[-1])
    return mxfp4 if self.in_4_bits else self.values.shape

  @property
  def size(self) -> int:
    """Returns the bytes of the decoded values: bfloat16 of MXFP4, float32 of FP8."""
    return self.values.size * 4  # of half a byte, or of one

  def part(self, index: int) -> "Quantized":
    """Returns the matrices with this index along the first dim."""
    return Quantized(self.values.part(index), self.scales.part(index), self.group)

  def block(self, reader: Reader, rows: slice, columns: slice) -> np.ndarray:
    """Returns [rows, columns] of a matrix; valid until the reader's next call."""
    ranges = [*zip((rows, columns), self.group, strict=True)]
    down, across = (slice(x.start // size, -(-x.stop // size)) for x, size in ranges)
    first = tuple(x.start % size for x, size in ranges)
    scales = self.scales.block(reader, down, across).copy()
    if not self.in_4_bits:
      values = self.values.block(reader, rows, columns)
      return decoded_fp8(values, scales, self.group, first)
    of_bytes = slice(across.start * _MXFP4_BYTES, across.stop * _MXFP4_BYTES)
    blocks = self.values.block(reader, rows, of_bytes)
    found = decoded_mxfp4(blocks.reshape(*scales.shape, _MXFP4_BYTES), scales)
    return found[:, first[1] : first[1] + columns.stop - columns.start]


Weights = Stored | Quantized

# ------------------------------ tensors of several entries ------------------------------

_BLOCKS, _SCALES = "_blocks", "_scales"
_INVERSE = "_scale_inv"


def combined(
  stored: Mapping[str, Stored], block: tuple[int, int]
) -> tuple[dict[str, Weights], list[str]]:
  """Returns a folder's tensors; those that are quantized are made of two entries of its files.

  MXFP4's has the name of its blocks (`NAME_blocks`, `NAME_scales`), FP8's that of its weights
  (`NAME`, `NAME_scale_inv`).

  Args:
    stored: name -> entry.
    block: rows and columns of a block of FP8.

  Returns:
    Name -> tensor; and a line for each of which the scales do not fit.
  """
  found: dict[str, Weights] = {}
  wrong, used = [], set()
  for name, one in stored.items():
    scales, shape, dtypes, group = _scales_of(name, one, block)
    if scales not in stored:
      found[name] = one
      continue
    used.add(scales)
    there = stored[scales]
    if one.dtype == "U8" and one.shape[-1] != _MXFP4_BYTES:
      wrong.append(f"{name} has {one.shape[-1]} bytes in a block; {_MXFP4_BYTES} are read")
    elif there.shape != shape or there.dtype not in dtypes:
      needs = f"{name} {one.dtype}{list(one.shape)} needs {dtypes[0]}{list(shape)}"
      wrong.append(f"{scales} is {there.dtype}{list(there.shape)}, and {needs}")
    else:
      found[name] = Quantized(one, there, group)
  return {name: one for name, one in found.items() if name not in used}, wrong


def _scales_of(
  name: str, one: Stored, block: tuple[int, int]
) -> tuple[str, tuple[int, ...], tuple[str, ...], tuple[int, int]]:
  """Returns name, shape, dtypes and group of a tensor's scales; "" and others if it has none."""
  if one.dtype == "U8" and name.endswith(_BLOCKS) and len(one.shape) > 2:
    return name.removesuffix(_BLOCKS) + _SCALES, one.shape[:-1], ("U8",), (1, MXFP4_GROUP)
  if one.dtype != "F8_E4M3" or len(one.shape) < 2:
    return "", (), (), block
  blocks = (-(-size // part) for size, part in zip(one.shape[-2:], block, strict=True))
  return name + _INVERSE, (*one.shape[:-2], *blocks), ("F32", *DTYPES), block


# ------------------------------ a model's folder ------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
  """A folder whose tensors are those of a config's model.

  Attributes:
    folder: on this machine.
    described: by its config.json; None of an adapter.
    parts: our parameter -> the tensors that hold it, each with its part.
    sizes: letter -> size in the folder.
  """

  folder: pathlib.Path
  described: hf_config.Described | None
  parts: Mapping[str, list[tuple[Weights, Part]]]
  sizes: Mapping[str, int]


def open_folder(location: str, spec: DecoderSpec, key: str) -> Source:
  """Opens a folder and compares its tensors with a model; reads headers only.

  Where the logits' matrix is stored beside an embedding that is tied to it, the two are compared.

  Args:
    location: a path, or hf://OWNER/NAME.
    spec: of the model.
    key: the config's that names the folder, for messages.

  Raises:
    ValueError: the folder cannot be read, or its tensors are not the model's; all in one message.
  """
  folder = hf_folder.local(location, key, weights=True)
  described = hf_folder.read_config(folder, key)
  stored, unfit = combined(stored_tensors(folder, key), described.block)
  shapes = {name: one.shape for name, one in stored.items()}
  found, wrong = name_maps.match(shapes, spec, described.model_type)
  wrong = [*differing_keys(spec, described, hf_config.SHAPES), *unfit, *wrong]
  wrong += [
    f"{name} is stored as {stored[name].dtype}; read are {', '.join(DTYPES)}"
    for name in (*found.tensors, *filter(None, [found.copies]))
    if stored[name].dtype not in DTYPES
  ]
  if not wrong and found.copies and not _same(stored[found.copies], stored[found.embedding]):
    wrong.append(
      f"{found.copies} is not {found.embedding}, and tie_word_embeddings says that it is; set "
      f'"tie_word_embeddings": false in config.json'
    )
  if wrong:
    count = f"{len(wrong)} {'thing differs' if len(wrong) == 1 else 'things differ'}"
    head = f"{key}: the weights of {folder} are not those of the model ({count}):"
    raise forms.refusal(head, wrong, _MOST_LINES)
  parts: dict[str, list] = {}
  for name, tensor in found.tensors.items():
    for part in tensor.parts:
      one = stored[name] if part.matrix is None else stored[name].part(part.matrix)
      while len(one.shape) > len(part.axes) and one.shape[0] == 1:  # axes of one element
        one = one.part(0)
      parts.setdefault(part.parameter, []).append((one, part))
  return Source(folder, described, parts, name_maps.sizes_of(spec))


def differing_keys(
  spec: DecoderSpec, described: hf_config.Described, keys: Sequence[str] = hf_config.KEYS
) -> list[str]:
  """Returns a line for each of some keys of `model` that a folder's config.json has otherwise."""
  ours = hf_config.canonical({key: getattr(spec, key) for key in hf_config.KEYS})
  theirs = hf_config.canonical(described.model)
  return [
    f"model.{key}={ours[key]!r}, and the folder has {theirs[key]!r}"
    for key in keys
    if not hf_config.same_value(ours[key], theirs[key])
  ]


def _same(one: Weights, two: Weights) -> bool:
  """Returns whether two arrays have the same shape, dtype and bytes."""
  if (one.shape, one.dtype) != (two.shape, two.dtype):
    return False
  with Reader() as first, Reader() as second:
    for rows in pieces(0, one.shape[0], one.size // one.shape[0], PIECE_BYTES):
      blocks = [
        stored.block(reader, rows, slice(0, stored.shape[1]))
        for reader, stored in ((first, one), (second, two))
      ]
      if not np.array_equal(*(block.view(np.uint8) for block in blocks)):
        return False
  return True


def read(source: Source, abstract: Any) -> Any:
  """Returns the parameters that a folder has, placed; it has no adapters.

  Args:
    source: opened for the same model.
    abstract: nested dict of ShapeDtypeStructs with shardings: of those parameters. The dtypes may
      be others than the folder's.

  Raises:
    ValueError, OSError: a file cannot be read.
  """
  leaves = named_leaves(abstract)
  with Reader() as reader:
    arrays = [_placed(reader, source, name, leaf) for name, leaf in leaves.items()]
  return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


def shards_of(
  reader: Reader, source: Source, name: str
) -> Callable[[tuple[tuple[int, int], ...]], np.ndarray]:
  """Returns what reads a shard of a parameter by its bounds, in float32."""
  return lambda index: local_shards(reader, source, name, np.dtype(np.float32), [index])[0]


def _placed(reader: Reader, source: Source, name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  devices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
  by_index: dict[tuple, list[jax.Device]] = {}
  for device, index in devices.items():
    by_index.setdefault(bounds(index, leaf.shape), []).append(device)
  shards = dict(
    zip(by_index, local_shards(reader, source, name, leaf.dtype, by_index), strict=True)
  )
  placed = []
  for index in by_index:
    shard = shards.pop(index)  # freed as soon as its devices have it
    on_devices = [jax.device_put(shard, device) for device in by_index[index]]
    placed += jax.block_until_ready(on_devices)
  return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed)


def bounds(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
  """Returns first and stop of each dim of a shard."""
  return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def local_shards(
  reader: Reader,
  source: Source,
  name: str,
  dtype: np.dtype,
  indices: Iterable[tuple[tuple[int, int], ...]],
) -> list[np.ndarray]:
  """Returns shards of a parameter, read in one pass over its tensors.

  Args:
    reader: of the folder.
    source: the folder.
    name: of the parameter.
    dtype: of the result.
    indices: of `bounds`, of each shard.
  """
  indices = list(indices)
  # Rows of the padding of the vocabulary are in no file, and stay 0.
  shards = [np.zeros([stop - first for first, stop in index], dtype) for index in indices]
  for stored, part in source.parts[name]:
    wanted = []
    for index, shard in zip(indices, shards, strict=True):
      count = len(part.place)
      if all(first <= n < stop for n, (first, stop) in zip(part.place, index, strict=False)):
        target = shard[tuple(n - index[dim][0] for dim, n in enumerate(part.place))]
        wanted.append((dict(zip(part.letters, index[count:], strict=True)), target))
    if wanted:
      _fill(reader, stored, part, source.sizes, wanted)
  return shards


Range = tuple[int, int]  # first, and behind the last


def _fill(
  reader: Reader,
  stored: Weights,
  part: Part,
  sizes: Mapping[str, int],
  wanted: Sequence[tuple[Mapping[str, Range], np.ndarray]],
) -> None:
  """Reads the part of a tensor that shards need, piece by piece, and copies it into them.

  Args:
    reader: of the folder.
    stored: the tensor.
    part: which of it.
    sizes: letter -> size in the folder.
    wanted: (letter -> its range, shard without L) of each shard.
  """
  each = [name_maps.size_of(axis[1:], sizes) for axis in part.axes]
  needed = []  # of the first letter of each axis; shards of one parameter have the same or others
  for axis in part.axes:
    ranges = {
      (first, min(stop, sizes[axis[0]])) for first, stop in (own[axis[0]] for own, _ in wanted)
    }
    needed.append(sorted(one for one in ranges if one[0] < one[1]))
  if not all(needed):  # the padding of the vocabulary
    return
  across = [(ranges[0][0], max(stop for _, stop in ranges)) for ranges in needed[1:]]
  row_bytes = stored.size // stored.shape[0] * each[0]
  for piece in (x for rows in needed[0] for x in pieces(*rows, row_bytes, PIECE_BYTES)):
    spans = [(piece.start, piece.stop), *across]
    there = [
      part.along(axis, first * count, stop * count)
      for axis, ((first, stop), count) in enumerate(zip(spans, each, strict=True))
    ]
    rows, columns = (_span(x) for x in (*there, slice(0, 1))[:2])
    block = stored.block(reader, rows, columns)
    block = block[tuple(slice(None) if isinstance(x, slice) else x - x[0] for x in there)]
    starts, shape = {}, []
    for axis, (first, stop) in zip(part.axes, spans, strict=True):
      starts[axis[0]] = first
      shape += [stop - first, *(sizes[letter] for letter in axis[1:])]
    for own, target in wanted:
      _copy(block.reshape(shape), "".join(part.axes), starts, part.letters, own, target)


def _span(found: slice | Sequence[int]) -> slice:
  """Returns the slice in which indices are, of `Part.along`."""
  return found if isinstance(found, slice) else slice(int(found[0]), int(found[-1]) + 1)


def _copy(
  block: np.ndarray,
  letters: str,
  starts: Mapping[str, int],
  order: str,
  own: Mapping[str, Range],
  target: np.ndarray,
) -> None:
  """Copies what a shard has of a block.

  Args:
    block: its dims are `letters`.
    letters: of the block.
    starts: letter -> index of the block's first element in the tensor; 0 where it has none.
    order: letters of the shard.
    own: letter -> range of the shard.
    target: the shard.
  """
  taken, put = {}, {}
  for letter, size in zip(letters, block.shape, strict=True):
    start = starts.get(letter, 0)
    first, stop = max(own[letter][0], start), min(own[letter][1], start + size)
    if first >= stop:
      return
    taken[letter] = slice(first - start, stop - start)
    put[letter] = slice(first - own[letter][0], stop - own[letter][0])
  piece = block[tuple(taken[letter] for letter in letters)]
  target[tuple(put[x] for x in order)] = piece.transpose([letters.index(x) for x in order])
