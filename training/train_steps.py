"""The compiled train steps of a run: one for each shape of batches that its ramps have."""

from collections.abc import Callable

from input_pipeline.ramp import Ramp, Shape
from runtime import collectives
from training.metrics.console import Waiting, say, say_wrapped
from training.setup import Job


class TrainSteps:
  """Compiles each shape once.

  Attributes:
    last: the step of the run's last shape, once `compile` was called.
  """

  def __init__(self, job: Job):
    """Compiles nothing yet."""
    self._job, self._ramp = job, Ramp.of(job.config.data)
    self._compiled: dict[Shape, Callable] = {}
    self.last: Callable | None = None

  def compile(self, done: int) -> str:
    """Compiles for the steps after the first `done`; returns the table of the last's collectives.

    All before the first of them, so that a shape which needs too much memory fails at once.
    """
    stages = self._ramp.stages(self._job.config.training.steps, done)
    *early, last = dict.fromkeys(shape for *_, shape in stages) or [self._ramp.last]
    for shape in early:
      self._compile(shape, f" for {self._job.batches.text(shape)}")
    of = f" for {self._job.batches.text(last)}" if early else ""
    self.last = self._compile(last, of)
    rows = collectives.summarize(collectives.collectives(self.last.as_text(), self._job.mesh))
    say_wrapped(collectives.short_summary(rows))
    return collectives.format_summary(rows)

  def has(self, done: int) -> bool:
    """Returns whether the step after the first `done` is compiled."""
    return self._ramp.shape(done) in self._compiled

  def after(self, done: int) -> Callable:
    """Returns the step after the first `done`, which is compiled now where it was not."""
    shape = self._ramp.shape(done)
    if shape not in self._compiled:
      self._compile(shape, f" for {self._job.batches.text(shape)}")
    return self._compiled[shape]

  def _compile(self, shape: Shape, of: str) -> Callable:
    with Waiting("compiling the train step").show():
      step = self._job.compile_train_step(*([] if shape == self._ramp.last else [shape]))
    say(f"compiled the train step{of} in {step.seconds:.1f} s")
    self._compiled[shape] = step.function
    return step.function
