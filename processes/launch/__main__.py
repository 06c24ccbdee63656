"""Starts the processes of one run on this machine, merges their logs, and leaves none behind.

python -m processes.launch --processes=2 [--restarts=0] [--replacements=0] [--return_seconds=600]
  [--grace_seconds=30] [--report=FILE] -- python main.py ...

Each process sees JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. When one fails, it
is named, its last lines are repeated (unless SIGKILL ended it), and the others are ended. SIGTERM,
Ctrl-C and a closed output are passed on as SIGTERM, so that the run saves; a second Ctrl-C (a
second or more after the first was announced), or --grace_seconds, kills.
SIGTERM goes to each process alone, not to its children: a shell in between must `exec`.

--restarts=N runs the same command again after exit code 1, 75 or death by a signal.
--replacements=N first starts processes that a signal has ended alone, N of them at most: the others
abandon the step in flight, meet the new ones, and resume from the newest checkpoint. A run of
main.py then has a spare: a process with all imports done, which takes the next one's place.
With training.elastic=True, a run that processes are missing from after that starts again with fewer
of them, as many as it can divide its batches by. After --return_seconds (0: never), or on SIGUSR2
to the launcher, it saves and starts again with all.
--report=FILE appends two lines of JSON for each start: {"pids": [...]} when all processes have
started (and again when one is replaced), {"codes": [...], "killed": [...]} when they have ended:
exit codes (128 + n for signal n), and the indices of those that the launcher ended.

Exit codes: 0 all ended well; that of the process that failed first, and 128 + n where signal n
killed it; 75 stopped after saving; 128 + n asked to stop by signal n and killed; 2 bad usage, or
more processes than the machine holds; 1 it has no memory, process ids or files left now.
"""

import math
import signal
import time

# (signal, time by the monotonic clock) of each request to stop the launcher.
asked: list[tuple[int, float]] = []
# When, by that clock, processes that have died may be started again: now, if SIGUSR2 says so.
back_at = [math.inf]


def ask(number: int, frame: object) -> None:
  """Records a signal, which the main loop handles."""
  asked.append((number, time.monotonic()))


def come_back(number: int, frame: object) -> None:
  """Records that processes that have died may be started again."""
  back_at[0] = time.monotonic()


if __name__ == "__main__":  # before slow imports, so that Ctrl-C works during them
  signal.signal(signal.SIGTERM, ask)
  signal.signal(signal.SIGINT, ask)
  signal.signal(signal.SIGUSR2, come_back)

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import secrets
import select
import selectors
import shutil
import subprocess
import sys
from collections.abc import Iterable

import psutil

from processes import reaper
from processes.launch.options import parse as parse_options
from processes.listening import free_port
from processes.preemption import (
  FITTING,
  OF_PROCESSES,
  PEER_LOST,
  READY,
  REPLACEABLE,
  SPARE,
  WANTED,
)
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

# ------------------------------ merged output ------------------------------

LAST_LINES = 15
# Gloo prints such lines for each device and group to stdout from several threads, so that lines may
# contain pieces of several, and line breaks may be alone.
NOISE = (b"[Gloo] Rank", b"peer ranks. Expected number of connected")
STDOUT, STDERR = 1, 2
POLL_SECONDS = 0.05
# A process's output is complete when it ends, unless a daemon that it left behind has the pipe
# open.
DRAIN_SECONDS = 1
# How long a reader may be stuck, once the run was asked to stop, before it is given up.
STUCK_SECONDS = 1


@dataclasses.dataclass(eq=False)
class Process:
  """One of the processes.

  Attributes:
    index: None of a spare.
    code: None while it runs, then as in Popen: negative for a signal.
    pressed: the last signal that the launcher sent to end it.
    pipes: how many of its outputs are open.
    ready: of a spare: it has done what it can before it takes a place.
    last_lines: of both outputs, as they came.
  """

  index: int | None
  popen: psutil.Popen
  code: int | None = None
  pressed: signal.Signals | None = None
  pipes: int = 2
  ready: bool = False
  last_lines: collections.deque[bytes] = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=LAST_LINES)
  )

  def how(self) -> str:
    """Returns how it ended."""
    if self.code >= 0:
      return f"exit code {self.code}"
    return f"signal {signal_name(-self.code)} ({-self.code})"


@dataclasses.dataclass(eq=False)
class _Pipe:
  """An output of a process, to which of the launcher's own it goes, and an incomplete line."""

  process: Process
  to: int
  rest: bytes = b""
  noisy: bool = False  # the line before was noise


class Logs:
  """Merges the outputs line by line, with the process as a prefix.

  One thread reads and writes complete lines of bytes, as they arrive.
  """

  def __init__(self):
    """Has no outputs yet."""
    self._closed: set[int] = set()
    self._selector = selectors.DefaultSelector()

  def add(self, process: Process) -> None:
    """Takes over a process's pipes."""
    for pipe, to in ((process.popen.stdout, STDOUT), (process.popen.stderr, STDERR)):
      self._selector.register(pipe, selectors.EVENT_READ, _Pipe(process, to))

  def pump(self, seconds: float) -> None:
    """Waits that long for output, and merges what has arrived."""
    for key, _ in self._selector.select(seconds):
      chunk = os.read(key.fd, 1 << 16)
      *lines, key.data.rest = (key.data.rest + chunk).split(b"\n")
      self._print(key.data, lines)
      if not chunk:
        self._end(key)

  def drain(self, processes: Iterable[Process]) -> None:
    """Merges the remaining output of processes that have ended."""
    until = time.monotonic() + DRAIN_SECONDS
    while any(process.pipes for process in processes) and time.monotonic() < until:
      self.pump(POLL_SECONDS)

  def close(self) -> None:
    """Merges incomplete lines, and closes the pipes."""
    for key in [*self._selector.get_map().values()]:
      self._end(key)
    self._selector.close()

  def say(self, text: str, lines: Iterable[bytes] = ()) -> None:
    """Prints a message of the launcher to stderr, and lines that it is about."""
    data = f"launch: {text}\n".encode()
    self._write(STDERR, data + b"".join(b"launch: %b\n" % line for line in lines))

  def _end(self, key: selectors.SelectorKey) -> None:
    self._print(key.data, [key.data.rest] if key.data.rest else [])
    self._selector.unregister(key.fileobj)
    key.fileobj.close()
    key.data.process.pipes -= 1

  def _print(self, pipe: _Pipe, lines: list[bytes]) -> None:
    """Prints lines with their prefix, without gloo's and the empty ones among those."""
    shown = []
    for line in lines:
      pipe.noisy = any(text in line for text in NOISE) or (pipe.noisy and not line.strip())
      if not pipe.noisy:
        index = pipe.process.index
        shown.append(b"[%b] %b" % (b"spare" if index is None else b"%d" % index, line))
    pipe.process.last_lines.extend(shown)
    self._write(pipe.to, b"".join(line + b"\n" for line in shown))

  def _write(self, to: int, data: bytes) -> None:
    """Writes all, waiting for a slow reader; without a limit only while no stop is requested."""
    waited = 0.0
    while data and to not in self._closed:
      try:
        if select.select([], [to], [], POLL_SECONDS)[1]:
          data = data[os.write(to, data[: select.PIPE_BUF]) :]  # as much as cannot block
          waited = 0.0
          continue
      except OSError as error:
        self._closed.add(to)
        ask(signal.SIGPIPE, None)
        self.say(f"cannot write to {'stdout' if to == STDOUT else 'stderr'}: {error.strerror}")
      waited += POLL_SECONDS
      if asked and waited > STUCK_SECONDS:
        self._closed.add(to)


# ------------------------------ one start ------------------------------


class Attempt:
  """One start of all processes, until all have ended.

  A context manager, which leaves no process behind.
  """

  def __init__(self, options: argparse.Namespace, log: Logs, count: int):
    """Starts nothing but the reaper.

    Args:
      options: what `parse` returns.
      log: where the outputs go.
      count: how many processes to start.
    """
    self._options, self._log, self._count = options, log, count
    self.grows = False  # it ends so that all can be started
    self._fitting = os.pipe()  # where an elastic run says with how many it can go on
    os.set_blocking(self._fitting[0], False)
    self._heard, self._announced = 0, math.inf
    self._environment: dict[str, str] = {}
    self._replaced = 0
    self._spare: Process | None = None
    self._asks, self._ask = os.pipe()  # in which the run asks for a spare
    os.set_blocking(self._asks, False)
    self._processes: list[Process] = []
    self._first: Process | None = None  # that failed
    self._terminate_at = self._kill_at = math.inf
    # Not in this folder, so that killing by the pattern processes.launch does not kill it too.
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
    for process in (*self._alive(), *filter(None, [self._spare])):
      reaper.kill_session(process.popen.pid)
    self._log.drain(self._processes)
    self._log.close()
    os.close(self._asks)
    os.close(self._ask)
    self._reaper.stdin.close()
    self._reaper.wait()
    for end in self._fitting:
      os.close(end)

  def start(self) -> None:
    """Starts the processes.

    Raises:
      OSError: the command cannot be started.
    """
    count = self._count
    address = f"localhost:{free_port()}"
    environment = {
      **os.environ,
      "JAX_COORDINATOR_ADDRESS": address,
      "JAX_NUM_PROCESSES": str(count),
      OF_PROCESSES: str(self._options.processes),
      FITTING: str(self._fitting[1]),
      "MESHWRIGHT_TOKEN": secrets.token_hex(32),  # signs their messages
      "PYTHONUNBUFFERED": "1",
      "PYTHONFAULTHANDLER": "1",  # a peer's SIGABRT then shows where it was
    }
    if self._options.replacements:
      environment[REPLACEABLE] = str(self._ask)
    self._environment = environment
    for index in range(count):
      if asked:  # the started ones wait for the others: there is nothing to save
        self._log.say(f"{index} of {count} processes were started; nothing has begun")
        return
      self._processes.append(self._begin(index))
    pids = [process.popen.pid for process in self._processes]
    text = ", ".join(map(str, pids))
    self._log.say(f"started {count} processes (pid {text}), coordinator {address}")
    self._report(pids=pids)

  def _begin(self, index: int | None) -> Process:
    """Starts a process, None: a spare, and takes over its output; raises OSError as `start`."""

    def before() -> None:
      # By exec, an ignored signal stays ignored until the process is ready for it.
      signal.signal(PEER_LOST, signal.SIG_IGN)
      os.write(self._reaper.stdin.fileno(), b"+%d\n" % os.getpid())

    role = {SPARE: "1"} if index is None else {"JAX_PROCESS_ID": str(index)}
    popen = psutil.Popen(
      self._options.command,
      stdin=subprocess.PIPE if index is None else subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      bufsize=0,
      pass_fds=[*self._fitting[1:], self._ask],
      env={**self._environment, **role},
      start_new_session=True,  # the terminal's Ctrl-C reaches the launcher alone
      # Safe, as the launcher has one thread. The reaper says why the process does this itself.
      preexec_fn=before,
    )
    process = Process(index, popen)
    self._log.add(process)
    return process

  def _keep_spare(self) -> None:
    """Starts a spare if the run asks for one, which takes the place of the next that dies."""
    with contextlib.suppress(OSError):  # nothing is said; or there is no memory for a spare
      said, left = os.read(self._asks, select.PIPE_BUF), self._options.replacements - self._replaced
      if READY in said and self._spare:
        self._spare.ready = True
        self._log.say(f"pid {self._spare.popen.pid} is ready to take the place of one that dies")
      if WANTED in said and left and not (self._spare or self._first or asked):
        self._spare = self._begin(None)

  def _successor(self, index: int) -> Process:
    """Returns a process that takes the place of a dead one: the spare, or a new one.

    A spare that is not ready is none: on a busy machine its low priority may never let it be.
    """
    spare, self._spare = self._spare, None
    if spare and not spare.ready:
      reaper.kill_session(spare.popen.pid)
    elif spare:
      with contextlib.suppress(BrokenPipeError), spare.popen.stdin as pipe:
        pipe.write(b"%d\n" % index)
        spare.index = index
        return spare
    return self._begin(index)

  def _replace(self, ended: list[Process]) -> list[Process]:
    """Starts those that a signal has ended again, as often as may be; returns the other ones."""
    most = self._options.replacements
    dead = [process for process in ended if process.code < 0 and not process.pressed]
    others = [process for process in self._processes if process.code is not None]
    if not most or not dead or self._first or asked or any(p not in dead for p in others):
      return ended
    if self._replaced + len(dead) > most:
      self._log.say(f"not replaced (--replacements={most})")
      return ended
    for process in self._alive():
      os.kill(process.popen.pid, PEER_LOST)
    for process in dead:
      self._replaced += 1
      self._log.drain([process])
      many = f"{self._replaced} of {most}"
      self._log.say(f"process {process.index} ended: {process.how()}; replacement {many}")
      self._processes[process.index] = self._successor(process.index)
    self._report(pids=[process.popen.pid for process in self._processes])
    return [process for process in ended if process not in dead]

  def wait(self) -> int:
    """Waits until no process is left, and returns the launcher's exit code."""
    while self._alive() and time.monotonic() < self._kill_at + UNKILLABLE_SECONDS:
      self._log.pump(POLL_SECONDS)
      self._hear()
      self._grow()
      self._keep_spare()
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
    new = asked[self._heard :]
    if not new:
      return
    now = time.monotonic()
    if any(s == signal.SIGINT and at >= self._announced + AGAIN_SECONDS for s, at in new):
      self._log.say("Ctrl-C: no more waiting")
      self._kill_at = now
    elif not self._heard:
      grace, number = self._options.grace_seconds, new[0][0]
      self._log.say(
        f"{signal_name(number)}: SIGTERM to all processes, which have {grace:g} s to save; "
        f"press Ctrl-C {'again ' if number == signal.SIGINT else ''}to kill them without saving"
      )
      self._stop(now + grace)
      self._announced = time.monotonic()
    self._heard += len(new)

  def _stop(self, kill_at: float) -> None:
    """Asks the processes to save and end until then."""
    self._kill_at = min(self._kill_at, kill_at)
    for process in self._alive():
      os.kill(process.popen.pid, signal.SIGTERM)

  def _grow(self) -> None:
    """Stops a run of fewer processes, once those that are missing may be started again."""
    if self._count == self._options.processes or time.monotonic() < back_at[0]:
      return
    if not (self.grows or asked or self._first):
      self.grows = True
      self._log.say(f"all {self._options.processes} processes can run again: SIGTERM, to save")
      self._stop(time.monotonic() + self._options.grace_seconds)

  def survivors(self) -> int:
    """Returns with how many processes an elastic run goes on after deaths; 0: it cannot."""
    if asked or self.grows or self._first is None or self._first.code >= 0:
      return 0
    # JAX ends peers of the dead by SIGABRT.
    dead = [p for p in self._processes if (p.code or 0) < 0 and not p.pressed]
    left = self._count - max(1, sum(p.code != -signal.SIGABRT for p in dead))
    try:
      said = os.read(self._fitting[0], 1 << 16).splitlines()
    except BlockingIOError:
      return 0  # it is not elastic, or has not begun
    return max((count for count in map(int, said[-1].split()) if count <= left), default=0)

  def _notice(self) -> None:
    """Finds processes that have ended, and sets a deadline for the others."""
    ended = self._reap()
    if any(process.code == -signal.SIGABRT for process in ended):
      time.sleep(SETTLE_SECONDS)
      ended += self._reap()
    for process in sorted(self._replace(ended), key=_consequence):
      if process.code == DONE or process.pressed:
        continue
      grace = self._options.grace_seconds if process.code == STOPPED else OWN_END_SECONDS
      self._terminate_at = min(self._terminate_at, time.monotonic() + grace)
      self._kill_at = min(self._kill_at, time.monotonic() + grace + TERMINATE_SECONDS)
      obeyed = (self._heard or self.grows) and process.code == -signal.SIGTERM
      if process.code == STOPPED or self._first or obeyed:
        self._log.say(f"process {process.index} ended: {process.how()}")
      else:
        self._log.drain([process])
        text = f"process {process.index} failed first: {process.how()}"
        if process.code == -signal.SIGKILL:  # it could not say why
          self._log.say(text)
        else:
          self._log.say(f"{text}; its last lines:", process.last_lines)
      if process.code != STOPPED:
        self._first = self._first or process

  def _reap(self) -> list[Process]:
    """Returns the processes that have ended since the last call, with their codes."""
    # By its status, which does not take note of its end: so that its id is not used again.
    zombies = [p for p in self._alive() if p.popen.status() == psutil.STATUS_ZOMBIE]
    for process in zombies:
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
      stopped = process.popen.status() == psutil.STATUS_STOPPED
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
    if len(self._processes) < self._count:
      return STOPPED  # stopped while they were started: nothing is lost
    if any(process.code == REFUSED and not process.pressed for process in self._processes):
      return REFUSED  # whichever ended first: a retry would end the same
    if self._first:
      return _exit_code(self._first.code)
    if asked and any(process.pressed for process in self._processes):
      return 128 + asked[-1][0]
    return STOPPED if any(process.code == STOPPED for process in self._processes) else DONE


def signal_name(number: int) -> str:
  """Returns the name of a signal; real-time signals have none."""
  try:
    return signal.Signals(number).name
  except ValueError:
    return "without a name"


def _exit_code(code: int) -> int:
  """Converts an exit code of Popen to a shell's."""
  return code if code >= 0 else 128 - code


def _consequence(process: Process) -> int:
  """Returns how likely an exit is a consequence of another one found at the same time."""
  if process.code == REFUSED:  # seen by itself; one that was only notified ends with 1
    return 0
  if process.code < 0:
    return 3 if process.code == -signal.SIGABRT else 0
  return 2 if process.code == STOPPED else 1


# ------------------------------ how many fit on the machine ------------------------------

# Of the smallest training run on simulated devices, as measured with jax 0.10.2: memory that no
# other process shares. With more than so many per core, a working process cannot be distinguished
# from a dead one. Of the launcher's own: two pipes of each process, and some more.
PROCESS_MIB, PROCESSES_PER_CORE = 150, 32
PROCESS_FILES, OWN_FILES = 2, 64


def make_room(count: int) -> str:
  """Raises the limit of open files for so many processes.

  Returns:
    Why this machine cannot hold so many, with the numbers; "" if it can.
  """
  memory = psutil.virtual_memory().total >> 20
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  files, needed = max(soft, hard), PROCESS_FILES * count + OWN_FILES
  most = {
    f"{memory} MiB of memory, about {PROCESS_MIB} for each": memory // PROCESS_MIB,
    f"{cores} cores, at most {PROCESSES_PER_CORE} processes for each": cores * PROCESSES_PER_CORE,
  }
  if resource.RLIM_INFINITY not in (soft, hard):
    text = f"{files} files may be open, {PROCESS_FILES} for each and {OWN_FILES} others"
    most[f"{text} (RLIMIT_NOFILE)"] = (files - OWN_FILES) // PROCESS_FILES
  if why := [text for text, fits in most.items() if fits < count]:
    return (
      f"--processes={count}: this machine fits about {max(1, min(most.values()))}: "
      f"{'; '.join(why)}; start fewer, or on several machines"
    )
  if soft != resource.RLIM_INFINITY and soft < needed:
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
  return ""


# ------------------------------ the command ------------------------------


OPTIONS = {
  "restarts": (0, "how often at most; 0"),
  "replacements": (0, "how many at most; 0"),
  "return_seconds": (600.0, "fewer run for; 600"),
  "grace_seconds": (30.0, "to save in; 30"),
  "report": ("", "the file for pids and exit codes; none"),
}


def parse(arguments: list[str]) -> argparse.Namespace:
  """Returns the options, with `command`; exits with 2 and one message where they are wrong."""
  options, parser = parse_options(arguments, __doc__, OPTIONS)
  if shutil.which(options.command[0]) is None:
    parser.error(f"{options.command[0]}: no such command")
  if text := make_room(options.processes):
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
  signal.signal(signal.SIGUSR2, come_back)
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would take the exit codes away
  code, said, restarts, count = STOPPED, "", 0, options.processes
  while True:
    log = Logs()
    if said:
      time.sleep(RESTART_PAUSE_SECONDS)
    if asked:  # also before the first start: nothing is running, and nothing is to be saved
      break
    if said:
      log.say(said)
    with Attempt(options, log, count) as attempt:
      try:
        attempt.start()
        code = attempt.wait()
      except OSError as error:
        log.say(f"{options.command[0]}: {error.strerror}")
        code = FAILED if retryable(error) else REFUSED
      fewer = attempt.survivors()
    if asked or not (code in RESTARTABLE or code > 128):
      break
    if attempt.grows:
      count, back_at[0] = options.processes, math.inf
    if attempt.grows and code in (STOPPED, 128 + signal.SIGTERM):  # before it can handle it
      said = f"starts again with all {count} processes"
    elif fewer:
      count, seconds = fewer, options.return_seconds
      back_at[0] = time.monotonic() + (seconds or math.inf)
      after = f"after {seconds:g} s (--return_seconds) or " if seconds else ""
      said = f"goes on with {count} of {options.processes} processes; with all {after}on SIGUSR2"
    elif restarts < options.restarts:
      restarts += 1
      said = f"restart {restarts} of {options.restarts}"
    else:
      log.say(f"not started again (--restarts={restarts}); the same command resumes")
      break
  return code


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
