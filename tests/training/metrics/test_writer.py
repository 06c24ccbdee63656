"""Lines of metrics.jsonl: what stands once a run has gone on or gone back."""

import json

import pytest
from etils import epath

from training.metrics import console
from training.metrics.log_lines import MetricsWriter, evaluated


def lines(folder):
  """Returns the lines, each as (step, a key that tells which it is)."""
  found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
  return [(line["step"], list(line)[1]) for line in found]


def times(number):
  """Returns a line about where the time went."""
  return {"goodput": 0.5, "seconds": {"step": 1.0}, "time": float(number), "done": False}


@pytest.fixture
def folder(tmp_path):
  """Returns a workdir with the lines of a run that went back from step 7 to 4, and was killed."""
  with MetricsWriter(epath.Path(tmp_path), step=0, tensorboard=False) as writer:
    writer.write_times(0, times(0))
    for step in range(1, 7):
      writer.write(step, {"loss": 1 / step})
      if step == 4:
        writer.write(step, {"eval_loss": 0.25})
        writer.write_times(step, times(step))
    writer.roll_back(4, 1, {"rolled_back": 7})
    writer.write_times(4, times(7))
    writer.write(5, {"loss": 0.2})
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 6, "lo')
  return tmp_path


STEPS = [(0, "goodput"), *((step, "loss") for step in range(1, 5)), (4, "eval_loss")]


def test_going_back_drops_the_lines_past_the_step_and_says_so(folder):
  assert lines_whole(folder) == [*STEPS, (4, "rolled_back"), (4, "goodput"), (5, "loss")]


def lines_whole(folder):
  """Returns the lines that are whole."""
  text = (folder / "metrics.jsonl").read_text()
  (folder / "metrics.jsonl").write_text(text[: text.rindex("\n") + 1])
  return lines(folder)


@pytest.mark.parametrize(
  ("step", "known", "expected"),
  [
    (5, 1, [*STEPS, (4, "rolled_back"), (4, "goodput"), (5, "loss")]),
    (4, 0, [*STEPS, (4, "goodput")]),  # the checkpoint was saved before it went back
    (2, 1, [*STEPS[:3], (4, "rolled_back")]),
    (0, 0, STEPS[:1]),
  ],
)
def test_the_lines_that_remain_when_a_run_resumes(folder, step, known, expected):
  writer = MetricsWriter(epath.Path(folder), step=step, tensorboard=False, rollbacks=known)
  assert lines(folder) == expected
  assert writer.times == {"step": expected[-1][0] and 4, **times(7)} if step >= 4 else times(0)


def test_a_step_has_one_line_of_times_the_last_of_the_step(folder):
  writer = MetricsWriter(epath.Path(folder), step=5, tensorboard=False, rollbacks=1)
  writer.write_times(5, times(8))
  writer.write(5, {"eval_loss": 0.1})
  writer.write_times(5, times(9))
  assert lines(folder)[-3:] == [(5, "loss"), (5, "eval_loss"), (5, "goodput")]
  assert writer.times == {"step": 5, **times(9)}
  assert evaluated(epath.Path(folder), 5)
  assert not evaluated(epath.Path(folder), 3)


def test_event_files_of_undone_steps_are_purged(tmp_path):
  with MetricsWriter(epath.Path(tmp_path), step=0, tensorboard=True) as writer:
    writer.write(1, {"loss": 1.0})
    before = set(tmp_path.glob("events.out.tfevents.*"))
    writer.roll_back(0, 1, {"rolled_back": 2})
    writer.write(1, {"loss": 1.0})
  assert len(set(tmp_path.glob("events.out.tfevents.*")) - before) == 1


def test_no_control_character_reaches_the_terminal(capsys):
  console.say("a\x1b[2Jb\x07\n\u202ec" + "x" * 20_000)
  console.warn("a\x9b31mb")
  out, err = capsys.readouterr()
  assert out == "a\\x1b[2Jb\\x07\n\\u202ec" + "x" * 20_000 + "\n"
  assert err == "WARNING: a\\x9b31mb\n"
