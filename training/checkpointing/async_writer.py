"""Asynchronous saves: Orbax writes the arrays, then the step is committed with its digests.

A step is written to `STEP.saving`. When every process has written its arrays and Orbax has merged
their index, each process syncs its files to the disk and computes their digests; process 0 writes
all digests, syncs the folders and renames the step's to `STEP`, which commits the step. Older steps
are removed once that name is on the disk. In a bucket, where a folder cannot be renamed atomically,
the file of digests commits it.

Digests are begun while other files are still being written, in the time in which the save waits for
the disk. TensorStore appends to a file of arrays until it has its final size, and never writes to
it again: some files under a name that ends with `.__lock`, others under their own. So a file is
read once its size has stopped growing, and its digest counts only where as many bytes were read as
the file has in the end; else the file is read again, later. Digests are looked up by the file's
random name, since the folders above it are renamed when the save is complete.

A save that fails is one line instead of hundreds. For each of its files that cannot be written
Orbax logs a traceback, and so does asyncio, in which it runs, for those whose result was never
read. SaveError has what they say. Both are recognized by the code that they come from, not by their
wording.
"""

import asyncio
import concurrent.futures
import contextlib
import glob
import logging
import os
import re
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from etils import epath

from processes.workdir_lease import Ownership
from runtime import files
from training.checkpointing import integrity
from training.checkpointing.consensus import ElsewhereError, Together
from training.checkpointing.integrity import (
  CONFIG,
  RECORD,
  REMOVING,
  SAVING,
  STATE,
  TOKENIZER,
  one_line,
)

# ------------------------------ Orbax's log lines ------------------------------

_ORBAX = os.path.dirname(ocp.__file__) + os.sep
# What a TensorStore thread calls at the end of a write that a coroutine waits for.
_TO_A_LOOP = asyncio.BaseEventLoop.call_soon_threadsafe.__code__
_installed = False


class _Quiet(logging.Filter):
  """Lets through everything except errors of Orbax."""

  def filter(self, record: logging.LogRecord) -> bool:
    """Returns whether a line is to be printed."""
    if record.levelno < logging.ERROR or absl_logging.get_verbosity() >= absl_logging.INFO:
      return True
    raised = record.exc_info[2] if record.exc_info else None
    if record.name == "asyncio" and record.exc_info and raised is None:
      return False  # never raised in Python: TensorStore has set it, and it was never read
    files = [record.pathname, *(frame.filename for frame in traceback.extract_tb(raised))]
    return not any(file.startswith(_ORBAX) for file in files)


def quiet_orbax() -> None:
  """Silences Orbax's logs of failures that our own errors report, unless --debug is set."""
  global _installed
  if _installed:
    return
  _installed = True
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_Quiet())
  hook = sys.unraisablehook

  def unless_late(unraisable: Any) -> None:
    raised = unraisable.exc_traceback
    code = None if raised is None else raised.tb_frame.f_code
    # A write, or an open, that ends after another has failed, when its event loop is closed.
    late = code is _TO_A_LOOP
    # A read that is given up since another has failed: Orbax makes an error of the closing.
    given_up = isinstance(getattr(unraisable.exc_value, "__cause__", None), GeneratorExit)
    if not late and not (given_up and code is not None and code.co_filename.startswith(_ORBAX)):
      hook(unraisable)

  sys.unraisablehook = unless_late


# ------------------------------ early checksums ------------------------------

_LOCK = ".__lock"
_LEAST_BYTES = 2**20  # smaller files are read quickly, later
_PAUSE_SECONDS = 0.01


class EarlyChecksums:
  """A context manager that reads the files of one process as they appear.

  A file that cannot be read, or is renamed at that moment, is left for later.
  """

  def __init__(self, making: epath.Path, process: int):
    """Takes the folder of the step (Orbax adds to its name) and the process that writes."""
    self._pattern = os.path.join(
      f"{glob.escape(str(making))}*", "*", f"ocdbt.process_{process}", "d", "*"
    )
    self._reading: dict[str, concurrent.futures.Future] = {}
    self._sizes: dict[str, int] = {}  # at the last look
    self._over = threading.Event()
    self._pool = concurrent.futures.ThreadPoolExecutor(integrity.THREADS)
    self._thread = threading.Thread(target=self._watch, name="digests")

  def __enter__(self) -> "EarlyChecksums":
    """Begins."""
    self._thread.start()
    return self

  def __exit__(self, *error) -> None:
    """Stops looking for files; finishes those being read."""
    self._over.set()
    self._thread.join()
    self._pool.shutdown(wait=False)

  def sha256(self, name: str, size: int) -> str:
    """Returns the digest of a file by its name; "" if it was not read with this size."""
    if name not in self._reading:
      return ""
    with contextlib.suppress(OSError):
      found, value = self._reading[name].result()
      if found == size:
        return value
    return ""

  def _watch(self) -> None:
    while not self._over.wait(_PAUSE_SECONDS):
      self._look()

  def _look(self) -> None:
    """Begins to read the files that have not grown since the last look."""
    for path in glob.iglob(self._pattern):
      name = os.path.basename(path)
      if name in self._reading or name.endswith(_LOCK):
        continue
      with contextlib.suppress(OSError):
        before, self._sizes[name] = self._sizes.get(name), os.path.getsize(path)
        if before == self._sizes[name] >= _LEAST_BYTES:
          self._reading[name] = self._pool.submit(integrity.read_through, epath.Path(path))


# ------------------------------ saving ------------------------------

# Processes that hold copies of an array share the writing of it in slices of at least this size.
SLICE_BYTES = 2**23
_OWNER = re.compile(r"\.process_(\d+)/")  # the folder of what one process has written
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
  """Writes the steps of one folder, one at a time; every process has a Writer.

  Attributes:
    step: the newest one whose save was started.
    seconds: from the start of each save to its commit.
  """

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
    self.step, self._stage, self._failure = 0, 0, ""
    self.seconds: list[float] = []
    self._began = 0.0
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
    self.step, self._stage, self._failure = step, 0, ""
    self._began = time.monotonic()
    self._together.begin_stages()
    if self._failed and self._together.first:
      self._tidy("removing what an earlier save has left", self.remove_leftovers)
    try:
      if self._orbax is None:
        self._orbax = self._new_orbax()
      self._orbax.save(self._making(self.step), args=items, force=True)
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
        raise SaveError(self.step, self._folder, self._failure)

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
    step = str(self.step) if self._in_place else ""
    found = {}
    for child in self._folder.iterdir():
      if child.name == step or _UNDER_WAY.match(child.name):
        with contextlib.suppress(OSError):  # renamed or removed meanwhile
          found[child.name] = tuple(sorted(integrity.file_sizes(child).items()))
    return (tuple(sorted(found.items())), self._stage, integrity.Read.count)

  # ------------------------------ removing ------------------------------

  def remove(self, step: int) -> None:
    """Removes a step; a kill in between leaves nothing that looks like one."""
    self._owner.require()
    path = self._folder / str(step)
    if not integrity.only_ours(path):
      if step not in self._kept:
        self._kept.add(step)
        self._warn(f"WARNING: {path} holds more than was saved there, and is not removed")
      return
    if not self._in_place:
      path = path.rename(integrity.free_name(self._folder, f"{step}{REMOVING}"))
      self._sync()  # before its files: a power cut would leave a damaged step
    self._remove_folder(path)

  def remove_leftovers(self) -> None:
    """Removes what killed or failed saves and removals have left.

    Including those of an earlier owner that still writes: its save then cannot be committed.
    """
    self._owner.require()
    for child in self._folder.iterdir():
      if integrity.is_leftover(child):
        self._remove_folder(child)

  def in_the_way(self, step: int) -> str:
    """Returns why a step cannot be written under its name; "" if it can."""
    step_folder = self._folder / str(step)
    if self._in_place and integrity.only_ours(step_folder):
      return ""  # of a save that was killed; Orbax removes it
    for path in (step_folder, self._making(step)):
      if integrity.free_name(self._folder, path.name) != path and not integrity.is_leftover(path):
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
        self._write_tokenizer(self._making(self.step) / TOKENIZER)
      self._commit(ahead)
      self.seconds.append(time.monotonic() - self._began)
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

  def _reading_ahead(self) -> contextlib.AbstractContextManager[EarlyChecksums | None]:
    """Computes digests as files appear; not in a bucket, where reading is as slow as writing."""
    if self._in_place:
      return contextlib.nullcontext()
    return EarlyChecksums(self._making(self.step), self._together.index)

  def _commit(self, ahead: EarlyChecksums | None) -> None:
    """Writes the digests, and renames the folder."""
    folder, together = self._making(self.step), self._together
    there = integrity.file_sizes(folder) if together.first or folder.exists() else {}

    def early(path: str) -> str:
      return ahead.sha256(path.rpartition("/")[2], there[path]) if ahead else ""

    mine = [*filter(self._is_mine, there)]
    if not self._in_place:
      files.sync(folder / path for path in mine)  # TensorStore does so, Orbax does not
    listed = integrity.compute_digests(folder, mine, early)
    together.share("\n".join(digest.line() for digest in listed))
    self._meet()
    if together.first:
      lines = [line for text in together.shared() for line in text.splitlines()]
      known = {d.path: d for d in [*listed, *map(integrity.parse_line, lines)]}
      rest = integrity.compute_digests(folder, there.keys() - known.keys())
      if self._in_place:
        self._owner.require()
      integrity.write_digests(folder, [*known.values(), *rest])
      if not self._in_place:
        files.sync(inside for inside, _, _ in os.walk(folder, topdown=False))
        # If the owner is replaced after this, there is no folder left to rename.
        self._owner.require()
        folder.rename(self._folder / str(self.step))
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
      step = f"{self._folder}, after the save of step {self.step}"
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
    quiet_orbax()
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
  try:
    files.require_space(folder, needed, "a checkpoint", "give another --workdir")
    if files.is_local(folder):
      probe = folder / f"0{SAVING}-{secrets.token_hex(4)}"
      probe.mkdir()
      probe.rmdir()
  except (OSError, ValueError) as error:
    return reason(error)
  return ""


def reason(error: BaseException) -> str:
  """Returns the message of an error of a save, in one line."""
  return one_line(error, most=1000)
