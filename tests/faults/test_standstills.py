"""A process that stands still is noticed, named, shown by its stacks, and costs no step."""

import random
import signal

import pytest

from tests.faults import moments
from tests.faults.harness import Run, aborted, named, story, trials

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("trial", trials(20))
def test_a_stopped_process_is_noticed(undisturbed, tmp_path, trial):
  chance = random.Random(trial)
  count, stopped = (4, trial % 4) if trial % 5 == 4 else (2, trial % 2)
  moment = moments.RUNNING[trial % len(moments.RUNNING)]
  launcher = trial % 3 == 2
  workdir = tmp_path / "run"
  with Run(workdir, count=count, launcher=launcher) as run:
    moment(run, chance)
    when = run.signal(stopped, signal.SIGSTOP)
    if launcher:
      [code] = run.end()
      assert code in (1, 128 + signal.SIGABRT), run.text()
      assert f"process {stopped} is stopped (SIGSTOP); killed" in run.text()
    else:
      others = [index for index in range(count) if index != stopped]
      run.end_of(others)
      assert all(aborted(run.codes[index]) for index in others), run.text()
    assert max(run.ended) - when < 45, run.text()
    if moment is moments.step:  # elsewhere JAX may be faster than what the watchdog has learned
      assert named(run.text(), stopped), run.text()
      assert "Python stacks of all threads" in run.text()
    if launcher:
      assert run.left_behind() == []
  with Run(workdir, count=count, launcher=launcher) as run:
    assert set(run.end()) == {0}, run.text()
  assert story(workdir) == undisturbed(count)


@pytest.mark.parametrize("trial", trials(20))
def test_a_reader_that_sleeps_is_noticed(undisturbed, tmp_path, trial):
  chance = random.Random(trial)
  count, slow = (4, trial % 4) if trial % 5 == 4 else (2, trial % 2)
  launcher = trial % 3 == 2
  workdir = tmp_path / "run"
  with Run(workdir, count=count, launcher=launcher, slow=slow) as run:
    moments.WORKING[trial % len(moments.WORKING)](run, chance)
    when = run.stall()
    codes = run.end()
    assert set(codes) == {1}, run.text()
    assert max(run.ended) - when < 45, run.text()
    assert named(run.text(), slow), run.text()
    assert "Python stacks of all threads" in run.text()
    assert run.left_behind() == []
  with Run(workdir, count=count, launcher=launcher) as run:
    assert set(run.end()) == {0}, run.text()
  assert story(workdir) == undisturbed(count)
