"""Row 11: files of a checkpoint that are damaged on the disk."""

import functools
import hashlib
import pathlib
import shutil
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from partitioning.rules import nested
from tests.faults import same
from tests.faults.harness import Run
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, tried
from tests.training.checkpointing import damage
from training.checkpointing import reading
from training.checkpointing.checkpointer import Checkpointer

STEPS, EVERY = 8, 2
OLDER, NEWER = 4, 6
FLAGS = (f"--config.checkpoint.every_steps={EVERY}", "--config.checkpoint.keep=9", *same.SPLIT)
COMMAND_EVERY = 20  # trials: one of so many is made by the application, the others by its reader


def row_11(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Flips a bit, cuts a file short or deletes one, in each class of file of the newest step."""
  jax.config.update("jax_platforms", "cpu")  # the reader needs one device, of any kind
  kinds = [(name, how) for how in damage.DAMAGES for name in damage.CLASSES]

  @functools.cache
  def whole() -> pathlib.Path:
    workdir = folder / "whole" / "run"
    shutil.rmtree(workdir.parent, ignore_errors=True)  # one that has failed
    workdir.parent.mkdir()
    with Run(workdir, steps=STEPS, flags=FLAGS) as run:
      assert run.end() == [0, 0], run.codes
    return workdir

  @functools.cache
  def older() -> dict[str, str]:
    return same.digests(whole() / "checkpoints" / str(OLDER))

  def one(attempt: Attempt) -> None:
    name, how = kinds[attempt.number % len(kinds)]
    resumes = attempt.number % COMMAND_EVERY == 0
    attempt.does = f"{name}, {how.__name__}{', 2 processes resume' if resumes else ''}"
    shutil.copytree(whole(), attempt.workdir)
    checkpoints = attempt.workdir / "checkpoints"
    shutil.rmtree(checkpoints / str(STEPS))
    done = damage.harm(checkpoints / str(NEWER), name, how, attempt.chance)
    attempt.seen.append(done)
    file = done.partition(":")[0]
    if resumes:
      _resume(attempt.workdir, file)
      same.check(attempt.workdir, same.record(whole()))
    else:
      _restore(checkpoints, older(), file)
    assert (checkpoints / f"{NEWER}.broken").is_dir(), "the damaged step was not put aside"

  return tried(11, range(seed, seed + trials), folder, one)


def _restore(checkpoints: pathlib.Path, expected: dict[str, str], file: str) -> None:
  """Reads the newest step that is whole, onto one device."""
  said: list[str] = []
  with Checkpointer(checkpoints, keep=9, warn=said.append) as checkpointer:
    stored = reading.stored_arrays(checkpointer.folder / str(OLDER))
    place = SingleDeviceSharding(jax.devices("cpu")[0])
    target = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for n, a in stored.items()}
    step, tree = checkpointer.restore(nested(target))
  assert step == OLDER, f"step {step} was used"
  [line] = said
  assert f"{checkpoints / str(NEWER)} cannot be read ({file}: " in line, line
  assert f"step {OLDER} is used instead" in line, line
  found = {
    name.replace("/", "."): _digest(leaf) for name, leaf in reading.named_leaves(tree).items()
  }
  assert found == expected, "the older step has other bits"


def _digest(array: jax.Array) -> str:
  """Returns what `same.digests` does."""
  header = f"{np.dtype(array.dtype)} {array.shape} ".encode()
  return hashlib.sha256(header + np.asarray(array).tobytes()).hexdigest()


def _resume(workdir: pathlib.Path, file: str) -> None:
  """Lets the run go on, by two processes."""
  with Run(workdir, steps=STEPS, flags=FLAGS) as run:
    assert run.end() == [0, 0], run.codes
    text = run.text()
  warning = f"WARNING: the checkpoint {workdir / 'checkpoints' / str(NEWER)} cannot be read ("
  assert text.count(warning) == 1, "it was not said once"
  assert file in text.partition(warning)[2].partition("\n")[0], "the file is not named"
  assert f"resumes from the checkpoint of step {OLDER}" in text
