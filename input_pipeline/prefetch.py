"""Prefetches batches while the devices compute."""

import collections
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

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
    self._depth = depth
    self._ready = collections.deque()
    self._error = None
    self._closed = False
    self._changed = threading.Condition()
    # A daemon: a read that never returns must not keep the process alive.
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def _run(self):
    for step in self._steps:
      with self._changed:
        self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
        if self._closed:
          return
      try:
        batch = self._make_batch(step)
      except BaseException as error:  # the caller's to handle, whatever it is
        with self._changed:
          self._error = error
          self._changed.notify_all()
        return
      with self._changed:
        if self._closed:  # no longer needed: free its device memory
          return
        self._ready.append(batch)
        self._changed.notify_all()

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
    begin = time.perf_counter()
    with self._changed:
      if step != self._next or step not in self._steps:
        raise ValueError(
          f"step {step} was asked for, but the next one is {self._next} of"
          f" {self._steps.start}..{self._steps.stop - 1}"
        )

      def over():
        return self._ready or self._error is not None or self._closed

      while not self._changed.wait_for(over, _CANCEL_PERIOD_SECONDS if cancelled else None):
        if cancelled():
          break
      self.wait_seconds += time.perf_counter() - begin
      if self._closed:
        raise RuntimeError(f"step {step} was asked for, but the prefetcher is closed")
      if not self._ready:
        if self._error is None:
          return None
        raise self._error
      self._next += 1
      self._changed.notify_all()
      return self._ready.popleft()

  def close(self, timeout_seconds: float = 5.0):
    """Ends the thread; waits for a running make_batch, but no longer than this."""
    with self._changed:
      self._closed = True
      self._ready.clear()
      self._changed.notify_all()
    self._thread.join(timeout_seconds)

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self.close()
