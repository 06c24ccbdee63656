"""Messages of outsiders: dropped, counted, and without any effect on a run."""

import functools
import json
import random
import re
import socket
import threading
import time

import pytest

from processes import rendezvous, tokens
from processes.listening import free_port
from processes.preflight import agree
from tests.processes import hostile
from tests.processes.stores import SharedStore, groups_of, together
from tests.processes.test_rendezvous import TOKEN, call, calls, said, went_well

STRANGERS = {
  "a browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
  "bytes": bytes(range(256)) + b"\n",
  "nothing": b"",
  "no object": b"[1, 2]\n",
  "another object": b'{"hello": 1}\n',
  "deep": b"0" * 64 + b" " + b'{"a":' * 3_000 + b"\n",
  "long": b"x" * 100_000 + b"\n",
}


@pytest.fixture(autouse=True)
def _token(monkeypatch):
  monkeypatch.setenv(tokens.VARIABLE, TOKEN)


def send(data: bytes, connection: socket.socket) -> None:
  """Sends bytes, and waits to be dropped."""
  connection.sendall(data)
  while data and connection.recv(100):
    pass


def test_many_messages_of_a_seed_have_no_effect():
  port, gone, seed = free_port(), threading.Event(), 18
  seen = []

  def attacks():
    try:
      for number in range(30):
        seen.append(number)
        hostile.attack(port, random.Random(f"{seed} {number}"), 3)
    finally:
      gone.set()

  def late(index):
    gone.wait(60)
    return call(port, 3, index, seconds=30.0)

  results = together(
    lambda: call(port, 3, 0, seconds=60.0),
    *[functools.partial(late, index) for index in (1, 2)],
    attacks,
  )
  assert went_well(results[:3]), results
  assert results[3] is None, f"message {seen[-1]} of seed {seed}: {results[3]}"


HELLO = {"index": 1, "count": 2, "host": "h", "pid": 1, "refused": ""}
MALFORMED = {
  "other types": {"index": "1", "count": None, "host": 1, "pid": [], "refused": 0},
  "one more name": {**HELLO, "x": 1},
  **{f"the index {index}": {**HELLO, "index": index} for index in (7, -1, True, 0)},
}


def test_what_no_process_of_the_run_says_is_dropped_and_counted():
  port = free_port()
  [first] = calls(port, (2, 0), seconds=1.5)
  key = TOKEN.encode()
  lines = [tokens.line(key, rendezvous.HELLO, json.dumps(one)) for one in MALFORMED.values()]
  lines.append(tokens.line(key, rendezvous.ANSWER, json.dumps(HELLO)))  # for another purpose
  acts = [functools.partial(send, data) for data in (*STRANGERS.values(), *lines)]
  result, *others = together(first, *[functools.partial(hostile.speak, port, act) for act in acts])
  assert others == [None] * len(acts)
  assert "1 of 2 processes connected" in str(result)
  text = str(result).partition("; connections dropped: ")[2]
  drops = re.findall(r"(\d+) ([a-z ]+) \(from 127", text)
  counts = {why: int(number) for number, why in drops}
  assert sum(counts.values()) == len(acts), text
  assert counts["unsigned"] >= 3
  assert counts["too long"] >= 1
  assert counts["closed before it sent a message"] == 1
  assert counts["malformed"] == len(MALFORMED)
  assert counts["signed with another token"] == 1


def test_what_peers_say_reaches_no_terminal_with_control_characters():
  port = free_port()
  hello = {"index": 1, "count": 2, "host": "a\x1b[2J\nb", "pid": 1, "refused": "no\x07\x1b]0;t\x07"}

  def act(connection):
    connection.sendall(tokens.line(TOKEN.encode(), rendezvous.HELLO, json.dumps(hello)))
    connection.recv(4096)

  result, _ = together(lambda: call(port, 2, 0, seconds=5.0), lambda: hostile.speak(port, act))
  assert isinstance(result, rendezvous.ToldError)
  assert r"(a\x1b[2J\nb, pid 1) refused: no\x07\x1b]0;t\x07" in str(result)


def test_silent_or_slow_connections_block_no_process(monkeypatch):
  monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.5)
  port, holding = free_port(), threading.Event()
  mute = [socket.socket() for _ in range(20)]

  def hold():
    for number, one in enumerate(mute):
      until = time.monotonic() + 60
      while one.connect_ex(("127.0.0.1", port)):
        assert time.monotonic() < until
        time.sleep(0.01)
      if number % 2:
        one.sendall(b"0" * number)
    holding.set()

  def late():
    assert holding.wait(20)
    return call(port, 3, 1, seconds=1.5)

  began = time.monotonic()
  results = said(together(lambda: call(port, 3, 0, seconds=1.5), late, hold)[:2])
  assert time.monotonic() - began < 15
  for one in mute:
    one.close()
  assert "2 of 3 processes connected" in results[0]
  assert "missing: 2;" in results[0]
  assert "20 silent (from 127.0.0.1)" in results[0]


# ------------------------------ another token ------------------------------


class Given(tokens.Token):
  """A token as one process finds it in its environment."""

  def __init__(self, text: str):
    super().__init__(None, "")
    self._given = text


def test_another_token_is_said_on_both_sides(monkeypatch):
  monkeypatch.setattr(rendezvous, "_OTHER_TOKEN_SECONDS", 0.5)
  port = free_port()
  first, other = together(
    lambda: call(port, 2, 0, seconds=1.5),
    lambda: call(port, 2, 1, seconds=60.0, token=Given("quite another token")),
  )
  assert isinstance(first, rendezvous.MissingError)
  assert isinstance(other, rendezvous.MissingError)
  assert "signed with another token (from 127.0.0.1)" in str(first)
  assert f"start all processes with the same {tokens.VARIABLE}, or all without it" in str(first)
  said = "process 0 there has another token than this process, from MESHWRIGHT_TOKEN"
  assert said in str(other)


@pytest.mark.parametrize(
  ("key", "answered"), [(b"not the token", ()), (TOKEN.encode(), ("another hello",))]
)
def test_an_answer_that_is_not_to_this_process_tells_it_nothing(key, answered):
  with socket.create_server(("localhost", 0)) as server:
    port = server.getsockname()[1]

    def answers():
      connection, _ = server.accept()
      with connection:
        connection.recv(4096)
        answer = {"error": "give up", "kind": rendezvous.REFUSED, "count": 2, "run": ""}
        connection.sendall(tokens.line(key, rendezvous.ANSWER, json.dumps(answer), *answered))
      server.close()  # the next attempt is refused at once

    _, result = together(answers, lambda: call(port, 2, 1, seconds=1.0))
  assert isinstance(result, rendezvous.MissingError), result
  assert "give up" not in str(result)


# ------------------------------ the coordination service ------------------------------


def test_entries_of_outsiders_are_left_out_and_counted():
  chance, store = random.Random(18), SharedStore(2)
  first, second = groups_of(2, store, key=b"key of the run")
  second.put("place/1", {"at": 3})
  for number in range(100):
    name = f"place/{number + 2}"
    store.key_value_set(name, hostile.entry(chance, first.key, name))
  assert first.list("place") == {"1": {"at": 3}}
  assert first.get("place/7") is None
  assert len(first.unsigned) == 100
  assert first.unsigned_text().startswith("; 100 entries of the coordination service were ignored")


def test_an_entry_moved_to_another_name_counts_for_nothing():
  store = SharedStore(2)
  first, second = groups_of(2, store, key=b"key of the run")
  second.put("notice/stop-1", {"text": "SIGTERM", "host": "h"})
  moved = store.key_value_try_get("notice/stop-1")
  store.key_value_set("notice/failed-1", moved)
  assert [*first.list("notice")] == ["stop-1"]
  assert "notice/failed-1" in first.unsigned


def test_another_start_of_the_run_has_another_key():
  port = free_port()
  first, second = (together(*calls(port, (2, 0), (2, 1))) for _ in range(2))
  assert went_well(first)
  assert went_well(second)
  assert first[0] != second[0]
  store = SharedStore(2)
  groups_of(2, store, key=first[0])[0].put("notice/failed-0", {"text": "", "host": ""})
  assert groups_of(2, store, key=second[0])[1].list("notice") == {}


def test_the_preflight_says_what_was_ignored():
  store = SharedStore(2)
  first, _ = groups_of(2, store, key=b"key of the run")
  store.key_value_set("digests/run/1", '{"seed": 7}')
  [result] = together(lambda: agree(first, "run", {"seed": 0}, timeout_seconds=0.2))
  assert "process 1 of 2 has not reached 'run'" in str(result)
  assert "1 entries of the coordination service were ignored" in str(result)
