"""Kills the processes of a launcher that was killed itself.

The launcher starts this file with a pipe on its standard input; the kernel closes the pipe however
the launcher ends. Linux's PR_SET_PDEATHSIG would be shorter, but it does not reach grandchildren (a
shell in between, data workers), and only Linux has it.

Each line is `+ID` (a session began) or `-ID` (it has ended, and its id may be reused). The
processes themselves write the first, between fork and exec, while they have the pipe's other end
open. So at no moment does a process run while the pipe is closed and its line is missing. A process
that moves to another session (`setsid`, a daemon) is out of reach, intentionally.
"""

import contextlib
import os
import signal
import sys
import time

import psutil

ROUNDS = 100
ROUND_SECONDS = 0.02


def kill_session(session: int) -> None:
  """Kills all processes of a session, including those forked in the meantime.

  Sessions and not process groups, because `timeout`, `mpirun` and shells with job control create
  their own groups. It gives up on processes that survive SIGKILL (a driver that hangs) after 2 s.
  """
  assert session > 1, session
  for _ in range(ROUNDS):
    alive = [pid for pid in psutil.pids() if _runs_in(session, pid)]
    if not alive:
      return
    for pid in alive:
      with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    time.sleep(ROUND_SECONDS)


def _runs_in(session: int, pid: int) -> bool:
  try:
    return os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  except (OSError, psutil.Error):
    return False  # it has ended, or belongs to another user


def main() -> None:
  """Reads the running sessions until the pipe closes, then kills them."""
  # It has its own session, but a service manager signals every process that it started.
  for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  sessions = set()
  for line in sys.stdin.buffer:
    (sessions.add if line[:1] == b"+" else sessions.discard)(int(line[1:]))
  for session in sessions:
    kill_session(session)


if __name__ == "__main__":
  main()
