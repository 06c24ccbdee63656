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
from training.evaluation import Evaluator
from training.job import Job
from training.meter import Meter, MetricsReader
from training.profiling import Profile
from training.reporting import MetricsWriter, ProgressLine, duration, say
from training.resuming import Start, plain
from training.step import State
from training.stopping import StopRequest


@dataclasses.dataclass(frozen=True)
class Data:
  """The batches of a job, both splits opened and found fit."""

  train: TrainingBatches
  held_out: EvaluationBatches


@dataclasses.dataclass(frozen=True)
class End:
  """How a run ended: its last state, and whether it was asked to stop before the last step."""

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


def train(job: Job, data: Data, start: Start, workdir: epath.Path, *, started: float) -> End:
  """Trains from the step where the run starts to the last.

  Args:
    job: a prepared job.
    data: its batches.
    start: where it starts: the state and the step. Its checkpointer is closed at the end.
    workdir: an existing folder.
    started: when the command was given, in seconds since the epoch.

  Raises:
    TrainingStoppedError: a loss or a gradient norm that is not finite, with its step.
  """
  config = job.config
  steps, state = config.training.steps, start.state

  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(StopRequest())
    checkpointer = stack.enter_context(start.checkpointer)

    # ------------------------------ compile ------------------------------
    train_step = job.compile_train_step()
    rows = collectives.summarize(collectives.collectives(train_step.function.as_text(), job.mesh))
    say(f"compiled the train step in {train_step.seconds:.1f} s; its collectives by mesh axis:")
    say(collectives.format_summary(rows))
    evaluate = Evaluator(job, data.held_out, job.compile_eval_step().function)

    # ------------------------------ open ------------------------------
    # On simulated devices one step is in flight at most: more can deadlock in a rendezvous.
    # On accelerators metrics are read a step late, so that the device never waits for the host.
    reader = MetricsReader(late=0 if job.devices.simulated else 1)
    meter = Meter(job)
    shardings = job.batch_shardings
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

    # ------------------------------ steps ------------------------------
    unsaved = False  # a save has failed, and is tried again at the next step
    for step in range(start.step, steps):
      profile.before(step)
      batch = batches.get(step)
      state, metrics = train_step.function(state, batch)
      done = step + 1
      last = done == steps
      evaluating = last or _due(done, config.evaluation.every_steps)
      saving = last or unsaved or bool(stop) or _due(done, config.checkpoint.every_steps)
      for number, values in reader.read(done, metrics, drain=evaluating or saving):
        if number == start.step + 1:
          meter.start(number, batches.wait_seconds)
          seconds = time.time() - started
          progress.note(f"first step finished {seconds:.1f} s after the command was given")
        if number == 1 or _due(number, config.metrics.every_steps) or number == steps:
          values.update(meter.lap(number, batches.wait_seconds))
          writer.write(number, values)
          progress.update(number, meter.text(number, values))

      # ------------------------------ evaluation ------------------------------
      held_out = None
      if evaluating:
        with meter.paused():
          count = 0 if last else config.evaluation.steps
          held_out = evaluate(state.params, steps=count)
          writer.write(done, held_out)
          progress.note(evaluation_text(done, held_out, whole=count == 0))

      # ------------------------------ saving ------------------------------
      # After the metrics are read and written: a step that is saved is finite, and is logged.
      try:
        checkpointer.check()
        if saving:
          best = held_out if config.checkpoint.keep_best else None
          checkpointer.save(
            done, vars(state), config=plain(config), record=start.record, metrics=best
          )
        unsaved = False
      except SaveError as error:
        unsaved = True
        progress.note(f"WARNING: {error}; training goes on, and the next step is saved instead")
      if stop and not unsaved:
        break

  # ------------------------------ end ------------------------------
  say(
    f"{'stopped' if done < steps else 'done'}: {done - start.step} steps in "
    f"{duration(meter.seconds)}, evaluation apart; "
    f"{100 * meter.wait_share:.2f} % of it waiting for data"
  )
  return End(state, stopped=done < steps)


def evaluation_text(step: int, metrics: dict[str, float], *, whole: bool) -> str:
  """Returns the line about an evaluation."""
  numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
  return f"held out after step {step} ({'all' if whole else 'a part'} of it): {numbers}"


def _due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0
