"""The start of a run: from scratch, from a checkpoint, or with parameters of another run."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from etils import epath, epy
from ml_collections import ConfigDict

from input_pipeline.source import Source
from partitioning.rules import named_leaves, nested
from processes.coordination import current
from processes.workdir_lease import Ownership
from runtime import files, forms
from runtime.forms import ANY, COUNT, NUMBER, TEXT, Each, Exactly, Kind, OrNull, is_number, is_whole
from runtime.provenance import code_files, versions
from training import bad_steps as rollback
from training import run_tokenizer, schedules, splits, workdir_files
from training.checkpointing import integrity
from training.checkpointing import restore as checkpoint_restore
from training.checkpointing.checkpointer import Checkpointer
from training.checkpointing.consensus import Together
from training.checkpointing.integrity import Verified
from training.checkpointing.restore import BASE, FOLDER, PARAMETERS, VARIABLES, warn_once
from training.metrics import log_lines
from training.metrics.console import Waiting
from training.metrics.log_lines import evaluated
from training.setup import Job
from training.state import State, merged, split
from training.step import Program

if TYPE_CHECKING:
  from training.base_parameters import Base, ParameterReader

with epy.lazy_imports():  # of runs that resume, or whose parameters are elsewhere
  from interop import hf_folder
  from training import averages, base_parameters
  from training.checkpointing import resume_policy


@dataclasses.dataclass(frozen=True)
class Start:
  """A run about to begin.

  Attributes:
    checkpoints: of the run.
    state: placed as the job's.
    step: the steps that are done.
    record: what the run's checkpoints say of it besides the config.
    checkpointer: open for saving.
    origin: a line about where the state is from.
    known: the record of the checkpoint that it resumes from; {} at the first step.
    owner: of the workdir.
    base: the frozen parameters that it does not save; None if it saves all.
  """

  checkpoints: "RunCheckpoints"
  state: State
  step: int
  record: dict[str, Any]
  checkpointer: Checkpointer
  origin: str
  known: dict[str, Any]
  owner: Ownership = dataclasses.field(default_factory=Ownership)
  base: "Base | None" = None

  @property
  def job(self) -> Job:
    """Returns the run's job."""
    return self.checkpoints.job

  @property
  def workdir(self) -> epath.Path:
    """Returns the run's folder."""
    return self.checkpoints.workdir

  def is_evaluated(self) -> bool:
    """Returns whether the evaluation of the step is in metrics.jsonl; all processes call it.

    A network file system may not show the file to all of them at once.
    """
    seconds = self.job.config.processes.start_timeout_seconds
    done = evaluated(self.workdir, self.step)
    return current().all_true("evaluated", done, timeout_seconds=seconds)

  def saved_part(self, state: State) -> dict[str, Any]:
    """Returns the part of a state, or of an abstract one, that the run saves."""
    return self.checkpoints.saved_part(state, self.base)

  def roll_back(
    self, bad_steps: rollback.BadSteps, bad_step: int, why: str, frozen: Any
  ) -> tuple[rollback.Rollback, State]:
    """Restores a step before a bad one; returns the rollback and the state. All processes call it.

    Newer checkpoints are removed, since nothing older than the newest can be saved. No save may be
    running.

    Args:
      bad_steps: chooses the step to restore, and records the rollback.
      bad_step: its number, counted from 1.
      why: what is bad.
      frozen: nested dict of the parameters that the run does not save.

    Raises:
      ValueError: no checkpoint can be read.
    """
    checkpointer, abstract = self.checkpointer, self.saved_part(self.job.placed_state)
    # All use the list of one process: another may still see a step that is being removed.
    steps = self.job.consensus.from_first(json.dumps(checkpointer.steps()))
    # The bad step itself is saved if a stop interrupted the evaluation that finds it bad.
    saved = [step for step in json.loads(steps) if step < bad_step]
    step, record = bad_steps.target(bad_step, saved), {}
    if step == 0:
      state, *_ = first_state(self.job, self.base)
      checkpointer.remove_after(0)
    else:
      try:
        found, tree = checkpointer.restore_verified(abstract, step=step)
      except ValueError as error:  # then the newest that can be read
        warn_once(f"WARNING: {error}")
        checkpointer.remove_after(bad_step - 1)
        found, tree = checkpointer.restore_verified(abstract)
      params = merged(tree[PARAMETERS], frozen)
      state = State(**{**tree, PARAMETERS: params})
      step, record = found.step, _record(found)
      checkpointer.remove_after(step)
    return bad_steps.roll_back(bad_step, why, step, saved, record), state


# Keys that say what the schedule is; without them a run keeps the one that it was begun with.
_SCHEDULE = ("schedule", "final_fraction", "decay", "warmup_steps", "decay_steps")
_SCHEDULE += ("warmup_tokens", "decay_tokens")


def adopt_schedule(config: ConfigDict, workdir: epath.Path) -> bool:
  """Lets a run that resumes keep its own warm-up and decay, and continue its schedule.

  By default these are shares of training.steps, which may change. Where a key of the schedule is
  set to another value, the schedule is recomputed for all steps.

  Args:
    config: not finalized yet.
    workdir: of the run, which need not exist.

  Returns:
    Whether there is a run to continue.
  """
  folder, keys = workdir / FOLDER, config.optimizer
  for step in reversed(checkpoint_restore.steps(folder)):
    try:
      before = integrity.read_json(folder / str(step), integrity.CONFIG)
      old, steps = before["optimizer"], before["training"]["steps"]
      given = [key for key in _SCHEDULE if keys[key] is not None]
      same = all(keys[key] == old.get(key, keys[key]) for key in given)
      if keys.warmup_steps is None and not keys.warmup_tokens:
        keys.warmup_steps = old["warmup_steps"]
      if keys.decay_steps is None and not keys.decay_tokens and old["schedule"] == "wsd":
        keys.decay_steps = old["decay_steps"]
      how = "restart" if keys.schedule_on_resume == "restart" else "stretch"
      earlier = map(tuple, old.get("schedule_changes", ()))
      keys.schedule_changes = (*earlier, (step, steps, how)) if same else ()
      return True
    except (integrity.UnreadableError, KeyError, TypeError):
      continue  # whoever verifies the step says what is wrong with it
  return False


@dataclasses.dataclass(frozen=True)
class RunCheckpoints:
  """The checkpoints in a run's workdir: what a run is compared with, begins with and goes back to.

  Attributes:
    job: the run as requested now.
    workdir: its folder, which need not exist.
  """

  job: Job
  workdir: epath.Path

  @property
  def folder(self) -> epath.Path:
    """Returns the folder of the checkpoints."""
    return self.workdir / FOLDER

  @property
  def reader(self) -> "ParameterReader":
    """Returns what reads parameters of the run from elsewhere."""
    return base_parameters.ParameterReader(self.job)

  def check_resume(
    self, source: Source, accept: Sequence[str] = ()
  ) -> tuple[dict[str, Any], Verified | None]:
    """Compares a run with the checkpoints in its workdir, if there are any; changes nothing.

    Args:
      source: its training split.
      accept: config keys whose change is accepted.

    Returns:
      The record of the run's checkpoints, and the newest checkpoint, which `begin` takes so that
      its small files are read only once.

    Raises:
      ValueError: something changed that may not, or not without acceptance.
      OSError: the workdir or a file of it cannot be written, or there is no space for a checkpoint.
    """
    fresh = bool(self.job.config.checkpoint.initialize_from)
    self.require_room(part=True)
    workdir_files.require_plain(self.workdir)
    record = self._record_of(source)
    if not checkpoint_restore.steps(self.folder):
      if accept:
        raise ValueError(f"--accept-changes: {self.workdir} has no checkpoints to resume from")
      self.require_room(part=fresh)
      return record, None
    verify = self.job.config.checkpoint.verify
    with Checkpointer(self.folder, read_only=True, verify=verify) as checkpoints:
      newest = checkpoints.verified()
    self.require_room(part=BASE in _record(newest))
    return self._require_same_run(record, newest, accept), newest

  def _record_of(self, source: Source) -> dict[str, Any]:
    """Returns what the checkpoints of a run say of its code, libraries and data."""
    record: dict[str, Any] = {"versions": versions(), "code_files": code_files()}
    record["data"] = {"name": source.name, "rows": source.fingerprint}
    if source.tokenizer_digest:
      record["data"]["tokenizer"] = source.tokenizer_digest
    if source.chat_template_digest:
      record["data"]["chat_template"] = source.chat_template_digest
    if report := splits.report(source, self.job.batches):
      record["data_report"] = report
    return record

  def _require_same_run(
    self, record: dict[str, Any], newest: Verified, accept: Sequence[str]
  ) -> dict[str, Any]:
    """Returns the record with the accepted changes; raises ValueError for what may not change."""
    old_record, data = _record(newest), self.job.config.data
    rollback.require_same_past(data, old_record, newest.step)
    _require_same_stages(newest.config["data"], data, newest.step)
    rollback.require_same_ramps(newest.config["data"], data, old_record, newest.step)
    return resume_policy.changes(
      newest.config,
      forms.plain(self.job.config),
      old_record=old_record,
      new_record=record,
      accept=accept,
      done=newest.step,
      workdir=self.workdir,
    )

  def begin(
    self, record: dict[str, Any], owner: Ownership | None = None, newest: Verified | None = None
  ) -> Start:
    """Opens the checkpoints and places the state on the devices; changes nothing in the workdir.

    The checkpointer's `start_writing` removes what a killed save has left.

    Args:
      record: of its checkpoints, as `check_resume` returns it.
      owner: of the workdir.
      newest: the checkpoint that `check_resume` has compared.

    Raises:
      ValueError: the checkpoint's arrays are not the model's, or none can be read.
      OSError: the workdir cannot be read.
    """
    keys, owner = self.job.config.checkpoint, owner or Ownership()
    checkpointer = Checkpointer(
      self.folder,
      keep=keys.keep,
      keep_every_steps=keys.keep_every_steps,
      keep_best=keys.keep_best,
      warn=warn_once,
      verify=keys.verify,
      together=self.job.consensus,
      owner=owner,
      writes_later=True,
      tokenizer=run_tokenizer.contents(self.job.config.data, self.job.config.model),
    )
    if checkpointer.steps():
      found, state, base = self._restored(checkpointer, newest or checkpointer.verified())
      step, known = found.step, _record(found)
      origin = f"resumes from the checkpoint of step {step}"
      old, new = found.config, self.job.config
      totals = old["training"]["steps"], new.training.steps
      if changed := schedules.change_text(old["optimizer"], new.optimizer, *totals, step):
        origin += f"\n{changed}"
    else:
      step, (state, origin, base), known = 0, first_state(self.job), {}
    self.job.check_placed(state)
    if base is not None:
      record = {**record, **base.record()}
      origin += f"; saves what it trains, the frozen parameters are those of {base.location}"
    return Start(self, state, step, record, checkpointer, origin, known, owner, base)

  def _restored(
    self, checkpointer: Checkpointer, known: Verified, step: int | None = None
  ) -> tuple[Verified, State, "Base | None"]:
    """Returns a checkpoint, its state, placed as the job's, and the base of what it has not saved.

    Args:
      checkpointer: of its folder.
      known: a checkpoint that has been compared.
      step: which; None: the newest that can be read.
    """
    base = base_parameters.Base.of(_record(known))
    with Waiting("restoring the checkpoint").show():
      saved = self.saved_part(self.job.placed_state, base)
      found, tree = checkpointer.restore_verified(saved, step=step, known=known)
    params, base = self.reader.completed(tree[PARAMETERS], base, str(self.workdir))
    return found, State(**{**tree, PARAMETERS: params}), base

  def before_step(
    self, source: Source, step: int, accept: Sequence[str] = ()
  ) -> tuple[State, int, dict[str, Any], str]:
    """Returns the state of the newest checkpoint before a step, or the initial one; only reads.

    Args:
      source: its training split.
      step: counted from 1.
      accept: config keys whose change is accepted.

    Returns:
      The state, the steps that are done, the checkpoint's record, and where the state is from.

    Raises:
      ValueError: the run has no such step, or its checkpoints are of another run.
    """
    last = self.job.config.training.steps
    if not 1 <= step <= last:
      raise ValueError(f"--step={step}: the steps of the run are 1 to training.steps={last}")
    together = self.job.consensus
    # All use the list of one process: a live owner of the workdir may be removing a step.
    there = json.loads(together.from_first(json.dumps(checkpoint_restore.steps(self.folder))))
    if not there:
      if accept:
        raise ValueError(f"--accept-changes: {self.workdir} has no checkpoints to compare with")
      state, origin, _ = first_state(self.job)
      return state, 0, {}, origin
    verify = self.job.config.checkpoint.verify
    with Checkpointer(
      self.folder, read_only=True, verify=verify, warn=warn_once, together=together
    ) as checkpoints:
      earlier = [saved for saved in there if saved < step]
      known = checkpoints.verified(earlier[-1] if earlier else there[0])
      self._require_same_run(self._record_of(source), known, accept)
      if not earlier:
        state, origin, _ = first_state(self.job, base_parameters.Base.of(_record(known)))
        return state, 0, {}, origin
      found, state, _ = self._restored(checkpoints, known, known.step)
    self.job.check_placed(state)
    return state, found.step, _record(found), f"restored {found.path}"

  def saved_part(self, state: State, base: "Base | None") -> dict[str, Any]:
    """Returns the part of a state, or of an abstract one, that a run with this base saves."""
    return vars(state) if base is None else trained_part(self.job.program, state)

  def require_room(self, *, part: bool = False) -> None:
    """Checks, without creating anything, that a workdir is writable and has space for a checkpoint.

    Args:
      part: the checkpoint has only the parameters that are trained.

    Raises:
      OSError: it is not, or has not; with the free and the needed space, and the fix.
    """
    job = self.job
    state = trained_part(job.program, job.state) if part else vars(job.state)
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    files.require_space(self.folder, needed, "a checkpoint", "give another --workdir")


def trained_part(program: Program, state: State) -> dict[str, Any]:
  """Returns a state, or an abstract one, without the parameters that no step changes."""
  return {**vars(state), PARAMETERS: program.changing(state.params)[0]}


def _require_same_stages(old: Mapping[str, Any], data: ConfigDict, done: int) -> None:
  """Raises ValueError where data.stages differ in a stage that the run has entered."""

  def entered(stages: Any) -> list[Any]:
    return json.loads(json.dumps([stage for stage in stages if stage[0] <= done]))

  before, now = entered(old.get("stages", ())), entered(data.stages)
  if before != now:
    raise ValueError(
      f"data.stages: up to step {done}, which is done, they were {before or 'none'} and are now "
      f"{now or 'none'}; change stages that begin after step {done}, or start a new run with "
      f"another --workdir"
    )


def _record(checkpoint: Verified) -> dict[str, Any]:
  """Returns the record of a checkpoint, whose form is checked."""
  require_record(checkpoint.record, checkpoint.path)
  return dict(checkpoint.record)


def first_state(job: Job, base: "Base | None" = None) -> tuple[State, str, "Base | None"]:
  """Returns the initial state, a line about where it is from, and its base.

  Args:
    job: the run.
    base: that of the run's first start, if it has made its first step and saves only a part.
  """
  where = base.location if base else job.config.checkpoint.initialize_from
  if where:
    return base_parameters.ParameterReader(job).initialized(where)
  return job.initial_state(), "starts from the first step", None


def model_state(job: Job, location: str) -> tuple[int, Any, Any]:
  """Returns (step, parameters, variables) of a run, placed as the job's, to evaluate and sample.

  Parameters that the run has not saved are read from its base, or from the job's
  `checkpoint.initialize_from`.

  Args:
    job: whose model and mesh they are for.
    location: `DIR[/STEP]`, DIR a workdir or its folder of checkpoints; or a model folder, which is
      step 0.

  Raises:
    ValueError: no such checkpoint, or one of another model; or its base is missing or another.
  """
  reader = base_parameters.ParameterReader(job)
  if hf_folder.is_model(location):
    if decay := job.config.evaluation.ema_decay:
      raise ValueError(f"evaluation.ema_decay={decay:g}: {location} is a model without averages")
    wanted = named_leaves(job.placed_state.params)
    _, _, arrays = reader.read(location, wanted, optional=reader.adapters)
    if arrays.keys() == wanted.keys() and not job.state.variables:
      # Without the optimizer's state, which is twice as large.
      return 0, nested(arrays), {}
    state, _, _ = reader.initial_state(location)
    return 0, state.params, state.variables
  folder, step = checkpoint_restore.parse_location(location)

  def saved_part(checkpoint: Verified) -> dict[str, Any]:
    reader.require_same_adapters(checkpoint)
    params, variables = job.placed_state.params, job.placed_state.variables
    if BASE in checkpoint.record:
      there = checkpoint_restore.stored_arrays(checkpoint.path)
      params, _ = split(params, lambda name: f"{PARAMETERS}/{name}" in there)
    return {PARAMETERS: params, VARIABLES: variables}

  given = {"verify": job.config.checkpoint.verify, "warn": warn_once, "together": job.consensus}
  with Waiting(f"restoring the parameters of {folder}").show():
    found, tree = checkpoint_restore.restore_branches(folder, saved_part, step, **given)
  base = base_parameters.Base.of(_record(found)) if BASE in found.record else None
  params, _ = reader.completed(tree[PARAMETERS], base, str(folder))
  if decay := job.config.evaluation.ema_decay:
    trained, _ = job.program.split(job.placed_state.params)
    average = _average(found, trained, decay, job.consensus)
    params = merged(average, job.program.split(params)[1])
  return found.step, params, tree[VARIABLES]


def _average(checkpoint: Verified, wanted: Any, decay: float, together: Together) -> Any:
  """Returns an average of the trained parameters of a checkpoint that was read.

  Args:
    checkpoint: whose files have been verified.
    wanted: abstract, with the parameters' shardings.
    decay: which average.
    together: the processes.

  Raises:
    ValueError: the step has no average with this decay; with those that it has.
  """
  branch, key, path = "optimizer", averages.key(decay), checkpoint.path
  names = checkpoint_restore.stored_arrays(path)
  parts = (name.split("/") for name in names if name.startswith(f"{branch}/{averages.FIELD}/"))
  if key not in (there := sorted({part[2] for part in parts})):
    known = ", ".join(one.replace("_", ".") for one in there)
    known = known or "none (optimizer.ema_decays was not set)"
    raise ValueError(f"evaluation.ema_decay={decay:g}: {path} has no such average; it has {known}")
  found = checkpoint_restore.read_arrays(
    dataclasses.replace(checkpoint, large=()),
    {branch: {averages.FIELD: {key: wanted}}},
    branches=(branch,),
    together=together,
    compared=True,
  )
  return found[branch][averages.FIELD][key]


# ------------------------------ the form of a record ------------------------------
# Digests show that a record is what was written, not that it is well-formed: another version or a
# person may have written both. A malformed key is refused here by its name, before it causes an
# error far from here.

_NOT_FINITE = ("nan", "inf", "-inf")  # as they are written
_METRIC = Kind("a number", lambda value: is_number(value) or value in _NOT_FINITE)


def _is_position(value: Any) -> bool:
  keys = {"step", "row", "batch"}
  if not isinstance(value, list) or not value:
    return False
  if not all(isinstance(one, dict) and set(one) == keys for one in value):
    return False
  if not all(map(is_whole, (number for one in value for number in one.values()))):
    return False
  steps = [one["step"] for one in value]
  return steps[0] == 0 and steps == sorted({*steps}) and all(one["batch"] > 0 for one in value)


def _is_range(value: Any) -> bool:
  if not isinstance(value, list) or len(value) != 2:
    return False
  return all(map(is_whole, value)) and value[0] < value[1]


_POSITION = Kind("a list of step, row and batch, ascending from step 0,", _is_position)
_SKIPPED = {"skipped_rows": [Kind("a range of rows", _is_range)]}

# Keys that are missing or unknown belong to another version.
RECORD_FORM = {
  "versions": Each(TEXT),
  "code_files": Each(TEXT),
  "data": {"name": TEXT, "rows": TEXT},
  "data_report": Each(NUMBER),
  "accepted_changes": [Exactly({"step": COUNT, "key": TEXT, "old": ANY, "new": ANY})],
  "metrics": Each(_METRIC),
  "metrics_over": {"data": TEXT, "examples": COUNT},
  BASE: Exactly({"folder": TEXT, "step": OrNull(COUNT), "dtype": TEXT, "digest": TEXT}),
  rollback.POSITION: _POSITION,
  rollback.RECORD: {
    **_SKIPPED,
    "rollbacks": [Exactly({"bad_step": COUNT, "why": TEXT, "step": COUNT, **_SKIPPED})],
    "losses": [NUMBER],
  },
  log_lines.LINES: {"steps": COUNT, "evaluations": COUNT},
}


def require_record(record: Mapping[str, Any], path: epath.Path) -> None:
  """Raises ValueError if a record is malformed, with the keys and the expected and actual values.

  Args:
    record: of a checkpoint.
    path: of the checkpoint.
  """
  if wrong := list(forms.wrong(record, RECORD_FORM)):
    raise ValueError(
      f"{path}: its record is malformed, though its digests match: "
      f"{'; '.join(forms.first(wrong, 8))}; move this step away to start from the one before, or "
      f"give another --workdir"
    )
