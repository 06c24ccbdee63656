"""`doctor` as two processes: findings of both, said once by process 0."""

import pytest

from tests.processes.command_lines import MLP

DOCTOR = [word for word in MLP if word.startswith(("--config=", "--config.mesh"))]


@pytest.mark.long
def test_two_processes_are_checked_together(start, tmp_path):
  one, other = start(2, "doctor", *DOCTOR, f"--workdir={tmp_path}/run")
  assert (one.code, other.code) == (0, 0), one.out + one.err
  for what in (
    "clocks of 2 processes: 0.",
    "2 processes with the same command, code and packages",
    "all processes see workdir",
    "4 simulated CPU devices",
    "all-gather over data (4 devices)",
  ):
    assert one.out.count(what) == 1, one.out
  assert "wrong" not in one.out
  assert [line for line in other.out.splitlines() if not line.startswith("[Gloo]")] == []


@pytest.mark.long
def test_what_differs_is_a_finding_of_both(start, tmp_path):
  one, other = start(
    2,
    *("doctor", *DOCTOR, f"--workdir={tmp_path}/run"),
    environments={1: {"JAX_DEFAULT_MATMUL_PRECISION": "float32"}},
  )
  assert (one.code, other.code) == (3, 3), one.out + one.err
  assert "the processes differ" in one.out
  assert 'JAX_DEFAULT_MATMUL_PRECISION: missing on process 0; "float32" on process 1' in " ".join(
    one.out.split()
  )
