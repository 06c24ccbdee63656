"""Who is there, before JAX connects: too few or too many processes are named, not waited for.

`jax.distributed.initialize` waits for everyone, and where someone is missing ends every process by
SIGABRT without naming anybody (jax#22436). So process 0 first calls the roll on the very port that
JAX's coordination service will take: every other process says who it is, in a line of JSON, and
gets the answer `{"error": ""}` once all are there, or what is wrong. One that dies meanwhile is
missing again.
"""

import contextlib
import json
import os
import select
import socket
import time
from typing import Any

_HELLO = {"index": int, "count": int, "host": str, "pid": int, "refused": str}
_PAUSE_SECONDS = 0.1
_LATE_SECONDS = 3.0
_LINE_BYTES = 2**16


class RollCallError(RuntimeError):
  """Processes are too many, do not agree on how many they are, or one has refused."""


class MissingError(RollCallError):
  """Processes have not come in time; the same again may go well."""


def call(
  address: str, count: int, index: int, *, timeout_seconds: float, refused: str = ""
) -> None:
  """Returns once all processes of the run have said that they are there.

  Args:
    address: host:port of process 0, where JAX's coordination service will listen.
    count: how many processes this one was told there are.
    index: which of them it is.
    timeout_seconds: how long the others may take to come.
    refused: why this process refuses to run, which ends the others' wait.

  Raises:
    RollCallError: with what every process is told: who is twice there, differs or refuses.
    MissingError: who has not come.
  """
  hello = {"index": index, "count": count, "host": socket.gethostname(), "pid": os.getpid()}
  hello["refused"] = refused
  host, _, port = address.rpartition(":")
  deadline = time.monotonic() + timeout_seconds
  if index == 0:
    answer = _Roll(hello, timeout_seconds).take(int(port), deadline)
  else:
    answer = _answer(host.strip("[]"), int(port), hello, deadline, timeout_seconds)
  if answer["error"]:
    raise (MissingError if answer.get("missing") else RollCallError)(answer["error"])


class _Roll:
  """What process 0 knows of the others, and their open connections."""

  def __init__(self, own: dict[str, Any], timeout_seconds: float):
    self._count = own["count"]
    self._seconds = timeout_seconds
    self._there = {0: own}
    self._connections: dict[socket.socket, dict[str, Any]] = {}  # to what was said
    self._error = self._wrong(own)

  def take(self, port: int, deadline: float) -> dict[str, Any]:
    """Listens until all are there; returns what it tells them: `error`, "" for none."""
    with contextlib.ExitStack() as stack:
      listener = stack.enter_context(_listen(port))
      self._listen_until(listener, deadline)
      missing = not self._error and len(self._there) < self._count
      answer = {"error": self._missing() if missing else self._error, "missing": missing}
      for connection in self._connections:
        stack.enter_context(connection)
        with contextlib.suppress(OSError):
          connection.sendall(json.dumps(answer).encode() + b"\n")
      # Whoever closes first keeps the port busy for a while: let it be the others.
      for connection in self._connections:
        with contextlib.suppress(OSError):
          connection.settimeout(2)
          connection.recv(1)
    return answer

  def _listen_until(self, listener: socket.socket, deadline: float) -> None:
    """Hears processes come and go, until all are there or the time is over."""
    while len(self._connections) < self._count - 1:
      left = deadline - time.monotonic()
      if left <= 0:
        return
      waiting = [listener, *self._connections]
      for ready in select.select(waiting, [], [], min(left, _PAUSE_SECONDS))[0]:
        if ready is not listener:  # nothing more is said: it has died, and may come again
          gone = self._connections.pop(ready)
          ready.close()
          if self._there.get(gone["index"]) is gone:
            del self._there[gone["index"]]
        elif self._hear(listener) and self._error:
          # Those who are just about to come are told as well.
          deadline = min(deadline, time.monotonic() + _LATE_SECONDS)

  def _hear(self, listener: socket.socket) -> bool:
    """Takes a connection; returns whether it was one of ours."""
    connection, _ = listener.accept()
    try:
      connection.settimeout(5)
      hello = _read_line(connection)
      if not _is_hello(hello):
        raise ValueError(hello)
      self._error = self._error or self._wrong(hello)
    except (OSError, ValueError):  # someone else's
      connection.close()
      return False
    self._connections[connection] = hello
    self._there.setdefault(hello["index"], hello)
    return True

  def _wrong(self, hello: dict[str, Any]) -> str:
    index, who = hello["index"], _who(hello)
    if hello["refused"]:
      return f"process {index} ({who}) refused: {hello['refused']}"
    if hello["count"] != self._count:
      return (
        f"process 0 ({_who(self._there[0])}) was started as one of {self._count}, process {index} "
        f"({who}) as one of {hello['count']}; start all with the same number"
      )
    if index in self._there and hello is not self._there[index]:
      return (
        f"two processes say that they are process {index} of {self._count}: "
        f"{_who(self._there[index])} and {who}; stop one, or give each an index of its own"
      )
    return ""

  def _missing(self) -> str:
    missing = [str(i) for i in range(self._count) if i not in self._there]
    there = ", ".join(f"{i} ({_who(hello)})" for i, hello in sorted(self._there.items()))
    return (
      f"{len(self._there)} of {self._count} processes came within "
      f"processes.start_timeout_seconds={self._seconds:g}; missing: {', '.join(missing)}; "
      f"there: {there}"
    )


def _listen(port: int) -> socket.socket:
  try:
    if socket.has_dualstack_ipv6():
      return socket.create_server(
        ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
      )
    return socket.create_server(("", port), backlog=1024)
  except OSError as error:
    raise RollCallError(
      f"process 0 cannot listen on port {port} of its host ({error.strerror}); is another run "
      f"using it? Choose another in the coordinator's address"
    ) from error


def _answer(
  host: str, port: int, hello: dict[str, Any], deadline: float, timeout_seconds: float
) -> dict[str, Any]:
  """Says hello to process 0 until it answers; returns its answer, or that there was none."""
  refused = "nobody listens there"
  while time.monotonic() < deadline:
    try:
      with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(json.dumps(hello).encode() + b"\n")
        connection.settimeout(max(1.0, deadline - time.monotonic() + 5))
        answer = _read_line(connection)
        if not isinstance(answer.get("error"), str):
          raise ValueError(answer)
        return answer
    except ValueError:  # JAX's service is there already: the roll has been called
      refused = "something else answers there: a run that has begun with all its processes?"
    except OSError as error:
      refused = error.strerror or str(error)
    time.sleep(_PAUSE_SECONDS)
  text = (
    f"process {hello['index']} ({_who(hello)}) found no process 0 at {host}:{port} within "
    f"processes.start_timeout_seconds={timeout_seconds:g} ({refused})"
  )
  return {"error": text, "missing": True}


def _read_line(connection: socket.socket) -> dict[str, Any]:
  """Returns what a peer says; raises ValueError where that is no line of ours."""
  received = b""
  while not received.endswith(b"\n"):
    part = connection.recv(_LINE_BYTES)
    received += part
    if not part or len(received) > _LINE_BYTES:
      raise ValueError("no line")
  try:
    content = json.loads(received)
  except RecursionError as error:
    raise ValueError("no line") from error
  if not isinstance(content, dict):
    raise ValueError("no object")
  return content


def _is_hello(hello: dict[str, Any]) -> bool:
  """Tells what another process of a run says from what anybody else may send."""
  if {name: type(value) for name, value in hello.items()} != _HELLO:
    return False
  return 0 < hello["index"] < hello["count"]


def _who(hello: dict[str, Any]) -> str:
  return f"{hello['host']}, pid {hello['pid']}"
