"""Writes shards of the store: under another name, renamed when they are complete.

One process writes a shard; a lock lets others wait for it.
"""

import contextlib
import dataclasses
import errno
import hashlib
import os
import pathlib
import secrets
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import filelock
import numpy as np
from absl import logging
from array_record.python import array_record_module
from etils import epath

from input_pipeline.store import (
  DOCUMENT,
  FORMAT,
  INDEX,
  MANIFEST,
  RECORD_TOKENS,
  TOKENS,
  is_there,
  no_tick,
)
from input_pipeline.text import tokenizer
from runtime import files

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_DOCUMENT = struct.Struct("<IIQI")  # DOCUMENT
_LISTED_BAD = 100  # bad records that shard.json lists; all are counted
_OPTIONS = "group_size:1,uncompressed"
_BATCH_DOCUMENTS, _BATCH_BYTES = 256, 2**21  # that the tokenizer gets at once
_LONGEST = 2**32 - 2  # bytes of a document
_TICK_SECONDS = 0.1


class TooManyBadError(ValueError):
  """A unit has more bad records than may be left out.

  Attributes:
    bad: (where, why) of the first.
    count: how many were found.
  """

  def __init__(self, bad: list[tuple[str, str]], count: int):
    """Takes them."""
    super().__init__(bad, count)  # as pickle gives them back
    self.bad, self.count = bad, count


def content_hash(content: bytes) -> int:
  """Returns 64 bits that depend on a document's content alone."""
  return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def token_type(ids: int) -> np.dtype:
  """Returns the type that tokens 0 to ids - 1 are stored as."""
  return np.dtype("u1" if ids <= 2**8 else "<u2" if ids <= 2**16 else "<u4")


def write_error(path: pathlib.Path, error: RuntimeError) -> OSError:
  """Returns what ArrayRecord's writer raises where a disk is full as an OSError with its number."""
  text = f"{path} cannot be written: {str(error).partition(';')[0]}"
  number = next((one for one in _FULL if os.strerror(one) in str(error)), None)
  return OSError(number, text) if number else OSError(text)


Place = Callable[[int], str]


@dataclasses.dataclass(slots=True)
class Item:
  """A document or a record as it is read; or, where it cannot be read, why not.

  Attributes:
    place: gives `where` of the index.
    index: of the document in what is read.
    value: of a document its text in UTF-8, as bytes; of a record the object. None if it is bad.
    why: what is wrong with it; "" where nothing is.
  """

  place: Place
  index: int
  value: Any
  why: str = ""

  @property
  def where(self) -> str:
    """`FILE`, `FILE:LINE` (from 1) or `FILE, row N` (from 0)."""
    return self.place(self.index)


class ShardWriter:
  """Takes the documents of a unit, in order.

  Attributes:
    bad: [where, why] of the first records of the files that are no documents.
    bad_count: how many there are in all.
  """

  def __init__(self, path: pathlib.Path, ids: int, limit: int | None, tick: Callable):
    """Begins the file `path` of tokens 0 to ids - 1; the others as of `write_shard`."""
    self._path, self._limit, self._tick, self._next_tick = path, limit, tick, 0.0
    with self._writing():
      self._writer = array_record_module.ArrayRecordWriter(str(path), _OPTIONS)
    self._type, self._digest = token_type(ids), hashlib.sha256()
    self._documents = bytearray()  # rows of DOCUMENT: a compressed file may have 100 million
    self._records, self._empty, self._largest, self._masked = 0, 0, 0, False
    self._done = (0, 0, 0)
    self.bad: list[tuple[str, str]] = []
    self.bad_count = 0

  def add(
    self,
    tokens: np.ndarray,
    size: int,
    hashed: int,
    trained: np.ndarray | None = None,
    read: int | None = None,
  ) -> None:
    """Adds a document.

    Args:
      tokens: int [L], at least one.
      size: bytes of its text, and one for its end.
      hashed: `content_hash` of it.
      trained: bool [L], which tokens are learned; None: all. In a shard all have one, or none.
      read: bytes that are done with it, for the tick; None: `size`.
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
    documents, all_tokens, done = self._done
    self._done = (documents + 1, all_tokens + len(tokens), done + (read or size))
    if time.monotonic() >= self._next_tick:
      self._tick(*self._done)
      self._next_tick = time.monotonic() + _TICK_SECONDS

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

  def add_bad(self, item: Item, why: str) -> None:
    """Counts a record that is no document; it is left out. Raises TooManyBadError."""
    self.bad_count += 1
    if len(self.bad) < _LISTED_BAD:
      self.bad.append((item.where, why))  # looking for the place may read the file
    if self._limit is not None and self.bad_count > self._limit:
      raise TooManyBadError(self.bad, self.bad_count)

  def finish(self) -> tuple[np.ndarray, dict[str, Any]]:
    """Closes the file; returns the index and what shard.json says of it."""
    with self._writing():
      self._writer.close()
    self._tick(*self._done)
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
  folder: epath.Path,
  ids: int,
  facts: Mapping[str, Any],
  fill: Callable[[ShardWriter], Mapping[str, Any] | None],
  limit: int | None = None,
  tick: Callable = no_tick,
) -> None:
  """Writes a shard beside `folder` and renames it, unless another process was first.

  Args:
    folder: of the shard; its parent is there.
    ids: how many token ids there are.
    facts: what else shard.json says.
    fill: adds the documents, and may return more for shard.json. What it raises ends the shard, of
      which nothing is left then.
    limit: data.max_bad_records; None: no limit.
    tick: is called several times a second, with how many documents, tokens and bytes are done. What
      it raises ends the shard.

  Raises:
    TooManyBadError: more than `limit` records are bad.
    OSError: it cannot be written.
  """
  partial = folder.parent / f"{folder.name}.{secrets.token_hex(8)}.tmp"
  remote = not files.is_local(folder)
  # ArrayRecord reads object storage, but writes local files only.
  local = pathlib.Path(tempfile.mkdtemp()) if remote else pathlib.Path(partial)
  try:
    local.mkdir(exist_ok=remote)
    writer = ShardWriter(local / TOKENS, ids, limit, tick)
    facts = {**facts, **(fill(writer) or {})}
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


def remove_partial(folder: epath.Path, shard: str = "") -> None:
  """Removes what killed processes have left in a folder of shards, all or of one shard.

  The caller holds the lock: no other process is writing it.
  """
  if files.is_local(folder):
    for left in folder.glob(f"{shard}*.tmp"):
      left.rmtree()


def write_documents(
  folder: epath.Path,
  read: Iterable[Item],
  encoder: tokenizer.Tokenizer,
  facts: Mapping[str, Any],
  *,
  limit: int,
  keep_empty: bool = False,
  tick: Callable = no_tick,
) -> None:
  """Writes documents, in order, as a shard.

  Args:
    folder: of the shard.
    read: the documents.
    encoder: the tokenizer.
    facts: what else shard.json says.
    limit: data.max_bad_records: with more, the shard is given up.
    keep_empty: whether a document without text is kept as its end alone; else it is left out.
    tick: as of `write_shard`.

  Raises:
    TooManyBadError: more than `limit` records are bad.
    OSError: a file cannot be read, or the shard not be written.
  """

  def fill(shard: ShardWriter) -> None:
    end = np.array([encoder.end], np.uint32)
    for texts in _batches(_good(read, shard, keep_empty)):
      for text, ids in zip(texts, encoder.encode(texts), strict=True):
        shard.add(np.concatenate([ids, end]), len(text) + 1, content_hash(text))

  write_shard(folder, encoder.size, {"tokenizer": encoder.digest, **facts}, fill, limit, tick)


def _good(read: Iterable[Item], shard: ShardWriter, keep_empty: bool) -> Iterator[bytes]:
  """Yields the texts; counts documents without text, and records that are none."""
  for document in read:
    text, why = document.value, document.why
    if text is not None and len(text) > _LONGEST:
      why = f"it has {len(text):,} bytes, and at most {_LONGEST:,} can be stored"
    if text is None or why:
      shard.add_bad(document, why)
    elif text or keep_empty:
      yield text
    else:
      shard.add_empty()


def _batches(texts: Iterator[bytes]) -> Iterator[list[bytes]]:
  batch, size = [], 0
  for text in texts:
    batch.append(text)
    size += len(text)
    if len(batch) == _BATCH_DOCUMENTS or size >= _BATCH_BYTES:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


# ------------------------------ where it is written ------------------------------


@contextlib.contextmanager
def locked(path):
  """Acquires the lock of `path` (an epath.Path), waiting as long as necessary.

  The operating system releases the lock when its holder dies, so a killed process blocks no other.
  Object storage (gs://) has no locks: the lock then excludes only processes of this machine, and
  two machines that do the same work at once both finish it, with the same result.
  """
  name = str(path)
  if "://" in name:
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    lock_path = pathlib.Path(tempfile.gettempdir()) / f"meshwright-{digest}.lock"
  else:
    lock_path = pathlib.Path(f"{name}.lock")
  lock_path.parent.mkdir(parents=True, exist_ok=True)
  lock = filelock.FileLock(lock_path)
  try:
    lock.acquire(timeout=2)
  except filelock.Timeout:
    logging.warning("waiting for another process that prepares %s (lock file %s)", path, lock_path)
    lock.acquire()
  try:
    yield
  finally:
    lock.release()


@contextlib.contextmanager
def writing_to(folder: epath.Path) -> Iterator[None]:
  """Turns what the system refuses into a message with the fix."""
  try:
    yield
  except OSError as error:
    raise ValueError(
      f"data cannot be prepared in {folder} ({error.strerror or error}); free some space or get the"
      f" right to write there, or set data.data_dir to another folder. What is complete is kept"
    ) from error
