"""Pipeline schedules: every unit once, in an order that its inputs allow, within the slots."""

import pytest

from partitioning.parallel.pipeline_schedule import (
  GPIPE,
  INTERLEAVED,
  ONE_F_ONE_B,
  Schedule,
  Work,
)

CASES = [
  Schedule(ONE_F_ONE_B, 2, 1),
  Schedule(ONE_F_ONE_B, 2, 5),
  Schedule(ONE_F_ONE_B, 4, 2),  # fewer microbatches than stages
  Schedule(ONE_F_ONE_B, 4, 4),
  Schedule(ONE_F_ONE_B, 4, 9),
  Schedule(ONE_F_ONE_B, 3, 7),
  Schedule(INTERLEAVED, 2, 2, 2),
  Schedule(INTERLEAVED, 2, 6, 3),
  Schedule(INTERLEAVED, 4, 8, 2),
  Schedule(INTERLEAVED, 3, 9, 2),
  Schedule(GPIPE, 4, 2),
  Schedule(GPIPE, 2, 8),
]


def when(schedule):
  """Returns (work, microbatch, chunk of all) -> tick, and asserts that each is done once."""
  found = {}
  for tick in range(schedule.ticks):
    for stage in range(schedule.stages):
      for unit in schedule.at(stage, tick):
        key = unit.work, unit.microbatch, unit.chunk * schedule.stages + stage
        assert key not in found
        found[key] = tick
  return found


@pytest.mark.parametrize("schedule", CASES, ids=str)
def test_each_pass_is_done_once_and_after_what_it_needs(schedule):
  ticks, chunks = when(schedule), schedule.stages * schedule.chunks
  assert len(ticks) == 2 * schedule.microbatches * chunks
  for microbatch in range(schedule.microbatches):
    for chunk in range(chunks):
      forward = ticks[Work.FORWARD, microbatch, chunk]
      backward = ticks[Work.BACKWARD, microbatch, chunk]
      last = chunk == chunks - 1
      # A permute brings the input in the tick after: exactly then, since nothing keeps it longer.
      if chunk:
        assert forward == ticks[Work.FORWARD, microbatch, chunk - 1] + 1
      if not last:
        assert backward == ticks[Work.BACKWARD, microbatch, chunk + 1] + 1
      elif schedule.kind != GPIPE:
        assert backward == forward  # the loss is that of the output of the same tick


@pytest.mark.parametrize("schedule", [c for c in CASES if c.kind != GPIPE], ids=str)
def test_no_slot_is_used_again_before_its_backward_pass(schedule):
  ticks = when(schedule)
  for stage in range(schedule.stages):
    for chunk in range(schedule.chunks):
      place = chunk * schedule.stages + stage
      if not place:
        continue  # its inputs are embeddings, computed again
      for microbatch in range(schedule.microbatches):
        until = ticks[Work.BACKWARD, microbatch, place]
        following = ticks.get((Work.FORWARD, microbatch + schedule.slots, place), until + 1)
        assert until < following


def test_a_schedule_counted_by_hand():
  schedule = Schedule(ONE_F_ONE_B, 2, 3)
  assert (schedule.forward_ticks, schedule.first_backward, schedule.ticks) == (4, 1, 5)

  def text(stage):
    rows = [schedule.at(stage, tick) for tick in range(schedule.ticks)]
    return ["".join(f"{u.work.name[0]}{u.microbatch}" for u in units) for units in rows]

  assert text(0) == ["F0", "F1", "F2B0", "B1", "B2"]
  assert text(1) == ["", "F0B0", "F1B1", "F2B2", ""]
  assert schedule.bubble == 1 / 4
