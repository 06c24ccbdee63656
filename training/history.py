"""The history of a run, `history.jsonl`: its starts, checkpoints, samples and ends, by time.

Unlike `metrics.jsonl`, nothing is dropped on resume or rollback. Nothing reads it but reports, so a
file that cannot be written, or lines that are damaged, never end a run.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from runtime import files, forms
from runtime.forms import ABOVE_0, ANY, NUMBER, STEP, TEXT, Each, Kind, Needs, OrNull, is_number
from training.metrics.console import warn
from training.metrics.log_lines import MOST_BYTES
from training.workdir_files import HISTORY

# Kinds of events: the key `event` of a line.
START, COMPILED, SAVED, SAMPLE = "start", "compiled", "saved", "sample"
ROLLED_BACK, END = "rolled_back", "end"

_COST = {"axis": TEXT, "kind": TEXT}
_PREDICTED = {
  "step_seconds": (ABOVE_0,) * 3,
  "sent": [Needs({**_COST, "seconds": NUMBER, "exposed": NUMBER})],
}
_YEAR_9999 = 253_370_764_800  # in seconds, the last that is shown as a date
FORM = Needs(
  {
    **{"event": TEXT, "step": STEP},
    "time": Kind("a time", lambda value: is_number(value) and 0 <= value < _YEAR_9999),
  },
  {
    **{"mesh": OrNull(Each(STEP)), "versions": OrNull(Each(ANY)), "bad_step": STEP, "how": TEXT},
    "collectives": [Needs({**_COST, "runs": STEP, "bytes": NUMBER})],
    "predicted": OrNull(_PREDICTED),
  },
)


class History:
  """Appends events to `history.jsonl`; only process 0 has one."""

  def __init__(
    self,
    workdir: epath.Path,
    require: Callable[[], None] = files.always,
    report: Callable[[str], None] = warn,
  ):
    """Takes an existing workdir.

    Args:
      workdir: the run's folder.
      require: raises where the run may write no longer.
      report: is called with a text once, if the file cannot be written.
    """
    self._path, self._require, self._report = workdir / HISTORY, require, report
    self._begun = False

  def add(self, event: str, step: int, **values: Any) -> None:
    """Appends an event.

    Args:
      event: its kind.
      step: the steps that were done.
      **values: further values, as JSON has them.
    """
    line = {"event": event, "step": step, "time": round(time.time(), 3), **values}
    content = files.json_text(line).encode() + b"\n"
    try:
      if not self._begun and self._is_torn():
        content = b"\n" + content  # a kill has cut the last line short
      files.append(self._path, content, require=self._require)
      self._begun = True
    except OSError as error:
      if self._report is not None:
        self._report(f"{self._path} cannot be written, training continues: {error}")
      self._report = None

  def _is_torn(self) -> bool:
    try:
      return not files.read_bytes(self._path, most_bytes=MOST_BYTES).endswith(b"\n")
    except FileNotFoundError:
      return False


def events(content: bytes) -> Iterator[dict[str, Any]]:
  """Yields the events of a file's content, without damaged lines."""
  for raw in content.split(b"\n"):
    try:
      values = files.parse_json(raw)
    except ValueError:
      continue
    if not any(forms.wrong(values, FORM)):
      yield values
