"""Who the processes are, by variables and launchers, and where they meet."""

import errno
import functools
import os
import pathlib
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


def test_nothing_is_set(given):
  given()
  assert groups.who() is None


def test_all_three_are_set(given):
  given(**three("host0:8476", "4", "3"))
  assert groups.who() == ("host0:8476", 4, 3)


@pytest.mark.parametrize("values", [("", "1", ""), ("host0:1", "1", "7"), ("nonsense", "1", "x")])
def test_a_number_of_1_is_alone(given, values):
  given(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1", **three(*values))
  assert groups.who() == ("", 1, 0)


HALF_SET = {
  ("host0:8476", "", ""): "JAX_NUM_PROCESSES and JAX_PROCESS_ID is not set",
  ("host0:8476", "2", ""): "JAX_PROCESS_ID is not set",
  ("host0:8476", "", "1"): "JAX_NUM_PROCESSES is not set",
  ("", "2", "1"): "JAX_COORDINATOR_ADDRESS is not set",
  ("", "", "0"): "JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES is not set",
}


@pytest.mark.parametrize("values", HALF_SET)
def test_half_set(given, values):
  given(**three(*values))
  with pytest.raises(ValueError, match="of the three variables") as caught:
    groups.who()
  assert str(caught.value).endswith(HALF_SET[values])


NO_NUMBERS = {
  ("host0:8476", "two", "0"): "JAX_NUM_PROCESSES=two",
  ("host0:8476", "2", "first"): "JAX_PROCESS_ID=first",
  ("host0", "2", "0"): "JAX_COORDINATOR_ADDRESS=host0,",
  ("host0:port", "2", "0"): "expected a host:port and two numbers",
  ("[::1:8", "2", "0"): "JAX_COORDINATOR_ADDRESS=[::1:8,",
  ("::1:8", "2", "0"): "such as 10.0.0.1:8476 or [::1]:8476",
  ("a b:8", "2", "0"): "JAX_COORDINATOR_ADDRESS=a b:8,",
  (":8", "2", "0"): "JAX_COORDINATOR_ADDRESS=:8,",
  ("host0:99999", "2", "0"): "JAX_COORDINATOR_ADDRESS=host0:99999,",
  ("host0:0", "2", "0"): "JAX_COORDINATOR_ADDRESS=host0:0,",
  ("host0:8476", "2", "2"): "the index must be 0 or more and below the number",
  ("host0:8476", "2", "-1"): "the index must be 0 or more and below the number",
  ("host0:8476", "0", "0"): "the index must be 0 or more and below the number",
}


@pytest.mark.parametrize("values", NO_NUMBERS)
def test_no_such_numbers(given, values):
  given(**three(*values))
  with pytest.raises(ValueError, match="=") as caught:
    groups.who()
  assert NO_NUMBERS[values] in str(caught.value)


@pytest.mark.parametrize(("size", "rank"), groups.RANKS)
def test_an_address_alone_takes_the_rest_from_the_launcher(given, size, rank):
  given(**three("host0:8476"), **{size: "3", rank: "2"})
  assert groups.who() == ("host0:8476", 3, 2)


@pytest.mark.parametrize(("size", "rank"), groups.RANKS)
@pytest.mark.parametrize("values", [("x", "0"), ("2", "first"), ("x", "")])
def test_a_launchers_variables_that_are_no_numbers_are_named(given, size, rank, values):
  given(**{size: values[0], rank: values[1]})
  with pytest.raises(
    ValueError, match=f"{size}={values[0]}, {rank}={values[1]}: expected two numbers"
  ):
    groups.connect(start_timeout_seconds=1, heartbeat_seconds=5)


def test_our_variables_win_over_a_launchers(given):
  given(**three("host0:8476", "2", "1"), OMPI_COMM_WORLD_SIZE="8", OMPI_COMM_WORLD_RANK="7")
  assert groups.who() == ("host0:8476", 2, 1)


# ------------------------------ connect ------------------------------


def connect():
  """Connects as main.py does."""
  return groups.connect(start_timeout_seconds=1, heartbeat_seconds=10)


def test_alone_without_a_launcher(given):
  given()
  assert connect() is groups.current()
  assert connect().alone
  assert connect().first


@pytest.mark.parametrize(("size", "rank"), groups.RANKS)
def test_one_process_of_a_launcher_is_alone(given, size, rank):
  given(**{size: "1", rank: "0"})
  assert connect().alone


def test_several_of_a_launcher_that_jax_does_not_know(given):
  given(PMI_SIZE="2", PMI_RANK="1")
  with pytest.raises(ValueError, match="2 processes were started") as caught:
    connect()
  assert (
    "set JAX_COORDINATOR_ADDRESS=HOST:PORT for all of them, or JAX_NUM_PROCESSES=1 if each"
    in (str(caught.value))
  )


def test_a_kubernetes_job_without_an_address(given):
  given(JOB_COMPLETION_INDEX="1")
  with pytest.raises((ValueError, RuntimeError)) as caught:
    connect()
  assert "JAX_COORDINATOR_ADDRESS" in str(caught.value), caught.value


def test_variables_that_are_half_set_are_a_refusal_of_the_command(forks, tmp_path):
  out, err = tmp_path / "out", tmp_path / "err"
  command = ["main.py", "layout", "--config=configs/dp8.py"]
  half = {**os.environ, groups.COUNT: "2"}
  code = forks.start(command, out=out, err=err, environment=half).wait()
  assert code == 2, err.read_text()
  assert err.read_text().startswith("refused: of the three variables")
  assert out.read_text() == ""


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


@pytest.mark.parametrize("error", CODES, ids=repr)
def test_only_what_a_process_has_seen_itself_and_cannot_pass_ends_it_with_2(given, capsys, error):
  given()
  assert refusal.refuse(error) == CODES[error]
  word = "refused" if CODES[error] == 2 else "error"
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


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_true_gives_all_the_same_answer_at_each_of_many_meetings(count):
  # Each process is false at other meetings, at some all, at some none.
  def false(index, meeting):
    return meeting % (2 + index) == 0

  def meet(group):
    return [
      group.all_true("step", not false(group.index, n), timeout_seconds=20) for n in range(60)
    ]

  group = groups_of(count) if count > 1 else [groups.Group()]
  results = together(*(functools.partial(meet, member) for member in group))
  expected = [not any(false(index, n) for index in range(count)) for n in range(60)]
  assert results == [expected] * count


def test_meetings_at_two_points_do_not_touch():
  def meet(group):
    answers = []
    for n in range(20):
      answers.append(group.all_true("step", n % 3 != 0, timeout_seconds=20))
      answers.append(group.all_true("save", n % 2 != 0, timeout_seconds=20))
    return answers

  results = together(*(functools.partial(meet, member) for member in groups_of(3)))
  assert results == [[x for n in range(20) for x in (n % 3 != 0, n % 2 != 0)]] * 3


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


def test_alone_a_stop_ends_it():
  stop = StopRequest()
  lockstep = Lockstep(Group(), stop)
  assert lockstep.enter()
  stop.request("SIGINT")
  assert not lockstep.enter()


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
