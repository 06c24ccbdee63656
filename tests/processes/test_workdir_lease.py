"""Who owns a workdir: one of several starts, until it ends, is dead or sends no heartbeat."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from processes import workdir_lease
from processes.workdir_lease import (
  LAST,
  LostError,
  OwnedError,
  Ownership,
  acquire,
  claims_to,
  this_process,
)
from tests.processes.buckets import Bucket

LEASE, WAIT, ENDING = 30.0, 40.0, 300.0
SOMEWHERE = {"host": "far", "pid": 7, "ticks": 5, "machine": "another boot", "since": "noon"}


class Clock:
  """Time that passes only while somebody sleeps; `each` is called after every second of it."""

  def __init__(self):
    self.now, self.each = 1000.0, []

  def __call__(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds
    for do in self.each:
      do()


@pytest.fixture(scope="module")
def bucket():
  """A server that speaks Cloud Storage's protocol, with generations."""
  with Bucket() as server:
    yield server


@pytest.fixture
def claims(tmp_path):
  """Claims on a disk."""
  return claims_to(tmp_path / "run")


@pytest.fixture(params=["disk", "bucket"])
def anywhere(request, claims, tmp_path, bucket, monkeypatch):
  """Claims in each kind of storage."""
  if request.param == "disk":
    return claims
  monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", bucket.url)
  return claims_to(f"gs://bucket/{tmp_path.name}")


def start(claims, clock=None, **settings):
  """Returns what a start gets that wants the workdir; its thread does not run."""
  clock = clock or Clock()
  keys = {"lease_seconds": LEASE, "wait_seconds": WAIT, "ending_seconds": ENDING, **settings}
  return acquire(claims, "runs/first", clock=clock, sleep=clock.sleep, **keys)


def elsewhere(claims, number=1, beat="running 1", **said):
  """Claims the workdir for a run on another machine, which does nothing by itself."""
  assert claims.create(number, json.dumps({**SOMEWHERE, "lease_seconds": LEASE, **said}))
  claims.write_beat(number, beat)
  return number


def beating(claims, number, clock, state=lambda: "running"):
  """Has the owner's heart beat whenever time passes."""
  counts = iter(range(2, 10**6))
  clock.each.append(lambda: claims.write_beat(number, f"{state()} {next(counts)}"))


# ------------------------------ taking a workdir ------------------------------


def test_a_new_workdir_is_taken_at_once_and_after_a_release_again(anywhere):
  clock = Clock()
  first = start(anywhere, clock)
  assert (first.number, first.replaced) == (1, False)
  first.settle()
  first.end()
  second = start(anywhere, clock)
  assert (second.number, second.replaced, clock.now) == (2, False, 1000.0)
  second.settle()
  assert anywhere.numbers() == [2]


def test_who_owns_it_and_alive_refuses_others_by_name(claims):
  clock, said = Clock(), []
  beating(claims, elsewhere(claims), clock)
  with pytest.raises(OwnedError, match="process 7 on far, since noon; stop it"):
    start(claims, clock, say=said.append)
  assert WAIT <= clock.now - 1000 < WAIT + 2
  assert claims.numbers() == [1]
  assert said == [
    "runs/first belongs to another run: process 7 on far, since noon; waiting for it to end, 40 s "
    "(processes.owner_wait_seconds), or 30 s if it sends no heartbeat"
  ]


def test_an_owner_without_a_heartbeat_is_replaced_after_its_lease(anywhere):
  clock = Clock()
  elsewhere(anywhere)
  taken = start(anywhere, clock, wait_seconds=0.0)
  assert (taken.number, taken.replaced) == (2, True)
  assert LEASE < clock.now - 1000 < LEASE + 2
  anywhere.remove(2)
  elsewhere(anywhere, number=2, lease_seconds=5 * LEASE)  # its own, if that is longer
  assert start(anywhere, clock).number == 3
  assert 6 * LEASE < clock.now - 1000 < 6 * LEASE + 4


@pytest.mark.parametrize(("beats", "wait"), [(1, 20), (10, 20), (19, 20), (18, 1000)])
def test_an_owner_that_dies_while_it_is_waited_for_is_replaced(claims, beats, wait):
  """Even where the lease is longer than what is left of the wait."""
  clock, left = Clock(), iter(range(2, 2 + beats))
  number = elsewhere(claims)

  def beat():
    if (count := next(left, None)) is not None:
      claims.write_beat(number, f"running {count}")

  clock.each.append(beat)
  assert start(claims, clock, wait_seconds=wait).number == 2
  assert beats + LEASE < clock.now - 1000 < beats + LEASE + 3


def test_an_owner_that_saves_in_order_to_stop_is_waited_for(claims):
  clock = Clock()
  number, beats = elsewhere(claims, beat="stopping 1"), iter(range(2, 200))

  def beat():
    count = next(beats)
    claims.write_beat(number, f"stopping {count}" if count < 100 else "released")

  clock.each.append(beat)
  taken = start(claims, clock, wait_seconds=0.0)
  assert (taken.number, taken.replaced) == (2, False)
  assert 90 < clock.now - 1000 < 110


def test_an_owner_that_stops_without_end_is_not_waited_for_without_end(claims):
  clock = Clock()
  beating(claims, elsewhere(claims), clock, state=lambda: "stopping")
  with pytest.raises(OwnedError):
    start(claims, clock, ending_seconds=100.0)
  assert 100 <= clock.now - 1000 < 102


def test_of_two_starts_that_find_no_owner_one_gets_the_workdir(anywhere):
  before = threading.Barrier(8)
  taken, refused = [], []

  def beat():
    # The clocks here run by themselves; none may pass the lease before the winner can beat.
    until = time.monotonic() + 60
    while not taken and time.monotonic() < until:
      time.sleep(0.001)
    for owner in [*taken]:
      owner.renew()

  def one():
    clock = Clock()
    before.wait()
    try:
      clock.each.append(beat)
      taken.append(start(anywhere, clock, wait_seconds=5.0))
    except OwnedError:
      refused.append(1)

  threads = [threading.Thread(target=one) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [owner.number for owner in taken] == [1]
  assert len(refused) == 7


def test_a_dead_process_of_this_machine_is_replaced_at_once(claims):
  dead = subprocess.Popen([sys.executable, "-c", ""])
  process = workdir_lease.Owner("here", dead.pid, 1, this_process().machine)
  dead.wait()
  elsewhere(claims, **dataclasses.asdict(process))
  clock = Clock()
  taken = start(claims, clock)
  assert (taken.number, taken.replaced, clock.now) == (2, False, 1000.0)


SENSELESS = ("", "[]", "[" * 10_000, "\0\x1b[31m", '{"lease_seconds": 1e300, "ticks": true}')
SENSELESS += ('{"host": 7, "pid": "x", "lease_seconds": -1}',)
SENSELESS += ('{"host": "\\u001b[31mred\\n", "lease_seconds": 1}',)


@pytest.mark.parametrize("text", SENSELESS)
def test_a_claim_that_makes_no_sense_is_an_owner_like_any_other(claims, text):
  assert claims.create(1, text)
  clock, said = Clock(), []
  assert start(claims, clock, say=said.append).number == 2
  assert LEASE < clock.now - 1000 < LEASE + 2
  assert not {"\x1b", "\n"} & {*said[0]}


def test_a_number_that_no_run_can_have_is_refused(claims):
  assert claims.create(LAST, "{}")
  with pytest.raises(OwnedError, match=f"{LAST} is not a run's number; remove that file"):
    start(claims)


def test_storage_without_conditional_writes_is_refused():
  with pytest.raises(ValueError, match="az:// has no conditional write here"):
    claims_to("az://bucket/run")


# ------------------------------ owning it ------------------------------


def test_a_run_that_was_replaced_may_write_no_more(anywhere):
  owner, lost = start(anywhere), []
  owner.watch(lambda: False, lost.append)
  owner.require()
  owner.settle()
  clock = Clock()
  anywhere.write_beat(1, "running 1000")
  elsewhere(anywhere, number=2)
  for _ in range(2):
    with pytest.raises(LostError, match="now belongs to another run: process 7 on far"):
      owner.require()
  with pytest.raises(LostError):
    owner.renew()
  assert len(lost) == 1
  owner.end()
  assert anywhere.read_beat(1)[0] == "running 1000"  # nor is anything released
  assert not anywhere.read_beat(2)[0].startswith("released")
  assert clock.now == 1000.0


def test_after_the_release_or_without_its_claim_nothing_is_written(claims):
  owner = start(claims)
  claims.remove(1)
  with pytest.raises(LostError, match="the claim 000001 to this workdir has been removed"):
    owner.require()
  owner = start(claims)
  owner.settle()
  owner.end()
  with pytest.raises(LostError, match="has released"):
    owner.require()
  owner.renew()
  assert claims.read_beat(1)[0] == "released"


def test_a_refused_run_leaves_a_workdir_as_it_was(anywhere):
  first = start(anywhere)
  first.settle()
  first.end()
  second = start(anywhere)
  assert second.number == 2
  second.end()
  assert anywhere.numbers() == [1]
  assert anywhere.read_beat(1)[0] == "released"


def test_a_refused_run_removes_the_folders_that_it_has_made(tmp_path):
  (tmp_path / "there").mkdir()
  start(claims_to(tmp_path / "there" / "new" / "run")).end()
  assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_the_heart_beats_in_a_thread_and_says_when_the_run_is_stopping(claims):
  stopping, found = threading.Event(), threading.Event()
  owner = start(claims, lease_seconds=0.06)
  seen = claims.read_beat(1)
  owner.watch(stopping.is_set, lambda text: found.set())
  until(lambda: claims.read_beat(1)[1] != seen[1])
  stopping.set()
  until(lambda: claims.read_beat(1)[0].startswith("stopping"))
  elsewhere(claims, number=2)
  assert found.wait(20)


def test_a_process_that_holds_no_claim_may_write():
  Ownership(number=5).require()
  with Ownership(number=5) as other:
    other.settle()
  assert other.number == 5


# ------------------------------ files ------------------------------


def test_a_beat_is_read_although_it_was_written_within_one_tick_of_the_clock(anywhere):
  elsewhere(anywhere)
  stamps = set()
  for count in range(50):
    anywhere.write_beat(1, f"running {count}")
    stamps.add(anywhere.read_beat(1)[1])
  assert len(stamps) == 50


@pytest.mark.parametrize("place", ["owner", "000001.json", "000001.beat"])
def test_a_fifo_or_a_link_in_place_of_a_file_blocks_no_process(tmp_path, place):
  workdir = tmp_path / "run"
  workdir.mkdir()
  if place == "owner":
    (tmp_path / "other").mkdir()
    (workdir / "owner").symlink_to(tmp_path / "other")
    with pytest.raises(NotADirectoryError, match="is a symbolic link"):
      start(claims_to(workdir))
    return
  (workdir / "owner").mkdir()
  os.mkfifo(workdir / "owner" / place)
  if place == "000001.json":  # an owner of which nothing is known
    assert start(claims_to(workdir)).number == 2
  else:
    with pytest.raises(OSError, match=r"000001\.beat"):
      start(claims_to(workdir))


def test_without_hard_links_a_claim_is_exclusive_too(tmp_path, monkeypatch):
  def link(*paths):
    raise OSError(1, "no hard links here")

  monkeypatch.setattr(os, "link", link)
  claims = claims_to(tmp_path)
  assert claims.create(1, "a")
  assert not claims.create(1, "b")
  assert claims.read(1) == "a"
  assert [path.name for path in (tmp_path / "owner").iterdir()] == ["000001.json"]


def test_an_answer_that_a_network_file_system_has_lost_counts(tmp_path, monkeypatch):
  real = os.link

  def link(*paths):
    real(*paths)
    raise OSError(5, "no answer")

  monkeypatch.setattr(os, "link", link)
  assert claims_to(tmp_path).create(1, "a")


def test_a_disk_that_fails_is_an_error(tmp_path, monkeypatch):
  def link(*paths):
    raise OSError(5, "the disk is broken")

  monkeypatch.setattr(os, "link", link)
  with pytest.raises(OSError, match="broken"):
    start(claims_to(tmp_path))


def until(condition):
  """Waits until a condition holds."""
  clock = threading.Event()
  for _ in range(2000):
    if condition():
      return
    clock.wait(0.01)
  raise AssertionError("waited in vain")


def test_a_claim_that_came_after_the_look_is_found_by_the_server(bucket, monkeypatch):
  monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", bucket.url)
  claims, before = claims_to("gs://bucket/raced"), bucket.refused
  assert claims.create(1, "theirs")
  with monkeypatch.context() as blind:
    blind.setattr(bucket, "get", lambda name, query: (404, b"{}"))
    assert not claims.create(1, "ours")
  assert bucket.refused == before + 1
  assert claims.read(1) == "theirs"


def test_a_claim_whose_answer_was_lost_is_ours(bucket, monkeypatch):
  monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", bucket.url)
  claims, put = claims_to("gs://bucket/lost"), bucket.put

  def lose_the_answer(name, content, query):
    put(name, content, query)
    monkeypatch.setattr(bucket, "put", put)
    return 503, b"{}"  # so that TensorStore asks again

  monkeypatch.setattr(bucket, "put", lose_the_answer)
  assert claims.create(1, "ours")


# ------------------------------ processes of this machine ------------------------------


def test_a_running_process_and_a_reused_pid_are_distinguished():
  me = this_process()
  assert me.machine, "no /proc here"
  assert not me.ended()
  assert dataclasses.replace(me, ticks=me.ticks + 1).ended()  # an earlier process of this number
  assert not dataclasses.replace(me, ticks=me.ticks + 1, machine="another boot").ended()
  assert not dataclasses.replace(me, ticks=0).ended()
  for pid in (0, -1, 2**31, 2**70):  # which no process has
    assert not dataclasses.replace(me, pid=pid).ended()


def test_a_process_of_another_user_that_proc_hides_lives(monkeypatch):
  def kill(pid, number):
    raise PermissionError(1, "another user's")

  theirs = dataclasses.replace(this_process(), pid=2**22)  # beyond the largest of Linux
  assert theirs.ended()
  monkeypatch.setattr(os, "kill", kill)
  assert not theirs.ended()


def test_a_zombie_is_dead():
  child = subprocess.Popen([sys.executable, "-c", ""])
  ticks = workdir_lease._ticks(child.pid)
  os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
  assert ticks
  assert workdir_lease.Owner("here", child.pid, ticks, this_process().machine).ended()
  child.wait()
