"""The watchdog: how long what may take, and how a process ends that stands still."""

import math
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from processes.coordination import Group
from processes.preemption import REPLACEABLE, WANTED, StopRequest
from processes.watchdog import ENDING, EVALUATION, SAVING, STARTING, STEP, Watchdog
from tests.processes.clocks import Clock

ROOT = pathlib.Path(__file__).parent.parent.parent


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


def test_starting_and_ending_take_as_long_as_they_like_and_a_save_the_start_timeout(clock):
  watch = watching(deadline=7)
  beats(watch, clock, STEP, 1, 1, 1)
  for kind, limit in ((STARTING, math.inf), (ENDING, math.inf), (SAVING, 300)):
    watch.at("what takes long", kind)
    assert watch.limit() == limit


def test_a_single_process_has_longer_limits(clock):
  watch = Watchdog(
    Group(), StopRequest(), start_timeout_seconds=300.0, input_timeout_seconds=1800.0
  )
  beats(watch, clock, STEP, 1, 1, 1)
  assert watch.limit() == 300
  watch.at("step 5: waiting for its batch", reader="prefetch", begins=True)
  assert watch.limit() == 1800
  watch.at("step 5: computing")
  assert watch.limit() == 300
  beats(watch, clock, STEP, 50, 50)
  assert watch.limit() == 500


def test_among_several_a_late_batch_is_a_late_step(clock):
  watch = watching()
  beats(watch, clock, STEP, 1, 1, 1)
  watch.at("step 5: waiting for its batch", reader="prefetch", begins=True)
  assert watch.limit() == 30


def test_time_between_two_steps_is_not_counted(clock):
  watch = watching()
  beats(watch, clock, STEP, 1, 1)
  watch.at("evaluation batch 1: waiting", EVALUATION, begins=True)
  clock.now += 40
  watch.at("saving", SAVING)
  clock.now += 40
  beats(watch, clock, STEP, 1)
  assert watch.limit() == 30


def test_kinds_are_known_apart_and_old_lengths_forgotten(clock):
  watch = watching()
  beats(watch, clock, STEP, 1, 4)
  beats(watch, clock, EVALUATION, 1, 5)
  assert watch.limit() == 50
  watch.at("step", STEP, begins=True)
  assert watch.limit() == 40
  beats(watch, clock, STEP, *[1] * 51)
  assert watch.limit() == 30


def test_the_first_step_asks_for_a_spare_once(clock, monkeypatch):
  reading, writing = os.pipe()
  os.set_blocking(reading, False)
  monkeypatch.setenv(REPLACEABLE, str(writing))
  watch = watching()
  watch.at("step 1", STEP, begins=True)
  with pytest.raises(BlockingIOError):
    os.read(reading, 9)
  beats(watch, clock, STEP, 1, 1, 1)
  assert os.read(reading, 9) == WANTED
  for end in (reading, writing):
    os.close(end)


# ------------------------------ ends ------------------------------

# One process of its own: what ends it ends the tests too.
SCRIPT = """
import ctypes, os, signal, subprocess, sys, threading, time
from processes.coordination import Group
from processes.preemption import REPLACEABLE, WANTED, StopRequest
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


@pytest.mark.long
def test_a_save_that_makes_progress_is_never_ended_and_one_that_hangs_is():
  code, out, err, _ = ended("""
    written = []
    watch = Watchdog(Group(), StopRequest(), start_timeout_seconds=2)
    with watch:
      watch.at("saving step 3", SAVING, progress=lambda: len(written))
      for _ in range(11):  # more than twice the limit
        time.sleep(0.4)
        written.append(1)
      print("it was slow", flush=True)
      time.sleep(20)
    """)
  assert code == 1, (out, err)
  assert out == "it was slow\n"
  assert "at 'saving step 3' (the limit was 2 s, processes.start_timeout_seconds)" in err


def test_progress_that_cannot_be_looked_at_is_none():
  # As a network disk that hangs: the look at it does not return, nor may anybody wait for it.
  code, out, err, _ = ended("""
    with watch:
      watch.at("saving step 3", SAVING, progress=lambda: threading.Event().wait())
      time.sleep(20)
    """)
  assert code == 1, (out, err)
  assert "at 'saving step 3'" in err


def test_a_slow_input_is_warned_about_with_its_place_and_then_ended():
  code, out, err, _ = ended("""
    def read_from_far_away():
      time.sleep(30)
    threading.Thread(target=read_from_far_away, name="prefetch", daemon=True).start()
    watch = Watchdog(Group(heartbeat_seconds=1), StopRequest(), start_timeout_seconds=0.3,
                     input_timeout_seconds=2)
    with watch:
      watch.at("step 1: waiting for its batch", reader="prefetch", begins=True)
      time.sleep(1)
      print("still there", flush=True)
      time.sleep(20)
    """)
  assert code == 1, (out, err)
  assert out == "still there\n"
  first, *_, last = [line for line in err.splitlines() if "step 1" in line]
  assert re.match(r"WARNING: \d s at 'step 1: waiting for its batch': the input is slow or", first)
  assert "thread 'prefetch' is at <string>:" in first
  assert "read_from_far_away" in first
  assert first.endswith("is ended after 2 s (processes.input_timeout_seconds)")
  assert "(the limit was 2 s, processes.input_timeout_seconds)" in last


def test_a_stop_while_starting_ends_it_from_the_middle_of_c_code():
  code, out, err, seconds = ended("""
    with watch:
      # A signal goes to a thread that does not block it: this one's call in C is not cut short.
      signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
      threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
      ctypes.CDLL(None).usleep(30_000_000)
    """)
  assert code == 75, (out, err)
  assert out == "stopped as requested (SIGTERM) while starting; there was nothing to save\n"
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
      mine = os.getpid()
      subprocess.Popen(["sh", "-c", f"kill -STOP {mine}; sleep 3.5; kill -CONT {mine}"])
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
