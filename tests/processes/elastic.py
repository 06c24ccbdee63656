"""A run that goes on with other numbers of processes, beside one that never changes."""

import pathlib

from tests.processes.command_lines import MLP, losses

# Twelve devices, so that four, three and two processes share them out evenly.
TWELVE = [*MLP, "--config.mesh.data=12", "--config.data.global_batch_size=12"]
COUNTS, STEPS = (4, 3, 2, 4), 11
RELATIVE = 1e-5


def check(well, folder: pathlib.Path, number: int) -> None:
  """Runs both, and compares the loss of every step.

  The loss of a step is that of its rows under the parameters so far: other rows show in it.

  Args:
    well: as `starting.well`.
    folder: for the two workdirs.
    number: of the trial: another seed, and so other rows; and the changes at other steps, none at
      the end of an epoch.
  """
  seed = f"--config.seed={number}"
  ends = [2 + number % 3, 4 + number % 2, 7 + number % 3, STEPS]
  for count, steps in zip(COUNTS, ends, strict=True):
    workdir = f"--workdir={folder / 'elastic'}"
    well(count, *TWELVE, seed, workdir, f"--config.training.steps={steps}")
  fixed = f"--workdir={folder / 'fixed'}"
  well(1, *TWELVE, seed, fixed, f"--config.training.steps={STEPS}")
  found, expected = losses(folder / "elastic"), losses(folder / "fixed")
  assert list(found) == list(expected) == list(range(1, STEPS + 1)), (found, expected)
  for step, loss in expected.items():
    difference = abs(found[step] - loss)
    assert difference <= RELATIVE * abs(loss), f"step {step}: {found[step]}, fixed {loss}"
  assert len({*expected.values()}) == STEPS
