"""The clocks of the processes' machines."""

import time
from collections.abc import Callable, Iterator

from diagnosis.finding import Finding, ok, warning, wrong
from processes.coordination import Group

_APART_SECONDS, _FAR_SECONDS = 1.0, 300.0


def check(
  group: Group, *, timeout_seconds: float, clock: Callable[[], float] = time.time
) -> Iterator[Finding]:
  """Yields how far the clocks are apart: read as a barrier opens, within some milliseconds.

  Args:
    group: the processes; all call this.
    timeout_seconds: how long the slowest may take to arrive.
    clock: seconds since 1970.
  """
  if group.alone:
    return
  group.wait("clocks", timeout_seconds=timeout_seconds)
  mine = clock()
  seen = group.gather("clocks read", {"clock": mine}, timeout_seconds=timeout_seconds)
  times = [each["clock"] for each in seen]
  first, last = min(times), max(times)
  text = (
    f"clocks of {group.count} processes: {last - first:.2f} s apart"
    if last - first <= _APART_SECONDS
    else f"process {times.index(last)}'s clock is {last - first:,.0f} s ahead of process "
    f"{times.index(first)}'s"
  )
  if last - first > _FAR_SECONDS:
    yield wrong(text, "synchronize the machines' clocks (NTP): buckets refuse tokens of such times")
  elif last - first > _APART_SECONDS:
    yield warning(text, "synchronize the machines' clocks (NTP); logs cannot be put in order so")
  else:
    yield ok(text)
