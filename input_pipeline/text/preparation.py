"""Fills the store: several processes tokenize every unit of the files that has no shard yet.

Shards are kept below DATA_DIR/prepared/text/, in a folder for each tokenizer and text feature. What
names a shard is the unit that it was made from: path, size, modification time and range. So a
preparation that was killed continues with the next unit, files that are added cost their own
tokens alone, and a file that has changed is tokenized again.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from input_pipeline import catalog, shard_writer, store
from input_pipeline.text import chat_template, documents, tokenizer, worker
from input_pipeline.text import files as text_files
from runtime import exit_codes, files
from runtime.units import clock

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_WAIT_SECONDS = 0.1
ABOUT = "store.json"


def prepare(
  data: Any, spec: str, key: str = "data.files", tick: Callable = store.no_tick
) -> store.Prepared:
  """Returns the documents of files; tokenizes first what is not in the store.

  Args:
    data: the config's `data` section.
    spec: the files, as data.files names them.
    key: the config key of the spec, for messages.
    tick: is called several times a second while something is written, with what is counted, how
      many so far, and a line about it. What it raises ends the preparation; complete shards stay.

  Raises:
    ValueError: no file, no such feature, a tokenizer that cannot be read, more bad records than
      data.max_bad_records, a damaged shard, or a folder that cannot be written; or, as
      `files.ChangedError`, the files are no longer what they were when they were listed.
    RetryableError: a worker process has ended, or failed for a reason that passes.
  """
  encoder = tokenizer.load(tokenizer.resolve(data))
  found = text_files.find(spec, key)
  template, chat = None, None
  if data.name in catalog.RENDERED:
    chat, feature = data.chat_template, ""
    template = chat_template.load(chat, encoder)
  else:
    feature = documents.choose_feature(found, data.text_feature)
  folder = store.folder_of(data, encoder, feature, template.digest if template else "")
  held_out = 0.0 if template is not None or data.evaluation_files else data.evaluation_fraction
  units = documents.units(found, held_out=held_out)
  task = worker.Task(
    folder,
    encoder.name,
    encoder.digest,
    feature,
    data.max_bad_records,
    chat,
    data.name == catalog.PREFERENCES,
    template.digest if template else "",
  )
  with shard_writer.writing_to(folder):
    unchanged = functools.partial(text_files.check_same, spec, found, key)
    fill(task, units, encoder, data.prepare_processes, tick, unchanged)
  ids = [unit.id for unit in units]
  prepared = store.open_prepared(folder, ids, encoder, spec, data.max_bad_records)
  return dataclasses.replace(prepared, units=tuple(units), template=template)


# ------------------------------ filling the store ------------------------------


def fill(
  task: worker.Task,
  units: Sequence[documents.Unit],
  encoder: tokenizer.Tokenizer,
  processes: int,
  tick: Callable = store.no_tick,
  unchanged: Callable[[], None] = lambda: None,
) -> None:
  """Writes the shards that are missing.

  Args:
    task: what is the same for all units.
    units: of the files.
    encoder: the tokenizer of the task.
    processes: data.prepare_processes; 0: one per core, at most one per unit.
    tick: as of `prepare`.
    unchanged: is called when all are written; raises `files.ChangedError` where files have changed
      since they were listed. What was written of these is removed then.

  Raises:
    ValueError: more bad records than may be left out, or what a worker process refuses.
    OSError: a file cannot be read, or a shard not be written.
  """
  if all(store.is_there(task.folder / unit.id) for unit in units):
    return
  with shard_writer.locked(task.folder):
    task.folder.mkdir(parents=True, exist_ok=True)
    shard_writer.remove_partial(task.folder)
    if not (task.folder / ABOUT).exists():
      about = {"tokenizer": encoder.name, "digest": encoder.digest, "feature": task.feature}
      files.replace(task.folder / ABOUT, files.json_text(about, indent=2) + "\n")
    missing = [unit for unit in units if not store.is_there(task.folder / unit.id)]
    progress = _Progress(missing, tick)
    count = min(processes or _cores(), len(missing))
    try:
      if count > 1:
        _in_processes(task, missing, count, progress)
      else:
        _here(task, missing, encoder, progress)
      unchanged()
    except text_files.ChangedError as error:
      # Its name is that of one state of the file, and others may follow under the same name.
      for unit in missing:
        if error.paths.intersection(file.path for file in unit.files):
          (task.folder / unit.id).rmtree(missing_ok=True)
      raise
    except shard_writer.TooManyBadError as error:
      text = store.too_many_bad("in the files so far", error.bad, error.count, task.limit)
      raise ValueError(text) from error
    finally:
      shard_writer.remove_partial(task.folder)
  progress.show()


def _cores() -> int:
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Progress:
  """How far a preparation is."""

  def __init__(self, units: Sequence[documents.Unit], tick: Callable):
    self._tick, self._began = tick, time.monotonic()
    self._sizes = {unit.id: unit.size for unit in units}
    self._total = max(1, sum(self._sizes.values()))
    self._finished = 0
    self._sums: dict[str, tuple[int, ...]] = {}

  def at(self, unit: str, documents_: int, tokens: int, size: int) -> None:
    """Takes note of what of a unit is done; may raise what the tick raises."""
    self._sums[unit] = (documents_, tokens, size)
    self.show()

  def done(self, unit: str) -> None:
    """Takes note of a shard that is complete."""
    self._finished += self._sizes.pop(unit)
    self.show()

  def show(self) -> None:
    """Ticks."""
    sums = self._sums.values()
    count, tokens, _ = (sum(column) for column in zip((0, 0, 0), *sums, strict=True))
    seconds = max(time.monotonic() - self._began, 1e-3)
    under_way = sum(min(self._sums[u][2], s) for u, s in self._sizes.items() if u in self._sums)
    share = min(1.0, (self._finished + under_way) / self._total)
    left = f", {clock(seconds / share - seconds)} left" if share > 0 else ""
    # What is compressed has more bytes than its file.
    percent = min(99.0, 100 * share) if self._sizes else 100.0
    # What matters most comes first: a narrow terminal cuts the end off.
    self._tick(
      "documents",
      count,
      f"{percent:.0f} % of {self._total / 2**20:,.0f} MiB{left}, {count:,} documents, "
      f"{tokens / seconds / 1000:,.0f}k tokens/s",
    )


def _here(task, units, encoder, progress) -> None:
  """Writes the shards in this process."""
  for unit in units:
    worker.write_unit(task, unit, encoder, functools.partial(progress.at, unit.id))
    progress.done(unit.id)


# ------------------------------ worker processes ------------------------------


class _Worker:
  """A worker process, and the unit that it works on."""

  def __init__(self, number: int, task: worker.Task):
    """Starts it."""
    self.number, self.unit = number, None
    self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the object
    self.connection, theirs = connection.Pipe()
    # -P: not the modules of the folder in which the user is.
    command = [sys.executable, "-P", "-m", "input_pipeline.text.worker", str(theirs.fileno())]
    with theirs:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=self._printed,
        stderr=self._printed,
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": str(_ROOT), "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,  # Ctrl-C is for the process that started it
      )
    self._send(task)

  def give(self, unit: documents.Unit) -> None:
    """Assigns a unit to it."""
    self.unit = unit
    self._send(unit)

  def _send(self, message: Any) -> None:
    with contextlib.suppress(ConnectionError):  # it has ended: what it has answered says so
      self.connection.send(message)

  def end(self) -> None:
    """Kills it."""
    self._process.kill()
    self._process.wait()
    self.connection.close()

  def death(self) -> str:
    """Returns how it ended, and the last line that it printed."""
    code = self._process.wait()
    self._printed.seek(0)
    last = self._printed.read().decode(errors="replace").strip().splitlines()[-1:]
    names = {one.value: one.name for one in signal.Signals}  # real-time signals have none
    how = f"signal {-code} ({names.get(-code, 'unknown')})" if code < 0 else f"exit code {code}"
    hint = "; the system does so where memory runs out" if code == -9 else ""
    return f"with {how}{hint}" + (f" ({last[0]})" if last else "")


def _in_processes(task, units, count, progress) -> None:
  """Writes the shards in worker processes, the largest units first.

  Raises:
    RetryableError: a process has ended, or failed for a reason that passes.
  """
  left = collections.deque(sorted(units, key=lambda unit: -unit.size))
  workers: list[_Worker] = []
  try:
    for number in range(count):
      workers.append(_Worker(number, task))
      workers[-1].give(left.popleft())
    working = count
    while working:
      ready = connection.wait([one.connection for one in workers], _WAIT_SECONDS)
      if not ready:
        progress.show()
        continue
      one = next(one for one in workers if one.connection is ready[0])
      try:
        answer = one.connection.recv()
      except (EOFError, OSError):
        raise exit_codes.RetryableError(
          f"worker process {one.number} of {count} has ended {one.death()} while it prepared "
          f"{one.unit.name}; run again: what is complete is kept. With "
          f"data.prepare_processes={max(1, count // 2)} less memory is needed"
        ) from None
      if isinstance(answer, Exception):
        raise answer
      if answer != worker.DONE:
        progress.at(one.unit.id, *answer)
        continue
      progress.done(one.unit.id)
      if left:
        one.give(left.popleft())
      else:
        working -= 1
  finally:
    for one in workers:
      one.end()
