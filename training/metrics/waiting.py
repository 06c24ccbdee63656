"""Progress of long operations outside the steps: one line, on a terminal."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn, TimeElapsedColumn

from processes import preemption
from training.metrics.console import on_terminal, say

_SECONDS = 0.2  # between two looks at the clock
_LOG_SECONDS = 30.0  # between two lines where there is no terminal


class Waiting:
  """The line: what is running, how far it is, since when. It disappears when that is done."""

  def __init__(self, text: str):
    """Takes a description of the operation; `show` shows it."""
    self._text, self._began, self._looked = text, time.monotonic(), 0.0
    self._told = self._began
    self._progress: Progress | None = None
    self._task: TaskID | None = None
    self.done = ""  # how far it has come
    self.count = 0

  @contextlib.contextmanager
  def show(self) -> Iterator["Waiting"]:
    """Shows it on a terminal; a log gets a line of what has a text of its own now and then."""
    if not on_terminal():
      yield self
      return
    # The terminal itself: the operation may redirect standard output.
    console = Console(file=sys.stdout, soft_wrap=True)
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
      self._progress, self._task = progress, progress.add_task(self._text)
      with preemption.undone(progress.stop):
        yield self
    self._progress = None

  def tick(self, what: str, count: int, text: str = "") -> None:
    """Shows the progress; raises if a stop was requested.

    Args:
      what: what is counted: `rows of python_source`.
      count: so far.
      text: what to show instead of the two.

    Raises:
      Stopped: as `stopping.current()` asks.
    """
    now = time.monotonic()
    self.count, self.done = count, what
    if now - self._looked < _SECONDS:
      return
    self._looked = now
    stop = preemption.current()
    if stop:
      raise preemption.Stopped(self._text)
    if self._progress is not None:
      rate = count / max(now - self._began, 1e-3)
      text = text or f"{count:,} {what}, {rate:,.0f} per second"
      room = self._progress.console.width - 9  # for the time
      self._progress.update(self._task, description=f"{self._text}: {text}"[:room])
    elif text and now - self._told > _LOG_SECONDS:
      self._told = now
      say(f"{self._text}: {text}")


@contextlib.contextmanager
def preparing(name: str) -> Iterator[Waiting]:
  """Shows the progress of preparing a data set, and logs when it is done."""
  began = time.monotonic()
  waiting = Waiting(f"preparing {name}")
  with waiting.show():
    stop = preemption.current()
    with stop.polled() if stop is not None else contextlib.nullcontext():
      yield waiting
  if waiting.done:
    say(f"prepared {name}: {waiting.count:,} {waiting.done} in {time.monotonic() - began:.1f} s")
