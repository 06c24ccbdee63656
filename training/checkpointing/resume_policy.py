"""What may change when a run resumes: each key of a config says so in its row (`configs.keys`)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from configs.keys.row import ACCEPT, MAY_CHANGE, REFUSED
from configs.keys.table import resume_class
from runtime import forms
from runtime.suggest import nearest

# The parts of a record that are compared, and the names that their keys get here.
COMPARED = {"versions": "versions", "data": "dataset"}
# The data's version, fingerprint and rows, and the versions of the code and the libraries.
OF_RECORDS = {"dataset": REFUSED, "versions": ACCEPT}

STEPS, CODE = "training.steps", "versions.code"
FILES = "code_files"  # of a record: name -> digest of what versions.code covers
SCHEDULE, FINAL_FRACTION = "optimizer.schedule", "optimizer.final_fraction"
DECAY_STEPS = "optimizer.decay_steps"
GROUPS, OUTER = "mesh_dcn.data", "optimizer.outer_every_steps"
UNSET = "(unset)"
_NAMED = 8  # so many files are named in a message


def _parts(groups: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], str | None]]:
  """Returns the patterns and the optimizer of each group of parameters."""
  patterns = (one["parameters"] for one in groups)
  patterns = ([one] if isinstance(one, str) else one for one in patterns)
  return [(one, group.get("name")) for one, group in zip(patterns, groups, strict=True)]


# Keys of which a part decides what arrays the optimizer's state has -> that part.
_STATE = {"optimizer.clip_quantile": bool, "optimizer.groups": _parts}


def classify(key: str) -> str:
  """Returns what a change of a dotted key, of a config or of a record, means."""
  part = key.partition(".")[0]
  return OF_RECORDS[part] if part in OF_RECORDS else resume_class(key)


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
    forms.flat({**config, **{name: record[part] for name, part in parts.items()}})
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
  """Returns the class of a key that differs; `both` has the old and the new value of every key."""
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
  if key == GROUPS and both.get(OUTER, (0, 0))[1]:  # each has parameters of its own
    return REFUSED
  if key in _STATE and all(value != UNSET for value in both[key]):
    before, after = map(_STATE[key], both[key])
    return ACCEPT if before == after else REFUSED
  return classify(key)


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
