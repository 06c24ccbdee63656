"""commands/closing.py: the curve and the next commands at the end of a run."""

import io
import json
import sys
import types

import pytest

from commands import closing
from inference.request import Request
from tests.helpers.jobs import make_job

RESTART = "--config.optimizer.schedule_on_resume=restart"


@pytest.fixture
def given(monkeypatch):
  """Sets the command line of the run."""
  words = ["train", "--config=configs/dp8.py", "--config.training.steps=7", "--accept-changes=seed"]
  monkeypatch.setattr(sys, "argv", ["main.py", *words])


def test_the_next_commands_are_the_runs_own_with_what_they_change(given, tmp_path, capsys):
  job = make_job("dp8", "lm", **{"data.name": "python_source", "training.steps": 7})
  closing.next_commands(job, tmp_path / "my runs", Request(("def ",)))
  sample, longer, how, board = capsys.readouterr().out.splitlines()[2:]
  config = "--config=configs/dp8.py"
  assert sample.split(None, 3)[3] == (
    f"python main.py sample {config} --config.training.steps=7 '--prompt=def '"
  )
  assert longer.endswith(
    f"python main.py {config} --accept-changes=seed --config.training.steps=14"
  )
  assert how.strip() == (
    "(the learning rate stays at 0.0008; with --config.optimizer.schedule_on_resume=restart it "
    "warms up again and decays)"
  )
  assert board.endswith(f"tensorboard '--logdir={tmp_path}/my runs'")


@pytest.mark.parametrize(
  ("schedule", "more", "how"),
  [
    ("linear", [RESTART], ["(the learning rate has ended at 0, and so warms up again and decays)"]),
    ("wsd", [RESTART], ["(the learning rate has ended at 0, and so warms up again and decays)"]),
    ("constant", [], []),
  ],
)
def test_to_train_for_longer_a_schedule_that_has_ended_at_0_restarts(
  given, tmp_path, capsys, schedule, more, how
):
  job = make_job("dp8", "lm", **{"training.steps": 7, "optimizer.schedule": schedule})
  closing.next_commands(job, tmp_path, None)
  _, longer, *lines = capsys.readouterr().out.splitlines()[2:]
  assert longer.split()[-1 - len(more) :] == ["--config.training.steps=14", *more]
  assert [line.strip() for line in lines[:-1]] == how


def test_a_classifier_is_evaluated(given, tmp_path, capsys):
  job = make_job("dp8", "mlp", **{"metrics.tensorboard": False})
  closing.next_commands(job, tmp_path, None)
  out = capsys.readouterr().out
  assert "python main.py evaluate --config=configs/dp8.py --config.training.steps=7\n" in out
  assert "tensorboard" not in out


def test_the_curve_is_of_the_steps_that_count(tmp_path, capsys, monkeypatch):
  lines = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": "nan"}, {"step": 9, "loss": 1.25}]
  lines += [{"step": 9, "eval_loss": 1.5}, {"step": 9, "rolled_back": 10, "why": "x"}]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  closing.curve(tmp_path)
  out = capsys.readouterr().out
  assert "loss 1.2500; on the evaluation split 1.5000 (o)" in out
  assert out.count("\n") == 12
  evaluated = {"eval_examples": 2670, "eval_share": 1.0}
  sampled = {"eval_examples": 256, "eval_share": 256 / 2670, "eval_loss_stderr": 0.25}
  lines += [{"step": step, "eval_loss": 3.0 - step / 10, **sampled} for step in (4, 8)]
  lines = [*(line for line in lines if line.get("eval_loss") != 1.5)]
  lines += [{"step": 9, "eval_loss": 2.5, **evaluated}]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  closing.curve(tmp_path)
  out = capsys.readouterr().out
  said = "split 2.2000 ± 0.2500 (o: 256 of 2,670 examples), 2.5000 (x: the whole split)\n"
  assert f"loss 1.2500; on the evaluation {said}" in out
  drawn = out.partition("step 9")[0]
  assert (drawn.count("o"), drawn.count("x")) == (2, 1)
  ascii_output = types.SimpleNamespace(encoding="ascii")
  monkeypatch.setattr(sys, "stdout", ascii_output)
  assert not closing._can_show_dots()
  monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
  assert closing._can_show_dots()


def test_a_run_without_two_losses_has_no_curve(tmp_path, capsys):
  closing.curve(tmp_path)
  assert capsys.readouterr().out == ""
