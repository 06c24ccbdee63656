"""Row 13: records that cannot be read, in a data set of 10,000."""

import dataclasses
import json
import pathlib
import re
import shutil
import signal
import sys

import numpy as np
from ml_collections import ConfigDict

from configs import base
from input_pipeline import batches, row_source, store, tfds_documents
from input_pipeline.source import Source
from tests.faults import same
from tests.faults.frame import Attempt, row
from tests.faults.harness import FLAGS, MESHES, Run, inherited, refused, saved, started
from tests.input_pipeline.damage import flip
from tests.input_pipeline.writing import write

ROWS, LENGTH, BATCH = 10_000, 16, 400
STEPS = 30  # more than an epoch: every row is seen
LIMIT = ROWS // 20
FEW, MANY = 100, 600
TRIALS_WITH_FEW = 5  # and three with many
REFUSED = 2
PATIENT_SECONDS = 600  # for a whole run, on a machine that is busy


@row(
  13,
  fault="100 bad records of 10,000; then 6 % bad",
  passes="exactly those 100 get weight 0 and are listed, all other rows stay where they were; "
  "stops above the limit (5 %)",
  trials=8,
  seconds=30,
)
def bad_records(attempt: Attempt) -> None:
  """Damages records on disk: 100 of 10,000, then 600 where 500 are allowed for."""
  whole, turn = attempt.once(_data_set), attempt.number % 8
  count = 4 if turn == 1 else 2
  bad = sorted(attempt.chance.sample(range(ROWS), FEW if turn < TRIALS_WITH_FEW else MANY))
  data_dir = pathlib.Path(shutil.copytree(whole, attempt.folder / "data"))
  attempt.does = f"{len(bad)} rows of {ROWS}, a bit of each flipped; {count} processes"
  fault = Fault(attempt, data_dir, count, bad)
  if turn >= TRIALS_WITH_FEW:
    fault.damage(bad)
    _stops(fault)
    return
  if turn == 3:
    _one_goes_bad_in_the_run(fault)
  else:
    fault.damage(bad)
    _refused_without_the_key(fault)
    if turn % 2 == 0:
      _killed(fault)
  _goes_on_without(fault)
  wanted = _by_construction(attempt.folder / "wanted", whole, bad, count)
  same.check(attempt.workdir, wanted)


@dataclasses.dataclass(frozen=True)
class Fault:
  """Records that are damaged, and the run that meets them.

  Attributes:
    attempt: the trial.
    data_dir: its own.
    count: processes of the run.
    bad: the rows that are damaged in the end.
  """

  attempt: Attempt
  data_dir: pathlib.Path
  count: int
  bad: list[int]

  def run(self, limit: int) -> Run:
    """Starts the run, or lets it go on."""
    flags = (*_flags(self.data_dir), f"--config.data.max_bad_records={limit}")
    return Run(self.attempt.workdir, count=self.count, steps=STEPS, flags=flags)

  def damage(self, bad: list[int], *, silently: bool = False) -> None:
    """Flips a bit of each of these rows."""
    prepared = _prepared(self.data_dir)
    rows = _source(self.data_dir).read(np.array(bad))["targets"].astype(np.uint8)
    path = pathlib.Path(prepared.documents.shards[0].folder) / store.TOKENS
    flip(path, [row.tobytes() for row in rows], silently=silently, chance=self.attempt.chance)

  def ended(self, run: Run, code: int) -> str:
    """Waits for the end of all with this code; returns what they have said, without a traceback."""
    codes = run.end(seconds=PATIENT_SECONDS)
    ended_so = refused(codes) if code == REFUSED else {*codes} == {code}
    assert ended_so, f"{codes}: {run.last_line()}"
    assert "Traceback" not in run.text(), "one message, and no traceback"
    return run.text()

  def listed(self) -> bool:
    """Tells whether exactly the bad rows are listed."""
    listed = json.loads((self.attempt.workdir / "bad_records.json").read_text())
    return listed["train"]["rows"] == self.bad and not listed["held out"]["rows"]


def _refused_without_the_key(fault: Fault) -> None:
  with fault.run(0) as run:
    text = fault.ended(run, 1)
  named = [int(number) for number in re.findall(r"train: row (\d+) \(document", text)]
  assert named, text
  assert set(named) <= set(fault.bad), f"{named} are named, and not all of them are bad"
  fault.attempt.seen.append(f"without the key it stopped at row {named[0]}")


def _killed(fault: Fault) -> None:
  """Kills the run on its way."""
  with fault.run(LIMIT) as run:
    run.wait_for(f"step {fault.attempt.chance.randint(8, STEPS - 8)}/")
    run.signal(fault.attempt.number % fault.count, signal.SIGKILL)
    run.end()
  fault.attempt.does += ", killed and resumed"
  assert fault.listed(), "exactly the bad rows are listed before the kill"


def _one_goes_bad_in_the_run(fault: Fault) -> None:
  """Damages a row when the run has checked it and has not reached it, and leaves no trace of it."""
  late = _of_the_last_batch(fault)
  fault.damage([row for row in fault.bad if row != late])
  with fault.run(LIMIT) as run:
    run.wait_for("step 3/")
    fault.damage([late], silently=True)
    text = fault.ended(run, 1)
  assert f"train: row {late} (document" in text, text
  assert "could be when all were checked" in text, text
  fault.attempt.does += ", one of them in the run"


def _of_the_last_batch(fault: Fault) -> int:
  """Puts a row of an epoch's last batch in place of one of the bad rows, if there is none."""
  numbered = _source(fault.data_dir)
  order = batches.TrainingBatches(numbered, global_batch_size=BATCH, seed=base.get_config().seed)
  last = order.row_ids(ROWS // BATCH - 1).tolist()
  late = next((row for row in fault.bad if row in last), None)
  if late is None:
    fault.bad[0] = late = last[0]
    fault.bad.sort()
  return late


def _goes_on_without(fault: Fault) -> None:
  """Goes on to the end; the rows are printed and listed."""
  with fault.run(LIMIT) as run:
    text = fault.ended(run, 0)
  first = ", ".join(map(str, fault.bad[:8]))
  assert f"unreadable: {len(fault.bad)} rows of weight 0: {first}, ... (" in text, text
  assert fault.listed(), "exactly the bad rows are listed"


def _stops(fault: Fault) -> None:
  """Refused by all processes alike, before anything is written."""
  with fault.run(LIMIT) as run:
    text = fault.ended(run, REFUSED)
  wanted = f"{MANY} of {ROWS:,} rows cannot be read, more than data.max_bad_records={LIMIT}"
  assert wanted in text, text
  assert saved(fault.attempt.workdir) == [], "nothing is saved"
  fault.attempt.does += f", {LIMIT} allowed for"


def _flags(data_dir: pathlib.Path) -> tuple[str, ...]:
  return (
    "--config.data.name=noise",
    f"--config.data.data_dir={data_dir}",
    f"--config.data.global_batch_size={BATCH}",
    f"--config.data.sequence_length={LENGTH}",
    "--config.data.packing=none",
    "--config.evaluation.sample_tokens=0",
    *same.KEPT,
  )


def _data_set(folder: pathlib.Path) -> pathlib.Path:
  """Writes a text whose training split is 10,000 documents of noise, a row each; prepares it."""
  import tensorflow_datasets as tfds

  noise = np.random.default_rng(0)
  splits = {"train": [LENGTH - 1] * ROWS, "test": [LENGTH - 1] * 25}  # and a byte that ends each
  examples = {
    split: [{"text": noise.integers(1, 256, size, np.uint8).tobytes()} for size in sizes]
    for split, sizes in splits.items()
  }
  write(folder, "noise", {"text": tfds.features.Text()}, examples)
  assert len(_source(folder)) == ROWS
  return folder


def _section(folder: pathlib.Path) -> ConfigDict:
  """Returns the `data` section of a run, which allows for no bad records."""
  data = base.get_config().data.copy_and_resolve_references()
  with data.unlocked():
    data.update(name="noise", data_dir=str(folder), sequence_length=LENGTH, packing="none")
    data.update(kind="text", tokenizer="bytes", max_bad_records=0)
  return data


def _prepared(folder: pathlib.Path) -> store.Prepared:
  return tfds_documents.prepare(_section(folder), "train")[0]


def _source(folder: pathlib.Path) -> Source:
  return row_source.open_source(_section(folder), "train", base.get_config().seed)


def _by_construction(
  folder: pathlib.Path, whole: pathlib.Path, bad: list[int], count: int
) -> same.Record:
  """Returns what a run leaves that reads a sound data set, and gives these rows the weight 0."""
  data, tensor = MESHES[count]
  folder.mkdir()
  command = [
    *(sys.executable, "-m", "processes.launch", f"--processes={count}", "--"),
    *(sys.executable, str(pathlib.Path(__file__).parent / "weightless.py")),
    *(*FLAGS, f"--config.mesh.data={data}", f"--config.mesh.tensor={tensor}"),
    *(f"--config.training.steps={STEPS}", *_flags(whole), f"--workdir={folder / 'run'}"),
  ]
  environment = inherited() | {"WEIGHTLESS": json.dumps(bad)}
  assert started(command, folder / "run-0.out", environment).wait(PATIENT_SECONDS) == 0
  return same.record(folder / "run")
