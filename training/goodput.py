"""Where the wall time of a run goes, from its first start on: every second is in one bin."""

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from training.reporting import duration

# Bin -> what it is called. One clock runs in one of them at any time.
BINS = {
  "start": "start",  # of the process, until the steps are compiled
  "compile": "compile",
  "step": "step",
  "input_wait": "input wait",
  "save": "save",  # that the steps wait for it; the rest is in the background
  "evaluation": "evaluation",
  "lost_to_restart": "lost to restart",  # undone steps, and the time until the next process
}
# What is lost where steps are undone within a process.
_UNDONE = ("step", "input_wait", "save", "evaluation")


class Goodput:
  """Seconds per bin, summed over the starts of a run."""

  def __init__(self, started: float, last: Mapping[str, Any] | None):
    """Begins in the bin `start`.

    Args:
      started: when the process started, in seconds since the epoch.
      last: what an earlier start has written at the step that this one goes on from. What came
        after it is lost, unless it was the end of a run that was done.
    """
    now = time.monotonic()
    self._epoch = time.time() - now
    self._bin, self._since = "start", started - self._epoch
    self._seconds = dict.fromkeys(BINS, 0.0)
    if last is not None:
      self._seconds.update(last["seconds"])
      if not last["done"]:
        self._seconds["lost_to_restart"] += max(0.0, started - last["time"])

  def switch(self, name: str) -> str:
    """Goes on in a bin; returns the one until now."""
    now = time.monotonic()
    self._seconds[self._bin] += now - self._since
    former, self._bin, self._since = self._bin, name, now
    return former

  @contextlib.contextmanager
  def within(self, name: str) -> Iterator[None]:
    """Is in a bin for a while."""
    former = self.switch(name)
    try:
      yield
    finally:
      self.switch(former)

  def undo(self, last: Mapping[str, Any] | None) -> None:
    """Counts as lost what the steps took since a line was written that stands again."""
    self.switch(self._bin)
    before = last["seconds"] if last is not None else dict.fromkeys(BINS, 0.0)
    for name in _UNDONE:
      self._seconds["lost_to_restart"] += self._seconds[name] - before[name]
      self._seconds[name] = before[name]

  def line(self, *, done: bool = False) -> dict[str, Any]:
    """Returns what `metrics.jsonl` says: the share of steps, all seconds, when, and if at the end.

    Args:
      done: whether all steps are done: the time until somebody asks for more is not the run's.
    """
    self.switch(self._bin)
    share = self._seconds["step"] / sum(self._seconds.values())
    return {
      "goodput": round(share, 6),
      "seconds": {name: round(value, 6) for name, value in self._seconds.items()},
      "time": self._epoch + self._since,
      "done": done,
    }

  def text(self) -> str:
    """Returns a line for people."""
    self.switch(self._bin)
    whole = sum(self._seconds.values())
    parts = ", ".join(f"{BINS[name]} {100 * s / whole:.1f} %" for name, s in self._seconds.items())
    return f"goodput {100 * self._seconds['step'] / whole:.1f} % of {duration(whole)}: {parts}"


def process_started() -> float:
  """Returns when this process started, in seconds since the epoch.

  Linux counts it from the machine's own start, which psutil knows to the second only: so the
  process's age is read from the clock that began with the machine.
  """
  known = psutil.Process().create_time()
  if not hasattr(time, "CLOCK_BOOTTIME"):
    return known
  ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
  age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
  started = time.time() - age
  return started if abs(started - known) < 2 else known  # another clock than the process's
