"""Rows 25 and 26: damaged small files, and what is foreign among checkpoints; clocks that jump."""

import dataclasses
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from tests.faults import same
from tests.faults.damages import (
  CONTENT,
  PLACE,
  Harm,
  another_form,
  device,
  fifo,
  lines_inserted,
  link,
  loop,
  nested,
  sparse,
  written,
)
from tests.faults.frame import Attempt, row
from tests.faults.harness import SITES, Answer, Commands, inherited, lines_of, started
from tests.helpers.cli import TINY_LM
from tests.training.checkpointing import damage
from training.checkpointing import integrity

STEPS, EVERY, RESUMED = 8, 2, 6
OLDER = RESUMED - EVERY
CONTINUED, REFUSED = 0, 2
FLAGS = (
  "--config=configs/single.py",
  *TINY_LM,
  f"--config.training.steps={STEPS}",
  "--config.metrics.every_steps=1",
  f"--config.checkpoint.every_steps={EVERY}",
  "--config.checkpoint.keep=9",
  "--config.data.max_bad_records=3",
)


def _start(commands: Commands, folder: pathlib.Path) -> Answer:
  """Starts the run of a folder, which prepares its data there."""
  return commands.run(*_flags(folder))


def _flags(folder: pathlib.Path) -> tuple[str, ...]:
  return (*FLAGS, f"--config.data.data_dir={folder / 'data'}", f"--workdir={folder / 'run'}")


def _whole(folder: pathlib.Path, commands: Commands) -> pathlib.Path:
  """Returns a folder with an undisturbed run, and its data."""
  answer = _start(commands, folder)
  assert answer.code == CONTINUED, answer
  return folder


def _copied(attempt: Attempt) -> tuple[Commands, pathlib.Path]:
  """Lets a trial begin with a run that was stopped before its last step."""
  commands = attempt.once(Commands)
  whole = attempt.once(_whole, commands)
  shutil.copytree(whole, attempt.folder, dirs_exist_ok=True)
  shutil.rmtree(attempt.workdir / "checkpoints" / str(STEPS))
  return commands, whole


def listing(folder: pathlib.Path) -> dict[str, tuple]:
  """Returns path -> kind, size and time of change of everything in a folder, reading nothing."""
  found = {path: path.lstat() for path in sorted(folder.rglob("*")) if path.suffix != ".lock"}
  return {
    str(path): (stat.st_mode, stat.st_size, stat.st_mtime_ns)
    for path, stat in found.items()
    if not path.is_dir()
  }


# ------------------------------ small files ------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
  """A small file.

  Attributes:
    name: of it, in words.
    find: returns it, in a trial's folder.
    kinds: of damage.
  """

  name: str
  find: Callable[[pathlib.Path], pathlib.Path]
  kinds: tuple[Harm, ...]


def _in_run(name: str) -> Callable[[pathlib.Path], pathlib.Path]:
  return lambda folder: folder / "run" / name


def _in_data(pattern: str) -> Callable[[pathlib.Path], pathlib.Path]:
  return lambda folder: sorted((folder / "data").glob(pattern))[0]


OF_LINES = (lines_inserted, *CONTENT, *PLACE)
PLACES = (
  Place("metrics.jsonl", _in_run("metrics.jsonl"), OF_LINES),
  Place("metrics.damaged.jsonl", _in_run("metrics.damaged.jsonl"), PLACE),
  Place("config.json", _in_run("config.json"), CONTENT + PLACE),
  Place("layout.txt", _in_run("layout.txt"), CONTENT + PLACE),
  Place("bad_records.json", _in_run("bad_records.json"), CONTENT + PLACE),
  Place("an event file", lambda f: next((f / "run").glob("events.*")), CONTENT + PLACE),
  Place("shard.json", _in_data("prepared/**/shard.json"), CONTENT + PLACE),
  Place("the list of bad records", _in_data("prepared/**/bad_records-*.json"), CONTENT + PLACE),
  Place("the record", _in_run(f"checkpoints/{RESUMED}/record/metadata"), (another_form, nested)),
  Place("the config", _in_run(f"checkpoints/{RESUMED}/config/metadata"), (another_form, nested)),
)
KINDS = [(place, how) for place in PLACES for how in place.kinds]
random.Random("the order of row 25").shuffle(KINDS)
OF_METRICS = [(place, how) for place, how in KINDS if place is PLACES[0]]


@row(
  25,
  fault="damage to metrics.jsonl and to each small file of a workdir and of prepared data",
  passes="the start continues with a warning, or is refused in one message with nothing changed, "
  "and continues once the file is repaired; Same, except for lines that were destroyed",
  trials=40,
  seconds=20,
  note="Content: emptied, deleted, truncated, NULs, random bytes, lines inserted, JSON of another "
  "form or nested 100,000 deep. Place: a directory, a FIFO, a sparse terabyte, a symbolic link.",
)
def small_file_damaged(attempt: Attempt) -> None:
  """Damages a small file of a run that has been stopped, and starts it again."""
  commands, whole = _copied(attempt)
  expected = same.record(whole / "run")
  of = OF_METRICS if attempt.number % 2 else KINDS  # half of the trials
  place, how = of[attempt.number // 2 % len(of)]
  path = place.find(attempt.folder)
  signed = "checkpoints" in path.parts
  attempt.does = f"{place.name}: {how(path, attempt.chance)}"
  if signed:  # with matching digests: only the form is wrong
    _sign(path.parent.parent)
  before = listing(attempt.folder)
  answer = _start(commands, attempt.folder)
  _judge(attempt, answer, before)
  if answer.code == REFUSED:
    _mend(path, place.find(whole))
    answer = _start(commands, attempt.folder)
    assert answer.code == CONTINUED, f"after it was mended: {answer}"
  steps = [line["step"] for line in lines_of(attempt.workdir) if "loss" in line]
  assert steps == sorted(set(steps)), f"the steps {steps}"
  assert {RESUMED + 1, STEPS} <= set(steps), f"the steps {steps}"
  # Lines that damage has destroyed may be missing: what is there must be right.
  lines = same.story(attempt.workdir)
  kept = [line for line in expected.lines if line in lines or line[0] > RESUMED]
  same.check(attempt.workdir, dataclasses.replace(expected, lines=kept))


def _judge(attempt: Attempt, answer: Answer, before: dict[str, tuple]) -> None:
  """Asserts that a start continued, or was refused in one message with nothing changed."""
  assert answer.code in (CONTINUED, REFUSED), f"exit code {answer.code}: {answer.err[-500:]}"
  assert "Traceback" not in answer.err + answer.out, answer.err[-500:]
  if answer.code == REFUSED:
    said = [line for line in answer.err.splitlines() if not line.startswith("WARNING")]
    assert said[0].startswith("refused: "), said[0]
    # A line for each key, where the config of the checkpoint is another.
    assert len(said) == 1 or all(line.startswith("  ") for line in said[1:-1]), said
    assert max(map(len, said)) < 2500, said
    assert listing(attempt.folder) == before, "something was changed"
    attempt.seen.append("refused")
  else:
    attempt.seen.append("continued" + (", with a warning" if "WARNING" in answer.err else ""))


def _mend(path: pathlib.Path, whole: pathlib.Path) -> None:
  """Puts back what was damaged, as the message says."""
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)
  if whole.exists():
    shutil.copy2(whole, path)
  if "checkpoints" in path.parts:
    _sign(path.parent.parent)


def _sign(step: pathlib.Path) -> None:
  """Makes the digests of a step match what is there."""
  (step / integrity.DIGESTS).unlink()
  epath = integrity.epath.Path(step)
  integrity.write_digests(epath, integrity.compute_digests(epath, integrity.file_sizes(epath)))


# ------------------------------ foreign folders ------------------------------

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


def _continued(attempt: Attempt, commands: Commands, step: int) -> str:
  """Starts the run again, which continues from a step; returns what it says on standard error."""
  answer = _start(commands, attempt.folder)
  assert answer.code == CONTINUED, f"exit code {answer.code}: {answer.err[-500:]}"
  assert f"the checkpoint of step {step}" in answer.out, answer.out[-500:]
  assert "Traceback" not in answer.err, answer.err[-500:]
  return answer.err


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


METADATA = written(b"{}", b"[]", b"[" * 100_000, b"\0" * 99)


def _odd_file(attempt: Attempt, commands: Commands) -> None:
  """Puts what is no plain file into the newest checkpoint, or adds it there."""
  chance, step = attempt.chance, attempt.workdir / "checkpoints" / str(RESUMED)
  how = chance.choice([fifo, sparse, link, loop, device, METADATA])
  classes = [name for name in damage.CLASSES if damage.files(step, name)]
  name = "state/_METADATA" if how is METADATA else chance.choice(classes)
  path = chance.choice(damage.files(step, name))
  if chance.random() < 0.25 and how is not METADATA:
    path = path.with_name("one more")
    path.touch()
  attempt.does = f"{path.relative_to(step)}: {how(path, chance)}"
  said = _continued(attempt, commands, OLDER)
  [line] = [line for line in said.splitlines() if "cannot be read" in line]
  assert f"{step} cannot be read (" in line, line
  assert len(line) < 900, line
  assert (step.parent / f"{RESUMED}.broken").is_dir(), "the damaged step was not put aside"


# ------------------------------ links ------------------------------


def _link(attempt: Attempt, commands: Commands) -> None:
  """Moves the workdir, its checkpoints, a step or a file to another place, and links to it."""
  workdir = attempt.workdir
  places = (".", "checkpoints", f"checkpoints/{RESUMED}", "metrics.jsonl", "config.json")
  place = places[attempt.number // 5 % len(places)]
  path, elsewhere = workdir / place, attempt.folder / "elsewhere"
  path.rename(elsewhere)
  path.symlink_to(elsewhere)
  attempt.does = f"{place} is a link"
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
  answer = _start(commands, attempt.folder)
  assert answer.code == REFUSED, answer
  [line] = answer.err.splitlines()
  assert f"{place} is a symbolic link to {elsewhere}, not a plain file" in line, line
  assert listing(attempt.folder) == before, "something was changed"
  path.unlink()
  elsewhere.rename(path)
  _continued(attempt, commands, RESUMED)


# ------------------------------ clocks ------------------------------

HOUR, YEAR = 3600, 365 * 24 * 3600


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
  process = _process(attempt, moved if jumps_first else {})
  while process.poll() is None and not any(line["step"] == 5 for line in lines_of(attempt.workdir)):
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
  process = _process(attempt, {} if jumps_first else moved)
  metrics = attempt.workdir / "metrics.jsonl"
  while process.poll() is None and '"done": true' not in metrics.read_text():
    time.sleep(0.02)
  whole = time.monotonic() - began  # until the last line was written
  assert process.wait() == CONTINUED, process.returncode
  *_, last = (line for line in lines_of(attempt.workdir) if "goodput" in line)
  total = sum(last["seconds"].values())
  attempt.seen.append(f"bins of {total:.1f} s in {whole:.1f} s")
  assert min(last["seconds"].values()) >= 0, last
  assert abs(total - whole) < 1, f"the bins hold {total:.1f} s of {whole:.1f} s"


def _process(attempt: Attempt, more: dict[str, str]) -> subprocess.Popen:
  environment = inherited() | {"PYTHONPATH": str(SITES / "clocks")} | more
  command = [sys.executable, "main.py", *_flags(attempt.folder)]
  return started(command, attempt.folder / "run-0.out", environment)


OF_26 = (_foreign, _odd_file, _clock, _link, _odd_file)


@row(
  26,
  fault="foreign folders among the checkpoints; FIFOs, devices, links and sparse files in one; "
  "clocks that jump by an hour or a year",
  passes="foreign files are reported and left unchanged; the step before is used, in time; the "
  "bins of goodput add up; links are followed for folders and refused for files; Same",
  trials=20,
  seconds=20,
  note="Of five trials two are about files in a checkpoint, and one each about folders, clocks "
  "and links. The wall clock jumps within a process, or between two, the first of which is killed.",
)
def foreign_things(attempt: Attempt) -> None:
  """Puts something into the checkpoints of a run that has been stopped, or moves its clock."""
  commands, whole = _copied(attempt)
  OF_26[attempt.number % len(OF_26)](attempt, commands)
  same.check(attempt.workdir, same.record(whole / "run"))
