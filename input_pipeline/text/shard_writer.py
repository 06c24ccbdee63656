"""Writes shards of documents, each complete or absent; `store` says what one consists of."""

import contextlib
import errno
import hashlib
import os
import pathlib
import secrets
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from array_record.python import array_record_module
from etils import epath

from input_pipeline.text import documents
from input_pipeline.text.store import (
  DOCUMENT,
  FORMAT,
  INDEX,
  MANIFEST,
  RECORD_TOKENS,
  TOKENS,
  is_there,
)
from runtime import files

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_DOCUMENT = struct.Struct("<IIQI")  # DOCUMENT
_LISTED_BAD = 100  # bad records that shard.json lists; all are counted
_OPTIONS = "group_size:1,uncompressed"


class TooManyBadError(ValueError):
  """A unit has more bad records than may be left out.

  Attributes:
    bad: (where, why) of the first.
    count: how many were found.
  """

  def __init__(self, bad: list[tuple[str, str]], count: int):
    """Takes them."""
    super().__init__(f"{count} bad records, the first: {bad[0][0]}: {bad[0][1]}")
    self.bad, self.count = bad, count


def no_tick(documents: int, tokens: int, size: int) -> None:
  """Takes no note of what was done."""


def content_hash(content: bytes) -> int:
  """Returns 64 bits that depend on a document's content alone."""
  return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def token_type(ids: int) -> np.dtype:
  """Returns the type that tokens 0 to ids - 1 are stored as."""
  return np.dtype("u1" if ids <= 2**8 else "<u2" if ids <= 2**16 else "<u4")


def write_error(path: pathlib.Path, error: RuntimeError) -> OSError:
  """Returns what ArrayRecord's writer raises where a disk is full as an OSError with its number."""
  said = OSError(f"{path} cannot be written: {str(error).partition(';')[0]}")
  said.errno = next((one for one in _FULL if os.strerror(one) in str(error)), None)
  return said


class ShardWriter:
  """Takes the documents of a unit, in order.

  Attributes:
    bad: [where, why] of the first records of the files that are no documents.
    bad_count: how many there are in all.
  """

  def __init__(self, path: pathlib.Path, ids: int):
    """Begins the file `path` of tokens 0 to ids - 1."""
    self._path = path
    with self._writing():
      self._writer = array_record_module.ArrayRecordWriter(str(path), _OPTIONS)
    self._type, self._digest = token_type(ids), hashlib.sha256()
    self._documents = bytearray()  # rows of DOCUMENT: a compressed file may have 100 million
    self._records, self._empty, self._largest, self._masked = 0, 0, 0, False
    self.bad: list[tuple[str, str]] = []
    self.bad_count = 0

  def add(
    self, tokens: np.ndarray, size: int, hashed: int, trained: np.ndarray | None = None
  ) -> None:
    """Adds a document.

    Args:
      tokens: int [L], at least one.
      size: bytes of its text, and one for its end.
      hashed: `content_hash` of it.
      trained: bool [L], which tokens are learned; None: all. In a shard all have one, or none.
    """
    assert 0 < len(tokens) < 2**32 > size
    assert not self._documents or self._masked == (trained is not None)
    self._masked = trained is not None
    for start in range(0, len(tokens), RECORD_TOKENS):
      part = slice(start, start + RECORD_TOKENS)
      record = tokens[part].astype(self._type).tobytes()
      if trained is not None:
        record += np.packbits(trained[part]).tobytes()
      with self._writing():
        self._writer.write(record)
      self._digest.update(record)
      self._records += 1
    self._largest = max(self._largest, int(tokens.max()))
    learned = len(tokens) if trained is None else int(np.count_nonzero(trained))
    self._documents += _DOCUMENT.pack(len(tokens), size, hashed, learned)

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Makes an OSError of what ArrayRecord's writer raises where a disk is full."""
    try:
      yield
    except RuntimeError as error:
      raise write_error(self._path, error) from error

  def add_empty(self) -> None:
    """Counts a document without text; it is left out."""
    self._empty += 1

  def add_bad(self, item: documents.Item, why: str) -> None:
    """Counts a record that is no document; it is left out."""
    self.bad_count += 1
    if len(self.bad) < _LISTED_BAD:
      self.bad.append((item.where, why))  # looking for the place may read the file

  def finish(self) -> tuple[np.ndarray, dict[str, Any]]:
    """Closes the file; returns the index and what shard.json says of it."""
    with self._writing():
      self._writer.close()
    index = np.frombuffer(self._documents, DOCUMENT)
    return index, {
      "documents": len(index),
      "empty": self._empty,
      **{key: int(index[key].sum(dtype=np.int64)) for key in ("tokens", "bytes", "trained")},
      "records": self._records,
      "largest_id": self._largest,
      "masked": self._masked,
      "width": self._type.itemsize,
      "digest": self._digest.hexdigest(),
      "bad": self.bad_count,
      "bad_records": self.bad,
    }


def write_shard(
  folder: epath.Path, ids: int, facts: Mapping[str, Any], fill: Callable[[ShardWriter], None]
) -> None:
  """Writes a shard beside `folder` and renames it, unless another process was first.

  Args:
    folder: of the shard; its parent is there.
    ids: how many token ids there are.
    facts: what else shard.json says.
    fill: adds the documents. What it raises ends the shard, of which nothing is left then.

  Raises:
    OSError: it cannot be written.
  """
  partial = folder.parent / f"{folder.name}.{secrets.token_hex(8)}.tmp"
  remote = not files.is_local(folder)
  # ArrayRecord reads object storage, but writes local files only.
  local = pathlib.Path(tempfile.mkdtemp()) if remote else pathlib.Path(partial)
  try:
    local.mkdir(exist_ok=remote)
    writer = ShardWriter(local / TOKENS, ids)
    fill(writer)
    index, counted = writer.finish()
    np.save(local / INDEX, index)
    sizes = {name: (local / name).stat().st_size for name in (TOKENS, INDEX)}
    digest = hashlib.sha256((local / INDEX).read_bytes()).hexdigest()
    shard = {"format": FORMAT, **facts, **counted, "sizes": sizes, "index_digest": digest}
    files.replace(local / MANIFEST, files.json_text(shard, indent=2) + "\n")
    _place(local, folder, remote)
  finally:
    if local.exists():
      epath.Path(local).rmtree()


def _place(local: pathlib.Path, folder: epath.Path, remote: bool) -> None:
  if remote:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (TOKENS, INDEX, MANIFEST):  # the last of them makes it a shard
      epath.Path(local / name).copy(folder / name, overwrite=True)
    return
  if not is_there(folder) and folder.exists():  # no shard, and would block the rename
    folder.rmtree()
  files.sync_tree(local)  # a power cut must not leave the name of a shard without its tokens
  try:
    local.rename(folder)
    files.sync([folder.parent])
  except OSError:
    if not is_there(folder):  # another process was first: the same files give the same shard
      raise


def remove_partial(folder: epath.Path) -> None:
  """Removes what killed processes have left in a folder of shards; the caller holds its lock."""
  if files.is_local(folder):
    for left in folder.glob("*.tmp"):
      left.rmtree()
