"""After which steps a run logs, evaluates and saves."""

import dataclasses

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Due:
  """The schedules of a config.

  Attributes:
    config: finalized.
  """

  config: ConfigDict

  def is_last(self, step: int) -> bool:
    """Returns whether a step is the run's last."""
    return step == self.config.training.steps

  def metrics(self, step: int) -> bool:
    """Returns whether the metrics of a step are logged: also the first's and the last's."""
    return step == 1 or _every(self.config.metrics.every_steps, step) or self.is_last(step)

  def evaluation(self, step: int) -> bool:
    """Returns whether the state after a step is evaluated."""
    return self.is_last(step) or _every(self.config.evaluation.every_steps, step)

  def evaluation_batches(self, step: int) -> dict[str, int]:
    """Returns how many batches an evaluation takes, and one by which checkpoints are ranked."""
    keys = self.config.evaluation
    return {
      "steps": keys.final_steps if self.is_last(step) else keys.steps,
      "ranking_steps": keys.steps if keys.every_steps else 0,
    }

  def save(self, step: int) -> bool:
    """Returns whether the state after a step is saved."""
    keys = self.config.checkpoint
    if self.is_last(step) or _every(keys.every_steps, step):
      return True
    return self.evaluation(step) and bool(keys.keep_best)


def _every(steps: int, step: int) -> bool:
  return steps > 0 and step % steps == 0
