"""The checkpoints of a run: saved in the background, kept by rule, restored where they fit."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from checkpointing import async_writer, folder_entries, integrity, naming
from checkpointing import restore as reading
from checkpointing.async_writer import SaveError, Writer
from checkpointing.consensus import Together, told
from checkpointing.integrity import CONFIG, RECORD, STATE, UnreadableError, Verified
from checkpointing.retention import Retention
from processes.workdir_lease import Ownership
from runtime import files

# Arrays are cut into chunks of at most this many bytes, since TensorStore reads complete chunks: a
# device that needs an eighth of an array which one device wrote does not hold all of it.
CHUNK_BYTES = 2**25
# A file of arrays is ended when it has reached this size, so that digests of several are computed
# and compared at once. TensorStore's own limit is 2 GiB.
FILE_BYTES = 2**26


class Checkpointer:
  """Saves and restores the steps of one folder; a context manager.

  A step is saved as `{"step", "params", "optimizer"}` with the config and a record. Where there
  are several processes, all make the same calls, and what a call raises it raises on all. Only
  process 0 removes or renames anything. Broken checkpoints are renamed, never deleted.
  """

  def __init__(
    self,
    folder: epath.PathLike,
    *,
    keep: int = 1,
    keep_every_steps: int = 0,
    keep_best: str = "",
    lower_is_better: bool | None = None,
    verify: str = integrity.FULL,
    read_only: bool = False,
    warn: Callable[[str], None] = reading.warn,
    together: Together | None = None,
    owner: Ownership | None = None,
    writes_later: bool = False,
  ):
    """Opens a folder; what killed saves have left in it is removed, unless `read_only`.

    Args:
      folder: `WORKDIR/checkpoints`; made if it is missing.
      keep: how many of the newest steps are kept, at least 1.
      keep_every_steps: every step that is a multiple of it is kept as well; 0 is off.
      keep_best: the metric whose best step is kept as well; "" is off.
      lower_is_better: of that metric; by default yes, unless its name ends with `accuracy`.
      verify: how a step is checked before it is read: `full`, `size` or `off`.
      read_only: nothing in the folder is ever changed.
      warn: is given every warning; standard error by default.
      together: the processes; by default there is one.
      owner: the right to write to the folder; by default no other run can take it over.
      writes_later: nothing in the folder is changed before `start_writing`.

    Raises:
      ValueError: a number below its least; read_only, and there are no checkpoints.
      OSError: the folder cannot be made or written.
    """
    self.folder = epath.Path(folder).expanduser().resolve()
    self._warn, self._verify, self._read_only = warn, verify, read_only
    self._together, self._owner = together or Together(), owner or Ownership()
    self._retention = Retention(keep, keep_every_steps, keep_best, lower_is_better)
    self._writer: Writer | None = None
    self._writing = False
    self._broken: Collection[int] = ()  # to be renamed once writing starts
    self._there = self.steps() if writes_later else None
    if read_only:
      reading.require_steps(self.folder)
    else:
      self._writer = Writer(
        self.folder, self._together, committed=self._collect, warn=warn, owner=self._owner
      )
      if not writes_later:
        self.start_writing()

  def start_writing(self) -> None:
    """Makes the folder ready for saves: removes leftovers, renames broken steps; all call it.

    Raises:
      OSError: the folder cannot be made or changed; or a step has appeared since one was restored,
        saved by an owner of the workdir that was replaced meanwhile. Starting again helps.
    """
    newer = ""
    if self._together.first:
      self.folder.mkdir(parents=True, exist_ok=True)
      self._writer.remove_leftovers()
      # The owner before may have been about to commit; without its leftovers it no longer can.
      if self._there is not None and (appeared := {*self.steps()} - {*self._there}):
        newer = (
          f"{self.folder}: step {max(appeared)} was saved by another run while this one started"
        )
      if names := folder_entries.foreign(self.folder):
        self._warn(
          f"WARNING: {self.folder} holds what was not saved by this application: "
          f"{', '.join(names)}; it is left alone, and no step can be saved under these names"
        )
    if newer := told(self._together.exchange(newer)):  # the others look at the folder after that
      raise OSError(newer)
    for step in self.steps():
      with contextlib.suppress(UnreadableError):
        record = integrity.read_json(self.folder / str(step), RECORD)
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
    """Waits for the last save and closes; SaveError where it failed."""
    self.__exit__(None, None, None)

  def steps(self) -> list[int]:
    """Returns the steps that are committed, oldest first; some may turn out to be broken."""
    return reading.steps(self.folder)

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
    hindrance: str = "",
  ) -> float:
    """Starts to save a step in the background, once the save before it is done.

    Args:
      step: the number of steps done; newer than every step that is there.
      tree: placed arrays; they may be donated as soon as this returns.
      config: resolved, as JSON has it.
      record: what else is to be known: versions, accepted changes.
      metrics: of an evaluation at this step, for `keep_best`.
      metrics_over: which examples they are over; steps are compared where these are the same.
      hindrance: why this process cannot have the step saved now; "" for nothing.

    Returns:
      The seconds that the caller was kept waiting.

    Raises:
      SaveError: this save could not start, a process was hindered, or the save before it failed.
      ValueError: the step is not newer than those that are there; or the metrics lack the one to
        keep the best by.
    """
    began = time.monotonic()
    self.wait()
    self._retention.note(step, metrics, metrics_over)
    there = self.steps()
    if there and step <= there[-1]:  # where runs are resumed, the newest step counts
      raise ValueError(
        f"step {step} is not saved: {self.folder} holds the steps {reading.listed(there)}, and "
        f"only newer ones can be added"
      )
    arrays = naming.nested(naming.named_leaves(tree))
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    self._owner.require()
    if not hindrance and self._together.first:
      hindrance = async_writer.room(self.folder, needed) or self._writer.in_the_way(step)
    # The one that removes older steps may still do so, on a slow disk.
    if why := told(
      self._together.exchange(hindrance, timeout_seconds=async_writer.PATIENCE_SECONDS)
    ):
      raise SaveError(step, self.folder, why)
    judged = {"metrics": dict(metrics or {})}
    if metrics and metrics_over:
      judged["metrics_over"] = dict(metrics_over)
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), arrays)
    items = ocp.args.Composite(
      **{
        STATE: ocp.args.PyTreeSave(
          arrays, save_args=chunks, ocdbt_target_data_file_size=FILE_BYTES
        ),
        CONFIG: ocp.args.JsonSave(dict(config)),
        RECORD: ocp.args.JsonSave(files.finite({**record, **judged})),
      }
    )
    self._writer.start(step, items)
    return time.monotonic() - began

  def check(self) -> None:
    """Reports a save that has failed in the background; to be called at every step, by all.

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

  def progress(self) -> object:
    """Returns what changes while a save makes progress: see `Writer.progress`; from any thread."""
    return None if self._writer is None else self._writer.progress()

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
    """Restores a step directly into the shardings asked for, whatever layout wrote it.

    Args:
      abstract: the tree that was saved, of ShapeDtypeStructs with shardings.
      step: which; by default the newest that can be read. Broken ones that are newer are
        reported and renamed to `STEP.broken` (unless read_only), since nothing older than the
        newest step can be saved.
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
    """Returns a step's config and record, or those of the newest whose small files are sound.

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
    except SaveError as failure:  # what is not there need not be removed
      self._warn(f"WARNING: {failure}")
    if self._together.first:
      # The newest first: a kill leaves no step without those before it.
      for newer in reversed([there for there in self.steps() if there > step]):
        self._writer.remove(newer)
    self._together.exchange("")  # the others look at the folder after that

  def _collect(self) -> None:
    """Removes the steps that the rules do not keep."""
    there = self.steps()
    for step in sorted({*there} - self._retention.kept(there)):
      self._writer.remove(step)

  # ------------------------------ inside ------------------------------

  def _check(self, step: int) -> Verified:
    return integrity.check(self.folder / str(step), self._verify)

  def _read(self, step: int, abstract: Any, known: Verified | None) -> tuple[Verified, Any]:
    """Returns a step and its tree; a folder that holds another step than its name is torn."""
    verified = known if known is not None and known.step == step else self._check(step)
    tree = reading.read_arrays(verified.path, abstract, together=self._together, verified=verified)
    found = tree["step"] if isinstance(tree, dict) and "step" in tree else step
    if int(found) != step:
      raise UnreadableError(f"it holds step {int(found)}")
    return verified, tree

  def _set_aside(self, broken: Collection[int]) -> None:
    """Renames broken steps, in one move each: nothing is lost if one turns out to be intact."""
    if self._together.first:
      self._owner.require()
      for step in broken:
        aside = folder_entries.free(self.folder, f"{step}.broken")  # an earlier one is kept, too
        (self.folder / str(step)).rename(aside)
    self._together.exchange("")  # the others look at the folder after that


def _metrics(record: Mapping[str, Any]) -> dict[str, float] | None:
  """Returns the metrics of a record; None where it has none that can be compared."""
  metrics = record.get("metrics")
  if not isinstance(metrics, dict):
    return None
  with contextlib.suppress(TypeError, ValueError):
    return {name: float(value) for name, value in metrics.items()} or None
  return None
