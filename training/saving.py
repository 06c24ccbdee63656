"""Saving during training: asynchronous, and not ended by a save that fails."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from processes.watchdog import SAVING, Watchdog
from training.checkpointing.async_writer import SaveError
from training.restore import Start
from training.state import State


class Saver:
  """Saves the states of a run, and knows which step was saved last.

  Attributes:
    step: of the newest save.
    retry: a save has failed and is tried again after the next step.
  """

  def __init__(
    self,
    start: Start,
    config: Mapping[str, Any],
    watch: Watchdog,
    committed: Callable[[int], None] = lambda step: None,
  ):
    """Takes where the run starts, and the config that is stored with each step.

    Args:
      start: where the run starts.
      config: stored with each step.
      watch: of this process.
      committed: is called with each step that is saved, once its save is complete.
    """
    self.step, self.retry = start.step, False
    self._committed, self._writing = committed, 0  # the step whose save is not known to be complete
    self._checkpointer, self._config, self._watch = start.checkpointer, config, watch
    self._part = start.saved

  def check(self) -> None:
    """Raises SaveError if a save that was started before has failed."""
    with self._noticed():
      self._checkpointer.check()

  def save(
    self,
    step: int,
    state: State,
    record: Mapping[str, Any],
    *,
    before: Callable[[], None],
    **ranked_by: Any,
  ) -> None:
    """Starts to save a step.

    Args:
      step: its number.
      state: after it.
      record: JSON that is stored with it.
      before: checks the state first, and raises where it must not be saved.
      **ranked_by: `metrics` and `metrics_over`, as `Checkpointer.save` takes them.

    Raises:
      SaveError: this save or the one before it has failed.
    """
    self._phase(f"saving step {step}")
    before()
    part = self._part(state)
    with self._noticed():
      self._checkpointer.wait()
    self._checkpointer.save(step, part, config=self._config, record=record, **ranked_by)
    self.step = self._writing = step

  def wait(self) -> None:
    """Waits until the last save is complete; raises SaveError if it has failed."""
    self._phase("waiting for the last save")
    with self._noticed():
      self._checkpointer.wait()

  @contextlib.contextmanager
  def _noticed(self) -> Iterator[None]:
    """Calls `committed` if the save that was running is complete after the block."""
    try:
      yield
    except SaveError:
      self._writing = 0
      raise
    if self._writing and not self._checkpointer.saving:
      step, self._writing = self._writing, 0
      self._committed(step)

  def roll_back(self, step: int) -> None:
    """Continues from an older step, which is saved; a failure after it no longer matters."""
    self.step, self.retry = step, False

  @contextlib.contextmanager
  def tolerating_failure(self, instead: str, note: Callable[[str], None]) -> Iterator[None]:
    """Reports a save that has failed, and continues; `instead` says with what."""
    try:
      yield
    except SaveError as error:
      if not error.agreed:  # the others wait in the middle of it; a restart resumes from the last
        raise
      self.retry = True
      note(f"WARNING: {error}; training continues, and {instead}")

  def _phase(self, label: str) -> None:
    """Enters a phase that may take long as long as the save makes progress."""
    self._watch.at(label, SAVING, progress=self._checkpointer.progress)
