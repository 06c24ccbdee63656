"""Lines that are typed in a terminal, each answered as it is generated; Ctrl-C ends the answer."""

import contextlib
import sys
import termios
import time
from collections.abc import Callable, Iterator

from commands import help
from processes import preemption
from processes.preemption import AGAIN_SECONDS, StopRequest
from runtime.printable import printable

_ASK = "> "


class _Interrupts:
  """Ctrl-C: it ends the answer that is being generated; where none is, the dialogue.

  Attributes:
    cut: whether the answer is to end.
  """

  def __init__(self):
    self.cut, self._generating, self._ended = False, False, -AGAIN_SECONDS

  @contextlib.contextmanager
  def generating(self) -> Iterator[None]:
    """Inside it, Ctrl-C ends the answer."""
    self.cut, self._generating = False, True
    try:
      yield
    finally:
      self._generating = False

  def take(self) -> bool:
    """Returns whether a Ctrl-C has been dealt with; of one that arrives twice, the second, too."""
    now = time.monotonic()
    if not self._generating:
      return now - self._ended < AGAIN_SECONDS
    self.cut, self._ended = True, now
    return True


def hold(
  stop: StopRequest,
  explanation: str,
  answer: Callable[[str, Callable[[], bool]], str],
) -> None:
  """Reads lines from standard input, and answers them, to its end.

  Args:
    stop: of this process.
    explanation: printed at first, in a terminal.
    answer: takes a line, and a function that says whether the answer is to end; prints it, and
      returns what to say of it in a terminal: how fast it was. Its ValueErrors are printed.
  """
  terminal, interrupts = sys.stdin.isatty(), _Interrupts()
  if terminal:
    import readline  # noqa: F401 editing and history of lines, for `input`

    print(explanation, flush=True)
  with stop.interrupts(interrupts.take), _terminal_restored(terminal):
    for line in _lines(terminal):
      try:
        with interrupts.generating():
          said = answer(line, lambda: interrupts.cut)
      except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr, flush=True)
        continue
      if terminal and said:
        print(help.styles(sys.stdout).dim(f"[{said}]"), flush=True)


def _lines(terminal: bool) -> Iterator[str]:
  while True:
    try:
      yield input(_ASK if terminal else "")
    except EOFError:
      if terminal:
        print()
      return
    except UnicodeDecodeError as error:
      print(f"error: that is not valid UTF-8 ({error})", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _terminal_restored(terminal: bool) -> Iterator[None]:
  """Restores the terminal where the process is ended while a line is edited."""
  if not terminal:
    yield
    return
  number = sys.stdin.fileno()
  mode = termios.tcgetattr(number)
  with preemption.undone(lambda: termios.tcsetattr(number, termios.TCSANOW, mode)):
    yield
