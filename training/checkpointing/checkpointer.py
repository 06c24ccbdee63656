"""The checkpoints of a run: asynchronous saves, retention, restore into any layout.

Retention keeps the newest steps, every n-th, and the best by a metric.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath, epy

from partitioning.rules import named_leaves, nested
from processes.workdir_lease import Ownership
from runtime import files
from training.checkpointing import async_writer, integrity
from training.checkpointing.async_writer import SaveError, Writer
from training.checkpointing.consensus import Together, join_reports
from training.checkpointing.integrity import CONFIG, RECORD, STATE, UnreadableError, Verified

with epy.lazy_imports():  # of runs that resume
  from training.checkpointing import reading

# ------------------------------ retention ------------------------------


class Retention:
  """The retention rules of a run, and the metrics of steps that are ranked by one."""

  def __init__(self, keep: int, every_steps: int, best: str):
    """Sets the rules; see Checkpointer. A smaller metric is better, unless it is an accuracy.

    Raises:
      ValueError: a number below its least.
    """
    if keep < 1 or every_steps < 0:
      raise ValueError(
        f"checkpoint.keep={keep}: at least 1; checkpoint.keep_every_steps={every_steps}: at least 0"
      )
    self._keep, self._every, self._best = keep, every_steps, best
    self._sign = 1.0 if best.endswith("accuracy") else -1.0
    # step -> the examples that its metric is over, and the metric, with larger being better.
    self._values: dict[int, tuple[str, float]] = {}

  def note(
    self, step: int, metrics: Mapping[str, float] | None, over: Mapping[str, Any] | None = None
  ) -> None:
    """Remembers a step's metric; a step without one is not ranked.

    Args:
      step: the number of steps done.
      metrics: of its evaluation.
      over: the examples that they are over; None: unknown. Only metrics over the same examples are
        compared.

    Raises:
      ValueError: the metrics lack the one that ranks steps.
    """
    self._values.pop(step, None)
    if not self._best or metrics is None:
      return
    if self._best not in metrics:
      names = ", ".join(metrics)
      raise ValueError(f"checkpoint.keep_best={self._best!r}: the metrics are {names}")
    if math.isfinite(metrics[self._best]):
      self._values[step] = json.dumps(over, sort_keys=True), self._sign * metrics[self._best]

  def kept(self, steps: Sequence[int]) -> set[int]:
    """Returns which of these steps are kept."""
    there = sorted(steps)
    kept = set(there[-self._keep :])
    kept.update(step for step in there if self._every and step % self._every == 0)
    best: dict[str, tuple[float, int]] = {}
    for step in there:
      if step in self._values:
        over, value = self._values[step]
        best[over] = max(best.get(over, (-math.inf, step)), (value, step))
    kept.update(step for _, step in best.values())
    return kept


# ------------------------------ saving and restoring ------------------------------

# Arrays are stored in chunks of at most this many bytes, since TensorStore reads complete chunks: a
# device that needs an eighth of an array which one device wrote does not load all of it.
CHUNK_BYTES = 2**25
# The size of a file of arrays, small enough that digests of several are computed in parallel.
# TensorStore's own limit is 2 GiB.
FILE_BYTES = 2**26


class Checkpointer:
  """Saves and restores the steps of one folder; a context manager.

  A step is saved as `{"step", "params", "optimizer"}` with the config and a record. Several
  processes make the same calls, and an error is raised on all of them. Only process 0 removes or
  renames anything. Broken checkpoints are renamed, never deleted.

  Attributes:
    folder: of the steps.
    on_commit: is called with each step whose save is found to be complete.
  """

  def __init__(
    self,
    folder: epath.PathLike,
    *,
    keep: int = 1,
    keep_every_steps: int = 0,
    keep_best: str = "",
    verify: str = integrity.FULL,
    read_only: bool = False,
    warn: Callable[[str], None] = integrity.warn,
    together: Together | None = None,
    owner: Ownership | None = None,
    writes_later: bool = False,
    tokenizer: Mapping[str, bytes] | None = None,
  ):
    """Opens a folder; removes what killed saves have left in it, unless `read_only`.

    Args:
      folder: `WORKDIR/checkpoints`; created if it is missing.
      keep: number of newest steps to keep, at least 1.
      keep_every_steps: multiples of it are kept as well; 0 is off.
      keep_best: the metric whose best step is kept as well; "" is off.
      verify: how a step is checked before it is read: `full`, `size` or `off`.
      read_only: nothing in the folder is ever changed.
      warn: called with every warning; standard error by default.
      together: the processes; by default a single one.
      owner: the right to write to the folder; by default no other run can take it over.
      writes_later: nothing in the folder is changed before `start_writing`.
      tokenizer: name of a file -> its content, of which each step gets a copy.

    Raises:
      ValueError: a number below its least; read_only, and there are no checkpoints.
      OSError: the folder cannot be made or written.
    """
    self.folder = epath.Path(folder).expanduser().resolve()
    self._warn, self._verify, self._read_only = warn, verify, read_only
    self._together, self._owner = together or Together(), owner or Ownership()
    self._retention = Retention(keep, keep_every_steps, keep_best)
    self.on_commit: Callable[[int], None] = lambda step: None
    self._writer: Writer | None = None
    self._writing = False
    self._broken: Collection[int] = ()  # to be renamed once writing starts
    self._there = self.steps() if writes_later else None
    if read_only:
      integrity.require_steps(self.folder)
    else:
      self._writer = Writer(
        self.folder,
        self._together,
        committed=self._collect,
        warn=warn,
        owner=self._owner,
        tokenizer=tokenizer,
      )
      if not writes_later:
        self.start_writing()

  def start_writing(self) -> None:
    """Prepares the folder: removes leftovers, renames broken steps; all processes call it.

    Raises:
      OSError: the folder cannot be created or changed; or a step has appeared since the restore,
        saved by an owner of the workdir that was replaced meanwhile. Restarting helps.
    """
    newer = ""
    if self._together.first:
      self.folder.mkdir(parents=True, exist_ok=True)
      files.sync_above(self.folder)
      self._writer.remove_leftovers()
      # The owner before may have been about to commit; without its leftovers it no longer can.
      if self._there is not None and (appeared := {*self.steps()} - {*self._there}):
        newer = (
          f"{self.folder}: step {max(appeared)} was saved by another run while this one started"
        )
      if names := integrity.foreign_entries(self.folder):
        self._warn(
          f"WARNING: {self.folder} contains entries not saved by this application: "
          f"{', '.join(names)}; they are left alone, and no step can be saved under these names"
        )
    if newer := join_reports(
      self._together.exchange(newer)
    ):  # the others read the folder after that
      raise OSError(newer)
    for step in self.steps():
      with contextlib.suppress(UnreadableError):
        record = reading.read_json(self.folder / str(step), RECORD)
        self._retention.note(step, _metrics(record), record.get("metrics_over"))
    self._writing = True
    if self._broken:
      self._set_aside(self._broken)

  def __enter__(self) -> "Checkpointer":
    """Returns itself."""
    return self

  def __exit__(self, kind, error, traceback) -> None:
    """Waits for the last save and closes; its failure never hides another error."""
    try:
      self.wait()
    except SaveError as failure:
      if error is None:
        raise
      self._warn(str(failure))
    finally:
      if self._writer is not None:
        self._writer.close()

  def close(self) -> None:
    """Waits for the last save and closes; raises SaveError if it failed."""
    self.__exit__(None, None, None)

  def steps(self) -> list[int]:
    """Returns the steps that are committed, oldest first; some may turn out to be broken."""
    return integrity.steps(self.folder)

  # ------------------------------ saving ------------------------------

  def save(
    self,
    step: int,
    tree: Any,
    *,
    config: Mapping[str, Any],
    record: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
    metrics_over: Mapping[str, Any] | None = None,
  ) -> float:
    """Starts to save a step in the background, once the save before it is done.

    Args:
      step: the number of steps done; newer than every saved step.
      tree: placed arrays; they may be donated as soon as this returns.
      config: resolved, as JSON.
      record: further JSON: versions, accepted changes.
      metrics: of an evaluation at this step, for `keep_best`.
      metrics_over: the examples that they are over; only steps with the same ones are compared.

    Returns:
      The seconds that the caller waited.

    Raises:
      SaveError: this save could not start, or the save before it failed.
      ValueError: the step is not newer than those that are there; or the metrics lack the one to
        keep the best by.
    """
    began = time.monotonic()
    self.wait()
    self._retention.note(step, metrics, metrics_over)
    there = self.steps()
    if there and step <= there[-1]:  # a run resumes from the newest step
      raise ValueError(
        f"step {step} is not saved: {self.folder} has the steps {integrity.listed(there)}, and "
        f"only newer ones can be added"
      )
    arrays = nested(named_leaves(tree))
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    self._owner.require()
    hindrance = ""
    if self._together.first:
      hindrance = async_writer.room(self.folder, needed) or self._writer.in_the_way(step)
    # The thread that removes older steps may still be doing so, on a slow disk.
    if why := join_reports(
      self._together.exchange(hindrance, timeout_seconds=async_writer.PATIENCE_SECONDS)
    ):
      raise SaveError(step, self.folder, why)
    ranked_by = {"metrics": dict(metrics or {})}
    if metrics and metrics_over:
      ranked_by["metrics_over"] = dict(metrics_over)
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), arrays)
    items = ocp.args.Composite(
      **{
        STATE: ocp.args.PyTreeSave(
          arrays, save_args=chunks, ocdbt_target_data_file_size=FILE_BYTES
        ),
        CONFIG: ocp.args.JsonSave(dict(config)),
        RECORD: ocp.args.JsonSave(files.finite({**record, **ranked_by})),
      }
    )
    self._writer.start(step, items)
    return time.monotonic() - began

  def check(self) -> None:
    """Raises the error of a failed background save; all processes call it at every step.

    Costs nothing where no save is running, and a barrier of the processes while one is.

    Raises:
      SaveError: once for each failed save. What it left is gone: save the step again.
    """
    if self.saving and self._together.all_true(self._writer.ended):
      self.wait()

  def wait(self) -> None:
    """Waits until the save in the background, if there is one, is committed.

    Raises:
      SaveError: it failed.
    """
    if self.saving:
      self._writer.finish()
      self.on_commit(self._writer.step)

  def progress(self) -> object:
    """Returns a value that changes while a save progresses, see `Writer.progress`; thread-safe."""
    return None if self._writer is None else self._writer.progress()

  @property
  def seconds(self) -> list[float]:
    """Returns how long each save took, from its start to its commit."""
    return [] if self._writer is None else self._writer.seconds

  @property
  def saving(self) -> bool:
    """Returns whether a save was started and has not been finished; the same on all processes."""
    return self._writer is not None and self._writer.busy

  # ------------------------------ restoring ------------------------------

  def restore(self, abstract: Any, *, step: int | None = None) -> tuple[int, Any]:
    """Returns (step, tree) of a step, as `restore_verified` does."""
    verified, tree = self.restore_verified(abstract, step=step)
    return verified.step, tree

  def restore_verified(
    self, abstract: Any, *, step: int | None = None, known: Verified | None = None
  ) -> tuple[Verified, Any]:
    """Restores a step directly into the requested shardings, whatever layout wrote it.

    Args:
      abstract: the saved tree, of ShapeDtypeStructs with shardings.
      step: the step; by default the newest that can be read. Newer broken ones are reported and
        renamed to `STEP.broken` (unless read_only), since nothing older than the newest step can
        be saved.
      known: a step that `verified` has returned; its small files are not read again.

    Returns:
      The step's config and record, and its tree.

    Raises:
      ValueError: no such step; the arrays differ in name, shape or dtype (every difference in
        one message); or no step can be read.
    """
    self.wait()
    found = reading.restore_first(
      self.folder, step, lambda step: self._read(step, abstract, known), self._together
    )
    remedy = "nothing is changed" if self._read_only else "it is renamed to end with .broken"
    for line in found.warnings(self.folder, remedy):
      self._warn(line)
    if found.broken and self._writing:
      self._set_aside(found.broken)
    elif not self._writing:
      self._broken = found.broken
    return found.tree

  def verified(self, step: int | None = None) -> Verified:
    """Returns a step's config and record, or those of the newest whose small files are intact.

    Raises:
      ValueError: there is none.
    """
    return reading.restore_first(self.folder, step, self._check).tree

  # ------------------------------ removing ------------------------------

  def remove_after(self, step: int) -> None:
    """Removes every step newer than `step`, so that they may be saved again; all processes call it.

    A save in the background is waited for, and removed as well if it is newer.

    Raises:
      ValueError: it was opened read_only.
    """
    if self._read_only:
      raise ValueError(f"{self.folder} was opened for reading only; nothing is removed")
    try:
      self.wait()
    except SaveError as failure:  # a step that was not saved need not be removed
      self._warn(f"WARNING: {failure}")
    if self._together.first:
      # The newest first, so that a kill leaves no gap.
      for newer in reversed([there for there in self.steps() if there > step]):
        self._writer.remove(newer)
    self._together.exchange("")  # the others read the folder after that

  def _collect(self) -> None:
    """Removes the steps that the rules do not keep."""
    there = self.steps()
    for step in sorted({*there} - self._retention.kept(there)):
      self._writer.remove(step)

  # ------------------------------ inside ------------------------------

  def _check(self, step: int) -> Verified:
    return reading.check(self.folder / str(step), self._verify)

  def _read(self, step: int, abstract: Any, known: Verified | None) -> tuple[Verified, Any]:
    """Returns a step and its tree; a folder whose step is not its name is damaged."""
    verified = known if known is not None and known.step == step else self._check(step)
    tree = reading.read_arrays(verified, abstract, together=self._together)
    found = tree["step"] if isinstance(tree, dict) and "step" in tree else step
    if int(found) != step:
      raise UnreadableError(f"it contains step {int(found)}")
    return verified, tree

  def _set_aside(self, broken: Collection[int]) -> None:
    """Renames broken steps: nothing is lost if one turns out to be intact."""
    if self._together.first:
      self._owner.require()
      for step in broken:
        aside = integrity.free_name(self.folder, f"{step}.broken")  # an earlier one is kept, too
        (self.folder / str(step)).rename(aside)
    self._together.exchange("")  # the others read the folder after that


def _metrics(record: Mapping[str, Any]) -> dict[str, float] | None:
  """Returns the metrics of a record; None if it has none that can be compared."""
  metrics = record.get("metrics")
  if not isinstance(metrics, dict):
    return None
  with contextlib.suppress(TypeError, ValueError):
    return {name: float(value) for name, value in metrics.items()} or None
  return None
