"""The watchdog: how long what may take, who is behind, and how a process ends that stands still."""

import math
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest

from processes import exchange, watchdog
from processes.exchange import Exchange
from processes.group import Group
from processes.lockstep import Lockstep
from processes.stopping import StopRequest
from processes.watchdog import ENDING, EVALUATION, SAVING, STARTING, STEP, Watchdog
from tests.processes.stores import SilentStore, groups_of, together

ROOT = pathlib.Path(__file__).parent.parent.parent


class Clock(types.SimpleNamespace):
  """In place of the module `time`: it moves when told."""

  now = 0.0

  def monotonic(self) -> float:
    """Returns the seconds so far."""
    return self.now


@pytest.fixture
def clock(monkeypatch):
  """Returns the clock that the watchdog and the exchange look at."""
  made = Clock()
  monkeypatch.setattr(watchdog, "time", made)
  monkeypatch.setattr(exchange, "time", made)
  return made


# ------------------------------ limits ------------------------------


def watching(heartbeat=100.0, deadline=0.0) -> Watchdog:
  """Returns a watchdog whose thread does not run."""
  group = Group(0, 2, heartbeat_seconds=heartbeat)
  return Watchdog(group, StopRequest(), deadline_seconds=deadline, start_timeout_seconds=300.0)


def beats(watch: Watchdog, clock: Clock, kind: str, *lengths: float) -> None:
  """Lets steps of these lengths pass."""
  watch.at("begins", kind, begins=True)
  for length in lengths:
    clock.now += length / 2
    watch.at("in the middle", kind)
    clock.now += length / 2
    watch.at("begins", kind, begins=True)


# heartbeat, deadline, seconds of steps, the limit
LIMITS = [
  (100, 0, [], 300),  # nothing is known
  (100, 0, [50], 300),  # the first step is not counted
  (100, 0, [50, 0.1], 30),  # at least 0.3 of the heartbeat
  (100, 0, [50, 4, 1], 40),  # ten times the longest
  (100, 0, [50, 10], 50),  # at most half of the heartbeat
  (100, 0, [50, 40], 120),  # but three times the longest where a single step takes long
  (10, 0, [0, 0.1], 3),
  (10, 0, [0, 0.4], 4),
  (10, 0, [0, 1], 5),
  (100, 7, [], 300),
  (100, 7, [50], 300),
  (100, 7, [50, 40], 7),  # what is configured holds
]


@pytest.mark.parametrize(("heartbeat", "deadline", "lengths", "limit"), LIMITS)
@pytest.mark.parametrize("kind", [STEP, EVALUATION])
def test_limits(clock, kind, heartbeat, deadline, lengths, limit):
  watch = watching(heartbeat, deadline)
  beats(watch, clock, kind, *lengths)
  assert watch.limit() == pytest.approx(limit)


@pytest.mark.parametrize("kind", [STARTING, ENDING])
def test_starting_and_ending_take_as_long_as_they_like(clock, kind):
  watch = watching(deadline=7)
  beats(watch, clock, STEP, 1, 1, 1)
  watch.at("compiling", kind)
  assert watch.limit() == math.inf


def test_a_save_has_the_start_timeout(clock):
  watch = watching()
  beats(watch, clock, STEP, 1, 1, 1)
  watch.at("saving step 3", SAVING)
  assert watch.limit() == 300


def test_what_lies_between_two_steps_is_not_counted(clock):
  watch = watching()
  beats(watch, clock, STEP, 1, 1)
  watch.at("evaluation batch 1: waiting", EVALUATION, begins=True)
  clock.now += 40
  watch.at("saving", SAVING)
  clock.now += 40
  beats(watch, clock, STEP, 1)
  assert watch.limit() == 30


def test_kinds_are_known_apart(clock):
  watch = watching()
  beats(watch, clock, STEP, 1, 4)
  beats(watch, clock, EVALUATION, 1, 5)
  assert watch.limit() == 50
  watch.at("step", STEP, begins=True)
  assert watch.limit() == 40


def test_old_lengths_are_forgotten(clock):
  watch = watching()
  beats(watch, clock, STEP, 1, 4, *[1] * 50)
  assert watch.limit() == 30


# ------------------------------ who is behind ------------------------------


def places(clock: Clock, *beats_and_labels, store=None) -> Exchange:
  """Returns the exchange of process 0, which has waited and seen where all are; no threads."""
  count = len(beats_and_labels)
  members = groups_of(count, store)
  made = [
    Exchange(member, lambda place=place: (*place, 5.0), lambda *_: None)
    for member, place in zip(members, beats_and_labels, strict=True)
    if place
  ]
  for one in [*made, made[0]]:
    one._post()
  clock.now += 1.0
  return made[0]


def test_behind_is_the_one_with_the_fewest_beats(clock):
  text = places(clock, (7, "step 3"), (7, "step 3"), (6, "step 2: its batch")).behind()
  assert text.startswith("behind is process 2 (")
  assert text.endswith(", at 'step 2: its batch')")


def test_behind_are_several(clock):
  text = places(clock, (7, "c"), (5, "a"), (5, "b")).behind()
  assert "behind is process 1 (" in text
  assert ", 2 (" in text
  assert "0 (" not in text


def test_all_are_at_the_same_place(clock):
  assert places(clock, (7, "a"), (7, "a")).behind() == "all processes are at the same place"


def test_one_has_never_posted(clock):
  assert places(clock, (7, "a"), None, (7, "b")).behind() == "no sign of life from process 1"


def test_one_has_fallen_silent(clock):
  first = places(clock, (7, "a"), (6, "b: its batch"))
  for _ in range(3):
    clock.now += 1.0
    first._post()
  first._answered = clock.now
  text = first.behind()
  assert text.startswith("no sign of life from process 1 (")
  assert text.endswith(", last seen at 'b: its batch')")


def test_process_0_does_not_answer(clock):
  first = places(clock, (7, "a"), (7, "a"))
  clock.now += 3.0
  assert not first.answering()
  assert first.behind() == "no answer from process 0, which keeps the coordination service"


def test_silence_is_counted_from_the_last_sign_of_life(clock):
  first = places(clock, (7, "a"), (6, "b"))
  assert first.silence() == pytest.approx(1)
  clock.now += 3.0
  first._post()
  assert first.silence() == pytest.approx(4)
  assert first.silence(since=clock.now - 2.0) == pytest.approx(2), "this one has slept till then"


def test_silence_of_the_service_is_that_of_process_0(clock):
  first = places(clock, (7, "a"), (7, "a"))
  clock.now += 5.0
  assert first.silence() == pytest.approx(6)
  assert first.silence(since=clock.now) == 0


def test_who_has_ended_well_is_not_silent(clock):
  first, second = groups_of(2)
  one, other = (
    Exchange(member, lambda: (7, "saving", 5.0), lambda *_: None) for member in (first, second)
  )
  other._closed.set()
  other._run()  # as its thread at the end
  one._post()
  clock.now += 9.0
  one._post()
  one._answered = clock.now
  assert one.silence() == 0
  assert "process 1" not in one.behind()


def test_alone_nobody_is_behind():
  alone = Exchange(Group(), lambda: (1, "a", 0.0), lambda *_: None)
  assert alone.answering()
  assert alone.behind() == "there is no other process"
  alone.start()
  alone.close()


def waiting(clock: Clock, kind: str) -> tuple[Watchdog, Exchange, list[float]]:
  """Returns the watchdog of process 0, the exchange of process 1, and when the first is stuck."""
  first, second = groups_of(2, heartbeat_seconds=10)
  watch, stuck = Watchdog(first, StopRequest()), []
  watch._stuck = lambda *_: stuck.append(clock.now)
  watch.at("waits", kind)
  other = Exchange(second, lambda: (9, "anywhere", 0.0), lambda *_: None)
  return watch, other, stuck


def waits(watch: Watchdog, clock: Clock, seconds: int, *living: Exchange) -> None:
  """Lets time pass, in which these show signs of life."""
  for _ in range(seconds):
    clock.now += 1.0
    for one in [*living, watch._exchange]:
      one._post()
      one._answered = clock.now
    watch._look()


def test_a_save_waits_for_those_that_live(clock):
  watch, other, stuck = waiting(clock, SAVING)
  waits(watch, clock, 30, other)
  assert stuck == []
  waits(watch, clock, 6)
  assert 34 <= stuck[0] <= 35, "before JAX, which takes 0.6 of the heartbeat"


@pytest.mark.parametrize("kind", [STARTING, ENDING])
def test_at_the_start_and_the_end_silence_is_allowed(clock, kind):
  watch, other, stuck = waiting(clock, kind)
  waits(watch, clock, 1, other)
  waits(watch, clock, 50)
  assert stuck == []


def test_a_process_that_was_stopped_itself_takes_nobody_for_silent(clock):
  watch, other, stuck = waiting(clock, SAVING)
  waits(watch, clock, 2, other)
  clock.now += 20
  watch._has_slept(20)
  watch._look()
  assert stuck == []
  waits(watch, clock, 3)
  assert stuck == []
  waits(watch, clock, 3)
  assert stuck


# ------------------------------ notices ------------------------------


def test_notices_reach_all_others_once():
  received = {index: [] for index in range(3)}
  exchanges = [
    Exchange(
      member,
      lambda: (1, "a", 0.0),
      lambda what, index, notice, own=member.index: received[own].append(
        (what, index, notice["text"])
      ),
    )
    for member in groups_of(3)
  ]
  for one in exchanges:
    one.start()
  exchanges[1].tell("stop", "SIGTERM")
  exchanges[2].tell("failed", "ValueError: x")
  until = time.monotonic() + 10
  while len(received[0]) < 2 and time.monotonic() < until:
    time.sleep(0.01)
  time.sleep(2 * exchange.PERIOD_SECONDS)  # nothing comes twice
  assert exchanges[0].said("failed", 2) == "ValueError: x"
  assert exchanges[0].said("refused", 2) is None
  for one in exchanges:
    one.close()
  assert sorted(received[0]) == [("failed", "2", "ValueError: x"), ("stop", "1", "SIGTERM")]
  assert received[1] == [("failed", "2", "ValueError: x")]
  assert received[2] == [("stop", "1", "SIGTERM")]


def test_what_is_told_last_is_sent_before_the_end():
  first, second = groups_of(2)
  sender = Exchange(first, lambda: (1, "a", 0.0), lambda *_: None)
  sender.start()
  sender.tell("left", "before its first step")
  sender.close()
  assert second.list("notice")["left-0"]["text"] == "before its first step"


def test_a_service_that_does_not_answer_holds_nobody_up():
  store = SilentStore(2)
  first, _ = groups_of(2, store)
  one = Exchange(first, lambda: (1, "a", 0.0), lambda *_: None)
  one.start()
  time.sleep(0.1)
  store.answers.clear()
  began = time.monotonic()
  one.tell("failed", "x")
  one.close()
  assert time.monotonic() - began < 3
  store.answers.set()


# ------------------------------ lockstep ------------------------------


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


# ------------------------------ ends ------------------------------

# One process of its own: what ends it ends the tests too.
SCRIPT = """
import ctypes, os, signal, sys, threading, time
from processes.group import Group
from processes.stopping import StopRequest
from processes.watchdog import *
watch = Watchdog(Group(), StopRequest(), deadline_seconds=1, start_timeout_seconds=0.6)
"""


def ended(script: str) -> tuple[int, str, str, float]:
  """Runs a script; returns exit code, output, errors, seconds."""
  began = time.monotonic()
  done = subprocess.run(
    [sys.executable, "-c", SCRIPT + textwrap.dedent(script)],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  return done.returncode, done.stdout, done.stderr, time.monotonic() - began


def test_standing_still_is_named_and_ends_it():
  code, out, err, seconds = ended("""
    def waiting_for_a_batch():
      threading.Event().wait()
    with watch:
      for number in range(4):
        watch.at(f"step {number}: computing", begins=True)
        time.sleep(0.05)
      waiting_for_a_batch()
    """)
  assert code == 1, (out, err)
  first = err.splitlines()[0]
  assert first.startswith("error: no progress for 1 s at 'step 3: computing' (the limit was 1 s)")
  assert first.endswith("; there is no other process")
  assert "Python stacks of all threads:" in err
  assert "in waiting_for_a_batch" in err
  assert out == ""
  assert seconds < 20


def test_a_long_first_step_has_the_start_timeout():
  code, out, err, _ = ended("""
    with watch:
      watch.at("step 1: computing", begins=True)
      time.sleep(0.2)
      watch.at("compiling", STARTING)
      time.sleep(1)
      watch.at("step 1: computing", begins=True)
      print("here", flush=True)
      time.sleep(20)
    """)
  assert code == 1, (out, err)
  assert out == "here\n"
  assert "at 'step 1: computing' (the limit was 1 s, processes.start_timeout" in err


def test_a_stop_while_starting_ends_it_from_the_middle_of_c_code():
  code, out, err, seconds = ended("""
    with watch:
      # A signal goes to a thread that does not block it: this one's call in C is not cut short.
      signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
      threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
      ctypes.CDLL(None).usleep(30_000_000)
    """)
  assert code == 75, (out, err)
  assert out == "stopped as asked (SIGTERM) while starting; there was nothing to save\n"
  assert err == ""
  assert seconds < 15


def test_a_failure_of_the_watchdog_itself_ends_the_run():
  code, out, err, _ = ended("""
    watch.limit = lambda: 1 / 0
    with watch:
      time.sleep(20)
    """)
  assert code == 1, (out, err)
  assert "ZeroDivisionError" in err


def test_a_process_that_was_stopped_itself_is_not_stuck():
  # As by SIGSTOP, or a machine that slept: the time does not count.
  code, out, err, _ = ended("""
    with watch:
      for number in range(4):
        watch.at(f"step {number}", begins=True)
      if os.fork() == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(3.5)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
      time.sleep(0.5)
      watch.at("ending", ENDING)
    print("well", flush=True)
    """)
  assert (code, out, err) == (0, "well\n", "")


def test_threads_end_with_it():
  before = threading.active_count()
  with Watchdog(Group(), StopRequest()):
    assert threading.active_count() > before
  assert threading.active_count() == before
