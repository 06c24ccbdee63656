"""The verb evaluate: how much it takes, what it shows on a terminal, and how it is interrupted."""

import re
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


def test_a_part_of_the_split(main, trained):
  command = ["evaluate", "--config=configs/single.py", *TINY_LM, f"--checkpoint={trained}"]
  losses = []
  for steps, what in ((0, "the whole"), (2, "a part of the"), (10**6, "the whole")):
    code, out, err = main(*command, f"--config.evaluation.final_steps={steps}")
    assert code == 0, (out, err)
    assert f"evaluation after step 2 ({what} split): eval_loss " in out
    assert "batch 1/" not in out, "the progress is for terminals"
    losses.append(float(out.split("eval_loss ")[1].split()[0]))
  assert losses[0] == losses[2] != losses[1]
  code, _, err = main(*command, "--config.evaluation.final_steps=-1")
  assert (code, "evaluation.final_steps=-1: at least 0" in err) == (2, True)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_it_shows_its_progress_on_a_terminal_and_stops_within_a_batch(forks, trained, kind):
  command = ["evaluate", "--config=configs/single.py", *TINY_LM, f"--checkpoint={trained}"]
  command += ["--config.data.evaluation_split=test", "--config.data.global_batch_size=1"]
  with Terminal(terminals.main(*command), forks=forks) as terminal:
    # The second batch, or a later one.
    terminal.wait_until(lambda: re.search(r"evaluation: batch [2-9]", terminal.text()), "a batch")
    terminal.popen.send_signal(kind)
    assert terminal.end() == 75, terminal.text()
    shown = terminal.text()
  assert "eval_loss" not in shown
  assert "Traceback" not in shown, shown
