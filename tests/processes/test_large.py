"""Large collectives between processes on CPUs give the right numbers; see large.py."""

import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parent / "large.py"


# Devices per process x megabytes per chunk: around what was right, and above it.
@pytest.mark.parametrize(
  "cases",
  [
    ["1x17"],
    pytest.param(["1x1", "1x15", "1x16", "1x64", "2x20"], marks=pytest.mark.faults),
  ],
)
def test_right_numbers_of_large_chunks_in_time(well, cases):
  for out in well(2, *cases, script=SCRIPT):
    lines = [line for line in out.splitlines() if not line.startswith("[Gloo]")]
    assert lines == [f"compared {case}" for case in cases]
