"""A process that is killed ends all others, is named, and costs no step."""

import random
import signal

import pytest

from tests.faults import moments
from tests.faults.harness import Run, aborted, story, trials

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("trial", trials(20))
def test_a_killed_process_ends_all_others(undisturbed, tmp_path, trial):
  chance = random.Random(trial)
  count, killed = (4, trial % 4) if trial % 5 == 4 else (2, trial % 2)
  moment = moments.RUNNING[trial % len(moments.RUNNING)]
  launcher = trial % 3 == 2
  workdir = tmp_path / "run"
  with Run(workdir, count=count, launcher=launcher) as run:
    moment(run, chance)
    when = run.signal(killed, signal.SIGKILL)
    codes = run.end()
    assert max(run.ended) - when < 25, run.text()
    if launcher:
      assert codes == [128 + signal.SIGKILL], run.text()
      assert f"process {killed} failed first: signal SIGKILL (9)" in run.text()
    else:
      assert codes[killed] == -signal.SIGKILL
      assert all(aborted(code) for i, code in enumerate(codes) if i != killed), run.text()
    assert run.left_behind() == []
  with Run(workdir, count=count, launcher=launcher) as run:
    assert set(run.end()) == {0}, run.text()
  assert story(workdir) == undisturbed(count)
