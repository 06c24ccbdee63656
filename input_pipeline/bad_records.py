"""The unreadable rows of a split: found when it is opened, the same on all processes.

A process reads only the rows of its devices, so none would find all bad ones, and what was found in
the steps so far would be state. So with data.max_bad_records above 0 every row is read once when
the split is opened, each process its share, and the results are merged. The list follows from the
files alone. It is stored with the rows until their file changes, so that the next start need not
read them all again.
"""

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from input_pipeline import prepare
from input_pipeline.row_store import Records, again
from runtime import files

FILE = "bad_records.json"
_LISTED = 8
_NEWS_SECONDS = 15.0


@dataclasses.dataclass(frozen=True)
class BadRecords:
  """The unreadable rows and records of a split.

  Attributes:
    rows: the numbers of the rows that get weight 0, in order.
    left_out: the numbers of omitted records of the data set: documents of a text.
    why: what is wrong with the first.
  """

  rows: tuple[int, ...] = ()
  left_out: tuple[int, ...] = ()
  why: str = ""

  def __bool__(self) -> bool:
    """Returns whether there are any."""
    return bool(self.rows or self.left_out)

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
      parts.append(f"left out: {counted(self.left_out, 'document')}: {few(self.left_out)}")
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


def counted(numbers, what: str) -> str:
  """Returns `1 row` or `2 rows`."""
  return f"{len(numbers):,} {what}{'' if len(numbers) == 1 else 's'}"


def few(numbers) -> str:
  """Returns the first of some numbers as text."""
  return ", ".join(map(str, numbers[:_LISTED])) + (", ..." if len(numbers) > _LISTED else "")


def check_prepared(store: prepare.Store, limit: int) -> None:
  """Raises ValueError if more records were bad when the data set was prepared than allowed.

  Args:
    store: a prepared store.
    limit: data.max_bad_records.
  """
  bad = store.bad_records
  if len(bad) > limit:
    raise ValueError(
      f"{store.name}: {len(bad)} records of the data set could not be read when {store.folder} was"
      f" prepared, more than data.max_bad_records={limit}: {few(bad)} ({store.why}); set it to"
      f" {len(bad)} or more to continue without them, or repair the data set and {again(store)}"
    )


def find(records: Records, limit: int, sharing: Sharing) -> BadRecords:
  """Returns the unreadable rows of a store, the same on all processes.

  Args:
    records: of the store.
    limit: data.max_bad_records, above 0.
    sharing: the processes; each calls this.

  Raises:
    ValueError: more than the limit, or every row.
  """
  store, stamp = records.store, _stamp(records.store)
  known = _load(store, stamp)
  # If each process has a copy, rows that one has found since the last check are in its own file.
  reports = sharing.gather(
    {"checked": known is not None and not known["suspects"], **(known or {})}
  )
  checked = all(each["checked"] for each in reports)
  if not checked:
    reports = sharing.gather(_share(records, known["suspects"] if known else [], limit, sharing))
  rows = tuple(sorted({row for each in reports for row in each["rows"]}))
  left_out = store.bad_records if store.manifest["kind"] == "text" else ()
  of_the_data_set = not rows or (rows[0] in store.bad_records and not left_out)
  why = store.why if of_the_data_set else next(e["why"] for e in reports if rows[0] in e["rows"])
  bad = BadRecords(rows, left_out, why)
  _check_limit(
    records, bad, len(rows) if checked else sum(each["found"] for each in reports), limit
  )
  if not checked:
    _keep(store, {"stamp": stamp, "rows": rows, "why": why, "suspects": []})
  return bad


def suspect(records: Records, rows: Mapping[int, str]) -> None:
  """Records rows that were found to be bad after the check, so that the next start checks again."""
  stamp = _stamp(records.store)
  known = _load(records.store, stamp) or {"rows": [], "why": "", "suspects": []}
  suspects = sorted({*known["suspects"], *rows})
  _keep(records.store, {**known, "stamp": stamp, "suspects": suspects})


def _share(records: Records, suspects: list[int], limit: int, sharing: Sharing) -> dict[str, Any]:
  """Reads this process's share of all rows, and the suspects; returns its findings."""
  rows, count, index = len(records), sharing.count, sharing.index
  share = range(rows * index // count, rows * (index + 1) // count)
  found: dict[int, str] = {}
  news = time.monotonic() + _NEWS_SECONDS
  for start in range(0, len(share), records.per_read):
    found |= records.unreadable(share[start : start + records.per_read])
    if time.monotonic() > news and index == 0:
      done = 100 * start / len(share)
      text = "%s: reading all rows once, %.0f %% done, %d of them bad so far"
      logging.warning(text, records.store.name, done, len(found))
      news = time.monotonic() + _NEWS_SECONDS
  count_here = len(found)
  found |= records.unreadable(suspects)
  kept = sorted(found)[: limit + 1]  # more would only make the message larger
  return {"rows": kept, "why": found[kept[0]] if kept else "", "found": count_here}


def _check_limit(records: Records, bad: BadRecords, found: int, limit: int) -> None:
  """Raises ValueError if too many are bad; `found` may count more rows than are listed."""
  store, rows = records.store, max(found, len(bad.rows))
  total = rows + len(bad.left_out)
  if total > limit:
    out = f", and {counted(bad.left_out, 'document')} could not be," if bad.left_out else ""
    raise ValueError(
      f"{store.name}: {rows:,} of {len(records):,} rows cannot be read{out or ','} more than"
      f" data.max_bad_records={limit}: rows {few(bad.rows)} of {store.rows_path} (the first:"
      f" {bad.why}); {again(store)}, or set data.max_bad_records={total} to continue without them"
    )
  if len(bad.rows) == len(records):
    raise ValueError(
      f"{store.name}: none of the {len(records):,} rows of {store.rows_path} can be read"
      f" ({bad.why}); {again(store)}"
    )


# ------------------------------ what is stored with the rows ------------------------------


def _stamp(store: prepare.Store) -> dict[str, Any]:
  """Returns values that change when the rows do."""
  path = store.rows_path
  local = "://" not in str(path)
  modified = os.stat(path).st_mtime_ns if local else path.stat().mtime
  size = store.manifest["row_file_bytes"]
  return {"digest": store.manifest["digest"], "bytes": size, "modified": modified}


def _load(store: prepare.Store, stamp: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns the findings of the last check; None if the file has changed or was never checked."""
  try:
    kept = files.read_json(store.folder / FILE, follow=True)
    known = {key: kept[key] for key in ("rows", "why", "suspects")}
    if kept["stamp"] != stamp:
      return None
  except (OSError, ValueError, KeyError, TypeError):  # torn by a kill, or written by something else
    return None
  count = store.manifest["rows"]
  numbers = all(
    isinstance(rows, list) and all(type(row) is int and 0 <= row < count for row in rows)
    for rows in (known["rows"], known["suspects"])
  )
  return known if numbers and isinstance(known["why"], str) else None


def _keep(store: prepare.Store, found: Mapping[str, Any]) -> None:
  """Writes the findings, atomically; without permission to, every start checks again."""
  try:
    files.replace(store.folder / FILE, files.json_text(dict(found)) + "\n", shared=True)
  except OSError as error:
    logging.warning(
      "%s: the list of bad rows cannot be kept in %s (%s); each start reads all rows once",
      store.name,
      store.folder,
      error,
    )


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
