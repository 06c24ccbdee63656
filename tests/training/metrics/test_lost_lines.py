"""Lines of finished steps that metrics.jsonl has lost: told from those that were never due."""

import json

from etils import epath

from tests.training import runs
from training.metrics.log_lines import LINES, MetricsWriter


def written(folder, step, *lines, rollbacks=0):
  """Opens the file at a step, writes (step, key) lines, and returns the writer."""
  with MetricsWriter(
    epath.Path(folder), step=step, tensorboard=False, rollbacks=rollbacks
  ) as writer:
    for number, key in lines:
      writer.write(number, {key: 0.5})
  return writer


def test_lines_are_counted_over_starts_and_rollbacks(tmp_path):
  first = written(tmp_path, 0, (1, "loss"), (4, "loss"), (4, "eval_loss"), (8, "loss"))
  assert first.lines == {"steps": 3, "evaluations": 1}
  record = {LINES: {"steps": 2, "evaluations": 1}}  # saved after step 4
  again = written(tmp_path, 4, (6, "loss"))
  assert again.lost(record) == again.lost({}) == ""
  again.roll_back(4, 1, {"rolled_back": 6, "why": "", "skipped_rows": []})
  assert again.lines == record[LINES]
  assert written(tmp_path, 4, rollbacks=1).lost(record) == ""


def test_a_run_reports_the_lines_that_it_has_lost(tmp_path, capsys):
  rows = runs.source()
  runs.train(tmp_path, rows, **{"training.steps": 15})
  metrics = tmp_path / "metrics.jsonl"
  lines = [json.loads(line) for line in metrics.read_text().splitlines()]
  lost = ((4, "loss"), (9, "loss"), (10, "eval_loss"))
  kept = [x for x in lines if not any(x["step"] == step and key in x for step, key in lost)]
  metrics.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
  assert "lost lines" not in capsys.readouterr().err
  runs.train(tmp_path, rows, **{"training.steps": 20, "metrics.every_steps": 3})
  [said] = [line for line in capsys.readouterr().err.splitlines() if "lost lines" in line]
  steps, evaluations = (sum(key in line for line in lines) for key in ("loss", "eval_loss"))
  assert said == (
    f"WARNING: {metrics} has lost lines of finished steps: 2 of {steps} about steps and 1 of "
    f"{evaluations} about evaluations; training continues without them"
  )
