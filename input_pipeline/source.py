"""A Source: the rows of one split, by number."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from input_pipeline.bad_records import BadRecords
from input_pipeline.order import Part

_NONE = BadRecords()


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
  """

  name: str
  fingerprint: str
  rows: int
  fields: dict[str, tuple[tuple[int, ...], np.dtype]]
  read: Callable[[np.ndarray], dict[str, np.ndarray]]
  bad: BadRecords = _NONE
  ids: int = 0
  parts: tuple[Part, ...] = ()
  stages: tuple[tuple[int, Mapping[str, float]], ...] = ()
  tokenizer: str = ""
  tokenizer_digest: str = ""
  chat_template_digest: str = ""
  bytes_per_token: float = 1.0
  report: Mapping[str, int] = dataclasses.field(default_factory=dict)
  origins: Callable[[int], list[str]] = lambda row: []

  def __len__(self):
    return self.rows
