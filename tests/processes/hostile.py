"""What an outsider may send to the rendezvous and to the coordination service, from a seed."""

import json
import os
import random
import socket
import time
from collections.abc import Callable

from processes import rendezvous, tokens

CONNECT_SECONDS = 20.0
_TYPES = [None, True, -1, 10**400, 1.5e308, "", "x" * 3000, "\x1b[2J\x07", [], {}, [[]], {"a": {}}]
_NAMES = ["index", "count", "host", "pid", "refused", "error", "kind", "run", "\u202e"]


def value(chance: random.Random) -> object:
  """Returns a JSON value of any type."""
  return chance.choice(_TYPES)


def text(chance: random.Random) -> str:
  """Returns a JSON object with names of ours and values of any type, or nested without end."""
  if chance.random() < 0.2:
    deep = chance.choice([200, 3_000, 7_000])
    return chance.choice(['{"a":' * deep, "{" + "[" * deep, '{"a":' * deep + "1" + "}" * deep])
  chosen = chance.sample(_NAMES, chance.randrange(len(_NAMES)))
  return json.dumps({name: value(chance) for name in chosen})


def hello(chance: random.Random, count: int) -> str:
  """Returns what a process of a run of so many would say, of any rank."""
  ranks = [-1, 0, 1, count - 1, count, 2**63, True, "1"]
  own = {"index": chance.choice(ranks), "count": chance.choice([count, count + 1, 0])}
  own |= {"host": "\x1b]0;owned\x07", "pid": 1, "refused": chance.choice(["", "give up"])}
  return json.dumps(own)


def message(chance: random.Random, count: int) -> bytes:
  """Returns bytes to send to a run of so many processes: none of them signed with its token."""
  kind = chance.randrange(9)
  if kind == 0:
    return chance.randbytes(chance.choice([0, 1, 100, 5_000]))
  if kind == 1:
    return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
  if kind == 2:
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)
  if kind == 3:
    return text(chance).encode(errors="surrogatepass") + b"\n"
  if kind == 4:  # as ours, without knowing the token
    forged = f"{chance.randbytes(32).hex()} {hello(chance, count)}\n".encode()
    return forged[: chance.choice([len(forged), len(forged) // 2])]
  if kind == 5:
    return tokens.line(b"another token", rendezvous.HELLO, hello(chance, count))
  if kind == 6:
    return f"{'0' * 64} ".encode() + text(chance).encode(errors="surrogatepass") + b"\n"
  if kind == 7:
    return b"x" * 100_000 + b"\n"
  return b"\xff" * 64 + b" {}\n" * chance.randrange(1, 50)


def speak(port: int, send: Callable[[socket.socket], None]) -> None:
  """Connects to whoever listens on a port, once someone does, and lets `send` talk."""
  until = time.monotonic() + CONNECT_SECONDS
  while True:
    try:
      with socket.create_connection(("localhost", port), timeout=CONNECT_SECONDS) as connection:
        send(connection)
      return
    except (ConnectionResetError, BrokenPipeError):  # dropped
      return
    except ConnectionError:
      if time.monotonic() > until:
        raise
      time.sleep(0.01)


def attack(port: int, chance: random.Random, count: int) -> None:
  """Sends one message, in one of several ways, and goes."""

  def send(connection: socket.socket) -> None:
    data, way = message(chance, count), chance.randrange(4)
    if way == 0:  # half-open
      connection.sendall(data[: len(data) // 2])
      return
    if way == 1:  # in small pieces
      for start in range(0, min(len(data), 60), 7):
        connection.sendall(data[start : start + 7])
        time.sleep(0.002)
      return
    connection.sendall(data)
    if way == 2:  # until it is dropped
      connection.settimeout(0.2)
      try:
        while connection.recv(100):
          pass
      except TimeoutError:
        pass

  speak(port, send)


def entry(chance: random.Random, key: bytes, name: str) -> str:
  """Returns an entry of the coordination service that no process of the run has made.

  Args:
    chance: decides.
    key: of the run, for what a process has signed for another name.
    name: under which it stands.
  """
  kind = chance.randrange(6)
  body = text(chance)
  if kind == 0:
    return body
  if kind == 1:
    return f"{tokens.sign(b'another', 'shown', name, body)} {body}"
  if kind == 2:  # used again for another purpose
    return f"{tokens.sign(key, 'shown', f'other/{name}', body)} {body}"
  if kind == 3:
    return f"{tokens.sign(key, rendezvous.HELLO, name, body)} {body}"
  if kind == 4:
    return os.fsdecode(chance.randbytes(300))
  return f"{'0' * 64} {'x' * 100_000}"
