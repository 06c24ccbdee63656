"""Row 26: foreign folders, links, FIFOs and sparse files among checkpoints; clocks that jump."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.faults import same
from tests.faults.harness import ROOT
from tests.faults.plan import Trial
from tests.faults.rows_files import CONTINUED, FLAGS, REFUSED, RESUMED, STEPS, listing
from tests.faults.serving import Commands
from tests.faults.trying import Attempt, tried
from tests.training.checkpointing import damage

CLOCKS = pathlib.Path(__file__).parent / "clocks"
HOUR, YEAR = 3600, 365 * 24 * 3600
OLDER = RESUMED - 2
NAMES = (
  *("1", "7", "8", "999", "007", "7.5", "latest"),
  *(
    "50.saving_notes",
    "7.saving",
    "7.saving-1",
    "3.removing",
    "6.broken",
    "5.orbax-checkpoint-tmp",
  ),
)


def row_26(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Puts something into the checkpoints of a run that has been stopped, or moves its clock."""
  whole = folder / "whole"
  kinds = (_foreign, _odd_file, _clock, _link, _odd_file)
  with Commands() as commands:
    whole.mkdir()
    answer = commands.run(*_flags(whole))
    assert answer.code == CONTINUED, answer
    expected = same.record(whole / "run")

    def one(attempt: Attempt) -> None:
      kind = kinds[attempt.number % len(kinds)]
      shutil.copytree(whole, attempt.folder, dirs_exist_ok=True)
      shutil.rmtree(attempt.workdir / "checkpoints" / str(STEPS))
      kind(attempt, commands)
      same.check(attempt.workdir, expected)

    yield from tried(26, range(seed, seed + trials), folder, one)


def _flags(folder: pathlib.Path) -> list[str]:
  return [*FLAGS, f"--config.data.data_dir={folder / 'data'}", f"--workdir={folder / 'run'}"]


def _continued(attempt: Attempt, commands: Commands, step: int) -> str:
  """Starts the run again, which continues from a step; returns what it says on standard error."""
  answer = commands.run(*_flags(attempt.folder))
  assert answer.code == CONTINUED, f"exit code {answer.code}: {answer.err[-500:]}"
  assert f"the checkpoint of step {step}" in answer.out, answer.out[-500:]
  assert "Traceback" not in answer.err, answer.err[-500:]
  return answer.err


# ------------------------------ foreign folders ------------------------------


def _foreign(attempt: Attempt, commands: Commands) -> None:
  """Puts folders of somebody else among the checkpoints, by names that ours may have."""
  chance, checkpoints = attempt.chance, attempt.workdir / "checkpoints"
  # Where the last step has no place the run fails; that is a trial of the suite.
  names = chance.sample([name for name in NAMES if name not in ("1", "8")], 4)
  for name in names:
    inside = checkpoints / name / chance.choice(["", "state", "notes"])
    inside.mkdir(parents=True)
    (inside / "notes.txt").write_text("the work of a month\n")
  attempt.does = f"foreign folders {', '.join(names)}"
  before = {name: listing(checkpoints / name) for name in names}
  said = _continued(attempt, commands, RESUMED)
  assert {name: listing(checkpoints / name) for name in names} == before, "one was changed"
  unknown = [name for name in names if name in ("7", "999", "50.saving_notes", "7.saving")]
  assert all(name in said for name in unknown), f"not all of {unknown} are reported: {said}"
  for name in names:  # what is compared next takes each number for a step
    shutil.rmtree(checkpoints / name)


# ------------------------------ files that are none ------------------------------


def _fifo(path: pathlib.Path, chance: random.Random) -> str:
  path.unlink()
  os.mkfifo(path)
  return "a FIFO"


def _sparse(path: pathlib.Path, chance: random.Random) -> str:
  os.truncate(path, 2**42)
  return "four terabytes, sparse"


def _linked(path: pathlib.Path, chance: random.Random) -> str:
  elsewhere = path.parents[3] / "elsewhere"
  path.rename(elsewhere)
  path.symlink_to(elsewhere)
  return "a symbolic link"


def _loop(path: pathlib.Path, chance: random.Random) -> str:
  path.unlink()
  path.symlink_to(path.parent)
  return "a link to its own folder"


def _device(path: pathlib.Path, chance: random.Random) -> str:
  path.unlink()
  try:
    os.mknod(path, 0o020600, os.makedev(1, 5))
  except PermissionError:
    path.symlink_to("/dev/zero")
  return "a device without an end"


def _metadata(path: pathlib.Path, chance: random.Random) -> str:
  path.write_text(chance.choice(["{}", "[]", "[" * 100_000, "\0" * 99]))
  return f"says {path.read_text()[:9]!r}"


def _odd_file(attempt: Attempt, commands: Commands) -> None:
  """Puts what is no plain file into the newest checkpoint, or adds it there."""
  chance, step = attempt.chance, attempt.workdir / "checkpoints" / str(RESUMED)
  how = chance.choice([_fifo, _sparse, _linked, _loop, _device, _metadata])
  name = "state/_METADATA" if how is _metadata else chance.choice(_classes(step))
  path = chance.choice(damage.files(step, name))
  if chance.random() < 0.25 and how is not _metadata:
    path = path.with_name("one more")
    path.touch()
  attempt.does = f"{path.relative_to(step)}: {how(path, chance)}"
  said = _continued(attempt, commands, OLDER)
  [line] = [line for line in said.splitlines() if "cannot be read" in line]
  assert f"{step} cannot be read (" in line, line
  assert len(line) < 900, line
  assert (step.parent / f"{RESUMED}.broken").is_dir(), "the damaged step was not put aside"


def _classes(step: pathlib.Path) -> list[str]:
  return [name for name in damage.CLASSES if damage.files(step, name)]


# ------------------------------ links ------------------------------


def _link(attempt: Attempt, commands: Commands) -> None:
  """Moves the workdir, its checkpoints, a step or a file to another place, and links to it."""
  chance, workdir = attempt.chance, attempt.workdir
  places = (".", "checkpoints", f"checkpoints/{RESUMED}", "metrics.jsonl", "config.json")
  place = places[attempt.number // 5 % len(places)]
  path, elsewhere = workdir / place, attempt.folder / "elsewhere"
  path.rename(elsewhere)
  path.symlink_to(elsewhere)
  attempt.does = f"{place} is a link"
  del chance
  if place in (".", "checkpoints"):
    _continued(attempt, commands, RESUMED)
    assert path.is_symlink(), "the link was replaced"
    return
  before = listing(attempt.folder)
  if place.startswith("checkpoints"):
    _continued(attempt, commands, OLDER)
    assert path.is_symlink(), "the link was replaced"
    inside = {name: stat for name, stat in before.items() if str(elsewhere) in name}
    assert listing(elsewhere) == inside, "what it points to was changed"
    return
  answer = commands.run(*_flags(attempt.folder))
  assert answer.code == REFUSED, answer
  [line] = answer.err.splitlines()
  assert f"{place} is a symbolic link to {elsewhere}, not a plain file" in line, line
  assert listing(attempt.folder) == before, "something was changed"
  path.unlink()
  elsewhere.rename(path)
  _continued(attempt, commands, RESUMED)


# ------------------------------ clocks ------------------------------


def _clock(attempt: Attempt, commands: Commands) -> None:
  """Kills a run, and starts it again; the wall clock jumps in one of the two processes."""
  del commands  # a process of its own: the clock is moved when Python starts
  chance = attempt.chance
  jump = (HOUR, -HOUR, YEAR, -YEAR)[attempt.number // 5 % 4]
  jumps_first, after = chance.random() < 0.5, chance.uniform(0, 3)
  shutil.rmtree(attempt.workdir)
  attempt.does = (
    f"the clock jumps by {jump} s, {after:.0f} s after the start of the "
    f"{'killed' if jumps_first else 'next'} process"
  )
  moved = {"FAULTS_CLOCK": f"{after}:{jump}"}
  began = time.monotonic()
  with open(attempt.folder / "run-0.out", "wb") as output:
    process = _process(attempt, moved if jumps_first else {}, output)
    metrics = attempt.workdir / "metrics.jsonl"
    while process.poll() is None and not _logged(metrics, 5):
      time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    process = _process(attempt, {} if jumps_first else moved, output)
    while process.poll() is None and '"done": true' not in metrics.read_text():
      time.sleep(0.02)
    whole = time.monotonic() - began  # until the last line was written
    assert process.wait() == CONTINUED, process.returncode
  lines = map(json.loads, (attempt.workdir / "metrics.jsonl").read_text().splitlines())
  *_, last = (line for line in lines if "goodput" in line)
  total = sum(last["seconds"].values())
  attempt.seen.append(f"bins of {total:.1f} s in {whole:.1f} s")
  assert min(last["seconds"].values()) >= 0, last
  assert abs(total - whole) < 1, f"the bins hold {total:.1f} s of {whole:.1f} s"


def _process(attempt: Attempt, more: dict[str, str], output) -> subprocess.Popen:
  environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
  return subprocess.Popen(
    [sys.executable, "main.py", *_flags(attempt.folder)],
    cwd=ROOT,
    env=environment | {"PYTHONPATH": str(CLOCKS)} | more,
    stdin=subprocess.DEVNULL,
    stdout=output,
    stderr=subprocess.STDOUT,
  )


def _logged(metrics: pathlib.Path, step: int) -> bool:
  """Tells whether a step is logged."""
  return metrics.exists() and f'{{"step": {step}, ' in metrics.read_text()
