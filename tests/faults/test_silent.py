"""A sample of rows 15 and 16 in one run, and the means by which bits are flipped."""

import subprocess
import sys

import numpy as np
import pytest

from tests.faults import memory, rows_silent
from tests.faults.frame import Attempt
from tests.faults.harness import Run

# Holds an array where numpy puts it, and a copy that is not near; prints an element when asked.
HOLDER = """
import sys
import numpy as np
array = np.load(sys.argv[1])
far = array + 1
print("ready", flush=True)
for line in sys.stdin:
  print(array.reshape(-1)[int(line)].tobytes().hex(), flush=True)
"""


def test_an_array_is_found_in_another_process_and_a_bit_of_it_flipped(tmp_path):
  array = np.random.default_rng(3).standard_normal((37, 53)).astype(np.float32)
  np.save(tmp_path / "array.npy", array * np.float32(1 + 1e-5))
  command = [sys.executable, "-c", HOLDER, str(tmp_path / "array.npy")]
  with subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  ) as holder:
    assert holder.stdout.readline() == "ready\n"

    def element(index: int) -> int:
      holder.stdin.write(f"{index}\n")
      holder.stdin.flush()
      return int.from_bytes(bytes.fromhex(holder.stdout.readline()), "little")

    found = memory.copies(holder.pid, array)
    assert len(found) >= 1
    before = element(99)
    for address in found:
      memory.flip(holder.pid, address + 4 * 99, 22)
    assert element(99) == before ^ 1 << 22
    assert memory.near(memory.read(holder.pid, found[0], 4 * 99), array.reshape(-1)[:99])
    assert not memory.near(memory.read(holder.pid, found[0], array.nbytes), array)
    holder.stdin.close()


# Half a minute; .ci/run calls it after `make test`. What it puts together has tests of its own in
# tests/processes/test_stragglers.py and tests/training/test_replica_check.py.
@pytest.mark.faults
def test_a_slow_process_and_then_a_flipped_bit_are_named(forks, tmp_path):
  attempt = Attempt(15, 0, tmp_path / "trial")
  flags = (*rows_silent.FLIP, *rows_silent.mesh(4))
  with Run(attempt.workdir, slow=1, steps=2000, flags=flags, forks=forks) as run:
    run.wait_for(f"step {rows_silent.SAVE_EVERY + 1}/")
    # On a machine that is busy with other things, all processes are slow.
    rows_silent.slow_down(attempt, run, 1, on=20, off=100, most_steps=100)
    rows_silent.flip(attempt, run, 0, "layers.mlp.up.kernel", 21, named=True)
