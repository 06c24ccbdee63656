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

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from array_record.python import array_record_module
from etils import epath

from input_pipeline import catalog
from input_pipeline.text import tokenizer
from runtime import files

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
    self._reader = functools.lru_cache(_MOST_READERS)(self._open)

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

  def _open(self, shard: int) -> Any:
    """Returns the reader of a shard; RuntimeError where its file is damaged as a whole."""
    path = str(self.shards[shard].folder / TOKENS)
    reader = array_record_module.ArrayRecordReader(path, **_READER)
    there, said = reader.num_records(), self.shards[shard].manifest["records"]
    if there != said:
      raise RuntimeError(f"{path} has {there} records, and {MANIFEST} says {said}")
    return reader


# ------------------------------ what is prepared ------------------------------

_LISTED = 5  # bad records in a message


def no_tick(*counted: Any) -> None:
  """Takes no note of what was done."""


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
