"""The verb `evaluate`: a checkpoint on the validation split, or on the tasks of --tasks."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence

import rich.box
from etils import epath
from rich.console import Console
from rich.table import Table

from commands import build, flags, preflight_facts
from inference import task_evaluation
from inference.request import text_spec
from inference.task_evaluation import Result
from processes.coordination import Lockstep, current
from processes.watchdog import STARTING, Watchdog
from runtime import exit_codes, files
from training import base_parameters, reference, splits
from training.checkpointing import integrity, reading
from training.evaluation import Evaluator, between_batches
from training.metrics.console import ProgressLine, say
from training.tasks import GRPO

FOLDER = "tasks"  # of their results, in the workdir


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Evaluates a checkpoint on the evaluation split, or evaluation.final_steps batches of it."""
  keys = flags.CONFIG.value.evaluation
  if keys.final_steps is None:
    keys.final_steps = 0  # what is derived is for the end of a run
  if flags.TASKS.value is not None:
    return _prepare_tasks(watch)
  ready, location = build.of_checkpoint()
  shared = splits.sharing(ready.config.processes.start_timeout_seconds)
  evaluation = splits.evaluation_batches(ready.config, shared)
  preflight_facts.about_to_run(
    ready, {"held out": evaluation.source}, flags.workdir(), writes=False
  )
  step, params, variables = base_parameters.model_state(ready, location)
  evaluation = reference.attached_to_evaluation(ready, evaluation, location, watch)
  rollouts = None
  if ready.config.task == GRPO:
    from inference import grpo  # of tasks that draw answers alone

    rollouts = grpo.checked(ready, splits.Data(evaluation, evaluation))

  def run() -> int:
    splits.announce_bad(evaluation.source)
    lockstep = Lockstep(watch.group, watch.stop)
    compiled = ready.compile_eval_step().function
    answers = None
    if rollouts is not None:
      answers = rollouts(None, watch)
    steps = ready.config.evaluation.final_steps
    with ProgressLine(evaluation.count(steps)) as progress:
      shown = functools.partial(progress.evaluating, alone=True)
      evaluator = Evaluator(ready, evaluation, compiled, watch, lockstep, shown, answers)
      found = evaluator(params, variables, steps=steps)
    if found is None:
      return exit_codes.STOPPED
    say(found.text(step))
    return exit_codes.DONE

  return run


# ------------------------------ tasks ------------------------------


def _prepare_tasks(watch: Watchdog) -> Callable[[], int]:
  """Scores a checkpoint on the tasks of --tasks."""
  read = task_evaluation.read_tasks(flags.TASKS.value)
  ready, location = build.of_checkpoint()
  tasks = task_evaluation.encode(text_spec(ready.config), read)
  more = {"tasks": task_evaluation.digest(read)}
  preflight_facts.about_to_run(ready, {}, flags.workdir(), writes=False, more=more)
  step, params, variables = base_parameters.model_state(ready, location)
  folder = _folder(location)
  if current().first:
    folder.mkdir(parents=True, exist_ok=True)

  def run() -> int:
    watch.at("compiling", STARTING)
    with ProgressLine(1) as progress:
      lockstep = Lockstep(watch.group, watch.stop)
      before = between_batches(watch, lockstep, progress.evaluating)
      results = task_evaluation.TaskEvaluator(ready, tasks)((params, variables), before)
    if results is None:
      return exit_codes.STOPPED
    say(text(results, step))
    if current().first:
      write(folder, results, location, step)
      say(f"results in {folder / f'{step}.json'}, each record in {folder}/{step}_NAME.jsonl")
    return exit_codes.DONE

  return run


def _folder(location: str) -> epath.Path:
  """Returns the folder of the results: in --workdir where it is given, else in the run's own."""
  if flags.WORKDIR.value:
    return flags.workdir() / FOLDER
  try:
    run, _ = reading.parse_location(location)
  except ValueError:  # a model folder, which is no run
    return flags.workdir() / FOLDER
  return (run.parent if run.name == integrity.FOLDER else run) / FOLDER


def text(results: Sequence[Result], step: int) -> str:
  """Returns the results as a table."""
  table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
  for name in ("task", "records", "metric", "value", "standard error"):
    table.add_column(name, justify="right" if name in ("records", "value") else "left")
  for result in results:
    first = (result.task.name, f"{len(result.samples):,}")
    for name, metric in result.metrics.items():
      error = "" if metric.standard_error is None else f"± {metric.standard_error:.4f}"
      table.add_row(*first, name, f"{metric.value:.4f}", error)
      first = ("", "")
  console = Console(width=100, color_system=None, force_terminal=False, legacy_windows=False)
  with console.capture() as captured:
    console.print(table)
  cut = [
    f"{result.task.name}: in {result.truncated:,} of {len(result.samples):,} records the context "
    f"is longer than a row of data.sequence_length; its beginning was cut off"
    for result in results
    if result.truncated
  ]
  lines = [line.rstrip() for line in captured.get().split("\n") if line.strip()]
  return "\n".join([f"tasks after step {step}:", *lines, *cut])


def write(folder: epath.Path, results: Sequence[Result], location: str, step: int) -> None:
  """Writes the results as JSON, and what the model gave for each record as lines of JSON."""
  listed = {
    result.task.name: {
      "file": result.task.path,
      "kind": result.task.kind,
      "records": len(result.samples),
      "truncated": result.truncated,
      "metrics": {name: dataclasses.asdict(metric) for name, metric in result.metrics.items()},
    }
    for result in results
  }
  for result in results:
    lines = "".join(f"{json.dumps(sample)}\n" for sample in result.samples)
    files.replace(folder / f"{step}_{result.task.name}.jsonl", lines)
  about = {"checkpoint": location, "step": step, "tasks": listed}
  files.replace(folder / f"{step}.json", files.json_text(about, indent=2) + "\n")
