"""A sample of the rows about checkpoints; the others have theirs in tests/training/checkpointing.

Rows 2 and 11 are sampled by test_faults.py and test_commands.py there, row 12 by test_full_disk.py,
test_saving_together.py and test_commands.py.
"""

import pytest

from tests.faults import rows_checkpoints
from tests.faults.plan import ROWS


def test_all_rows_about_checkpoints_are_there():
  for row in ROWS:
    if row.module == "rows_checkpoints":
      assert row.function() is getattr(rows_checkpoints, f"row_{row.number}")


@pytest.mark.faults
def test_another_dataset_and_other_layers_are_refused(tmp_path):
  trials = list(rows_checkpoints.row_9(2, tmp_path, seed=4))
  assert len(trials) == 2
  assert all(trial.passed for trial in trials), trials


@pytest.mark.faults
def test_one_process_saves_and_two_with_another_layout_resume(tmp_path):
  [trial] = rows_checkpoints.row_10(1, tmp_path)
  assert trial.passed, trial
  assert trial.name == "saved by 1 process(es), dp; restored by 2 process(es), fsdp"
