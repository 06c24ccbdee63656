"""The watchdog thread of a process: stop requests, failures elsewhere, and hangs.

The main thread may be in a compilation or a collective for minutes, where no Python runs. This
thread keeps running: it sees a stop request at once and forwards it, ends this process when another
has failed, and when nothing makes progress it prints every thread's stack and who is behind.
"""

import collections
import contextlib
import faulthandler
import math
import os
import pathlib
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from typing import NoReturn

from etils import epy

from processes import coordination as groups
from processes import preemption
from processes.preemption import StopRequest, tell
from runtime import exit_codes
from runtime.printable import printable

with epy.lazy_imports():  # which a single process does not need
  from processes import crash_output, heartbeat

PERIOD_SECONDS = 0.25
# If a period takes this much longer, the process was suspended, or the machine slept.
_ASLEEP_SECONDS = 3.0
# After this share of the heartbeat timeout a silent process counts as suspended during a save;
# after 0.6 of it, as observed, JAX would end all others without naming it.
_SILENT_SHARE = 0.4
# Input that is late by at least this share of the heartbeat timeout gets a warning.
_LATE_SHARE = 0.3
_ABANDON_SECONDS = 30.0  # for the main thread to give up a step whose peer has died
_REMEMBERED = 50
_CALLS = 4  # innermost calls of a thread that a warning names
_POLLED_SECONDS = 3.0  # for cleaning up, if the main thread polls for a stop
_NO_PROGRESS = "no progress"
_PROGRESS_SECONDS = 0.5

Measure = Callable[[], Hashable]

# Phases: steps and evaluation have a known period, the others may take long. DRAWING: of answers,
# and their rewards.
# STARTING: nothing to save yet; DONE: everything is saved. A stop then ends the process at once.
STARTING, STEP, EVALUATION, SAVING, ENDING = "starting", "step", "evaluation", "saving", "ending"
DRAWING, DONE = "drawing", "done"
# What is still finished after a stop request.
_LAST = {
  STEP: "stopping after this step and saving",
  DRAWING: "stopping after this step and saving",
  EVALUATION: "stopping after this batch of the evaluation",
  SAVING: "stopping when this save is done",
}


class Watchdog:
  """The thread; a context manager. The main thread calls `at` to announce what it does next.

  Every process makes the same calls of `at` in the same order, so the one with the fewest is
  behind.

  Attributes:
    group: the processes.
    stop: set when any process is asked to stop.
    saves: whether there are steps to save before a stop.
  """

  def __init__(
    self,
    group: groups.Group,
    stop: StopRequest,
    *,
    deadline_seconds: float = 0.0,
    start_timeout_seconds: float = 300.0,
    input_timeout_seconds: float = 1800.0,
  ):
    """Prepares; nothing is watched yet.

    Args:
      group: the processes.
      stop: set when any process is asked to stop.
      deadline_seconds: how long a step may take; 0: ten times the longest so far, within bounds
        that the heartbeat timeout sets (see `limit`).
      start_timeout_seconds: how long anything may take whose duration is unknown, and how long a
        save may make no progress.
      input_timeout_seconds: how long a single process waits for a batch.
    """
    self.group, self.stop, self.saves = group, stop, False
    self._deadline, self._start_timeout = deadline_seconds, start_timeout_seconds
    self._input_timeout = input_timeout_seconds
    self._reader, self._warn_after = "", 0.0
    self._progress = _Progress()
    self._beats, self._kind, self._label = 0, STARTING, "starting"
    self._since = self._awake = time.monotonic()
    self._began: float | None = None
    self._lengths: dict[str, collections.deque[float]] = {}  # kind -> seconds of the last ones
    self._changing = threading.Lock()
    self._leaving = False
    self._lost_since: float | None = None  # when it was known that a peer has died
    self._told: float | None = None  # when the others were notified of the stop
    self._exchange: heartbeat.Exchange | None = None  # with the other processes
    if not group.alone:
      self._exchange = heartbeat.Exchange(
        group, lambda: (self._beats, self._label, time.monotonic() - self._since), self._receive
      )
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

  def __enter__(self) -> "Watchdog":
    """Starts the thread."""
    self.stop.__enter__()
    self._thread.start()
    if self._exchange:
      self._exchange.start()
    return self

  def __exit__(self, kind, error, trace) -> None:
    """Ends it; the others are notified of an error that ends this process."""
    if error is not None and not isinstance(error, SystemExit) and not self.survives(error):
      self.tell("failed", f"{kind.__name__}: {error}")
    self._closed.set()
    self._progress.measure(None)
    self._disconnect()
    self._thread.join()
    self.stop.__exit__(kind, error, trace)

  def at(
    self,
    label: str,
    kind: str = STEP,
    *,
    begins: bool = False,
    reader: str = "",
    progress: Measure | None = None,
  ) -> None:
    """Announces what the main thread does next.

    Args:
      label: for messages: `step 12: waiting for its batch`.
      kind: one of STARTING, STEP, EVALUATION, SAVING, ENDING, DRAWING, DONE.
      begins: a step, or a batch of evaluation, begins here: its duration is measured to the next
        such call.
      reader: the name of the thread that makes the batch that is waited for; "" if none is.
      progress: returns a value that changes with progress; the timeout starts at the last change.
    """
    with self._changing:
      now = time.monotonic()
      if begins:
        if kind == self._kind and self._began is not None:
          # The first one of a kind does not count: it connects, allocates and warms up.
          known = self._lengths.get(kind)
          if known is None:
            self._lengths[kind] = collections.deque(maxlen=_REMEMBERED)
            if kind == STEP and self.group.first and groups.replaceable():
              preemption.ask_for_spare()  # not before: its imports would slow the start down
          else:
            known.append(now - self._began)
        self._began = now
      elif kind != self._kind:
        self._began = None
      self._beats, self._kind, self._label, self._since = self._beats + 1, kind, label, now
      self._reader, self._warn_after = reader, self._late()
      self._progress.measure(progress)

  def part(self) -> None:
    """Disconnects at the end of a successful run.

    Still under the watchdog, so that a signal during the wait kills no process.
    """
    self.at("waiting for the other processes to end", ENDING)
    self._disconnect()
    groups.part()

  def leave(self) -> NoReturn:
    """Ends this process after the main thread has abandoned its work because of a stop."""
    with self._changing:
      if not self._leaving:
        self._leave_early()
    while True:  # another thread ends it
      time.sleep(1)

  def tell(self, what: str, text: str) -> None:
    """Notifies the other processes of an end: `stop`, `left`, `refused` or `failed`."""
    if self._exchange:
      self._exchange.tell(what, text)

  def survives(self, error: BaseException) -> bool:
    """Returns whether an error is of a peer that is replaced, so that this process joins again."""
    if self.group.alone or not groups.replaceable() or self.stop or self._leaving:
      return False
    return self.stop.peer_lost or crash_output.is_of_a_peer(error)

  def _disconnect(self) -> None:
    if self._exchange:
      self._exchange.close()

  def refusing(self, text: str, what: str = "refused") -> bool:
    """Notifies the others of a refusal or a failure; returns whether this process should print it.

    If process 0 refuses with the same message, only process 0 prints it.
    """
    self._leaving = True
    self.tell(what, text)
    began = time.monotonic()
    while not self.group.first and time.monotonic() - began < 2:
      if (said := self._exchange.said(what, 0)) is not None:
        return said != text
      time.sleep(0.05)
    return True

  def limit(self) -> float:
    """Returns the seconds after which the current phase counts as hung.

    For a step at most half of the heartbeat timeout, since after 0.6 to 0.8 of it (as observed) JAX
    aborts all processes without naming one; more only if a single step takes that long. Compilation
    has no limit: others wait for it in their first step. A single process blocks no other and gets
    longer limits, the longest for its input, about which it warns.
    """
    if self._kind in (STARTING, ENDING, DRAWING, DONE):
      return math.inf
    if self._reader and self.group.alone:
      return max(self._input_timeout, self._deadline)
    lengths = self._lengths.get(self._kind)
    first = not lengths and self._kind == EVALUATION  # limited by the steps before it
    lengths = lengths or (first and self._lengths.get(STEP)) or ()
    if not lengths:
      return self._start_timeout
    if self._deadline:
      return self._deadline
    longest, heartbeat = max(lengths), self.group.heartbeat_seconds
    if self.group.alone:
      return max(10 * longest, self._start_timeout)
    most = max(0.5 * heartbeat, 3 * longest)
    return most if first else min(max(10 * longest, 0.3 * heartbeat), most)

  def _late(self) -> float:
    """Returns the seconds of waiting for input after which to warn."""
    longest = max(self._lengths.get(self._kind) or (0.0,))
    return self._deadline or max(10 * longest, _LATE_SHARE * self.group.heartbeat_seconds)

  # ------------------------------ the thread ------------------------------

  def _run(self) -> None:
    lap = time.monotonic()
    while not self._closed.is_set():
      select.select([self.stop.wakeup], [], [], PERIOD_SECONDS)
      now = time.monotonic()
      if now - lap > _ASLEEP_SECONDS:
        self._has_slept(now - lap)
      lap = now
      try:
        self._look()
      except Exception:  # whatever it is, the run must not continue without a watchdog
        traceback.print_exc()
        groups.leave(exit_codes.FAILED, patience_seconds=0)

  def _look(self) -> None:
    self.stop.hear()
    if self.stop.insisted and not self._leaving:
      self._leave_unsaved()
    if self.stop.peer_lost and not self.stop:
      self._wait_for_main()
      return
    if self.stop and self._told is None:
      self._told = time.monotonic()
      self.tell("stop", self.stop.requested)
      self._announce()
    with self._changing:  # so that the main thread does not reach a barrier meanwhile
      if self.stop and self._kind in (STARTING, DONE) and not self._leaving and self._may_leave():
        self._leave_early()
    waited = time.monotonic() - self._progress.since(self._since)
    if self._leaving:
      return
    if waited > (limit := self.limit()):
      keys = {self._start_timeout: "start_timeout", self._input_timeout: "input_timeout"}
      key = f", processes.{keys[limit]}_seconds" if limit in keys else ""
      self._stuck(waited, f"the limit was {limit:.0f} s{key}")
    if self._reader and self.group.alone and waited > self._warn_after:
      self._warn_after = 2 * waited
      where = f"thread {self._reader!r} {_where(self._reader)}"
      _print(
        f"WARNING: {waited:.0f} s at {self._label!r}: the input is slow or hangs, {where}; "
        f"the run is ended after {limit:.0f} s (processes.input_timeout_seconds)"
      )
    # A save may take long, but running processes send heartbeats meanwhile.
    most = _SILENT_SHARE * self.group.heartbeat_seconds
    silence = self._exchange.silence(self._awake) if self._exchange else 0.0
    if self._kind == SAVING and silence > most:
      self._stuck(waited, f"a process without a heartbeat for {silence:.0f} s counts as stopped")

  def _wait_for_main(self) -> None:
    """Makes the main thread raise if it waits for a dead process; ends it if it does not."""
    if self._lost_since is None:
      self._lost_since = time.monotonic()
      groups.cut()
    if time.monotonic() - self._lost_since > _ABANDON_SECONDS:
      seconds = f"{_ABANDON_SECONDS:g} s"
      _print(f"{groups.label()}has not left {self._label!r} within {seconds}; it is replaced, too")
      os.kill(os.getpid(), signal.SIGKILL)

  def _has_slept(self, seconds: float) -> None:
    """Accounts for a suspension of this process: no process is to blame for that time."""
    self._since += seconds
    self._awake = time.monotonic()

  def _may_leave(self) -> bool:
    """Returns whether the main thread, if it polls for a stop, has had its time to clean up."""
    return not self.stop.polls or time.monotonic() - self._told > _POLLED_SECONDS

  def _announce(self) -> None:
    """Prints what a stop does now, and what another Ctrl-C would do."""
    if self._kind in (STARTING, DONE):  # it leaves, and says so
      return
    if self.group.first:
      if self._kind == ENDING:
        tell(f"{self.stop.requested}: everything is saved, and the run is ending")
      else:
        what, again = _LAST[self._kind], "to stop at once"
        if self.saves:
          what += " and saving" if self._kind == EVALUATION else ""
          again = "to stop without saving"
        tell(f"{self.stop.requested}: {what}; press Ctrl-C again {again}")
    self.stop.announced()

  def _leave_early(self) -> None:
    """Ends this process if there is nothing to save: before its first step, or after its last."""
    self._leaving = True
    self.tell("left", self.stop.requested)
    self._disconnect()
    done = self._kind in (DONE, ENDING)
    if self.group.first:
      why = "the run is done and saved" if done else "there was nothing to save"
      tell(f"stopped as requested ({self.stop.requested}) while {self._label}; {why}")
    groups.leave(exit_codes.DONE if done else exit_codes.STOPPED)

  def _leave_unsaved(self) -> None:
    """Ends this process without waiting for a save: Ctrl-C was pressed again."""
    self._leaving = True
    lost = ""
    if self.saves:
      lost = " without saving; what was done since the last save is lost"
    if self._kind == ENDING:
      lost = "; everything was saved"
    text = f"Ctrl-C again: stopped{lost}"
    tell(f"{groups.label()}{text}")
    self.tell("failed", text)
    self._disconnect()
    groups.leave(exit_codes.INTERRUPTED, patience_seconds=0 if self.group.alone else 3)

  def _receive(self, what: str, index: str, notice: dict[str, str]) -> None:
    """Handles a notification of another process; runs in the thread of the exchange."""
    if self._leaving or self.stop.peer_lost:
      return
    if what == "stop":
      self.stop.request(f"{notice['text']} to process {index}")
    elif what == "left":  # the first barrier, where this process may be waiting, cannot be
      self.stop.request(notice["text"])
      self._leave_early()
    else:
      time.sleep(1)  # this process may be about to say the same
      if self._leaving or self._closed.is_set():
        return
      self._leaving = True
      text = notice["text"] if self.group.first else notice["text"].partition("\n")[0]
      who = f"process {index} ({printable(notice['host'], newlines=False)})"
      _print(f"{groups.label()}{who} {what}: {printable(text)}")
      if text.startswith(_NO_PROGRESS):
        _stacks()
      # Even for a refusal: 2, after which supervisors give up, is for what a process sees itself.
      groups.leave(exit_codes.FAILED, patience_seconds=3)

  def _stuck(self, waited: float, why: str) -> None:
    """Prints who is behind and every thread's stack; ends this process."""
    self._leaving = True
    text = f"{_NO_PROGRESS} for {waited:.0f} s at {self._label!r} ({why}); "
    text += self._exchange.behind() if self._exchange else "there is no other process"
    _print(f"error: {groups.label()}{text}")
    _stacks()
    self.tell("failed", text)
    self._disconnect()
    # A process that hangs itself prints its stacks when it is notified of this.
    answering = self._exchange and self._exchange.answering()
    groups.leave(exit_codes.FAILED, patience_seconds=2.5 if answering else 0)


def _print(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _where(name: str) -> str:
  """Returns the innermost Python calls of a thread, as the end of a sentence."""
  frames = sys._current_frames()
  for thread in threading.enumerate():
    if thread.name == name and thread.ident in frames:
      calls = traceback.extract_stack(frames[thread.ident])[-_CALLS:]
      return "is at " + ", ".join(
        f"{pathlib.Path(call.filename).name}:{call.lineno} {call.name}" for call in reversed(calls)
      )
  return "has ended"


def _stacks() -> None:
  """Prints the Python stacks of all threads."""
  _print("Python stacks of all threads:")
  with contextlib.suppress(OSError, ValueError):
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()


class _Progress:
  """Detects whether a long operation makes progress: compares successive results of a measure.

  Each measure has a daemon thread that nothing waits for, since reading a disk that hangs does not
  return. Failures are ignored: files disappear while they are counted.
  """

  def __init__(self):
    """Measures nothing yet."""
    self._measure: Measure | None = None
    self._moved = 0.0

  def measure(self, measure: Measure | None) -> None:
    """Sets what is measured from now on; None for nothing, which also ends the thread."""
    self._moved, self._measure = 0.0, measure
    if measure is not None:
      threading.Thread(target=self._run, args=[measure], name="progress", daemon=True).start()

  def since(self, began: float) -> float:
    """Returns when the last progress was seen, and not before `began`; by the monotonic clock."""
    return max(began, self._moved)

  def _run(self, measure: Measure) -> None:
    before = None
    while self._measure is measure:
      with contextlib.suppress(OSError):
        found = (measure(),)
        if before not in (None, found) and self._measure is measure:
          self._moved = time.monotonic()
        before = found
      time.sleep(_PROGRESS_SECONDS)
