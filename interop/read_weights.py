"""The weights of a model folder, read directly into the shards of a mesh.

Each process reads what its devices hold, parameter by parameter and piece by piece, so that the
host's memory is at most the shards, one more shard, and a piece.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from interop import hf_config, hf_folder, name_maps
from interop.name_maps import Part
from interop.quantization import Weights, combined
from interop.safetensors_file import DTYPES, Reader, pieces
from partitioning.rules import named_leaves

PIECE_BYTES = 2**23  # read at a time
_NAMED = 30
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Source:
  """A folder whose tensors are those of a config's model.

  Attributes:
    folder: on this machine.
    described: by its config.json.
    parts: our parameter -> the tensors that hold it, each with its part.
    sizes: letter -> size in the folder.
  """

  folder: pathlib.Path
  described: hf_config.Described
  parts: Mapping[str, list[tuple[Weights, int, Part]]]
  sizes: Mapping[str, int]


def open_folder(location: str, config: ConfigDict, key: str) -> Source:
  """Opens a folder and compares its tensors with a model; reads headers only.

  Where the logits' matrix is stored beside an embedding that is tied to it, the two are compared.

  Args:
    location: a path, or hf://OWNER/NAME.
    config: finalized, of a decoder.
    key: the config's that names the folder, for messages.

  Raises:
    ValueError: the folder cannot be read, or its tensors are not the model's; all in one message.
  """
  folder = hf_folder.local(location, key, weights=True)
  described = hf_folder.read_config(folder, key)
  stored, unfit = combined(hf_folder.stored_tensors(folder, key), described.block)
  shapes = {name: one.shape for name, one in stored.items()}
  found, wrong = name_maps.match(shapes, config, described.model_type)
  wrong = [*differing_keys(config, described, shapes_only=True), *unfit, *wrong]
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
    lines = [*wrong[:_NAMED], *([f"and {len(wrong) - _NAMED} more"] if len(wrong) > _NAMED else [])]
    listed = "\n".join(f"  {line}" for line in lines)
    raise ValueError(
      f"{key}: the weights of {folder} are not those of the model ({count}):\n{listed}"
    )
  parts: dict[str, list] = {}
  for name, tensor in found.tensors.items():
    for part in tensor.parts:
      one = stored[name] if part.matrix is None else stored[name].part(part.matrix)
      parts.setdefault(part.parameter, []).append((one, tensor.axis, part))
  return Source(folder, described, parts, name_maps.sizes_of(config))


def differing_keys(
  config: ConfigDict, described: hf_config.Described, *, shapes_only: bool = False
) -> list[str]:
  """Returns a line for each key of `model` that a folder's config.json has otherwise."""
  ours = hf_config.canonical({key: config.model[key] for key in hf_config.KEYS})
  theirs = hf_config.canonical(described.model)
  return [
    f"model.{key}={ours[key]!r}, and the folder has {theirs[key]!r}"
    for key in (hf_config.SHAPES if shapes_only else hf_config.KEYS)
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
    source: opened for the same config.
    abstract: nested dict of ShapeDtypeStructs with shardings: of those parameters. The dtypes may
      be others than the folder's.

  Raises:
    ValueError, OSError: a file cannot be read.
  """
  leaves = named_leaves(abstract)
  with Reader() as reader:
    arrays = [_placed(reader, source, name, leaf) for name, leaf in leaves.items()]
  return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


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
  for stored, axis, part in source.parts[name]:
    wanted = []
    for index, shard in zip(indices, shards, strict=True):
      count = len(part.place)
      if all(first <= n < stop for n, (first, stop) in zip(part.place, index, strict=False)):
        target = shard[tuple(n - index[dim][0] for dim, n in enumerate(part.place))]
        wanted.append((dict(zip(part.letters, index[count:], strict=True)), target))
    if wanted:
      _fill(reader, stored, axis, part, source.sizes, wanted)
  return shards


def _fill(
  reader: Reader,
  stored: Weights,
  axis: int,
  part: Part,
  sizes: Mapping[str, int],
  wanted: list[tuple[dict[str, tuple[int, int]], np.ndarray]],
) -> None:
  """Reads the part of a tensor that shards need, and copies it into them.

  Args:
    reader: of the folder.
    stored: the tensor.
    axis: along which it is fused.
    part: which of it.
    sizes: letter -> size in the folder.
    wanted: (letter -> first and stop, shard without L) of each shard.
  """
  rows, columns = part.axes[0], part.axes[1] if len(part.axes) > 1 else ""
  leading = rows[0]
  per_row = math.prod(sizes[letter] for letter in rows[1:])
  across = _columns(columns, sizes, [own for own, _ in wanted])
  block_columns = _along(part, axis == 1, across[0] * across[2], across[1] * across[2])
  letters = rows + columns
  order = [letters.index(letter) for letter in part.letters]
  row_bytes = stored.size // stored.shape[0] * per_row
  for first, stop in _merged([own[leading] for own, _ in wanted], sizes[leading]):
    for piece in pieces(first, stop, row_bytes, PIECE_BYTES):
      block_rows = _along(part, axis == 0, piece.start * per_row, piece.stop * per_row)
      block = stored.block(
        reader,
        slice(block_rows.start, block_rows.stop),
        slice(block_columns.start, block_columns.stop),
      )[:: block_rows.step, :: block_columns.step]
      shape = [piece.stop - piece.start, *(sizes[letter] for letter in rows[1:])]
      if columns:
        shape += [across[1] - across[0], *(sizes[letter] for letter in columns[1:])]
      block = block.reshape(shape)
      starts = {leading: piece.start, **({columns[0]: across[0]} if columns else {})}
      for own, target in wanted:
        _copy(block, letters, starts, order, own, target)


def _along(part: Part, joined: bool, first: int, stop: int) -> slice:
  """Returns where elements of a part are along an axis of its tensor.

  Args:
    part: which.
    joined: whether the tensor's parts are joined along this axis.
    first: of the elements.
    stop: behind their last.
  """
  return part.along(first, stop) if joined else slice(first, stop, 1)


def _copy(
  block: np.ndarray,
  letters: str,
  starts: Mapping[str, int],
  order: Sequence[int],
  own: Mapping[str, tuple[int, int]],
  target: np.ndarray,
) -> None:
  """Copies what a shard has of a block.

  Args:
    block: its dims are `letters`.
    letters: of the block.
    starts: letter -> index of the block's first element in the tensor; 0 where it has none.
    order: of the block's dims in the shard.
    own: letter -> first and stop of the shard.
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
  piece = block[tuple(taken[letter] for letter in letters)].transpose(order)
  target[tuple(put[letters[position]] for position in order)] = piece


def _columns(
  columns: str, sizes: Mapping[str, int], owns: Iterable[Mapping[str, tuple[int, int]]]
) -> tuple[int, int, int]:
  """Returns (first, stop, elements of each) of the columns' leading letter that shards need."""
  if not columns:
    return 0, 1, 1
  ranges = [own[columns[0]] for own in owns]
  each = math.prod(sizes[letter] for letter in columns[1:])
  stop = min(max(stop for _, stop in ranges), sizes[columns[0]])
  return min(min(first for first, _ in ranges), stop), stop, each


def _merged(ranges: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
  """Returns ranges below `size`, those that overlap or touch as one."""
  found: list[tuple[int, int]] = []
  for first, stop in sorted((first, min(stop, size)) for first, stop in ranges):
    if first >= stop:
      continue
    if found and first <= found[-1][1]:
      found[-1] = found[-1][0], max(stop, found[-1][1])
    else:
      found.append((first, stop))
  return found
