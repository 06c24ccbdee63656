"""A run that goes on with other numbers of processes sees what one run would have seen."""

import pytest

from tests.processes.commands import MLP, losses

# Twelve devices, so that four, three and two processes share them out evenly.
TWELVE = [*MLP, "--config.mesh.data=12", "--config.data.global_batch_size=12"]


def run(well, workdir, steps_of, *more) -> dict[int, float]:
  """Runs to each step with a number of processes; returns step -> loss."""
  for count, steps in steps_of:
    well(count, *TWELVE, f"--workdir={workdir}", f"--config.training.steps={steps}", *more)
  return losses(workdir)


@pytest.mark.parametrize(
  "trial",
  [0, *(pytest.param(n, marks=pytest.mark.faults) for n in range(1, 10))],
)
def test_four_then_three_then_two_then_four_processes(main, well, tmp_path, trial):
  # Other seeds, and so other rows; and the changes at other steps, none at the end of an epoch.
  ends = [2 + trial % 3, 4 + trial % 2, 7 + trial % 3, 11]
  seed = f"--config.seed={trial}"
  found = run(well, tmp_path / "elastic", zip((4, 3, 2, 4), ends, strict=True), seed)
  # The loss of a step is that of its rows under the parameters so far: other rows show in it.
  workdir = tmp_path / "fixed"
  code, out, err = main(*TWELVE, seed, f"--workdir={workdir}", "--config.training.steps=11")
  assert code == 0, (out, err)
  fixed = losses(workdir)
  assert list(found) == list(fixed) == list(range(1, 12))
  assert list(found.values()) == pytest.approx(list(fixed.values()), rel=1e-5)
  assert len(set(fixed.values())) == 11
