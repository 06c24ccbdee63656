"""The roll call: who is missing, twice there, or of another run, said to every process."""

import errno
import os
import re
import socket
import threading
import time

import pytest

from processes import rendezvous, tokens
from processes.listening import free_port
from tests.processes.command_lines import MLP
from tests.processes.starting import VARIABLES
from tests.processes.stores import together

TOKEN = "a token of these tests"


@pytest.fixture(autouse=True)
def _token(monkeypatch):
  monkeypatch.setenv(tokens.VARIABLE, TOKEN)
  monkeypatch.setattr(rendezvous, "_LATE_SECONDS", 0.5)


def call(port, count, index, *, seconds=10.0, token=None, **settings) -> bytes:
  """Calls the roll on a port, with the token of the environment unless another is given."""
  token = token or tokens.Token(None, "")
  settings |= {"token": token, "timeout_seconds": seconds}
  return rendezvous.call(f"localhost:{port}", count, index, **settings)


def calls(port, *members, **settings):
  """Returns the call of each (count, index) to a roll call on a port."""
  return [
    lambda count=count, index=index: call(port, count, index, **settings)
    for count, index in members
  ]


def went_well(results) -> bool:
  """Returns whether all have the same key."""
  return len({*results}) == 1 and isinstance(results[0], bytes)


def said(results) -> list[str]:
  """Returns what each was told, "" for one that may go on."""
  assert all(isinstance(r, (bytes, rendezvous.RollCallError)) for r in results), results
  return ["" if isinstance(result, bytes) else str(result) for result in results]


def test_all_are_there_in_whatever_order_and_the_port_is_free_at_once(capfd):
  port = free_port()
  results = together(*calls(port, (4, 2), (4, 0), (4, 3), (4, 1)))
  assert went_well(results), results
  with socket.create_server(("", port)):
    pass
  assert capfd.readouterr().err == "", "nothing is said where all come soon"


def test_one_that_is_missing_is_named_to_those_who_are_there():
  began = time.monotonic()
  results = said(together(*calls(free_port(), (4, 0), (4, 1), (4, 3), seconds=1.0)))
  assert time.monotonic() - began < 30
  assert len(set(results)) == 1
  assert (
    "3 of 4 processes connected within processes.start_timeout_seconds=1; missing: 2;" in results[0]
  )
  host = f"({socket.gethostname()}, pid {os.getpid()})"
  assert f"connected: 0 {host}, 1 {host}, 3 {host}" in results[0]


def test_two_that_say_that_they_are_the_same():
  results = said(together(*calls(free_port(), (3, 0), (3, 1), (3, 1))))
  assert len(set(results)) == 1
  assert "two processes say that they are process 1 of 3" in results[0]
  assert "give each a different index" in results[0]


def test_two_that_say_that_they_are_process_0():
  port = free_port()
  first, second = said(together(*calls(port, (2, 0), (2, 0), seconds=1.0)))
  busy = f"process 0 cannot listen on port {port} of its host (Address already in use by "
  assert (busy in first) != (busy in second)
  assert "missing: 1;" in first + second


@pytest.mark.parametrize(("first", "second"), [(3, 2)])
def test_other_numbers_of_processes_are_said_at_once(first, second):
  began = time.monotonic()
  results = said(together(*calls(free_port(), (first, 0), (second, 1), seconds=60.0)))
  assert time.monotonic() - began < 30
  assert len(set(results)) == 1
  assert f"was started as one of {first}, process 1" in results[0]
  assert f"as one of {second}; start all with the same number" in results[0]


@pytest.mark.parametrize("index", [0, 1])
def test_one_that_has_refused_notifies_the_others(index):
  port = free_port()
  [other] = calls(port, (2, 1 - index), seconds=60.0)
  [refusing] = calls(port, (2, index), seconds=5.0, refused="unknown config key 'x'")
  began = time.monotonic()
  result = said(together(other, refusing))[0]
  assert time.monotonic() - began < 30
  assert f"process {index} (" in result
  assert "refused: unknown config key 'x'" in result


def test_the_port_is_someone_elses():
  with socket.create_server(("", 0)) as server:
    port = server.getsockname()[1]
    [result] = together(*calls(port, (2, 0)))
  assert isinstance(result, rendezvous.PortError)  # it passes: exit code 1
  assert f"cannot listen on port {port} of its host (Address already in use by process " in str(
    result
  )
  assert f"process {os.getpid()}: " in str(result)
  assert "or give all processes another port in JAX_COORDINATOR_ADDRESS" in str(result)


def test_the_application_may_be_started_again_when_the_port_is_free(start, tmp_path):
  with socket.create_server(("localhost", 0)) as server:
    port = server.getsockname()[1]
    own = dict(zip(VARIABLES, (f"localhost:{port}", "2", "0"), strict=True))
    [ended] = start(1, *MLP, f"--workdir={tmp_path / 'run'}", environments={0: own})
  assert ended.code == 1, ended
  assert ended.err.startswith(f"error: process 0 cannot listen on port {port} of its host"), ended
  assert not (tmp_path / "run").exists()


def test_the_port_is_not_allowed(monkeypatch):
  def listen(address):
    raise PermissionError(errno.EACCES, "Permission denied")

  monkeypatch.setattr(rendezvous.listening, "listen", listen)
  [result] = together(*calls(80, (2, 0)))
  assert type(result) is rendezvous.RollCallError  # it does not pass: exit code 2
  assert "port 80 of its host (Permission denied); give all processes another port" in str(result)


def test_a_run_that_has_begun_already():
  # JAX's service speaks HTTP/2 there: it answers with what is no line of ours.
  with socket.create_server(("localhost", 0)) as server:
    stopping = threading.Event()

    def serve():
      server.settimeout(0.1)
      while not stopping.is_set():
        try:
          connection, _ = server.accept()
        except TimeoutError:
          continue
        with connection:
          connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\n")

    thread = threading.Thread(target=serve)
    thread.start()
    [result] = said(together(*calls(server.getsockname()[1], (2, 1), seconds=1.0)))
    stopping.set()
    thread.join()
  assert "a run that has begun with all its processes?" in result


# ------------------------------ what is said while it waits ------------------------------


@pytest.fixture
def soon(monkeypatch):
  """Has the first notice come early."""
  monkeypatch.setattr(rendezvous, "FIRST_NOTICE_SECONDS", 0.3)


def test_who_is_waited_for_is_said_again_at_growing_intervals(soon, capfd):
  port = free_port()
  # Notices after 0.3, 0.6 and 1.2 s; the fourth would be after 2.4.
  together(*calls(port, (8, 0), (8, 2), (8, 3), seconds=1.9))
  said = capfd.readouterr().err.splitlines()
  me = f"{socket.gethostname()}, pid {os.getpid()}"
  first = [line for line in said if line.startswith(f"process 0 ({me}) waits at localhost:{port} ")]
  end = r", for (\d+) s so far, of processes\.start_timeout_seconds=1\.9"
  seconds = [int(re.search(f"{end}$", line)[1]) for line in first]
  assert 2 <= len(seconds) <= 3, said  # on a busy machine the last may come too late
  assert seconds == sorted(seconds)
  # At earlier notices some may not have connected yet.
  assert "for process 1, 4-7; 3 of 8 have connected" in first[-1], first
  others = [line for line in said if line.startswith(f"process 2 ({me}) ")]
  assert 2 <= len(others) <= 3, said
  # Earlier ones may still be about the connection to process 0, which begins to listen.
  other = f"process 2 ({me}) has reached process 0 at localhost:{port}, which waits for others, for"
  assert others[-1].startswith(other), others


def test_a_process_says_that_process_0_is_not_there(soon, capfd):
  port = free_port()
  [result] = map(str, together(*calls(port, (2, 1), seconds=1.0)))
  assert f"process 1 ({socket.gethostname()}, pid {os.getpid()})" in result
  assert f"found no process 0 of its run at localhost:{port} within" in result
  assert "start_timeout_seconds=1 (Connection refused)" in result
  said = capfd.readouterr().err.splitlines()
  me = f"process 1 ({socket.gethostname()}, pid {os.getpid()})"
  assert 1 <= len(said) <= 2, said  # on a busy machine the second may come too late
  assert said[0].startswith(
    f"{me} waits for process 0 at localhost:{port}: Connection refused, for"
  )
