"""Bytes of one process's host for another process of the run, over TCP, beside the training.

A process listens at the address at which the others reach its host; where that is, the run's
key-value store says. Requests and answers are signed lines (`processes.tokens`), so a stranger gets
nothing; the bytes after an answer are held to the SHA-256 in it. They are not encrypted, like all
other traffic between the processes (docs/security.md).

Why not collectives of the mesh: all processes would have to issue them in one order with the steps,
which wait for them meanwhile (docs/decisions.md has the times).
"""

import contextlib
import functools
import hashlib
import json
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from processes import listening, tokens
from processes.coordination import Group

_PURPOSE, _ANSWER = "bytes wanted", "bytes sent"
_LINE_SECONDS = 10.0  # for the line of a request
_BYTES_SECONDS = 60.0  # without a byte from the other side
_PAUSE_SECONDS = 0.05  # until what is not there yet is asked for again

# A file and how many of its first bytes are sent, and their SHA-256 in hexadecimal.
Part = tuple[str, int, str]


class TransferError(RuntimeError):
  """Bytes of another process did not arrive, or are not what it has sent."""


class Sender:
  """Sends parts of files to the other processes of a run, in threads of its own."""

  def __init__(self, group: Group, find: Callable[[Mapping[str, Any]], Part | None]):
    """Listens, and publishes where.

    Args:
      group: the processes.
      find: returns what a request is about; None where it is not there yet. Raises LookupError
        where it never will be.

    Raises:
      OSError: no socket can listen here.
    """
    key = group.key

    class Handler(socketserver.StreamRequestHandler):
      timeout = _LINE_SECONDS

      def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a stranger, or the other side has gone
          signature, text = tokens.split_line(self.rfile.readline(tokens.LINE_BYTES))
          if not tokens.signed(key, signature, _PURPOSE, text):
            return
          try:
            found = find(json.loads(text)["wanted"])
            facts = {} if found is None else {"bytes": found[1], "sha256": found[2]}
          except LookupError as error:
            found, facts = None, {"never": str(error)}
          self.wfile.write(tokens.line(key, _ANSWER, json.dumps(facts), text))
          if found is not None and found[1]:
            self.connection.settimeout(_BYTES_SECONDS)
            with open(found[0], "rb") as file:
              self.connection.sendfile(file, 0, found[1])

    host, shown = _own_host(group)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = type(
      "Server",
      (socketserver.ThreadingTCPServer,),
      {"daemon_threads": True, "address_family": family},
    )
    self._server = kind((host, 0), Handler)
    serve = functools.partial(self._server.serve_forever, poll_interval=_PAUSE_SECONDS)
    thread = threading.Thread(target=serve, name="peer bytes", daemon=True)
    thread.start()
    port = self._server.server_address[1]
    group.put(f"peer_bytes/{group.index}", {"host": shown, "port": port})

  def close(self) -> None:
    """Ends it."""
    self._server.shutdown()
    self._server.server_close()


def _own_host(group: Group) -> tuple[str, str]:
  """Returns the address of this host to listen at, and what the others call it."""
  coordinator, port = listening.split(group.address)
  if group.first:  # the others have reached it by this name
    bound = listening.bind_address(group.address)
    return (listening.split(bound)[0] if bound else ""), coordinator
  family, kind, _, _, address = socket.getaddrinfo(coordinator, port, type=socket.SOCK_DGRAM)[0]
  with socket.socket(family, kind) as toward:
    toward.connect(address)  # sends nothing: it chooses the interface that leads there
    own = toward.getsockname()[0]
  return own, own


def receive(
  group: Group,
  process: int,
  wanted: Mapping[str, Any],
  buffer_for: Callable[[int], memoryview],
  *,
  wait_seconds: float = 0.0,
  given_up: Callable[[], bool] = lambda: False,
) -> str:
  """Receives bytes of another process; returns their SHA-256.

  Args:
    group: the processes.
    process: which has them.
    wanted: what its `find` takes.
    buffer_for: returns where so many bytes go.
    wait_seconds: how long they may take to be there.
    given_up: returns whether they are no longer wanted.

  Raises:
    TransferError: they did not arrive within the time, or with another SHA-256.
  """
  until = time.monotonic() + wait_seconds
  while True:
    try:
      if (found := _received(group, process, wanted, buffer_for)) is not None:
        return found
    except (OSError, ValueError) as error:
      raise TransferError(f"process {process} does not send its bytes: {error}") from error
    if given_up() or time.monotonic() > until:
      raise TransferError(f"process {process} does not have {json.dumps(wanted)}")
    time.sleep(_PAUSE_SECONDS)


def _received(
  group: Group,
  process: int,
  wanted: Mapping[str, Any],
  buffer_for: Callable[[int], memoryview],
) -> str | None:
  where = group.get(f"peer_bytes/{process}")
  if where is None:
    return None
  text = json.dumps({"wanted": wanted, "nonce": secrets.token_hex(16)})
  with socket.create_connection((where["host"], where["port"]), _BYTES_SECONDS) as connection:
    connection.sendall(tokens.line(group.key, _PURPOSE, text))
    with connection.makefile("rb") as stream:
      signature, answer = tokens.split_line(stream.readline(tokens.LINE_BYTES))
      if not tokens.signed(group.key, signature, _ANSWER, answer, text):
        raise ValueError("the answer is not signed by a process of this run")
      facts = json.loads(answer)
      if not facts:
        return None
      if "never" in facts:
        raise ValueError(facts["never"])
      rest, hashed = memoryview(buffer_for(facts["bytes"])), hashlib.sha256()
      while rest:
        if not (count := stream.readinto(rest[: 2**20])):
          raise ValueError(f"it has ended {len(rest):,} bytes early")
        hashed.update(rest[:count])
        rest = rest[count:]
  if hashed.hexdigest() != facts["sha256"]:
    raise ValueError(f"of {os.path.basename(str(wanted))} other bytes have arrived than were sent")
  return facts["sha256"]
