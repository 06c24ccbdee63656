"""Processes that come to their end up to 20 s apart all end well."""

import random
import signal
import time

import pytest

from tests.faults import moments
from tests.faults.harness import Run, story, trials

pytestmark = pytest.mark.faults

# Of the same run: a process that is stopped for 20 s must not pass for dead.
PATIENT = ("--config.processes.heartbeat_seconds=100",)


@pytest.mark.parametrize("trial", trials(50))
def test_a_late_process_ends_as_the_others(undisturbed, tmp_path, trial):
  chance = random.Random(trial)
  count, late = (4, trial % 4) if trial % 5 == 4 else (2, trial % 2)
  workdir = tmp_path / "run"
  with Run(workdir, count=count, launcher=trial % 4 == 3, flags=PATIENT) as run:
    moments.LAST[trial % len(moments.LAST)](run, chance)
    run.signal(late, signal.SIGSTOP)
    time.sleep(20 * trial / 49)
    run.signal(late, signal.SIGCONT)
    assert set(run.end()) == {0}, run.text()
    assert run.left_behind() == []
  assert story(workdir) == undisturbed(count)
