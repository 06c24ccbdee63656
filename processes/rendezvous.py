"""Rendezvous before JAX connects: names missing and surplus processes.

`jax.distributed.initialize` waits for all processes, and if one is missing ends every process by
SIGABRT without naming it (jax#22436). So process 0 first listens on the port that JAX's
coordination service will use, and the others report there. A conversation is three lines, each
`SIGNATURE JSON`, signed with the token of the run (processes/tokens.py):

- process 0 greets with a nonce, so the other knows that both have the same token,
- the other identifies itself, with its own nonce,
- process 0 replies once all have arrived, or with an error.

A signature covers the purpose and the nonces, so no line can be replayed. A process that dies while
it waits counts as missing again. No connection can end the wait or block it for the others: each
has its own deadline to identify itself and a limit on what it may send, and is dropped and counted
if its message is not signed. The size of a reply does not grow with the number of processes.
"""

import asyncio
import collections
import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from processes import listening, tokens
from runtime import exit_codes
from runtime.printable import printable

FIRST_NOTICE_SECONDS = 5.0
GREETING, HELLO, ANSWER = "greeting", "hello", "answer"
_HELLO = {"index": int, "count": int, "host": str, "pid": int, "refused": str, "nonce": str}
_ANSWER = {"error": str, "kind": str, "count": int, "run": str}
# Kinds of answers; "" if all processes have arrived.
MISSING, COUNTS, TWICE, REFUSED, FULL = "missing", "counts", "twice", "refused", "full"


class RollCallError(RuntimeError):
  """There are too many processes, or they disagree on their number, as this one has seen itself."""


class ToldError(RollCallError, exit_codes.RetryableError):
  """Another process refuses or reports an error that this one has not seen itself."""


class MissingError(RollCallError, exit_codes.RetryableError):
  """Processes did not arrive in time; a retry may succeed."""


class PortError(RollCallError, exit_codes.RetryableError):
  """The coordinator's port is in use; a retry may succeed."""


_LONGEST_REASON = 4000  # characters of why a process refuses


def call(
  address: str,
  count: int,
  index: int,
  *,
  token: tokens.Token,
  timeout_seconds: float,
  refused: str = "",
) -> bytes:
  """Returns once all processes of the run have arrived.

  Args:
    address: host:port of process 0, where JAX's coordination service will listen.
    count: how many processes this one expects.
    index: of this process.
    token: of the run.
    timeout_seconds: how long the others may take to arrive.
    refused: why this process refuses to run, which ends the others' wait.

  Returns:
    The key of this start of the run, known only to its processes.

  Raises:
    RollCallError: processes have the same index, or disagree on their number.
    ToldError: another process reports an error.
    MissingError: processes did not arrive.
    PortError: the port is in use.
    OSError: the token can be neither published nor read.
  """
  hello = {"index": index, "count": count, "host": socket.gethostname(), "pid": os.getpid()}
  hello["refused"] = refused[:_LONGEST_REASON]
  wait = _Wait(timeout_seconds)
  if index == 0:
    key, answer = _take(address, hello, token, wait)
  else:
    key, answer = _Caller(address, hello, token, wait).answer()
  if not answer["error"]:
    return tokens.sign(key, "run", answer["run"]).encode()
  text, kind = printable(answer["error"]), answer["kind"]
  if kind == MISSING:
    raise MissingError(text)
  # The numbers are compared here, so that another process need not be trusted.
  if (kind == COUNTS and answer["count"] != count) or (index == 0 and kind != REFUSED):
    raise RollCallError(text)
  raise ToldError(text)


class _Wait:
  """A wait with a deadline; says on standard error what is waited for.

  After 5 s, then whenever the wait has doubled.
  """

  def __init__(self, seconds: float):
    self.seconds, self._began = seconds, time.monotonic()
    self.deadline = self._began + seconds
    self._notice_after = FIRST_NOTICE_SECONDS

  def until_notice(self) -> float:
    """Returns the seconds until a notice is due, or the wait is over; some in any case."""
    due = min(self._began + self._notice_after, self.deadline)
    return max(0.05, due - time.monotonic())

  def say(self, what: Callable[[], str]) -> None:
    """Prints, if a notice is due, what is waited for, and for how long so far and at most."""
    waited = time.monotonic() - self._began
    if waited >= self._notice_after:
      self._notice_after *= 2
      limit = f"processes.start_timeout_seconds={self.seconds:g}"
      print(f"{what()}, for {waited:.0f} s so far, of {limit}", file=sys.stderr, flush=True)


# ------------------------------ process 0 ------------------------------

HELLO_SECONDS = 10.0
# After an error: for processes that are about to connect.
_LATE_SECONDS = 3.0
_OWN_ERROR_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_MOST_STRANGERS = 4096  # connections that have not identified themselves yet
_MOST_NAMED = 16
_NAMED_HOSTS = 4  # of dropped connections


def _take(
  address: str, hello: dict[str, Any], token: tokens.Token, wait: _Wait
) -> tuple[bytes, dict[str, Any]]:
  """Runs the rendezvous as process 0; returns the token and the answer that all get."""
  full = listening.room_for(hello["count"])
  try:
    listeners = listening.listen(address)
  except OSError as error:
    port, why = listening.split(address)[1], os.strerror(error.errno)
    text = f"process 0 cannot listen on port {port} of its host ({why}"
    other = "port in JAX_COORDINATOR_ADDRESS"
    if not exit_codes.retryable(error):  # a port below 1024
      raise RollCallError(f"{text}); give all processes another {other}") from error
    raise PortError(
      f"{text} by {listening.holder(port)}); a run that is about to end frees it, and the same "
      f"command then starts; otherwise end what holds it, or give all processes another {other}"
    ) from error
  try:  # the port first: only its owner publishes a token for this address
    with token.shown() as key:
      return key, asyncio.run(_RollCall(address, hello, key, wait, full).take(listeners))
  finally:
    for listener in listeners:
      listener.close()


class _Connection(asyncio.Protocol):
  """A connection to process 0; `hello`: its first message, None so far."""

  def __init__(self, roll: "_RollCall"):
    self._roll, self._received, self.host = roll, b"", "unknown"
    self.nonce, self.hello, self.answered = secrets.token_hex(16), None, False
    self.transport: asyncio.Transport | None = None
    self._timer: asyncio.TimerHandle | None = None

  def connection_made(self, transport: asyncio.Transport) -> None:
    """Greets whoever has connected."""
    self.transport = transport
    if peer := transport.get_extra_info("peername"):
      self.host = str(peer[0])
    self._timer = asyncio.get_running_loop().call_later(HELLO_SECONDS, self.drop, "silent")
    self._roll.strangers[self] = None
    text = json.dumps({"meshwright": 1, "nonce": self.nonce})
    transport.write(tokens.line(self._roll.key, GREETING, text))
    if len(self._roll.strangers) > _MOST_STRANGERS:
      self._roll.drop_oldest()

  def data_received(self, data: bytes) -> None:
    """Reads the hello; a process sends nothing else, so more means that it is broken."""
    if self.hello is not None:
      self.transport.abort()
      return
    self._received += data
    if len(self._received) > tokens.LINE_BYTES:
      self.drop("too long")
    elif self._received.endswith(b"\n"):
      self._hear()

  def _hear(self) -> None:
    try:
      signature, text = tokens.split_line(self._received)
    except ValueError:
      return self.drop("unsigned")
    if not tokens.signed(self._roll.key, signature, HELLO, text, self.nonce):
      return self.drop("signed with another token")
    try:
      hello = _read_object(text, _HELLO)
      if not 0 < hello["index"] < hello["count"]:
        raise ValueError(text)
    except ValueError:
      return self.drop("malformed")
    self._timer.cancel()
    self.hello = hello
    self._roll.arrived(self)
    return None

  def drop(self, why: str) -> None:
    """Closes a connection that is not of this run, and counts it."""
    self._timer.cancel()
    self.transport.abort()
    if self in self._roll.strangers:
      del self._roll.strangers[self]
      self._roll.count_dropped(why, self.host)

  def answer(self, answer: Mapping[str, Any]) -> None:
    """Sends the answer, once."""
    if not self.answered:
      self.answered = True
      nonces = (self.nonce, self.hello["nonce"])
      self.transport.write(tokens.line(self._roll.key, ANSWER, json.dumps(answer), *nonces))

  def connection_lost(self, error: Exception | None) -> None:
    """Counts a process that had arrived as missing again."""
    self.drop("closed before it sent a message")
    self._roll.left(self)


class _RollCall:
  """The processes that have arrived, and their connections: one thread for thousands."""

  def __init__(self, address: str, own: dict[str, Any], key: bytes, wait: _Wait, full: str):
    """Has no connections yet; `full`: why this machine cannot have so many, "" if it can."""
    self.key, self._address, self._count, self._wait = key, address, own["count"], wait
    self.strangers: dict[_Connection, None] = {}  # the oldest first
    self._members: dict[_Connection, None] = {}
    self._there = {0: own}
    self._notified: set[int] = set()  # indices of processes that know of the error
    self._dropped: collections.Counter[str] = collections.Counter()  # why -> connections
    self._hosts = collections.defaultdict(set)  # why -> hosts of some of them
    self._deadline = wait.deadline
    self._changed = asyncio.Event()
    self._kind, self._error = self._wrong(own)
    if full and not self._error:
      self._kind, self._error = FULL, full
    if self._error:
      self._deadline = min(self._deadline, time.monotonic() + _OWN_ERROR_SECONDS)

  async def take(self, listeners: Sequence[socket.socket]) -> dict[str, Any]:
    """Returns the answer that was sent to all: `error` ("" for none) and its `kind`."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(self._out_of_files)
    servers = [
      await loop.create_server(lambda: _Connection(self), sock=one, backlog=listening.BACKLOG)
      for one in listeners
    ]
    try:
      while len(self._notified if self._error else self._members) < self._count - 1:
        if time.monotonic() >= self._deadline:
          break
        await self._wait_for_change()
        if not self._error:
          self._wait.say(self._waiting)
      if not self._error and len(self._there) < self._count:
        self._kind, self._error = MISSING, self._missing()
      for server in servers:
        server.close()
      for stranger in self.strangers:
        stranger.transport.abort()
      answer = self._answer()
      for member in self._members:
        member.answer(answer)
      # The others close first: the side that closes first keeps the port busy for a while.
      self._deadline = time.monotonic() + _CLOSE_SECONDS
      while self._members and time.monotonic() < self._deadline:
        await self._wait_for_change()
    finally:
      for connection in [*self._members, *self.strangers]:
        connection.transport.abort()
      await asyncio.sleep(0)  # in which they are closed
    return answer

  async def _wait_for_change(self) -> None:
    """Waits for a process to come or to leave, a notice that is due, or the deadline."""
    seconds = min(self._wait.until_notice(), max(0.0, self._deadline - time.monotonic()))
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(self._changed.wait(), seconds)
    self._changed.clear()

  def _out_of_files(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Makes room where no connection can be accepted; other errors are of a single connection."""
    del loop
    if listening.out_of_files(context.get("exception")):
      for _ in range(1 + len(self.strangers) // 2):
        self.drop_oldest()

  def drop_oldest(self) -> None:
    """Drops the connection that has been silent for longest."""
    if self.strangers:
      next(iter(self.strangers)).drop("crowded out")

  def count_dropped(self, why: str, host: str) -> None:
    """Remembers that a connection was dropped."""
    self._dropped[why] += 1
    if len(self._hosts[why]) <= _NAMED_HOSTS:
      self._hosts[why].add(printable(host, newlines=False))

  def arrived(self, connection: _Connection) -> None:
    """Takes a process; if there is an error, it is told, and so are all when it is new."""
    hello = connection.hello
    del self.strangers[connection]
    self._members[connection] = None
    tell = [connection]
    if not self._error:
      self._kind, self._error = self._wrong(hello)
      tell = [*self._members]
      if self._error:
        self._deadline = min(self._deadline, time.monotonic() + _LATE_SECONDS)
    if self._error:
      for member in tell:
        member.answer(self._answer())
        self._notified.add(member.hello["index"])
    self._there.setdefault(hello["index"], hello)
    self._changed.set()

  def left(self, connection: _Connection) -> None:
    """Forgets a process whose connection has ended."""
    if connection in self._members:
      del self._members[connection]
      index = connection.hello["index"]
      if self._there.get(index) is connection.hello:
        del self._there[index]
      self._changed.set()

  def _answer(self) -> dict[str, Any]:
    run = "" if self._error else secrets.token_hex(16)
    return {"error": self._error, "kind": self._kind, "count": self._count, "run": run}

  # ------------------------------ messages ------------------------------

  def _wrong(self, hello: dict[str, Any]) -> tuple[str, str]:
    """Returns what is wrong with a hello: its kind and a sentence, or "" and ""."""
    index, name = hello["index"], _who(hello)
    if hello["refused"]:
      return REFUSED, f"process {index} ({name}) refused: {printable(hello['refused'])}"
    if hello["count"] != self._count:
      return COUNTS, (
        f"process 0 ({_who(self._there[0])}) was started as one of {self._count}, process {index} "
        f"({name}) as one of {hello['count']}; start all with the same number"
      )
    if index in self._there and hello is not self._there[index]:
      return TWICE, (
        f"two processes say that they are process {index} of {self._count}: "
        f"{_who(self._there[index])} and {name}; stop one, or give each a different index"
      )
    return "", ""

  def _absent(self) -> str:
    return _ranges([index for index in range(self._count) if index not in self._there])

  def _waiting(self) -> str:
    return (
      f"process 0 ({_who(self._there[0])}) waits at {self._address} for process {self._absent()}; "
      f"{len(self._there)} of {self._count} have connected{self._dropped_text()}"
    )

  def _missing(self) -> str:
    there = [f"{index} ({_who(hello)})" for index, hello in sorted(self._there.items())]
    more = f" and {len(there) - _MOST_NAMED} more" if len(there) > _MOST_NAMED else ""
    return (
      f"{len(self._there)} of {self._count} processes connected within "
      f"processes.start_timeout_seconds={self._wait.seconds:g}; missing: {self._absent()}; "
      f"connected: {', '.join(there[:_MOST_NAMED])}{more}{self._dropped_text()}"
    )

  def _dropped_text(self) -> str:
    if not self._dropped:
      return ""
    parts = []
    for why, number in sorted(self._dropped.items()):
      hosts = sorted(self._hosts[why])
      more = " and others" if len(hosts) > _NAMED_HOSTS else ""
      parts.append(f"{number} {why} (from {', '.join(hosts[:_NAMED_HOSTS])}{more})")
    text = f"; connections dropped: {', '.join(parts)}"
    if self._dropped["signed with another token"]:
      text += f"; start all processes with the same {tokens.VARIABLE}, or all without it"
    return text


def _who(hello: Mapping[str, Any]) -> str:
  """Returns where a process runs, for messages."""
  return f"{printable(hello['host'], newlines=False, longest=255)}, pid {hello['pid']}"


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


def _read_object(text: str, types: Mapping[str, type]) -> dict[str, Any]:
  """Returns a JSON object with exactly these types; raises ValueError if it is malformed."""
  content = tokens.read_object(text)
  if {name: type(value) for name, value in content.items()} != types:
    raise ValueError("malformed")
  return content


# ------------------------------ the others ------------------------------

_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
# After seeing only another token for this long, give up: an ending run would be gone by then.
_OTHER_TOKEN_SECONDS = 10.0


class _Caller:
  """A process other than 0, which reports to process 0."""

  def __init__(self, address: str, hello: dict[str, Any], token: tokens.Token, wait: _Wait):
    self._address, self._hello, self._token, self._wait = address, hello, token, wait
    self._why = "nothing listens there"
    self._other_since: float | None = None  # since when only another token was seen
    self._name = f"process {hello['index']} ({_who(hello)})"

  def answer(self) -> tuple[bytes, dict[str, Any]]:
    """Reports until process 0 answers; returns the token and the answer, or that there was none."""
    pause, wait = _PAUSE_SECONDS, self._wait
    while (left := wait.deadline - time.monotonic()) > 0:
      wait.say(lambda: f"{self._name} waits for process 0 at {self._address}: {self._why}")
      if key := tokens.wait_for(self._token, time.monotonic() + wait.until_notice()):
        if answer := self._try(key):
          return key, answer
      else:
        self._why = f"no token: {self._token} is not there" + (
          f"; does this process see the same workdir? Else set {tokens.VARIABLE} for all"
          if str(self._token) != tokens.VARIABLE
          else ", and process 0 may have one"
        )
      since = self._other_since
      if since is not None and time.monotonic() - since > _OTHER_TOKEN_SECONDS:
        break
      # Thousands that arrived too early must not keep the host of process 0 busy.
      time.sleep(min(pause, left))
      pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.2)
    text = (
      f"{self._name} found no process 0 of its run at {self._address} within "
      f"processes.start_timeout_seconds={wait.seconds:g} ({self._why})"
    )
    return b"", {"error": text, "kind": MISSING}

  def _try(self, key: bytes) -> dict[str, Any] | None:
    """Reports once; returns the answer, or None and remembers the reason."""
    left = self._wait.deadline - time.monotonic()
    since, self._other_since = self._other_since, None
    try:
      address, seconds = listening.split(self._address), min(_CONNECT_SECONDS, max(1.0, left))
      with socket.create_connection(address, timeout=seconds) as connection:
        signature, text = tokens.split_line(self._read_line(connection, seconds))
        nonces = [str(tokens.read_object(text).get("nonce")), secrets.token_hex(16)]
        body = json.dumps({**self._hello, "nonce": nonces[1]})
        # Even to a process with another token: it cannot use the line, but counts it.
        connection.sendall(tokens.line(key, HELLO, body, nonces[0]))
        if not tokens.signed(key, signature, GREETING, text):
          self._why = f"process 0 there has another token than this process, from {self._token}"
          self._other_since = since or time.monotonic()
          return None
        seconds = self._wait.deadline + _CONNECT_SECONDS - time.monotonic()
        line = self._read_line(connection, seconds, ", which waits for others")
        signature, text = tokens.split_line(line)
        if not tokens.signed(key, signature, ANSWER, text, *nonces):
          raise ValueError("the answer is not signed")
        return _read_object(text, _ANSWER)
    except TimeoutError:
      self._why = "no answer from there"
    except ValueError:  # JAX's service listens already: the rendezvous is over
      self._why = "something else answers there: a run that has begun with all its processes?"
    except OSError as error:
      self._why = error.strerror or str(error)
    return None

  def _read_line(self, connection: socket.socket, seconds: float, text: str = "") -> bytes:
    """Reads a line of process 0, giving notice of the wait.

    Raises:
      ValueError: it is too long.
      OSError: the connection has ended, or there is no line in this time.
    """
    received, deadline = b"", time.monotonic() + seconds
    while not received.endswith(b"\n"):
      self._wait.say(lambda: f"{self._name} has reached process 0 at {self._address}{text}")
      if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
      connection.settimeout(min(left, self._wait.until_notice()))
      with contextlib.suppress(TimeoutError):
        part = connection.recv(tokens.LINE_BYTES)
        received += part
        if not part:
          raise ConnectionError("the connection was closed")
      if len(received) > tokens.LINE_BYTES:
        raise ValueError("too long")
    return received
