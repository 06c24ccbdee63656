"""Detects whether a long operation makes progress, in a separate thread."""

import contextlib
import threading
import time
from collections.abc import Callable, Hashable

PERIOD_SECONDS = 0.5

Measure = Callable[[], Hashable]


class Progress:
  """Compares successive results of a measure.

  In a separate daemon thread that nothing waits for, since reading a disk that hangs does not
  return. Failures are ignored: files disappear while they are counted.
  """

  def __init__(self):
    """Measures nothing yet."""
    self._measure: Measure | None = None
    self._moved = 0.0
    self._wanted, self._closed = threading.Event(), False
    self._thread: threading.Thread | None = None

  def measure(self, measure: Measure | None) -> None:
    """Sets what is measured from now on; None for nothing."""
    self._moved, self._measure = 0.0, measure
    if measure is None:
      self._wanted.clear()
      return
    self._wanted.set()
    if self._thread is None:
      self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
      self._thread.start()

  def since(self, began: float) -> float:
    """Returns when the last progress was seen, and not before `began`; by the monotonic clock."""
    return max(began, self._moved)

  def close(self) -> None:
    """Lets the thread end, without waiting for it."""
    self._closed = True
    self._wanted.set()

  def _run(self) -> None:
    before: tuple[Measure | None, Hashable] = (None, None)
    while self._wanted.wait() and not self._closed:
      measure = self._measure
      with contextlib.suppress(OSError):
        if measure is not None:
          found = (measure, measure())
          if found[0] == before[0] and found != before and measure == self._measure:
            self._moved = time.monotonic()
          before = found
      time.sleep(PERIOD_SECONDS)
