"""What may change when a run resumes: every key of a config belongs to one of three classes.

The first pattern that matches a key decides. The class follows from the effect of the key:
`MAY_CHANGE` does not change what is computed (up to rounding), `ACCEPT` changes it from here on,
`REFUSED` makes it a different run, to which the saved state does not belong.
"""

import fnmatch
import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from runtime.suggest import nearest

MAY_CHANGE, ACCEPT, REFUSED = "may change", "needs acceptance", "refused"

CLASSES = {
  # Where and how it runs.
  "mesh.*": MAY_CHANGE,
  "mesh_dcn.*": MAY_CHANGE,
  "partitioning.*": MAY_CHANGE,
  "memory_limit_gib": MAY_CHANGE,
  "compilation_cache_dir": MAY_CHANGE,
  "processes.*": MAY_CHANGE,
  "planning.*": MAY_CHANGE,
  "argument": MAY_CHANGE,  # the recipe's name; what it sets is compared key by key
  # What is logged, and what is kept.
  "metrics.*": MAY_CHANGE,
  "evaluation.*": MAY_CHANGE,
  "checkpoint.*": MAY_CHANGE,  # initialize_from was used before the first step
  "profile.*": MAY_CHANGE,
  # The data. Other rows, or another order of rows, make it a different run.
  "data.data_dir": MAY_CHANGE,  # dataset.* shows whether the rows are the same
  "data.prefetch_batches": MAY_CHANGE,
  "data.prepare_processes": MAY_CHANGE,
  "data.files": MAY_CHANGE,  # may have moved; dataset.rows shows whether they hold the same
  "data.evaluation_files": MAY_CHANGE,
  "data.stages": ACCEPT,  # only of steps that are not done: training.restore checks
  "data.tokenizer": MAY_CHANGE,  # likewise; dataset.tokenizer
  "data.train_tokenizer": MAY_CHANGE,  # likewise
  "data.chat_template": MAY_CHANGE,  # likewise; dataset.chat_template
  "data.max_bad_records": MAY_CHANGE,  # a run that an unreadable record has stopped may resume
  "data.evaluation_split": MAY_CHANGE,
  "data.global_batch_size": ACCEPT,
  "data.batch_size_ramp": ACCEPT,  # only of steps that are not done: training.restore checks
  "data.sequence_length_ramp": ACCEPT,  # likewise
  "data.skip_rows": ACCEPT,  # only of rows that no step has reached: training.bad_steps checks
  "data.skip_batches": ACCEPT,  # always (): resolved into rows
  "data.*": REFUSED,
  "dataset.*": REFUSED,  # of the record: version, fingerprint
  "seed": REFUSED,
  "task": REFUSED,
  # The model. Initial deviations too: the parameters are initialized, so a change has no effect.
  "model.folder": MAY_CHANGE,  # may have moved; the keys that it determines are compared
  "model.dropout_rate": ACCEPT,
  "model.context_attention": MAY_CHANGE,  # a schedule over mesh.context, which may change as well
  "model.expert_exchange": MAY_CHANGE,  # the same sums in another order, as with another mesh
  "model.expert_capacity": MAY_CHANGE,
  "model.*": REFUSED,
  # The step.
  "training.steps": MAY_CHANGE,  # unless fewer than are done
  "training.tokens": MAY_CHANGE,  # likewise: they become steps
  "training.replica_check_every_steps": MAY_CHANGE,
  "training.callbacks": MAY_CHANGE,
  "training.gradient_accumulation_steps": ACCEPT,
  "training.gradient_reduction": MAY_CHANGE,  # another order of the same sums
  # Likewise; microbatches follow from the mesh, and have other draws of dropout.
  "training.microbatches": MAY_CHANGE,
  "training.pipeline": MAY_CHANGE,
  "training.pipeline_chunks": MAY_CHANGE,
  "training.pipeline_ends": MAY_CHANGE,
  "training.pipeline_gather": MAY_CHANGE,
  "training.compute_dtype": ACCEPT,
  "training.matmul_precision": ACCEPT,
  "training.gradient_reduction_dtype": ACCEPT,
  "training.matmul_dtype": ACCEPT,
  "training.matmul_scaling": REFUSED,  # delayed: the state has the magnitudes of earlier steps
  "training.rematerialization": ACCEPT,
  "training.scan_unroll": MAY_CHANGE,
  "training.loss_chunks": MAY_CHANGE,  # by default it follows the mesh
  "training.z_loss": ACCEPT,
  "training.balance_loss": ACCEPT,
  "training.router_z_loss": ACCEPT,
  "training.router_bias_rate": ACCEPT,
  "training.grouped_matmul": MAY_CHANGE,  # by default it follows the platform
  "training.dpo_*": ACCEPT,
  "training.attention_kernel": MAY_CHANGE,  # by default it follows the platform
  # How bad steps are handled, so that a run which stopped at one can resume.
  "training.on_bad_step": MAY_CHANGE,
  "training.bad_step_*": MAY_CHANGE,
  "training.max_rollbacks": MAY_CHANGE,
  "training.parameter_dtype": REFUSED,
  "training.stochastic_rounding": ACCEPT,
  "training.trainable": REFUSED,  # the optimizer state has only those parameters
  "training.frozen_dtype": REFUSED,  # the frozen parameters would be others
  "lora.alpha": ACCEPT,
  "lora.dropout": ACCEPT,
  "lora.rs": ACCEPT,
  "lora.*": REFUSED,  # the adapters' shapes
  "optimizer.name": REFUSED,  # its state is of another kind
  "optimizer.ema_decays": REFUSED,  # likewise
  "optimizer.state_dtype": REFUSED,  # likewise
  "optimizer.state_memory": MAY_CHANGE,  # the same numbers elsewhere
  "optimizer.learning_rate": ACCEPT,
  "optimizer.schedule": ACCEPT,
  "optimizer.warmup_steps": ACCEPT,  # by default the run's own: training.restore.adopt_schedule
  "optimizer.schedule_on_resume": MAY_CHANGE,
  "optimizer.schedule_changes": MAY_CHANGE,  # likewise
  "optimizer.warmup_tokens": MAY_CHANGE,  # they become steps
  "optimizer.decay_steps": ACCEPT,  # resumes where neither decay has begun: see below
  "optimizer.decay_tokens": MAY_CHANGE,
  "optimizer.decay": ACCEPT,
  "optimizer.final_fraction": ACCEPT,
  "optimizer.arguments": ACCEPT,
  "optimizer.groups": ACCEPT,  # of the same parameters and optimizers, or the state differs
  "optimizer.beta_1": ACCEPT,
  "optimizer.beta_2": ACCEPT,
  "optimizer.epsilon": ACCEPT,
  "optimizer.momentum": ACCEPT,
  "optimizer.weight_decay": ACCEPT,
  "optimizer.independent_weight_decay": ACCEPT,
  "optimizer.clip_norm": ACCEPT,
  "optimizer.clip_groups": ACCEPT,
  "optimizer.clip_quantile": ACCEPT,  # unless it is turned on or off: the state has the norms
  "optimizer.clip_window": REFUSED,
  "compiler_options": ACCEPT,  # may allow less precision; those of the device are not in it
  "versions.*": ACCEPT,  # of the record: the code's and the libraries'
}

# The parts of a record that are compared, and the names that their keys get here.
COMPARED = {"versions": "versions", "data": "dataset"}

STEPS, CODE = "training.steps", "versions.code"
FILES = "code_files"  # of a record: name -> digest of what versions.code covers
SCHEDULE, FINAL_FRACTION = "optimizer.schedule", "optimizer.final_fraction"
DECAY_STEPS = "optimizer.decay_steps"
UNSET = "(unset)"
_NAMED = 8  # so many files are named in a message


def _parts(groups: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], str | None]]:
  """Returns the patterns and the optimizer of each group of parameters."""
  patterns = (one["parameters"] for one in groups)
  patterns = ([one] if isinstance(one, str) else one for one in patterns)
  return [(one, group.get("name")) for one, group in zip(patterns, groups, strict=True)]


# Keys of which a part decides what arrays the optimizer's state has -> that part.
_STATE = {"optimizer.clip_quantile": bool, "optimizer.groups": _parts}


def classify(key: str) -> str | None:
  """Returns the class of a dotted key, or None where no pattern matches it."""
  return next((c for pattern, c in CLASSES.items() if fnmatch.fnmatchcase(key, pattern)), None)


def changes(
  old_config: Mapping[str, Any],
  new_config: Mapping[str, Any],
  *,
  old_record: Mapping[str, Any],
  new_record: Mapping[str, Any],
  accept: Sequence[str] = (),
  done: int,
  workdir: epath.PathLike,
) -> dict[str, Any]:
  """Checks what differs between a checkpoint and the run that is to resume from it.

  Args:
    old_config: nested dicts, as in the checkpoint.
    new_config: as resolved now.
    old_record: the checkpoint's record: `versions`, `data`, `accepted_changes`.
    new_record: the current one; a part that one of the two lacks is not compared.
    accept: dotted keys whose change is accepted.
    done: the step to resume from.
    workdir: the run's folder.

  Returns:
    `new_record` with `accepted_changes`: those of the checkpoint and the new ones, each
    `{"step", "key", "old", "new"}`.

  Raises:
    ValueError: a change that is refused, or that needs acceptance, or an acceptance of
      something that did not change; with every such key in one message.
  """
  parts = {
    name: part for part, name in COMPARED.items() if part in old_record and part in new_record
  }
  old, new = (
    flat({**config, **{name: record[part] for name, part in parts.items()}})
    for config, record in ((old_config, old_record), (new_config, new_record))
  )
  both = {key: (old.get(key, UNSET), new.get(key, UNSET)) for key in sorted({*old, *new})}
  differing = {key: pair for key, pair in both.items() if pair[0] != pair[1]}
  accepted = list(old_record.get("accepted_changes", []))
  needs = {key: _needs(key, both, done) for key in differing}
  asked = {key: pair for key, pair in differing.items() if needs[key] == ACCEPT}
  _check_accepted(accept, asked, needs, accepted, new)
  refused = [key for key in differing if needs[key] == REFUSED]
  _check_refused(refused, differing, done, epath.Path(workdir))
  if missing := [key for key in asked if key not in accept]:
    keys = ",".join([*missing, *(key for key in accept if key in asked)])
    raise ValueError(
      f"{workdir} resumes from step {done}, and what follows would be computed differently:\n"
      + _lines(missing, differing)
      + (_code_text(old_record, new_record) if CODE in missing else "")
      + f"\nset them back, or accept this with --accept-changes={keys}"
    )
  accepted += [
    {"step": done, "key": key, "old": before, "new": after}
    for key, (before, after) in asked.items()
  ]
  return {**new_record, "accepted_changes": accepted}


def _needs(key: str, both: Mapping[str, tuple], done: int) -> str:
  """Returns the class of a key that differs; `both` has the old and the new value of every key.

  A key that no pattern matches (an older version of the code had it) needs acceptance.
  """
  if key == STEPS:
    after = both[key][1]
    return MAY_CHANGE if isinstance(after, int) and after >= done else REFUSED
  steps = both.get(STEPS, (UNSET, UNSET))
  # By default it follows the schedule, whose change is asked for.
  if key == FINAL_FRACTION and both[SCHEDULE][0] != both[SCHEDULE][1]:
    return MAY_CHANGE
  if key == DECAY_STEPS and all(isinstance(one, int) for one in (*steps, *both[key])):
    begins = (total - decay for total, decay in zip(steps, both[key], strict=True))
    return MAY_CHANGE if all(done <= first for first in begins) else ACCEPT
  if key in _STATE and all(value != UNSET for value in both[key]):
    before, after = map(_STATE[key], both[key])
    return ACCEPT if before == after else REFUSED
  return classify(key) or ACCEPT


def _check_refused(
  refused: Sequence[str], differing: Mapping[str, tuple], done: int, workdir: epath.Path
) -> None:
  """Raises ValueError with all changes that need a new run."""
  if refused == [STEPS]:
    raise ValueError(
      f"training.steps={differing[STEPS][1]}, but {workdir} has done {done}; give at least "
      f"{done}, or start a new run with --workdir={free_workdir(workdir)}"
    )
  if refused:
    raise ValueError(
      f"{workdir} resumes from step {done}, which another run has computed:\n"
      + _lines(refused, differing)
      + f"\nset them back, or start a new run with --workdir={free_workdir(workdir)}; where the "
      f"names and shapes of the parameters are the same, it can start from these: "
      f"--config.checkpoint.initialize_from={workdir}"
    )


def _check_accepted(
  accept: Sequence[str],
  asked: Mapping[str, tuple],
  needs: Mapping[str, str],
  accepted: Sequence[Mapping[str, Any]],
  new: Mapping[str, Any],
) -> None:
  """Raises ValueError for accepted changes that need no acceptance.

  One that an earlier start has recorded is allowed, so that the same command resumes.
  """
  recorded = {change["key"]: change["new"] for change in accepted}
  wrong = []
  for key in accept:
    if key in asked or (key in recorded and recorded[key] == new.get(key, UNSET)):
      continue
    if key in needs:
      why = f"this change is {REFUSED}" if needs[key] == REFUSED else "it needs none"
      wrong.append(f"{key}: {why}")
    elif key in new:
      wrong.append(f"{key}: it is the same in the checkpoint")
    else:
      wrong.append(f"{key}: no such key{nearest(key, [*asked, *new])}")
  if wrong:
    raise ValueError("--accept-changes:\n" + "\n".join(f"  {line}" for line in wrong))


def free_workdir(workdir: epath.PathLike) -> epath.Path:
  """Returns the first of WORKDIR_2, WORKDIR_3, ... that does not exist."""
  path, number = epath.Path(workdir), 2
  while (free := path.parent / f"{path.name}_{number}").exists():
    number += 1
  return free


def plain(config: ConfigDict) -> dict[str, Any]:
  """Returns a config as JSON has it: nested dicts, tuples as lists."""
  return json.loads(config.to_json_best_effort())


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns dotted key -> value, as JSON gives it back (tuples are lists)."""
  found = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      found.update(flat(value, f"{prefix}{key}."))
    else:
      found[prefix + key] = json.loads(json.dumps(value))
  return found


def _code_text(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
  """Returns lines with the files of two records that make versions.code differ."""
  if FILES not in old or FILES not in new:
    return ""
  before, now = old[FILES], new[FILES]
  names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
  texts = []
  for name in names[:_NAMED]:
    what = "has changed" if name in now else "is no longer part of the run's code"
    texts.append(f"    {name} {what if name in before else 'is new to the code of the run'}")
  if len(names) > _NAMED:
    texts.append(f"    and {len(names) - _NAMED} more files")
  return "".join(f"\n{text}" for text in texts)


def _lines(keys: Sequence[str], differing: Mapping[str, tuple]) -> str:
  texts = []
  for key in keys:
    before, after = (value if value == UNSET else json.dumps(value) for value in differing[key])
    texts.append(f"  {key}: {before} in the checkpoint, now {after}")
  return "\n".join(texts)
