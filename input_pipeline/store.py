"""Documents as tokens on disk: shards that are written once, and read in any order.

Text, conversations and images are all stored so. A shard is a folder with what one unit of files
(`documents.units`) or one split of a TFDS data set holds:
  tokens.array_record   records of at most 8192 tokens of one document; each a chunk of its own with
                        its own checksum, little-endian, of 8 or 16 bits where all ids fit
  documents.npy         of each document: its tokens, its bytes, a hash of its content
  shard.json            what the two hold, with sizes and digests
It is written under another name and renamed, so that a shard is complete or absent. Nothing in it
depends on the length of rows, on packing, seed or batch size.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import secrets
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import filelock
import numpy as np
from absl import logging
from array_record.python import array_record_module
from etils import epath

from input_pipeline import catalog
from input_pipeline.text import tokenizer
from runtime import files


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


# ------------------------------ reading ------------------------------

FORMAT = 1  # of the three files; raise it when one of them changes
TOKENS, INDEX, MANIFEST = "tokens.array_record", "documents.npy", "shard.json"
RECORD_TOKENS = 8192
# tokens: of the document. bytes: of its text in UTF-8, and one for its end. hash: of its content.
# trained: tokens that are learned; of text, all.
DOCUMENT = np.dtype([("tokens", "<u4"), ("bytes", "<u4"), ("hash", "<u8"), ("trained", "<u4")])
_READER = {"options": "readahead_buffer_size:0", "file_reader_buffer_size": 32768}
_LARGEST_INDEX = 2**36
_MOST_READERS = 512  # that are open: each has a file descriptor; opening one takes 0.25 ms
_COUNTS = ("documents", "empty", "tokens", "bytes", "trained", "records", "largest_id", "bad")


@dataclasses.dataclass(frozen=True)
class Shard:
  """A shard that is complete.

  Attributes:
    folder: its place.
    manifest: what shard.json says.
  """

  folder: epath.Path
  manifest: dict[str, Any]

  @classmethod
  def open(cls, folder: epath.Path) -> "Shard":
    """Opens a shard after comparing sizes with shard.json.

    Raises:
      ValueError: a file is missing, torn or malformed; with the way out.
    """
    try:
      manifest = files.read_json(folder / MANIFEST, follow=True)
      counts = [manifest[key] for key in _COUNTS]
      sizes = [manifest["sizes"][name] for name in (TOKENS, INDEX)]
      if not all(type(count) is int and count >= 0 for count in (*counts, *sizes)):
        raise ValueError("its counts are not numbers")
      if manifest["format"] != FORMAT or manifest["width"] not in (1, 2, 4):
        raise ValueError(f"it has the format {manifest['format']}, not {FORMAT}")
      [*map(str, (manifest["digest"], manifest["index_digest"], manifest["masked"]))]
    except (OSError, ValueError, KeyError, TypeError) as error:
      why = f"it lacks {error}" if isinstance(error, KeyError) else error
      raise ValueError(f"{folder / MANIFEST} cannot be read ({why}); {again(folder)}") from error
    for name in (TOKENS, INDEX):
      path, size = folder / name, manifest["sizes"][name]
      there = path.stat().length if path.exists() else 0
      if there != size:
        raise ValueError(
          f"the shard {folder} is torn: {name} has {there} bytes, and {MANIFEST} says {size}; "
          f"{again(folder)}"
        )
    return cls(folder, manifest)

  @property
  def digest(self) -> str:
    """Of the tokens and of the documents that they make up."""
    return f"{self.manifest['digest']} {self.manifest['index_digest']}"

  def index(self) -> np.ndarray:
    """Returns the documents, DOCUMENT [D].

    Raises:
      ValueError: they are damaged.
    """
    path = self.folder / INDEX
    try:
      content = files.read_bytes(path, most_bytes=_LARGEST_INDEX, follow=True)
      wrong = hashlib.sha256(content).hexdigest() != self.manifest["index_digest"]
      header = len(content) - DOCUMENT.itemsize * self.manifest["documents"]
      if wrong or header < 0:
        raise ValueError("its digest is not the one in shard.json")
      index = np.frombuffer(content, DOCUMENT, offset=header)
      if records_of(index).sum() != self.manifest["records"]:
        raise ValueError(f"its documents do not have {self.manifest['records']} records")
      return index
    except (OSError, ValueError) as error:
      raise ValueError(f"{path} cannot be read ({error}); {again(self.folder)}") from error


def is_there(folder: epath.Path) -> bool:
  """Returns whether a shard is complete."""
  return (folder / MANIFEST).exists()


def records_of(index: np.ndarray) -> np.ndarray:
  """Returns how many records each document has, int64 [D]."""
  return -(-index["tokens"].astype(np.int64) // RECORD_TOKENS)


def again(folder: epath.Path) -> str:
  """Returns the way out of a shard that is damaged."""
  return f"delete {folder} and run again to prepare it from scratch"


class RecordError(ValueError):
  """Records cannot be read.

  Attributes:
    records: number -> why.
  """

  def __init__(self, records: Mapping[int, str]):
    """Takes the records."""
    super().__init__(f"{len(records)} records cannot be read")
    self.records = dict(records)


class Documents:
  """The documents of several shards, numbered through; may be read by several threads.

  Attributes:
    shards: in order.
    index: DOCUMENT [D].
    first_record: int64 [D + 1], the number of each document's first record.
  """

  def __init__(self, shards: Sequence[Shard]):
    """Reads the indexes; raises ValueError for one that is damaged."""
    self.shards = tuple(shards)
    parts = [shard.index() for shard in self.shards]
    self.index = np.concatenate([np.zeros(0, DOCUMENT), *parts])
    self.first_record = np.concatenate([[0], np.cumsum(records_of(self.index))])
    counts = [shard.manifest["records"] for shard in self.shards]
    self._first_of_shard = np.cumsum([0, *counts])
    self._first_document = np.cumsum([0, *map(len, parts)])
    self.masked = any(shard.manifest["masked"] for shard in self.shards)
    self._type = np.dtype(f"<u{self.shards[0].manifest['width']}" if self.shards else "<u2")
    self._readers: dict[int, Any] = {}
    self._lock = threading.Lock()

  def __len__(self) -> int:
    """How many documents there are."""
    return len(self.index)

  @property
  def records(self) -> int:
    """How many records there are."""
    return int(self.first_record[-1])

  def shard_of(self, document: int) -> int:
    """Returns the number of the shard that a document is in."""
    return int(np.searchsorted(self._first_document, document, side="right")) - 1

  def place(self, record: int) -> str:
    """Returns where a record is: `document 17 of SHARD/tokens.array_record`."""
    document = int(np.searchsorted(self.first_record, record, side="right")) - 1
    shard = int(np.searchsorted(self._first_of_shard, record, side="right")) - 1
    number = document - int(self._first_document[shard])
    return f"document {number} of {self.shards[shard].folder / TOKENS}"

  def sizes(self, records: np.ndarray) -> np.ndarray:
    """Returns how many tokens each of these records has, int64 [N]."""
    document = np.searchsorted(self.first_record, records, side="right") - 1
    before = (records - self.first_record[document]) * RECORD_TOKENS
    return np.minimum(self.index["tokens"][document].astype(np.int64) - before, RECORD_TOKENS)

  def read(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the tokens of records, one after the other, and which of them are learned.

    Args:
      records: int64 [N], in any order.

    Raises:
      RecordError: with all of these that cannot be read.
    """
    sizes = self.sizes(records)
    masks = (sizes + 7) // 8 if self.masked else np.zeros_like(sizes)
    wanted = (sizes * self._type.itemsize + masks).tolist()
    found: list[bytes] = [b""] * len(records)
    bad: dict[int, str] = {}
    shard_of = np.searchsorted(self._first_of_shard, records, side="right") - 1
    for shard in np.unique(shard_of).tolist():
      places = np.flatnonzero(shard_of == shard)
      numbers = (records[places] - self._first_of_shard[shard]).tolist()
      lengths = [wanted[place] for place in places]
      for place, content in zip(places, self._read(shard, numbers, lengths, bad), strict=True):
        found[place] = content
    if bad:
      raise RecordError(bad)
    if not self.masked:
      return np.frombuffer(b"".join(found), self._type), None
    ends = (sizes * self._type.itemsize).tolist()
    tokens = b"".join(content[:end] for content, end in zip(found, ends, strict=True))
    trained = [
      np.unpackbits(np.frombuffer(content, np.uint8, offset=end), count=size)
      for content, end, size in zip(found, ends, sizes.tolist(), strict=True)
    ]
    none = np.zeros(0, np.uint8)
    return np.frombuffer(tokens, self._type), np.concatenate([none, *trained]).astype(bool)

  def unreadable(self, records: np.ndarray) -> dict[int, str]:
    """Returns number -> why for those of the records that cannot be read."""
    try:
      self.read(records)
    except RecordError as error:
      return error.records
    return {}

  def _read(self, shard, numbers, lengths, bad) -> list[bytes]:
    """Returns records of a shard by their numbers in it; notes in `bad` those that are damaged."""
    first = int(self._first_of_shard[shard])
    try:
      reader = self._reader(shard)
      found = reader.read(numbers)
      if [*map(len, found)] == lengths:
        return found
    except RuntimeError:
      pass
    found = []
    for number, length in zip(numbers, lengths, strict=True):  # one by one: which of them is it?
      try:
        [content] = self._reader(shard).read([number])
        why = f"it has {len(content)} bytes, not {length}" if len(content) != length else ""
      except RuntimeError as error:
        content, why = b"", str(error).strip().partition("\n")[0]
      if why:
        bad[first + number] = why
      found.append(content)
    return found

  def _reader(self, shard: int) -> Any:
    """Returns the reader of a shard; RuntimeError where its file is damaged as a whole."""
    with self._lock:
      reader = self._readers.pop(shard, None)
      if reader is None:
        path = str(self.shards[shard].folder / TOKENS)
        reader = array_record_module.ArrayRecordReader(path, **_READER)
        there, said = reader.num_records(), self.shards[shard].manifest["records"]
        if there != said:
          raise RuntimeError(f"{path} has {there} records, and {MANIFEST} says {said}")
      self._readers[shard] = reader  # the last one: it was used last
      while len(self._readers) > _MOST_READERS:
        del self._readers[next(iter(self._readers))]  # a read under way keeps its own reference
      return reader


# ------------------------------ writing ------------------------------


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_DOCUMENT = struct.Struct("<IIQI")  # DOCUMENT
_LISTED_BAD = 100  # bad records that shard.json lists; all are counted
_OPTIONS = "group_size:1,uncompressed"
_BATCH_DOCUMENTS, _BATCH_BYTES = 256, 2**21  # that the tokenizer gets at once
_LONGEST = 2**32 - 2  # bytes of a document
_TICK_SECONDS = 0.1
_LISTED = 5


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


def no_tick(*counted: Any) -> None:
  """Takes no note of what was done."""


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


# ------------------------------ what is prepared ------------------------------


@dataclasses.dataclass(frozen=True)
class Prepared:
  """What files or a data set hold, tokenized.

  Attributes:
    documents: in the order of the files.
    encoder: the tokenizer.
    folder: of the shards.
    bad: (where, why) of the first records that are no documents.
    bad_count: how many there are.
    empty: how many documents have no text, and are left out.
    units: the `documents.Unit` of each shard; () where it was not made from files.
    template: of conversations, their `chat_template.ChatTemplate`; of texts, None.
  """

  documents: Documents
  encoder: tokenizer.Tokenizer
  folder: epath.Path
  bad: tuple[tuple[str, str], ...]
  bad_count: int
  empty: int
  units: tuple[Any, ...] = ()
  template: Any = None


def open_prepared(
  folder: epath.Path, ids: Sequence[str], encoder: tokenizer.Tokenizer, name: str, limit: int
) -> Prepared:
  """Opens shards by their names; raises ValueError for a damaged one, or too many bad records."""
  shards = [Shard.open(folder / one) for one in ids]
  bad = [(where, why) for shard in shards for where, why in shard.manifest["bad_records"]]
  count = sum(shard.manifest["bad"] for shard in shards)
  if count > limit:
    raise ValueError(too_many_bad(name, bad, count, limit))
  empty = sum(shard.manifest["empty"] for shard in shards)
  return Prepared(Documents(shards), encoder, folder, tuple(bad), count, empty)


def too_many_bad(name: str, bad: Sequence[Sequence[str]], count: int, limit: int) -> str:
  """Returns the refusal of more bad records than data.max_bad_records."""
  listed = "".join(f"\n  {where}: {why}" for where, why in bad[:_LISTED])
  more = f"\n  and {count - _LISTED:,} more" if count > _LISTED else ""
  return (
    f"{name}: {count:,} bad record{'' if count == 1 else 's'}, more than "
    f"data.max_bad_records={limit}; repair the data, or set it to {count} or more to continue "
    f"without such records:{listed}{more}"
  )


def folder_of(
  data: Any, encoder: tokenizer.Tokenizer, feature: str, template_digest: str = ""
) -> epath.Path:
  """Returns the folder of the shards of a tokenizer and a feature, or a chat template."""
  facts = [FORMAT, encoder.digest, feature]
  if template_digest:
    facts, feature = [*facts, template_digest], data.name
    if data.name != catalog.CONVERSATIONS:
      facts.append(data.name)
  digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
  # No part of the tokenizer's path: a run's own copy of it finds the same shards.
  name = tokenizer.BYTES if encoder.name == tokenizer.BYTES else "tokens"
  plain = re.sub(r"[^\w.-]", "_", f"{name}-{feature[:40]}")
  return catalog.data_folder(data) / "prepared" / "text" / f"{plain}-{digest}"


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
