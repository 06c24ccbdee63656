"""Lines of finished steps that metrics.jsonl has lost: told from those that were never due."""

import json

import pytest

from tests.training import runs
from training.metrics.log_lines import SCHEDULES, LogSchedule, missing_text


def due(*starts, done):
  """Returns what should be there by brute force, of starts (steps done before, keys)."""
  steps, evaluations = set(), set()
  for (before, metrics, evaluation), end in zip(
    starts, [*(start[0] for start in starts[1:]), done], strict=True
  ):
    for step in range(before + 1, end + 1):
      if step == 1 or (metrics and step % metrics == 0):
        steps.add(step)
      if evaluation and step % evaluation == 0:
        evaluations.add(step)
  return steps, evaluations - {done}


@pytest.mark.parametrize(
  "starts",
  [
    [(0, 10, 50)],
    [(0, 1, 0)],
    [(0, 0, 7)],
    [(0, 10, 50), (60, 7, 20), (75, 7, 20), (80, 10, 0)],
    [(0, 10, 50), (60, 7, 20), (61, 10, 50)],
  ],
)
@pytest.mark.parametrize("done", [81, 100])
def test_each_line_that_is_missing_is_found_and_no_other(starts, done):
  record = {}
  for before, metrics, evaluation in starts:
    schedule = LogSchedule(metrics, evaluation, record, before)
    record = schedule.record()
  steps, evaluations = due(*starts, done=done)
  assert schedule.missing(done, steps, evaluations) == ([], [])
  assert schedule.missing(done, [], []) == (sorted(steps), sorted(evaluations))
  for step in steps:
    assert schedule.missing(done, steps - {step}, evaluations) == ([step], [])
  for step in evaluations:
    assert schedule.missing(done, steps, evaluations - {step}) == ([], [step])


def test_what_an_older_record_has_logged_is_not_known():
  schedule = LogSchedule(10, 50, {}, 100)
  assert schedule.missing(120, [], []) == ([110, 120], [])
  assert schedule.record() == {SCHEDULES: [[101, 10, 50]]}


def test_going_back_forgets_what_came_later():
  known = {SCHEDULES: [[1, 10, 50], [31, 5, 50]]}
  schedule = LogSchedule(2, 50, known, 40)
  assert schedule.record()[SCHEDULES] == [[1, 10, 50], [31, 5, 50], [41, 2, 50]]
  schedule.roll_back(20)
  assert schedule.record()[SCHEDULES] == [[1, 10, 50], [21, 2, 50]]
  schedule.roll_back(0)
  assert schedule.record()[SCHEDULES] == [[1, 2, 50]]


def test_what_is_missing_in_words():
  assert missing_text(([], [])) == ""
  assert missing_text((range(1, 8), [])) == "7 of steps (1, 2, 3, 4, 5, ...)"
  assert missing_text(([3], [50])) == "1 of steps (3) and 1 of evaluations (50)"


def holds(values, lost):
  """Tells whether a line is one of these (step, key)."""
  return any(values["step"] == step and key in values for step, key in lost)


@pytest.mark.long
def test_a_run_reports_the_lines_that_it_has_lost(tmp_path, capsys):
  rows = runs.source()
  runs.train(tmp_path, rows, **{"training.steps": 15})
  runs.train(tmp_path, rows)  # nothing is lost: nothing is said
  assert "lost lines" not in capsys.readouterr().err
  metrics = tmp_path / "metrics.jsonl"
  lines = metrics.read_text().splitlines(keepends=True)
  lost = ((4, "loss"), (9, "loss"), (10, "eval_loss"))
  metrics.write_text("".join(x for x in lines if not holds(json.loads(x), lost)))
  runs.train(tmp_path, rows, **{"training.steps": 20, "metrics.every_steps": 3})
  [said] = [line for line in capsys.readouterr().err.splitlines() if "lost lines" in line]
  assert said == (
    f"WARNING: {metrics} has lost lines of finished steps: 2 of steps (4, 9) and 1 of evaluations "
    f"(10); training continues without them"
  )
