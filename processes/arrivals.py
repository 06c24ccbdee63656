"""The rendezvous on process 0: one thread with thousands of connections.

No connection can end the wait or block it for the others: each has its own deadline to identify
itself and a limit on what it may send, and is dropped and counted if its message is not signed. The
size of a reply does not grow with the number of processes.
"""

import collections
import contextlib
import dataclasses
import json
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from processes import listening, tokens
from runtime.printable import printable

GREETING, HELLO, ANSWER = "greeting", "hello", "answer"
# Kinds of answers; "" if all processes have arrived.
MISSING, COUNTS, TWICE, REFUSED, FULL = "missing", "counts", "twice", "refused", "full"
HELLO_SECONDS = 10.0
FIRST_NOTICE_SECONDS = 5.0
_HELLO = {"index": int, "count": int, "host": str, "pid": int, "refused": str, "nonce": str}
_PAUSE_SECONDS = 0.1
# After an error: for processes that are about to connect.
_LATE_SECONDS = 3.0
_OWN_ERROR_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_MOST_STRANGERS = 4096  # connections that have not identified themselves yet
_AT_ONCE = 256  # connections accepted before open ones are read again
_MOST_NAMED = 16
_MOST_HOSTS = 1000  # that are counted separately among dropped connections


@dataclasses.dataclass(eq=False)
class _Connection:
  """A connection; `hello`: its first message, None so far; `answered`: whether it got an answer."""

  socket: socket.socket
  host: str
  deadline: float
  nonce: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))
  received: bytes = b""
  hello: dict[str, Any] | None = None
  answered: bool = False


class Notices:
  """Says on standard error what is waited for: after 5 s, then whenever the wait has doubled."""

  def __init__(self, timeout_seconds: float):
    """Starts the wait, which ends after `timeout_seconds`."""
    self._began, self._seconds = time.monotonic(), timeout_seconds
    self._next = FIRST_NOTICE_SECONDS

  def left(self) -> float:
    """Returns the seconds until the next one is due."""
    return max(0.0, self._began + self._next - time.monotonic())

  def say(self, what: Callable[[], str]) -> None:
    """Prints, if one is due, what is waited for, and for how long so far and at most."""
    waited = time.monotonic() - self._began
    if waited < self._next:
      return
    self._next *= 2
    print(
      f"{what()}, for {waited:.0f} s so far, of processes.start_timeout_seconds={self._seconds:g}",
      file=sys.stderr,
      flush=True,
    )


class Roll:
  """The processes that have arrived, and their connections."""

  def __init__(
    self, own: dict[str, Any], key: bytes, timeout_seconds: float, full: str = "", address: str = ""
  ):
    """Has no connections yet.

    Args:
      own: the hello of process 0.
      key: the token.
      timeout_seconds: how long the others may take, for messages.
      full: why this machine cannot have so many connections; "" if it can.
      address: of the coordinator, for messages.
    """
    self._address = address
    self._count, self._key, self._seconds = own["count"], key, timeout_seconds
    self._there = {0: own}
    self._members: dict[_Connection, None] = {}
    self._strangers: dict[_Connection, None] = {}  # oldest first: all have the same time
    self._dropped: collections.Counter[tuple[str, str]] = collections.Counter()  # why, host
    self._notified: set[int] = set()  # indices of processes that know of the error
    self._notices = Notices(timeout_seconds)
    self._selector = selectors.DefaultSelector()
    self._kind, self._error = self._wrong(own)
    if full and not self._error:
      self._kind, self._error = FULL, full

  def take(self, listeners: Sequence[socket.socket], deadline: float) -> dict[str, Any]:
    """Returns the answer that was sent to all: `error` ("" for none) and its `kind`."""
    with self._selector:
      for listener in listeners:
        self._selector.register(listener, selectors.EVENT_READ)
      try:
        self._listen_until(deadline)
        if not self._error and len(self._there) < self._count:
          self._kind, self._error = MISSING, self._missing()
        answer = self._answer()
        for listener in listeners:
          self._selector.unregister(listener)
        for stranger in [*self._strangers]:
          self._close(stranger)
        self._tell(self._members, answer)
        self._wait_for_their_ends()
      finally:
        for connection in [*self._members, *self._strangers]:
          connection.socket.close()
    return answer

  def _listen_until(self, deadline: float) -> None:
    """Accepts processes as they connect and leave, until all have arrived or the time is over."""
    if self._error:
      deadline = min(deadline, time.monotonic() + _OWN_ERROR_SECONDS)
    while len(self._notified if self._error else self._members) < self._count - 1:
      now = time.monotonic()
      if now >= deadline:
        return
      for key, _ in self._selector.select(min(deadline - now, _PAUSE_SECONDS)):
        if key.data is None:
          self._accept(key.fileobj)
        elif key.data in self._members or key.data in self._strangers:  # not dropped meanwhile
          had_error = bool(self._error)
          self._read(key.data)
          if self._error and not had_error:
            deadline = min(deadline, time.monotonic() + _LATE_SECONDS)
      self._drop_the_silent()
      if not self._error:
        self._notices.say(self._waiting)

  # ------------------------------ connections ------------------------------

  def _accept(self, listener: socket.socket) -> None:
    """Accepts connections, and greets them."""
    for _ in range(_AT_ONCE):
      try:
        accepted, peer = listener.accept()
      except BlockingIOError:
        return
      except OSError as error:
        if not listening.out_of_files(error):
          return  # it has disconnected
        if not self._strangers:
          time.sleep(_PAUSE_SECONDS)  # out of resources, perhaps temporarily
          return
        self._drop(next(iter(self._strangers)), "crowded out")
        continue
      now = time.monotonic()
      connection = _Connection(accepted, str(peer[0]), now + HELLO_SECONDS)
      self._strangers[connection] = None
      accepted.setblocking(False)
      self._selector.register(accepted, selectors.EVENT_READ, connection)
      text = json.dumps({"meshwright": 1, "nonce": connection.nonce})
      self._send(connection, tokens.line(self._key, GREETING, text))
      if len(self._strangers) > _MOST_STRANGERS:
        self._drop(next(iter(self._strangers)), "crowded out")

  def _read(self, connection: _Connection) -> None:
    """Reads what a connection sends: its hello, or that it ends."""
    try:
      part = connection.socket.recv(tokens.LINE_BYTES)
    except BlockingIOError:
      return
    except OSError:
      part = b""
    if connection.hello is not None:  # no further message is expected: it has died, and may return
      self._forget(connection)
      return
    connection.received += part
    if not part:
      self._drop(connection, "closed before it sent a message")
    elif len(connection.received) > tokens.LINE_BYTES:
      self._drop(connection, "too long")
    elif connection.received.endswith(b"\n"):
      self._hear(connection)

  def _hear(self, connection: _Connection) -> None:
    """Reads a complete line as a hello, or drops its sender."""
    try:
      signature, text = tokens.split_line(connection.received)
    except ValueError:
      self._drop(connection, "unsigned")
      return
    if not tokens.signed(self._key, signature, HELLO, text, connection.nonce):
      self._drop(connection, "signed with another token")
      return
    try:
      hello = tokens.read_object(text)
      if not _is_hello(hello):
        raise ValueError(text)
    except ValueError:
      self._drop(connection, "malformed")
      return
    connection.received = b""
    connection.hello = hello
    del self._strangers[connection]
    self._members[connection] = None
    if not self._error:
      self._kind, self._error = self._wrong(hello)
      if self._error:
        self._tell([*self._members], self._answer())
    else:
      self._tell([connection], self._answer())
    self._there.setdefault(hello["index"], hello)

  def _drop_the_silent(self) -> None:
    now = time.monotonic()
    while self._strangers and (oldest := next(iter(self._strangers))).deadline < now:
      self._drop(oldest, "silent")

  def _drop(self, connection: _Connection, why: str) -> None:
    """Closes a connection that is not of this run, and counts it."""
    known = (why, connection.host) in self._dropped or len(self._dropped) < _MOST_HOSTS
    self._dropped[why, connection.host if known else "others"] += 1
    del self._strangers[connection]
    self._close(connection)

  def _forget(self, connection: _Connection) -> None:
    """Counts a process that had arrived as missing again."""
    del self._members[connection]
    self._close(connection)
    index = connection.hello["index"]
    if self._there.get(index) is connection.hello:
      del self._there[index]

  def _close(self, connection: _Connection) -> None:
    with contextlib.suppress(KeyError, ValueError):
      self._selector.unregister(connection.socket)
    connection.socket.close()

  # ------------------------------ messages ------------------------------

  def _answer(self) -> dict[str, Any]:
    run = "" if self._error else secrets.token_hex(16)
    return {"error": self._error, "kind": self._kind, "count": self._count, "run": run}

  def _tell(self, connections: Iterable[_Connection], answer: dict[str, Any]) -> None:
    text = json.dumps(answer)
    for connection in connections:
      if connection.answered:
        continue
      connection.answered = True
      self._notified.add(connection.hello["index"])
      nonces = (connection.nonce, connection.hello["nonce"])
      self._send(connection, tokens.line(self._key, ANSWER, text, *nonces))

  def _send(self, connection: _Connection, data: bytes) -> None:
    # A few kilobytes fit into the buffer of a peer that reads; a peer that does not is dropped.
    with contextlib.suppress(OSError):
      connection.socket.send(data)

  def _wait_for_their_ends(self) -> None:
    """Lets the others close first: the side that closes first keeps the port busy for a while."""
    until = time.monotonic() + _CLOSE_SECONDS
    while self._members and time.monotonic() < until:
      for key, _ in self._selector.select(_PAUSE_SECONDS):
        if key.data in self._members:
          self._read(key.data)

  def _wrong(self, hello: dict[str, Any]) -> tuple[str, str]:
    """Returns what is wrong with a hello: its kind and a sentence, or "" and ""."""
    index, name = hello["index"], who(hello)
    if hello["refused"]:
      return REFUSED, f"process {index} ({name}) refused: {printable(hello['refused'])}"
    if hello["count"] != self._count:
      return COUNTS, (
        f"process 0 ({who(self._there[0])}) was started as one of {self._count}, process {index} "
        f"({name}) as one of {hello['count']}; start all with the same number"
      )
    if index in self._there and hello is not self._there[index]:
      return TWICE, (
        f"two processes say that they are process {index} of {self._count}: "
        f"{who(self._there[index])} and {name}; stop one, or give each a different index"
      )
    return "", ""

  def _waiting(self) -> str:
    missing = [index for index in range(self._count) if index not in self._there]
    return (
      f"process 0 ({who(self._there[0])}) waits at {self._address} for process {_ranges(missing)}; "
      f"{len(self._there)} of {self._count} have connected{self._dropped_text()}"
    )

  def _missing(self) -> str:
    missing = [index for index in range(self._count) if index not in self._there]
    there = [f"{index} ({who(hello)})" for index, hello in sorted(self._there.items())]
    return (
      f"{len(self._there)} of {self._count} processes connected within "
      f"processes.start_timeout_seconds={self._seconds:g}; missing: {_ranges(missing)}; "
      f"connected: {', '.join(there[:_MOST_NAMED])}{_more(len(there))}{self._dropped_text()}"
    )

  def _dropped_text(self) -> str:
    if not self._dropped:
      return ""
    parts = []
    for why in sorted({why for why, _ in self._dropped}):
      hosts = {host: n for (reason, host), n in self._dropped.items() if reason == why}
      names = ", ".join(printable(host, newlines=False) for host in sorted(hosts)[:4])
      parts.append(f"{sum(hosts.values())} {why} (from {names}{_more(len(hosts), 4)})")
    text = f"; connections dropped: {', '.join(parts)}"
    if any(why == "signed with another token" for why, _ in self._dropped):
      text += f"; start all processes with the same {tokens.VARIABLE}, or all without it"
    return text


def who(hello: dict[str, Any]) -> str:
  """Returns where a process runs, for messages."""
  return f"{printable(hello['host'], newlines=False, longest=255)}, pid {hello['pid']}"


def checked_answer(answer: dict[str, Any]) -> dict[str, Any]:
  """Returns an answer; raises ValueError if it is malformed."""
  types = {"error": str, "kind": str, "count": int, "run": str}
  if {name: type(value) for name, value in answer.items()} != types:
    raise ValueError("no answer")
  return answer


def _is_hello(hello: dict[str, Any]) -> bool:
  if {name: type(value) for name, value in hello.items()} != _HELLO:
    return False
  return 0 < hello["index"] < hello["count"]


def _ranges(numbers: Sequence[int]) -> str:
  """Returns ascending numbers, `1, 4-7, 9`, and how many more there are."""
  spans: list[list[int]] = []
  for number in numbers:
    if spans and number == spans[-1][1] + 1:
      spans[-1][1] = number
    else:
      spans.append([number, number])
  texts = [f"{first}-{last}" if first != last else f"{first}" for first, last in spans]
  rest = sum(last - first + 1 for first, last in spans[_MOST_NAMED:])
  return ", ".join(texts[:_MOST_NAMED]) + (f" and {rest} more" if rest else "")


def _more(count: int, most: int = _MOST_NAMED) -> str:
  return f" and {count - most} more" if count > most else ""
