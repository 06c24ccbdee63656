"""Asynchronous saves: Orbax writes the arrays, then the step is committed with its digests.

A step is written to `STEP.saving`. When every process has written its arrays and Orbax has merged
their index, each process syncs its files to the disk and computes their digests; process 0 writes
all digests, syncs the folders and renames the step's to `STEP`, which commits the step. Older steps
are removed once that name is on the disk. In a bucket, where a folder cannot be renamed atomically,
the file of digests commits it.
"""

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping

import humanize
import jax
import orbax.checkpoint as ocp
from etils import epath

from checkpointing import checksums, folder_entries
from checkpointing.consensus import ElsewhereError, Together
from checkpointing.early_checksums import Ahead
from checkpointing.folder_entries import REMOVING, SAVING
from checkpointing.integrity import CONFIG, RECORD, STATE, TOKENIZER
from checkpointing.orbax_logging import quiet
from processes.workdir_lease import Ownership
from runtime import files

# Processes that hold copies of an array share the writing of it in slices of at least this size.
SLICE_BYTES = 2**23
_OWNER = re.compile(r"\.process_(\d+)/")  # the folder of what one process has written
# The settings of an array in TensorStore's errors, a page of JSON.
_SETTINGS = re.compile(r" \[tensorstore_spec='.*?'\](?= \[|$)")
# Timeout of a save, and of the barriers between its stages. It is never reached, however slow the
# disk is: the watchdog ends a run whose `progress` has not changed for too long.
PATIENCE_SECONDS = 7 * 24 * 3600


_UNDER_WAY = re.compile(r"\d+\.(saving|removing|orbax-checkpoint-tmp)")


class SaveError(RuntimeError):
  """A save failed; earlier checkpoints are intact, and the same step may be saved again.

  Attributes:
    step: the step that was to be saved.
    agreed: whether all processes know, so that they can continue; if only this one does, the others
      wait for it in the middle of a save, and the run has to end.
  """

  def __init__(self, step: int, folder: epath.Path, why: str, *, agreed: bool = True):
    """Names the step, the folder and the cause."""
    self.step, self.agreed = step, agreed
    super().__init__(f"saving step {step} to {folder} failed: {why}")


class Writer:
  """Writes the steps of one folder, one at a time; every process has a Writer."""

  def __init__(
    self,
    folder: epath.Path,
    together: Together,
    *,
    committed: Callable[[], None],
    warn: Callable[[str], None],
    owner: Ownership,
    tokenizer: Mapping[str, bytes] | None = None,
  ):
    """Prepares; nothing is written yet.

    Args:
      folder: of the steps.
      together: the processes.
      committed: process 0 calls it in the background after each save.
      warn: called with warnings.
      owner: the right to write; folders of a save carry its number.
      tokenizer: name of a file -> its content; written beside the items of each step.
    """
    assert together.count == jax.process_count(), (together.count, jax.process_count())
    self._folder, self._together = folder, together
    self._committed, self._warn, self._owner = committed, warn, owner
    self._tokenizer = dict(tokenizer or {})
    self._in_place = "://" in str(folder)
    self._orbax: ocp.AsyncCheckpointer | None = None
    self._thread: threading.Thread | None = None
    self._step, self._stage, self._failure = 0, 0, ""
    self._failed = 0  # saves
    self._kept: set[int] = set()  # steps that are not removed, since they contain other files

  @property
  def busy(self) -> bool:
    """Returns whether a save was started and `finish` was not called yet."""
    return self._thread is not None

  @property
  def ended(self) -> bool:
    """Returns whether the save has ended on this process."""
    return self._thread is not None and not self._thread.is_alive()

  def start(self, step: int, items: ocp.args.Composite) -> None:
    """Copies the items, and starts to write them.

    Raises:
      SaveError: it could not be started.
    """
    self._step, self._stage, self._failure = step, 0, ""
    self._together.begin_stages()
    if self._failed and self._together.first:
      self._tidy("removing what an earlier save has left", self.remove_leftovers)
    try:
      if self._orbax is None:
        self._orbax = self._new_orbax()
      self._orbax.save(self._making(self._step), args=items, force=True)
    except Exception as error:  # of any library below; the run can continue without this save
      self._failed += 1
      self.close()
      raise SaveError(step, self._folder, reason(error), agreed=self._together.alone) from error
    self._thread = threading.Thread(target=self._run, name=f"save of step {step}")
    self._thread.start()

  def finish(self) -> None:
    """Waits for the end of the save.

    Raises:
      SaveError: it has failed, on every process.
    """
    if self._thread is not None:
      self._thread.join()
      self._thread = None
      if self._failure:
        self._failed += 1
        raise SaveError(self._step, self._folder, self._failure)

  def close(self) -> None:
    """Ends Orbax's threads; their errors have been raised already."""
    if self._orbax is not None:
      with contextlib.suppress(Exception):
        self._orbax.close()
    self._orbax = None
    if self._failed and self._together.first:
      self._tidy("removing what it has left", self.remove_leftovers)

  def progress(self) -> tuple[object, ...]:
    """Returns a value that changes while a save or a removal makes progress; from any thread.

    It covers files of any process that grow, appear or disappear, and bytes read for digests.

    Raises:
      OSError: the folder cannot be read now.
    """
    step = str(self._step) if self._in_place else ""
    found = {}
    for child in self._folder.iterdir():
      if child.name == step or _UNDER_WAY.match(child.name):
        with contextlib.suppress(OSError):  # renamed or removed meanwhile
          found[child.name] = tuple(sorted(checksums.sizes(child).items()))
    return (tuple(sorted(found.items())), self._stage, checksums.Read.count)

  # ------------------------------ removing ------------------------------

  def remove(self, step: int) -> None:
    """Removes a step; a kill in between leaves nothing that looks like one."""
    self._owner.require()
    path = self._folder / str(step)
    if not folder_entries.only_ours(path):
      if step not in self._kept:
        self._kept.add(step)
        self._warn(f"WARNING: {path} holds more than was saved there, and is not removed")
      return
    if not self._in_place:
      path = path.rename(folder_entries.free(self._folder, f"{step}{REMOVING}"))
      self._sync()  # before its files: a power cut would leave a damaged step
    self._remove_folder(path)

  def remove_leftovers(self) -> None:
    """Removes what killed or failed saves and removals have left.

    Including those of an earlier owner that still writes: its save then cannot be committed.
    """
    self._owner.require()
    for child in self._folder.iterdir():
      if folder_entries.is_leftover(child):
        self._remove_folder(child)

  def in_the_way(self, step: int) -> str:
    """Returns why a step cannot be written under its name; "" if it can."""
    step_folder = self._folder / str(step)
    if self._in_place and folder_entries.only_ours(step_folder):
      return ""  # of a save that was killed; Orbax removes it
    for path in (step_folder, self._making(step)):
      if folder_entries.free(self._folder, path.name) != path and not folder_entries.is_leftover(
        path
      ):
        return f"{path} is there, and was not saved by this application; move it away"
    return ""

  def _remove_folder(self, folder: epath.Path) -> None:
    """Removes a folder; threads of a save that has just failed may still write there."""
    for _ in range(50):
      try:
        return folder.rmtree()
      except FileNotFoundError:
        return None
      except OSError:
        time.sleep(0.1)
    # It does not count as a step, and the next start tries again.
    self._warn(f"WARNING: {folder} is left of a failed save or removal, and could not be removed")
    return None

  # ------------------------------ in the background ------------------------------

  def _run(self) -> None:
    first = self._together.first
    try:
      with self._reading_ahead() as ahead:
        self._orbax.wait_until_finished()
      if first and self._tokenizer:
        self._write_tokenizer(self._making(self._step) / TOKENIZER)
      self._commit(ahead)
    except BaseException as error:  # no caller would see it
      self.close()
      self._failure = self._give_up(error)
      if first:
        self._tidy("removing what it has left", self.remove_leftovers)
    else:
      if first:
        # Until the new step's name is on the disk, a power cut would leave none of the two.
        if self._tidy("waiting for the disk", self._sync):
          self._tidy("removing older steps", self._committed)
        if self._failed:  # threads of a failed save may have written after it was removed
          self._tidy("removing what an earlier save has left", self.remove_leftovers)

  def _write_tokenizer(self, folder: epath.Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in self._tokenizer.items():
      files.replace(folder / name, content)

  def _reading_ahead(self) -> contextlib.AbstractContextManager[Ahead | None]:
    """Computes digests as files appear; not in a bucket, where reading is as slow as writing."""
    if self._in_place:
      return contextlib.nullcontext()
    return Ahead(self._making(self._step), self._together.index)

  def _commit(self, ahead: Ahead | None) -> None:
    """Writes the digests, and renames the folder."""
    folder, together = self._making(self._step), self._together
    there = checksums.sizes(folder) if together.first or folder.exists() else {}

    def early(path: str) -> str:
      return ahead.sha256(path.rpartition("/")[2], there[path]) if ahead else ""

    mine = [*filter(self._is_mine, there)]
    if not self._in_place:
      files.sync(folder / path for path in mine)  # TensorStore does so, Orbax does not
    listed = checksums.compute(folder, mine, early)
    together.share("\n".join(digest.line() for digest in listed))
    self._meet()
    if together.first:
      lines = [line for text in together.shared() for line in text.splitlines()]
      known = {d.path: d for d in [*listed, *map(checksums.parse_line, lines)]}
      rest = checksums.compute(folder, there.keys() - known.keys())
      if self._in_place:
        self._owner.require()
      checksums.write(folder, [*known.values(), *rest])
      if not self._in_place:
        files.sync(inside for inside, _, _ in os.walk(folder, topdown=False))
        # If the owner is replaced after this, there is no folder left to rename.
        self._owner.require()
        folder.rename(self._folder / str(self._step))
    self._meet()

  def _is_mine(self, path: str) -> bool:
    owner = _OWNER.search(path)
    return int(owner[1] if owner else 0) == self._together.index

  def _meet(self, *, key: str = "", timeout_ms: int = PATIENCE_SECONDS * 1000) -> None:
    """A barrier of the processes; Orbax's threads call it too, with their own key."""
    del key  # every process reaches the same barriers in the same order
    self._stage += 1
    self._together.stage(self._stage, timeout_seconds=timeout_ms / 1000)

  def _give_up(self, error: BaseException) -> str:
    """Notifies the others that this process has failed; returns the same reason on all."""
    text = str(error) if isinstance(error, ElsewhereError) else reason(error)
    if self._together.alone or isinstance(error, ElsewhereError):
      return text
    try:
      self._together.fail(text, self._stage + 1)
      self._meet()
    except ElsewhereError as failed:
      return str(failed)
    except Exception as also:  # reported with the first
      return f"{text} ({reason(also)})"
    raise AssertionError("a process that has failed was not heard")

  def _tidy(self, what: str, do: Callable[[], None]) -> bool:
    """Cleans up after a save, whether it has failed or not; errors become warnings.

    Returns whether there was none.
    """
    try:
      do()
      return True
    except Exception as error:  # what is left over does no harm
      step = f"{self._folder}, after the save of step {self._step}"
      self._warn(f"WARNING: {step}: {what} failed: {reason(error)}")
      return False

  def _sync(self) -> None:
    """Waits until the names of the steps are on the disk."""
    if not self._in_place:
      files.sync([self._folder])

  def _making(self, step: int) -> epath.Path:
    """Returns the folder that the step is written to.

    After a failure it is a different one: TensorStore's threads may still write to the previous
    one, and recreate it after its removal. The owner's number in its name keeps owners apart.
    """
    if self._in_place:
      return self._folder / str(step)
    marks = [f"-{number}" for number in (self._owner.number, self._failed) if number]
    return self._folder / f"{step}{SAVING}{''.join(marks)}"

  def _new_orbax(self) -> ocp.AsyncCheckpointer:
    """Returns an Orbax checkpointer for the items of a step."""
    # By default every device with a replica writes a slice of it, and each slice is a separate
    # program: the first save compiles hundreds of them (seconds). Within one process that gains
    # nothing, among several only if the slices are large.
    handler = ocp.type_handlers.ArrayHandler(
      use_replica_parallel=jax.process_count() > 1, min_slice_bytes_for_replica_parallel=SLICE_BYTES
    )
    arrays = ocp.PyTreeCheckpointHandler(
      use_compression=False,  # it saves only 8 % of the size of weights
      type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, handler)),
    )
    quiet()
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(STATE, ocp.args.PyTreeSave, arrays)
    for item in (CONFIG, RECORD):
      registry.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    return ocp.AsyncCheckpointer(
      ocp.CompositeCheckpointHandler(handler_registry=registry),
      # Orbax's own barriers do not handle a process whose part has failed.
      async_options=ocp.options.AsyncOptions(
        timeout_secs=PATIENCE_SECONDS, barrier_sync_fn=self._meet
      ),
    )


def room(folder: epath.Path, needed: int) -> str:
  """Returns why a checkpoint of this many bytes cannot be saved; "" if it can.

  Checked before Orbax starts: it would copy the arrays first, and if it cannot create a folder, the
  other processes wait for minutes.
  """
  if "://" in str(folder):  # a bucket has no size
    return ""
  try:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < needed:
      sizes = [humanize.naturalsize(size, binary=True) for size in (free, needed)]
      return f"{sizes[0]} free there, and a checkpoint needs {sizes[1]}"
    probe = folder / f"0{SAVING}-{secrets.token_hex(4)}"
    probe.mkdir()
    probe.rmdir()
  except OSError as error:
    return reason(error)
  return ""


def reason(error: BaseException) -> str:
  """Returns the message of an error in one line, without the settings of its array."""
  text = f"{type(error).__name__}: {' '.join(str(error).split())}"
  text = _SETTINGS.sub("", text)
  return text if len(text) <= 1000 else f"{text[:500]} ... {text[-500:]}"
