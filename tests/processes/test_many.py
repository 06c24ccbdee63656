"""The rendezvous of thousands: one socket each, some that say nothing, some that come late."""

import json
import re
import resource
import socket
import time

import pytest

from processes import listening, rendezvous, tokens
from processes.listening import free_port
from tests.processes.stores import together
from tests.processes.test_rendezvous import TOKEN, call


@pytest.fixture(autouse=True)
def _token(monkeypatch):
  monkeypatch.setenv(tokens.VARIABLE, TOKEN)


@pytest.fixture
def _many_files():
  """Lets this process, which plays all, have both ends of every connection."""
  before = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
  yield
  resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connected(port: int) -> socket.socket:
  """Returns a connection to process 0, once it listens."""
  until = time.monotonic() + 20
  while True:
    try:
      return socket.create_connection(("127.0.0.1", port), timeout=60)
    except ConnectionRefusedError:
      assert time.monotonic() < until
      time.sleep(0.01)


@pytest.mark.usefixtures("_many_files")
def test_thousands_meet_beside_some_that_say_nothing():
  port, count = free_port(), 1500

  def others():
    strangers = [connected(port) for _ in range(50)]
    members = [connected(port) for _ in range(1, count)]
    for index, member in enumerate(members, 1):
      own = {"index": index, "count": count, "host": "h", "pid": index, "refused": ""}
      member.sendall(tokens.line(TOKEN.encode(), rendezvous.HELLO, json.dumps(own)))
    answers = [json.loads(tokens.split_line(member.recv(2**16))[1]) for member in members]
    for one in (*members, *strangers):
      one.close()
    return answers

  result, answers = together(lambda: call(port, count, 0, seconds=60.0), others)
  assert isinstance(result, bytes), result
  assert len(answers) == count - 1
  assert {answer["error"] for answer in answers} == {""}
  assert len({answer["run"] for answer in answers}) == 1


def test_missing_ones_are_named_as_ranges():
  assert rendezvous._ranges([3]) == "3"
  assert rendezvous._ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
  assert re.fullmatch(r"1, 3, .*, 31 and 84 more", rendezvous._ranges(range(1, 200, 2)))


# ------------------------------ open files ------------------------------


def test_the_limit_of_open_files_is_raised_for_them(monkeypatch):
  limits = []
  monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 20_000))
  monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
  assert listening.room_for(100) == ""
  assert limits == []
  assert listening.room_for(10_000) == ""
  [(soft, hard)] = limits
  assert 10_000 < soft < 20_000
  assert hard == 20_000


def test_a_limit_that_cannot_be_raised_is_said_to_all(monkeypatch):
  monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
  monkeypatch.setattr(rendezvous, "_OWN_ERROR_SECONDS", 2.0)
  port = free_port()
  first, *others = together(
    *[lambda index=index: call(port, 300, index, seconds=15.0) for index in (0, 1, 2)]
  )
  said = "open files for 300 connections, and its hard limit is 256 (RLIMIT_NOFILE); raise it"
  assert said in str(first)
  assert type(first) is rendezvous.RollCallError, "seen by itself: exit 2"
  for other in others:
    assert said in str(other)
    assert type(other) is rendezvous.ToldError, "told: exit 1"


# ------------------------------ where process 0 listens ------------------------------


def bound(address: str) -> str:
  """Returns at which address process 0 listens."""
  with listening.listen(address) as one:
    return one.getsockname()[0]


@pytest.fixture
def _none_given(monkeypatch):
  monkeypatch.delenv(listening.BIND_VARIABLE, raising=False)


@pytest.mark.usefixtures("_none_given")
def test_it_listens_at_the_address_that_it_was_given():
  port = free_port()
  assert bound(f"localhost:{port}") in {"127.0.0.1", "::1"}
  assert bound(f"127.0.0.1:{port}") == "127.0.0.1"
  assert listening.bind_address(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
  assert listening.bind_address(f"localhost:{port}") in (f"127.0.0.1:{port}", f"[::1]:{port}")


@pytest.mark.usefixtures("_none_given")
@pytest.mark.parametrize(
  ("host", "resolved", "everywhere"),
  [
    ("host0", ["127.0.1.1"], True),  # its own name, of which other hosts know another address
    ("host0", ["192.0.2.1", "127.0.0.1"], True),  # address translation
    ("192.0.2.1", ["192.0.2.1"], True),
    ("0.0.0.0", ["0.0.0.0"], True),
    ("localhost", ["192.0.2.1", "127.0.0.1"], False),
    ("127.0.0.2", ["127.0.0.2"], False),
  ],
)
def test_where_it_listens_for_a_name(monkeypatch, host, resolved, everywhere):
  monkeypatch.setattr(listening, "_resolved", lambda _: resolved)
  port = free_port()
  assert bound(f"{host}:{port}") in ({"0.0.0.0", "::"} if everywhere else {*resolved})
  assert (listening.bind_address(f"{host}:{port}") is None) == everywhere


@pytest.mark.usefixtures("_none_given")
def test_a_name_of_several_addresses_is_listened_for_at_all(monkeypatch):
  monkeypatch.setattr(listening, "_resolved", lambda _: ["198.51.100.1", "198.51.100.2"])
  monkeypatch.setattr(listening, "_is_own", lambda _: True)
  assert listening.bind_address("host0:8476") is None


def test_another_address_may_be_given(monkeypatch):
  port = free_port()
  monkeypatch.setenv(listening.BIND_VARIABLE, f"127.0.0.1:{port}")
  monkeypatch.setattr(listening, "_resolved", lambda host: [])
  assert bound(f"host0:{port}") == "127.0.0.1"
  assert listening.bind_address(f"host0:{port}") == f"127.0.0.1:{port}", "as JAX reads it"
