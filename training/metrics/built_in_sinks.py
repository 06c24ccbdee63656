"""The project's own sinks: a CSV file, and experiment trackers, each in a process of its own.

A tracker's package may print, hang, replace `sys.exit`, or need other versions of our libraries. In
a process of its own (tracker.py) it cannot harm the run, which never waits for it but at its end,
for at most `metrics.sink_wait_seconds`.
"""

import contextlib
import csv
import io
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from processes import preemption
from runtime import files, forms
from training.metrics import log_lines
from training.metrics.log_lines import LogFile

SCRIPT = pathlib.Path(__file__).with_name("tracker.py")
STATES = "sinks.json"
_STOPPING_SECONDS = 5.0  # the longest wait where the run was asked to stop
_PAUSE_SECONDS = 0.05
CSV_FILE = "metrics.csv"


class CsvSink:
  """Rows with a cell for each metric that any row so far has; empty where a row has none.

  Like metrics.jsonl it has the rows of steps that count: after a resume or a rollback, rows of
  later steps are gone. A full disk is waited for, as by metrics.jsonl.
  """

  def __init__(self, workdir: epath.Path, step: int):
    """Writes the rows of metrics.jsonl up to a step; see `sinks.SINKS` for the arguments."""
    lines, _ = log_lines.split(LogFile(workdir / log_lines.FILE).read())
    kept = [
      one.values for one in lines if not {log_lines.TIMES, log_lines.ROLLED_BACK} & {*one.values}
    ]
    self._rows: list[Mapping[str, Any]] = [row for row in kept if row["step"] <= step]
    self._columns: list[str] = ["step"]
    self._file = LogFile(workdir / CSV_FILE)
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


class SinkError(Exception):
  """A sink has failed; the message says why, without the place in the code."""


class TrackerSink:
  """A tracker's process, and which lines it has had.

  A tracker cannot forget. After a resume, lines of metrics.jsonl that were dropped come again, and
  those with the same numbers are not sent again. A line with other numbers, as after a rollback,
  is sent, and is the newer one of its step.
  """

  def __init__(self, name: str, config: Any, workdir: epath.Path, step: int):
    """Starts the process; see `sinks.SINKS` for the arguments."""
    self._name, self._workdir, self._config = name, workdir, config.metrics
    self._news: list[str] = []
    self._finished: float | None = None
    states = _states(workdir) if step else {}  # a run that starts from scratch is another one
    self._sent = {}
    if name in states:
      lines, _ = log_lines.split(LogFile(workdir / log_lines.FILE).read())
      self._sent = dict(_compared(one.values["step"], one.values) for one in lines)
    folder = workdir.parent if files.is_local(workdir) else epath.Path.cwd()
    start = {
      "project": config.metrics.project,
      "name": config.metrics.run_name or workdir.name,
      "folder": os.path.abspath(folder),
      "config": forms.flat(forms.plain(config)),
      "state": states.get(name),
      "wait_seconds": config.metrics.sink_wait_seconds,
    }
    path = workdir / f"sink_{name}.log"
    self._see = f" (see {path})" if files.is_local(workdir) else ""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    own = files.open_plain(path, flags) if self._see else os.open(os.devnull, flags)
    with os.fdopen(own, "ab") as log:
      self._process = subprocess.Popen(
        [config.metrics.sinks_python or sys.executable, "-u", "-P", SCRIPT, name],
        bufsize=0,  # a thread that waits holds no lock, which would be waited for at the end
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,  # Ctrl-C in the terminal is for the run
      )
    self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # to send; b"" ends them
    self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    self._send(start)
    for waiting in (self._feed, self._listen):
      threading.Thread(target=waiting, daemon=True).start()

  def _send(self, message: Any) -> None:
    self._lines.put(json.dumps(message).encode() + b"\n")

  def _feed(self) -> None:
    with contextlib.suppress(OSError), self._process.stdin as pipe:  # OSError: it has ended
      while line := self._lines.get():
        while line:
          line = line[pipe.write(line) :]

  def _listen(self) -> None:
    with self._process.stdout as pipe:
      for line in pipe:
        self._messages.put(json.loads(line))
    self._messages.put({"error": f"its process has ended with code {self._process.wait()}"})

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Sends a line, unless the tracker has it; raises SinkError if the process has failed."""
    while not self._messages.empty():
      self._take(self._messages.get())
    key, main = _compared(step, values)
    if main is None or self._sent.pop(key, None) != main:
      self._send((step, dict(values)))

  def on_rollback(self, step: int) -> None:
    """Sends a mark: lines of later steps that came before it are no longer valid."""
    self._send((step, {log_lines.ROLLED_BACK: 1.0}))

  def news(self) -> list[str]:
    """Returns what the tracker has said since the last call: where to look at the run."""
    found, self._news = self._news, []
    return found

  def finish(self) -> None:
    """Sends the end of the lines; from here on counts the time that `close` waits."""
    if self._finished is None:
      self._finished = time.monotonic()
      self._lines.put(b"")

  def close(self) -> None:
    """Waits until all lines are delivered, for a limited time; raises SinkError otherwise."""
    self.finish()
    done = False
    try:
      while not done:
        try:
          done = self._take(self._messages.get(timeout=_PAUSE_SECONDS))
        except queue.Empty:
          if self._late():
            seconds = f"{self._wait_seconds():g} s{self._see}"
            raise SinkError(f"it has not delivered all lines within {seconds}") from None
      while self._process.poll() is None and not self._late():
        time.sleep(_PAUSE_SECONDS)
    finally:
      self.kill()

  def _wait_seconds(self) -> float:
    stop, seconds = preemption.current(), self._config.sink_wait_seconds
    return min(seconds, _STOPPING_SECONDS) if stop else seconds

  def _late(self) -> bool:
    return time.monotonic() > self._finished + self._wait_seconds()

  def kill(self) -> None:
    """Ends the process, those that it has started, and the threads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    self._lines.put(b"")

  def _take(self, message: Mapping[str, Any]) -> bool:
    """Returns whether a message is the last one; raises SinkError for one that is an error."""
    if "error" in message:
      raise SinkError(f"{message['error']}{self._see}")
    if "state" in message:
      states = {**_states(self._workdir), self._name: message["state"]}
      files.replace(self._workdir / STATES, files.json_text(states, indent=2) + "\n")
      self._news.append(f"{self._name}: {message['note']}")
    return "done" in message


def _states(workdir: epath.Path) -> dict[str, Any]:
  """Returns name -> state of the trackers' runs; {} where the file is missing or damaged."""
  try:
    found = files.read_json(workdir / STATES)
  except (OSError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}


def _compared(step: int, values: Mapping[str, Any]) -> tuple[tuple[int, bool], Any]:
  """Returns what a line is about (a step, or an evaluation after it), and its main number."""
  return (step, "eval_loss" in values), values.get("eval_loss", values.get("loss"))
