"""Who the processes are, by variables and launchers, and where they meet."""

import errno
import functools
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import pytest

from commands import refusal
from processes import coordination as groups
from processes import rendezvous, tokens
from processes.coordination import Group, Lockstep, NotTogetherError
from processes.preemption import StopRequest
from processes.watchdog import Watchdog
from tests.processes.stores import groups_of, together

ROOT = pathlib.Path(__file__).parents[2]
VARIABLES = [groups.ADDRESS, groups.COUNT, groups.INDEX, *sum(groups.RANKS, ()), *groups.PER_HOST]
CLUSTERS = ("SLURM", "OMPI", "PMI", "JOB", "KUBERNETES", "TPU", "MEGASCALE", "CLOUD")


@pytest.fixture
def given(monkeypatch):
  """Returns a function that sets variables; no launcher of this machine is seen."""
  for name in [*VARIABLES, *(name for name in os.environ if name.startswith(CLUSTERS))]:
    monkeypatch.delenv(name, raising=False)

  def give(**values: str) -> None:
    for name, value in values.items():
      monkeypatch.setenv(name, value)

  return give


def three(address="", count="", index="") -> dict[str, str]:
  """Returns the three variables, those of them that are given."""
  values = {groups.ADDRESS: address, groups.COUNT: count, groups.INDEX: index}
  return {name: value for name, value in values.items() if value}


# ------------------------------ who ------------------------------

OMPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "7"}
NOBODY = "the index must be 0 or more and below the number"
# Variables, and who the process is by them, or how the refusal ends or what is in it.
WHO = (
  ({}, None),
  (three("host0:8476", "4", "3"), ("host0:8476", 4, 3)),
  ({**OMPI, **three("host0:8476", "2", "1")}, ("host0:8476", 2, 1)),  # ours win
  ({**OMPI, **three("", "1", "")}, ("", 1, 0)),  # a number of 1 is alone
  ({**OMPI, **three("host0:1", "1", "7")}, ("", 1, 0)),
  (three("nonsense", "1", "x"), ("", 1, 0)),
  *(
    ({**three("host0:8476"), size: "3", rank: "2"}, ("host0:8476", 3, 2))
    for size, rank in groups.RANKS
  ),
  (three("host0:8476"), "JAX_NUM_PROCESSES and JAX_PROCESS_ID is not set"),
  (three("host0:8476", "2"), "JAX_PROCESS_ID is not set"),
  (three("host0:8476", "", "1"), "JAX_NUM_PROCESSES is not set"),
  (three("", "2", "1"), "JAX_COORDINATOR_ADDRESS is not set"),
  (three("", "", "0"), "JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES is not set"),
  (three("host0:8476", "two", "0"), "JAX_NUM_PROCESSES=two"),
  (three("host0:8476", "2", "first"), "JAX_PROCESS_ID=first"),
  (three("host0:port", "2", "0"), "expected a host:port and two numbers"),
  (three("::1:8", "2", "0"), "such as 10.0.0.1:8476 or [::1]:8476"),
  *(
    (three(address, "2", "0"), f"JAX_COORDINATOR_ADDRESS={address},")
    for address in ("host0", "[::1:8", "a b:8", ":8", "host0:99999", "host0:0")
  ),
  (three("host0:8476", "2", "2"), NOBODY),
  (three("host0:8476", "2", "-1"), NOBODY),
  (three("host0:8476", "0", "0"), NOBODY),
)


@pytest.mark.parametrize(("variables", "wanted"), WHO)
def test_who_a_process_is(given, variables, wanted):
  given(**variables)
  if isinstance(wanted, str):
    with pytest.raises(ValueError, match=re.escape(wanted)):
      groups.who()
  else:
    assert groups.who() == wanted


# ------------------------------ connect ------------------------------


def connect():
  """Connects as main.py does."""
  return groups.connect(start_timeout_seconds=1, heartbeat_seconds=10)


@pytest.mark.parametrize("launcher", [(), *groups.RANKS])
def test_a_process_without_others_is_alone(given, launcher):
  given(**dict(zip(launcher, ("1", "0"), strict=bool(launcher))))
  assert connect() is groups.current()
  assert connect().alone
  assert connect().first


ALONE = "set JAX_COORDINATOR_ADDRESS=HOST:PORT for all of them, or JAX_NUM_PROCESSES=1 if each"
UNCONNECTED = (
  *(
    ({size: n, rank: index}, f"{size}={n}, {rank}={index}: expected two numbers")
    for size, rank in groups.RANKS
    for n, index in (("x", "0"), ("2", "first"), ("x", ""))
  ),
  ({"PMI_SIZE": "2", "PMI_RANK": "1"}, f"2 processes were started, .*{ALONE}"),
  ({"JOB_COMPLETION_INDEX": "1"}, "JAX_COORDINATOR_ADDRESS"),
)


@pytest.mark.parametrize(("variables", "said"), UNCONNECTED)
def test_a_launcher_that_does_not_say_where_is_refused(given, variables, said):
  given(**variables)
  with pytest.raises((ValueError, RuntimeError), match=said):
    connect()


# ------------------------------ refusals ------------------------------

PASSING = (
  *(errno.EADDRINUSE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT),
  *(errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ENETUNREACH, errno.EHOSTUNREACH),
)


def test_a_process_without_a_token_notifies_none_and_does_not_wait(given, monkeypatch):
  monkeypatch.delenv(tokens.VARIABLE, raising=False)
  given(**three("localhost:1", "2", "1"))
  began = time.monotonic()
  groups.refuse("unknown config key 'x'")
  assert time.monotonic() - began < 4  # of the 5 that it would wait


def caused(error: Exception, cause: Exception) -> Exception:
  """Returns an error that was raised from another."""
  error.__cause__ = cause
  return error


CODES = {
  rendezvous.RollCallError("seen by itself"): 2,
  rendezvous.ToldError("told by another"): 1,
  rendezvous.MissingError("has not come"): 1,
  rendezvous.PortError("the port is in use"): 1,
  NotTogetherError("a peer has died at a barrier"): 1,
  ValueError("its own config"): 2,
  OSError("of another kind"): 2,
  PermissionError(errno.EACCES, "Permission denied"): 2,
  FileNotFoundError(errno.ENOENT, "No such file or directory"): 2,
  OSError(errno.EROFS, "Read-only file system"): 2,
  **{OSError(number, os.strerror(number)): 1 for number in PASSING},
  TimeoutError("no answer"): 1,
  ConnectionResetError("the server has gone"): 1,
  socket.gaierror(socket.EAI_NONAME, "Name or service not known"): 1,
  RuntimeError("UNAVAILABLE: failed to connect to all addresses"): 1,
  RuntimeError("INVALID_ARGUMENT: no such axis"): 2,
  caused(ValueError("cannot be prepared"), OSError(errno.ENOSPC, "No space left")): 1,
  caused(ValueError("cannot be prepared"), OSError(errno.EACCES, "Permission denied")): 2,
  caused(RuntimeError("no backend"), RuntimeError("ABORTED: The TPU is already in use")): 1,
}


def test_only_what_a_process_has_seen_itself_and_cannot_pass_ends_it_with_2(given, capsys):
  given()
  for error, code in CODES.items():
    assert refusal.refuse(error) == code, error
    word = "refused" if code == 2 else "error"
    assert capsys.readouterr().err == f"{word}: {error}\n"


@pytest.mark.parametrize("what", ["refused", "failed"])
def test_a_notice_of_another_process_ends_this_one_with_1(monkeypatch, capsys, what):
  first, _ = groups_of(2)
  watch, ended = Watchdog(first, StopRequest()), []
  monkeypatch.setattr(groups, "leave", lambda code, **_: ended.append(code))
  watch._receive(what, "1", {"text": "no \x1b[2J", "host": "h\x07\ni"})
  assert ended == [1]
  assert f"process 1 (h\\x07\\ni) {what}: no \\x1b[2J\n" in capsys.readouterr().err


# ------------------------------ meetings ------------------------------


def test_what_is_put_is_seen_by_all_and_replaced():
  first, second = groups_of(2)
  first.put("place/0", {"at": 1})
  first.put("place/0", {"at": 2})
  second.put("place/1", {"at": 3})
  first.put("places/0", {"at": 4})
  assert first.list("place") == second.list("place") == {"0": {"at": 2}, "1": {"at": 3}}
  second.delete("place")
  assert first.list("place") == {}
  assert first.list("places") == {"0": {"at": 4}}


@pytest.mark.parametrize("count", [1, 3])
def test_all_true_gives_all_the_same_answer_at_each_of_many_meetings_at_two_points(count):
  # Each process is false at other meetings, at some all, at some none.
  def false(index, meeting):
    return meeting % (2 + index) == 0

  def meet(group):
    points = [("step", "save")[n % 2] for n in range(40)]
    return [
      group.all_true(point, not false(group.index, n), timeout_seconds=20)
      for n, point in enumerate(points)
    ]

  group = groups_of(count) if count > 1 else [groups.Group()]
  results = together(*(functools.partial(meet, member) for member in group))
  expected = [not any(false(index, n) for index in range(count)) for n in range(40)]
  assert results == [expected] * count


def test_someone_who_does_not_come():
  first, _ = groups_of(2)
  with pytest.raises(NotTogetherError) as caught:
    first.all_true("save", True, timeout_seconds=0.1)
  assert str(caught.value).startswith("waiting for all processes at 'save': DEADLINE_EXCEEDED")
  assert "\n" not in str(caught.value)


def test_labels_name_the_process_only_among_several(monkeypatch):
  assert groups.label() == ""
  monkeypatch.setattr(groups, "_current", groups_of(3)[1])
  assert groups.label().startswith("process 1 (")


# ------------------------------ the lockstep ------------------------------


def test_all_stop_before_the_same_step():
  # Process 1 is asked to stop at its 8th step, when process 0 may be anywhere before it.
  def steps(member):
    stop, done = StopRequest(), 0
    lockstep = Lockstep(member, stop)
    while done < 100:
      if member.index == 1 and done == 7:
        stop.request("SIGTERM")
      if not lockstep.enter():
        break
      done += 1
    return done, lockstep.stopping

  results = together(*(lambda member=member: steps(member) for member in groups_of(3)))
  assert results == [(7, False), (7, True), (7, False)]
  stop = StopRequest()
  alone = Lockstep(Group(), stop)
  assert alone.enter()
  stop.request("SIGINT")
  assert not alone.enter()


# ---- After the death of another process


# As gloo's thread, which reads nothing that no collective waits for, and asks again at once.
CUT = """
import select, socket, struct, types
from processes import coordination as groups
from processes import jax_internals

def connected(listener):
  near = socket.create_connection(listener.getsockname())
  return near, listener.accept()[0]

service, peers = [socket.create_server(("localhost", 0)) for _ in range(2)]
groups._current = groups.Group(0, 3, address=f"localhost:{service.getsockname()[1]}")
jax_internals.client = lambda: types.SimpleNamespace(shutdown=list)
kept, answering = connected(service)
(alive, far), (dead, died) = connected(peers), connected(peers)
for end in (far, died):
  end.sendall(b"nobody waits for it")
died.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
died.close()  # by a reset, as of a process that was killed
loop = select.epoll()
for end in (alive, dead):
  loop.register(end, select.EPOLLIN)
groups.cut()
assert len(loop.poll(0)) == 2, "both are over"
groups._close_rest(groups._cut)
assert loop.poll(0) == [], "which no thread is told of again"
kept.sendall(b"still there")
assert answering.recv(99) == b"still there"
new = socket.socket().fileno()
assert new not in (alive.fileno(), dead.fileno()), "their numbers stay in use"
"""


def test_connections_that_are_cut_keep_no_thread_awake():
  done = subprocess.run([sys.executable, "-c", CUT], cwd=ROOT, capture_output=True, text=True)
  assert not done.returncode, done.stderr
