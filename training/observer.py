"""What a training run announces to whoever reports about it."""

from typing import Any

from training.state import State


class Observer:
  """Is called by a run on every process alike; this one ignores everything.

  Methods may hold collectives. What they raise ends the run.
  """

  def compiled(self, step: int, program: Any) -> None:
    """The train step is compiled, as a `jax.stages.Compiled`; `step` steps are done."""

  def evaluated(self, step: int, state: State) -> None:
    """The state after a step is evaluated, and the result is in `metrics.jsonl`."""

  def saved(self, step: int) -> None:
    """The checkpoint of a step is committed."""

  def rolled_back(self, step: int) -> None:
    """Training has gone back to a step, and the line about it is in `metrics.jsonl`."""
