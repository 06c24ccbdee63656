"""The unreadable records of a split: found when it is opened, the same on all processes.

A process reads only the rows of its devices, so none would find all bad ones, and what was found in
the steps so far would be state. So with data.max_bad_records above 0 every record is read once when
the split is opened, each process its share, and the results are merged. The list follows from the
files alone. It is kept beside the shards until their files change, so that the next start need not
read them all again.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from input_pipeline import store
from input_pipeline.source import Sharing
from runtime import files, forms

_RECORDS_PER_READ = 512
_NEWS_SECONDS = 15.0
_FORM = forms.Needs({"stamp": forms.TEXT, "records": [forms.COUNT], "why": forms.TEXT})


def find(prepared: store.Prepared, name: str, sharing: Sharing) -> tuple[list[int], str]:
  """Returns the unreadable records of shards, the same on all processes; each calls this.

  Args:
    prepared: the shards.
    name: of the split, for messages.
    sharing: the processes.

  Returns:
    The numbers of the records, ascending, and what is wrong with the first.
  """
  path, stamp = _list_path(prepared), _stamp(prepared.documents.shards)
  known = _load(path, prepared.documents.records)
  reports = sharing.gather({**known, "checked": known["stamp"] == stamp})
  checked = all(each["checked"] for each in reports)
  if not checked:
    # If each process has a copy, records that one has found since the last check are in its list.
    reports = sharing.gather(_read_share(prepared.documents, known["records"], name, sharing))
  records = sorted({number for each in reports for number in each["records"]})
  why = next((each["why"] for each in reports if records[:1] == each["records"][:1]), "")
  if not checked:
    _keep(path, {"stamp": stamp, "records": records, "why": why})
  return records, why


def suspect(prepared: store.Prepared, records: Iterable[int]) -> None:
  """Notes records that went bad after the check, so that the next start checks again."""
  path = _list_path(prepared)
  known = _load(path, prepared.documents.records)
  _keep(path, {**known, "stamp": "", "records": sorted({*known["records"], *records})})


def _read_share(
  documents: store.Documents, suspects: Sequence[int], name: str, sharing: Sharing
) -> dict[str, Any]:
  """Reads this process's share of all records, and the suspects; returns its findings."""
  records, count, index = documents.records, sharing.count, sharing.index
  start, stop = records * index // count, records * (index + 1) // count
  found = documents.unreadable(np.array(suspects, np.int64))
  news = time.monotonic() + _NEWS_SECONDS
  for first in range(start, stop, _RECORDS_PER_READ):
    found |= documents.unreadable(np.arange(first, min(first + _RECORDS_PER_READ, stop)))
    if time.monotonic() > news and index == 0:
      done = 100 * (first - start) / (stop - start)
      text = "%s: reading all records once, %.0f %% done, %d of them bad so far"
      logging.warning(text, name, done, len(found))
      news = time.monotonic() + _NEWS_SECONDS
  numbers = sorted(found)
  return {"records": numbers, "why": found[numbers[0]] if numbers else ""}


# ------------------------------ the list beside the shards ------------------------------


def _list_path(prepared: store.Prepared) -> epath.Path:
  names = "".join(shard.folder.name for shard in prepared.documents.shards)
  return prepared.folder / f"bad_records-{hashlib.sha256(names.encode()).hexdigest()[:16]}.json"


def _stamp(shards: Sequence[store.Shard]) -> str:
  """Returns what changes where one of the files of tokens does."""
  facts = []
  for shard in shards:
    path = shard.folder / store.TOKENS
    local = files.is_local(path)
    facts.append([shard.digest, os.stat(path).st_mtime_ns if local else path.stat().mtime])
  return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _load(path: epath.Path, count: int) -> dict[str, Any]:
  """Returns what the last check found of so many records; with the stamp "" if there was none."""
  try:
    kept = files.read_json(path, follow=True)
    forms.check(kept, _FORM, str(path))
    if all(number < count for number in kept["records"]):
      return kept
  except (OSError, ValueError):  # not there, torn by a kill, or written by something else
    pass
  return {"stamp": "", "records": [], "why": ""}


def _keep(path: epath.Path, found: Mapping[str, Any]) -> None:
  """Writes the findings, atomically; without permission to, every start checks again."""
  try:
    files.replace(path, files.json_text(dict(found)) + "\n", shared=True)
  except OSError as error:
    text = "the list of bad records %s cannot be kept (%s); each start reads all records once"
    logging.warning(text, path, error)
