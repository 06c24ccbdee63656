"""A run that goes on with other numbers of processes sees what one run would have seen."""

import pytest

from tests.processes import elastic


@pytest.mark.faults
def test_four_then_three_then_two_then_four_processes(well, tmp_path):
  elastic.check(well, tmp_path, 0)
