"""Rendezvous before JAX connects: names missing and surplus processes.

`jax.distributed.initialize` waits for all processes, and if one is missing ends every process by
SIGABRT without naming it (jax#22436). So process 0 first listens on the port that JAX's
coordination service will use, and the others report there. A conversation is three lines, each
`SIGNATURE JSON`, signed with the token of the run (processes/tokens.py):

- process 0 greets with a nonce, so the other knows that both have the same token,
- the other identifies itself, with its own nonce,
- process 0 replies once all have arrived, or with an error.

A signature covers the purpose and the nonces, so no line can be replayed. A process that dies while
it waits counts as missing again. Unsigned messages are dropped and counted.
"""

import json
import os
import secrets
import select
import socket
import time
from typing import Any

from processes import arrivals, listening, tokens
from runtime import exit_codes
from runtime.printable import printable

_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
# After seeing only another token for this long, give up: an ending run would be gone by then.
_OTHER_TOKEN_SECONDS = 10.0
_LONGEST_REASON = 4000  # characters of why a process refuses
# The variable with the coordinator's host:port, set by `python -m processes.launch`, by
# processes/launch/jobset.yaml, or manually on each host.
ADDRESS = "JAX_COORDINATOR_ADDRESS"


class RollCallError(RuntimeError):
  """There are too many processes, or they disagree on their number, as this one has seen itself."""


class ToldError(RollCallError, exit_codes.RetryableError):
  """Another process refuses or reports an error that this one has not seen itself."""


class MissingError(RollCallError, exit_codes.RetryableError):
  """Processes did not arrive in time; a retry may succeed."""


class PortError(RollCallError, exit_codes.RetryableError):
  """The coordinator's port is in use; a retry may succeed."""


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
  deadline = time.monotonic() + timeout_seconds
  if index == 0:
    key, answer = _take(address, hello, token, deadline, timeout_seconds)
  else:
    key, answer = _Caller(address, hello, token, timeout_seconds).answer(deadline)
  if answer["error"]:
    raise _error(answer, index, count)
  return tokens.sign(key, "run", answer["run"]).encode()


def _error(answer: dict[str, Any], index: int, count: int) -> RollCallError:
  """Returns the error that this process raises; a RollCallError only if it has seen it itself."""
  text, kind = printable(answer["error"]), answer["kind"]
  if kind == arrivals.MISSING:
    return MissingError(text)
  # The numbers are compared here, so that another process need not be trusted.
  differs = kind == arrivals.COUNTS and answer["count"] != count
  if differs or (index == 0 and kind != arrivals.REFUSED):
    return RollCallError(text)
  return ToldError(text)


def _take(
  address: str, hello: dict[str, Any], token: tokens.Token, deadline: float, seconds: float
) -> tuple[bytes, dict[str, Any]]:
  """Runs the rendezvous as process 0; returns the token and the answer that all get."""
  full = listening.room_for(hello["count"])
  try:
    listeners = listening.listen(address)
  except OSError as error:
    port, why = listening.split(address)[1], os.strerror(error.errno)
    text, other = f"process 0 cannot listen on port {port} of its host ({why}", f"port in {ADDRESS}"
    if not exit_codes.retryable(error):  # a port below 1024
      raise RollCallError(f"{text}); give all processes another {other}") from error
    raise PortError(
      f"{text} by {listening.holder(port)}); a run that is about to end frees it, and the same "
      f"command then starts; otherwise end what holds it, or give all processes another {other}"
    ) from error
  try:  # the port first: only its owner publishes a token for this address
    with token.shown() as key:
      return key, arrivals.Roll(hello, key, seconds, full, address).take(listeners, deadline)
  finally:
    listening.close(listeners)


class _Caller:
  """A process other than 0, which reports to process 0."""

  def __init__(self, address: str, hello: dict[str, Any], token: tokens.Token, seconds: float):
    self._address, self._hello, self._token, self._seconds = address, hello, token, seconds
    self._why = "nothing listens there"
    self._other_since: float | None = None  # since when only another token was seen
    self._notices = arrivals.Notices(seconds)
    self._name = f"process {hello['index']} ({arrivals.who(hello)})"

  def answer(self, deadline: float) -> tuple[bytes, dict[str, Any]]:
    """Reports until process 0 answers; returns the token and the answer, or that there was none."""
    pause = _PAUSE_SECONDS
    while time.monotonic() < deadline:
      self._notices.say(lambda: f"{self._name} waits for process 0 at {self._address}: {self._why}")
      if key := tokens.wait_for(self._token, min(deadline, time.monotonic() + self._patience())):
        if answer := self._try(key, deadline):
          return key, answer
      else:
        self._why = f"no token: {self._token} is not there" + (
          f"; does this process see the same workdir? Else set {tokens.VARIABLE} for all"
          if str(self._token) != tokens.VARIABLE
          else ", and process 0 may have one"
        )
      waited = self._other_since and time.monotonic() - self._other_since
      if waited and waited > _OTHER_TOKEN_SECONDS:
        break
      # Thousands that arrived too early must not keep the host of process 0 busy.
      time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
      pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.2)
    text = (
      f"{self._name} found no process 0 of its run at {self._address} within "
      f"processes.start_timeout_seconds={self._seconds:g} ({self._why})"
    )
    return b"", {"error": text, "kind": arrivals.MISSING}

  def _patience(self) -> float:
    """Returns how long to wait for something before a notice may be due."""
    return max(0.05, self._notices.left())

  def _try(self, key: bytes, deadline: float) -> dict[str, Any] | None:
    """Reports once; returns the answer, or None and remembers the reason."""
    host, port = listening.split(self._address)
    seconds = min(_CONNECT_SECONDS, max(1.0, deadline - time.monotonic()))
    try:
      with socket.create_connection((host, port), timeout=seconds) as connection:
        return self._talk(connection, key, deadline)
    except TimeoutError:
      self._why, self._other_since = "no answer from there", None
    except ValueError:  # JAX's service listens already: the rendezvous is over
      self._why = "something else answers there: a run that has begun with all its processes?"
      self._other_since = None
    except OSError as error:
      self._why, self._other_since = error.strerror or str(error), None
    return None

  def _talk(self, connection: socket.socket, key: bytes, deadline: float) -> dict[str, Any] | None:
    signature, text = tokens.split_line(
      _read_line(connection, time.monotonic() + connection.gettimeout())
    )
    greeting = tokens.read_object(text)
    nonces = [str(greeting.get("nonce")), secrets.token_hex(16)]
    mine = tokens.signed(key, signature, arrivals.GREETING, text)
    body = json.dumps({**self._hello, "nonce": nonces[1]})
    # Even to a process with another token: it cannot use the line, but counts it.
    connection.sendall(tokens.line(key, arrivals.HELLO, body, nonces[0]))
    if not mine:
      self._why = f"process 0 there has another token than this process, from {self._token}"
      self._other_since = self._other_since or time.monotonic()
      return None
    self._other_since = None
    while not select.select([connection], [], [], self._patience())[0]:
      self._notices.say(
        lambda: f"{self._name} has reached process 0 at {self._address}, which waits for others"
      )
      if time.monotonic() > deadline + _CONNECT_SECONDS:
        raise TimeoutError
    signature, text = tokens.split_line(_read_line(connection, deadline + _CONNECT_SECONDS))
    if not tokens.signed(key, signature, arrivals.ANSWER, text, *nonces):
      raise ValueError("the answer is not signed")
    return arrivals.checked_answer(tokens.read_object(text))


def _read_line(connection: socket.socket, deadline: float) -> bytes:
  """Reads a peer's line; raises ValueError if it is too long, TimeoutError after the deadline."""
  received = b""
  while not received.endswith(b"\n"):
    connection.settimeout(max(0.01, deadline - time.monotonic()))
    part = connection.recv(tokens.LINE_BYTES)
    received += part
    if not part:
      raise ConnectionError("the connection was closed")
    if len(received) > tokens.LINE_BYTES:
      raise ValueError("no line")
    if deadline < time.monotonic():
      raise TimeoutError
  return received
