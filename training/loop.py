"""The training loop: compile, steps, evaluation, saving, end.

`train` says what happens in which order, `Run` how. What they need is below: after which steps what
is due (`Due`), the steps as they are compiled (`TrainSteps`), and saving (`Saver`).
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epy
from jax.sharding import Mesh
from ml_collections import ConfigDict

from input_pipeline.batches import Prefetcher
from input_pipeline.ramp import Shape
from models import model_spec
from processes.coordination import Lockstep
from processes.watchdog import ENDING, EVALUATION, SAVING, STARTING, Watchdog
from runtime import collectives, forms, units
from runtime.units import clock
from training import callbacks, workdir_files
from training.bad_steps import BadStepError, BadSteps
from training.callbacks import CALLBACKS, Callback, Observer
from training.checkpointing.async_writer import SaveError
from training.checkpointing.checkpointer import Checkpointer
from training.evaluation import Evaluation, Evaluator
from training.metrics.console import ProgressLine, Waiting, say, say_wrapped, warn
from training.metrics.goodput import Goodput
from training.metrics.log_lines import FILE, LINES, MetricsWriter
from training.metrics.reader import (
  DebugNans,
  MetricsReader,
  without_debug_checks,
)
from training.metrics.throughput import Meter
from training.replica_check import ReplicaCheck
from training.restore import Start
from training.setup import Compiled
from training.specs import BatchSpec
from training.splits import Data
from training.state import State

with epy.lazy_imports():  # of runs that have any
  from training.metrics import sinks


@dataclasses.dataclass(frozen=True)
class End:
  """The result of a run: its last state, and whether it was stopped before it was done."""

  state: State
  stopped: bool


def train(
  data: Data,
  start: Start,
  watch: Watchdog,
  *,
  started: float,
  more_callbacks: Mapping[str, Callback] | None = None,
  observer: Observer | None = None,
) -> End:
  """Trains from the step where the run starts to the last.

  Args:
    data: the batches.
    start: the job, its workdir, and the state and the step to start from. Its checkpointer is
      closed at the end.
    watch: the running watchdog, with the other processes and stop requests.
    started: when the command was given, on the clock of `time.monotonic`.
    more_callbacks: name -> Callback, in addition to those that the config names.
    observer: is told what happens.

  Raises:
    CallbackError: a callback has raised.
    TrainingStoppedError: a bad step without a rollback, or replicas of the state that differ.
  """
  with contextlib.ExitStack() as stack:
    stack.enter_context(start.checkpointer)
    if start.job.needs_reference:
      from training import reference  # of preferences alone

      data = reference.attached(data, start, watch)
    watch.saves = True
    called = {name: CALLBACKS[name] for name in start.job.config.training.callbacks}
    called.update(more_callbacks or {})
    observer = observer or Observer()
    run = Run(data, start, watch, stack, called, observer, started=started)
    run.compile()
    run.catch_up()
    while run.has_next_step():
      batch = run.next_batch()
      if batch is None:
        break
      try:
        run.step(batch)
        evaluation = run.evaluate() if run.evaluation_due() else None
      except BadStepError as bad:
        run.roll_back(bad)
        continue
      run.save_if_due(evaluation)
    run.save_last_step()
    summary = run.summary()  # without the time that sinks take to end
  watch.at("ending", ENDING)
  say_wrapped("\n".join([*run.news(), summary]))
  return End(run.state, run.stopped)


class Run:
  """A running training; `train` calls its methods in the order of their definition.

  Attributes:
    state: after step `done`.
    done: number of finished steps.
    stopped: whether it was stopped before the last step or evaluation was done.
  """

  def __init__(
    self,
    data: Data,
    start: Start,
    watch: Watchdog,
    stack: contextlib.ExitStack,
    called: Mapping[str, Callback],
    observer: Observer,
    *,
    started: float,
  ):
    """Takes the arguments of `train`, opens `metrics.jsonl`, and logs the time spent so far.

    `stack` closes what is opened.
    """
    self.state, self.done, self.stopped = start.state, start.step, False
    job, workdir, config = start.job, start.workdir, start.job.config
    self._job, self._config, self._data, self._start = job, config, data, start
    self._workdir, self._watch, self._started = workdir, watch, started
    self._callbacks, self._due, self._observer = called, Due.of(config), observer
    start.checkpointer.on_commit = observer.saved
    self._saver = Saver(start.checkpointer, forms.plain(config), watch, start.stored)
    self._memory = start.memory
    if self._memory is not None:
      stack.callback(self._memory.close)
    self._bad_steps = BadSteps(config.training, config.data, start.known, start.step)
    self._lockstep = Lockstep(watch.group, watch.stop)
    # On simulated devices at most one step is in flight: more can deadlock in a rendezvous.
    # On accelerators metrics are read a step late, so that the device never waits for the host.
    self._reader = MetricsReader(
      late=0 if job.devices.simulated else 1, check=self._bad_steps.check
    )
    self._stack = stack
    self._debug_nans = DebugNans(job.compile, job.mesh)
    stack.enter_context(without_debug_checks())
    self._interrupted = start.step > 0 and self.evaluation_due() and not start.is_evaluated()
    self._writer = stack.enter_context(
      MetricsWriter(
        workdir,
        step=start.step,
        tensorboard=config.metrics.tensorboard,
        rollbacks=len(self._bad_steps.rollbacks),
        owner=start.owner,
        sinks=(lambda: sinks.Sinks(config, workdir, start.step, warn))
        if config.metrics.sinks
        else None,
      )
    )
    self._goodput = Goodput(started, self._writer.times)
    self._meter, self._measuring = Meter(job.batches, model_spec(config), job.mesh), False
    self._train_steps = TrainSteps(job.compile_train_step, job.batches, job.mesh)
    if lost := self._writer.lost(start.known):
      where = workdir / FILE
      warn(f"{where} has lost lines of finished steps: {lost}; training continues without them")
    if self._goodput.doubt:
      warn(self._goodput.doubt)
    if self._writer.times is None or self._writer.times["step"] != self.done:
      self._writer.write_times(self.done, self._goodput.line())
    self._profile = None
    if config.profile.steps:
      from training.metrics.profiler import Profile  # of runs that trace steps alone

      self._profile = stack.enter_context(Profile(config.profile, workdir / "profile", watch))
    self._pace = None
    if not watch.group.alone and (ratio := config.processes.slow_ratio):
      from processes.stragglers import straggler_detection  # which a single process does not need

      found = straggler_detection(watch.group, ratio, simulated=job.devices.simulated)
      self._pace = stack.enter_context(found)
    # Set by `compile` and `catch_up`, before the first step.
    self._progress: ProgressLine | None = None
    self._evaluator: Evaluator | None = None
    self._replicas: ReplicaCheck | None = None
    self._batches: Prefetcher | None = None
    stack.callback(lambda: self._batches and self._batches.close())

  # ------------------------------ before the first step ------------------------------

  def compile(self) -> None:
    """Compiles the steps of training and evaluation, and reports the collectives."""
    job = self._job
    self._watch.at("compiling", STARTING)
    self._goodput.switch("compile")
    rows = self._train_steps.compile(self.done)
    table = collectives.format_summary(rows)
    workdir_files.add_collectives(self._workdir, table, self._start.owner.require)
    with Waiting("compiling the evaluation step").show():
      evaluation = job.compile_eval_step().function
    self._progress = self._stack.enter_context(ProgressLine(self._config.training.steps))
    shown = self._progress.evaluating
    self._evaluator = Evaluator(
      job, self._data.evaluation, evaluation, self._watch, self._lockstep, shown
    )
    self._replicas = ReplicaCheck(
      *(job.placed_state, job.mesh, job.compile),
      every=self._config.training.replica_check_every_steps,
      late=not job.devices.simulated,
    )
    self._observer.compiled(self.done, self._train_steps.last, rows)

  def catch_up(self) -> None:
    """Evaluates the restored step if the run was killed or stopped before its evaluation."""
    self._goodput.switch("step")
    self._read_ahead()
    try:
      if self._interrupted and self.evaluate() is not None:
        self._writer.write_times(self.done, self._goodput.line())
    except BadStepError as bad:
      self.roll_back(bad)

  def _read_ahead(self) -> None:
    """Starts to prefetch batches."""
    waited = self._batches.wait_seconds if self._batches else 0.0
    shardings, position = self._job.batch_shardings, self._bad_steps.position
    self._batches = Prefetcher(
      lambda step: self._data.train.batch(step, shardings, position),
      start=self.done,
      stop=self._config.training.steps,
      depth=self._config.data.prefetch_batches,
    )
    self._batches.wait_seconds = waited  # keeps counting

  # ------------------------------ steps ------------------------------

  def has_next_step(self) -> bool:
    """Returns whether there is another step to compute."""
    return self.done < self._config.training.steps and not self.stopped

  def next_batch(self) -> Any:
    """Returns the next step's batch once all processes have theirs; None if the run stops."""
    if self._profile is not None:
      self._profile.before(self.done)
    self._watch.at(f"step {self.done + 1}: waiting for its batch", begins=True, reader="prefetch")
    with self._goodput.within("input_wait"):
      batch = self._batches.get(self.done, cancelled=lambda: self._lockstep.stopping)
    self._watch.at(f"step {self.done + 1}: waiting for the other processes")
    if self._lockstep.enter():
      return batch
    self.stopped = True
    return None

  def step(self, batch: Any) -> None:
    """Runs a step, and logs the metrics that are due."""
    if not self._train_steps.has(self.done):  # rolled back to a stage from before this start
      self._watch.at(f"step {self.done + 1}: compiling", STARTING)
      with self._goodput.within("compile"), self._meter.paused():
        self._train_steps.after(self.done)
    self._watch.at(f"step {self.done + 1}: computing")
    self.state, metrics = self._train_steps.after(self.done)(self.state, batch)
    self.done += 1
    called = callbacks.due(self._callbacks, self.done)
    drain = called or self.evaluation_due() or self._save_due() or self._due.memory(self.done)
    self._debug_nans.after_step(self.done, self.state, metrics)
    due = self._reader.read(self.done, metrics, drain=drain)
    values = dict(due[-1][1]) if due else {}
    self._report(due)
    if self._pace and (news := self._pace.after_step(self.done, self._batches.wait_seconds)):
      self._progress.note(news)
    self._replicas.after_step(self.done, self.state)
    if called:
      self._call(values)

  def _call(self, values: Mapping[str, float]) -> None:
    """Calls the callbacks that are due, with the metrics of this step."""
    self._watch.at(f"step {self.done}: callbacks", EVALUATION, begins=True)
    with self._meter.paused(), self._goodput.within("evaluation"):
      callbacks.call(self._callbacks, self._context(values))

  def _context(self, values: Mapping[str, float]) -> callbacks.Context:
    return callbacks.Context(self.done, self.state, values, self._job, self._workdir)

  def _report(self, due: list[tuple[int, dict[str, float]]]) -> None:
    """Writes and shows the metrics of steps."""
    meter, batches = self._meter, self._batches
    for number, values in due:
      if not self._measuring:
        self._measuring = True
        meter.start(number, batches.wait_seconds)
        seconds = time.monotonic() - self._started
        self._progress.note(f"first step finished {seconds:.1f} s after the command was given")
      if self._due.metrics(number):
        slowest = self._pace.numbers() if self._pace else {}
        values.update(meter.lap(number, batches.wait_seconds), **slowest)
        self._writer.write(number, values)
        self._progress.update(number, *meter.text(number, values))
        for news in self._writer.news():
          self._progress.note(news)

  def roll_back(self, bad: BadStepError) -> None:
    """Restores a step before a bad one, whose batch is skipped from now on.

    Raises:
      BadStepError: the run may not roll back.
    """
    if more := self._bad_steps.refusal():
      raise BadStepError(bad.step, bad.why, more) from None
    with self._goodput.within("lost_to_restart"), self._meter.paused():
      with self._saver.tolerating_failure("an older step is restored", self._progress.note):
        self._saver.wait()
      self._watch.at(f"rolling back from step {bad.step}", STARTING)
      self._batches.close()
      # Frees the memory for the restored one, except of parameters that are not saved.
      frozen = self._job.program.changing(self.state.params)[1] if self._start.base else {}
      self.state = None
      made, self.state = self._start.roll_back(self._bad_steps, bad.step, bad.why, frozen)
      self._progress.note(self._bad_steps.text())
    self.done = made.step
    self._saver.roll_back(self.done)
    self._meter.back(bad.step, self.done)
    self._writer.roll_back(self.done, len(self._bad_steps.rollbacks), made.line())
    self._goodput.undo(self._writer.times)
    self._writer.write_times(self.done, self._goodput.line())
    callbacks.roll_back(self._callbacks, self._context({}))
    self._observer.rolled_back(self.done)
    self._read_ahead()

  # ------------------------------ evaluation ------------------------------

  def evaluation_due(self) -> bool:
    """Returns whether the state is to be evaluated."""
    return self._due.evaluation(self.done)

  def evaluate(self) -> Evaluation | None:
    """Evaluates and logs the result; None if the run is stopped.

    Raises:
      BadStepError: a metric is not finite: the parameters are unusable.
    """
    with self._meter.paused(), self._goodput.within("evaluation"):
      found = self._evaluator.of_state(self.state, **self._due.evaluation_batches(self.done))
      if found is None:
        self.stopped = True
      elif why := found.bad():
        raise BadStepError(self.done, why)  # before it is written or saved
      else:
        self._writer.write(self.done, found.line())
        self._progress.note(found.text(self.done))
        self._watch.at(f"step {self.done}: reporting", EVALUATION, begins=True)
        self._observer.evaluated(self.done, self.state)
      return found

  # ------------------------------ saving ------------------------------

  def save_if_due(self, evaluation: Evaluation | None) -> None:
    """Saves if due, after the metrics were read and logged: only finite states are saved."""
    failures = self._saver.tolerating_failure("the next step is saved instead", self._progress.note)
    with self._goodput.within("save"), failures:
      self._saver.check()
      if self._save_due():
        self._save(evaluation)
      self._saver.retry = False
    if in_memory := self._memory is not None and self._due.memory(self.done):
      with self._goodput.within("save"):
        self._save_to_memory()
    if in_memory or self._saver.step == self.done:
      self._writer.write_times(self.done, self._goodput.line())

  def _save_due(self) -> bool:
    return self._saver.retry or self._due.save(self.done)

  def _save(self, evaluation: Evaluation | None) -> None:
    ranked_by = {}
    if evaluation is not None and self._config.checkpoint.keep_best:
      ranked_by = evaluation.compared(self._data.evaluation.source.fingerprint)
    self._saver.phase(f"saving step {self.done}")
    self._replicas.before_save(self.done, self.state)
    saved = self._start.saved_part(self.state), self._record()
    self._saver.save(self.done, *saved, **ranked_by)

  def _save_to_memory(self) -> None:
    self._watch.at(f"step {self.done}: saving to memory", SAVING)
    self._replicas.before_save(self.done, self.state)
    given = {"config": self._saver.config, "record": self._record()}
    self._memory.save(self.done, self._start.saved_part(self.state), **given)

  def _record(self) -> dict[str, Any]:
    return {**self._start.record, **self._bad_steps.record(), LINES: dict(self._writer.lines)}

  # ------------------------------ end ------------------------------

  def save_last_step(self) -> None:
    """Saves the last step if the run was stopped before a save was due, or if a save has failed."""
    if self._saver.step < self.done and self._last_step_is_good():
      self._save(None)
    with self._goodput.within("save"), self._progress.saving(self._saver.step):
      self._saver.wait()
      if self._memory is not None and self._saver.step == self.done:
        self._memory.remove()  # storage has the last step
    self._writer.write_times(self._saver.step, self._goodput.line(done=not self.stopped))

  def _last_step_is_good(self) -> bool:
    """Reads the metrics of the last step; the next start handles a bad one."""
    try:
      self._report(self._reader.rest())
    except BadStepError as bad:
      if more := self._bad_steps.refusal():
        raise BadStepError(bad.step, bad.why, more) from None
      self._progress.note(f"WARNING: step {bad.step}: {bad.why}; it is not saved")
      self.done = self._saver.step
      return False
    return True

  def news(self) -> list[str]:
    """Returns what sinks have said at their end."""
    return self._writer.news()

  def summary(self) -> str:
    """Returns a summary of the run, in lines."""
    steps = (
      f"{'stopped' if self.stopped else 'done'}: {self.done - self._start.step} steps in "
      f"{clock(self._meter.seconds)} without evaluation; "
      f"{100 * self._meter.wait_share:.2f} % of it waiting for data"
    )
    return "\n".join(filter(None, (steps, self._saves_text(), self._goodput.text())))

  def _saves_text(self) -> str:
    """Returns how long saves to memory have blocked the run, beside those to storage."""
    if self._memory is None or not (blocked := self._memory.seconds):
      return ""
    text, each = f"saved {len(blocked)} times to memory", statistics.median(blocked)
    text += f", blocking for {units.seconds(each)}"
    if stored := self._start.checkpointer.seconds:
      whole = statistics.median(stored)
      text += f", {units.percent(each / whole)} of a save to storage ({units.seconds(whole)})"
    return f"{text}; {self._memory.lost} of them given up" if self._memory.lost else text


@dataclasses.dataclass(frozen=True)
class Due:
  """After which steps a run logs, evaluates and saves.

  Attributes:
    last: the number of steps.
    metrics_every: steps between logged metrics; 0, here and below: only at the ends.
    evaluation_every: steps between evaluations.
    save_every: steps between saves.
    memory_every: steps between saves to memory.
    saves_evaluated: whether each evaluated state is saved, since the best ones are kept.
    batches: that an evaluation takes; 0: all.
    final_batches: that the last evaluation takes.
  """

  last: int
  metrics_every: int
  evaluation_every: int
  save_every: int
  memory_every: int
  saves_evaluated: bool
  batches: int
  final_batches: int

  @classmethod
  def of(cls, config: ConfigDict) -> "Due":
    """Returns the schedules of a finalized config."""
    keys, checkpoint = config.evaluation, config.checkpoint
    return cls(
      *(config.training.steps, config.metrics.every_steps, keys.every_steps),
      *(checkpoint.every_steps, checkpoint.memory_every_steps, bool(checkpoint.keep_best)),
      *(keys.steps, keys.final_steps),
    )

  def metrics(self, step: int) -> bool:
    """Returns whether the metrics of a step are logged: also the first's and the last's."""
    return step in (1, self.last) or _every(self.metrics_every, step)

  def evaluation(self, step: int) -> bool:
    """Returns whether the state after a step is evaluated."""
    return step == self.last or _every(self.evaluation_every, step)

  def evaluation_batches(self, step: int) -> dict[str, int]:
    """Returns how many batches an evaluation takes, and one by which checkpoints are ranked."""
    return {
      "steps": self.final_batches if step == self.last else self.batches,
      "ranking_steps": self.batches if self.evaluation_every else 0,
    }

  def save(self, step: int) -> bool:
    """Returns whether the state after a step is saved."""
    if step == self.last or _every(self.save_every, step):
      return True
    return self.evaluation(step) and self.saves_evaluated

  def memory(self, step: int) -> bool:
    """Returns whether the state after a step is saved to memory."""
    return _every(self.memory_every, step)


def _every(steps: int, step: int) -> bool:
  return steps > 0 and step % steps == 0


class TrainSteps:
  """The compiled train steps of a run: one for each shape of batches that its ramps have.

  Attributes:
    last: the step of the run's last shape, once `compile` was called.
  """

  def __init__(self, compile_step: Callable[..., Compiled], batches: BatchSpec, mesh: Mesh):
    """Takes `Job.compile_train_step`; compiles nothing yet."""
    self._compile_step, self._batches, self._mesh = compile_step, batches, mesh
    self._compiled: dict[Shape, Callable] = {}
    self.last: Callable | None = None

  def compile(self, done: int) -> list[collectives.Row]:
    """Compiles for the steps after the first `done`; returns the last one's collectives.

    All before the first of them, so that a shape which needs too much memory fails at once.
    """
    ramp = self._batches.ramp
    stages = ramp.stages(self._batches.steps, done)
    *early, last = dict.fromkeys(shape for *_, shape in stages) or [ramp.last]
    for shape in early:
      self._compile(shape)
    self.last = self._compile(last, alone=not early)
    rows = collectives.summarize(collectives.collectives(self.last.as_text(), self._mesh))
    say_wrapped(collectives.short_summary(rows))
    return rows

  def has(self, done: int) -> bool:
    """Returns whether the step after the first `done` is compiled."""
    return self._batches.ramp.shape(done) in self._compiled

  def after(self, done: int) -> Callable:
    """Returns the step after the first `done`, which is compiled now where it was not."""
    shape = self._batches.ramp.shape(done)
    return self._compiled.get(shape) or self._compile(shape)

  def _compile(self, shape: Shape, *, alone: bool = False) -> Callable:
    with Waiting("compiling the train step").show():
      step = self._compile_step(*([] if shape == self._batches.ramp.last else [shape]))
    of = "" if alone else f" for {self._batches.text(shape)}"
    did = "read the compiled" if step.stored else "compiled the"
    say(f"{did} train step{of} in {step.seconds:.1f} s")
    self._compiled[shape] = step.function
    return step.function


class Saver:
  """Saves the states of a run, and knows which step was saved last.

  Attributes:
    config: stored with each step.
    step: of the newest save.
    retry: a save has failed and is tried again after the next step.
  """

  def __init__(
    self, checkpointer: Checkpointer, config: Mapping[str, Any], watch: Watchdog, step: int
  ):
    """Takes the config, and the newest step in storage where the run starts."""
    self.step, self.retry = step, False
    self._checkpointer, self.config, self._watch = checkpointer, config, watch

  def check(self) -> None:
    """Raises SaveError if a save that was started before has failed."""
    self._checkpointer.check()

  def save(self, step: int, tree: Any, record: Mapping[str, Any], **ranked_by: Any) -> None:
    """Starts to save a step; arguments as of `Checkpointer.save`.

    Raises:
      SaveError: this save or the one before it has failed.
    """
    self._checkpointer.save(step, tree, config=self.config, record=record, **ranked_by)
    self.step = step

  def wait(self) -> None:
    """Waits until the last save is complete; raises SaveError if it has failed."""
    self.phase("waiting for the last save")
    self._checkpointer.wait()

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

  def phase(self, label: str) -> None:
    """Enters a phase that may take long as long as the save makes progress."""
    self._watch.at(label, SAVING, progress=self._checkpointer.progress)
