"""The start of a run: from scratch, from a checkpoint, or with parameters of another run."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from checkpointing import restore, resume_policy
from checkpointing.checkpointer import Checkpointer
from checkpointing.consensus import Together
from checkpointing.integrity import Verified
from input_pipeline.row_source import Source
from processes.coordination import current
from processes.workdir_lease import Ownership
from runtime import free_space
from runtime.printable import printable
from runtime.provenance import versions
from training import bad_steps as rollback
from training import record_schema, run_tokenizer, splits, workdir_files
from training.setup import Job
from training.state import State


@dataclasses.dataclass(frozen=True)
class Start:
  """A run about to begin.

  Attributes:
    state: placed as the job's.
    step: the steps that are done.
    record: what the run's checkpoints say of it besides the config.
    checkpointer: open for saving.
    origin: a line about where the state is from.
    known: the record of the checkpoint that it resumes from; {} at the first step.
    owner: of the workdir.
  """

  state: State
  step: int
  record: dict[str, Any]
  checkpointer: Checkpointer
  origin: str
  known: dict[str, Any]
  owner: Ownership = dataclasses.field(default_factory=Ownership)


def check_resume(
  job: Job, source: Source, workdir: epath.Path, accept: Sequence[str] = ()
) -> tuple[dict[str, Any], Verified | None]:
  """Compares a run with the checkpoints in its workdir, if there are any; changes nothing.

  Args:
    job: the run as requested now.
    source: its training split.
    workdir: its folder, which need not exist.
    accept: config keys whose change is accepted.

  Returns:
    The record of the run's checkpoints, and the newest checkpoint, which `begin` takes so that its
    small files are read only once.

  Raises:
    ValueError: something changed that may not, or not without acceptance.
    OSError: the workdir or a file of it cannot be written, or there is no space for a checkpoint.
  """
  require_room(job, workdir)
  workdir_files.require_plain(workdir)
  record = {"versions": versions(), "data": {"name": source.name, "rows": source.fingerprint}}
  if source.tokenizer_digest:
    record["data"]["tokenizer"] = source.tokenizer_digest
  if source.chat_template_digest:
    record["data"]["chat_template"] = source.chat_template_digest
  if report := splits.report(source, job.config):
    record["data_report"] = report
  folder = workdir / restore.FOLDER
  if not restore.steps(folder):
    if accept:
      raise ValueError(f"--accept-changes: {workdir} has no checkpoints to resume from")
    return record, None
  with Checkpointer(folder, read_only=True, verify=job.config.checkpoint.verify) as checkpoints:
    newest = checkpoints.verified()
  old_record = _record(newest)
  rollback.require_same_past(job.config, old_record, newest.step)
  _require_same_stages(newest.config, job.config, newest.step)
  changed = resume_policy.changes(
    rollback.upgraded_config(newest.config),
    plain(job.config),
    old_record=old_record,
    new_record=record,
    accept=accept,
    done=newest.step,
    workdir=workdir,
  )
  return changed, newest


def _require_same_stages(old: Mapping[str, Any], config: ConfigDict, done: int) -> None:
  """Raises ValueError where data.stages differ in a stage that the run has entered."""

  def entered(stages: Any) -> list[Any]:
    return json.loads(json.dumps([stage for stage in stages if stage[0] <= done]))

  before, now = entered(old["data"].get("stages", ())), entered(config.data.stages)
  if before != now:
    raise ValueError(
      f"data.stages: up to step {done}, which is done, they were {before or 'none'} and are now "
      f"{now or 'none'}; change stages that begin after step {done}, or start a new run with "
      f"another --workdir"
    )


def begin(
  job: Job,
  workdir: epath.Path,
  record: dict[str, Any],
  owner: Ownership | None = None,
  newest: Verified | None = None,
) -> Start:
  """Opens the checkpoints and places the state on the devices; changes nothing in the workdir.

  The checkpointer's `start_writing` removes what a killed save has left.

  Args:
    job: the run.
    workdir: its folder.
    record: of its checkpoints, as `check_resume` returns it.
    owner: of the workdir.
    newest: the checkpoint that `check_resume` has compared.

  Raises:
    ValueError: the checkpoint's arrays are not the model's, or none can be read.
    OSError: the workdir cannot be read.
  """
  keys, folder, owner = job.config.checkpoint, workdir / restore.FOLDER, owner or Ownership()
  checkpointer = Checkpointer(
    folder,
    keep=keys.keep,
    keep_every_steps=keys.keep_every_steps,
    keep_best=keys.keep_best,
    warn=warn,
    verify=keys.verify,
    together=_together(job),
    owner=owner,
    writes_later=True,
    tokenizer=run_tokenizer.contents(job.config),
  )
  if checkpointer.steps():
    found, tree = checkpointer.restore_verified(vars(job.placed_state), known=newest)
    step, known = found.step, _record(found)
    state, origin = State(**tree), f"resumes from the checkpoint of step {step}"
  else:
    step, (state, origin), known = 0, first_state(job), {}
  job.check_placed(state)
  return Start(state, step, record, checkpointer, origin, known, owner)


def roll_back(
  job: Job, checkpointer: Checkpointer, bad_steps: rollback.BadSteps, bad_step: int, why: str
) -> tuple[rollback.Rollback, State]:
  """Restores a step before a bad one; returns the rollback and the state. All processes call it.

  Newer checkpoints are removed, since nothing older than the newest can be saved.

  Args:
    job: the run's.
    checkpointer: open for saving, with no save running.
    bad_steps: chooses the step to restore, and records the rollback.
    bad_step: its number, counted from 1.
    why: what is bad.

  Raises:
    ValueError: no checkpoint can be read.
  """
  # All use the list of one process: another may still see a step that is being removed.
  steps = _together(job).from_first(json.dumps(checkpointer.steps()))
  # The bad step itself is saved if a stop interrupted the evaluation that finds it bad.
  saved = [step for step in json.loads(steps) if step < bad_step]
  step, record = bad_steps.target(bad_step, saved), {}
  if step == 0:
    state, _ = first_state(job)
    checkpointer.remove_after(0)
  else:
    try:
      found, tree = checkpointer.restore_verified(vars(job.placed_state), step=step)
    except ValueError as error:  # then the newest that can be read
      warn(f"WARNING: {error}")
      checkpointer.remove_after(bad_step - 1)
      found, tree = checkpointer.restore_verified(vars(job.placed_state))
    step, state, record = found.step, State(**tree), _record(found)
    checkpointer.remove_after(step)
  return bad_steps.roll_back(bad_step, why, step, saved, record), state


def _record(checkpoint: Verified) -> dict[str, Any]:
  """Returns the record of a checkpoint, in the current format."""
  record_schema.require(checkpoint.record, checkpoint.path)
  return rollback.upgraded(checkpoint.record, checkpoint.config)


def require_room(job: Job, workdir: epath.Path) -> None:
  """Checks, without creating anything, that a workdir is writable and has space for a checkpoint.

  Raises:
    OSError: it is not, or has not; with the free and the needed space, and the fix.
  """
  needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(job.state))
  free_space.require(workdir / restore.FOLDER, needed, "a checkpoint", "give another --workdir")


def first_state(job: Job) -> tuple[State, str]:
  """Returns the initial state, and a line about where it is from."""
  if job.config.checkpoint.initialize_from:
    return initialized(job)
  return job.initial_state(), "starts from the first step"


def initialized(job: Job) -> tuple[State, str]:
  """Returns the initial state with another run's parameters; nothing else of that run is read."""
  where = job.config.checkpoint.initialize_from
  folder, step = restore.parse_location(where)
  step, tree = _branches(job, folder, step, (restore.PARAMETERS,))
  state = dataclasses.replace(job.initial_state(), **tree)
  return state, f"starts with the parameters of {where}, step {step}"


def model_state(job: Job, location: str) -> tuple[int, Any, Any]:
  """Returns (step, parameters, variables) of a run, placed as the job's, to evaluate and sample.

  Args:
    job: whose model and mesh they are for.
    location: `DIR[/STEP]`, DIR a workdir or its folder of checkpoints.

  Raises:
    ValueError: no such checkpoint, or one of another model.
  """
  folder, step = restore.parse_location(location)
  step, tree = _branches(job, folder, step, (restore.PARAMETERS, restore.VARIABLES))
  return step, tree[restore.PARAMETERS], tree[restore.VARIABLES]


def _branches(
  job: Job, folder: epath.Path, step: int | None, names: Sequence[str]
) -> tuple[int, dict[str, Any]]:
  abstract = vars(job.placed_state)
  return restore.restore_branches(
    folder,
    {name: abstract[name] for name in names},
    step,
    verify=job.config.checkpoint.verify,
    warn=warn,
    together=_together(job),
  )


def _together(job: Job) -> Together:
  """Returns the consensus of the run's processes about checkpoints."""
  return Together(current(), timeout_seconds=job.config.processes.start_timeout_seconds)


def warn(text: str) -> None:
  """Prints a warning, for all processes once."""
  if current().first:
    restore.warn(printable(text))


def plain(config: ConfigDict) -> dict[str, Any]:
  """Returns a config as JSON has it: nested dicts, tuples as lists."""
  return json.loads(config.to_json_best_effort())
