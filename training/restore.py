"""The start of a run: from scratch, from a checkpoint, or with parameters of another run."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from etils import epath, epy
from ml_collections import ConfigDict

from input_pipeline.source import Source
from processes.coordination import current
from processes.workdir_lease import Ownership
from runtime import files, forms
from runtime.provenance import code_files, versions
from training import bad_steps as rollback
from training import run_tokenizer, schedules, splits, workdir_files
from training.checkpointing import integrity
from training.checkpointing.checkpointer import Checkpointer
from training.checkpointing.integrity import (
  BASE,
  FOLDER,
  PARAMETERS,
  TEACHER,
  UnreadableError,
  Verified,
  warn_once,
)
from training.metrics.console import Waiting, say_wrapped
from training.metrics.log_lines import evaluated
from training.setup import Job
from training.state import State, merged, without_teacher
from training.step import Program

if TYPE_CHECKING:
  from training.base_parameters import Base, ParameterReader
  from training.checkpointing.memory_tier import InMemory, MemoryTier

with epy.lazy_imports():  # of runs that resume, save to memory, or have parameters elsewhere
  from training import base_parameters, run_record, teacher_rows
  from training.checkpointing import memory_tier, reading, resume_policy


@dataclasses.dataclass(frozen=True)
class Start:
  """A run about to begin.

  Attributes:
    checkpoints: of the run.
    state: placed as the job's.
    step: the steps that are done.
    stored: the newest of them that is in storage.
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
  stored: int
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

  @property
  def memory(self) -> "MemoryTier | None":
    """Returns its checkpoints in memory."""
    return self.checkpoints.memory

  def start_writing(self) -> None:
    """Begins to change the folders of its checkpoints; all processes call it; raises OSError."""
    self.checkpointer.start_writing()
    if self.memory is not None:
      resumed = self.step > self.stored  # a step that storage has not is one in memory
      self.memory.start_writing(self.owner, self.saved_part(self.state), resumed=resumed)

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
      state, *_ = first_state(self.job, self.base, self.checkpoints.teacher(self.record)[0])
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
      step, record = found.step, run_record.read(found)
      checkpointer.remove_after(step)
    if self.memory is not None:
      self.memory.roll_back(step)
    return bad_steps.roll_back(bad_step, why, step, saved, record), state


# Keys that say what the schedule is; without them a run keeps the one that it was begun with.
_SCHEDULE = ("schedule", "final_fraction", "decay", "warmup_steps", "decay_steps")
_SCHEDULE += ("warmup_tokens", "decay_tokens")


def adopt_schedule(keys: ConfigDict, workdir: epath.Path) -> bool:
  """Lets a run that resumes keep its own warm-up and decay, and continue its schedule.

  By default these are shares of training.steps, which may change. Where a key of the schedule is
  set to another value, the schedule is recomputed for all steps.

  Args:
    keys: the section `optimizer` of a config that is not finalized yet.
    workdir: of the run, which need not exist.

  Returns:
    Whether there is a run to continue.
  """
  folder = workdir / FOLDER
  for step in reversed(integrity.steps(folder)):
    try:
      before = reading.read_json(folder / str(step), integrity.CONFIG)
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

  @functools.cached_property
  def memory(self) -> "MemoryTier | None":
    """Returns the run's checkpoints in memory; None without `checkpoint.memory_every_steps`.

    All processes call it.
    """
    keys = self.job.config.checkpoint
    if not keys.memory_every_steps:
      return None
    return memory_tier.MemoryTier(
      keys.local_dir, self.workdir, together=self.job.consensus, say=say_wrapped
    )

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
    stored, newest = integrity.steps(self.folder), None
    if stored:
      verify = self.job.config.checkpoint.verify
      with Checkpointer(self.folder, read_only=True, verify=verify) as checkpoints:
        newest = checkpoints.verified()
    newest = self._in_memory(max(stored, default=0)) or newest
    if newest is None:
      if accept:
        raise ValueError(f"--accept-changes: {self.workdir} has no checkpoints to resume from")
      self.require_room(part=fresh)
      return record, None
    self.require_room(part=BASE in run_record.read(newest))
    return self._require_same_run(record, newest, accept), newest

  def _in_memory(self, stored: int) -> "InMemory | None":
    """Returns the newest step in memory; None where storage has it, or the schedule changes.

    Args:
      stored: the newest step in storage, from which a schedule that changes is continued.
    """
    if self.memory is None:
      return None

    def saved(record: Mapping[str, Any]) -> Any:
      base = base_parameters.Base.of(record) if BASE in record else None
      return self.saved_part(self.job.placed_state, base)

    found, config = self.memory.newest(saved, after=stored), self.job.config
    if found is None:
      return None
    same = found.config["training"]["steps"] == config.training.steps
    if same and config.optimizer.schedule_on_resume != "restart":
      return found
    say_wrapped(
      f"step {found.step} is in memory, and is not used: the schedule changes, from the step on "
      f"that is in storage"
    )
    return None

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
    old_record, data = run_record.read(newest), self.job.config.data
    run_record.require_same_data(newest.config["data"], data, old_record, newest.step)
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
    stored, restored = checkpointer.steps(), None
    if in_memory := newest is not None and newest.step not in stored:
      try:
        restored = self._restored(checkpointer, newest)
      except UnreadableError as error:
        warn_once(f"WARNING: step {newest.step} in memory is not used: {error}")
        in_memory, newest = False, None
    if stored and restored is None:
      restored = self._restored(checkpointer, newest or checkpointer.verified())
    if restored is not None:
      found, state, base = restored
      step, known = found.step, run_record.read(found)
      origin = f"resumes from the checkpoint of step {step}{f' {found}' if in_memory else ''}"
      old, new = found.config, self.job.config
      totals, plain = (old["training"]["steps"], new.training.steps), forms.plain(new.optimizer)
      if totals[0] == totals[1] and old["optimizer"] == plain:
        changed = ""  # without a look at its rates, for which JAX compiles a program per operation
      else:
        changed = schedules.change_text(old["optimizer"], new.optimizer, *totals, step)
      origin += f"\n{changed}" if changed else ""
    else:
      teacher, known = self.teacher({})
      step, (state, origin, base) = 0, first_state(self.job, teacher=teacher)
      record, known = {**record, **known}, {}
    self.job.check_placed(state)
    if TEACHER in known:
      record = {**record, TEACHER: known[TEACHER]}
    if base is not None:
      record = {**record, **base.record()}
      origin += f"; saves what it trains, the frozen parameters are those of {base.location}"
    saved = max(stored, default=0) if in_memory else step
    return Start(self, state, step, saved, record, checkpointer, origin, known, owner, base)

  def _restored(
    self, checkpointer: Checkpointer, known: Verified, step: int | None = None
  ) -> tuple[Verified, State, "Base | None"]:
    """Returns a checkpoint, its state, placed as the job's, and the base of what it has not saved.

    Args:
      checkpointer: of its folder.
      known: a checkpoint that has been compared.
      step: which; None: the newest that can be read.
    """
    record = run_record.read(known)
    base, (teacher, _) = base_parameters.Base.of(record), self.teacher(record)
    with Waiting("restoring the checkpoint").show():
      if self.memory is not None and isinstance(known, memory_tier.InMemory):
        found, tree = known, self.memory.restore(known)
      else:
        saved = self.saved_part(self.job.placed_state, base)
        found, tree = checkpointer.restore_verified(saved, step=step, known=known)
    params, base = self.reader.completed(tree[PARAMETERS], base, str(self.workdir))
    return found, State(**{**tree, PARAMETERS: {**params, **teacher}}), base

  def teacher(self, record: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the branch of the teacher's parameters, and what a record says of it; {}: none.

    Args:
      record: of a checkpoint; of a run that begins it says nothing yet.

    Raises:
      ValueError: there is no such model, or it is another one than the run has begun with.
    """
    where, top = (self.job.config.distillation[key] for key in ("teacher", "top"))
    known = base_parameters.Base.of(record, TEACHER) if record else None
    other = known is not None and known.stored != bool(top)
    if record and (bool(where) != (known is not None) or other):
      begun = f"with the teacher {known.location}" if known else "without a teacher"
      begun += f" ({known.dtype})" if other else ""
      raise ValueError(
        f"distillation.teacher={where!r}: {self.workdir} has been trained {begun}; set it back, or "
        f"start a new run with another --workdir and checkpoint.initialize_from={self.workdir}"
      )
    if not where:
      return {}, {}
    if top:
      return {}, teacher_rows.require_same(where, known, self.workdir)
    branch, found = self.reader.teacher(known, str(self.workdir))
    return branch, found.record(TEACHER)

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
    there = json.loads(together.from_first(json.dumps(integrity.steps(self.folder))))
    if not there:
      if accept:
        raise ValueError(f"--accept-changes: {self.workdir} has no checkpoints to compare with")
      state, origin, _ = first_state(self.job, teacher=self.teacher({})[0])
      return state, 0, {}, origin
    verify = self.job.config.checkpoint.verify
    with Checkpointer(
      self.folder, read_only=True, verify=verify, warn=warn_once, together=together
    ) as checkpoints:
      earlier = [saved for saved in there if saved < step]
      known = checkpoints.verified(earlier[-1] if earlier else there[0])
      self._require_same_run(self._record_of(source), known, accept)
      if not earlier:
        there = run_record.read(known)
        given = base_parameters.Base.of(there), self.teacher(there)[0]
        state, origin, _ = first_state(self.job, *given)
        return state, 0, {}, origin
      found, state, _ = self._restored(checkpoints, known, known.step)
    self.job.check_placed(state)
    return state, found.step, run_record.read(found), f"restored {found.path}"

  def saved_part(self, state: State, base: "Base | None") -> dict[str, Any]:
    """Returns the part of a state, or of an abstract one, that a run with this base saves."""
    return trained_part(self.job.program, state) if base else without_teacher_part(state)

  def require_room(self, *, part: bool = False) -> None:
    """Checks, without creating anything, that a workdir is writable and has space for a checkpoint.

    Args:
      part: the checkpoint has only the parameters that are trained.

    Raises:
      OSError: it is not, or has not; with the free and the needed space, and the fix.
    """
    job = self.job
    state = trained_part(job.program, job.state) if part else without_teacher_part(job.state)
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    files.require_space(self.folder, needed, "a checkpoint", "give another --workdir")


def without_teacher_part(state: State) -> dict[str, Any]:
  """Returns a state, or an abstract one, without the parameters of a teacher."""
  return {**vars(state), PARAMETERS: without_teacher(state.params)}


def trained_part(program: Program, state: State) -> dict[str, Any]:
  """Returns a state, or an abstract one, without the parameters that no step changes."""
  return {**vars(state), PARAMETERS: program.changing(state.params)[0]}


def first_state(
  job: Job, base: "Base | None" = None, teacher: Any = None
) -> tuple[State, str, "Base | None"]:
  """Returns the initial state, a line about where it is from, and its base.

  Args:
    job: the run.
    base: that of the run's first start, if it has made its first step and saves only a part.
    teacher: the branch of its parameters, if it has one.
  """
  where = base.location if base else job.config.checkpoint.initialize_from
  if where:
    reader = base_parameters.ParameterReader(job)
    state, folder, step = reader.initial_state(where, teacher or {})
    origin = f"starts with the parameters of {where}{'' if step is None else f', step {step}'}"
    return state, origin, reader.found_at_start(folder, step, state)
  return job.initial_state(teacher or None), "starts from the first step", None
