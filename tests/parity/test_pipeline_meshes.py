"""No mesh with pipeline stages aborts the process: each is compiled, in a process of its own."""

import subprocess
import sys

import pytest

from tests.parity.pipeline_meshes import meshes


def test_there_are_all_meshes_of_eight_devices():
  found = meshes()
  # 2 stages: 5 other axes of 4, or 10 pairs of them; 4 stages: each other axis; 8 stages.
  assert len(found) == 5 + 10 + 5 + 1
  assert found["data2_stage2_tensor2"]["stage"] == 2


@pytest.mark.long
def test_every_mesh_of_eight_devices_compiles():
  command = [sys.executable, "-m", "tests.parity.pipeline_meshes"]
  child = subprocess.run(command, capture_output=True, text=True)
  assert (child.returncode, child.stdout.split()) == (0, [*meshes(), "all"]), child.stderr[-3000:]
