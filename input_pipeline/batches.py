"""The global batch: the rows of each step, placed on the devices; prefetched while they compute."""

import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from etils import epy

from input_pipeline.order import EpochOrder
from input_pipeline.position import Position
from input_pipeline.ramp import Ramp
from input_pipeline.source import Source, UnreadableError, among, few, spread
from runtime import transfers

# ------------------------------ rows that are cut ------------------------------


def cut_rows(source: Source, pieces: int) -> Source:
  """Returns a source of which each row is one of `pieces` equal parts of a row, in their order.

  Row n is part n % pieces of row n // pieces. Documents are numbered from 0 within it.

  Args:
    source: whose fields all have the tokens as the first dim of a row.
    pieces: divides the tokens of a row.
  """
  fields = {
    name: ((shape[0] // pieces, *shape[1:]), dtype)
    for name, (shape, dtype) in source.fields.items()
  }

  def read(numbers: Sequence[int]) -> dict[str, np.ndarray]:
    rows, parts = np.divmod(np.asarray(numbers, np.int64), pieces)
    needed, place = np.unique(rows, return_inverse=True)
    found = {}
    for name, array in source.read(needed).items():
      divided = array.reshape(len(needed), pieces, -1, *array.shape[2:])
      found[name] = divided[place, parts]
    if "segments" in found:
      found["segments"] = found["segments"] - found["segments"][:, :1]
    return found

  # Bad rows stay those of the source: which rows a step takes is decided by their numbers there.
  return dataclasses.replace(
    source,
    rows=pieces * len(source),
    fields=fields,
    read=read,
    origins=lambda number: source.origins(number // pieces),
  )


# ------------------------------ batches ------------------------------

with epy.lazy_imports():  # `prepare` opens data without JAX; few data are mixtures
  import jax

  from input_pipeline import mixture

_PADDING = -1  # the row number of padding


class TrainingBatches:
  """Batches without end: epochs one after the other, each in an order of its own, cut every B rows.

  Of a mixture, the rows of all sources in their order by weight, each source in its own epochs.

  What `batch(step)` holds depends on the source's rows, the seed, the position and the step, and on
  nothing else: not on the mesh, the processes, or the steps before. The position says which batch
  sizes the run has had, and which rows it skips; without one, they are those of the ramp. An
  epoch's remainder opens a batch that the next epoch fills, so each epoch shows every row once.
  """

  def __init__(self, source, *, global_batch_size, seed, shuffle=True, ramp=None, repeats=1):
    """Prepares nothing yet.

    Args:
      source: a source.Source.
      global_batch_size: B, rows per batch over all processes.
      seed: int, at least 0; the order of the rows.
      shuffle: False keeps the source's order in each epoch.
      ramp: a ramp.Ramp: the batches of the first steps, where they have another shape.
      repeats: how often each row is there, one after the other: rows are counted with these.

    Raises:
      ValueError: the source is empty or has fewer rows than a batch.
    """
    _check_not_empty(source)
    most = len(source) * repeats
    if not 1 <= global_batch_size <= most:
      each = f", each {repeats} times" if repeats > 1 else ""
      raise ValueError(
        f"{source.name} has {len(source)} rows{each}, but a batch takes data.global_batch_size="
        f"{global_batch_size}; set it between 1 and {most}, or take a larger data set"
      )
    self.source = source
    self.global_batch_size, self._repeats = global_batch_size, repeats
    self.ramp = ramp or Ramp.constant(global_batch_size)
    self._bad = np.array(source.bad.rows, np.int64)
    if source.parts:
      self.order = mixture.MixtureOrder(source.parts, source.stages, seed, shuffle=shuffle)
    else:
      self.order = EpochOrder(len(source), seed, shuffle=shuffle)
    # Only such a set has the same rows at every step; caching its batch avoids reading it again.
    constant = ramp in (None, Ramp.constant(global_batch_size))
    whole = global_batch_size == most and not source.parts
    self._always_the_same = not shuffle and whole and constant
    self._last = None

  @functools.cached_property
  def abstract(self):
    """Field name -> jax.ShapeDtypeStruct of the global array of a batch."""
    return _abstract(self.source, self.global_batch_size)

  def row_ids(self, step, position=None):
    """Returns the numbers of the rows of step `step` (from 0), int64 [B].

    Args:
      step: int, at least 0.
      position: a Position; None: that of a run which has always had this ramp.
    """
    if step < 0:
      raise IndexError(f"{self.source.name}: step {step} is below 0")
    position = position or Position.of(self.ramp.rows)
    ids_B = np.concatenate([self._ids(*rows, position) for rows in position.rows(step)])
    assert len(ids_B) == position.batch(step), (position, step)
    return ids_B

  def _ids(self, first, stop, position):
    """Returns the rows of the source that are numbers `first` to `stop` - 1 over all epochs."""
    count = self._repeats
    ids = self.order.ids(first // count, -(-stop // count), position)
    return np.repeat(ids, count)[first % count :][: stop - first]

  def rows(self, step, position=None):
    """Returns a source and the numbers in it of the rows of a step's batch, which may be cut."""
    source, pieces, ids_B = self.source, self.ramp.shape(step).pieces, self.row_ids(step, position)
    return (cut_rows(source, pieces), _parts(ids_B, pieces)) if pieces > 1 else (source, ids_B)

  def batch(self, step, shardings, position=None):
    """Returns the batch of step `step` (from 0) on the devices.

    Args:
      step: int, at least 0.
      shardings: field name -> jax.sharding.Sharding of the global array.
      position: a Position whose batch size at this step is the ramp's.

    Returns:
      Field name -> global jax.Array, as `abstract` describes it; in the stages of a ramp with fewer
      rows, or with more rows of fewer tokens. Where the data set is exactly one
      unshuffled batch, the same arrays each time.

    Raises:
      UnreadableError: a row cannot be read, or all rows of this batch are in the source's list of
        bad rows.
    """
    ids_B = self.row_ids(step, position)
    if self._always_the_same and self._last is not None:
      last_ids_B, last_shardings, arrays = self._last
      same = np.array_equal(last_ids_B, ids_B) and last_shardings == shardings
      # A step that donates its batch deletes the arrays.
      if same and not any(a.is_deleted() for a in arrays.values()):
        return arrays
    self._check_some_can_be_read(ids_B, step)
    source, ids_B = self.rows(step, position)
    arrays = _assemble(source, ids_B, _abstract(source, len(ids_B)), shardings)
    if self._always_the_same:
      self._last = (ids_B, dict(shardings), arrays)
    return arrays

  def _check_some_can_be_read(self, ids_B, step):
    """Raises UnreadableError for a batch of only bad rows, whose mean loss would be 0 / 0.

    Every process compares the ids of the global batch with the same list, so all raise it.
    """
    if among(ids_B, self._bad).all():
      raise UnreadableError(
        f"{self.source.name}: the batch of step {step + 1} has no row that can be read:"
        f" {few(sorted(set(ids_B.tolist())))} ({self.source.bad.why}); take more rows per batch"
        f" than data.global_batch_size={self.global_batch_size}, let data.shuffle spread the bad"
        " rows, or repair the data set",
        {},
      )


class EvaluationBatches:
  """A split once, in a random order; the last batch is filled up with rows of weight 0.

  The first batches are a simple random sample of the split, so that an evaluation of them and one
  of all estimate the same. The order is a function of the number of rows alone: each evaluation of
  the same number of rows takes the same ones, on any mesh and with any seed.

  No batch holds rows of two sources of a mixture: the first batch of each comes first, then the
  second of each, and so on.
  """

  def __init__(self, source, *, global_batch_size, steps=0):
    """Prepares nothing yet.

    Args:
      source: a source.Source.
      global_batch_size: B, rows per batch over all processes.
      steps: the fewest batches of each source that an evaluation takes; 0 for all.

    Raises:
      ValueError: the source is empty, or none of the rows of so many batches can be read.
    """
    _check_not_empty(source)
    if global_batch_size < 1:
      raise ValueError(f"{source.name}: a batch of {global_batch_size} rows; set at least 1")
    self.source = source
    self.global_batch_size = global_batch_size
    sizes = [part.rows for part in source.parts] or [len(source)]
    self._offsets = np.cumsum([0, *sizes])
    self._orders = [EpochOrder(size, seed=0) for size in sizes]
    batches = [
      (number, part, first, min(first + global_batch_size, size))
      for part, size in enumerate(sizes)
      for number, first in enumerate(range(0, size, global_batch_size))
    ]
    self._batches = sorted(batches)
    self._check_some_can_be_read(steps)

  def _check_some_can_be_read(self, steps):
    bad = np.array(self.source.bad.rows, np.int64)
    if len(bad) and all(among(self._drawn(i), bad).all() for i in range(self.count(steps))):
      rows = self.examples(self.count(steps))
      raise ValueError(
        f"{self.source.name}: none of the {rows} rows that an evaluation of {steps} batches draws"
        f" can be read ({self.source.bad.why}); set evaluation.steps (or final_steps) to 0 or more"
        f" than {steps}"
      )

  def __len__(self):
    """Returns the number of batches that cover the split."""
    return len(self._batches)

  def count(self, steps):
    """Returns how many batches the first `steps` of each source are; 0 steps are all."""
    return sum(1 for number, *_ in self._batches if number < steps) if steps else len(self)

  def part(self, index):
    """Returns the name of the source of batch `index`; "" where there is only one."""
    return self.source.parts[self._batches[index][1]].name if self.source.parts else ""

  def rows(self, index):
    """Returns the number of rows of the split in batch `index`."""
    _, _, first, stop = self._batches[index]
    return stop - first

  def examples(self, count):
    """Returns the number of rows of the split in the first `count` batches."""
    return sum(map(self.rows, range(count)))

  @functools.cached_property
  def abstract(self):
    """Field name -> jax.ShapeDtypeStruct of the global array of a batch."""
    return _abstract(self.source, self.global_batch_size)

  def _drawn(self, index):
    """Returns the numbers of the rows of batch `index`, without padding."""
    _, part, first, stop = self._batches[index]
    return self._offsets[part] + self._orders[part].ids(first, stop)

  def row_ids(self, index):
    """Returns the numbers of the rows of batch `index`, int64 [B]; -1 for padding."""
    if not 0 <= index < len(self):
      raise IndexError(f"{self.source.name}: batch {index} of {len(self)}")
    ids = self._drawn(index)
    return np.pad(ids, (0, self.global_batch_size - len(ids)), constant_values=_PADDING)

  def batch(self, index, shardings):
    """Returns batch `index` on the devices; arguments and result as of TrainingBatches.batch."""
    return _assemble(self.source, self.row_ids(index), self.abstract, shardings)


def _check_not_empty(source):
  if not len(source):
    raise ValueError(f"{source.name} is empty (0 rows); take another split or data set")


def _parts(ids_B, pieces):
  """Returns the numbers of the parts of rows that are cut, int64 [B * pieces]."""
  return (ids_B[:, None] * pieces + np.arange(pieces)).reshape(-1)


def _abstract(source, global_batch_size):
  return {
    field: jax.ShapeDtypeStruct((global_batch_size, *shape), jax.dtypes.canonicalize_dtype(dtype))
    for field, (shape, dtype) in source.fields.items()
  }


def _assemble(source, ids_B, abstract, shardings):
  """Returns the global arrays of the rows `ids_B`, reading only those of this process's devices."""
  assert shardings.keys() == abstract.keys(), (sorted(shardings), sorted(abstract))
  here_B = np.zeros(len(ids_B), bool)
  for field, array in abstract.items():
    for index in shardings[field].addressable_devices_indices_map(array.shape).values():
      here_B[index[0]] = True
  local_rows = _read_padded(source, ids_B[here_B])
  # The index of a row of the batch among those read. A device's rows are contiguous in the batch,
  # and all of them are read here, so they are contiguous among those read too.
  position_B = np.cumsum(here_B) - 1

  def shards_of(field):
    def shard(index):
      start, stop, _ = index[0].indices(len(ids_B))
      first = position_B[start]
      return local_rows[field][(slice(first, first + stop - start), *index[1:])]

    return shard

  return transfers.placed(
    lambda: {
      field: jax.make_array_from_callback(array.shape, shardings[field], shards_of(field))
      for field, array in abstract.items()
    }
  )


def _read_padded(source, ids):
  """Reads rows; padding is 0 in every field, including its weight."""
  there = ids != _PADDING
  return spread(source.read(ids[there]), there)


# ------------------------------ prefetched ------------------------------

T = TypeVar("T")

_CANCEL_PERIOD_SECONDS = 0.1


class Prefetcher(Generic[T]):
  """Calls `make_batch(step)` for start, start+1, ..., stop-1 in a thread, `depth` batches ahead.

  Use it as a context manager, or call close(). What the thread raises, get() raises, at the step
  it happened in.

  Attributes:
    wait_seconds: float, the total time that get() has waited.
  """

  def __init__(
    self,
    make_batch: Callable[[int], T],
    *,
    start: int,
    stop: int,
    depth: int = 2,
    name: str = "prefetch",
  ):
    """Starts the thread, of this name. Raises ValueError if depth is below 1."""
    if depth < 1:
      raise ValueError(f"prefetch depth={depth}; it must be at least 1 batch")
    self.wait_seconds = 0.0
    self._make_batch = make_batch
    self._steps = range(start, stop)
    self._next = start  # the step that get() returns next
    self._free = threading.Semaphore(depth)
    self._ready: queue.SimpleQueue = queue.SimpleQueue()  # of (batch, error)
    self._closed = False
    # A daemon: a read that never returns must not keep the process alive.
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def _run(self):
    for step in self._steps:
      self._free.acquire()
      if self._closed:
        return
      try:
        self._ready.put((self._make_batch(step), None))
      except BaseException as error:  # the caller's to handle, whatever it is
        self._ready.put((None, error))
        return

  def get(self, step: int, cancelled: Callable[[], bool] | None = None) -> T | None:
    """Returns the batch of `step`, waiting for it. Steps come in order, each once.

    Args:
      step: its number.
      cancelled: polled while waiting; once it returns True, None is returned.

    Raises:
      ValueError: `step` is not the next one.
      RuntimeError: the prefetcher is closed.
      Exception: what make_batch raised for this step.
    """
    if step != self._next or step not in self._steps:
      raise ValueError(
        f"step {step} was asked for, but the next one is {self._next} of"
        f" {self._steps.start}..{self._steps.stop - 1}"
      )
    begin, found = time.perf_counter(), None
    while found is None and not self._closed:
      try:
        found = self._ready.get(timeout=_CANCEL_PERIOD_SECONDS)
      except queue.Empty:
        if cancelled and cancelled():
          break
    self.wait_seconds += time.perf_counter() - begin
    if self._closed:
      raise RuntimeError(f"step {step} was asked for, but the prefetcher is closed")
    if found is None:
      return None
    batch, error = found
    if error is not None:
      self._ready.put(found)  # whoever asks again is told again
      raise error
    self._next += 1
    self._free.release()
    return batch

  def close(self, timeout_seconds: float = 5.0):
    """Ends the thread; waits for a running make_batch, but no longer than this."""
    self._closed = True
    self._free.release()
    self._thread.join(timeout_seconds)
    self._ready = queue.SimpleQueue()  # batches that nobody needs any more hold device memory

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self.close()
