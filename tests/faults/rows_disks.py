"""Row 12: the disk is full at a stage of a save; a small one is mounted for the whole workdir.

Where mounting is not allowed, and where one process alone is to be hit, the size of the files that
a process may write is limited instead, from outside.
"""

import contextlib
import os
import pathlib
import re
import resource
import subprocess
from collections.abc import Iterator, Sequence

from tests.faults import same
from tests.faults.harness import Run, saved
from tests.faults.plan import Trial
from tests.faults.rows_saves import STAGES
from tests.faults.trying import Attempt, Undisturbed, tried

STEPS = 60
DISK_BYTES = 8 * 2**20
LEAST_BYTES = 2**15  # of the limit: what a run prints and logs stays below, its arrays do not
ALONE = ("process 0 alone", "process 1 alone")
KINDS = (
  "before a save",
  *(stage for stage in STAGES if stage not in ("rename", "garbage collection")),
  *ALONE,
  "all but 200 KiB",
  "for twenty steps",
)


class Full:
  """The disk of a workdir, or what processes may write."""

  def __init__(self, workdir: pathlib.Path, pids: Sequence[int] = ()):
    """Takes a workdir on a small disk, or the processes that are to be limited."""
    self._filler, self._pids = workdir / "filler", pids

  def fill(self, but: int = 0) -> None:
    """Takes all room but so many bytes."""
    if self._pids:
      self._limit(LEAST_BYTES)
      return
    with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
      while True:
        file.write(bytes(4096))
    os.truncate(self._filler, max(0, self._filler.stat().st_size - but))

  def free(self) -> None:
    """Gives it back."""
    if self._pids:
      self._limit(resource.RLIM_INFINITY)
    else:
      self._filler.unlink()

  def _limit(self, size: int) -> None:
    for pid in self._pids:
      _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
      resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[bool]:
  """Mounts a small disk at a folder, which is made; tells whether that is allowed."""
  folder.mkdir(exist_ok=True)
  command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
  try:
    allowed = subprocess.run(command, capture_output=True, check=False).returncode == 0
  except FileNotFoundError:
    allowed = False
  try:
    yield allowed
  finally:
    if allowed:
      subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True)


def row_12(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Fills the disk at a stage of a save, and makes room again once that was reported."""
  flags = (*same.KEPT, *same.SPLIT)
  clean = Undisturbed(folder, *flags, steps=STEPS)

  def one(attempt: Attempt) -> None:
    kind = KINDS[attempt.number % len(KINDS)]
    attempt.does = f"2 processes, the disk full: {kind}"
    expected = clean.of(2).record
    with contextlib.ExitStack() as stack:
      mounted = kind not in ALONE and stack.enter_context(small_disk(attempt.workdir))
      run = stack.enter_context(Run(attempt.workdir, steps=STEPS, flags=flags))
      pids = [run.pids()[ALONE.index(kind)]] if kind in ALONE else run.pids()
      full = Full(attempt.workdir, () if mounted else pids)
      if not mounted and kind not in ALONE:
        attempt.seen.append("no right to mount: the size of files was limited instead")
      _disturb(attempt, run, full, kind)
      assert run.end() == [0, 0], run.codes
      found = same.record(attempt.workdir)
      assert found.lines == expected.lines, "the steps are not the same"
      assert STEPS in found.arrays, f"the last step is not saved, only {list(found.arrays)}"
      for step in found.arrays.keys() & expected.arrays.keys():
        assert found.arrays[step] == expected.arrays[step], f"step {step} has other bits"
      left = sorted(path.name for path in (attempt.workdir / "checkpoints").iterdir())
      assert all(name.isdecimal() for name in left), left

  return tried(12, range(seed, seed + trials), folder, one)


def _disturb(attempt: Attempt, run: Run, full: Full, kind: str) -> None:
  """Fills the disk, waits for the report, and makes room."""
  folder, workdir = attempt.workdir / "checkpoints", attempt.workdir
  run.wait_until(lambda: saved(workdir)[-1:] >= [10], "the save of step 10")
  if kind in STAGES:
    step = saved(workdir)[-1] + same.SAVE_EVERY
    run.wait_until(lambda: STAGES["directory made"](folder, step), f"the save of step {step}")
    while not STAGES[kind](folder, step) and step not in saved(workdir):
      assert all(popen.poll() is None for popen in run.popens)
  full.fill(but=200 * 1024 if kind == "all but 200 KiB" else 0)
  reported = r"WARNING: saving step (\d+) to \S+ failed: (.*); training continues"
  run.wait_until(lambda: re.search(reported, run.text()), "the report of a failed save")
  step, why = re.search(reported, run.text()).groups()
  attempt.seen.append(f"step {step}: {why[-60:]}")
  good = saved(workdir)
  assert good[-1] < int(step), good
  run.wait_for(f"step {int(step) + (20 if kind == 'for twenty steps' else 3)}/")
  assert saved(workdir)[-1] >= good[-1], "the last good step is gone"
  full.free()
  run.wait_until(lambda: saved(workdir)[-1] > int(step), "a save, now that there is room")
