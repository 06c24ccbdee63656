"""Row 25: damage to metrics.jsonl, and to each small file of a workdir and of prepared data."""

import dataclasses
import json
import os
import pathlib
import random
import shutil
from collections.abc import Callable, Iterator

from tests.faults import same
from tests.faults.plan import Trial
from tests.faults.serving import Answer, Commands
from tests.faults.trying import Attempt, tried
from tests.helpers.cli import TINY_LM
from training.checkpointing import integrity

STEPS, EVERY, RESUMED = 8, 2, 6
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


# ------------------------------ kinds of damage ------------------------------


def empty(path: pathlib.Path, chance: random.Random) -> str:
  """Cuts a file to nothing."""
  os.truncate(path, 0)
  return "emptied"


def deleted(path: pathlib.Path, chance: random.Random) -> str:
  """Deletes a file."""
  path.unlink()
  return "deleted"


def cut(path: pathlib.Path, chance: random.Random) -> str:
  """Cuts a file short."""
  size = chance.randrange(path.stat().st_size)
  os.truncate(path, size)
  return f"cut to {size} bytes"


def nuls(path: pathlib.Path, chance: random.Random) -> str:
  """Puts NULs in place of a part of a file, as a power cut may."""
  return _overwritten(path, chance, 600, bytes, "NULs")


def noise(path: pathlib.Path, chance: random.Random) -> str:
  """Puts random bytes in place of a part of a file."""

  # No digits or letters: a number that has changed cannot be told from another.
  def drawn(size: int) -> bytes:
    return bytes(byte | 128 for byte in chance.randbytes(size))

  return _overwritten(path, chance, 99, drawn, "random bytes")


def _overwritten(
  path: pathlib.Path, chance: random.Random, most: int, drawn: Callable[[int], bytes], what: str
) -> str:
  content = bytearray(path.read_bytes())
  start = chance.randrange(len(content))
  size = min(chance.randint(1, most), len(content) - start)
  content[start : start + size] = drawn(size)
  path.write_bytes(content)
  return f"{size} {what} at {start}"


def nested(path: pathlib.Path, chance: random.Random) -> str:
  """Makes JSON of a file that is nested very deep."""
  path.write_text("[" * 100_000)
  return "nested 100,000 deep"


def another_form(path: pathlib.Path, chance: random.Random) -> str:
  """Makes JSON of another form of a file."""
  text = chance.choice(['["a", "list"]', "17", "{}", '{"step": "three"}', "null"])
  path.write_text(text)
  return f"says {text}"


def lines_inserted(path: pathlib.Path, chance: random.Random) -> str:
  """Inserts lines that no run writes."""
  lines = path.read_bytes().splitlines(keepends=True)
  made = (
    b"\n",
    bytes(99) + b"\n",
    b"\xff\xfe\x80\n",
    b'{"loss": 1.5}\n',
    b"7\n",
    b'{"step": 3, "l',
  )
  inserted = chance.sample(made, chance.randint(1, len(made)))
  for line in inserted:
    lines.insert(chance.randrange(len(lines)), line)
  path.write_bytes(b"".join(lines))
  return f"{len(inserted)} lines inserted"


def directory(path: pathlib.Path, chance: random.Random) -> str:
  """Puts a directory with something in it in place of a file."""
  path.unlink(missing_ok=True)
  (path / "inside").mkdir(parents=True)
  return "a directory"


def fifo(path: pathlib.Path, chance: random.Random) -> str:
  """Puts a FIFO in place of a file."""
  path.unlink(missing_ok=True)
  os.mkfifo(path)
  return "a FIFO"


def sparse(path: pathlib.Path, chance: random.Random) -> str:
  """Makes a file claim to be a terabyte."""
  path.touch()
  os.truncate(path, 2**40)
  return "a terabyte, sparse"


def link(path: pathlib.Path, chance: random.Random) -> str:
  """Moves a file elsewhere, and links to it."""
  elsewhere = path.parent.parent / f"elsewhere-{path.name}"
  if path.exists():
    path.rename(elsewhere)
  else:
    elsewhere.write_text("kept\n")
  path.symlink_to(elsewhere)
  return "a symbolic link"


CONTENT = (empty, deleted, cut, nuls, noise, nested, another_form)
PLACE = (directory, fifo, sparse, link)


@dataclasses.dataclass(frozen=True)
class Place:
  """A small file.

  Attributes:
    name: of it, in words.
    find: returns it, in a trial's folder.
    kinds: of damage.
    replaced: whether a start writes it anew and reads nothing of it.
  """

  name: str
  find: Callable[[pathlib.Path], pathlib.Path]
  kinds: tuple[Callable[[pathlib.Path, random.Random], str], ...]
  replaced: bool = False


def _in_run(name: str) -> Callable[[pathlib.Path], pathlib.Path]:
  return lambda folder: folder / "run" / name


def _in_data(pattern: str) -> Callable[[pathlib.Path], pathlib.Path]:
  return lambda folder: sorted((folder / "data").glob(pattern))[0]


OF_LINES = (lines_inserted, *CONTENT, *PLACE)
PLACES = (
  Place("metrics.jsonl", _in_run("metrics.jsonl"), OF_LINES),
  Place("metrics.damaged.jsonl", _in_run("metrics.damaged.jsonl"), PLACE),
  Place("config.json", _in_run("config.json"), CONTENT + PLACE, replaced=True),
  Place("layout.txt", _in_run("layout.txt"), CONTENT + PLACE, replaced=True),
  Place("bad_records.json", _in_run("bad_records.json"), CONTENT + PLACE, replaced=True),
  Place("an event file", lambda f: next((f / "run").glob("events.*")), CONTENT + PLACE),
  Place("shard.json", _in_data("prepared/**/shard.json"), CONTENT + PLACE),
  Place("the list of bad records", _in_data("prepared/**/bad_records-*.json"), CONTENT + PLACE),
  Place("the record", _in_run(f"checkpoints/{RESUMED}/record/metadata"), (another_form, nested)),
  Place("the config", _in_run(f"checkpoints/{RESUMED}/config/metadata"), (another_form, nested)),
)


def row_25(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Damages a small file of a run that has been stopped, and starts it again."""
  kinds = [(place, how) for place in PLACES for how in place.kinds]
  random.Random("the order of row 25").shuffle(kinds)
  # Half of the trials are of metrics.jsonl.
  lines = [(place, how) for place, how in kinds if place is PLACES[0]]
  whole = folder / "whole"
  with Commands() as commands:
    whole.mkdir()
    answer = _start(commands, whole)
    assert answer.code == 0, answer
    expected = same.record(whole / "run")

    def one(attempt: Attempt) -> None:
      of = lines if attempt.number % 2 else kinds
      place, how = of[attempt.number // 2 % len(of)]
      shutil.copytree(whole, attempt.folder, dirs_exist_ok=True)
      shutil.rmtree(attempt.workdir / "checkpoints" / str(STEPS))
      path = place.find(attempt.folder)
      signed = integrity if "checkpoints" in path.parts else None
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
      same.check(_without_lost(attempt.workdir), _without(expected, attempt.workdir))

    yield from tried(25, range(seed, seed + trials), folder, one)


def _start(commands: Commands, folder: pathlib.Path) -> Answer:
  """Starts the run of a folder, which prepares its data there."""
  places = (f"--config.data.data_dir={folder / 'data'}", f"--workdir={folder / 'run'}")
  return commands.run(*FLAGS, *places)


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


def listing(folder: pathlib.Path) -> dict[str, tuple]:
  """Returns path -> kind, size and time of change of everything in a folder, reading nothing."""
  found = {path: path.lstat() for path in sorted(folder.rglob("*")) if path.suffix != ".lock"}
  return {
    str(path): (stat.st_mode, stat.st_size, stat.st_mtime_ns)
    for path, stat in found.items()
    if not path.is_dir()
  }


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


def _without_lost(workdir: pathlib.Path) -> pathlib.Path:
  """Returns a workdir, having asserted that each line is sound, and no step stands twice."""
  text = (workdir / "metrics.jsonl").read_text()
  steps = [line["step"] for line in map(json.loads, text.splitlines()) if "loss" in line]
  assert steps == sorted(set(steps)), f"the steps {steps}"
  assert {RESUMED + 1, STEPS} <= set(steps), f"the steps {steps}"
  return workdir


def _without(expected: same.Record, workdir: pathlib.Path) -> same.Record:
  """Returns a record without the lines that damage has destroyed: what is there must be right."""
  lines = same.story(workdir)
  kept = [line for line in expected.lines if line in lines or line[0] > RESUMED]
  return dataclasses.replace(expected, lines=kept)
