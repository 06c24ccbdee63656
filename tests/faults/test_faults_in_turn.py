"""A run that meets each kind of fault, one after the other, ends as one that met none.

A sample of what the other files here try many times: see `make test-faults`.
"""

import signal
import time

import pytest

from tests.faults.harness import QUICK, STEPS, Run, named, saved, story


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
  """Returns the story of a run without a fault, one of whose processes is late at the end."""
  workdir = tmp_path_factory.mktemp("clean") / "run"
  with Run(workdir, flags=QUICK) as run:
    run.wait_for(f"held out after step {STEPS}")
    run.signal(1, signal.SIGSTOP)
    time.sleep(3)
    run.signal(1, signal.SIGCONT)
    assert run.end() == [0, 0], run.text()
  return story(workdir)


def test_the_steps_of_a_clean_run_stand_once_and_in_order(clean):
  steps = [step for step, numbers in clean if "loss" in numbers and "eval_loss" not in numbers]
  assert steps == list(range(1, STEPS + 1))


def test_a_run_with_each_kind_of_fault_ends_as_one_without(clean, tmp_path):
  workdir = tmp_path / "run"
  with Run(workdir, launcher=True, restarts=4, slow=1, flags=QUICK) as run:
    # ------------------------------ killed ------------------------------
    run.wait_for("step 12/")
    run.signal(0, signal.SIGKILL)
    run.wait_for("restart 1 of 4")
    assert "process 0 failed first: signal SIGKILL (9)" in run.text()

    # ------------------------------ asked to stop ------------------------------
    run.wait_for("step 17/")
    asked = run.signal(1, signal.SIGTERM)
    run.wait_for("restart 2 of 4")
    assert time.monotonic() - asked < 30
    assert "stopped as asked, after saving" in run.text()
    assert run.text().count("ended: exit code 75") == 2
    last_step, _ = story(workdir)[-1]
    assert saved(workdir)[-1] == last_step >= 17, "no step is lost"

    # ------------------------------ stopped ------------------------------
    run.wait_for("step 22/")
    stopped = run.signal(1, signal.SIGSTOP)
    run.wait_for("restart 3 of 4")
    assert time.monotonic() - stopped < 45
    assert named(run.text(), 1), run.text()
    assert "Python stacks of all threads" in run.text()
    assert "process 0 failed first: exit code 1" in run.text()
    assert "process 1 is stopped (SIGSTOP); killed" in run.text()

    # ------------------------------ a reader that sleeps ------------------------------
    run.wait_for("step 26/")
    stalled = run.stall()
    run.wait_for("restart 4 of 4")
    run.stalled.unlink()
    assert time.monotonic() - stalled < 45
    assert run.text().count("behind is process 1 ") >= 1, run.text()

    assert run.end() == [0], run.text()
    assert run.left_behind() == []
  assert story(workdir) == clean
