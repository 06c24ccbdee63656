"""The tensors of a model folder and the parameters that they hold, in both directions.

Theirs have the vocabulary's own size, ours has it padded; nothing else differs between the two but
the order of the dims, which the tables of `hf_families.py` give.
"""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from interop.hf_families import FAMILIES, LAYER, Names, Row
from models.spec import LORA_A, LORA_B, MTP_LAYERS, DecoderSpec
from runtime.layer_kinds import LAYERS

_ONE = "1"  # an axis of one element, which no dim of ours is
_EXPERTS = "E"  # the letter of experts, the first of their parameters in a layer


@dataclasses.dataclass(frozen=True)
class Part:
  """What one parameter has in a tensor.

  Attributes:
    parameter: our name.
    place: its indices along the first dims of our parameter: () where it has no layers, (layer,),
      or (layer, expert).
    letters: of our parameter, without the dims of `place`, in our order.
    axes: letters of each axis of the tensor, or of its matrix.
    where: along each axis, the index there of each of its elements; a range if they follow one
      another.
    matrix: its index along the first dim of a tensor of all experts; None: of another.
  """

  parameter: str
  place: tuple[int, ...]
  letters: str
  axes: tuple[str, ...]
  where: tuple[Sequence[int], ...]
  matrix: int | None = None

  def along(self, axis: int, first: int, stop: int) -> slice | Sequence[int]:
    """Returns where its elements from `first` to before `stop` are along an axis of the tensor."""
    found = self.where[axis][first:stop]
    return slice(found.start, found.stop) if isinstance(found, range) else found

  def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns its elements along each axis, by the sizes of `sizes_of`."""
    return tuple(size_of(axis, sizes) for axis in self.axes)


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of a folder.

  Attributes:
    name: with the numbers of its layer and expert.
    shape: as stored.
    parts: in the order in which they are joined; one where it is not fused.
  """

  name: str
  shape: tuple[int, ...]
  parts: tuple[Part, ...]


def sizes_of(spec: DecoderSpec) -> dict[str, int]:
  """Returns letter -> size in a folder: ours, but the vocabulary without padding."""
  found = {letter: dim.size for letter, dim in spec.legend.items()}
  return {**found, "V": spec.vocabulary_size}


def tensors(
  spec: DecoderSpec, model_type: str, rows: Mapping[str, Row] | None = None
) -> dict[str, Tensor]:
  """Returns the tensors of a model of a family, by name, layer after layer.

  Args:
    spec: of the model.
    model_type: the family's, in FAMILIES.
    rows: of the folder; None: those that are written.

  Raises:
    ValueError: a parameter of the model that no tensor of the family holds.
  """
  sizes = sizes_of(spec)
  names = FAMILIES[model_type].names
  rows = names.rows if rows is None else rows
  in_layers = {name: row for name, row in rows.items() if "{}" in name}
  wanted = [(name, row, ()) for name, row in rows.items() if name not in in_layers]
  for layer in range(spec.layers):
    stack, index = spec.place_of(layer)
    for pairs in (in_layers, names.instead):
      wanted += _in_layer(spec, _renamed(pairs, stack), layer, index)
  wanted += _further(spec, model_type, in_layers)
  each = (_tensor(spec, sizes, *one) for one in wanted)
  found = {tensor.name: tensor for tensor in each if tensor}
  used = {part.parameter for one in found.values() for part in one.parts}
  adapters = (LORA_A, LORA_B)  # in no model's folder
  missing = [
    pattern
    for pattern in spec.unquantized.parameters
    if not pattern.endswith(adapters) and not any(re.fullmatch(pattern, name) for name in used)
  ]
  if missing:
    raise ValueError(f"model_type {model_type!r} has no tensor for {', '.join(missing)}")
  return found


def _renamed(rows: Mapping[str, Row], stack: str, block: str = LAYER) -> dict[str, Row]:
  """Returns rows of another stack of layers, and with another beginning of their names."""
  return {
    name.replace(LAYER, block, 1): (dims, *(stack + one.removeprefix(LAYERS) for one in ours))
    for name, (dims, *ours) in rows.items()
  }


def _in_layer(
  spec: DecoderSpec, rows: Mapping[str, Row], number: int, index: int
) -> Iterator[tuple[str, Row, tuple[int, ...]]]:
  """Yields name, row and place of the tensors of a layer, which has a number there."""
  for name, row in rows.items():
    experts = [(one,) for one in range(spec.experts)] if name.count("{}") > 1 else [()]
    for expert in experts:
      yield name.format(number, *expert), row, (index, *expert)


def _further(spec: DecoderSpec, model_type: str, in_layers: Mapping[str, Row]) -> Iterator[tuple]:
  """Yields the tensors of layers that predict further tokens, as `_in_layer`."""
  further = FAMILIES[model_type].names.further
  if not spec.mtp_layers or further is None:
    return
  single = [name for name in further.rows if "{}" not in name]
  if single and spec.mtp_layers > 1:
    raise ValueError(
      f"model_type {model_type!r} has one layer that predicts a further token ({single[0]}), and "
      f"model.mtp_layers={spec.mtp_layers}"
    )
  rows = further.rows | _renamed(in_layers, MTP_LAYERS, further.block)
  for index in range(spec.mtp_layers):
    yield from _in_layer(spec, rows, index + spec.layers * further.behind, index)


def _tensor(
  spec: DecoderSpec, sizes: Mapping[str, int], name: str, row: Row, place: tuple[int, ...]
) -> Tensor | None:
  """Returns the tensor of a row; None where the model does not have its parameters.

  Args:
    spec: of the model.
    sizes: of `sizes_of`.
    name: with its numbers.
    row: of the table.
    place: of the parameters, without the expert that a tensor of all experts has; see `Part`.
  """
  dims, *parameters = row
  letters = [spec.optional_letters(one) for one in parameters]
  if not any(letters):
    return None
  every = dims.split(" ")
  axes = [axis.rpartition(":")[2].split("+") for axis in every if axis != _ONE]
  stacked = axes[0] == [_EXPERTS]
  axes = axes[stacked:]
  fused = next((number for number, axis in enumerate(axes) if len(axis) > 1), 0)
  if stacked or len(place) > 1:
    letters = [ours.removeprefix(_EXPERTS) for ours in letters]
  each = [
    tuple(axis[number] if len(axis) > 1 else axis[0] for axis in axes)
    for number in range(len(parameters))
  ]
  # The config may have one with other dims, which another row is for.
  if any(ours and {*ours} != {*"".join(own)} for ours, own in zip(letters, each, strict=True)):
    return None
  if not all(letters):
    raise ValueError(f"{name}: {', '.join(parameters)}: the model has only some of them")
  in_turn = dims.partition(":")[0].split(" ")[-1] if ":" in dims else ""
  turns = size_of(in_turn, sizes)
  shapes = [[size_of(axis, sizes) for axis in own] for own in each]
  period, parts, end = sum(one[fused] for one in shapes) // turns, [], 0
  for parameter, ours, own, shape in zip(parameters, letters, each, shapes, strict=True):
    where: list[Sequence[int]] = [range(size) for size in shape]
    where[fused] = range(end, end := end + shape[fused] // turns)
    if in_turn:  # as many times
      where[fused] = np.add.outer(np.arange(turns) * period, where[fused]).reshape(-1)
    parts.append(Part(parameter, place, ours, own, tuple(where)))
  shape = [*shapes[0]]
  shape[fused] = period * turns
  if not stacked:
    lengths = iter(shape)
    shape = [1 if axis == _ONE else next(lengths) for axis in every]
    return Tensor(name, tuple(shape), tuple(parts))
  of_experts = [
    dataclasses.replace(part, place=(*place, expert), matrix=expert)
    for expert in range(sizes[_EXPERTS])
    for part in parts
  ]
  return Tensor(name, (sizes[_EXPERTS], *shape), tuple(of_experts))


def size_of(letters: str, sizes: Mapping[str, int]) -> int:
  """Returns the product of the sizes of some letters."""
  return math.prod(sizes[letter] for letter in letters)


def joined(
  tensor: Tensor,
  sizes: Mapping[str, int],
  array: Callable[[str, tuple[int, ...]], np.ndarray],
) -> np.ndarray:
  """Returns a tensor as it is stored.

  Args:
    tensor: which.
    sizes: of `sizes_of`.
    array: (parameter, place) -> our array there, with or without the padding of the vocabulary.
  """
  found = None
  for part in tensor.parts:
    ours = array(part.parameter, part.place)
    ours = ours[tuple(slice(0, sizes[letter]) for letter in part.letters)]
    order = [part.letters.index(letter) for letter in "".join(part.axes)]
    piece = ours.transpose(order).reshape(part.shape(sizes))
    if piece.size == math.prod(tensor.shape):
      return piece.reshape(tensor.shape)
    if found is None:
      found = np.zeros(tensor.shape, piece.dtype)
    matrix = found if part.matrix is None else found[part.matrix]
    ones = [axis for axis, size in enumerate(matrix.shape) if size == 1]
    matrix = matrix.squeeze(tuple(ones[: matrix.ndim - piece.ndim]))  # of a convolution
    matrix[tuple(part.along(axis, 0, size) for axis, size in enumerate(piece.shape))] = piece
  return found


# ------------------------------ names in a folder ------------------------------

_NUMBERS = re.compile(r"\.(\d+)(?=\.|$)")  # of layers and experts


@dataclasses.dataclass(frozen=True)
class Matched:
  """What a folder's tensors are.

  Attributes:
    tensors: name in the folder -> the tensor that it is.
    copies: name in the folder of the logits' tensor, where the embedding is the same and read in
      its place; "": none.
    embedding: name in the folder of that embedding.
  """

  tensors: dict[str, Tensor]
  copies: str = ""
  embedding: str = ""


def match(
  stored: Mapping[str, tuple[int, ...]], spec: DecoderSpec, model_type: str
) -> tuple[Matched, list[str]]:
  """Finds the tensor for each name of a folder, and what is wrong with them.

  Args:
    stored: name -> shape, of all tensors of a folder.
    spec: of the model.
    model_type: the family's.

  Returns:
    What they are; and a line for each that is missing, not known or of another shape.
  """
  names = FAMILIES[model_type].names
  wanted = tensors(spec, model_type, rows_of(names, stored))
  known = {full_name(name, stored, names): name for name in stored}
  for name in {*wanted} - {*known}:
    row = names.also.get(_NUMBERS.sub(".{}", name), "")
    if (also := row.format(*_NUMBERS.findall(name))) in {*known} - {*wanted}:
      known[name] = known.pop(also)
  found, wrong = {}, []
  for name, tensor in wanted.items():
    if name not in known:
      wrong.append(f"{name} is missing; it would have shape {list(tensor.shape)}")
    elif tuple(stored[known[name]]) != tensor.shape:
      shape = list(stored[known[name]])
      wrong.append(f"{name} has shape {shape}, and the config says {list(tensor.shape)}")
    else:
      found[known[name]] = tensor
  unused = [one.format(spec.layers) for one in names.unused]
  logits, embedding = names.tied
  copies = ""
  for name, given in known.items():
    if name in wanted or any(fnmatch.fnmatchcase(name, one) for one in unused):
      continue
    if name == logits and spec.tied_embeddings and embedding in known:
      copies = given
    else:
      wrong.append(f"{given} is not known: no part of a model of type {model_type!r}")
  return Matched(found, copies, known.get(embedding, "")), wrong


def rows_of(names: Names, stored: Iterable[str]) -> Mapping[str, Row]:
  """Returns the rows of a family that a folder has."""
  there = {_NUMBERS.sub(".{}", full_name(name, stored, names)) for name in stored}
  rows = names.rows
  for others in names.others:
    if there.isdisjoint(others):
      continue
    held = {one for _, *ours in others.values() for one in ours}
    kept = {name: row for name, row in rows.items() if held.isdisjoint(row[1:])}
    rows = {**kept, **others}
  return rows


def full_name(name: str, stored: Iterable[str], names: Names) -> str:
  """Returns a tensor's name as the table has it."""
  for theirs, ours in names.inner.items():
    if name.startswith(theirs):
      return ours + name.removeprefix(theirs)
  logits, embedding = names.tied
  bare = embedding.removeprefix(names.prefix) in stored and embedding not in stored
  return names.prefix + name if bare and name != logits else name
