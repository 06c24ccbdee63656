"""The sink `csv`: metrics.csv, a row per line of metrics.jsonl and a column per metric."""

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from training.metrics import log_lines
from training.metrics.append_log import Lines

FILE = "metrics.csv"


class CsvSink:
  """Rows with a cell for each metric that any row so far has; empty where a row has none.

  Like metrics.jsonl it has the rows of steps that count: after a resume or a rollback, rows of
  later steps are gone. A full disk is waited for, as by metrics.jsonl.
  """

  def __init__(self, config: Any, workdir: epath.Path, step: int):
    """Writes the rows of metrics.jsonl up to a step; see `sinks.SINKS` for the arguments."""
    del config
    lines, _ = log_lines.split(Lines(workdir / log_lines.FILE).read())
    kept = [
      one.values for one in lines if not {log_lines.TIMES, log_lines.ROLLED_BACK} & {*one.values}
    ]
    self._rows: list[Mapping[str, Any]] = [row for row in kept if row["step"] <= step]
    self._columns: list[str] = ["step"]
    self._file = Lines(workdir / FILE)
    self._rewrite()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Appends a row; a metric that is new rewrites the file with its column."""
    row = {"step": step, **values}
    self._rows.append(row)
    if row.keys() <= {*self._columns}:
      self._file.append(self._text([row]))
    else:
      self._rewrite()

  def on_rollback(self, step: int) -> None:
    """Drops the rows of later steps."""
    self._rows = [row for row in self._rows if row["step"] <= step]
    self._rewrite()

  def close(self) -> None:
    """Writes what a full disk has not taken; raises OSError if it still does not."""
    self._file.flush()
    if self._file.waiting:
      raise OSError(self._file.waiting)

  def _rewrite(self) -> None:
    self._columns = [
      *dict.fromkeys(name for row in [dict.fromkeys(self._columns), *self._rows] for name in row)
    ]
    header = dict(zip(self._columns, self._columns, strict=True))
    self._file.replace([self._text([header, *self._rows])])

  def _text(self, rows: Iterable[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
