"""Ctrl-C in a real terminal: work is saved, nothing is printed that looks like a crash."""

import pathlib
import re
import shlex

from tests.faults.harness import saved, story
from tests.helpers.cli import TINY_MLP
from tests.helpers.terminals import CTRL_C, Terminal, main

TRAIN = [
  "--config=configs/single.py:mlp",
  *TINY_MLP,
  "--config.metrics.every_steps=1",
  "--config.metrics.tensorboard=false",
  "--config.training.steps=100000",
  "--config.evaluation.every_steps=0",
  "--config.checkpoint.every_steps=100000",
]


def stopped(terminal: Terminal) -> str:
  """Waits for an end by 75; returns what was written."""
  code, text = terminal.end(), terminal.text()
  assert code == 75, text
  assert "Traceback" not in text, text
  assert "Exception ignored" not in text, text
  return text


def test_ctrl_c_saves_and_a_second_one_does_not(forks, tmp_path):
  with Terminal(main(*TRAIN, f"--workdir={tmp_path}"), forks=forks) as terminal:
    terminal.wait_for("step 2/")
    terminal.press(CTRL_C + CTRL_C)  # twice at once, as wrappers do, is once
    text = stopped(terminal)
  assert text.count("press Ctrl-C again to stop without saving") == 1
  assert "SIGINT: stopping after this step and saving" in text
  assert "stopped as requested, after saving; run the same command again" in text
  [last] = saved(tmp_path)
  assert last == story(tmp_path)[-1][0], "the step that was made last is saved"


def test_ctrl_c_saves_where_it_ends_the_reader_of_the_output(tmp_path):
  log = tmp_path / "log"
  command = shlex.join(main(*TRAIN, f"--workdir={tmp_path / 'run'}"))
  with Terminal(["bash", "-c", f"{command} 2>&1 | tee {log}"]) as terminal:
    terminal.wait_for("step 2/")
    terminal.press()
    terminal.end()
    assert "Traceback" not in terminal.text(), terminal.text()
  [last] = saved(tmp_path / "run")
  assert last == story(tmp_path / "run")[-1][0]


def test_a_window_that_is_closed_is_a_stop(forks, tmp_path):
  with Terminal(main(*TRAIN, f"--workdir={tmp_path}"), forks=forks) as terminal:
    terminal.wait_for("step 2/")
    terminal.hang_up()
    assert terminal.end() == 75
  [last] = saved(tmp_path)
  assert last == story(tmp_path)[-1][0]


def test_ctrl_c_while_importing_ends_with_one_line(tmp_path):
  with Terminal(main(*TRAIN, f"--workdir={tmp_path / 'run'}")) as terminal:
    maps = pathlib.Path(f"/proc/{terminal.popen.pid}/maps")
    terminal.wait_until(lambda: "numpy" in maps.read_text(), "an import that takes long")
    terminal.press()
    text = stopped(terminal)
  assert text.replace("^C", "").strip() == (
    "stopped as requested (SIGINT); there was nothing to save"
  ), text
  assert not (tmp_path / "run").exists()


def test_a_run_on_a_terminal_of_80_columns(forks, tmp_path):
  more = ["--config.training.steps=4", "--config.evaluation.every_steps=2", "--config.seed=1"]
  arguments = [word for word in TRAIN if "steps" not in word or "metrics" in word]
  command = main(*arguments, *more, f"--workdir={tmp_path}")
  with Terminal(command, environment={"NO_COLOR": "1"}, columns=80, forks=forks) as terminal:
    assert terminal.end() == 0, terminal.text()
  raw = terminal.raw().decode()
  assert not re.search(r"\x1b\[[0-9;]*m", raw)  # no colors
  lines = re.findall(r"\x1b\[2K([^\r\n\x1b]*)", raw)
  shown = ("step 4/4  loss ", "evaluation: batch 1/", "saving step 4", "compiling the train step")
  for text in shown:
    assert any(text in line for line in lines), text
  rewritten = [line for line in lines if any(text in line for text in (*shown, "left 0:"))]
  assert max(map(len, rewritten)) <= 80
  assert "step 4/4" in rewritten[-1]
  assert raw.rstrip().endswith(f"python main.py layout {tmp_path}")
