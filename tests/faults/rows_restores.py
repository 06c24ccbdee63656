"""Rows 9 and 10: checkpoints of another model are refused, those of another layout are read."""

import functools
import json
import pathlib
from collections.abc import Iterator, Sequence

from tests.faults import moving
from tests.faults.harness import refused
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, tried
from tests.helpers.cli import TINY_LM, lines_of
from tests.processes import starting
from tests.training.checkpointing.states import contents

# ------------------------------ refusals ------------------------------

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


def row_9(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Asks for other layers, widths, dtypes, optimizers, data; by one process and by two."""

  @functools.cache
  def saved() -> pathlib.Path:
    workdir = folder / "saved" / "run"
    starting.well(1, *SINGLE, "--config.training.steps=2", f"--workdir={workdir}")
    return workdir

  def one(attempt: Attempt) -> None:
    verb, other, wanted = REFUSALS[attempt.number % len(REFUSALS)]
    count = 1 + attempt.number // len(REFUSALS) % 2
    attempt.does = f"{count} process(es): {verb} with {other}"
    workdir = saved()
    before = contents(workdir)
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
    assert contents(workdir) == before, "the workdir has changed"
    assert not (attempt.folder / "new").exists(), "a workdir was made"

  return tried(9, range(seed, seed + trials), folder, one)


# ------------------------------ other layouts ------------------------------

LAYOUTS = [(count, strategy) for count in (1, 2, 4) for strategy in moving.MESHES]
SHIFTS = (4, 5, 7, 8, 1, 2, 3, 6)  # from a layout to another; first those of another number too
BOUND = 1e-6  # of the next loss, relative


def row_10(trials: int, folder: pathlib.Path) -> Iterator[Trial]:
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
