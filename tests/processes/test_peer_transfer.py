"""Bytes that one process of a run asks another for."""

import hashlib
import socket

import pytest

from processes import peer_transfer, tokens
from processes.peer_transfer import Sender, TransferError, receive
from tests.processes.stores import groups_of

BYTES = bytes(range(256)) * 5000


@pytest.fixture
def sending(tmp_path):
  """Returns the groups of two processes, the first of which sends parts of a file."""
  (tmp_path / "file").write_bytes(BYTES)
  groups = groups_of(2, key=b"secret", address="localhost:1")
  digest = {"changed": "0" * 64}

  def find(wanted):
    if wanted == "late" and len(asked) < 3:
      asked.append(wanted)
      return None
    if wanted == "failed":
      raise LookupError("no space on the host")
    first = BYTES[:1000] if wanted == "first" else BYTES
    sha256 = digest.get(wanted, hashlib.sha256(first).hexdigest())
    return str(tmp_path / "file"), len(first), sha256

  asked = []
  sender = Sender(groups[0], find)
  yield groups
  sender.close()


def received(groups, wanted, **given) -> bytes:
  found = []

  def buffer_for(count):
    found.append(bytearray(count))
    return memoryview(found[-1])

  receive(groups[1], 0, wanted, buffer_for, **given)
  return bytes(found[-1])


def test_all_or_the_first_bytes_of_a_file_arrive_even_if_they_are_not_there_yet(sending):
  assert received(sending, "all") == BYTES
  assert received(sending, "first") == BYTES[:1000]
  assert received(sending, "late", wait_seconds=10) == BYTES


@pytest.mark.parametrize(
  ("wanted", "message"),
  [
    ("changed", "other bytes have arrived than were sent"),
    ("failed", "process 0 does not send its bytes: no space on the host"),
    ("late", 'process 0 does not have "late"'),
  ],
)
def test_what_does_not_arrive_as_it_was_sent_is_an_error(sending, wanted, message):
  with pytest.raises(TransferError, match=message):
    received(sending, wanted)


def test_a_stranger_gets_nothing(sending):
  where = sending[0].get("peer_bytes/0")
  signed_by_another = tokens.line(b"another", "bytes wanted", '{"wanted": "all"}')
  for line in (b'{"wanted": "all"}\n', b"GET / HTTP/1.0\n", signed_by_another):
    with socket.create_connection((where["host"], where["port"]), 10) as connection:
      connection.sendall(line)
      assert connection.recv(100) == b""


def test_an_answer_that_no_process_of_the_run_has_signed_is_refused(sending, monkeypatch):
  monkeypatch.setattr(peer_transfer, "_ANSWER", "another purpose")
  answered = received(sending, "first")
  assert answered == BYTES[:1000], "both sides have it"
  impostor = groups_of(2, key=b"another", address="localhost:1", store=sending[0].store)
  sender = Sender(impostor[0], lambda wanted: None)
  sending[0].put("peer_bytes/0", {"host": "127.0.0.1", "port": sender._server.server_address[1]})
  with pytest.raises(TransferError):
    received(sending, "first")
  sender.close()
