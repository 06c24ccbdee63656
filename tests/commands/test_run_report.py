"""A run with its report: history, samples and page, also after a kill, a stop and a bad step."""

import json
import re
import signal
import time

import pytest

from reports import run_files, run_page
from tests.helpers.cli import TINY_LM, lines_of
from tests.reports.test_layout_page import Reader
from training import history, workdir_files

KEYS = [flag for flag in TINY_LM if "metrics.report" not in flag and "sample_tokens" not in flag]
COMMAND = [
  "--config=configs/dp4_tp2.py",
  *KEYS,
  "--config.evaluation.sample_tokens=3",
  "--config.evaluation.final_steps=2",
  "--config.checkpoint.every_steps=2",
]


def events(workdir, kind):
  found = history.events((workdir / workdir_files.HISTORY).read_bytes())
  return [one for one in found if one["event"] == kind]


def since_the_second_start(workdir):
  """Returns the events from the second start on; [] before it."""
  found = [*history.events((workdir / workdir_files.HISTORY).read_bytes())]
  starts = [place for place, one in enumerate(found) if one["event"] == "start"]
  return found[starts[1] :] if len(starts) > 1 else []


def said(workdir):
  text = "".join(Reader((workdir / "run.html").read_text()).said)
  return text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_run_leaves_its_page_and_what_it_shows(main, tmp_path):
  code, out, err = main(*COMMAND, f"--workdir={tmp_path}", "--config.training.steps=4")
  assert (code, err) == (0, "")
  [start] = events(tmp_path, "start")
  assert start["mesh"] == {"data": 4, "tensor": 2}
  assert start["command"].endswith(" ".join(COMMAND[-2:]) + f" --workdir={tmp_path} "
                                   "--config.training.steps=4")  # fmt: skip
  assert [one["step"] for one in events(tmp_path, "saved")] == [2, 4]
  first, last = events(tmp_path, "sample")
  assert (first["step"], last["step"]) == (3, 4)
  assert last["prompt"] == "def "
  assert f"\ndef {last['text'].strip()}" in out  # the one that is printed
  assert f"page of the run: {tmp_path}/run.html\n" in out
  [end] = events(tmp_path, "end")
  assert (end["how"], end["step"]) == ("done", 4)
  [compiled] = events(tmp_path, "compiled")
  table = (tmp_path / "layout.txt").read_text()
  for one in compiled["collectives"]:
    assert re.search(rf"{one['kind']} +{re.escape(one['axis'])} +{one['runs']} x", table)
  assert {one["axis"] for one in compiled["predicted"]["sent"]} >= {"data", "tensor"}
  text = said(tmp_path)
  evaluation = [line for line in lines_of(tmp_path) if "eval_loss" in line][-1]
  assert f"Done: 4 of 4 steps. Evaluation loss {evaluation['eval_loss']:.4f}" in text
  assert last["text"] in text
  assert "http" not in (tmp_path / "run.html").read_text()
  times = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
  assert f"goodput {100 * times['goodput']:.1f} %" in text


@pytest.mark.long
def test_a_kill_leaves_a_page_and_the_resumed_run_shows_both_starts(forks, tmp_path):
  workdir = tmp_path / "run"
  command = [*COMMAND, f"--workdir={workdir}", "--config.training.steps=400"]
  out = tmp_path / "out"
  run = forks.start(["main.py", *command], out=out, err=tmp_path / "err")
  deadline = time.monotonic() + 240
  while not (workdir / "run.html").exists() or not list(workdir.glob("checkpoints/*[0-9]")):
    assert time.monotonic() < deadline, out.read_text()
    time.sleep(0.05)
  run.kill()
  run.wait()
  assert "of 400 when this page was written" in said(workdir)
  run = forks.start(["main.py", *command], out=out, err=tmp_path / "err")
  while not [one for one in since_the_second_start(workdir) if one["event"] == "sample"]:
    assert time.monotonic() < deadline, out.read_text()
    time.sleep(0.05)
  run.send_signal(signal.SIGTERM)
  assert run.wait() == 75, (tmp_path / "err").read_text()
  second = events(workdir, "start")[1]
  assert second["step"] > 0
  said(workdir)  # it is complete, though a stop does not wait long for the newest
  text = run_page.html(run_files.read(workdir))
  assert "the same command resumes" in text
  assert "over 2 starts" in text
  assert "killed" in text
  assert f"start 2 from step {second['step']}" in text
