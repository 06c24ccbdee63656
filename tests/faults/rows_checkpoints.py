"""Rows 9 to 11: checkpoints of another model, of another layout, and damaged ones."""

import json
import pathlib
import shutil
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from partitioning.rules import nested
from tests.faults import moving, same
from tests.faults.frame import Attempt, Trial, row
from tests.faults.harness import Run, refused
from tests.faults.rows_files import listing
from tests.helpers.cli import TINY_LM, lines_of
from tests.processes import starting
from tests.training.checkpointing import damage
from training.checkpointing import reading
from training.checkpointing.checkpointer import Checkpointer

# ------------------------------ of another model ------------------------------

SINGLE = [
  "--config=configs/dp8.py",
  "--config.mesh.data=2",
  *TINY_LM,
  "--config.metrics.tensorboard=false",
  "--config.data.global_batch_size=8",
]
THERE = "float32[1, 32, 48] in the checkpoint, "  # of params/layers/mlp/up/kernel
# What is asked for, with which other key, and what the refusal must say.
REFUSALS = (
  ("train", "model.layers=2", "model.layers: 1 in the checkpoint, now 2"),
  ("train", "model.model_size=48", "model.model_size: 32 in the checkpoint, now 48"),
  ("train", "training.parameter_dtype=float64", '"float32" in the checkpoint, now "float64"'),
  ("train", "optimizer.name=sgd", 'optimizer.name: "adamw" in the checkpoint, now "sgd"'),
  ("train", "data.train_split=train[:50%]", "dataset.rows: "),
  ("evaluate", "model.layers=2", f"{THERE}float32[2, 32, 48] here"),
  ("evaluate", "model.model_size=48", f"{THERE}float32[1, 48, 48] here"),
  ("evaluate", "training.parameter_dtype=float64", f"{THERE}float64[1, 32, 48] here"),
  ("initialize", "model.feedforward_size=64", f"{THERE}float32[1, 32, 64] here"),
  ("initialize", "training.parameter_dtype=float64", f"{THERE}float64[1, 32, 48] here"),
  ("train", "model.kv_heads=2", "model.kv_heads: "),
  ("train", "data.sequence_length=32", "data.sequence_length: 16 in the checkpoint, now 32"),
)


@row(
  9,
  fault="restore with other layers, width, dtype, optimizer, data",
  passes="refusals that name the difference, no silent cast",
  trials=12,
  seconds=10,
)
def of_another_model(attempt: Attempt) -> None:
  """Asks for other layers, widths, dtypes, optimizers, data; by one process and by two."""
  verb, other, wanted = REFUSALS[attempt.number % len(REFUSALS)]
  count = 1 + attempt.number // len(REFUSALS) % 2
  attempt.does = f"{count} process(es): {verb} with {other}"
  workdir = attempt.once(_two_steps)
  before = listing(workdir)
  fresh = verb == "initialize"
  where = attempt.folder / "new" if fresh else workdir
  command = ["train" if fresh else verb, f"--workdir={where}", *SINGLE]
  if fresh:
    command.append(f"--config.checkpoint.initialize_from={workdir}")
  command += ["--config.training.steps=4", f"--config.{other}"]
  ended = starting.start(count, *command)
  assert refused([one.code for one in ended]), [one.code for one in ended]
  said = "".join(one.err for one in ended)
  assert said.count("refused: ") == 1, said
  assert wanted in said, f"{wanted!r} is missing in: {said}"
  assert "Traceback" not in said
  assert listing(workdir) == before, "the workdir has changed"
  assert not (attempt.folder / "new").exists(), "a workdir was made"


def _two_steps(folder: pathlib.Path) -> pathlib.Path:
  starting.well(1, *SINGLE, "--config.training.steps=2", f"--workdir={folder / 'run'}")
  return folder / "run"


# ------------------------------ of another layout ------------------------------

LAYOUTS = [(count, strategy) for count in (1, 2, 4) for strategy in moving.MESHES]
SHIFTS = (4, 5, 7, 8, 1, 2, 3, 6)  # from a layout to another; first those of another number too
BOUND = 1e-6  # of the next loss, relative


@row(
  10,
  fault="save on each of {1, 2, 4 processes} x {dp, fsdp, tp}, restore on each other",
  passes="parameters bit-equal; next example ids equal; next loss within 1e-6",
  trials=72,
  seconds=15,
)
def of_another_layout(trials: int, folder: pathlib.Path) -> Iterator[Trial]:
  """Restores what each layout on each number of processes has saved on every other."""
  pairs = [pair for shift in SHIFTS for pair in _shifted(shift)][:trials]
  workdirs: dict[tuple[int, str], pathlib.Path] = {}
  ids: list[int] = []  # of the next batch, as the first process of all tells
  for restorer in LAYOUTS:
    savers = [saver for saver, other in pairs if other == restorer]
    for saver in savers:
      if saver not in workdirs:
        workdirs[saver] = folder / "{}-{}".format(*saver) / "run"
        starting.well(saver[0], *moving.flags(saver[1]), f"--workdir={workdirs[saver]}")
    if savers:
      yield from _restored(restorer, {saver: workdirs[saver] for saver in savers}, ids)


def _shifted(shift: int) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
  """Yields (saver, restorer), the same way apart in the list."""
  for index, saver in enumerate(LAYOUTS):
    yield saver, LAYOUTS[(index + shift) % len(LAYOUTS)]


def _restored(
  restorer: tuple[int, str], workdirs: dict[tuple[int, str], pathlib.Path], ids: list[int]
) -> Iterator[Trial]:
  """Restores what several layouts have saved on one other; yields a trial for each."""
  count, strategy = restorer
  folders = [str(workdir / "checkpoints") for workdir in workdirs.values()]
  printed = starting.well(count, strategy, *folders, script=pathlib.Path(moving.__file__))
  lines = [[line for line in out.splitlines() if line.startswith("{")] for out in printed]
  found = [[json.loads(line) for line in process] for process in lines]
  for number, (saver, workdir) in enumerate(workdirs.items()):
    name = "saved by {} process(es), {}; restored by {} process(es), {}".format(*saver, *restorer)
    processes = [process[number] for process in found]
    ids[:] = ids or processes[0]["ids"]
    failure, difference = _judged(processes, workdir, ids)
    seconds = max(process["seconds"] for process in processes)
    yield Trial(name, not failure, failure or f"next loss off by {difference:.1e}", seconds)


def _judged(processes: Sequence[dict], workdir: pathlib.Path, ids: list[int]) -> tuple[str, float]:
  """Returns what is wrong, "" for nothing, and how far the next loss is off, relatively.

  The run that has saved made the next step itself.
  """
  lines = [line for line in lines_of(workdir) if line["step"] == moving.SAVED + 1]
  [wanted] = [line["loss"] for line in lines if "loss" in line]
  difference = max(abs(process["loss"] / wanted - 1) for process in processes)
  failures = [f"the next loss is off by {difference:.1e}"] if difference > BOUND else []
  for index, process in enumerate(processes):
    if process["wrong"]:
      failures.append(f"process {index}: other bits of {', '.join(process['wrong'])}")
    if process["ids"] != ids:
      failures.append(f"process {index}: the next examples are others")
  return "; ".join(failures), difference


# ------------------------------ damaged ------------------------------

STEPS, EVERY = 8, 2
OLDER, NEWER = 4, 6
FLAGS = (f"--config.checkpoint.every_steps={EVERY}", "--config.checkpoint.keep=9", *same.SPLIT)
COMMAND_EVERY = 20  # trials: one of so many is made by the application, the others by its reader
KINDS = [(name, how) for how in damage.DAMAGES for name in damage.CLASSES]


@row(
  11,
  fault="a bit flipped, a file truncated, a file deleted, in each class of file of a checkpoint",
  passes="all noticed; falls back to the older step and reports it",
  trials=200,
  seconds=4,
  note="On a run whose two processes each write arrays. Every 20th trial resumes with two "
  "processes. In the others the application's reader reads the newest intact step.",
)
def damaged(attempt: Attempt) -> None:
  """Flips a bit, cuts a file short or deletes one, in each class of file of the newest step."""
  jax.config.update("jax_platforms", "cpu")  # the reader needs one device, of any kind
  name, how = KINDS[attempt.number % len(KINDS)]
  resumes = attempt.number % COMMAND_EVERY == 0
  attempt.does = f"{name}, {how.__name__}{', 2 processes resume' if resumes else ''}"
  clean = attempt.clean(2, FLAGS, steps=STEPS)
  shutil.copytree(clean.workdir, attempt.workdir)
  checkpoints = attempt.workdir / "checkpoints"
  shutil.rmtree(checkpoints / str(STEPS))
  done = damage.harm(checkpoints / str(NEWER), name, how, attempt.chance)
  attempt.seen.append(done)
  file = done.partition(":")[0]
  if resumes:
    _resume(attempt.workdir, file)
    same.check(attempt.workdir, clean.record)
  else:
    older = clean.workdir / "checkpoints" / str(OLDER)
    _restore(checkpoints, same.digests(older), file)
  assert (checkpoints / f"{NEWER}.broken").is_dir(), "the damaged step was not put aside"


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
  leaves = reading.named_leaves(tree).items()
  found = {name.replace("/", "."): same.digest(np.asarray(leaf)) for name, leaf in leaves}
  assert found == expected, "the older step has other bits"


def _resume(workdir: pathlib.Path, file: str) -> None:
  """Lets the run go on, by two processes."""
  with Run(workdir, steps=STEPS, flags=FLAGS) as run:
    run.ends(0)
    text = run.text()
  warning = f"WARNING: the checkpoint {workdir / 'checkpoints' / str(NEWER)} cannot be read ("
  assert text.count(warning) == 1, "it was not said once"
  assert file in text.partition(warning)[2].partition("\n")[0], "the file is not named"
  assert f"resumes from the checkpoint of step {OLDER}" in text
