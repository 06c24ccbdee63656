"""`plan` in a real terminal: it shows what it is doing, and a stop leaves no process behind."""

import os
import re
import signal
import time

import psutil
import pytest

from tests.helpers.terminals import Terminal
from tests.helpers.terminals import main as command

# The program of simulated devices, which takes seconds to compile.
ARGUMENTS = [
  *("plan", "--config=configs/dp4_tp2.py", "--simulate", "--config.model.layers=7"),
  *("--config.planning.cache_dir=", "--config.compilation_cache_dir="),
]
GONE_SECONDS = 20  # on a busy machine


def planning(tmp_path):
  """Returns a terminal in which a plan is being made."""
  return Terminal(
    command(*ARGUMENTS, f"--workdir={tmp_path / 'run'}"), environment={"TMPDIR": str(tmp_path)}
  )


def workers(terminal) -> list[psutil.Process]:
  """Returns the processes that the command has started."""
  return psutil.Process(terminal.popen.pid).children(recursive=True)


def test_ctrl_c_while_compiling_ends_at_once_and_leaves_no_worker(tmp_path):
  with planning(tmp_path) as terminal:
    terminal.wait_for("compiling the step for 8 devices of cpu:8")
    started = workers(terminal)
    assert started
    terminal.press()
    assert terminal.end() == 75
    left = psutil.wait_procs(started, timeout=GONE_SECONDS)[1]
    text, raw = terminal.text(), terminal.raw()
  assert not left
  for phase in ("importing", "laying out the state on cpu:8"):
    assert phase in text
  assert re.search(r"plan: [a-z ]+, \d+:\d\d", text), text
  assert "Traceback" not in text
  assert "stopped as requested (SIGINT)" in text
  shown, hidden = raw.rfind(b"\x1b[?25h"), raw.rfind(b"\x1b[?25l")
  assert shown > hidden >= 0, "the cursor is visible again"
  assert not (tmp_path / "run").exists()
  assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == []


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("phase", ["importing", "compiling the step"])
def test_a_signal_leaves_no_worker(tmp_path, number, phase):
  with planning(tmp_path) as terminal:
    terminal.wait_for(phase)
    started = workers(terminal)
    assert started
    began = time.monotonic()
    os.kill(terminal.popen.pid, number)
    assert terminal.end() == (75 if number == signal.SIGTERM else -number)
    left = psutil.wait_procs(started, timeout=GONE_SECONDS)[1]
  assert not left, f"{left} after {time.monotonic() - began:.1f} s"
  assert not (tmp_path / "run").exists()
