"""Row 2: SIGKILL at each stage of a save. The stages are seen from outside, by names of files."""

import os
import pathlib
import re
import signal
from collections.abc import Callable, Iterator

from tests.faults import same
from tests.faults.harness import Run, saved
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, Undisturbed, tried

STEPS = 40
DRAWS = 5  # of a moment: a short stage may be over before it is seen
SAVING = (".saving-1", ".saving")  # of the first owner of a workdir; where nobody owns it
ORBAX = ".orbax-checkpoint-tmp"  # a folder that Orbax writes to


def _names(folder: pathlib.Path) -> list[str]:
  try:
    return os.listdir(folder)
  except (FileNotFoundError, NotADirectoryError):
    return []


def _saving(folder: pathlib.Path, step: int, ending: str = "") -> pathlib.Path:
  """Returns the folder that a step is written to, which need not be there."""
  first, *others = (folder / f"{step}{saving}{ending}" for saving in SAVING)
  return next((path for path in others if path.exists()), first)


def _folder_made(folder: pathlib.Path, step: int) -> bool:
  """Tells whether the save has begun to write."""
  return _saving(folder, step, ORBAX).exists()


def _data(folder: pathlib.Path, step: int) -> bool:
  """Tells whether a process has begun to write arrays."""
  state = _saving(folder, step, ORBAX) / "state.orbax-checkpoint-tmp"
  written = [name for name in _names(state) if name.startswith("ocdbt.process_")]
  return any(_names(state / name / "d") for name in written)


def _metadata(folder: pathlib.Path, step: int) -> bool:
  """Tells whether names of arrays, the config or the record are being written."""
  at = _saving(folder, step, ORBAX)
  items = [f"{item}.orbax-checkpoint-tmp/metadata" for item in ("config", "record")]
  return any((at / p).exists() for p in ("state.orbax-checkpoint-tmp/_METADATA", *items))


def _commit(folder: pathlib.Path, step: int) -> bool:
  """Tells whether Orbax takes the step for finished."""
  at = _saving(folder, step, ORBAX)
  return (at / "commit_success.txt").exists() or _saving(folder, step).exists()


def _digests(folder: pathlib.Path, step: int) -> bool:
  return (_saving(folder, step) / "digests").exists()


def _rename(folder: pathlib.Path, step: int) -> bool:
  return (folder / str(step)).exists()


def _collection(folder: pathlib.Path, step: int) -> bool:
  """Tells whether a step is being removed that a newer one replaces."""
  return any(name.endswith(".removing") for name in _names(folder))


Stage = Callable[[pathlib.Path, int], bool]
STAGES: dict[str, Stage] = {
  "directory made": _folder_made,
  "data": _data,
  "metadata": _metadata,
  "commit": _commit,
  "digest file": _digests,
  "rename": _rename,
  "garbage collection": _collection,
}
VICTIMS = ("all", "process 0", "process 1")
FLAGS = (*same.KEPT, *same.SPLIT)


def row_2(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Kills at a stage of a save; the run goes on from the step before it or from that step."""
  clean = Undisturbed(folder, *FLAGS, steps=STEPS)

  def one(attempt: Attempt) -> None:
    stage = list(STAGES)[attempt.number % len(STAGES)]
    victims = VICTIMS[attempt.number // len(STAGES) % len(VICTIMS)]
    attempt.does = f"2 processes, {victims} killed at: {stage}"
    for draw in range(DRAWS):
      if _killed(attempt, clean, attempt.folder / f"run-{draw}", stage, victims):
        return
    raise AssertionError(f"the stage was over before it was seen, {DRAWS} times")

  return tried(2, range(seed, seed + trials), folder, one)


def _killed(
  attempt: Attempt, clean: Undisturbed, workdir: pathlib.Path, stage: str, victims: str
) -> bool:
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
    left = sorted(_names(folder))
    run.end()
    assert run.left_behind() == []
  there = saved(workdir)
  attempt.seen.append(f"save of step {step}, left: {' '.join(left)}")
  assert there[-1] in (step - same.SAVE_EVERY, step), there
  with Run(workdir, steps=STEPS, flags=FLAGS) as run:
    assert run.end() == [0, 0], run.codes
    text = run.text()
  [resumed] = re.findall(r"resumes from the checkpoint of step (\d+)", text)
  attempt.seen.append(f"went on from step {resumed}")
  assert int(resumed) == there[-1], "a step that is there was not read"
  assert "cannot be read" not in text, "a torn step was met"
  assert all(name.isdecimal() for name in _names(folder)), _names(folder)
  same.check(workdir, clean.of(2).record)
  return True


def _seen(run: Run, folder: pathlib.Path, step: int, stage: str) -> bool:
  """Waits for a stage of a step's save; returns whether it was seen before the next save.

  From where the save begins without a pause: some stages last a millisecond.
  """
  reached, following = STAGES[stage], step + same.SAVE_EVERY
  run.wait_until(
    lambda: _folder_made(folder, step) or saved(run.workdir)[-1] >= step, f"step {step}'s save"
  )
  while not reached(folder, step):
    over = any(
      path.exists() for path in (_saving(folder, following, ORBAX), folder / str(following))
    )
    if over or any(popen.poll() is not None for popen in run.popens):
      return False
  return True
