"""Ctrl-C in a real terminal: work is saved, nothing is printed that looks like a crash."""

import pathlib
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
