"""Files in the safetensors format: 8 bytes of length, a JSON header, and the arrays' bytes.

Arrays are read by `os.preadv` into buffers, never mapped: the pages of a mapped file count as this
process' memory, and a column of a matrix touches all of them. They are written one after the other,
in files of at most 5 GB. Nothing here imports JAX.

Sources: of the format, https://huggingface.co/docs/safetensors; of the names of the files and of
the index, transformers' `save_pretrained`.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from interop.hf_folder import SINGLE
from interop.hf_parts import short
from runtime import files
from runtime.forms import is_whole, shortened

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
_MOST_DIMS, _MOST_BYTES = 64, 2**63 - 1  # as NumPy has it
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
  with contextlib.ExitStack() as stack:
    try:
      descriptor = files.open_plain(path, os.O_RDONLY, follow=True)
      stack.callback(os.close, descriptor)
      return _parsed(path, descriptor, os.fstat(descriptor).st_size)
    except OSError as error:
      raise ValueError(f"{path} cannot be read ({error})") from error
    except ValueError as error:
      raise ValueError(
        f"{path}: {error}; it is damaged, or no safetensors file: copy or download it again"
      ) from error


def _parsed(path: str, descriptor: int, size: int) -> tuple[dict[str, Stored], dict[str, str]]:
  """Returns the arrays and the texts of a header; raises ValueError where it is not one."""
  if size < _LENGTH_BYTES:
    raise ValueError(f"it has {size} bytes")
  length = int.from_bytes(_bytes(descriptor, 0, _LENGTH_BYTES), "little")
  first = _LENGTH_BYTES + length
  if length > MOST_HEADER_BYTES:
    raise ValueError(f"it does not begin with the length of a header ({length:,} bytes)")
  if first > size:
    raise ValueError(f"it ends inside its header: {size:,} of {first:,} bytes")
  entries = files.parse_json(_bytes(descriptor, _LENGTH_BYTES, length))
  found, texts = _checked(path, entries, first, size), entries.get(METADATA)
  texts = texts.items() if isinstance(texts, Mapping) else ()
  return found, {name: text for name, text in texts if isinstance(text, str)}


def _checked(path: str, entries: Any, first: int, size: int) -> dict[str, Stored]:
  """Returns the arrays of a header; raises ValueError where they do not fill the file."""
  if not isinstance(entries, Mapping):
    raise ValueError(f"its header holds a {type(entries).__name__}, not a JSON object")
  if len(entries) > _MOST_ARRAYS:
    raise ValueError(
      f"its header has {len(entries):,} entries, and at most {_MOST_ARRAYS:,} are read"
    )
  if (longest := max(map(len, entries), default=0)) > _LONGEST_NAME:
    raise ValueError(f"it has a name of {longest:,} characters; at most {_LONGEST_NAME:,} are read")
  found = {}
  for name, entry in entries.items():
    if name != METADATA:
      found[name] = _stored(path, name, entry, first)
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
  entry = entry if isinstance(entry, Mapping) else {}
  dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
  if not (isinstance(dtype, str) and _naturals(shape) and _naturals(offsets)):
    raise ValueError(f"the header's entry of {shortened(name)} is not one: {short(entry)}")
  if len(offsets) != 2 or offsets[0] > offsets[1]:
    raise ValueError(f"{name}: data_offsets={short(offsets)}")
  size = offsets[1] - offsets[0]
  if dtype in _ELEMENTS and size != math.prod(shape) * _ELEMENTS[dtype].itemsize:
    raise ValueError(f"{name}: {size:,} bytes are not {dtype}{short(shape)}")
  return Stored(path, dtype, tuple(shape), first + offsets[0], size)


def _naturals(value: Any) -> bool:
  whole = isinstance(value, list) and len(value) <= _MOST_DIMS
  return whole and all(is_whole(one, 0, _MOST_BYTES) for one in value)


def _bytes(descriptor: int, start: int, size: int) -> bytearray:
  buffer = bytearray(size)
  _read_into(descriptor, start, memoryview(buffer))
  return buffer


def _read_into(descriptor: int, start: int, buffer: memoryview) -> None:
  """Fills a buffer with bytes of a file; raises ValueError where it ends before."""
  while buffer:
    count = os.preadv(descriptor, [buffer], start)
    if not count:
      raise ValueError(f"the file ended at byte {start:,} while it was read")
    buffer, start = buffer[count:], start + count


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
    try:
      _read_into(self._descriptors[path], start, buffer)
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from error
    self.bytes_read += len(buffer)


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


class Writer:
  """Writes one file from its start to its end; a context manager that closes it.

  Raises:
    OSError: the file exists, or cannot be written; its path is named.
  """

  def __init__(self, folder: epath.Path, file: WeightFile):
    """Opens the file and writes its header."""
    self._path, self._file = folder / file.name, file
    self._left = list(file.tensors)
    with _naming(self._path):
      if files.is_local(self._path):
        descriptor = files.open_plain(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._opened = os.fdopen(descriptor, "wb", buffering=0)
      else:
        self._opened = self._path.open("wb")
      self._write(file.header())

  def __enter__(self) -> "Writer":
    """Returns itself."""
    return self

  def __exit__(self, kind, error, trace) -> None:
    """Closes the file; if nothing has failed, after waiting for the disk."""
    assert kind is not None or not self._left, f"{self._path}: without {self._left[0].name}"
    with _naming(self._path):
      if kind is None and files.is_local(self._path):
        os.fsync(self._opened.fileno())
      self._opened.close()

  def add(self, array: np.ndarray) -> None:
    """Writes the next tensor, a block of rows at a time, so that a transposed view costs little.

    Raises:
      ValueError: its values are beyond the range of float16.
    """
    tensor = self._left.pop(0)
    assert array.shape == tensor.shape, (tensor, array.shape)
    assert array.dtype.name == tensor.dtype, (tensor, array.dtype)
    rows = array if array.ndim else array[None]
    step = max(1, BLOCK_BYTES * len(rows) // max(1, array.nbytes))
    with _naming(self._path):
      for start in range(0, len(rows), step):
        block = np.ascontiguousarray(rows[start : start + step])
        if tensor.dtype == "float16" and not np.isfinite(block).all():
          raise ValueError(
            f"{tensor.name} has values that float16 cannot represent; export it with "
            f"--dtype=bfloat16"
          )
        self._write(block.reshape(-1).view(np.uint8).data)

  def _write(self, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while rest:
      rest = rest[self._opened.write(rest) :]


@contextlib.contextmanager
def _naming(path: epath.Path) -> Iterator[None]:
  """Makes errors of writing name the file: a full disk is reported without a path."""
  try:
    yield
  except OSError as error:
    if error.filename is not None or error.errno is None:
      raise
    raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
