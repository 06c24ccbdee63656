"""Writes weights in safetensors files of at most 5 GB: a JSON header, then the tensors' bytes.

Source of the format: github.com/huggingface/safetensors, "Format"; of the names of the files and of
the index, transformers' `save_pretrained`.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from runtime import files

MOST_BYTES = 5 * 10**9  # of a file, unless it has a single tensor
BLOCK_BYTES = 2**26  # written at a time
INDEX_FILE = "model.safetensors.index.json"
# What the format calls each dtype that can be exported.
DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGNMENT = 8  # of the first tensor's bytes in the file


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file: its name, its shape, and a key of DTYPES."""

  name: str
  shape: tuple[int, ...]
  dtype: str

  @property
  def bytes(self) -> int:
    """Returns its size."""
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


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
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **dict(self.metadata)}}
    end = 0
    for tensor in self.tensors:
      begin, end = end, end + tensor.bytes
      entries[tensor.name] = {
        "dtype": DTYPES[tensor.dtype],
        "shape": tensor.shape,
        "data_offsets": (begin, end),
      }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def split(
  tensors: Iterable[Tensor], most_bytes: int | None = None, name: str = "model"
) -> list[WeightFile]:
  """Returns the files of some tensors, which keep their order.

  Args:
    tensors: all of a model.
    most_bytes: of tensors in a file, by default MOST_BYTES; a larger tensor has its own file.
    name: how the files' names begin.
  """
  groups: list[list[Tensor]] = [[]]
  most_bytes = MOST_BYTES if most_bytes is None else most_bytes
  for tensor in tensors:
    if groups[-1] and sum(one.bytes for one in groups[-1]) + tensor.bytes > most_bytes:
      groups.append([])
    groups[-1].append(tensor)
  count = len(groups)
  if count == 1:
    return [WeightFile(f"{name}.safetensors", tuple(groups[0]))]
  return [
    WeightFile(f"{name}-{number:05d}-of-{count:05d}.safetensors", tuple(group))
    for number, group in enumerate(groups, 1)
  ]


def index(files_: Sequence[WeightFile]) -> dict[str, Any]:
  """Returns the content of INDEX_FILE, which says where each tensor is."""
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
    assert array.dtype == jnp.dtype(tensor.dtype), (tensor, array.dtype)
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
