"""What measures a run and reports it: `metrics.jsonl`, the console, its clocks, traces of steps."""

import contextlib
from collections.abc import Iterator

from etils import epy

from models import model_spec
from processes.watchdog import Watchdog
from runtime.units import clock
from training.bad_steps import Rollback
from training.evaluation import Evaluation
from training.metrics.console import ProgressLine, warn
from training.metrics.goodput import Goodput
from training.metrics.log_lines import FILE, MetricsWriter
from training.metrics.reader import Read
from training.metrics.throughput import Meter
from training.restore import Start

with epy.lazy_imports():  # of runs that have any; a single process has no stragglers
  from processes import stragglers
  from training.metrics import profiler, sinks


class Instruments:
  """The instruments of a run.

  Attributes:
    writer: of `metrics.jsonl`.
    progress: the progress line; None before `show`.
  """

  def __init__(
    self,
    start: Start,
    watch: Watchdog,
    stack: contextlib.ExitStack,
    *,
    rollbacks: int,
    started: float,
  ):
    """Opens `metrics.jsonl`, and logs the time spent so far.

    Args:
      start: of the run.
      watch: of this process.
      stack: closes what is opened.
      rollbacks: how many the checkpoint knows of that the run resumes from.
      started: when the command was given, on the clock of `time.monotonic`.
    """
    config, workdir, simulated = start.job.config, start.workdir, start.job.devices.simulated
    self._stack, self._started, self._first = stack, started, start.step
    self.progress: ProgressLine | None = None
    opens = (
      (lambda: sinks.Sinks(config, workdir, start.step, warn)) if config.metrics.sinks else None
    )
    self.writer = stack.enter_context(
      MetricsWriter(
        workdir,
        step=start.step,
        tensorboard=config.metrics.tensorboard,
        rollbacks=rollbacks,
        owner=start.owner,
        sinks=opens,
      )
    )
    self._meter = Meter(start.job.batches, model_spec(config), start.job.mesh)
    self._goodput, self._measuring = Goodput(started, self.writer.times), False
    if lost := self.writer.lost(start.known):
      where = workdir / FILE
      warn(f"{where} has lost lines of finished steps: {lost}; training continues without them")
    if self._goodput.doubt:
      warn(self._goodput.doubt)
    if self.writer.times is None or self.writer.times["step"] != start.step:
      self.at_step(start.step)
    self._profile = self._pace = None
    if config.profile.steps:
      found = profiler.Profile(config.profile, workdir / "profile", watch)
      self._profile = stack.enter_context(found)
    if not watch.group.alone and (ratio := config.processes.slow_ratio):
      found = stragglers.straggler_detection(watch.group, ratio, simulated=simulated)
      self._pace = stack.enter_context(found)
    self._goodput.switch("compile")

  def show(self, steps: int) -> ProgressLine:
    """Starts the progress line of a run of so many steps, whose steps begin now; returns it."""
    self.progress = self._stack.enter_context(ProgressLine(steps))
    self._goodput.switch("step")
    return self.progress

  # ------------------------------ clocks ------------------------------

  def within(self, name: str) -> contextlib.AbstractContextManager:
    """Counts the time inside the block in a bin of the goodput, and in that of steps."""
    return self._goodput.within(name)

  @contextlib.contextmanager
  def paused(self, name: str) -> Iterator[None]:
    """Counts the time inside the block in a bin of the goodput, and not in that of steps."""
    with self._meter.paused(), self._goodput.within(name):
      yield

  def at_step(self, step: int, *, done: bool = False) -> None:
    """Writes the line about goodput that a start from this step continues from."""
    self.writer.write_times(step, self._goodput.line(done=done))

  # ------------------------------ what happens ------------------------------

  def before_step(self, done: int) -> None:
    """Starts or ends a trace; all processes call it before each step."""
    if self._profile is not None:
      self._profile.before(done)

  def after_step(self, done: int, wait_seconds: float) -> None:
    """Reports whether a process is slower than the others; all call it after each step."""
    if self._pace and (news := self._pace.after_step(done, wait_seconds)):
      self.progress.note(news)

  def report(self, read: Read, wait_seconds: float, *, due: bool) -> None:
    """Writes and shows the metrics of a step.

    Args:
      read: its metrics.
      wait_seconds: the time that the loop has waited for data so far.
      due: whether they are logged; those of the first step always start the meter.
    """
    step, values = read.step, read.values
    if not self._measuring:
      self._measuring = True
      self._meter.start(step, wait_seconds, read.at)
      seconds = read.at - self._started
      self.progress.note(f"first step finished {seconds:.1f} s after the command was given")
    if due:
      slowest = self._pace.numbers() if self._pace else {}
      values.update(self._meter.lap(step, wait_seconds, read.at), **slowest)
      self.writer.write(step, values)
      self.progress.update(step, *self._meter.text(step, values))
      for news in self.writer.news():
        self.progress.note(news)

  def evaluated(self, step: int, found: Evaluation) -> None:
    """Writes and shows the result of an evaluation."""
    self.writer.write(step, found.line())
    self.progress.note(found.text(step))

  def rolled_back(self, made: Rollback, count: int) -> None:
    """Goes back to the step of a rollback; `count` is the run's number of them."""
    self._meter.back(made.bad_step, made.step)
    self.writer.roll_back(made.step, count, made.line())
    self._goodput.undo(self.writer.times)
    self.at_step(made.step)

  def summary(self, done: int, saves: str, *, stopped: bool) -> str:
    """Returns a summary of the run after so many steps, in lines, one of them about its saves."""
    steps = (
      f"{'stopped' if stopped else 'done'}: {done - self._first} steps in "
      f"{clock(self._meter.seconds)} without evaluation; "
      f"{100 * self._meter.wait_share:.2f} % of it waiting for data"
    )
    return "\n".join(filter(None, (steps, saves, self._goodput.text())))
