"""Goodput: the wall time of a run since its first start, divided into bins."""

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from processes import preemption
from runtime.units import clock

# Bin -> what it is called. One clock runs in one of them at any time.
BINS = {
  "start": "start",  # of the process, until the steps are compiled
  "compile": "compile",
  "step": "step",
  "input_wait": "input wait",
  "save": "save",  # that the steps wait for it; the rest is in the background
  "evaluation": "evaluation",
  "lost_to_restart": "lost to restarts",  # undone steps, and the time until the next process
}
# Bins that are lost when steps are rolled back within a process.
_UNDONE = ("step", "input_wait", "save", "evaluation")


# A longer pause than this means a wrong clock, or a run that was set aside.
MOST_PAUSE_SECONDS = 7 * 24 * 3600
LEAST_SECONDS = 60.0  # of a run that the console says it of: shorter ones are mostly start
_IMPORTED = time.monotonic()
_LONGEST_IMPORT_SECONDS = 3600.0  # from the start of a process until it imports this


class Goodput:
  """Seconds per bin, summed over the starts of a run.

  Attributes:
    doubt: why the time since the last start is not counted; "" where it is.
  """

  def __init__(self, started: float, last: Mapping[str, Any] | None):
    """Begins in the bin `start`.

    Args:
      started: when the process started, on the clock of `time.monotonic`.
      last: the line of an earlier start at the step that this one resumes from. The time after it
        is lost, unless the run was done then.
    """
    self._bin, self._since = "start", started
    self._seconds, self.doubt = _bins(last), ""
    if last is not None and not last["done"]:
      pause, self.doubt = _pause(last, started)
      self._seconds["lost_to_restart"] += pause

  def switch(self, name: str) -> str:
    """Switches to a bin; returns the one until now."""
    now = time.monotonic()
    self._seconds[self._bin] += now - self._since
    former, self._bin, self._since = self._bin, name, now
    return former

  @contextlib.contextmanager
  def within(self, name: str) -> Iterator[None]:
    """Counts the time inside the block in a bin."""
    former = self.switch(name)
    try:
      yield
    finally:
      self.switch(former)

  def undo(self, last: Mapping[str, Any] | None) -> None:
    """Counts as lost the time of the steps since a line that is valid again."""
    self.switch(self._bin)
    before = _bins(last)
    for name in _UNDONE:
      self._seconds["lost_to_restart"] += self._seconds[name] - before[name]
      self._seconds[name] = before[name]

  def line(self, *, done: bool = False) -> dict[str, Any]:
    """Returns its line in `metrics.jsonl`: the share of steps, the bins, the time, whether done.

    Args:
      done: whether all steps are done: the time until the run is extended is not counted.
    """
    self.switch(self._bin)
    share = self._seconds["step"] / sum(self._seconds.values())
    return {
      "goodput": round(share, 6),
      "seconds": {name: round(value, 6) for name, value in self._seconds.items()},
      "time": time.time(),
      "done": done,
      **boot(),
    }

  def text(self) -> str:
    """Returns a line for the console; "" of a run that took less than a minute."""
    self.switch(self._bin)
    whole = sum(self._seconds.values())
    if whole < LEAST_SECONDS:
      return ""
    parts = ", ".join(f"{BINS[name]} {100 * s / whole:.1f} %" for name, s in self._seconds.items())
    return f"goodput {100 * self._seconds['step'] / whole:.1f} % of {clock(whole)}: {parts}"


def _bins(line: Mapping[str, Any] | None) -> dict[str, float]:
  """Returns the seconds per bin of a line; 0 without one."""
  known = line["seconds"] if line is not None else {}
  return {name: known.get(name, 0.0) for name in BINS}


def _pause(last: Mapping[str, Any], started: float) -> tuple[float, str]:
  """Returns the seconds from a line to the start of this process; or 0, and why not to trust them.

  Wall clocks jump. If both times are from one machine that was not rebooted in between, the time
  since boot is used; otherwise the wall clock, unless its result is impossible.
  """
  age = time.monotonic() - started
  known = boot()
  if known and last.get("boot") == known["boot"]:
    return max(0.0, known["uptime"] - age - last["uptime"]), ""
  pause = time.time() - age - last["time"]
  if 0 <= pause <= MOST_PAUSE_SECONDS:
    return pause, ""
  return 0.0, (
    f"by the clock of this machine the last line of the run was written "
    f"{clock(abs(pause))} {'after' if pause < 0 else 'before'} this process started; that is "
    f"not counted as lost to the restart"
  )


def boot() -> dict[str, Any]:
  """Returns the id of the machine's boot, and the seconds since then; {} if unknown."""
  if not hasattr(time, "CLOCK_BOOTTIME"):
    return {}
  try:
    name = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
  except OSError:
    return {}
  return {"boot": name, "uptime": round(time.clock_gettime(time.CLOCK_BOOTTIME), 6)}


def began() -> float:
  """Returns since when this process takes part in the run, on the clock of `time.monotonic`.

  That is its start, or later: where it has waited as a spare, or joined again after the death of
  another process.
  """
  return preemption.joined or process_started()


def process_started() -> float:
  """Returns when this process started, on the clock of `time.monotonic`.

  Linux gives a process's start relative to boot, like CLOCK_BOOTTIME. If that is impossible (a
  sandbox with other clocks), it is when this was imported.
  """
  if hasattr(time, "CLOCK_BOOTTIME"):
    ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    started = time.monotonic() - age  # read right after the other clock
    if _IMPORTED - _LONGEST_IMPORT_SECONDS <= started <= _IMPORTED:
      return started
  return _IMPORTED
