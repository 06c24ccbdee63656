"""commands/closing.py: the curve and the next commands at the end of a run."""

import io
import json
import shutil
import sys
import types

import pytest

from commands import closing, flags
from tests.helpers.jobs import make_job

RESTART = "optimizer.schedule_on_resume=restart"


@pytest.fixture
def installed(monkeypatch):
  """Returns the set of programs that are installed: none."""
  found = set()
  monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
  monkeypatch.setattr(sys, "platform", "linux")
  flags.flags.FLAGS.mark_as_parsed()
  return found


def offered(capsys):
  return [line.strip() for line in capsys.readouterr().out.splitlines()[2:]]


def test_the_runs_folder_stands_for_the_run(tmp_path, capsys, installed):
  job = make_job("dp8", "lm", **{"data.name": "python_source", "training.steps": 7})
  folder = f"'{tmp_path}/my runs'"
  closing.next_commands(job, tmp_path / "my runs", samples=True)
  lines = offered(capsys)
  assert lines == [
    f"sample from it:   python main.py sample {folder}",
    f"train for longer: python main.py train {folder} training.steps=14",
    f"(the learning rate stays at 0.0008; with {RESTART} it warms up again and decays)",
    f"see its page:     {tmp_path}/my runs/run.html (in a browser)",
  ]
  installed.update(("xdg-open", "tensorboard"))
  closing.next_commands(job, tmp_path / "my runs", samples=True)
  assert offered(capsys) == [
    *lines[:3],
    f"see its page:     xdg-open '{tmp_path}/my runs/run.html'",
    f"see its metrics:  tensorboard '--logdir={tmp_path}/my runs'",
  ]


@pytest.mark.parametrize(
  ("schedule", "more", "how"),
  [
    ("linear", [RESTART], ["(the learning rate has ended at 0, and so warms up again and decays)"]),
    ("wsd", [RESTART], ["(the learning rate has ended at 0, and so warms up again and decays)"]),
    ("constant", [], []),
  ],
)
def test_to_train_for_longer_a_schedule_that_has_ended_at_0_restarts(
  installed, tmp_path, capsys, schedule, more, how
):
  job = make_job("dp8", "lm", **{"training.steps": 7, "optimizer.schedule": schedule})
  closing.next_commands(job, tmp_path, samples=False)
  _, longer, *lines = offered(capsys)
  assert longer.split()[-1 - len(more) :] == ["training.steps=14", *more]
  assert lines[:-1] == how


def test_a_classifier_is_evaluated_and_a_run_without_a_page_has_its_layout(
  installed, tmp_path, capsys
):
  installed.add("tensorboard")
  job = make_job("dp8", "mlp", **{"metrics.tensorboard": False, "metrics.report": False})
  closing.next_commands(job, tmp_path, samples=False)
  first, *_, last = offered(capsys)
  assert first == f"evaluate it:      python main.py evaluate {tmp_path}"
  assert last == f"see its layout:   python main.py layout {tmp_path}"


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
