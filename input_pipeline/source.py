"""What the rest of the pipeline hands over: a Source, the parts of a mixture, bad records."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_LISTED = 8


def counted(numbers, what: str) -> str:
  """Returns `1 row` or `2 rows`."""
  return f"{len(numbers):,} {what}{'' if len(numbers) == 1 else 's'}"


def few(numbers) -> str:
  """Returns the first of some numbers as text."""
  return ", ".join(map(str, numbers[:_LISTED])) + (", ..." if len(numbers) > _LISTED else "")


class UnreadableError(ValueError):
  """Rows that a step needs cannot be read.

  Attributes:
    rows: number -> why, of the rows in question.
  """

  def __init__(self, text: str, rows: Mapping[int, str]):
    """Takes the message and the rows."""
    super().__init__(text)
    self.rows = dict(rows)


@dataclasses.dataclass(frozen=True)
class BadRecords:
  """The unreadable rows and records of a split.

  Attributes:
    rows: the numbers of the rows that get weight 0, in order.
    left_out: the places of records of the data set that were no documents when it was prepared.
    why: what is wrong with the first.
  """

  rows: tuple[int, ...] = ()
  left_out: tuple[str, ...] = ()
  why: str = ""

  def __len__(self) -> int:
    """Returns how many count against data.max_bad_records."""
    return len(self.rows) + len(self.left_out)

  @property
  def digest(self) -> str:
    """Returns a digest of the list."""
    return hashlib.sha256(repr((self.rows, self.left_out)).encode()).hexdigest()[:16]

  def __str__(self) -> str:
    """Returns `unreadable: 2 rows of weight 0: 5, 17 (the first: hash mismatch)`."""
    parts = []
    if self.rows:
      parts.append(f"unreadable: {counted(self.rows, 'row')} of weight 0: {few(self.rows)}")
    if self.left_out:
      parts.append(f"left out: {counted(self.left_out, 'record')}: {few(self.left_out)}")
    return f"{'; '.join(parts)} (the first: {self.why})" if parts else "every row can be read"


@dataclasses.dataclass(frozen=True)
class Sharing:
  """The processes that open a split together, as one of them sees it.

  Attributes:
    index: of this process.
    count: number of processes.
    gather: an all-gather of JSON values: returns the value of each process, in their order. All
      call it equally often and in the same order.
  """

  index: int = 0
  count: int = 1
  gather: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] = lambda value: [value]


@dataclasses.dataclass(frozen=True)
class Part:
  """One source of a mixture.

  Attributes:
    name: as the config gives it.
    rows: how many it has.
    tokens: how many of them its rows predict.
    maximum_epochs: how often a run may take each of its rows; 0: any number of times.
    bytes_per_token: of text, per token that is predicted.
  """

  name: str
  rows: int
  tokens: int
  maximum_epochs: int = 1
  bytes_per_token: float = 1.0


@dataclasses.dataclass(frozen=True)
class Source:
  """Rows with random access.

  Attributes:
    name: the data set and its split, for messages.
    fingerprint: hex digest; two sources with the same one have the same rows.
    rows: their number; also len(source).
    fields: field name -> (shape of one row, numpy dtype).
    read: row numbers int[N] -> field name -> the N rows stacked, in that order. Raises
      UnreadableError that names the row if one cannot be read. May be called from several threads.
    bad: the unreadable rows, which are read as zeros: known only if data.max_bad_records allows
      some.
    ids: number of token ids that its rows may contain, from 0 on; 0 without tokens.
    parts: of a mixture, its sources, whose rows are numbered one source after the other.
    stages: of a mixture, (step, source -> share of the tokens from that step on), from step 0.
    tokenizer: what they are the ids of; "": bytes.
    tokenizer_digest: two with the same one encode alike; "" where the name says it all.
    chat_template_digest: of conversations: two with the same one are written alike.
    bytes_per_token: of text, per token that is predicted.
    report: what a row index says of itself: documents, bytes, tokens, rows, padding (slots that
      hold no token), split_documents; of conversations also trained (tokens) and how many are left
      out (untrained_conversations, long_conversations); empty where there is none.
    origins: row number -> where its documents come from, such as `document 17 of a.jsonl`; [] where
      that is not known.
    prompts: of data=prompts, that of each row (`input_pipeline.text.prompts.Prompt`).
  """

  name: str
  fingerprint: str
  rows: int
  fields: dict[str, tuple[tuple[int, ...], np.dtype]]
  read: Callable[[np.ndarray], dict[str, np.ndarray]]
  bad: BadRecords = BadRecords()
  ids: int = 0
  parts: tuple[Part, ...] = ()
  stages: tuple[tuple[int, Mapping[str, float]], ...] = ()
  tokenizer: str = ""
  tokenizer_digest: str = ""
  chat_template_digest: str = ""
  bytes_per_token: float = 1.0
  report: Mapping[str, int] = dataclasses.field(default_factory=dict)
  origins: Callable[[int], list[str]] = lambda row: []
  prompts: Sequence[Any] = ()

  def __len__(self):
    return self.rows


# ------------------------------ rows of weight 0 ------------------------------


def skipping(read: Callable, bad: tuple[int, ...]) -> Callable:
  """Returns a function that reads rows as `read` does, but zeros in place of the bad ones.

  Args:
    read: row numbers int[N] -> field name -> the N rows stacked.
    bad: the numbers of the rows that are not read; their weight is 0 like all else.
  """
  bad_ids = np.array(bad, np.int64)

  def read_good(indices):
    there = ~among(indices, bad_ids)
    return spread(read(np.asarray(indices)[there]), there)

  return read_good


def among(indices: np.ndarray, ordered: np.ndarray) -> np.ndarray:
  """Returns which numbers are among `ordered`, which is ascending: bool[N]."""
  if not len(ordered):
    return np.zeros(len(indices), bool)
  places = np.searchsorted(ordered, indices)
  return ordered[np.minimum(places, len(ordered) - 1)] == indices


def spread(rows: dict[str, np.ndarray], there: np.ndarray) -> dict[str, np.ndarray]:
  """Scatters rows into zeros.

  Args:
    rows: field name -> [n, ...].
    there: bool[N], n of them True: the positions of the rows.
  """
  if there.all():
    return rows
  wide = {field: np.zeros((len(there), *r.shape[1:]), r.dtype) for field, r in rows.items()}
  for field, array in wide.items():
    array[there] = rows[field]
  return wide
