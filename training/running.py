"""A training run from its announcement to its exit code, once nothing can be refused any more."""

import dataclasses
import sys
from collections.abc import Callable

from etils import epath

from input_pipeline.records import UnreadableError
from input_pipeline.sources import Source
from partitioning.mesh import mesh_text
from processes import group as groups
from processes.printable import printable
from processes.watchdog import DONE, Watchdog
from runtime import exit_codes, files
from training import evaluation, goodput, job, loop, opening, resuming, sampling, workdir_files
from training.meter import TrainingStoppedError
from training.reporting import say


def run(
  ready: job.Job, data: opening.Data, start: resuming.Start, workdir: epath.Path, watch: Watchdog
) -> int:
  """Trains, and releases the workdir; returns the exit code."""
  with start.owner:
    return _run(ready, data, start, workdir, watch)


def _run(
  ready: job.Job, data: opening.Data, start: resuming.Start, workdir: epath.Path, watch: Watchdog
) -> int:
  announce(ready, data, workdir)
  say(start.origin)
  # From here on the workdir is changed: what fails is no refusal any more.
  try:
    if watch.group.first:
      write_files(ready, data, workdir, start.owner.require)
    start.checkpointer.start_writing()
  except OSError as error:
    return _failed(error, watch, everywhere=False)
  if _finished(ready, start, workdir):
    start.checkpointer.close()
    say(f"training.steps={ready.config.training.steps} are done; evaluate reads the result")
    return exit_codes.DONE
  try:
    end = loop.train(ready, data, start, workdir, watch, started=goodput.process_started())
  except (TrainingStoppedError, loop.SaveError) as error:
    return _failed(error, watch, everywhere=isinstance(error, TrainingStoppedError))
  say(f"metrics in {workdir / 'metrics.jsonl'}, checkpoints in {start.checkpointer.folder}")
  if end.stopped:
    say("stopped as asked, after saving; run the same command again to go on")
    return exit_codes.STOPPED
  if request := sampling.first_words(ready.config):
    watch.at("showing a sample", DONE)
    say("the model goes on:")
    sampling.show(ready, end.state.params, request)
  return exit_codes.DONE


def _finished(ready: job.Job, start: resuming.Start, workdir: epath.Path) -> bool:
  """Tells whether all steps have been made, and the last evaluation with them."""
  if start.step < ready.config.training.steps:
    return False
  return evaluation.is_logged(ready, workdir, start.step)


def _failed(error: Exception, watch: Watchdog, *, everywhere: bool) -> int:
  """Prints what has ended the run, and tells the other processes; returns exit code 1.

  Args:
    error: what has happened.
    watch: of this process.
    everywhere: it is the same on all processes, such as a loss that is not finite.
  """
  watch.tell("failed", str(error))
  if watch.group.first or not everywhere:
    label = "" if everywhere else groups.label()
    print(f"error: {label}{printable(error)}", file=sys.stderr, flush=True)
  return (
    exit_codes.FAILED if watch.group.alone else groups.leave(exit_codes.FAILED, patience_seconds=3)
  )


def announce(ready: job.Job, data: opening.Data, workdir: epath.Path) -> None:
  """Prints what is about to run: devices, mesh, layout, sizes, data."""
  device = ready.mesh.devices.flat[0]
  kind = (
    "simulated CPU devices, made for this run" if ready.devices.simulated else device.device_kind
  )
  count = groups.current().count
  among = f", of {count} processes" if count > 1 else ""
  mesh = mesh_text(ready.devices.sizes, ready.devices.slices)
  say(f"devices: {ready.mesh.size} x {kind}{among}; mesh: {mesh}")
  say(ready.layout_text(whole=False))
  say(
    f"train: {data.train.source.name}, {len(data.train.source):,} rows; "
    f"held out: {data.held_out.source.name}, {len(data.held_out.source):,} rows"
  )
  announce_bad(data.train.source)
  announce_bad(data.held_out.source)
  say(f"workdir: {workdir}")


def announce_bad(source: Source) -> None:
  """Prints what of a split cannot be read, where that is allowed."""
  if source.bad:
    say(f"{source.name}: {source.bad}")


def write_files(
  ready: job.Job, data: opening.Data, workdir: epath.Path, require: Callable[[], None]
) -> None:
  """Writes `config.json`, `layout.txt` and, if the config allows bad records, their list."""
  text = files.json_text(resuming.plain(ready.config), indent=2) + "\n"
  files.replace(workdir / workdir_files.CONFIG, text, require=require)
  text = ready.layout_text() + "\n"
  files.replace(workdir / workdir_files.LAYOUT, text, require=require)
  if not ready.config.data.max_bad_records:
    return
  sources = {"train": data.train.source, "held out": data.held_out.source}
  listed = {
    split: {"name": source.name, **dataclasses.asdict(source.bad)}
    for split, source in sources.items()
  }
  text = files.json_text(listed, indent=2) + "\n"
  files.replace(workdir / workdir_files.BAD_RECORDS, text, require=require)


def to_its_end(run: Callable[[], int], watch: Watchdog) -> int:
  """Runs what a verb has made ready; where data cannot be read, the answer is one message and 1."""
  try:
    return run()
  except UnreadableError as error:
    if watch.group.alone:
      print(f"error: {printable(error)}", file=sys.stderr, flush=True)
      return exit_codes.FAILED
    if watch.refusing(str(error), "failed"):
      print(f"error: {groups.label()}{printable(error)}", file=sys.stderr, flush=True)
    return groups.leave(exit_codes.FAILED, patience_seconds=3)
