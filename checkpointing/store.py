"""The checkpoints of a run: saved in the background, kept by rule, restored where they fit."""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from checkpointing import reading, trees
from checkpointing.reading import CONFIG, RECORD, STATE, UnreadableError

# Arrays are cut into chunks of at most this many bytes, since TensorStore reads whole chunks: a
# device that needs an eighth of an array which one device wrote does not hold all of it.
CHUNK_BYTES = 2**25
# Processes that hold copies of an array share the writing of it in slices of at least this size.
SLICE_BYTES = 2**23


class SaveError(RuntimeError):
  """A save failed; the checkpoints before it stand, and the same step may be saved again.

  Attributes:
    step: the step that was to be saved.
  """

  def __init__(self, step: int, folder: epath.Path, error: BaseException):
    """Names the step, the folder and the cause."""
    self.step = step
    text = " ".join(str(error).split())
    super().__init__(f"saving step {step} to {folder} failed: {type(error).__name__}: {text}")


class Checkpointer:
  """Saves and restores the steps of one folder; a context manager.

  A step is saved as `{"step", "params", "optimizer"}` beside the config and a record. Only
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
    read_only: bool = False,
    warn: Callable[[str], None] = reading.warn,
    agree: Callable[[bool], bool] = bool,
  ):
    """Opens a folder; what killed saves have left in it is removed, unless `read_only`.

    Args:
      folder: `WORKDIR/checkpoints`; made if it is missing.
      keep: how many of the newest steps are kept, at least 1.
      keep_every_steps: every step that is a multiple of it is kept as well; 0 is off.
      keep_best: the metric whose best step is kept as well; "" is off.
      lower_is_better: of that metric; by default yes, unless its name ends with `accuracy`.
      read_only: nothing in the folder is ever changed.
      warn: is given every warning; standard error by default.
      agree: tells whether something is true on all processes, all of which ask; by default
        there is one process.

    Raises:
      ValueError: a number below its least; read_only, and there are no checkpoints.
      OSError: the folder cannot be made or written.
    """
    if keep < 1 or keep_every_steps < 0:
      raise ValueError(
        f"checkpoint.keep={keep}: at least 1; "
        f"checkpoint.keep_every_steps={keep_every_steps}: at least 0"
      )
    self.folder = epath.Path(folder).expanduser().resolve()
    self._warn, self._agree = warn, agree
    self._retention = Retention(keep, keep_every_steps, keep_best, lower_is_better)
    self._read_only = read_only
    self._manager = None
    self._saving: int | None = None
    if read_only:
      reading.require_steps(self.folder)
    else:
      self._open()

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
      self._close()

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
  ) -> float:
    """Starts to save a step in the background, once the save before it is done.

    Args:
      step: the number of steps done; newer than every step that is there.
      tree: placed arrays; they may be donated as soon as this returns.
      config: resolved, as JSON has it.
      record: what else is to be known: versions, accepted changes.
      metrics: of an evaluation at this step, for `keep_best`.

    Returns:
      The seconds that the caller was kept waiting.

    Raises:
      SaveError: this save could not start, or the one before it failed.
      ValueError: the step is not newer than those that are there, so that Orbax would write
        nothing; or the metrics lack the one to keep the best by.
    """
    began = time.monotonic()
    self.wait()
    self._retention.note(step, metrics)
    arrays = trees.nested(trees.named_leaves(tree))
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), arrays)
    items = ocp.args.Composite(
      **{
        STATE: ocp.args.PyTreeSave(arrays, save_args=chunks),
        CONFIG: ocp.args.JsonSave(dict(config)),
        RECORD: ocp.args.JsonSave({**record, "metrics": dict(metrics or {})}),
      }
    )
    try:
      started = self._manager.save(step, args=items)
    except Exception as error:
      self._reopen()
      raise SaveError(step, self.folder, error) from error
    if not started:
      raise ValueError(
        f"step {step} is not saved: {self.folder} holds the steps "
        f"{reading.listed(self.steps())}, and only newer ones can be added"
      )
    self._saving = step
    return time.monotonic() - began

  def check(self) -> None:
    """Reports a save that has failed in the background; cheap enough for every step.

    Raises:
      SaveError: once for each failed save. What it left is gone: save the step again.
    """
    # `check_for_errors` of Orbax 0.12 says nothing of a full disk; waiting for a save that has
    # ended raises what it ended with.
    if self._saving is not None and not self._manager.is_saving_in_progress():
      self.wait()

  def wait(self) -> None:
    """Waits until the save in the background, if there is one, is committed.

    Raises:
      SaveError: it failed.
    """
    if self._saving is None:
      return
    step, self._saving = self._saving, None
    try:
      self._manager.wait_until_finished()
    except Exception as error:
      self._reopen()
      raise SaveError(step, self.folder, error) from error

  # ------------------------------ restoring ------------------------------

  def restore(self, abstract: Any, *, step: int | None = None) -> tuple[int, Any]:
    """Restores a step directly into the shardings asked for, whatever layout wrote it.

    Args:
      abstract: the tree that was saved, of ShapeDtypeStructs with shardings.
      step: which; by default the newest that can be read. Broken ones that are newer are
        reported and renamed to `STEP.broken` (unless read_only), since nothing older than the
        newest step can be saved.

    Returns:
      The step, and its tree.

    Raises:
      ValueError: no such step; the arrays differ in name, shape or dtype (every difference in
        one message); or no step can be read.
    """
    self.wait()
    found = reading.restore_first(
      self.folder, step, lambda step: self._read(step, abstract), self._agree
    )
    remedy = "nothing is changed" if self._read_only else "it is renamed to end with .broken"
    for line in found.warnings(self.folder, remedy):
      self._warn(line)
    if found.broken and not self._read_only:
      self._set_aside(found.broken)
    return found.step, found.tree

  def read_config(self, step: int | None = None) -> dict[str, Any]:
    """Returns the config of a step, or of the newest whose config can be read.

    Raises:
      ValueError: there is none.
    """
    return self._read_json(CONFIG, step)

  def read_record(self, step: int | None = None) -> dict[str, Any]:
    """Returns the record of a step, or of the newest whose record can be read.

    Raises:
      ValueError: there is none.
    """
    return self._read_json(RECORD, step)

  # ------------------------------ inside ------------------------------

  def _read(self, step: int, abstract: Any) -> Any:
    """Returns the tree of a step; a folder that holds another step than its name is torn."""
    tree = reading.read_arrays(self.folder / str(step), abstract)
    held = tree["step"] if isinstance(tree, dict) and "step" in tree else step
    if int(held) != step:
      raise UnreadableError(f"it holds step {int(held)}")
    return tree

  def _read_json(self, item: str, step: int | None) -> dict[str, Any]:
    found = reading.restore_first(
      self.folder, step, lambda step: reading.read_json(self.folder / str(step), item)
    )
    return found.tree

  def _set_aside(self, broken: Collection[int]) -> None:
    """Renames broken steps, in one move each: nothing is lost should one be whole after all."""
    self._close()
    if jax.process_index() == 0:
      for step in broken:
        aside = self.folder / f"{step}.broken"
        if aside.exists():
          aside.rmtree()
        (self.folder / str(step)).rename(aside)
    self._agree(True)  # the others open the folder after the move
    self._open()

  def _open(self) -> None:
    """Opens Orbax's manager, which lists the steps and removes what killed saves have left."""
    self._remove_temporary()
    # By default every device that holds a copy writes a slice of it, each slice by a program of
    # its own: hundreds to compile at the first save (seconds). Within one process nothing is
    # gained by it, among several only where the slices are large.
    handler = ocp.type_handlers.ArrayHandler(
      use_replica_parallel=jax.process_count() > 1, min_slice_bytes_for_replica_parallel=SLICE_BYTES
    )
    arrays = ocp.PyTreeCheckpointHandler(
      use_compression=False,  # of weights it gains 8 %
      type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, handler)),
    )
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(STATE, ocp.args.PyTreeSave, arrays)
    for item in (CONFIG, RECORD):
      registry.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    options = ocp.CheckpointManagerOptions(
      preservation_policy=self._retention,
      # It would stop at a step whose metadata is broken; what it needs of them is read here.
      lightweight_initialize=True,
    )
    self._manager = ocp.CheckpointManager(self.folder, options=options, handler_registry=registry)
    for step in self.steps():
      with contextlib.suppress(UnreadableError, AttributeError):
        record = reading.read_json(self.folder / str(step), RECORD)
        self._retention.note(step, record.get("metrics") or None)

  def _remove_temporary(self) -> None:
    if jax.process_index() == 0 and self.folder.is_dir():
      for child in self.folder.iterdir():
        if ocp.utils.TMP_DIR_SUFFIX in child.name:
          self._remove(child)

  def _remove(self, folder: epath.Path) -> None:
    """Removes what a save has left; threads of one that has just failed may still write there."""
    for _ in range(50):
      try:
        return folder.rmtree()
      except OSError:
        time.sleep(0.1)
    # It counts as no step, and the next start tries again.
    self._warn(f"WARNING: {folder} is left of a failed save, and could not be removed")
    return None

  def _close(self) -> None:
    if self._manager is not None:
      # What a save ended with has been raised already.
      with contextlib.suppress(Exception):
        self._manager.close()
    self._manager = None

  def _reopen(self) -> None:
    """After a failure: Orbax's manager counts the step as saved, or as being saved for ever."""
    self._close()
    self._open()


class Retention:
  """Which steps are kept: the newest, every n-th, and the best by a metric."""

  def __init__(self, keep: int, every_steps: int, best: str, lower_is_better: bool | None):
    """Sets the rules; see Checkpointer."""
    self._keep, self._every, self._best = keep, every_steps, best
    lower = not best.endswith("accuracy") if lower_is_better is None else lower_is_better
    self._sign = -1.0 if lower else 1.0
    self._values: dict[int, float] = {}

  def note(self, step: int, metrics: Mapping[str, float] | None) -> None:
    """Remembers a step's metric.

    Raises:
      ValueError: the metrics are there, and the one to keep the best by is not.
    """
    if not self._best or metrics is None:
      return
    if self._best not in metrics:
      names = ", ".join(metrics)
      raise ValueError(f"checkpoint.keep_best={self._best!r}: the metrics are {names}")
    if math.isfinite(metrics[self._best]):
      self._values[step] = self._sign * metrics[self._best]

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Answers Orbax, which asks with all steps after each save: keep it?"""
    del context
    there = sorted(checkpoint.step for checkpoint in checkpoints)
    kept = set(there[-self._keep :])
    kept.update(step for step in there if self._every and step % self._every == 0)
    judged = [step for step in there if step in self._values]
    if judged:
      kept.add(max(judged, key=lambda step: (self._values[step], step)))
    return [checkpoint.step in kept for checkpoint in checkpoints]
