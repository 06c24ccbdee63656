"""Limits, ports and names, each really broken or lowered."""

import resource
import socket

import pytest

from diagnosis import machine
from diagnosis.finding import OK, WARNING, WRONG

UNLIMITED = resource.RLIM_INFINITY
LIMITS = dict.fromkeys(
  (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_FSIZE),
  UNLIMITED,
)


@pytest.mark.parametrize(
  ("limit", "status", "said"),
  [
    (resource.RLIMIT_NOFILE, WRONG, "open files: at most 100"),
    (resource.RLIMIT_NPROC, WRONG, "threads and processes: at most 100"),
    (resource.RLIMIT_AS, WARNING, "address space: at most 100 Bytes"),
    (resource.RLIMIT_FSIZE, WRONG, "size of a file: at most 100 Bytes"),
  ],
)
def test_low_limits(limit, status, said):
  found = list(machine.check(None, LIMITS | {limit: 100}))
  [one] = [one for one in found if one.status != OK]
  assert one.status == status
  assert said in one.what
  assert one.fix


def test_this_machine_is_well():
  assert {one.status for one in machine.check(None, LIMITS)} == {OK}


def cluster(monkeypatch, address, index):
  names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
  for name, value in zip(names, (address, "2", str(index)), strict=True):
    monkeypatch.setenv(name, value)
  return next(machine.check_network())


def test_the_coordinator(monkeypatch):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    address = f"localhost:{taken.getsockname()[1]}"
    one = cluster(monkeypatch, address, 0)
    assert one.status == WRONG
    assert f"{address}: the port cannot be used: Address already in use" in one.what
    assert cluster(monkeypatch, address, 1).status == OK  # of another process it is none's concern
  one = cluster(monkeypatch, address, 0)
  assert (one.status, one.what.rpartition(": ")[2]) == (OK, "the port is free")
  one = cluster(monkeypatch, "nobody.invalid:8476", 1)
  assert one.status == WRONG
  assert "the name nobody.invalid cannot be resolved" in one.what
  one = cluster(monkeypatch, "nobody", 1)
  assert one.status == WRONG
  assert "expected a host:port and two numbers" in one.what


def test_a_single_process(monkeypatch):
  for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
    monkeypatch.delenv(name, raising=False)
  [one] = machine.check_network()
  assert (one.status, one.what) == (OK, "one process; connections to localhost work")
  monkeypatch.setattr(socket.socket, "connect", lambda *_: (_ for _ in ()).throw(OSError("down")))
  [one] = machine.check_network()
  assert one.status == WRONG
  assert "no connection of this machine to itself (down)" in one.what
