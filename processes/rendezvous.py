"""Rendezvous before JAX connects: names missing and surplus processes.

`jax.distributed.initialize` waits for all processes, and if one is missing ends every process by
SIGABRT without naming it (jax#22436). So process 0 first listens on the port that JAX's
coordination service will use, and the others report there. A conversation is two lines, each
`SIGNATURE JSON`, signed with the token of the run (processes/tokens.py): the other says who it is;
process 0 answers once all have arrived, or with an error. An answer is signed together with the
line that it answers.

A process that dies while it waits counts as missing again. No connection can end the wait or block
it for the others: each has a time in which to say who it is and a limit on what it may send, and is
dropped and counted if its line is not signed. The size of an answer does not grow with the number
of processes.
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
from collections.abc import Mapping, Sequence
from typing import Any

from processes import listening, tokens
from runtime import exit_codes, files
from runtime.printable import few, printable

FIRST_NOTICE_SECONDS = 5.0
HELLO, ANSWER = "hello", "answer"
_HELLO = {"index": int, "count": int, "host": str, "pid": int, "refused": str}
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
    key, answer = _report(address, hello, token, wait)
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

  def is_due(self) -> bool:
    """Returns whether a notice is due."""
    return time.monotonic() - self._began >= self._notice_after

  def say(self, what: str) -> None:
    """Prints, if a notice is due, what is waited for, and for how long so far and at most."""
    if self.is_due():
      self._notice_after *= 2
      waited = time.monotonic() - self._began
      limit = f"processes.start_timeout_seconds={self.seconds:g}"
      print(f"{what}, for {waited:.0f} s so far, of {limit}", file=sys.stderr, flush=True)


# ------------------------------ process 0 ------------------------------

HELLO_SECONDS = 10.0
# After an error: for processes that are about to connect.
_LATE_SECONDS = 3.0
_OWN_ERROR_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_MOST_NAMED = 16
_NAMED_HOSTS = 4  # of dropped connections
_OTHER_TOKEN = "signed with another token"


def _take(
  address: str, hello: dict[str, Any], token: tokens.Token, wait: _Wait
) -> tuple[bytes, dict[str, Any]]:
  """Runs the rendezvous as process 0; returns the token and the answer that all get."""
  full = listening.room_for(hello["count"])
  try:
    listener = listening.listen(address)
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
  # The port first: only its owner publishes a token for this address.
  with listener, token.shown() as key:
    return key, asyncio.run(_RollCall(address, hello, key, wait, full).take(listener))


class _RollCall:
  """The processes that have arrived, and their connections: one thread for thousands."""

  def __init__(self, address: str, own: dict[str, Any], key: bytes, wait: _Wait, full: str):
    """Has no connections yet; `full`: why this machine cannot have so many, "" if it can."""
    self._key, self._address, self._count, self._wait = key, address, own["count"], wait
    self._open: dict[asyncio.StreamWriter, asyncio.Task] = {}  # every connection
    self._members: dict[asyncio.StreamWriter, dict[str, Any]] = {}  # with what they said
    self._there = {0: own}
    self._answered: dict[asyncio.StreamWriter, int] = {}  # with their indices
    self._dropped: collections.Counter[str] = collections.Counter()  # why -> connections
    self._hosts = collections.defaultdict(set)  # why -> hosts of some of them
    self._deadline = wait.deadline
    self._changed = asyncio.Event()
    self._kind, self._error = self._wrong(own)
    if full and not self._error:
      self._kind, self._error = FULL, full
    if self._error:
      self._deadline = min(self._deadline, time.monotonic() + _OWN_ERROR_SECONDS)

  async def take(self, listener: socket.socket) -> dict[str, Any]:
    """Returns the answer that was sent to all: `error` ("" for none) and its `kind`."""
    server = await asyncio.start_server(
      self._serve, sock=listener, limit=tokens.LINE_BYTES, backlog=listening.BACKLOG
    )
    while self._is_waited_for() and time.monotonic() < self._deadline:
      await self._wait_for_change()
      if not self._error and self._wait.is_due():
        self._wait.say(self._waiting())
    if not self._error and len(self._there) < self._count:
      self._kind, self._error = MISSING, self._missing()
    server.close()
    run = "" if self._error else secrets.token_hex(16)
    for writer in self._members.keys() - self._answered.keys():
      self._answer(writer, run)
    # The others close first: the side that closes first keeps the port busy for a while.
    self._deadline = time.monotonic() + _CLOSE_SECONDS
    while self._members and time.monotonic() < self._deadline:
      await self._wait_for_change()
    if tasks := [*self._open.values()]:
      for writer in self._open:
        writer.transport.abort()
      await asyncio.wait(tasks)
    return {"error": self._error, "kind": self._kind, "count": self._count, "run": run}

  def _is_waited_for(self) -> bool:
    """Returns whether a process is missing, or does not know of the error yet."""
    if self._error:
      return len({*self._answered.values()}) < self._count - 1
    return len(self._members) < self._count - 1

  async def _wait_for_change(self) -> None:
    """Waits for a process to come or to leave, a notice that is due, or the deadline."""
    seconds = min(self._wait.until_notice(), max(0.0, self._deadline - time.monotonic()))
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(self._changed.wait(), seconds)
    self._changed.clear()

  async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes what a connection says, until its end."""
    self._open[writer] = asyncio.current_task()
    try:
      hello, why = await self._hello(reader)
      if hello is None:
        self._drop(writer, why)
        return
      self._arrive(writer, hello)
      with contextlib.suppress(OSError, ValueError):
        await reader.read(1)  # a process says nothing more, so anything means that it is broken
      self._leave(writer)
    finally:
      del self._open[writer]
      if not writer.is_closing():
        writer.transport.abort()

  async def _hello(self, reader: asyncio.StreamReader) -> tuple[dict[str, Any] | None, str]:
    """Returns what a process of this run says; of other connections None, and what is wrong."""
    try:
      line = await asyncio.wait_for(reader.readline(), HELLO_SECONDS)
      if not line.endswith(b"\n"):
        return None, "closed before it sent a message"
    except TimeoutError:
      return None, "silent"
    except ValueError:
      return None, "too long"
    except OSError:
      return None, "closed before it sent a message"
    try:
      signature, text = tokens.split_line(line)
    except ValueError:
      return None, "unsigned"
    if not tokens.signed(self._key, signature, HELLO, text):
      return None, _OTHER_TOKEN
    try:
      hello = _read_object(text, _HELLO)
    except ValueError:
      return None, "malformed"
    if not 0 < hello["index"] < hello["count"]:
      return None, "malformed"
    return {**hello, "text": text}, ""

  def _drop(self, writer: asyncio.StreamWriter, why: str) -> None:
    """Counts a connection that is not of this run, and remembers some of their hosts."""
    self._dropped[why] += 1
    if len(self._hosts[why]) <= _NAMED_HOSTS:
      host = (writer.get_extra_info("peername") or ["unknown"])[0]
      self._hosts[why].add(printable(host, newlines=False))
    if why == _OTHER_TOKEN:  # by the signature, its sender sees that the tokens differ
      writer.write(tokens.line(self._key, ANSWER, "{}"))
      writer.close()

  def _arrive(self, writer: asyncio.StreamWriter, hello: dict[str, Any]) -> None:
    """Takes a process; if there is an error, it is told, and so are all when it is new."""
    self._members[writer] = hello
    told = [writer]
    if not self._error:
      self._kind, self._error = self._wrong(hello)
      told = [*self._members]
      if self._error:
        self._deadline = min(self._deadline, time.monotonic() + _LATE_SECONDS)
    if self._error:
      for member in told:
        self._answer(member)
    self._there.setdefault(hello["index"], hello)
    self._changed.set()

  def _leave(self, writer: asyncio.StreamWriter) -> None:
    """Counts a process whose connection has ended as missing again."""
    hello = self._members.pop(writer)
    if self._there.get(hello["index"]) is hello:
      del self._there[hello["index"]]
    self._changed.set()

  def _answer(self, writer: asyncio.StreamWriter, run: str = "") -> None:
    hello = self._members[writer]
    self._answered[writer] = hello["index"]
    answer = {"error": self._error, "kind": self._kind, "count": self._count, "run": run}
    writer.write(tokens.line(self._key, ANSWER, json.dumps(answer), hello["text"]))

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
    return (
      f"{len(self._there)} of {self._count} processes connected within "
      f"processes.start_timeout_seconds={self._wait.seconds:g}; missing: {self._absent()}; "
      f"connected: {few(there, _MOST_NAMED)}{self._dropped_text()}"
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
    if self._dropped[_OTHER_TOKEN]:
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
  content = files.parse_json(text)
  if {name: type(value) for name, value in content.items()} != types:
    raise ValueError("malformed")
  return content


# ------------------------------ the others ------------------------------

_PAUSE, _LONGEST_PAUSE = 0.1, 1.0  # seconds
_CONNECT_SECONDS = 10.0
# After seeing only another token for this long, give up: an ending run would be gone by then.
_OTHER_TOKEN_SECONDS = 10.0


class _OtherTokenError(Exception):
  """Process 0 has signed with another token."""


def _report(
  address: str, hello: dict[str, Any], token: tokens.Token, wait: _Wait
) -> tuple[bytes, dict[str, Any]]:
  """Reports until process 0 answers; returns the token and the answer, or that there was none."""
  name, why, pause = f"process {hello['index']} ({_who(hello)})", "nothing listens there", _PAUSE
  other_since: float | None = None  # since when only another token was seen
  while (left := wait.deadline - time.monotonic()) > 0:
    wait.say(f"{name} waits for process 0 at {address}: {why}")
    since, other_since = other_since, None
    key = token.read()
    try:
      if key:
        return key, _ask(address, hello, key, wait, f"{name} has reached process 0 at {address}")
      why = f"no token: {token} is not there" + (
        f"; does this process see the same workdir? Else set {tokens.VARIABLE} for all"
        if str(token) != tokens.VARIABLE
        else ", and process 0 may have one"
      )
    except _OtherTokenError:
      why = f"process 0 there has another token than this process, from {token}"
      other_since = since or time.monotonic()
      if time.monotonic() - other_since > _OTHER_TOKEN_SECONDS:
        break
    except TimeoutError:
      why = "no answer from there"
    except ValueError:  # JAX's service listens already: the rendezvous is over
      why = "something else answers there: a run that has begun with all its processes?"
    except OSError as error:
      why = error.strerror or str(error)
    # Thousands that arrived too early must not keep the host of process 0 busy.
    time.sleep(min(pause, left))
    pause = min(_LONGEST_PAUSE, pause * 1.2)
  text = (
    f"{name} found no process 0 of its run at {address} within "
    f"processes.start_timeout_seconds={wait.seconds:g} ({why})"
  )
  return b"", {"error": text, "kind": MISSING}


def _ask(
  address: str, hello: dict[str, Any], key: bytes, wait: _Wait, notice: str
) -> dict[str, Any]:
  """Reports once, and returns the answer; gives notice of the wait for it.

  Raises:
    ValueError: what answers is not process 0 of a run.
    _OtherTokenError: it is that of another run.
    OSError: it cannot be reached, or the connection has ended; TimeoutError: there is no answer.
  """
  seconds = min(_CONNECT_SECONDS, max(1.0, wait.deadline - time.monotonic()))
  text, received = json.dumps(hello), b""
  with socket.create_connection(listening.split(address), timeout=seconds) as connection:
    connection.sendall(tokens.line(key, HELLO, text))
    deadline = wait.deadline + _CONNECT_SECONDS
    while not received.endswith(b"\n"):
      wait.say(f"{notice}, which waits for others")
      if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
      connection.settimeout(min(left, wait.until_notice()))
      with contextlib.suppress(TimeoutError):
        part = connection.recv(tokens.LINE_BYTES)
        received += part
        if not part:
          raise ConnectionError("the connection was closed")
      if len(received) > tokens.LINE_BYTES:
        raise ValueError("too long")
  signature, answer = tokens.split_line(received)
  if not tokens.signed(key, signature, ANSWER, answer, text):
    raise _OtherTokenError
  return _read_object(answer, _ANSWER)
