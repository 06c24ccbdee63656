"""Metrics from the device: read a step late, and checked to be finite."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from training.bad_steps import BadStepError, not_finite


class MetricsReader:
  """Reads the metrics of steps from the device, `late` steps after they were dispatched."""

  def __init__(self, *, late: int, check: Callable[[Mapping[str, float]], str] = not_finite):
    """Sets how many steps may be in flight while one is read, and what finds them bad."""
    self._late, self._check = late, check
    self._pending: list[tuple[int, Any]] = []

  def read(self, step: int, metrics: Any, *, drain: bool) -> list[tuple[int, dict[str, float]]]:
    """Takes a step's metrics and returns those now due, as (step, values).

    Args:
      step: its number, counted from 1.
      metrics: scalars on the device.
      drain: return all that are left.

    Raises:
      BadStepError: `check` has found a step bad. The steps in flight are dropped.
    """
    self._pending.append((step, metrics))
    return self._read(0 if drain else self._late)

  def rest(self) -> list[tuple[int, dict[str, float]]]:
    """Returns what has not been returned yet; raises as `read`."""
    return self._read(0)

  def _read(self, keep: int) -> list[tuple[int, dict[str, float]]]:
    due = []
    while len(self._pending) > keep:
      number, scalars = self._pending.pop(0)
      values = {name: float(value) for name, value in jax.device_get(scalars).items()}
      if why := self._check(values):
        self._pending.clear()
        raise BadStepError(number, why)
      due.append((number, values))
    return due
