"""The training loop: compile, steps, evaluation, saving, end.

`train` says what happens in which order, `begin` of what a run consists, `Run` how it does that.
What they need is below: after which steps what is due (`Due`), and the steps as they are compiled
(`TrainSteps`).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from input_pipeline.batches import Prefetcher
from input_pipeline.ramp import Shape
from processes.coordination import Lockstep
from processes.watchdog import ENDING, EVALUATION, SAVING, STARTING, Watchdog
from runtime import collectives, forms
from training import callbacks, workdir_files
from training.bad_steps import BadStepError, BadSteps
from training.callbacks import CALLBACKS, Callback, CompiledStep, Observer
from training.checkpointing.async_writer import SaveError
from training.evaluation import Evaluation, Evaluator
from training.instruments import Instruments
from training.metrics.console import Waiting, say, say_wrapped
from training.metrics.log_lines import LINES
from training.metrics.reader import DebugNans, MetricsReader, Read, without_debug_checks
from training.replica_check import ReplicaCheck
from training.restore import Start
from training.setup import Compiled
from training.specs import BatchSpec
from training.splits import Data
from training.state import State, teacher_branch
from training.tasks import GRPO

if TYPE_CHECKING:
  from training.kept_state import KeptState
  from training.recomputed_steps import RecomputedSteps


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
    named = {name: CALLBACKS[name] for name in start.job.config.training.callbacks}
    calls = {**named, **(more_callbacks or {})}
    run = begin(data, start, watch, stack, calls, observer or Observer(), started)
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
  say_wrapped("\n".join([*run.instruments.writer.news(), summary]))
  return End(run.state, run.stopped)


def begin(
  data: Data,
  start: Start,
  watch: Watchdog,
  stack: contextlib.ExitStack,
  calls: Mapping[str, Callback],
  observer: Observer,
  started: float,
) -> "Run":
  """Opens `metrics.jsonl`, compiles the steps of training and evaluation, and returns the run.

  Arguments as of `train`; `stack` closes what is opened, and `calls` are all callbacks.
  """
  job, config = start.job, start.job.config
  start.checkpointer.on_commit = observer.saved
  if start.memory is not None:
    stack.callback(start.memory.close)
  bad_steps, due = BadSteps(config.training, config.data, start.known, start.step), Due.of(config)
  debug_nans = DebugNans(job.compile, job.mesh)
  stack.enter_context(without_debug_checks())
  interrupted = start.step > 0 and due.evaluation(start.step) and not start.is_evaluated()
  known = len(bad_steps.rollbacks)
  instruments = Instruments(start, watch, stack, rollbacks=known, started=started)
  watch.at("compiling", STARTING)
  kept = None
  if config.training.check_memory:
    from training.kept_state import KeptState  # which few runs have

    kept = KeptState(job, late=not job.devices.simulated)
  rollouts = None
  if config.task == GRPO:
    assert data.rollouts is not None, "its rows are prompts, and no answers"
    rollouts = data.rollouts(start, watch)
    stack.callback(rollouts.close)
  steps = TrainSteps((kept or job).compile_train_step, job.batches, job.mesh)
  last = steps.compile(start.step)
  workdir_files.add_collectives(
    start.workdir, collectives.format_summary(last.collectives), start.owner.require
  )
  with Waiting("compiling the evaluation step").show():
    evaluation = job.compile_eval_step().function
  replicas = ReplicaCheck(
    *(job.placed_state, job.mesh, job.compile),
    every=config.training.replica_check_every_steps,
    late=not job.devices.simulated,
  )
  if every := config.training.recompute_every_steps:
    from training.recomputed_steps import RecomputedSteps  # which few runs have

    with Waiting("compiling the steps that are computed twice").show():
      recomputed = RecomputedSteps(job, every, start.step)
  else:
    recomputed = None
  observer.compiled(start.step, last)
  lockstep, shown = Lockstep(watch.group, watch.stop), instruments.show(due.last).evaluating
  run = Run(
    state=start.state,
    done=start.step,
    start=start,
    data=data,
    rollouts=rollouts,
    due=due,
    train_steps=steps,
    evaluator=Evaluator(
      *(job, data.evaluation, evaluation, watch, lockstep, shown, rollouts, data.tasks)
    ),
    stored=start.stored,
    bad_steps=bad_steps,
    # On simulated devices at most one step is in flight: more can deadlock in a rendezvous.
    # On accelerators metrics are read a step late, so that the device never waits for the host.
    reader=MetricsReader(late=0 if job.devices.simulated else 1, check=bad_steps.check),
    debug_nans=debug_nans,
    replicas=replicas,
    recomputed=recomputed,
    kept=kept,
    instruments=instruments,
    lockstep=lockstep,
    watch=watch,
    callbacks=calls,
    observer=observer,
    interrupted=interrupted,
  )
  stack.callback(lambda: run.batches and run.batches.close())
  return run


@dataclasses.dataclass(kw_only=True)
class Run:
  """A running training; `train` calls its methods in the order of their definition.

  Attributes:
    state: after step `done`.
    done: number of finished steps.
    stopped: whether it was stopped before the last step or evaluation was done.
    stored: the newest step that is saved in storage.
    retry_save: a save has failed and is tried again after the next step.
    interrupted: whether the evaluation of the step that it starts from is missing.
    rollouts: draws the answers of its batches, of GRPO.
    batches: those of the next steps, read ahead; None before `catch_up`.
  """

  state: State
  done: int
  start: Start
  data: Data
  rollouts: Any
  due: "Due"
  train_steps: "TrainSteps"
  evaluator: Evaluator
  stored: int
  bad_steps: BadSteps
  reader: MetricsReader
  debug_nans: DebugNans
  replicas: ReplicaCheck
  recomputed: "RecomputedSteps | None"
  kept: "KeptState | None"
  instruments: Instruments
  lockstep: Lockstep
  watch: Watchdog
  callbacks: Mapping[str, Callback]
  observer: Observer
  interrupted: bool
  stopped: bool = False
  retry_save: bool = False
  batches: Prefetcher | None = None

  def catch_up(self) -> None:
    """Evaluates the restored step if the run was killed or stopped before its evaluation."""
    self._read_ahead()
    try:
      if self.interrupted and self.evaluate() is not None:
        self.instruments.at_step(self.done)
    except BadStepError as bad:
      self.roll_back(bad)

  def _read_ahead(self) -> None:
    """Starts to prefetch batches."""
    waited = self.batches.wait_seconds if self.batches else 0.0
    job, position = self.start.job, self.bad_steps.position
    shardings = job.batch_shardings
    self.batches = Prefetcher(
      lambda step: self.data.train.batch(step, shardings, position),
      start=self.done,
      stop=self.due.last,
      depth=job.config.data.prefetch_batches,
    )
    self.batches.wait_seconds = waited  # keeps counting

  # ------------------------------ steps ------------------------------

  def has_next_step(self) -> bool:
    """Returns whether there is another step to compute."""
    return self.done < self.due.last and not self.stopped

  def next_batch(self) -> Any:
    """Returns the next step's batch once all processes have theirs; None if the run stops."""
    self.instruments.before_step(self.done)
    self.watch.at(f"step {self.done + 1}: waiting for its batch", begins=True, reader="prefetch")
    with self.instruments.within("input_wait"):
      batch = self.batches.get(self.done, cancelled=lambda: self.lockstep.stopping)
    self.watch.at(f"step {self.done + 1}: waiting for the other processes")
    if self.lockstep.enter() or not self._may_save():
      return batch
    self.stopped = True
    return None

  def step(self, batch: Any) -> None:
    """Runs a step, and logs the metrics that are due."""
    if not self.train_steps.has(self.done):  # rolled back to a stage from before this start
      self.watch.at(f"step {self.done + 1}: compiling", STARTING)
      with self.instruments.paused("compile"):
        self.train_steps.after(self.done)
    of_answers: dict[str, float] = {}
    if self.rollouts is not None:
      position = self.bad_steps.position
      batch, of_answers = self.rollouts.batch(self.state, self.done, position)
    self.watch.at(f"step {self.done + 1}: computing")
    if self.recomputed:
      self.recomputed.before_step(self.done + 1, self.state, batch)
    self.state, metrics = self.train_steps.after(self.done)(self.state, batch)
    self.done += 1
    if self.kept:
      metrics = self.kept.after_step(self.done, metrics)
    metrics |= of_answers
    if self.recomputed:
      self.recomputed.after_step(self.done, self.state)
    called = callbacks.due(self.callbacks, self.done)
    drain = called or self.evaluation_due() or self._save_due() or self.due.memory(self.done)
    self.debug_nans.after_step(self.done, self.state, metrics)
    due = self.reader.read(self.done, metrics, drain=drain)
    values = dict(due[-1].values) if due else {}
    self._report(due)
    self.instruments.after_step(self.done, self.batches.wait_seconds)
    self.replicas.after_step(self.done, self.state)
    if called:
      self.watch.at(f"step {self.done}: callbacks", EVALUATION, begins=True)
      with self.instruments.paused("evaluation"):
        callbacks.call(self.callbacks, self._context(values))

  def _context(self, values: Mapping[str, float]) -> callbacks.Context:
    return callbacks.Context(self.done, self.state, values, self.start.job, self.start.workdir)

  def _report(self, read: list[Read]) -> None:
    """Writes and shows the metrics of steps that were read."""
    for one in read:
      self.instruments.report(one, self.batches.wait_seconds, due=self.due.metrics(one.step))

  def roll_back(self, bad: BadStepError) -> None:
    """Restores a step before a bad one, whose batch is skipped from now on.

    Raises:
      BadStepError: the run may not roll back.
    """
    if more := self.bad_steps.refusal():
      raise BadStepError(bad.step, bad.why, more) from None
    with self.instruments.paused("lost_to_restart"):
      with self._tolerating_failure("an older step is restored"):
        self._wait_for_save()
      self.watch.at(f"rolling back from step {bad.step}", STARTING)
      self.batches.close()
      # Frees the memory for the restored one, except of parameters that are not saved.
      program = self.start.job.program
      params = self.state.params
      frozen = program.changing(params)[1] if self.start.base else teacher_branch(params)
      self.state = params = None
      made, self.state = self.start.roll_back(self.bad_steps, bad.step, bad.why, frozen)
      self.instruments.progress.note(self.bad_steps.text())
    self.done = made.step
    if self.kept:
      self.kept.forget()
    self.stored, self.retry_save = self.done, False  # what has failed after it no longer matters
    self.instruments.rolled_back(made, len(self.bad_steps.rollbacks))
    callbacks.call(self.callbacks, self._context({}), rollback=True)
    self.observer.rolled_back(self.done)
    self._read_ahead()

  # ------------------------------ evaluation ------------------------------

  def evaluation_due(self) -> bool:
    """Returns whether the state is to be evaluated."""
    return self.due.evaluation(self.done)

  def evaluate(self) -> Evaluation | None:
    """Evaluates and logs the result; None if the run is stopped.

    Raises:
      BadStepError: a metric is not finite: the parameters are unusable.
    """
    with self.instruments.paused("evaluation"):
      found = self.evaluator.of_state(self.state, **self.due.evaluation_batches(self.done))
      if found is None:
        self.stopped = True
      elif why := found.bad():
        raise BadStepError(self.done, why)  # before it is written or saved
      else:
        self.instruments.evaluated(self.done, found)
        self.watch.at(f"step {self.done}: reporting", EVALUATION, begins=True)
        self.observer.evaluated(self.done, self.state)
      return found

  # ------------------------------ saving ------------------------------

  def save_if_due(self, evaluation: Evaluation | None) -> None:
    """Saves if due, after the metrics were read and logged: only finite states are saved."""
    failures = self._tolerating_failure("the next step is saved instead")
    with self.instruments.within("save"), failures:
      self.start.checkpointer.check()
      if self._save_due():
        self._save(evaluation)
      self.retry_save = False
    if in_memory := self.start.memory is not None and self.due.memory(self.done):
      with self.instruments.within("save"):
        self._save_to_memory()
    if in_memory or self.stored == self.done:
      self.instruments.at_step(self.done)

  def _save_due(self) -> bool:
    return (self.retry_save or self.due.save(self.done)) and self._may_save()

  def _may_save(self) -> bool:
    """Returns whether what a step needs follows from the state: not between updates on answers."""
    return self.rollouts is None or self.rollouts.between(self.done)

  def _save(self, evaluation: Evaluation | None) -> None:
    ranked_by = {}
    if evaluation is not None and self.due.saves.keep_best:
      ranked_by = evaluation.compared(self.data.evaluation.source.fingerprint)
    self._at_save(f"saving step {self.done}")
    self._check_before_save()
    given = {"config": forms.plain(self.start.job.config), "record": self._record()}
    saved = self.start.saved_part(self.state)
    self.start.checkpointer.save(self.done, saved, **given, **ranked_by)
    self.stored = self.done

  def _wait_for_save(self) -> None:
    """Waits until the last save is complete; raises SaveError if it has failed."""
    self._at_save("waiting for the last save")
    self.start.checkpointer.wait()

  def _at_save(self, label: str) -> None:
    """Enters a phase that may take long as long as the save makes progress."""
    self.watch.at(label, SAVING, progress=self.start.checkpointer.progress)

  @contextlib.contextmanager
  def _tolerating_failure(self, instead: str) -> Iterator[None]:
    """Reports a save that has failed, and continues; `instead` says with what."""
    try:
      yield
    except SaveError as error:
      if not error.agreed:  # the others wait in the middle of it; a restart resumes from the last
        raise
      self.retry_save = True
      self.instruments.progress.note(f"WARNING: {error}; training continues, and {instead}")

  def _check_before_save(self) -> None:
    self.replicas.before_save(self.done, self.state)
    if self.kept:
      self.kept.before_save(self.done, self.state)

  def _save_to_memory(self) -> None:
    self.watch.at(f"step {self.done}: saving to memory")  # of a step: its time is known
    self._check_before_save()
    given = {"config": forms.plain(self.start.job.config), "record": self._record()}
    self.start.memory.save(self.done, self.start.saved_part(self.state), **given)

  def _record(self) -> dict[str, Any]:
    written = {LINES: dict(self.instruments.writer.lines)}
    return {**self.start.record, **self.bad_steps.record(), **written}

  # ------------------------------ end ------------------------------

  def save_last_step(self) -> None:
    """Saves the last step if the run was stopped before a save was due, or if a save has failed."""
    if self.stored < self.done and self._last_step_is_good():
      self._save(None)
    with self.instruments.within("save"), self.instruments.progress.saving(self.stored):
      self._wait_for_save()
      if self.start.memory is not None and self.stored == self.done:
        self.start.memory.remove()  # storage has the last step
    self.instruments.at_step(self.stored, done=not self.stopped)

  def _last_step_is_good(self) -> bool:
    """Reads the metrics of the last step; the next start handles a bad one."""
    try:
      self._report(self.reader.rest())
    except BadStepError as bad:
      if more := self.bad_steps.refusal():
        raise BadStepError(bad.step, bad.why, more) from None
      self.instruments.progress.note(f"WARNING: step {bad.step}: {bad.why}; it is not saved")
      self.done = self.stored
      return False
    return True

  def summary(self) -> str:
    """Returns a summary of the run, in lines."""
    memory = self.start.memory
    saves = "" if memory is None else memory.text(self.start.checkpointer.seconds)
    return self.instruments.summary(self.done, saves, stopped=self.stopped)


@dataclasses.dataclass(frozen=True)
class Due:
  """After which steps a run logs, evaluates and saves.

  Attributes:
    last: the number of steps.
    metrics_every: steps between logged metrics; 0, as of other periods: only at the ends.
    evaluations: the section `evaluation` of a finalized config.
    saves: the section `checkpoint`.
  """

  last: int
  metrics_every: int
  evaluations: ConfigDict
  saves: ConfigDict

  @classmethod
  def of(cls, config: ConfigDict) -> "Due":
    """Returns the schedules of a finalized config."""
    every = config.metrics.every_steps
    return cls(config.training.steps, every, config.evaluation, config.checkpoint)

  def metrics(self, step: int) -> bool:
    """Returns whether the metrics of a step are logged: also the first's and the last's."""
    return step in (1, self.last) or _every(self.metrics_every, step)

  def evaluation(self, step: int) -> bool:
    """Returns whether the state after a step is evaluated."""
    return step == self.last or _every(self.evaluations.every_steps, step)

  def evaluation_batches(self, step: int) -> dict[str, int]:
    """Returns how many batches an evaluation takes, and one by which checkpoints are ranked."""
    keys = self.evaluations
    return {
      "steps": keys.final_steps if step == self.last else keys.steps,
      "ranking_steps": keys.steps if keys.every_steps else 0,
    }

  def save(self, step: int) -> bool:
    """Returns whether the state after a step is saved."""
    if step == self.last or _every(self.saves.every_steps, step):
      return True
    return bool(self.saves.keep_best) and self.evaluation(step)

  def memory(self, step: int) -> bool:
    """Returns whether the state after a step is saved to memory."""
    return _every(self.saves.memory_every_steps, step)


def _every(steps: int, step: int) -> bool:
  return steps > 0 and step % steps == 0


class TrainSteps:
  """The compiled train steps of a run: one for each shape of batches that its ramps have."""

  def __init__(self, compile_step: Callable[..., Compiled], batches: BatchSpec, mesh: Mesh):
    """Takes `Job.compile_train_step`; compiles nothing yet."""
    self._compile_step, self._batches, self._mesh = compile_step, batches, mesh
    self._compiled: dict[Shape, jax.stages.Compiled] = {}

  def compile(self, done: int) -> CompiledStep:
    """Compiles for the steps after the first `done`; returns that of the run's last shape.

    All before the first of them, so that a shape which needs too much memory fails at once.
    """
    ramp = self._batches.ramp
    stages = ramp.stages(self._batches.steps, done)
    *early, last = dict.fromkeys(shape for *_, shape in stages) or [ramp.last]
    for shape in early:
      self._compile(shape)
    program = self._compile(last, alone=not early)
    rows = collectives.summarize(collectives.collectives(program.as_text(), self._mesh))
    say_wrapped(collectives.short_summary(rows))
    return CompiledStep(program, rows)

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
    stored = " (it was stored)" if step.stored else ""
    say(f"compiled the train step{of} in {step.seconds:.1f} s{stored}")
    self._compiled[shape] = step.function
    return step.function
