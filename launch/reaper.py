"""Kills what a launcher left behind when it was killed itself.

The launcher starts this file with a pipe on its standard input and never needs to say goodbye: the
kernel closes the pipe however the launcher ends. Linux's PR_SET_PDEATHSIG would be shorter, but it
reaches no grandchildren (a shell in between, data workers), and only Linux has it.

Each line that comes is `+ID` (a session began) or `-ID` (it has ended, its id may be anyone's).
The processes themselves write the first, between fork and exec, while they hold the pipe's other
end. So there is no moment in which a process runs, the pipe is closed and its line is missing.
What moves into yet another session (`setsid`, a daemon) is out of reach, and means to be.
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
  """Kills all processes of a session, also those that are forked meanwhile.

  Sessions and not process groups, because `timeout`, `mpirun` and shells with job control make
  groups of their own. It gives up on what survives SIGKILL (a driver that hangs) after 2 s.
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
    return False  # it has ended, or is none of ours


def main() -> None:
  """Reads who runs until the pipe closes, then kills those."""
  # It has a session of its own, but a service manager signals all that it started.
  for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  sessions = set()
  for line in sys.stdin.buffer:
    (sessions.add if line[:1] == b"+" else sessions.discard)(int(line[1:]))
  for session in sessions:
    kill_session(session)


if __name__ == "__main__":
  main()
