"""What a run prints: progress of its steps and of what comes before, messages, durations."""

import contextlib
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from processes import preemption
from processes.coordination import current
from runtime.printable import printable

_BAR = 10  # columns
_LOOK_SECONDS = 0.2  # between two looks at the clock
_LOG_SECONDS = 30.0  # between two lines of a long operation where there is no terminal
_INDENT = "  "  # of the second line of a sentence, and of later ones


def on_terminal() -> bool:
  """Returns whether this process prints to a terminal that can rewrite a line."""
  capable = os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
  return current().first and capable and sys.stdout.isatty()


class ProgressLine:
  """A progress line that is rewritten on a terminal; plain lines without a terminal."""

  def __init__(self, steps: int):
    """Starts the line; `steps` is the number of the last step."""
    self._steps, self._newest = steps, ""
    self._bar, self._undone = None, contextlib.ExitStack()
    if on_terminal():
      columns = (BarColumn(bar_width=_BAR), TextColumn("{task.fields[text]}"))
      # Output of other threads (on a signal) does not go through the bar: rich's redirection is not
      # thread-safe, and has ended in a RecursionError.
      self._bar = Progress(
        *columns,
        console=Console(soft_wrap=True),
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
      )
      self._task = self._bar.add_task("", total=steps, text="")
      self._bar.start()
      # It hides the cursor, which must come back however the run ends.
      self._undone.enter_context(preemption.undone(self._bar.stop))

  def __enter__(self) -> "ProgressLine":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Leaves the last line on the terminal."""
    self._undone.close()
    if self._bar is not None:
      self._bar.stop()

  def update(self, step: int, parts: Sequence[str], least: Sequence[str] = ()) -> None:
    """Shows the newest numbers.

    Args:
      step: the number of the step.
      parts: of the line, in order.
      least: those to leave out on a narrow terminal, the first one first.
    """
    if self._bar is None:
      say("  ".join(parts))
    else:
      self._newest = fitting(parts, least, self._bar.console.width - _BAR - 2)
      self._bar.update(self._task, completed=step, text=self._newest, refresh=True)

  @contextlib.contextmanager
  def saving(self, step: int) -> Iterator[None]:
    """Shows on a terminal that the end of a save is waited for."""
    if self._bar is None:
      yield
      return
    self._bar.update(self._task, text=f"saving step {step}", refresh=True)
    yield
    self._bar.update(self._task, text=self._newest, refresh=True)

  def evaluating(self, done: int, count: int, *, alone: bool = False) -> None:
    """Shows on a terminal how many batches of an evaluation are done.

    Args:
      done: batches.
      count: of all batches.
      alone: the bar shows the evaluation too, not the steps of a training run.
    """
    if self._bar is not None:
      text, completed = f"evaluation: batch {done}/{count}", {"completed": done} if alone else {}
      self._bar.update(self._task, text=text, refresh=True, **completed)

  def note(self, text: str) -> None:
    """Prints a line that stays, above the progress line."""
    if self._bar is None:
      say(text)
    else:
      lines = wrapped(printable(text), self._bar.console.width)
      self._bar.console.print(lines, highlight=False, markup=False)


def fitting(parts: Sequence[str], least: Sequence[str], width: int) -> str:
  """Returns parts as one line of at most `width` columns; leaves out those of `least`, in order."""
  kept, out = [*parts], [*least]
  while len(text := "  ".join(kept)) > width and out:
    kept.remove(out.pop(0))
  return text[: max(width, 1)]


def say(text: str) -> None:
  """Prints a line on process 0, and flushes it.

  If the reader of a pipe has ended (in `| tee FILE` Ctrl-C ends tee as well), the run stops as if
  requested, and saves: an error here would lose its work.
  """
  if not current().first:
    return
  try:
    print(printable(text, longest=sys.maxsize), flush=True)
  except BrokenPipeError:
    preemption.output_closed()


def say_wrapped(text: str) -> None:
  """Prints sentences as `say` does; a terminal's lines break between words."""
  columns = shutil.get_terminal_size().columns
  say(wrapped(text, columns) if on_terminal() else text)


def wrapped(text: str, columns: int) -> str:
  """Returns text whose lines break between words, where they are longer than a terminal's."""
  return "\n".join(
    part
    for line in text.split("\n")
    for part in textwrap.wrap(
      line,
      columns,
      subsequent_indent=_INDENT,
      break_long_words=False,
      break_on_hyphens=False,
      drop_whitespace=True,
    )
    or [""]
  )


def warn(text: str) -> None:
  """Prints a warning to standard error on process 0, and flushes it."""
  if current().first:
    print(f"WARNING: {printable(text)}", file=sys.stderr, flush=True)


# ------------------------------ long operations ------------------------------


class Waiting:
  """The line of a long operation outside the steps: what is running, how far it is, since when.

  It disappears when that is done.
  """

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
    if now - self._looked < _LOOK_SECONDS:
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
