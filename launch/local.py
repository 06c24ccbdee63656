"""Starts the processes of one run on this machine, merges their logs, and leaves none behind.

python -m launch.local --processes=2 [--restarts=0] [--grace_seconds=30] [--report=FILE]
  -- python main.py ...

Each process sees JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. When one fails, it
is named, its last lines are repeated (unless SIGKILL ended it), and the others are ended. SIGTERM,
Ctrl-C and a closed output are passed on as SIGTERM, so that the run saves; a second Ctrl-C (a
second or more after the first was announced), or --grace_seconds, kills.
SIGTERM goes to each process alone, not to its children: a shell in between must `exec`.

--restarts=N runs the same command again after exit code 1, 75 or death by a signal.
--report=FILE appends two lines of JSON for each start: {"pids": [...]} when all processes have
started, {"codes": [...], "killed": [...]} when they have ended: exit codes (128 + n for signal n),
and the indices of those that the launcher ended.

Exit codes: 0 all ended well; that of the process that failed first, and 128 + n where signal n
killed it; 75 stopped after saving; 128 + n asked to stop by signal n and killed; 2 bad usage; 1 the
machine has no memory or process ids left now.
"""

import signal
import time

# The signals by which the launcher was asked to stop, and when Ctrl-C came, by the monotonic clock.
asked: list[int] = []
interrupts: list[float] = []


def ask(number: int, frame: object) -> None:
  """Records a signal, which the main loop handles."""
  asked.append(number)
  if number == signal.SIGINT:
    interrupts.append(time.monotonic())


if __name__ == "__main__":  # before slow imports, so that Ctrl-C works during them
  signal.signal(signal.SIGTERM, ask)
  signal.signal(signal.SIGINT, ask)

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import sys

import psutil

from launch import logs, reaper, room
from runtime.exit_codes import DONE, FAILED, REFUSED, STOPPED, retryable

RESTARTABLE = (FAILED, STOPPED)  # and death by signals

# After the first failure the others may be about to print their own diagnosis. They can no longer
# save, which takes all processes.
OWN_END_SECONDS = 4
TERMINATE_SECONDS = 2
UNKILLABLE_SECONDS = 10
# Peers of a dead process end by SIGABRT. Their sockets close before the kernel reports the death.
SETTLE_SECONDS = 0.5
RESTART_PAUSE_SECONDS = 1
# A Ctrl-C that comes sooner than this after the first was announced is the same one, which a
# wrapper has passed on, too.
AGAIN_SECONDS = 1.0


@dataclasses.dataclass
class Process:
  """One of the processes.

  Attributes:
    code: None while it runs, then as in Popen: negative for a signal.
    pressed: the last signal that the launcher sent to end it.
  """

  index: int
  popen: subprocess.Popen
  info: psutil.Process
  output: logs.Output
  code: int | None = None
  pressed: signal.Signals | None = None

  def how(self) -> str:
    """Returns how it ended."""
    if self.code >= 0:
      return f"exit code {self.code}"
    return f"signal {signal_name(-self.code)} ({-self.code})"


def signal_name(number: int) -> str:
  """Returns the name of a signal; real-time signals have none."""
  try:
    return signal.Signals(number).name
  except ValueError:
    return "without a name"


class Attempt:
  """One start of all processes, until all have ended.

  A context manager, which leaves no process behind.
  """

  def __init__(self, options: argparse.Namespace, asked: list[int], log: logs.Logs):
    """Starts nothing but the reaper.

    Args:
      options: what `parse` returns.
      asked: the signals by which the launcher was asked to stop; grows while this runs.
      log: where the outputs go.
    """
    self._options = options
    self._asked = asked
    self._heard, self._announced = 0, math.inf
    self._log = log
    self._processes: list[Process] = []
    self._first: Process | None = None  # that failed
    self._terminate_at = math.inf
    self._kill_at = math.inf
    # A separate file, so that killing by the pattern launch.local does not kill it too.
    self._reaper = subprocess.Popen(
      [sys.executable, pathlib.Path(reaper.__file__)],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      bufsize=0,
      start_new_session=True,
    )

  def __enter__(self) -> "Attempt":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Kills running processes, and merges the rest of their output."""
    for process in self._alive():
      reaper.kill_session(process.popen.pid)
    self._log.drain([process.output for process in self._processes])
    self._log.close()
    self._reaper.stdin.close()
    self._reaper.wait()

  def start(self) -> None:
    """Starts the processes.

    Raises:
      OSError: the command cannot be started.
    """
    count = self._options.processes
    address, token = f"localhost:{free_port()}", secrets.token_hex(32)
    for index in range(count):
      if self._asked:  # the started ones wait for the others: there is nothing to save
        self._log.say(f"{index} of {count} processes were started; nothing has begun")
        return
      popen = subprocess.Popen(
        self._options.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={
          **os.environ,
          "JAX_COORDINATOR_ADDRESS": address,
          "JAX_NUM_PROCESSES": str(count),
          "JAX_PROCESS_ID": str(index),
          "MESHWRIGHT_TOKEN": token,  # signs their messages
          "PYTHONUNBUFFERED": "1",
          "PYTHONFAULTHANDLER": "1",  # a peer's SIGABRT then shows where it was
        },
        start_new_session=True,  # the terminal's Ctrl-C reaches the launcher alone
        # Safe, as the launcher has one thread. The reaper says why the process does this itself.
        preexec_fn=lambda: os.write(self._reaper.stdin.fileno(), b"+%d\n" % os.getpid()),
      )
      output = self._log.add(index, popen)
      self._processes.append(Process(index, popen, psutil.Process(popen.pid), output))
    pids = ", ".join(str(process.popen.pid) for process in self._processes)
    self._log.say(f"started {count} processes (pid {pids}), coordinator {address}")
    self._report(pids=[process.popen.pid for process in self._processes])

  def wait(self) -> int:
    """Waits until no process is left, and returns the launcher's exit code."""
    while self._alive() and time.monotonic() < self._kill_at + UNKILLABLE_SECONDS:
      self._log.pump(logs.POLL_SECONDS)
      self._hear()
      self._notice()
      self._press()
    codes = [None if p.code is None else _exit_code(p.code) for p in self._processes]
    self._report(codes=codes, killed=[p.index for p in self._processes if p.pressed])
    return self._verdict()

  def _report(self, **values) -> None:
    """Appends a line of JSON to the file of --report."""
    if self._options.report:
      with open(self._options.report, "a") as file:
        file.write(json.dumps(values) + "\n")

  def _alive(self) -> list[Process]:
    return [process for process in self._processes if process.code is None]

  def _hear(self) -> None:
    """Forwards the signals that have arrived since the last call."""
    new = self._asked[self._heard :]
    if not new:
      return
    now = time.monotonic()
    if interrupts and interrupts[-1] >= self._announced + AGAIN_SECONDS:
      self._log.say("Ctrl-C: no more waiting")
      self._kill_at = now
    elif not self._heard:
      grace = self._options.grace_seconds
      self._log.say(
        f"{signal_name(new[0])}: SIGTERM to all processes, which have {grace:g} s to save; "
        f"press Ctrl-C {'again ' if new[0] == signal.SIGINT else ''}to kill them without saving"
      )
      self._kill_at = min(self._kill_at, now + grace)
      for process in self._alive():
        os.kill(process.popen.pid, signal.SIGTERM)
      self._announced = time.monotonic()
    self._heard = len(self._asked)

  def _notice(self) -> None:
    """Finds processes that have ended, and sets a deadline for the others."""
    ended = self._reap()
    if any(process.code == -signal.SIGABRT for process in ended):
      time.sleep(SETTLE_SECONDS)
      ended += self._reap()
    for process in sorted(ended, key=_consequence):
      if process.code == DONE or process.pressed:
        continue
      grace = self._options.grace_seconds if process.code == STOPPED else OWN_END_SECONDS
      self._terminate_at = min(self._terminate_at, time.monotonic() + grace)
      self._kill_at = min(self._kill_at, time.monotonic() + grace + TERMINATE_SECONDS)
      obeyed = self._heard and process.code == -signal.SIGTERM
      if process.code == STOPPED or self._first or obeyed:
        self._log.say(f"process {process.index} ended: {process.how()}")
      else:
        self._log.drain([process.output])
        killed = process.code == -signal.SIGKILL  # it could not say why
        more = "" if killed else "; its last lines:"
        self._log.say(f"process {process.index} failed first: {process.how()}{more}")
        if not killed:
          self._log.say_last_lines(process.output)
      if process.code != STOPPED:
        self._first = self._first or process

  def _reap(self) -> list[Process]:
    """Returns the processes that have ended since the last call, with their codes."""
    for process in (zombies := [p for p in self._alive() if _state(p) == psutil.STATUS_ZOMBIE]):
      # In this order: until it is waited for, its id belongs to its session alone.
      reaper.kill_session(process.popen.pid)
      process.code = process.popen.poll()
      if process.code is not None:
        with contextlib.suppress(BrokenPipeError):  # someone killed the reaper
          self._reaper.stdin.write(b"-%d\n" % process.popen.pid)
    # The first thread of a process can end before the others do.
    return [process for process in zombies if process.code is not None]

  def _press(self) -> None:
    """Ends processes past their deadline."""
    now = time.monotonic()
    for process in self._alive():
      stopped = _state(process) == psutil.STATUS_STOPPED
      # A suspended process does not handle SIGTERM, and its peers have failed because of it.
      if now >= self._kill_at or (stopped and self._first):
        if process.pressed != signal.SIGKILL:
          state = "is stopped (SIGSTOP)" if stopped else "has not ended"
          self._log.say(f"process {process.index} {state}; killed")
        process.pressed = signal.SIGKILL
        reaper.kill_session(process.popen.pid)
      elif now >= self._terminate_at and not process.pressed:
        self._log.say(f"process {process.index} still runs: SIGTERM")
        process.pressed = signal.SIGTERM
        os.kill(process.popen.pid, signal.SIGTERM)

  def _verdict(self) -> int:
    for process in self._alive():
      self._log.say(f"process {process.index} (pid {process.popen.pid}) survives SIGKILL")
    if len(self._processes) < self._options.processes:
      return STOPPED  # stopped while they were started: nothing is lost
    if any(process.code == REFUSED and not process.pressed for process in self._processes):
      return REFUSED  # whichever ended first: a retry would end the same
    if self._first:
      return _exit_code(self._first.code)
    if self._asked and any(process.pressed for process in self._processes):
      return 128 + self._asked[-1]
    return STOPPED if any(process.code == STOPPED for process in self._processes) else DONE


def _exit_code(code: int) -> int:
  """Converts an exit code of Popen to a shell's."""
  return code if code >= 0 else 128 - code


def _state(process: Process) -> str:
  """Returns the process's state, without reaping it, so that its id is not reused."""
  return process.info.status()


def _consequence(process: Process) -> int:
  """Returns how likely an exit is a consequence of another one found at the same time."""
  if process.code == REFUSED:  # seen by itself; one that was only notified ends with 1
    return 0
  if process.code < 0:
    return 3 if process.code == -signal.SIGABRT else 0
  return 2 if process.code == STOPPED else 1


def free_port() -> int:
  """Returns a port that is free now; the run fails if another process takes it before."""
  with socket.socket() as found:
    found.bind(("", 0))
    return found.getsockname()[1]


def parse(arguments: list[str]) -> argparse.Namespace:
  """Returns the options, with `command`; exits with 2 and one message where they are wrong."""
  split = arguments.index("--") if "--" in arguments else len(arguments)
  parser = argparse.ArgumentParser(
    prog="launch",
    usage=argparse.SUPPRESS,
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--processes", type=int, required=True, help="how many")
  parser.add_argument("--restarts", type=int, default=0, help="how often at most; 0")
  parser.add_argument("--grace_seconds", type=float, default=30, help="to save in; 30")
  parser.add_argument("--report", default="", help="the file for pids and exit codes; none")
  options = parser.parse_args(arguments[:split])
  options.command = arguments[split + 1 :]
  for name, least in (("processes", 1), ("restarts", 0), ("grace_seconds", 0)):
    if not getattr(options, name) >= least:
      parser.error(f"--{name}={getattr(options, name)}: must be at least {least}")
  if not options.command:
    parser.error("no command; write it after the options: -- python main.py --config=...")
  if shutil.which(options.command[0]) is None:
    parser.error(f"{options.command[0]}: no such command")
  text, code = room.lacking(options.processes)
  if code == FAILED:
    parser.exit(code, f"launch: error: {text}\n")
  if text:
    parser.error(text)
  return options


def open_standard_files() -> None:
  """Opens those of 0, 1 and 2 that are closed, lest a pipe gets the number."""
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      os.open(os.devnull, os.O_RDWR)


def main(arguments: list[str]) -> int:
  """Runs the command in the requested processes, with restarts; returns the exit code."""
  options = parse(arguments)
  open_standard_files()
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
      signal.signal(number, ask)
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would take the exit codes away
  code = STOPPED
  for start in range(options.restarts + 1):
    log = logs.Logs(asked)
    if start:
      time.sleep(RESTART_PAUSE_SECONDS)
    if asked:  # also before the first start: nothing is running, and nothing is to be saved
      break
    if start:
      log.say(f"restart {start} of {options.restarts}")
    with Attempt(options, asked, log) as attempt:
      try:
        attempt.start()
        code = attempt.wait()
      except OSError as error:
        log.say(f"{options.command[0]}: {error.strerror}")
        code = FAILED if retryable(error) else REFUSED
    if asked or not (code in RESTARTABLE or code > 128):
      break
    if start == options.restarts:
      log.say(f"not started again (--restarts={start}); the same command resumes")
  return code


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
