"""Rows 2 and 12: a kill, and a full disk, at each stage of a save.

The stages are seen from outside, by names of files. A small disk is mounted for the whole workdir;
where mounting is not allowed, and where one process alone is to be hit, the size of the files that
a process may write is limited instead, from outside.
"""

import contextlib
import glob
import os
import pathlib
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence

from tests.faults import same
from tests.faults.frame import Attempt, row
from tests.faults.harness import Run, saved

FLAGS = (*same.KEPT, *same.SPLIT)
Stage = Callable[[pathlib.Path, int], bool]


def _stage(*patterns: str) -> Stage:
  """Returns whether a step's save has come to where one of these names is in its folder.

  `{orbax}` is the folder that Orbax writes to, `{ours}` the one that it makes of that: of the first
  owner of a workdir, or where nobody owns it.
  """

  def reached(folder: pathlib.Path, step: int) -> bool:
    names = {"orbax": f"{step}.saving*.orbax-checkpoint-tmp", "ours": f"{step}.saving"}
    return any(glob.glob(f"{folder}/{one.format(**names, step=step)}") for one in patterns)

  return reached


STAGES: dict[str, Stage] = {
  "directory made": _stage("{orbax}"),
  "data": _stage("{orbax}/state.orbax-checkpoint-tmp/ocdbt.process_*/d/*"),
  "metadata": _stage(
    *(f"{{orbax}}/*.orbax-checkpoint-tmp/{name}" for name in ("metadata", "_METADATA"))
  ),
  "commit": _stage("{orbax}/commit_success.txt", "{ours}", "{ours}-1"),
  "digest file": _stage("{ours}*/digests"),
  "rename": _stage("{step}"),
  "garbage collection": _stage("*.removing"),
}

# ------------------------------ a kill ------------------------------

STEPS = 40
DRAWS = 5  # of a moment: a short stage may be over before it is seen
VICTIMS = ("all", "process 0", "process 1")


@row(
  2,
  fault="SIGKILL at each stage of a save: directory made, data, metadata, commit, rename, garbage "
  "collection, digest file",
  passes="the old step or the new one loads, never a torn one",
  trials=35,
  seconds=30,
)
def killed_in_a_save(attempt: Attempt) -> None:
  """Kills at a stage of a save; the run goes on from the step before it or from that step."""
  stage = list(STAGES)[attempt.number % len(STAGES)]
  victims = VICTIMS[attempt.number // len(STAGES) % len(VICTIMS)]
  attempt.does = f"2 processes, {victims} killed at: {stage}"
  if not any(
    _killed(attempt, attempt.folder / f"run-{draw}", stage, victims) for draw in range(DRAWS)
  ):
    raise AssertionError(f"the stage was over before it was seen, {DRAWS} times")


def _killed(attempt: Attempt, workdir: pathlib.Path, stage: str, victims: str) -> bool:
  """Kills a run at a stage, lets it go on; returns whether the stage was met."""
  every = same.DIGEST_EVERY if stage == "garbage collection" else same.SAVE_EVERY  # see same.KEPT
  step = every * attempt.chance.randint(2, STEPS // every - 1)
  folder = workdir / "checkpoints"
  with Run(workdir, steps=STEPS, flags=FLAGS) as run:
    run.wait_until(lambda: saved(workdir)[-1:] >= [step - same.SAVE_EVERY], "the save before")
    if not _seen(run, folder, step, stage):
      return False
    for index in (0, 1) if victims == "all" else (int(victims[-1]),):
      run.signal(index, signal.SIGKILL)
    left = sorted(os.listdir(folder))
    run.end()
    assert run.left_behind() == []
  there = saved(workdir)
  attempt.seen.append(f"save of step {step}, left: {' '.join(left)}")
  assert there[-1] in (step - same.SAVE_EVERY, step), there
  with Run(workdir, steps=STEPS, flags=FLAGS) as run:
    run.ends(0)
    text = run.text()
  [resumed] = re.findall(r"resumes from the checkpoint of step (\d+)", text)
  attempt.seen.append(f"went on from step {resumed}")
  assert int(resumed) == there[-1], "a step that is there was not read"
  assert "cannot be read" not in text, "a torn step was met"
  assert all(name.isdecimal() for name in os.listdir(folder)), os.listdir(folder)
  same.check(workdir, attempt.clean(2, FLAGS, steps=STEPS).record)
  return True


def _seen(run: Run, folder: pathlib.Path, step: int, stage: str) -> bool:
  """Waits for a stage of a step's save; returns whether it was seen before the next save.

  From where the save begins without a pause: some stages last a millisecond.
  """
  begun, following = STAGES["directory made"], step + same.SAVE_EVERY
  run.wait_until(lambda: begun(folder, step) or saved(folder.parent)[-1] >= step, "the save")
  while not STAGES[stage](folder, step):
    over = begun(folder, following) or STAGES["rename"](folder, following)
    if over or any(popen.poll() is not None for popen in run.popens):
      return False
  return True


# ------------------------------ a full disk ------------------------------

FULL_STEPS = 60
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


@row(
  12,
  fault="disk full at each stage of a save",
  passes="the last good step is kept; reported at the next step; saves continue once there is "
  "space",
  trials=10,
  seconds=30,
)
def disk_full(attempt: Attempt) -> None:
  """Fills the disk at a stage of a save, and makes room again once that was reported."""
  kind = KINDS[attempt.number % len(KINDS)]
  attempt.does = f"2 processes, the disk full: {kind}"
  expected = attempt.clean(2, FLAGS, steps=FULL_STEPS).record
  with contextlib.ExitStack() as stack:
    mounted = kind not in ALONE and stack.enter_context(small_disk(attempt.workdir))
    run = stack.enter_context(Run(attempt.workdir, steps=FULL_STEPS, flags=FLAGS))
    pids = [run.pids()[ALONE.index(kind)]] if kind in ALONE else run.pids()
    if not mounted and kind not in ALONE:
      attempt.seen.append("no right to mount: the size of files was limited instead")
    _fill_and_free(attempt, run, Full(attempt.workdir, () if mounted else pids), kind)
    run.ends(0)
    found = same.record(attempt.workdir)
    assert found.lines == expected.lines, "the steps are not the same"
    assert FULL_STEPS in found.arrays, f"the last step is not saved, only {list(found.arrays)}"
    for step in found.arrays.keys() & expected.arrays.keys():
      assert found.arrays[step] == expected.arrays[step], f"step {step} has other bits"
    left = os.listdir(attempt.workdir / "checkpoints")
    assert all(name.isdecimal() for name in left), left


def _fill_and_free(attempt: Attempt, run: Run, full: Full, kind: str) -> None:
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
