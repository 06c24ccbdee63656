"""Reading a checkpoint: is it whole, does it fit, and its arrays, straight into their layout.

Nothing here ever writes. A step's folder, as Orbax commits it:

  STEP/commit_success.txt, STEP/_CHECKPOINT_METADATA    written last
  STEP/config/metadata, STEP/record/metadata            JSON
  STEP/state/                                           the arrays, in TensorStore's OCDBT format
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from checkpointing import trees

FOLDER = "checkpoints"  # in a workdir
STATE, CONFIG, RECORD = "state", "config", "record"
PARAMETERS = "params"  # the branch of the state that holds them
COMMITTED = "commit_success.txt"
STEP_METADATA = "_CHECKPOINT_METADATA"


class UnreadableError(Exception):
  """A step's folder is torn: a file of it is missing, cut short or not what it should be."""


def warn(text: str) -> None:
  """Prints a warning to standard error at once."""
  print(text, file=sys.stderr, flush=True)


def parse_location(text: str) -> tuple[epath.Path, int | None]:
  """Returns the folder of checkpoints, and the step where one is named.

  Args:
    text: `DIR` or `DIR/STEP`; DIR is a run's workdir or the `checkpoints` folder in it.

  Raises:
    ValueError: no such folder, no checkpoints in it, or not that step.
  """
  path = epath.Path(text).expanduser().resolve()
  for folder in (path / FOLDER, path):
    if _is_store(folder):
      return folder, None
  for folder in (path.parent / FOLDER, path.parent):
    if path.name.isdecimal() and _is_store(folder):
      if int(path.name) not in steps(folder):
        raise ValueError(f"{folder} holds no step {path.name}; it holds {listed(steps(folder))}")
      return folder, int(path.name)
  raise _nothing_in(path)


def _is_store(folder: epath.Path) -> bool:
  """Tells a folder of checkpoints from one that holds other folders named by numbers."""
  return any((folder / str(step) / STATE).is_dir() for step in steps(folder))


def restore_parameters(
  folder: epath.PathLike,
  abstract: Any,
  step: int | None = None,
  *,
  warn: Callable[[str], None] = warn,
  agree: Callable[[bool], bool] = bool,
) -> tuple[int, Any]:
  """Restores the parameters alone, from a run of any optimizer; writes nothing.

  Args:
    folder: of checkpoints, as `parse_location` gives it.
    abstract: the nested dict of parameters, ShapeDtypeStructs with shardings.
    step: which; by default the newest that can be read.
    warn: is told of newer ones that cannot.
    agree: as of `restore_first`.

  Returns:
    The step, and a tree like `abstract` of placed arrays.

  Raises:
    ValueError: no such step; names, shapes or dtypes differ (all in one message); or no step
      can be read.
  """
  folder = epath.Path(folder)
  found = restore_first(
    folder, step, lambda step: read_arrays(folder / str(step), abstract, under=PARAMETERS), agree
  )
  for line in found.warnings(folder, "nothing is changed"):
    warn(line)
  return found.step, found.tree


@dataclasses.dataclass(frozen=True)
class Found:
  """What a search for a readable step has found: the step, its tree, and the broken newer ones."""

  step: int
  tree: Any
  broken: Mapping[int, str]  # step -> what is wrong with it

  def warnings(self, folder: epath.Path, remedy: str) -> list[str]:
    """Returns a line for each broken step; `remedy` says what becomes of it."""
    return [
      f"WARNING: the checkpoint {folder / str(step)} cannot be read ({why}); {remedy}, and "
      f"step {self.step} is used instead"
      for step, why in self.broken.items()
    ]


def restore_first(
  folder: epath.Path,
  step: int | None,
  read: Callable[[int], Any],
  agree: Callable[[bool], bool] = bool,
) -> Found:
  """Reads one step, or where none is named the newest that can be read.

  Args:
    folder: of checkpoints.
    step: which, or None.
    read: step -> tree; raises UnreadableError.
    agree: tells whether all processes, each of which reads its own shards, could read theirs.

  Raises:
    ValueError: no such step, or none that can be read; and whatever `read` raises besides.
  """
  there = require_steps(folder)
  if step is not None and step not in there:
    raise ValueError(f"{folder} holds no step {step}; it holds {listed(there)}")
  broken: dict[int, str] = {}
  for candidate in [step] if step is not None else reversed(there):
    tree, why = None, ""
    try:
      tree = read(candidate)
    except UnreadableError as error:
      why = str(error)
    if agree(not why):
      return Found(candidate, tree, broken)
    broken[candidate] = why or "another process could not read its shards"
  others = [s for s in there if s not in broken]
  raise ValueError(
    f"{folder}: nothing to restore from:\n"
    + "\n".join(f"  step {s} cannot be read: {why}" for s, why in broken.items())
    + (f"\nthere are also the steps {listed(others)}" if others else "")
    + "\nput the files back from a copy, or start anew in another workdir"
  )


def require_steps(folder: epath.Path) -> list[int]:
  """Returns the steps of a folder; raises ValueError where there are none."""
  there = steps(folder)
  if not there:
    raise _nothing_in(folder)
  return there


def _nothing_in(folder: epath.Path) -> ValueError:
  what = "holds no checkpoints" if folder.is_dir() else "is no folder"
  return ValueError(
    f"{folder} {what}; give the workdir of a run that has saved one, or WORKDIR/STEP"
  )


def listed(there: Sequence[int]) -> str:
  """Returns steps as a text."""
  return ", ".join(map(str, there)) or "none"


def steps(folder: epath.Path) -> list[int]:
  """Returns the steps whose folders stand there, oldest first, whole or not."""
  if not folder.is_dir():
    return []
  names = [child.name for child in folder.iterdir()]
  return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def read_json(path: epath.Path, item: str) -> dict[str, Any]:
  """Returns the JSON of an item (`config` or `record`) of a step's folder.

  Raises:
    UnreadableError: it is missing or is not JSON.
  """
  try:
    content = json.loads((path / item / "metadata").read_text())
  except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
    raise UnreadableError(f"{item}/metadata: {_one_line(error)}") from error
  if not isinstance(content, dict):
    raise UnreadableError(f"{item}/metadata: not a JSON object")
  return content


def read_arrays(path: epath.Path, abstract: Any, *, under: str = "") -> Any:
  """Restores arrays directly into their shardings, whatever layout wrote them.

  Args:
    path: a step's folder.
    abstract: a tree of ShapeDtypeStructs with shardings.
    under: compare and restore only what stands under this name (`params`) in the checkpoint.

  Returns:
    A tree like `abstract` of placed arrays. Each process reads its own shards only.

  Raises:
    UnreadableError: the checkpoint is torn.
    ValueError: it holds other arrays than asked for; every difference in one message.
  """
  _check_committed(path)
  prefix = f"{under}/" if under else ""
  wanted = {prefix + name: leaf for name, leaf in trees.named_leaves(abstract).items()}
  # Orbax reports one difference of several, and casts another dtype without a word.
  stored = {n: a for n, a in stored_arrays(path).items() if n.startswith(prefix)}
  lines = trees.differences(stored, wanted)
  if lines:
    count = f"{len(lines)} {'array differs' if len(lines) == 1 else 'arrays differ'}"
    raise ValueError(f"{path} does not fit ({count}):\n" + "\n".join(f"  {x}" for x in lines))
  restore_args = {
    name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
    for name, leaf in wanted.items()
  }
  arguments = ocp.args.PyTreeRestore(
    trees.nested(wanted), restore_args=trees.nested(restore_args), partial_restore=bool(under)
  )
  # Not through a Checkpointer, in which processes wait for one another: one may fail to read.
  handler = ocp.PyTreeCheckpointHandler()
  restored = _from_orbax(path, lambda path: handler.restore(path, args=arguments))
  arrays = trees.named_leaves(restored)
  return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])


def stored_arrays(path: epath.Path) -> Mapping[str, Any]:
  """Returns name -> an object with the shape and dtype of each array of a step's folder.

  Raises:
    UnreadableError: the metadata is missing or broken.
  """
  # A Checkpointer would log what is wrong and answer None.
  metadata = _from_orbax(path, lambda path: ocp.PyTreeCheckpointHandler().metadata(path))
  return trees.named_leaves(metadata.tree)


def _check_committed(path: epath.Path) -> None:
  """Looks at what Orbax takes on trust: the marks that a step was written to its end."""
  missing = [
    name
    for name in (
      COMMITTED,
      STEP_METADATA,
      *(f"{item}/{COMMITTED}" for item in (STATE, CONFIG, RECORD)),
    )
    if not (path / name).exists() or not (path / name).stat().length
  ]
  if missing:
    raise UnreadableError(f"missing or empty: {', '.join(missing)}")
  try:
    json.loads((path / STEP_METADATA).read_text())
  except (OSError, ValueError) as error:
    raise UnreadableError(f"{STEP_METADATA}: {_one_line(error)}") from error
  for item in (CONFIG, RECORD):
    read_json(path, item)


def _from_orbax(path: epath.Path, read: Callable[[epath.Path], Any]) -> Any:
  """Reads the state; whatever Orbax and TensorStore raise over its files is UnreadableError.

  Torn files come up as nearly every kind of exception. Those that speak of this machine, not
  of the files, are let through: memory that is full makes no checkpoint a broken one.
  """
  try:
    return read(path / STATE)
  except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:
    raise UnreadableError(f"{STATE}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
  """Returns what an error began with, in at most 300 characters of one line."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = " ".join(f"{type(error).__name__}: {error}".split())
  return text if len(text) <= 300 else f"{text[:300]}..."
