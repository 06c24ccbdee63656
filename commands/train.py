"""The verb `train`: trains or resumes a run, and returns its exit code."""

import copy
import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence

import jax
from etils import epath, epy

from commands import build, flags, preflight_facts
from configs.schema import optimizer_checks
from partitioning.mesh_sizes import mesh_text
from processes import coordination as groups
from processes.watchdog import DONE, Watchdog
from reports import layout_text
from runtime import exit_codes, extensions, files, forms
from runtime.printable import printable
from training import (
  loop,
  restore,
  run_tokenizer,
  setup,
  splits,
  workdir_files,
)
from training.bad_steps import TrainingStoppedError
from training.callbacks import CallbackError, Observer
from training.checkpointing.async_writer import SaveError
from training.metrics import goodput
from training.metrics.console import say, say_wrapped
from training.tasks import GRPO

with epy.lazy_imports():  # what is said at the end, and what only some runs begin with or show
  from commands import closing, run_report
  from inference import request, task_evaluation
  from training import base_parameters, elastic
  from training.metrics import sinks


_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_NAMES_ARRAYS = (
  "`plan` with this config and --memory prints the arrays at the peak of a device's memory, the "
  "lines that make them, and what makes them smaller"
)


def prepare(watch: Watchdog) -> Callable[[], int]:
  parsed = copy.deepcopy(flags.CONFIG.value)
  run_tokenizer.adopt_missing(flags.CONFIG.value.data, flags.CONFIG.value.model, flags.workdir())
  splits.train_missing_tokenizer(flags.CONFIG.value)
  restore.adopt_schedule(flags.CONFIG.value.optimizer, flags.workdir())
  [ready] = build.prepare(flags.CONFIG)
  if ready.config.training.elastic:
    held = [p for kind in ("parameters", "optimizer") for p in ready.placements[kind].values()]
    elastic.Elastic.of(ready.config, ready.batches).offer(held, ready.devices.sizes)
  workdir = flags.workdir()
  # What was given before anything was taken from the workdir.
  ready = dataclasses.replace(ready.storing(), given=parsed)
  data, start = open_run(ready, workdir, watch, flags.ACCEPT.value)
  return lambda: run(data, start, watch)


def open_run(
  ready: setup.Job,
  workdir: epath.Path,
  watch: Watchdog,
  accepted: Sequence[str] = (),
) -> tuple[splits.Data, restore.Start]:
  """Opens a run's data, and begins or restores it; the workdir is unchanged while it may refuse.

  Args:
    ready: the job.
    workdir: of the run.
    watch: of this process.
    accepted: changes of the config that a run may resume with.

  Raises:
    ValueError: the workdir is of another run, or the config, data or model folder is refused.
  """
  if ready.config.metrics.sinks:
    sinks.require_packages(ready.config.metrics)
  data = splits.open_data(ready)
  # After the vocabulary of the data, whose refusal says more.
  wanted_sample(ready, data)
  if ready.config.task == GRPO:
    from inference import grpo  # of runs that draw answers alone

    data = dataclasses.replace(data, rollouts=grpo.checked(ready, data))
  more = {}
  if tasks := ready.config.evaluation.tasks:
    read = task_evaluation.read_tasks(tasks, "evaluation.tasks")
    encoded = task_evaluation.encode(request.text_spec(ready.config), read)
    scores = task_evaluation.TaskEvaluator(ready, encoded).metrics
    data, more = dataclasses.replace(data, tasks=scores), {"tasks": task_evaluation.digest(read)}
  if ready.config.checkpoint.initialize_from:
    base_parameters.ParameterReader(ready).check_model_folder(workdir)
  checkpoints = restore.RunCheckpoints(ready, workdir)
  keys, room = ready.config.processes, checkpoints.require_room
  with workdir_files.owned(workdir, keys, watch, room) as owner:
    record, newest = checkpoints.check_resume(data.train.source, accepted)
    sources = {"train": data.train.source, "held out": data.evaluation.source}
    preflight_facts.about_to_run(ready, sources, workdir, writes=True, more=more)
    return data, checkpoints.begin(record, owner, newest)


def run(data: splits.Data, start: restore.Start, watch: Watchdog) -> int:
  """Trains, and releases the workdir; returns the exit code."""
  with start.owner:
    return _run(data, start, watch)


def _run(data: splits.Data, start: restore.Start, watch: Watchdog) -> int:
  ready, workdir = start.job, start.workdir
  announce(ready, data, workdir)
  say(start.origin)
  # From here on the workdir is changed: failures are no longer refusals.
  try:
    if watch.group.first:
      write_files(data, start)
    start.start_writing()
  except OSError as error:
    return _failed(error, watch, everywhere=False)
  if finished(start):
    start.checkpointer.close()
    say(
      f"nothing to do: all {ready.config.training.steps:,} steps are done. To train for longer, "
      "raise training.steps; to score the model, run `evaluate`"
    )
    return exit_codes.DONE
  wanted = wanted_sample(ready, data)
  report = report_of(start, wanted, command=flags.command_line())
  try:
    end = loop.train(data, start, watch, started=goodput.began(), observer=report)
  except (TrainingStoppedError, SaveError, CallbackError) as error:
    if watch.survives(error):
      raise
    if flags.DEBUG.value:
      traceback.print_exception(error)
    report.failed(error)
    return _failed(error, watch, everywhere=isinstance(error, TrainingStoppedError))
  except jax.errors.JaxRuntimeError as error:
    if _OUT_OF_MEMORY not in str(error):
      raise
    report.failed(error)
    return _failed(MemoryError(f"{error}. {_NAMES_ARRAYS}"), watch, everywhere=False)
  _say_replicas(ready)
  if not end.stopped:
    closing.curve(workdir)
  say(f"metrics in {workdir / 'metrics.jsonl'}, checkpoints in {start.checkpointer.folder}")
  if ready.config.metrics.report:
    say(f"page of the run: {workdir / workdir_files.REPORT}")
  if end.stopped:
    say("stopped as requested, after saving; run the same command again to resume")
    report.end(stopped=True)
    return exit_codes.STOPPED
  if wanted:
    from inference import sampler  # of runs that end with a sample alone

    watch.at("showing a sample", DONE)
    say("sample from the trained model:")
    model = sampler.TrainedModel(ready, end.state.params, end.state.variables)
    [drawn] = sampler.show(model, wanted, report.sampler)
    report.sampled(drawn)
  closing.next_commands(ready, workdir, samples=wanted is not None)
  report.end()
  return exit_codes.DONE


def wanted_sample(ready: setup.Job, data: splits.Data) -> "request.Request | None":
  """Returns what a run samples, see `first_words`; None without `evaluation.sample_tokens`."""
  if not ready.config.evaluation.sample_tokens:
    return None
  return request.first_words(ready.config, data.evaluation.source)


def report_of(
  start: restore.Start, wanted: "request.Request | None", *, command: str = ""
) -> Observer:
  """Returns the report of a run that begins, and samples what is wanted at each evaluation."""
  if not start.job.config.metrics.report:
    return Observer()
  report = run_report.RunReport(start.job, start.workdir, start.owner.require, wanted)
  report.begin(start.step, command)
  return report


def finished(start: restore.Start) -> bool:
  """Returns whether all steps and the last evaluation are done."""
  whole = start.stored >= start.job.config.training.steps
  return whole and start.is_evaluated()


def _failed(error: Exception, watch: Watchdog, *, everywhere: bool) -> int:
  """Prints the error that ended the run, and notifies the other processes; returns exit code 1.

  Args:
    error: the error.
    watch: of this process.
    everywhere: it occurred on all processes, such as a loss that is not finite.
  """
  watch.tell("failed", str(error))
  if watch.group.first or not everywhere:
    text = f"error: {'' if everywhere else groups.label()}{printable(error)}"
    if watch.group.alone:
      print(text, file=sys.stderr, flush=True)
    else:
      from processes import crash_output  # which a single process does not need

      crash_output.print_error(text, error)
  return (
    exit_codes.FAILED if watch.group.alone else groups.leave(exit_codes.FAILED, patience_seconds=3)
  )


def announce(ready: setup.Job, data: splits.Data, workdir: epath.Path) -> None:
  """Prints what is about to run: devices, mesh, layout, sizes, data."""
  device = ready.mesh.devices.flat[0]
  kind = (
    "simulated CPU devices, made for this run" if ready.devices.simulated else device.device_kind
  )
  count = groups.current().count
  among = f", of {count} processes" if count > 1 else ""
  mesh = mesh_text(ready.devices.sizes, ready.devices.slices)
  say_wrapped(f"devices: {ready.mesh.size} x {kind}{among}; mesh: {mesh}")
  _say_replicas(ready)
  say_wrapped(layout_text.job_text(ready, whole=False))
  sources = {"train": data.train.source, "evaluation": data.evaluation.source}
  stored = {split: one for split, one in sources.items() if not one.report}
  if stored:  # what is announced of the others has their names and rows
    rows = (f"{split}: {one.name}, {len(one):,} rows" for split, one in stored.items())
    say_wrapped("; ".join(rows))
  say_wrapped(optimizer_checks.optimizer_text(ready.config.optimizer))
  splits.announce(*sources.values(), ready.batches.steps, ready.batches.ramp)
  say(f"workdir: {workdir}; {workdir_files.LAYOUT} in it has the sharding of each array")


def _say_replicas(ready: setup.Job) -> None:
  """Prints what mesh an elastic run has."""
  if ready.config.training.elastic:
    of_run = elastic.Elastic.of(ready.config, ready.batches)
    say_wrapped(of_run.text(ready.devices.sizes, ready.devices.slices))


def write_files(data: splits.Data, start: restore.Start) -> None:
  """Writes `config.json`, `given.json`, `layout.txt` and, if any are allowed, bad records."""
  ready, workdir, require = start.job, start.workdir, start.owner.require
  resolved, given = map(forms.plain, (ready.config, ready.given or ready.config))
  for name, values in (
    (workdir_files.CONFIG, resolved),
    (workdir_files.GIVEN, {"config_files": extensions.arguments(), "config": given}),
  ):
    files.replace(workdir / name, files.json_text(values, indent=2) + "\n", require=require)
  text = layout_text.job_text(ready) + "\n"
  files.replace(workdir / workdir_files.LAYOUT, text, require=require)
  copied = run_tokenizer.contents(ready.config.data, ready.config.model)
  run_tokenizer.write(copied, workdir, require)
  if not ready.config.data.max_bad_records:
    return
  sources = {"train": data.train.source, "held out": data.evaluation.source}
  listed = {
    split: {"name": source.name, **dataclasses.asdict(source.bad)}
    for split, source in sources.items()
  }
  text = files.json_text(listed, indent=2) + "\n"
  files.replace(workdir / workdir_files.BAD_RECORDS, text, require=require)
