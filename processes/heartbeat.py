"""Heartbeats and notifications between the processes of a run, in a separate thread.

They use the coordination service, which runs in process 0: if that process is suspended, a call
does not return. So no other thread waits for this one.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable

from etils import epy

from processes.coordination import WATCHERS, Group
from runtime.printable import few

with epy.lazy_imports():
  import jax

PERIOD_SECONDS = 0.25
_POST_SECONDS = 1.0
# A process without a new heartbeat for this long is not running.
SILENT_SECONDS = 2.0
# Process 0 serves all requests: beyond this number of processes, each asks less often.
_OFTEN_FOR = 1000


class Exchange:
  """Sends notices, receives those of others, and publishes the position of this process."""

  def __init__(
    self,
    group: Group,
    place: Callable[[], tuple[int, str, float]],
    receive: Callable[[str, str, dict[str, str]], None],
  ):
    """Starts nothing yet.

    Args:
      group: the processes.
      place: returns (calls of `Watchdog.at`, its label, seconds since).
      receive: called once with (what, index of the process, {text, host}) for every notice of
        another process, in this thread.
    """
    self._group, self._place, self._receive = group, place, receive
    slower = max(1.0, group.count / _OFTEN_FOR)
    self._period, self._posts_each = PERIOD_SECONDS * slower, _POST_SECONDS * slower
    self._silent = SILENT_SECONDS * slower
    self._watches = group.index < WATCHERS
    self._reported = ""  # by a watcher, for a process that does not watch: who is behind
    self._outbox: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    self._known: set[str] = set()
    self._held: list[str] = []
    self._pulse = 0
    self._seen: dict[str, tuple[dict, float]] = {}  # index -> its place, since when unchanged
    self._answered = time.monotonic()
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def close(self) -> None:
    """Sends pending notices and ends the thread; takes at most two seconds."""
    self._closed.set()
    if self._thread is not threading.current_thread():
      self._thread.join(2)

  def tell(self, what: str, text: str) -> None:
    """Notifies all processes of an end: `stop`, `left`, `refused` or `failed`."""
    self._outbox.put((what, text))

  def said(self, what: str, index: int) -> str | None:
    """Returns the notification of a process; None if there is none."""
    notice = self._group.get(f"notice/{what}-{index}")
    return None if notice is None else notice["text"]

  def answering(self) -> bool:
    """Returns whether the coordination service answers."""
    return time.monotonic() - self._answered < self._silent

  def silence(self, since: float = 0.0) -> float:
    """Returns the longest time without a heartbeat, over the other processes.

    Known only while this process waits. Processes that have finished do not count.

    Args:
      since: when heartbeats could first be received, by the monotonic clock.
    """
    seen = [self._answered] if not self.answering() else []
    seen += [heard for place, heard in dict(self._seen).values() if not place["ends"]]
    now = time.monotonic()
    return max((now - max(heard, since) for heard in seen), default=0.0)

  def behind(self) -> str:
    """Returns, as the end of a sentence, which processes keep the others waiting."""
    if not self.answering():
      return "no answer from process 0, which runs the coordination service"
    if not self._watches:
      return self._reported or f"processes 0 to {WATCHERS - 1} look for who is behind"
    now, seen = time.monotonic(), dict(self._seen)  # a copy: the thread keeps changing it
    places = {index: place for index, (place, _) in seen.items()}
    missing = [str(i) for i in range(self._group.count) if str(i) not in places]
    living = {index: since for index, (place, since) in seen.items() if not place["ends"]}
    silent = [index for index, since in living.items() if now - since > self._silent]
    if silent or missing:
      names = [f"{i} ({places[i]['host']}, last seen at {places[i]['at']!r})" for i in silent]
      return f"no heartbeat from process {few(names + missing)}"
    fewest = min(place["beats"] for place in places.values())
    late = [i for i, place in places.items() if place["beats"] == fewest]
    if len(late) == len(places):
      # One may have been suspended there, a moment ago.
      quiet = min(living, key=living.get, default=None)
      lasted = now - living[quiet] if quiet is not None else 0.0
      where = "all processes are at the same place"
      if lasted <= self._posts_each + 2 * self._period:
        return where
      return f"{where}; for {lasted:.1f} s no heartbeat from process {quiet}"
    names = [f"{i} ({places[i]['host']}, at {places[i]['at']!r})" for i in late]
    return f"behind: process {few(names)}"

  # ------------------------------ the thread ------------------------------

  def _run(self) -> None:
    posted = 0.0
    # The service may be gone: its process has ended, and JAX ends this one.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      while True:
        closing = self._closed.is_set()
        self._send()
        self._hear()
        if closing or time.monotonic() - posted >= self._posts_each:
          posted = time.monotonic()
          self._post(ends=closing)
        self._answered = time.monotonic()
        if closing:
          return
        self._closed.wait(self._period)

  def _send(self) -> None:
    held = []
    while not self._outbox.empty():
      what, text = self._outbox.get()
      # A scheduler stops all at once: one notice is enough, since every process reads every notice.
      if what == "stop" and not self._watches and not self._closed.is_set():
        if any(name.startswith("stop-") for name in self._known):
          continue
        if text not in self._held:
          held.append(text)
          continue
      notice = {"text": text, "host": socket.gethostname()}
      self._group.put(f"notice/{what}-{self._group.index}", notice)
    for text in held:  # for one period, in which one that watches may tell it
      self._outbox.put(("stop", text))
    self._held = held

  def _hear(self) -> None:
    notices = self._group.list("notice").items()
    for name, notice in sorted(notices, key=lambda item: not item[0].startswith("stop")):
      what, _, index = name.partition("-")
      if name not in self._known and index != str(self._group.index):
        self._known.add(name)
        self._receive(what, index, notice)

  def _post(self, *, ends: bool = False) -> None:
    """Publishes this process's position; if it waits for long, reads those of the others."""
    self._pulse += 1
    beats, label, waited = self._place()
    place = {"beats": beats, "at": label, "pulse": self._pulse, "host": socket.gethostname()}
    self._group.put(f"progress/{self._group.index}", {**place, "ends": ends})
    if waited < self._posts_each / 2:
      self._seen.clear()
      self._reported = ""
      return
    if not self._watches:
      told = self._group.get("behind")
      self._reported = told["text"] if told else ""
      return
    now = time.monotonic()
    for index, place in self._group.list("progress").items():
      before, since = self._seen.get(index, ({}, now))
      self._seen[index] = (place, now if place["pulse"] != before.get("pulse") else since)
    if self._group.first and self._group.count > WATCHERS:
      self._group.put("behind", {"text": self.behind()})
