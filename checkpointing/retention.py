"""Retention of checkpoints: the newest steps, every n-th, and the best by a metric."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


class Retention:
  """The retention rules of a run, and the metrics of steps that are ranked by one."""

  def __init__(self, keep: int, every_steps: int, best: str, lower_is_better: bool | None):
    """Sets the rules; see Checkpointer.

    Raises:
      ValueError: a number below its least.
    """
    if keep < 1 or every_steps < 0:
      raise ValueError(
        f"checkpoint.keep={keep}: at least 1; checkpoint.keep_every_steps={every_steps}: at least 0"
      )
    self._keep, self._every, self._best = keep, every_steps, best
    lower = not best.endswith("accuracy") if lower_is_better is None else lower_is_better
    self._sign = -1.0 if lower else 1.0
    # step -> the examples that its metric is over, and the metric, with larger being better.
    self._values: dict[int, tuple[str, float]] = {}

  def note(
    self, step: int, metrics: Mapping[str, float] | None, over: Mapping[str, Any] | None = None
  ) -> None:
    """Remembers a step's metric; a step without one is not ranked.

    Args:
      step: the number of steps done.
      metrics: of its evaluation.
      over: the examples that they are over; None: unknown. Only metrics over the same examples are
        compared.

    Raises:
      ValueError: the metrics lack the one that ranks steps.
    """
    self._values.pop(step, None)
    if not self._best or metrics is None:
      return
    if self._best not in metrics:
      names = ", ".join(metrics)
      raise ValueError(f"checkpoint.keep_best={self._best!r}: the metrics are {names}")
    if math.isfinite(metrics[self._best]):
      self._values[step] = json.dumps(over, sort_keys=True), self._sign * metrics[self._best]

  def kept(self, steps: Sequence[int]) -> set[int]:
    """Returns which of these steps are kept."""
    there = sorted(steps)
    kept = set(there[-self._keep :])
    kept.update(step for step in there if self._every and step % self._every == 0)
    best: dict[str, tuple[float, int]] = {}
    for step in there:
      if step in self._values:
        over, value = self._values[step]
        best[over] = max(best.get(over, (-math.inf, step)), (value, step))
    kept.update(step for _, step in best.values())
    return kept
