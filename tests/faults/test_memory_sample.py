"""A sample of the rows about checkpoints in memory; tests/training/checkpointing has the others."""

import pytest

from tests.faults import rows_memory


@pytest.mark.faults
def test_a_process_that_is_killed_with_its_copies_costs_at_most_the_step_in_flight(tmp_path):
  [trial] = rows_memory.row_34(1, tmp_path, seed=2)
  assert trial.passed, trial
  assert "copies lost of: [0]" in trial.name


@pytest.mark.faults
def test_a_host_without_memory_for_copies_trains_as_one_that_keeps_none(tmp_path):
  [trial] = rows_memory.row_35(1, tmp_path, seed=3)
  assert trial.passed, trial
