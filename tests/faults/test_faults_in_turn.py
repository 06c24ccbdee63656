"""A run that meets several faults, one after the other, ends as one that met none.

A sample of what `python -m tests.faults` tries many times.
"""

import re
import signal
import time

import pytest

from tests.faults import same
from tests.faults.harness import CLASSIFIER, Run, named, saved, story

STEPS = 40
SETTINGS = {"steps": STEPS, "flags": same.KEPT, "common": CLASSIFIER}


@pytest.fixture(scope="module")
def clean(forks, tmp_path_factory):
  """Returns what a run without a fault leaves, one of whose processes is late at the end."""
  workdir = tmp_path_factory.mktemp("clean") / "run"
  with Run(workdir, **SETTINGS, forks=forks) as run:
    run.wait_for(f"evaluation after step {STEPS}")
    run.signal(1, signal.SIGSTOP)
    time.sleep(1.5)
    run.signal(1, signal.SIGCONT)
    assert run.end() == [0, 0], run.text()
  return same.record(workdir)


@pytest.mark.long
def test_each_step_of_a_clean_run_appears_once_and_in_order(clean):
  lines = clean.lines
  steps = [step for step, numbers in lines if "loss" in numbers and "eval_loss" not in numbers]
  assert steps == list(range(1, STEPS + 1))
  assert list(clean.arrays) == list(range(same.DIGEST_EVERY, STEPS + 1, same.DIGEST_EVERY))
  tables = [arrays["params.layer_1.kernel"] for arrays in clean.arrays.values()]
  assert len(set(tables)) == len(tables)


def said(run, text):
  """Returns the first line with a text; "" if there is none."""
  return next((line for line in run.text().splitlines() if text in line), "")


@pytest.mark.long
def test_a_run_that_is_killed_asked_to_stop_and_stopped_ends_as_one_that_is_not(
  clean, forks, tmp_path
):
  workdir = tmp_path / "run"
  with Run(workdir, launcher=True, restarts=3, forks=forks, **SETTINGS) as run:
    # ------------------------------ killed ------------------------------
    run.wait_for("step 12/")
    run.signal(0, signal.SIGKILL)
    run.wait_for("restart 1 of 3")
    assert "process 0 failed first: signal SIGKILL (9)" in run.text()
    assert "process 1 (" in (line := said(run, "another process has died")), run.text()
    assert (workdir / "crash-process-1.txt").read_text()
    assert str(workdir / "crash-process-1.txt") in line
    assert "Thread 0x" not in run.text(), "no stacks"

    # ------------------------------ asked to stop ------------------------------
    run.wait_for("step 17/")
    asked = run.signal(1, signal.SIGTERM)
    run.wait_for("restart 2 of 3")
    assert time.monotonic() - asked < 30
    assert "stopped as requested, after saving" in run.text()
    assert run.text().count("ended: exit code 75") == 2
    last_step, _ = story(workdir)[-1]
    assert saved(workdir)[-1] == last_step >= 17, "no step is lost"

    # ------------------------------ stopped ------------------------------
    run.wait_for("step 22/")
    stopped = run.signal(1, signal.SIGSTOP)
    run.wait_for("restart 3 of 3")
    assert time.monotonic() - stopped < 45
    assert named(run.text(), 1), run.text()
    assert "Python stacks of all threads" in run.text()
    # The watchdog ends it, or on a busy machine JAX itself, while the stacks are being written.
    assert re.search("process 0 failed first: (exit code 1|signal SIGABRT)", run.text()), run.text()
    assert "process 1 is stopped (SIGSTOP); killed" in run.text()

    assert run.end() == [0], run.text()
    assert run.left_behind() == []
  same.check(workdir, clean)
