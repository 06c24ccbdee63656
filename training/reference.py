"""The reference of DPO: log p of each answer under the parameters that a run has started from.

Computed once, before the first step, and kept in WORKDIR/reference: a file for each split, named by
its rows and by the digest of the parameters. Batches then have it beside their tokens, so that they
stay a function of the step. With adapters nothing is computed here: the step itself has the base.
Of GRPO, whose answers are new in each step, the reference are the parameters themselves.
"""

import dataclasses
import io
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from input_pipeline.batches import EvaluationBatches
from input_pipeline.source import Source
from models import preferences
from partitioning.rules import named_leaves
from processes.coordination import Lockstep, current
from processes.watchdog import STARTING, Watchdog
from runtime import files
from training import base_parameters, restore
from training.checkpointing import integrity, reading
from training.metrics.console import say
from training.setup import Job
from training.splits import Data

FOLDER = "reference"
_PARAMETERS = "parameters.json"
_SHOWN = 16  # characters of a digest in a file's name
_FIELDS = [f"reference_{side}" for side in preferences.SIDES]


def attached(data: Data, start: restore.Start, watch: Watchdog) -> Data:
  """Returns a run's batches with the reference, which is computed where it is not stored.

  Raises:
    ValueError: the parameters that the run has started from are no longer found.
  """
  first = start.state.params if start.step == 0 else None
  folder = start.workdir / FOLDER
  reference = _Reference(start.job, folder, watch, first, start.owner.require)
  for batches in (data.train, data.evaluation):
    batches.source = reference.of(batches.source)
  return data


def attached_to_evaluation(
  job: Job, batches: EvaluationBatches, location: str, watch: Watchdog
) -> EvaluationBatches:
  """Returns the batches of an evaluation with the reference of the run at `location`.

  Raises:
    ValueError: it is not stored there, and the parameters of its start are not found.
  """
  if job.needs_reference:
    folder = run_folder(location) / FOLDER
    batches.source = _Reference(job, folder, watch, None, None).of(batches.source)
  return batches


def run_folder(location: str) -> epath.Path:
  """Returns the folder of the run whose checkpoint is at `DIR[/STEP]`."""
  try:
    folder, _ = reading.parse_location(location)
  except ValueError:  # a model folder
    return epath.Path(location)
  return folder.parent if folder.name == integrity.FOLDER else folder


def first_parameters(start: restore.Start, watch: Watchdog) -> Any:
  """Returns a copy of the parameters that a run has started from.

  Raises:
    ValueError: they are no longer found.
  """
  first = None
  if start.step == 0:  # a step deletes those that it is given
    first = jax.tree.map(lambda x: x.copy(), start.state.params)
  folder = start.workdir / FOLDER
  return _Reference(start.job, folder, watch, first, start.owner.require).identified()


class _Reference:
  """Log p of splits under the parameters that a run has started from."""

  def __init__(
    self,
    job: Job,
    folder: epath.Path,
    watch: Watchdog,
    params: Any,
    require: Callable[[], None] | None,
  ):
    """Computes nothing yet.

    Args:
      job: the run.
      folder: of the stored files.
      watch: is notified of what is computed.
      params: those that the run starts from; None: they are found where they are needed.
      require: is called before a file is written; None: nothing is stored.
    """
    self._job, self._folder, self._watch = job, folder, watch
    self._params, self._require = params, require
    # A run that has not made its first step may have been given other parameters since.
    self._digest = self._known() if params is None else ""

  def of(self, source: Source) -> Source:
    """Returns a source whose rows have the reference."""
    values = self._stored(source)
    if values is None:
      values = self._computed(source)

    def with_reference(numbers: np.ndarray) -> dict[str, np.ndarray]:
      more = zip(_FIELDS, values[np.asarray(numbers, np.int64)].T, strict=True)
      return {**source.read(numbers), **dict(more)}

    return dataclasses.replace(source, read=with_reference)

  def identified(self) -> Any:
    """Returns the parameters, compared with what is known of them; raises as `_identify`."""
    self._identify()
    return self._params

  def _path(self, source: Source) -> epath.Path:
    return self._folder / f"{source.fingerprint[:_SHOWN]}-{self._digest[:_SHOWN]}.npy"

  def _known(self) -> str:
    """Returns the digest of the parameters as it is stored; "" where none is."""
    path, found = self._folder / _PARAMETERS, ""
    if path.exists():
      found = str(files.read_json(path).get("digest", ""))
    return json.loads(self._job.consensus.from_first(json.dumps(found)))

  def _stored(self, source: Source) -> np.ndarray | None:
    """Returns float32 [rows, 2] of a split; None where all processes are to compute it."""
    if not self._digest:
      self._identify()
    found, path = None, self._path(source)
    if path.exists():
      found = np.load(io.BytesIO(files.read_bytes(path, most_bytes=2**40)))
    right = found is not None and found.shape == (len(source), 2) and found.dtype == np.float32
    seconds = self._job.config.processes.start_timeout_seconds
    return found if current().all_true(str(path), right, timeout_seconds=seconds) else None

  def _identify(self) -> None:
    """Finds the digest of the parameters that the run starts from, and compares it with the stored.

    Raises:
      ValueError: they are others than those that the stored numbers are of.
    """
    if self._params is None:
      self._params = restore.first_state(self._job)[0].params
    digest = base_parameters.ParameterReader(self._job).digest(named_leaves(self._params))
    if self._digest and self._digest != digest:
      raise ValueError(
        f"checkpoint.initialize_from={self._job.config.checkpoint.initialize_from!r} has other "
        f"parameters (digest {digest[:_SHOWN]}) than this run has started from "
        f"({self._digest[:_SHOWN]}, {self._folder / _PARAMETERS}), which are the reference of its "
        f"loss; name those"
      )
    self._digest = digest
    text = files.json_text({"digest": digest}, indent=2) + "\n"
    self._write(self._folder / _PARAMETERS, text.encode())

  def _write(self, path: epath.Path, content: bytes) -> None:
    """Writes a file, if files are stored, on process 0."""
    if self._require is not None and current().first:
      path.parent.mkdir(parents=True, exist_ok=True)
      files.replace(path, content, require=self._require)

  def _computed(self, source: Source) -> np.ndarray:
    """Returns float32 [rows, 2] of a split, by forward passes over all of its rows; stores it."""
    if self._params is None:
      self._identify()
    job, watch = self._job, self._watch
    watch.at("compiling the reference", STARTING)
    batches = EvaluationBatches(source, global_batch_size=job.config.data.global_batch_size)
    say(f"{source.name}: the reference's log-probabilities of {len(source):,} pairs")
    step = job.compile(
      lambda params, batch: preferences.log_probabilities(job.program.module(params), batch)[0],
      *(job.state.params, job.batch),
      in_shardings=(job.state_shardings.params, job.batch_shardings),
      out_shardings=NamedSharding(job.mesh, PartitionSpec()),
    ).function
    values, lockstep = np.zeros((len(source), 2), np.float32), Lockstep(watch.group, watch.stop)
    for number in range(len(batches)):
      watch.at(f"the reference, batch {number + 1} of {len(batches)}", STARTING)
      lockstep.enter()  # a stop ends the process here: there is nothing to save yet
      log_p_PC = step(self._params, batches.batch(number, job.batch_shardings))
      ids_P = batches.row_ids(number)
      values[ids_P[ids_P >= 0]] = jax.device_get(log_p_PC)[ids_P >= 0]
    content = io.BytesIO()
    np.save(content, values)
    self._write(self._path(source), content.getvalue())
    return values
