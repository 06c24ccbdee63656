"""SIGTERM, to whichever process and whenever: one common step is saved, all exit with 75."""

import random
import signal
import time

import pytest

from tests.faults import moments
from tests.faults.harness import QUICK, Run, saved, story, trials

pytestmark = pytest.mark.faults

STOPPED = 75
BEFORE_THE_END = (
  moments.preflight,
  moments.compiling,
  moments.first_step,
  *moments.WORKING,
  moments.save,
)


def ask(run: Run, whom: int) -> float:
  """Sends SIGTERM to a process, or to the launcher where one has started them; returns when."""
  if run.launcher:
    run.popens[0].send_signal(signal.SIGTERM)
    return time.monotonic()
  return run.signal(whom, signal.SIGTERM)


def goes_on_as_if_undisturbed(workdir, count: int, undisturbed) -> None:
  """Runs the same command again, to its end."""
  with Run(workdir, count=count) as run:
    assert set(run.end()) == {0}, run.text()
  assert story(workdir) == undisturbed(count)


def all_saved(run: Run, when: float) -> None:
  """Checks that the processes have ended in time, and that what they did last is saved."""
  assert set(run.end()) == {STOPPED}, run.text()
  assert max(run.ended) - when < 30, run.text()
  assert run.left_behind() == []
  done = [step for step, _ in story(run.workdir)]
  assert saved(run.workdir)[-1:] == done[-1:], "no step is lost"


@pytest.mark.parametrize("trial", trials(24))
def test_a_stop_at_any_time(undisturbed, tmp_path, trial):
  chance = random.Random(trial)
  count, whom = (4, trial % 4) if trial % 5 == 4 else (2, trial % 2)
  workdir = tmp_path / "run"
  with Run(workdir, count=count, launcher=trial % 4 == 3) as run:
    BEFORE_THE_END[trial % len(BEFORE_THE_END)](run, chance)
    all_saved(run, ask(run, whom))
  goes_on_as_if_undisturbed(workdir, count, undisturbed)


def test_a_stop_while_a_reader_stalls_in_an_evaluation(undisturbed, tmp_path):
  workdir = tmp_path / "run"
  with Run(workdir, slow=1) as run:
    run.wait_for("step 29/")
    run.stall()
    run.wait_for("step 30/")
    time.sleep(1)
    all_saved(run, ask(run, 0))
  goes_on_as_if_undisturbed(workdir, 2, undisturbed)


@pytest.mark.parametrize("trial", trials(6))
def test_a_stop_while_a_reader_stalls(undisturbed, tmp_path, trial):
  chance = random.Random(trial)
  workdir = tmp_path / "run"
  with Run(workdir, launcher=trial % 4 == 3, slow=trial % 2) as run:
    moments.WORKING[trial % len(moments.WORKING)](run, chance)
    run.stall()
    time.sleep(chance.uniform(0.1, 1.5))  # the watchdog ends the run after 3
    all_saved(run, ask(run, trial // 2 % 2))
  goes_on_as_if_undisturbed(workdir, 2, undisturbed)


@pytest.mark.parametrize("trial", trials(6))
def test_a_stop_near_the_end_changes_no_more_than_the_code(undisturbed, tmp_path, trial):
  chance = random.Random(trial)
  workdir = tmp_path / "run"
  with Run(workdir, launcher=trial % 4 == 3) as run:
    moments.LAST[trial % len(moments.LAST)](run, chance)
    when = ask(run, trial % 2)
    codes = set(run.end())
    assert codes in ({0}, {STOPPED}), run.text()
    assert max(run.ended) - when < 30, run.text()
  goes_on_as_if_undisturbed(workdir, 2, undisturbed)


def test_a_stop_while_the_others_are_waited_for_at_the_end_changes_nothing(tmp_path):
  with Run(tmp_path / "run", flags=QUICK) as run:
    run.wait_for("metrics in")
    run.signal(1, signal.SIGSTOP)
    time.sleep(1.5)
    run.signal(0, signal.SIGTERM)
    time.sleep(1)
    run.signal(1, signal.SIGCONT)
    assert run.end() in ([0, 0], [STOPPED, STOPPED]), run.text()
