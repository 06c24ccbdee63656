"""Agreement of the processes of a run about a checkpoint; a single process agrees with itself.

Two kinds of barrier: `exchange`, of the main threads, at points that all reach in the same order;
and the stages of a save, where threads in the background wait for one another. A process whose part
of a save has failed says so and still reaches the next stage, so that none waits for it there:
whoever passes a stage looks whether any has failed, and all leave the save at the same stage.
"""

import time

from processes.coordination import Group

# Names of barriers and messages, the same on every process.
_POINT, _FAILED, _SHARED = "checkpoint", "save_failed", "save_shared"


class ElsewhereError(RuntimeError):
  """The part of another process has failed."""


class Together:
  """One process's side of the barriers; several of these may be used, one after another."""

  def __init__(self, group: Group | None = None, *, timeout_seconds: float = 300.0):
    """Takes the processes; None: this one alone.

    Args:
      group: the processes.
      timeout_seconds: how long the others may take to reach an exchange; and four times as long
        as this object exists, since disks were read before, which may be slower for others.
    """
    self._group = group or Group()
    self._timeout, self._began = timeout_seconds, time.monotonic()
    self.index, self.count = self._group.index, self._group.count

  @property
  def alone(self) -> bool:
    """Returns whether there is no other process."""
    return self._group.alone

  @property
  def first(self) -> bool:
    """Returns whether this is the process that removes and renames."""
    return self._group.first

  def all_true(self, value: bool, *, timeout_seconds: float | None = None) -> bool:
    """Returns whether `value` is true on every process; all call it."""
    timeout = timeout_seconds or self._patience()
    return self._group.all_true(_POINT, value, timeout_seconds=timeout)

  def _patience(self) -> float:
    """Returns how long the others may take: if this process took long, they may take longer."""
    return self._timeout + 4 * (time.monotonic() - self._began)

  def exchange(self, text: str, *, timeout_seconds: float | None = None) -> list[str]:
    """Returns the texts of all processes, by index; all call it.

    Args:
      text: of this process.
      timeout_seconds: how long the others may take to reach it; None: the default.
    """
    timeout = timeout_seconds or self._patience()
    value = {"text": text} if text else {}
    found = self._group.gather(_POINT, value, timeout_seconds=timeout, sparse=True)
    return [one["text"] if one else "" for one in found]

  def from_first(self, text: str) -> str:
    """Returns the text of process 0; all call it."""
    return self.exchange(text if self.first else "")[0]

  # ------------------------------ the stages of a save ------------------------------

  def begin_stages(self) -> None:
    """Forgets the previous save, whose stages are over on every process."""
    self._group.delete(f"{_FAILED}/{self.index}")

  def stage(self, number: int, *, timeout_seconds: float) -> None:
    """Returns when all processes are at this stage of a save.

    Raises:
      ElsewhereError: another process has failed.
    """
    self._group.wait(f"save_{number}", timeout_seconds=timeout_seconds)
    if text := self.failures(number):
      raise ElsewhereError(text)

  def fail(self, text: str, number: int) -> None:
    """Reports that this process's part has failed, before it reaches its last stage.

    By the number, those still leaving the stage before know that it does not concern them.
    """
    self._group.put(f"{_FAILED}/{self.index}", {"text": text, "stage": number})

  def failures(self, number: int) -> str:
    """Returns which processes have failed and why; "" if none: the same on all after a stage."""
    failed = sorted(self._group.list(_FAILED).items(), key=lambda item: int(item[0]))
    return "; ".join(f"process {i}: {v['text']}" for i, v in failed if v["stage"] <= number)

  def share(self, text: str) -> None:
    """Sends a text to process 0, which can read it after the next stage."""
    self._group.put(f"{_SHARED}/{self.index}", {"text": text})

  def shared(self) -> list[str]:
    """Returns the texts that have been sent."""
    return [value["text"] for value in self._group.list(_SHARED).values()]


def join_reports(texts: list[str]) -> str:
  """Joins the texts of an exchange in one line, naming the process if there are several."""
  if len(texts) == 1:
    return texts[0]
  return "; ".join(f"process {index}: {text}" for index, text in enumerate(texts) if text)
