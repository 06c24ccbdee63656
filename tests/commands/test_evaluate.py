"""The verb evaluate: how much it takes, what it shows on a terminal, and how it is interrupted."""

import json
import re
import shutil
import signal

import pytest

from tests.helpers import terminals
from tests.helpers.cli import TINY_LM
from tests.helpers.terminals import Terminal


@pytest.fixture(scope="module")
def trained(main, tmp_path_factory):
  """Returns the workdir of a run of two steps."""
  workdir = tmp_path_factory.mktemp("trained")
  settings = ["--config.training.steps=2", "--config.metrics.tensorboard=false"]
  code, out, err = main("--config=configs/single.py", *TINY_LM, *settings, f"--workdir={workdir}")
  assert code == 0, (out, err)
  return workdir


def test_a_sample_of_the_split(main, trained):
  command = ["evaluate", "--config=configs/single.py", *TINY_LM, f"--checkpoint={trained}"]
  losses = []
  whole = "the whole split"
  drawn = r"\d+ of \d[\d,]* examples, drawn at random"
  for steps, what in ((2, drawn), (None, whole)):
    given = [f"--config.evaluation.final_steps={steps}"] * (steps is not None)
    code, out, err = main(*command, *given)
    assert code == 0, (out, err)
    assert re.search(rf"evaluation after step 2 \({what}\): eval_loss ", out), out
    assert "batch 1/" not in out, "the progress is for terminals"
    losses.append(float(out.split("eval_loss ")[1].split()[0]))
  assert losses[0] != losses[1]


def test_it_shows_its_progress_on_a_terminal_and_stops_within_a_batch(forks, trained):
  command = ["evaluate", "--config=configs/single.py", *TINY_LM, f"--checkpoint={trained}"]
  command += ["--config.data.evaluation_split=test", "--config.data.global_batch_size=1"]
  with Terminal(terminals.main(*command), forks=forks) as terminal:
    # The second batch, or a later one.
    terminal.wait_until(lambda: re.search(r"evaluation: batch [2-9]", terminal.text()), "a batch")
    terminal.popen.send_signal(signal.SIGTERM)
    assert terminal.end() == 75, terminal.text()
    shown = terminal.text()
  assert "eval_loss" not in shown
  assert "Traceback" not in shown, shown


def test_tasks_are_scored_on_any_mesh(main, trained, tmp_path):
  arc, words = tmp_path / "arc.jsonl", tmp_path / "words.jsonl"
  choices = [{"context": f"x = {n}", "choices": [")", "a b"], "answer": n % 2} for n in range(9)]
  arc.write_text("".join(f"{json.dumps(record)}\n" for record in choices))
  words.write_text('{"context": "import numpy as np", "answer": "\\n"}\n')
  found = []
  for strategy, workdir in (("single", []), ("dp4_tp2", [f"--workdir={tmp_path}/other"])):
    code, out, err = main(
      *("evaluate", f"--config=configs/{strategy}.py", *TINY_LM, f"--checkpoint={trained}"),
      *(f"--tasks={arc},{words}", "--config.data.global_batch_size=8", *workdir),
    )
    assert (code, err) == (0, "")
    folder = (tmp_path / "other" if workdir else trained) / "tasks"
    results = json.loads((folder / "2.json").read_text())
    assert results["checkpoint"] == str(trained)
    metrics = results["tasks"]["arc"]["metrics"]
    [line] = [line for line in out.splitlines() if line.split()[:1] == ["arc"]]
    assert line.split()[:4] == ["arc", "9", "acc", f"{metrics['acc']['value']:.4f}"]
    assert f"± {metrics['acc']['standard_error']:.4f}" in line
    assert "words: in 1 of 1 records the context is longer than a row" in out
    found.append([json.loads(line) for line in (folder / "2_arc.jsonl").open()])
    assert len(found[-1]) == 9
  for one, other in zip(*found, strict=True):
    assert one["log_likelihoods"] == pytest.approx(other["log_likelihoods"], rel=1e-5)


def test_a_run_scores_tasks_at_each_evaluation_and_resumes_exactly(main, tmp_path):
  records = {
    "arc": [{"context": f"x={n}", "choices": [")", "a b"], "answer": n % 2} for n in range(9)],
    "gen": [{"context": "de", "answer": "f", "until": [], "max_new_tokens": n} for n in (3, 2)],
  }
  for name, lines in records.items():
    (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
  tasks, workdir = f"{tmp_path}/*.jsonl", tmp_path / "run"
  settings = {"training.steps": 2, "metrics.tensorboard": False, "checkpoint.every_steps": 1}
  settings |= {"evaluation.every_steps": 1, "evaluation.tasks": tasks}
  keys = [f"--config.{key}={value}" for key, value in settings.items()]
  command = ["--config=configs/dp4_tp2.py", *TINY_LM, *keys, f"--workdir={workdir}"]

  def evaluations():
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval_loss" in line]

  code, out, err = main(*command)
  assert (code, err) == (0, "")
  whole = evaluations()
  assert [line["step"] for line in whole] == [1, 2]
  assert f"eval_acc/arc {whole[1]['eval_acc/arc']:.4f} ± " in out
  shutil.rmtree(workdir / "checkpoints" / "2")  # as if it had been killed before it was saved
  code, out, err = main(*command)
  assert (code, err) == (0, "")
  scores = {"eval_acc/arc", "eval_acc_bytes/arc", "eval_exact_match/gen", "eval_loss"}
  assert scores <= {*whole[0]}
  kept = [{k: v for k, v in line.items() if k.startswith("eval")} for line in evaluations()]
  assert kept == [{k: v for k, v in line.items() if k.startswith("eval")} for line in whole]
  code, _, err = main("evaluate", str(workdir), f"--tasks={tasks}")
  assert (code, err) == (0, "")
  results = json.loads((workdir / "tasks" / "2.json").read_text())["tasks"]
  for name in records:
    for metric, found in results[name]["metrics"].items():
      assert found["value"] == whole[1][f"eval_{metric}/{name}"]
      assert found["standard_error"] == whole[1].get(f"eval_{metric}_stderr/{name}")


def test_a_task_that_cannot_be_scored_is_refused(main, tmp_path):
  (tmp_path / "bad.jsonl").write_text('{"context": "a", "choices": ["b", "c"], "answer": "d"}\n')
  tasks = f"--config.evaluation.tasks={tmp_path}/bad.jsonl"
  code, _, err = main("--config=configs/single.py", *TINY_LM, tasks, f"--workdir={tmp_path}/new")
  assert code == 2
  assert "refused: evaluation.tasks: 1 records cannot be scored:" in err
  assert "bad.jsonl:1: its 'answer' 'd' is not among its choices" in err
  assert not (tmp_path / "new").exists()
