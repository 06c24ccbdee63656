"""Training, as one story: start, compile, steps, evaluation, end."""

import dataclasses
import math
import time
from typing import Any

import jax
from etils import epath

from input_pipeline.batches import EvaluationBatches, TrainingBatches
from input_pipeline.prefetch import Prefetcher
from input_pipeline.sources import open_source
from models import MODELS
from partitioning import collectives
from training.evaluation import Evaluator
from training.hardware import peak_flops
from training.job import Job
from training.reporting import MetricsWriter, ProgressLine, duration, say


class TrainingStoppedError(RuntimeError):
  """The run cannot go on; the message names the step. Exit code 1."""


@dataclasses.dataclass(frozen=True)
class Data:
  """The batches of a job, both splits opened and found fit."""

  train: TrainingBatches
  held_out: EvaluationBatches


def open_data(job: Job) -> Data:
  """Opens both splits, preparing them on first use.

  Raises:
    ValueError: from the input pipeline: an unknown data set, an empty split, a missing
      feature, fewer rows than a batch, or rows that are not what the model takes.
  """
  config = job.config
  size = config.data.global_batch_size
  source = open_source(config.data, config.data.train_split, config.seed)
  train = TrainingBatches(
    source, global_batch_size=size, seed=config.seed, shuffle=config.data.shuffle
  )
  if train.abstract != job.batch:
    raise ValueError(f"{source.name} gives {train.abstract}, the model takes {job.batch}")
  held_out = open_source(config.data, config.data.evaluation_split, config.seed)
  return Data(train, EvaluationBatches(held_out, global_batch_size=size))


def train(job: Job, data: Data, workdir: epath.Path, *, started: float) -> dict[str, float]:
  """Trains from the first step to the last; returns the metrics of the last evaluation.

  Args:
    job: a prepared job.
    data: its batches.
    workdir: an existing folder for the metrics.
    started: when the command was given, in seconds since the epoch.

  Raises:
    TrainingStoppedError: a loss or a gradient norm that is not finite, with its step.
  """
  config = job.config
  steps = config.training.steps

  # ------------------------------ compile ------------------------------
  train_step = job.compile_train_step()
  rows = collectives.summarize(collectives.collectives(train_step.function.as_text(), job.mesh))
  say(f"compiled the train step in {train_step.seconds:.1f} s; its collectives by mesh axis:")
  say(collectives.format_summary(rows))
  eval_step = job.compile_eval_step()
  evaluate = Evaluator(job, data.held_out, eval_step.function)

  # ------------------------------ start ------------------------------
  state = job.initial_state()
  # On simulated devices one step is in flight at most: more can deadlock in a rendezvous.
  # On accelerators metrics are read a step late, so that the device never waits for the host.
  reader = MetricsReader(late=0 if job.devices.simulated else 1)
  meter = Meter(job)
  held_out: dict[str, float] = {}
  shardings = job.batch_shardings
  with (
    MetricsWriter(workdir, step=0, tensorboard=config.metrics.tensorboard) as writer,
    ProgressLine(steps) as progress,
    Prefetcher(
      lambda step: data.train.batch(step, shardings),
      start=0,
      stop=steps,
      depth=config.data.prefetch_batches,
    ) as batches,
  ):
    # ------------------------------ steps ------------------------------
    for step in range(steps):
      batch = batches.get(step)
      state, metrics = train_step.function(state, batch)
      last = step + 1 == steps
      for done, values in reader.read(step + 1, metrics, drain=last):
        if done == 1:
          meter.start(batches.wait_seconds)
          seconds = time.time() - started
          progress.note(f"first step finished {seconds:.1f} s after the command was given")
        if done == 1 or done % config.metrics.every_steps == 0 or done == steps:
          values.update(meter.lap(done, batches.wait_seconds))
          writer.write(done, values)
          progress.update(done, meter.text(done, values))

      # ------------------------------ evaluation ------------------------------
      every = config.evaluation.every_steps
      if last or (every and (step + 1) % every == 0):
        with meter.paused():
          count = 0 if last else config.evaluation.steps
          held_out = evaluate(state.params, steps=count)
          writer.write(step + 1, held_out)
          progress.note(evaluation_text(step + 1, held_out, whole=count == 0))

  # ------------------------------ end ------------------------------
  say(
    f"done: {steps} steps in {duration(meter.seconds)}, evaluation apart; "
    f"{100 * meter.wait_share:.2f} % of it waiting for data"
  )
  return held_out


def evaluation_text(step: int, metrics: dict[str, float], *, whole: bool) -> str:
  """Returns the line about an evaluation."""
  numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
  return f"held out after step {step} ({'all' if whole else 'a part'} of it): {numbers}"


class MetricsReader:
  """Reads the metrics of steps from the device, `late` steps after they were dispatched."""

  def __init__(self, *, late: int):
    """Sets how many steps may be in flight while one is read."""
    self._late = late
    self._pending: list[tuple[int, Any]] = []

  def read(self, step: int, metrics: Any, *, drain: bool) -> list[tuple[int, dict[str, float]]]:
    """Takes a step's metrics and returns those now due, as (step, values).

    Args:
      step: its number, counted from 1.
      metrics: scalars on the device.
      drain: return all that are left.

    Raises:
      TrainingStoppedError: a loss or gradient norm that is not finite.
    """
    self._pending.append((step, metrics))
    due = []
    while len(self._pending) > (0 if drain else self._late):
      number, scalars = self._pending.pop(0)
      values = {name: float(value) for name, value in jax.device_get(scalars).items()}
      wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(values[name])]
      if wrong:
        numbers = ", ".join(f"{name} is {values[name]}" for name in ("loss", "grad_norm"))
        raise TrainingStoppedError(
          f"step {number}: {numbers}; training stops, since every later step would be as bad. "
          f"A smaller optimizer.learning_rate or a longer optimizer.warmup_steps may help"
        )
      due.append((number, values))
    return due


class Meter:
  """Seconds per step, rates, MFU and waiting, over the steps since the last lap."""

  def __init__(self, job: Job):
    """Reads from the job what a step does."""
    config = job.config
    self._steps = config.training.steps
    self._rows = config.data.global_batch_size
    text = config.data.kind == "text"
    self._unit = "tokens" if text else "examples"
    self._per_step = self._rows * (config.data.sequence_length if text else 1)
    flops = MODELS[config.model.name].train_flops_per_example(config) * self._rows
    peak = peak_flops(job.mesh.devices.flat[0])
    self._mfu_seconds = flops / (peak * job.mesh.size) if peak else None
    self._paused = 0.0
    self._began = self._lap_began = time.monotonic()
    self._lap_step = 0
    self._wait = self._first_wait = 0.0
    self.seconds = 0.0
    self.wait_share = 0.0

  def start(self, wait_seconds: float) -> None:
    """Begins to measure, when the first step is done: compiling and first use stay out."""
    self._began = self._lap_began = time.monotonic()
    self._lap_step = 1
    self._wait = self._first_wait = wait_seconds

  def lap(self, step: int, wait_seconds: float) -> dict[str, float]:
    """Returns the numbers of the steps since the last lap, for `metrics.jsonl`.

    Args:
      step: the newest step that is done.
      wait_seconds: what the loop has waited for data so far.
    """
    now = time.monotonic() - self._paused
    count = max(1, step - self._lap_step)
    seconds = max(now - self._lap_began, 1e-9) / count
    values = {
      "step_seconds": seconds,
      "data_wait_seconds": (wait_seconds - self._wait) / count,
      f"{self._unit}_per_second": self._per_step / seconds,
    }
    if self._mfu_seconds is not None:
      values["mfu"] = self._mfu_seconds / seconds
    self.seconds = now - self._began
    self.wait_share = (wait_seconds - self._first_wait) / max(self.seconds, 1e-9)
    self._lap_began, self._lap_step, self._wait = now, step, wait_seconds
    # The first lap holds no step: it says when measuring began, not how fast a step is.
    return values if step > 1 else {}

  def paused(self) -> "Pause":
    """Returns a context in which the clock stands still (evaluation)."""
    return Pause(self)

  def pause_for(self, seconds: float) -> None:
    """Takes seconds out of the measured time."""
    self._paused += seconds

  def text(self, step: int, values: dict[str, float]) -> str:
    """Returns the progress line."""
    parts = [f"step {step}/{self._steps}", f"loss {values['loss']:.4f}"]
    parts.append(f"grad_norm {values['grad_norm']:.3f}")
    if "step_seconds" in values:
      parts.append(f"{values[f'{self._unit}_per_second']:,.0f} {self._unit}/s")
      if "mfu" in values:
        parts.append(f"MFU {100 * values['mfu']:.1f} %")
      left = (self._steps - step) * self.seconds / max(1, step - 1)
      parts.append(f"left {duration(left)}")
    return "  ".join(parts)


class Pause:
  """Stops a meter's clock for a while."""

  def __init__(self, meter: Meter):
    """Stops nothing yet."""
    self._meter = meter

  def __enter__(self) -> None:
    """Stops the clock."""
    self._began = time.monotonic()

  def __exit__(self, *exception) -> None:
    """Lets it go on."""
    self._meter.pause_for(time.monotonic() - self._began)
