"""Training, as one story: compile, steps, evaluation, saving, end."""

import contextlib
import dataclasses
import time

from etils import epath

from checkpointing.store import SaveError
from input_pipeline.batches import EvaluationBatches, TrainingBatches
from input_pipeline.prefetch import Prefetcher
from input_pipeline.sources import open_source
from partitioning import collectives
from processes.group import current
from processes.lockstep import Lockstep
from processes.watchdog import ENDING, SAVING, STARTING, Watchdog
from training.evaluation import Evaluator
from training.job import Job
from training.meter import Meter, MetricsReader
from training.profiling import Profile
from training.reporting import MetricsWriter, ProgressLine, duration, evaluated, say
from training.resuming import Start, plain
from training.step import State


@dataclasses.dataclass(frozen=True)
class Data:
  """The batches of a job, both splits opened and found fit."""

  train: TrainingBatches
  held_out: EvaluationBatches


@dataclasses.dataclass(frozen=True)
class End:
  """How a run ended: its last state, and whether it was asked to stop before it was done."""

  state: State
  stopped: bool


def open_data(job: Job) -> Data:
  """Opens both splits, preparing them on first use.

  Raises:
    ValueError: from the input pipeline: an unknown data set, an empty split, a missing
      feature, fewer rows than a batch, or rows that are not what the model takes.
  """
  config = job.config
  source = open_source(config.data, config.data.train_split, config.seed)
  train = TrainingBatches(
    source,
    global_batch_size=config.data.global_batch_size,
    seed=config.seed,
    shuffle=config.data.shuffle,
  )
  if train.abstract != job.batch:
    raise ValueError(f"{source.name} gives {train.abstract}, the model takes {job.batch}")
  return Data(train, open_held_out(job))


def open_held_out(job: Job) -> EvaluationBatches:
  """Opens the evaluation split; raises as `open_data`."""
  data = job.config.data
  source = open_source(data, data.evaluation_split, job.config.seed)
  return EvaluationBatches(source, global_batch_size=data.global_batch_size)


def finished(job: Job, start: Start, workdir: epath.Path) -> bool:
  """Tells whether all steps have been made, and the last evaluation with them."""
  if start.step < job.config.training.steps:
    return False
  return _evaluated(job, workdir, start.step)


def _evaluated(job: Job, workdir: epath.Path, step: int) -> bool:
  """Tells whether a step's evaluation is logged; a network file system may not tell all at once."""
  seconds = job.config.processes.start_timeout_seconds
  logged = evaluated(workdir, step)
  return current().all_true("evaluated", logged, timeout_seconds=seconds)


def train(
  job: Job, data: Data, start: Start, workdir: epath.Path, watch: Watchdog, *, started: float
) -> End:
  """Trains from the step where the run starts to the last.

  Args:
    job: a prepared job.
    data: its batches.
    start: where it starts: the state and the step. Its checkpointer is closed at the end.
    workdir: an existing folder.
    watch: running; it knows of the other processes and of what asks for a stop.
    started: when the command was given, in seconds since the epoch.

  Raises:
    TrainingStoppedError: a loss or a gradient norm that is not finite, with its step.
  """
  config = job.config
  steps, state = config.training.steps, start.state

  with contextlib.ExitStack() as stack:
    checkpointer = stack.enter_context(start.checkpointer)

    # ------------------------------ compile ------------------------------
    watch.at("compiling", STARTING)
    train_step = job.compile_train_step()
    rows = collectives.summarize(collectives.collectives(train_step.function.as_text(), job.mesh))
    say(f"compiled the train step in {train_step.seconds:.1f} s; its collectives by mesh axis:")
    say(collectives.format_summary(rows))
    lockstep = Lockstep(watch.group, watch.stop)
    evaluate = Evaluator(job, data.held_out, job.compile_eval_step().function, watch, lockstep)

    # ------------------------------ open ------------------------------
    # On simulated devices one step is in flight at most: more can deadlock in a rendezvous.
    # On accelerators metrics are read a step late, so that the device never waits for the host.
    reader = MetricsReader(late=0 if job.devices.simulated else 1)
    meter = Meter(job)
    shardings = job.batch_shardings
    interrupted = _due(start.step, config.evaluation.every_steps) or start.step == steps
    interrupted = start.step > 0 and interrupted and not _evaluated(job, workdir, start.step)
    writer = stack.enter_context(
      MetricsWriter(workdir, step=start.step, tensorboard=config.metrics.tensorboard)
    )
    progress = stack.enter_context(ProgressLine(steps))
    batches = stack.enter_context(
      Prefetcher(
        lambda step: data.train.batch(step, shardings),
        start=start.step,
        stop=steps,
        depth=config.data.prefetch_batches,
      )
    )
    profile = stack.enter_context(Profile(config.profile, workdir / "profile"))

    def report(due: list[tuple[int, dict[str, float]]]) -> None:
      """Writes and shows the metrics of steps."""
      for number, values in due:
        if number == start.step + 1:
          meter.start(number, batches.wait_seconds)
          seconds = time.time() - started
          progress.note(f"first step finished {seconds:.1f} s after the command was given")
        if number == 1 or _due(number, config.metrics.every_steps) or number == steps:
          values.update(meter.lap(number, batches.wait_seconds))
          writer.write(number, values)
          progress.update(number, meter.text(number, values))

    def held_out_metrics(done: int) -> dict[str, float] | None:
      """Evaluates and writes; None where a stop came in between."""
      with meter.paused():
        count = 0 if done == steps else config.evaluation.steps
        metrics = evaluate(state.params, steps=count)
        if metrics is not None:
          writer.write(done, metrics)
          progress.note(evaluation_text(done, metrics, whole=count == 0))
        return metrics

    def save(done: int, metrics: dict[str, float] | None) -> None:
      watch.at(f"saving step {done}", SAVING)
      best = metrics if config.checkpoint.keep_best else None
      checkpointer.save(done, vars(state), config=plain(config), record=start.record, metrics=best)

    # ------------------------------ steps ------------------------------
    done = saved = start.step
    unsaved = False  # a save has failed, and is tried again at the next step
    stopped = interrupted and held_out_metrics(done) is None
    while done < steps and not stopped:
      profile.before(done)
      watch.at(f"step {done + 1}: waiting for its batch", begins=True)
      batch = batches.get(done, cancelled=lambda: lockstep.stopping)
      watch.at(f"step {done + 1}: waiting for the other processes")
      if not lockstep.enter():
        stopped = True
        break
      watch.at(f"step {done + 1}: computing")
      state, metrics = train_step.function(state, batch)
      done += 1
      last = done == steps
      evaluating = last or _due(done, config.evaluation.every_steps)
      saving = last or unsaved or _due(done, config.checkpoint.every_steps)
      saving = saving or (evaluating and bool(config.checkpoint.keep_best))
      report(reader.read(done, metrics, drain=evaluating or saving))

      # ------------------------------ evaluation ------------------------------
      held_out = None
      if evaluating:
        held_out = held_out_metrics(done)
        stopped = held_out is None

      # ------------------------------ saving ------------------------------
      # After the metrics are read and written: a step that is saved is finite, and is logged.
      try:
        checkpointer.check()
        if saving:
          save(done, held_out)
          saved = done
        unsaved = False
      except SaveError as error:
        if not watch.group.alone:  # the others do not know; a restart goes on from the last step
          raise
        unsaved = True
        progress.note(f"WARNING: {error}; training goes on, and the next step is saved instead")

    # ------------------------------ end ------------------------------
    if saved < done:  # stopped in between, or the last save has failed
      report(reader.rest())
      save(done, None)
    watch.at("waiting for the last save", SAVING)
    checkpointer.wait()

  watch.at("ending", ENDING)
  say(
    f"{'stopped' if stopped else 'done'}: {done - start.step} steps in "
    f"{duration(meter.seconds)}, evaluation apart; "
    f"{100 * meter.wait_share:.2f} % of it waiting for data"
  )
  return End(state, stopped)


def evaluation_text(step: int, metrics: dict[str, float], *, whole: bool) -> str:
  """Returns the line about an evaluation."""
  numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
  return f"held out after step {step} ({'all' if whole else 'a part'} of it): {numbers}"


def _due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0
