"""Watches over a process from a thread of its own: stops, failures elsewhere, and standing still.

The main thread may sit in a compilation or a collective for minutes, where no Python runs. This
thread goes on: it passes a stop on to the other processes and hears of theirs, ends this process
when another has failed, shows the others how far this one is, and when nothing moves any more it
prints where every thread stands and who is behind.
"""

import contextlib
import faulthandler
import math
import select
import socket
import sys
import threading
import time
import traceback

import jax

from processes import group as groups
from processes.stopping import EXIT_CODE, StopRequest

PERIOD_SECONDS = 0.25
_POST_SECONDS = 1.0
# A lap that took so much longer than its period: this process was stopped, or the machine slept.
_ASLEEP_SECONDS = 3.0
_REFUSED, _FAILED = 2, 1

# What is going on: steps and evaluation have beats of known length, the others may take long.
STARTING, STEP, EVALUATION, SAVING, ENDING = "starting", "step", "evaluation", "saving", "ending"


class Watchdog:
  """The thread; a context manager. `at` says what the main thread is about to do.

  Every process makes the same calls of `at` in the same order, so that the one with the fewest is
  the one that is behind.
  """

  def __init__(
    self,
    group: groups.Group,
    stop: StopRequest,
    *,
    deadline_seconds: float = 0.0,
    start_timeout_seconds: float = 300.0,
  ):
    """Prepares; nothing is watched yet.

    Args:
      group: the processes.
      stop: is set when any process is asked to stop.
      deadline_seconds: how long a step may take; 0: ten times the longest so far, within bounds
        that the heartbeat sets (see `limit`).
      start_timeout_seconds: how long anything may take of which nothing is known yet.
    """
    self.group, self.stop = group, stop
    self._deadline, self._start_timeout = deadline_seconds, start_timeout_seconds
    self._beats, self._kind, self._label = 0, STARTING, "starting"
    self._since = time.monotonic()
    self._longest: dict[str, float] = {}
    self._leaving = False
    self._told = False  # the others know of the stop
    self._pulse = 0
    self._last_post = 0.0
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

  def __enter__(self) -> "Watchdog":
    """Starts the thread."""
    self.stop.__enter__()
    self._thread.start()
    return self

  def __exit__(self, kind, error, trace) -> None:
    """Ends it; of an error that ends this process the others are told."""
    if error is not None and not isinstance(error, SystemExit):
      self.tell("failed", f"{kind.__name__}: {error}")
    self._closed.set()
    self._thread.join()
    self.stop.__exit__(kind, error, trace)

  def at(self, label: str, kind: str = STEP) -> None:
    """Says what the main thread is about to do.

    Args:
      label: for people: `step 12: waiting for its batch`.
      kind: one of STARTING, STEP, EVALUATION, SAVING, ENDING.
    """
    now = time.monotonic()
    if kind == self._kind:
      self._longest[kind] = max(self._longest.get(kind, 0.0), now - self._since)
    self._beats, self._kind, self._label, self._since = self._beats + 1, kind, label, now

  def tell(self, what: str, text: str) -> None:
    """Tells all processes of an end: `stop`, `refused` or `failed`."""
    if not self.group.alone:
      name = f"notice/{what}-{self.group.index}"
      with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator may be gone
        self.group.put(name, {"text": text, "host": socket.gethostname()})

  def refusing(self, text: str) -> bool:
    """Tells the others of a refusal; returns whether this process should print it.

    What process 0 refuses with the same words, it says for all.
    """
    self._leaving = True
    self.tell("refused", text)
    began = time.monotonic()
    while not self.group.first and time.monotonic() - began < 2:
      said = self.group.list("notice").get("refused-0")
      if said is not None:
        return said["text"] != text
      time.sleep(0.05)
    return True

  def limit(self) -> float:
    """Returns the seconds after which what is going on counts as stuck.

    Of a step: between half the heartbeat and four fifths of it, since after the whole JAX aborts
    everybody without naming anyone; only where a single step has taken long is more allowed.
    Compiling may take as long as it likes: others wait for it in their first step.
    """
    longest, heartbeat = self._longest.get(self._kind), self.group.heartbeat_seconds
    if self._kind in (STARTING, ENDING):
      return math.inf
    if longest is None:
      return self._start_timeout
    if self._kind == SAVING:
      return max(self._start_timeout, 10 * longest)
    if self._deadline:
      return self._deadline
    most = max(0.8 * heartbeat, 3 * longest)
    return min(max(10 * longest, heartbeat / 2), most)

  # ------------------------------ the thread ------------------------------

  def _run(self) -> None:
    lap = time.monotonic()
    while not self._closed.is_set():
      select.select([self.stop.wakeup], [], [], PERIOD_SECONDS)
      now = time.monotonic()
      if now - lap > _ASLEEP_SECONDS:
        self._since += now - lap
      lap = now
      try:
        self._look()
      except jax.errors.JaxRuntimeError:
        # The coordination service does not answer: its process has ended, and JAX ends this one.
        continue
      except Exception:  # whatever it is, the run must not go on unwatched
        traceback.print_exc()
        groups.leave(_FAILED, patience_seconds=2)

  def _look(self) -> None:
    if signal := self.stop.arrived():
      self.stop.request(signal)
    if self.stop and not self._told:
      self._told = True
      self.tell("stop", self.stop.requested)
    self._hear()
    if self.stop and self._kind == STARTING and not self._leaving:
      # No step has been made since the checkpoint, or the start: there is nothing to save.
      print(f"{groups.label()}stopped as asked before the first step", flush=True)
      groups.leave(EXIT_CODE)
    now = time.monotonic()
    if not self.group.alone and now - self._last_post >= _POST_SECONDS:
      self._post()
    waited = now - self._since
    if waited > self.limit() and not self._leaving:
      self._stuck(waited)

  def _hear(self) -> None:
    """Acts upon what other processes have told."""
    if self.group.alone or self._leaving:
      return
    for name, notice in self.group.list("notice").items():
      what, _, index = name.partition("-")
      if index == str(self.group.index):
        continue
      if what == "stop":
        self.stop.request(f"{notice['text']} to process {index}")
      else:
        self._follow(what, index, notice)

  def _follow(self, what: str, index: str, notice: dict[str, str]) -> None:
    """Ends this process, since another has refused or failed."""
    time.sleep(2)  # it may be about to say the same
    if self._leaving or self._closed.is_set():
      return
    text = notice["text"] if self.group.first else notice["text"].partition("\n")[0]
    _print(f"{groups.label()}process {index} ({notice['host']}) {what}: {text}")
    if notice["text"].startswith("no progress"):
      _stacks()
    groups.leave(_REFUSED if what == "refused" else _FAILED, patience_seconds=3)

  def _post(self) -> None:
    self._last_post = time.monotonic()
    self._pulse += 1
    place = {"beats": self._beats, "at": self._label, "pulse": self._pulse}
    self.group.put(f"progress/{self.group.index}", {**place, "host": socket.gethostname()})

  def _stuck(self, waited: float) -> None:
    """Says who is behind and where every thread stands; ends this process."""
    self._leaving = True
    where = self._label
    text = f"no progress for {waited:.0f} s at {where!r} (the limit was {self.limit():.0f} s)"
    if not self.group.alone:
      text += f"; {self._behind()}"
    _print(f"error: {groups.label()}{text}")
    _stacks()
    self.tell("failed", text)
    groups.leave(_FAILED, patience_seconds=4)

  def _behind(self) -> str:
    """Returns which processes keep the others waiting."""
    self._post()
    before = self.group.list("progress")
    time.sleep(2.5 * _POST_SECONDS)
    self._post()
    after = self.group.list("progress")
    silent = [i for i in after if i in before and after[i]["pulse"] == before[i]["pulse"]]
    missing = [str(i) for i in range(self.group.count) if str(i) not in after]
    fewest = min(place["beats"] for place in after.values())
    late = [i for i, place in after.items() if place["beats"] == fewest]
    if silent or missing:
      names = [f"{i} ({after[i]['host']}, last seen at {after[i]['at']!r})" for i in silent]
      return f"no sign of life from process {', '.join(names + missing)}"
    if len(late) == len(after):
      return "all processes are at the same place"
    names = [f"{i} ({after[i]['host']}, at {after[i]['at']!r})" for i in late]
    return f"behind is process {', '.join(names)}"


def _print(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _stacks() -> None:
  """Prints the Python stacks of all threads."""
  _print("Python stacks of all threads:")
  with contextlib.suppress(OSError, ValueError):
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
