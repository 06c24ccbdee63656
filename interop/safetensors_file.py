"""Files in the safetensors format: 8 bytes of length, a JSON header, and the arrays' bytes.

Arrays are read by `os.preadv` into buffers, never mapped: the pages of a mapped file count as this
process' memory, and a column of a matrix touches all of them. They are written one after the other,
in files of at most 5 GB. The format's own library (0.8) maps what it reads, does not say where an
array is in the file, and takes all arrays of a file at once to write it. Nothing here imports JAX.

Sources: of the format, https://huggingface.co/docs/safetensors; of the names of the files and of
the index, transformers' `save_pretrained`.
"""

import concurrent.futures
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from etils import epath

from interop.hf_folder import SINGLE
from interop.hf_parts import short
from runtime import files, forms
from runtime.forms import shortened

DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F16": np.dtype(np.float16),
}
# dtype -> its name in the format.
NAMES = {dtype.name: name for name, dtype in DTYPES.items()}
# Read as bytes, which `read_weights.py` decodes.
BYTES = {name: np.dtype(np.uint8) for name in ("U8", "F8_E4M3")}
_ELEMENTS = {**DTYPES, **BYTES}
METADATA = "__metadata__"
MOST_HEADER_BYTES = 100_000_000  # as the format's own library has it
_LENGTH_BYTES = 8
_MOST_DIMS, _NATURAL = 64, forms.whole(0, 2**63 - 1)  # as NumPy has it
_ENTRY = forms.Needs(
  {"dtype": forms.TEXT, "shape": [_NATURAL], "data_offsets": (_NATURAL, _NATURAL)}
)
_MOST_ARRAYS, _LONGEST_NAME = 2**17, 1000  # of a file; models of a trillion parameters have 10^5


# ------------------------------ reading ------------------------------


@dataclasses.dataclass(frozen=True)
class Stored:
  """An array in a file.

  Attributes:
    path: of the file.
    dtype: its name in the format, such as BF16.
    shape: in elements.
    start: of its first byte in the file.
    size: in bytes.
  """

  path: str
  dtype: str
  shape: tuple[int, ...]
  start: int
  size: int

  def part(self, index: int) -> "Stored":
    """Returns the array with this index along the first dim."""
    size = self.size // self.shape[0]
    return Stored(self.path, self.dtype, self.shape[1:], self.start + index * size, size)

  def block(self, reader: "Reader", rows: slice, columns: slice) -> np.ndarray:
    """Returns [rows, columns] by `Reader.block`."""
    return reader.block(self, rows, columns)


def read_header(path: os.PathLike | str) -> dict[str, Stored]:
  """Returns name -> array of a file, of which only the header is read.

  Raises:
    ValueError: it cannot be read, is no plain file or truncated, or its header is not that of the
      format; the file is named.
  """
  return _read(path)[0]


def read_metadata(path: os.PathLike | str) -> dict[str, str]:
  """Returns the texts that a file's header has beside its arrays; raises as `read_header`."""
  return _read(path)[1]


def _read(path: os.PathLike | str) -> tuple[dict[str, Stored], dict[str, str]]:
  path = os.fspath(path)
  try:
    with os.fdopen(files.open_plain(path, os.O_RDONLY, follow=True), "rb") as file:
      entries, first = _header(file)
      found = _arrays(path, entries, first, os.fstat(file.fileno()).st_size)
  except OSError as error:
    raise ValueError(f"{path} cannot be read ({error})") from error
  except ValueError as error:
    raise ValueError(
      f"{path}: {error}; it is damaged, or no safetensors file: copy or download it again"
    ) from error
  texts = entries.get(METADATA)
  texts = texts.items() if isinstance(texts, Mapping) else ()
  return found, {name: text for name, text in texts if isinstance(text, str)}


def _header(file: BinaryIO) -> tuple[Mapping[str, Any], int]:
  """Returns the entries of a file's header, and where the arrays begin."""
  size, content = os.fstat(file.fileno()).st_size, file.read(_LENGTH_BYTES)
  if len(content) < _LENGTH_BYTES:
    raise ValueError(f"it has {size} bytes")
  length = int.from_bytes(content, "little")
  if length > MOST_HEADER_BYTES:
    raise ValueError(f"it does not begin with the length of a header ({length:,} bytes)")
  if (first := _LENGTH_BYTES + length) > size:
    raise ValueError(f"it ends inside its header: {size:,} of {first:,} bytes")
  entries = files.parse_json(file.read(length))
  if not isinstance(entries, Mapping):
    raise ValueError(f"its header holds a {type(entries).__name__}, not a JSON object")
  if len(entries) > _MOST_ARRAYS:
    raise ValueError(
      f"its header has {len(entries):,} entries, and at most {_MOST_ARRAYS:,} are read"
    )
  if (longest := max(map(len, entries), default=0)) > _LONGEST_NAME:
    raise ValueError(f"it has a name of {longest:,} characters; at most {_LONGEST_NAME:,} are read")
  return entries, first


def _arrays(path: str, entries: Mapping[str, Any], first: int, size: int) -> dict[str, Stored]:
  """Returns the arrays of a header; raises ValueError where they do not fill the file."""
  found = {
    name: _stored(path, name, entry, first) for name, entry in entries.items() if name != METADATA
  }
  end = first
  for name, one in sorted(found.items(), key=lambda item: (item[1].start, item[1].size)):
    if one.start != end:
      raise ValueError(f"{name} does not begin where the array before it ends")
    end += one.size
  if end > size:
    raise ValueError(f"it is truncated: {size:,} of {end:,} bytes")
  if end < size:
    raise ValueError(f"it has {size - end:,} bytes behind its last array")
  return found


def _stored(path: str, name: str, entry: Any, first: int) -> Stored:
  if any(forms.wrong(entry, _ENTRY)) or len(entry["shape"]) > _MOST_DIMS:
    raise ValueError(f"the header's entry of {shortened(name)} is not one: {short(entry)}")
  dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
  size = stop - start
  if size < 0:
    raise ValueError(f"{name}: data_offsets={[start, stop]}")
  if dtype in _ELEMENTS and size != math.prod(shape) * _ELEMENTS[dtype].itemsize:
    raise ValueError(f"{name}: {size:,} bytes are not {dtype}{short(shape)}")
  return Stored(path, dtype, tuple(shape), first + start, size)


# A part of a row that is at least so long is read alone, not with the rest of its row.
SEEK_BYTES = 2**16


class Reader:
  """Reads blocks of the arrays of one folder; each file is opened once.

  Attributes:
    bytes_read: by this reader.
  """

  def __init__(self):
    """Opens nothing yet."""
    self._descriptors: dict[str, int] = {}
    self._buffer = bytearray()
    self.bytes_read = 0

  def __enter__(self) -> "Reader":
    """Returns itself."""
    return self

  def __exit__(self, *error: object) -> None:
    """Closes the files."""
    for descriptor in self._descriptors.values():
      os.close(descriptor)
    self._descriptors.clear()

  def block(self, stored: Stored, rows: slice, columns: slice) -> np.ndarray:
    """Returns [rows, columns] of a matrix; of a vector, its only column's rows.

    Of an array with more dims, those behind the first are one. The result is valid until the next
    call, which uses its memory again.

    Raises:
      OSError: the file cannot be read.
      ValueError: it has become shorter.
    """
    dtype, width = _ELEMENTS[stored.dtype], math.prod(stored.shape[1:])
    count, part = rows.stop - rows.start, columns.stop - columns.start
    first = stored.start + rows.start * width * dtype.itemsize
    if part < width and part * dtype.itemsize >= SEEK_BYTES:
      found = self._memory(count * part * dtype.itemsize).cast("B")
      for row in range(count):
        start = first + (row * width + columns.start) * dtype.itemsize
        size = part * dtype.itemsize
        self._fill(stored.path, start, found[row * size : (row + 1) * size])
      return np.frombuffer(found, dtype).reshape(count, part)
    found = self._memory(count * width * dtype.itemsize)
    self._fill(stored.path, first, found)
    return np.frombuffer(found, dtype).reshape(count, width)[:, columns]

  def _memory(self, size: int) -> memoryview:
    """Returns that many bytes of a buffer that is used again."""
    if len(self._buffer) < size:
      self._buffer = bytearray(size)
    return memoryview(self._buffer)[:size]

  def _fill(self, path: str, start: int, buffer: memoryview) -> None:
    if path not in self._descriptors:
      self._descriptors[path] = files.open_plain(path, os.O_RDONLY, follow=True)
    self.bytes_read += len(buffer)
    while buffer:
      count = os.preadv(self._descriptors[path], [buffer], start)
      if not count:
        raise ValueError(f"{path}: the file ended at byte {start:,} while it was read")
      buffer, start = buffer[count:], start + count


def pieces(first: int, stop: int, row_bytes: int, piece_bytes: int) -> Iterator[slice]:
  """Yields ranges of rows, each of at most `piece_bytes` or one row."""
  step = max(1, piece_bytes // max(1, row_bytes))
  for start in range(first, stop, step):
    yield slice(start, min(stop, start + step))


# ------------------------------ writing ------------------------------

MOST_BYTES = 5 * 10**9  # of a file, unless it has a single tensor
BLOCK_BYTES = 2**26  # written at a time
_ALIGNMENT = 8  # of the first tensor's bytes in the file


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file: its name, its shape, and a key of NAMES."""

  name: str
  shape: tuple[int, ...]
  dtype: str

  @property
  def bytes(self) -> int:
    """Returns its size."""
    return math.prod(self.shape) * DTYPES[NAMES[self.dtype]].itemsize


@dataclasses.dataclass(frozen=True)
class WeightFile:
  """A file with some tensors, in the order in which they are written.

  Attributes:
    name: of the file.
    tensors: in it.
    metadata: pairs of texts in its header.
  """

  name: str
  tensors: tuple[Tensor, ...]
  metadata: tuple[tuple[str, str], ...] = ()

  @property
  def bytes(self) -> int:
    """Returns the size of the tensors, without the header."""
    return sum(tensor.bytes for tensor in self.tensors)

  def header(self) -> bytes:
    """Returns what comes before the tensors: 8 bytes with a size, then JSON of that size."""
    # Of all readers, transformers requires the framework's name.
    entries: dict[str, Any] = {METADATA: {"format": "pt", **dict(self.metadata)}}
    end = 0
    for tensor in self.tensors:
      begin, end = end, end + tensor.bytes
      entries[tensor.name] = {
        "dtype": NAMES[tensor.dtype],
        "shape": tensor.shape,
        "data_offsets": (begin, end),
      }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def split(tensors: Iterable[Tensor], most_bytes: int) -> list[WeightFile]:
  """Returns the files of a model's tensors, which keep their order.

  Args:
    tensors: all of a model.
    most_bytes: of tensors in a file; a larger tensor has its own file.
  """
  groups: list[list[Tensor]] = [[]]
  for tensor in tensors:
    if groups[-1] and sum(one.bytes for one in groups[-1]) + tensor.bytes > most_bytes:
      groups.append([])
    groups[-1].append(tensor)
  count = len(groups)
  if count == 1:
    return [WeightFile(SINGLE, tuple(groups[0]))]
  return [
    WeightFile(f"model-{number:05d}-of-{count:05d}.safetensors", tuple(group))
    for number, group in enumerate(groups, 1)
  ]


def index(files_: Sequence[WeightFile]) -> dict[str, Any]:
  """Returns the content of the index, which says where each tensor is."""
  return {
    "metadata": {"total_size": sum(file.bytes for file in files_)},
    "weight_map": {tensor.name: file.name for file in files_ for tensor in file.tensors},
  }


def write_file(folder: epath.Path, file: WeightFile, arrays: Iterable[np.ndarray]) -> None:
  """Writes a file from its start to its end; a thread writes a tensor while the next one is made.

  Args:
    folder: where.
    file: what.
    arrays: its tensors, in their order.

  Raises:
    OSError: the file exists, or cannot be written; its path is named.
    ValueError: values are beyond the range of float16.
  """
  path = folder / file.name
  with files.naming(path), _created(path) as opened:
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      pending = thread.submit(_write, opened, file.header())
      for tensor, array in zip(file.tensors, arrays, strict=True):
        pending.result()
        pending = thread.submit(_add, opened, tensor, array)
      pending.result()
    if files.is_local(path):
      os.fsync(opened.fileno())


def _created(path: epath.Path) -> Any:
  if not files.is_local(path):
    return path.open("wb")
  return os.fdopen(files.open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb", buffering=0)


def _add(opened: BinaryIO, tensor: Tensor, array: np.ndarray) -> None:
  """Writes a tensor, a block of rows at a time, so that a transposed view costs little."""
  assert (array.shape, array.dtype.name) == (tensor.shape, tensor.dtype), (tensor, array.shape)
  rows = array if array.ndim else array[None]
  step = max(1, BLOCK_BYTES * len(rows) // max(1, array.nbytes))
  for start in range(0, len(rows), step):
    block = np.ascontiguousarray(rows[start : start + step])
    if tensor.dtype == "float16" and not np.isfinite(block).all():
      raise ValueError(
        f"{tensor.name} has values that float16 cannot represent; export it with --dtype=bfloat16"
      )
    _write(opened, block.reshape(-1).view(np.uint8).data)


def _write(opened: BinaryIO, content: bytes | memoryview) -> None:
  rest = memoryview(content)
  while rest:
    rest = rest[opened.write(rest) :]
