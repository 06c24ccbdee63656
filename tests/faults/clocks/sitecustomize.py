"""Makes the wall clock jump in a process: Python imports this file from PYTHONPATH by itself.

The application knows nothing of it. FAULTS_CLOCK says how many seconds after the start of the
process the clock jumps, and how far: `12.5:-3600`. The other clocks are left alone.
"""

import os
import time


def _jump(after: float, seconds: float) -> None:
  wall, wall_ns, began = time.time, time.time_ns, time.monotonic()

  def jumped() -> bool:
    return time.monotonic() - began >= after

  time.time = lambda: wall() + seconds * jumped()
  time.time_ns = lambda: wall_ns() + int(seconds * 1e9) * jumped()


if os.environ.get("FAULTS_CLOCK"):
  _jump(*map(float, os.environ["FAULTS_CLOCK"].split(":")))
