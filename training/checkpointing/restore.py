"""Reads checkpoints: finds a step, compares its arrays with the model, restores them sharded.

Trees are stored as nested dicts by name. Nothing here writes.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from partitioning.rules import named_leaves, nested
from processes.coordination import current
from runtime import files
from runtime.printable import printable
from training.checkpointing import async_writer, integrity
from training.checkpointing.consensus import Together, join_reports
from training.checkpointing.integrity import FULL, STATE, UnreadableError, Verified, one_line

FOLDER = "checkpoints"  # in a workdir
PARAMETERS, VARIABLES = "params", "variables"  # branches of the state
BASE = "base"  # of a record: where the parameters are that the checkpoint has not
_NAMED = 30  # so many arrays stand in a message
_ARRAY = "/.zarray"  # ends the name of each array in TensorStore's index


def warn(text: str) -> None:
  """Prints a warning to standard error at once."""
  print(text, file=sys.stderr, flush=True)


def warn_once(text: str) -> None:
  """Prints a warning to standard error, for all processes once."""
  if current().first:
    warn(printable(text))


def parse_location(text: str) -> tuple[epath.Path, int | None]:
  """Returns the folder of checkpoints, and the step if one is named.

  Args:
    text: `DIR` or `DIR/STEP`; DIR is a run's workdir or the `checkpoints` folder in it.

  Raises:
    ValueError: no such folder, no checkpoints in it, or not that step.
  """
  path = epath.Path(text).expanduser().resolve()
  if path.name.isdecimal() and files.is_local(path) and os.path.islink(path):
    path = epath.Path(os.path.realpath(path))  # a step that is stored elsewhere, with others there
  for folder in (path / FOLDER, path):
    if _is_store(folder):
      return folder, None
  for folder in (path.parent / FOLDER, path.parent):
    if path.name.isdecimal() and _is_store(folder):
      if int(path.name) not in steps(folder):
        raise ValueError(f"{folder} has no step {path.name}; it has {listed(steps(folder))}")
      return folder, int(path.name)
  raise _nothing_in(path)


def _is_store(folder: epath.Path) -> bool:
  """Returns whether a folder holds checkpoints, and not other folders named by numbers."""
  return any((folder / str(step) / STATE).is_dir() for step in steps(folder))


def restore_branches(
  folder: epath.PathLike,
  wanted: Mapping[str, Any] | Callable[[Verified], Mapping[str, Any]],
  step: int | None = None,
  *,
  verify: str = FULL,
  warn: Callable[[str], None] = warn,
  together: Together | None = None,
  compared: bool = False,
) -> tuple[Verified, Any]:
  """Restores some branches of the state, from a run of any optimizer; writes nothing.

  Args:
    folder: of checkpoints, as `parse_location` gives it.
    wanted: name of the branch -> nested dict of ShapeDtypeStructs with shardings; or a function
      that returns this for a step, and raises ValueError where the step does not fit.
    step: which; by default the newest that can be read.
    verify: how a step is checked before it is read: `full`, `size` or `off`.
    warn: called with the reason why newer ones cannot be read.
    together: the processes, each of which reads its own shards; by default a single one.
    compared: as of `read_arrays`.

  Returns:
    The step's config and record, and a tree as it is wanted, of placed arrays.

  Raises:
    ValueError: no such step; names, shapes or dtypes differ (all in one message); or no step
      can be read.
  """
  folder, together = epath.Path(folder), together or Together()

  def read(step: int) -> tuple[Verified, Any]:
    found = integrity.check(folder / str(step), verify)
    tree = wanted(found) if callable(wanted) else wanted
    given = {"branches": tuple(tree), "together": together, "compared": compared}
    return found, read_arrays(found, tree, **given)

  found = restore_first(folder, step, read, together)
  for line in found.warnings(folder, "nothing is changed"):
    warn(line)
  return found.tree


@dataclasses.dataclass(frozen=True)
class Found:
  """The result of a search for a readable step: the step, its tree, and newer broken ones."""

  step: int
  tree: Any
  broken: Mapping[int, str]  # step -> what is wrong with it

  def warnings(self, folder: epath.Path, remedy: str) -> list[str]:
    """Returns a line for each broken step; `remedy` says what happens to it."""
    return [
      f"WARNING: the checkpoint {folder / str(step)} cannot be read ({why}); {remedy}, and "
      f"step {self.step} is used instead"
      for step, why in self.broken.items()
    ]


def restore_first(
  folder: epath.Path,
  step: int | None,
  read: Callable[[int], Any],
  together: Together | None = None,
) -> Found:
  """Reads one step, or by default the newest that can be read.

  Args:
    folder: of checkpoints.
    step: which, or None.
    read: step -> tree; raises UnreadableError.
    together: the processes, if all call this: a step counts if all of them can read it.

  Raises:
    ValueError: no such step, or none that can be read; and what else `read` raises.
  """
  there = require_steps(folder)
  if step is not None and step not in there:
    raise ValueError(f"{folder} has no step {step}; it has {listed(there)}")
  together = together or Together()
  broken: dict[int, str] = {}
  for candidate in [step] if step is not None else reversed(there):
    tree, why = None, ""
    try:
      tree = read(candidate)
    except UnreadableError as error:
      why = str(error)
    if not (why := join_reports(together.exchange(why))):
      return Found(candidate, tree, broken)
    broken[candidate] = why
  others = [s for s in there if s not in broken]
  raise ValueError(
    f"{folder}: nothing to restore from:\n"
    + "\n".join(f"  step {s} cannot be read: {why}" for s, why in broken.items())
    + (f"\nthere are also the steps {listed(others)}" if others else "")
    + "\nrestore the files from a copy, or start a new run in another workdir"
  )


def require_steps(folder: epath.Path) -> list[int]:
  """Returns the steps of a folder; raises ValueError if there are none."""
  there = steps(folder)
  if not there:
    raise _nothing_in(folder)
  return there


def _nothing_in(folder: epath.Path) -> ValueError:
  what = "has no checkpoints" if folder.is_dir() else "is not a folder"
  return ValueError(
    f"{folder} {what}; give the workdir of a run that has saved one, or WORKDIR/STEP"
  )


def listed(there: Sequence[int]) -> str:
  """Returns steps as a text."""
  return ", ".join(map(str, there)) or "none"


def steps(folder: epath.Path) -> list[int]:
  """Returns the steps saved in a folder, oldest first, intact or damaged."""
  if not folder.is_dir():
    return []
  return sorted(int(child.name) for child in folder.iterdir() if integrity.is_step(child))


def read_arrays(
  checkpoint: Verified,
  abstract: Any,
  *,
  branches: Sequence[str] = (),
  together: Together | None = None,
  compared: bool = False,
) -> Any:
  """Restores arrays directly into their shardings, whatever layout wrote them.

  Args:
    checkpoint: whose small files have been verified.
    abstract: a tree of ShapeDtypeStructs with shardings.
    branches: compare and restore only these branches of the state, such as `params`; (): all.
    together: the processes, each of which checks its share and reads its own shards.
    compared: the caller has compared the arrays; dtypes may then differ, and are cast.

  Returns:
    A tree like `abstract` of placed arrays.

  Raises:
    UnreadableError: the part of the checkpoint that this process reads is damaged.
    ValueError: its arrays are not the requested ones; every difference in one message.
  """
  path, wanted = checkpoint.path, named_leaves(abstract)
  if not compared:  # Orbax reports only one of several differences, and casts dtypes silently
    stored = stored_arrays(path)
    if branches:
      stored = {name: x for name, x in stored.items() if name.partition("/")[0] in branches}
    require_same(path, differences(stored, wanted))
  if not wanted:
    return abstract
  integrity.check_share(path, checkpoint.large, together or Together())
  restore_args = {
    name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
    for name, leaf in wanted.items()
  }
  arguments = ocp.args.PyTreeRestore(
    nested(wanted), restore_args=nested(restore_args), partial_restore=bool(branches)
  )
  # Not with an Orbax Checkpointer, which has barriers: a process may fail to read.
  handler = ocp.PyTreeCheckpointHandler()
  restored = _from_orbax(path, lambda path: handler.restore(path, args=arguments))
  arrays = named_leaves(restored)
  return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
  """Compares names, shapes and dtypes, strictly both ways.

  Args:
    stored: name -> array of the checkpoint: anything with a shape and a dtype.
    wanted: name -> array to be restored.

  Returns:
    A line per array that differs.
  """
  lines = []
  for name in sorted({*stored, *wanted}):
    sides = [f"{_text(side[name])}" if name in side else "absent" for side in (stored, wanted)]
    if sides[0] != sides[1]:
      lines.append(f"{name}: {sides[0]} in the checkpoint, {sides[1]} here")
  return lines


def _text(array: Any) -> str:
  return f"{np.dtype(array.dtype)}[{', '.join(map(str, array.shape))}]"


def require_same(path: epath.Path, lines: Sequence[str]) -> None:
  """Raises ValueError if there are differences between a step's arrays and the requested ones.

  Raises:
    UnreadableError: the step's metadata is damaged.
  """
  if not lines:
    return
  _check_names(path)
  count = f"{len(lines)} {'array differs' if len(lines) == 1 else 'arrays differ'}"
  if len(lines) > _NAMED:
    lines = [*lines[:_NAMED], f"and {len(lines) - _NAMED} more"]
  raise ValueError(f"{path} does not fit ({count}):\n" + "\n".join(f"  {x}" for x in lines))


def stored_arrays(path: epath.Path) -> Mapping[str, Any]:
  """Returns name -> an object with the shape and dtype of each array of a step's folder.

  Raises:
    UnreadableError: the metadata is missing or broken.
  """
  # A Checkpointer would log the error and return None.
  metadata = _from_orbax(path, lambda path: ocp.PyTreeCheckpointHandler().metadata(path))
  return named_leaves(metadata.tree)


def _check_names(path: epath.Path) -> None:
  """Distinguishes damaged metadata from a checkpoint of another model, before that is refused.

  Orbax's metadata names the arrays, and TensorStore's index has them by the same names.

  Raises:
    UnreadableError: the two differ.
  """

  def names(path: epath.Path) -> set[str]:
    base = f"file://{os.path.abspath(path)}/" if files.is_local(path) else f"{path}/"
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = [key.decode(errors="replace") for key in store.list().result()]
    return {key.removesuffix(_ARRAY) for key in keys if key.endswith(_ARRAY)}

  indexed = _from_orbax(path, names)
  named = {name.replace("/", ".") for name in stored_arrays(path)}
  if named != indexed:
    few = ", ".join(sorted(named ^ indexed)[:3])
    raise UnreadableError(
      f"{STATE}/_METADATA: it names {len(named)} arrays, and the index has {len(indexed)}; only "
      f"one of them has {few}"
    )


def _from_orbax(path: epath.Path, read: Callable[[epath.Path], Any]) -> Any:
  """Reads the state; errors of Orbax and TensorStore about its files become UnreadableError.

  Damaged files cause nearly every kind of exception. Errors about this machine and not the files
  are passed on: a checkpoint is not broken because the memory is full.
  """
  async_writer.quiet_orbax()
  try:
    return read(path / STATE)
  except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:  # of any kind; what is let through is listed above
    cause = error
    while cause.__cause__ is not None:
      cause = cause.__cause__
    raise UnreadableError(f"{STATE}: {one_line(cause)}") from error
