"""What processes tell one another about a checkpoint: in exchanges, at the stages of a save."""

import functools
import random
import time

import pytest

from tests.processes.stores import groups_of, together
from training.checkpointing.consensus import ElsewhereError, Together, join_reports

SECONDS = 20


def of(count):
  """Returns the meetings of as many processes, which are threads here."""
  return [Together(group, timeout_seconds=SECONDS) for group in groups_of(count)]


def all_of(count, act):
  """Lets every process act; returns what each returned or raised."""
  return together(*(functools.partial(act, one) for one in of(count)))


def test_a_single_process_receives_its_own_message():
  alone = Together()
  assert alone.alone
  assert alone.first
  assert alone.exchange("x") == ["x"]
  assert alone.from_first("y") == "y"
  assert [alone.all_true(value) for value in (True, False)] == [True, False]
  alone.begin_stages()
  alone.stage(1, timeout_seconds=0)
  assert alone.failures(1) == ""
  assert alone.shared() == []
  assert Together(groups_of(1)[0]).alone


def test_all_receive_all_messages_in_each_of_many_exchanges():
  def says(index, number):
    return f"{index} at {number}" if (number + index) % 3 == 0 and number % 4 else ""

  def act(one):
    chance = random.Random(one.index)
    found = []
    for number in range(40):
      time.sleep(chance.random() * 0.002)
      found.append(one.exchange(says(one.index, number)))
    return found

  expected = [[says(index, number) for index in range(3)] for number in range(40)]
  assert all_of(3, act) == [expected] * 3


def test_what_was_said_in_a_line():
  assert join_reports([""]) == join_reports(["", ""]) == ""
  assert join_reports(["torn"]) == "torn"
  assert join_reports(["", "torn", "", "cut"]) == "process 1: torn; process 3: cut"


STAGES = 4


def save(one, fails_before):
  """Goes through the stages of a save; a process fails before the stage given for it."""
  one.begin_stages()
  for number in range(1, STAGES + 1):
    if fails_before.get(one.index) == number:
      one.fail(f"fault before {number}", number)
    try:
      one.stage(number, timeout_seconds=SECONDS)
    except ElsewhereError as error:
      return number, str(error)
  return None


@pytest.mark.parametrize(("failing", "stage"), [(0, 1), (1, 2), (2, 3), (0, STAGES)])
def test_where_one_fails_all_leave_at_the_same_stage_and_know_why(failing, stage):
  failed = (stage, f"process {failing}: fault before {stage}")

  def in_turn(one):
    found = []
    for faults in ({failing: stage}, {}, {failing: stage}):
      found.append(save(one, faults))
      one.exchange("")  # as before every save
    return found

  assert all_of(3, in_turn) == [[failed, None, failed]] * 3


def test_a_process_slow_to_leave_a_stage_does_not_see_a_later_failure(monkeypatch):
  # Process 1 has passed stage 1 and fails before stage 2, while process 0 still leaves stage 1.
  first, second = of(2)
  first.begin_stages()
  second.begin_stages()
  real, looked = first.failures, []

  def slow(number):
    if not looked:
      looked.append(number)
      time.sleep(0.5)
    return real(number)

  monkeypatch.setattr(first, "failures", slow)
  results = together(lambda: save(first, {}), lambda: save(second, {1: 2}))
  assert results == [(2, "process 1: fault before 2")] * 2


def test_one_who_never_comes_is_an_error():
  one, _ = of(2)
  with pytest.raises(RuntimeError, match="save_1"):
    one.stage(1, timeout_seconds=0.1)
