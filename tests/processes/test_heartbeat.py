"""The exchange: who is behind, who is silent, and notices that reach all others."""

import re
import time

import pytest

from processes import heartbeat
from processes.heartbeat import Exchange
from processes.preemption import StopRequest
from processes.watchdog import ENDING, SAVING, STARTING, Watchdog
from tests.processes.clocks import Clock
from tests.processes.stores import SilentStore, groups_of


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


@pytest.mark.parametrize(
  ("at", "said"),
  [
    (((7, "s"), (7, "s"), (6, "its batch")), r"behind: process 2 \(\S+, at 'its batch'\)"),
    (((7, "c"), (5, "a"), (5, "b")), r"behind: process 1 \(.*, at 'a'\), 2 \(.*, at 'b'\)"),
    (((7, "a"), (7, "a")), "all processes are at the same place"),
    (((7, "a"), None, (7, "b")), "no heartbeat from process 1"),
  ],
)
def test_those_with_the_fewest_beats_are_behind(clock, at, said):
  assert re.fullmatch(said, places(clock, *at).behind())


def test_one_has_just_been_stopped_at_the_same_place(clock):
  one = places(clock, (7, "a"), (7, "a"))
  clock.now += 0.7
  one._post()  # its own
  expected = "all processes are at the same place; for 1.7 s no heartbeat from process 1"
  assert one.behind() == expected


def test_one_has_fallen_silent(clock):
  first = places(clock, (7, "a"), (6, "b: its batch"))
  for _ in range(3):
    clock.now += 1.0
    first._post()
  first._answered = clock.now
  text = first.behind()
  assert text.startswith("no heartbeat from process 1 (")
  assert text.endswith(", last seen at 'b: its batch')")


def test_process_0_does_not_answer(clock):
  first = places(clock, (7, "a"), (7, "a"))
  clock.now += 3.0
  assert not first.answering()
  assert first.behind() == "no answer from process 0, which runs the coordination service"


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


def test_a_process_that_was_suspended_itself_considers_no_other_silent(clock):
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
  until = time.monotonic() + 60
  while len(received[0]) < 2 and time.monotonic() < until:
    time.sleep(0.01)
  time.sleep(2 * heartbeat.PERIOD_SECONDS)  # nothing comes twice
  assert exchanges[0].said("failed", 2) == "ValueError: x"
  assert exchanges[0].said("refused", 2) is None
  for one in exchanges:
    one.close()
  assert sorted(received[0]) == [("failed", "2", "ValueError: x"), ("stop", "1", "SIGTERM")]
  assert received[1] == [("failed", "2", "ValueError: x")]
  assert received[2] == [("stop", "1", "SIGTERM")]


def test_the_last_notice_is_sent_before_the_end():
  first, second = groups_of(2)
  sender = Exchange(first, lambda: (1, "a", 0.0), lambda *_: None)
  sender.start()
  sender.tell("left", "before its first step")
  sender.close()
  assert second.list("notice")["left-0"]["text"] == "before its first step"


def test_a_service_that_does_not_answer_blocks_no_process():
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
