"""Reads checkpoints: finds a step, verifies its files, restores its arrays sharded.

Trees are stored as nested dicts by name. Nothing here writes.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from partitioning.rules import named_leaves, nested
from runtime import files, forms
from training.checkpointing import async_writer, integrity
from training.checkpointing.consensus import Together, join_reports
from training.checkpointing.integrity import (
  COMMITTED,
  CONFIG,
  DIGESTS,
  FOLDER,
  FULL,
  JSON,
  MOST_BYTES,
  OFF,
  RECORD,
  STATE,
  STEP_METADATA,
  THREADS,
  TITLE,
  DamagedError,
  Digest,
  UnreadableError,
  Verified,
  file_sizes,
  listed,
  nothing_in,
  one_line,
  parse_line,
  reason,
  require_steps,
  steps,
  warn,
)

_NAMED, _NAMED_FILES = 30, 3  # so many arrays stand in a message, and files
# Files up to this size, and all with JSON, are checked by every process before it trusts the names
# in them; shapes and dtypes are in TensorStore's index, which has its own checksums. Of the larger
# files, with the arrays, each process checks a share.
SMALL_BYTES = 2**20
_ALWAYS = (*JSON.values(), f"{STATE}/_METADATA")


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
  raise nothing_in(path)


def _is_store(folder: epath.Path) -> bool:
  """Returns whether a folder holds checkpoints, and not other folders named by numbers."""
  return any((folder / str(step) / STATE).is_dir() for step in steps(folder))


def restore_branches(
  folder: epath.PathLike,
  wanted: Callable[[Verified], Mapping[str, Any]],
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
    wanted: returns of a step the name of each branch -> nested dict of ShapeDtypeStructs with
      shardings; raises ValueError where the step does not fit.
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
    found = check(folder / str(step), verify)
    tree = wanted(found)
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


# ------------------------------ the files of a step ------------------------------


def parse_digests(content: bytes) -> list[Digest]:
  """Reads the content of a file of digests.

  Raises:
    DamagedError: it is not what `to_text` has returned, to the last bit.
  """
  above, _, last = content.removesuffix(b"\n").rpartition(b"\n")
  above += b"\n"
  if last != f"{hashlib.sha256(above).hexdigest()} end".encode() or content[-1:] != b"\n":
    raise DamagedError(f"{DIGESTS}: it is not what was written ({len(content)} bytes)")
  title, *lines = above.decode().splitlines()
  if title != TITLE:
    raise DamagedError(f"{DIGESTS}: it begins with {title!r}, and {TITLE!r} is known here")
  return [parse_line(line) for line in lines]


def read_digests(folder: epath.Path) -> list[Digest]:
  """Reads a folder's file of digests.

  Raises:
    DamagedError: it is missing or damaged.
  """
  try:
    return parse_digests(files.read_bytes(folder / DIGESTS, most_bytes=MOST_BYTES))
  except FileNotFoundError:
    raise DamagedError(
      f"{DIGESTS}: missing, so the other files cannot be verified; it was lost, or the step was "
      f"saved before there were digests: checkpoint.verify=off reads it as it is"
    ) from None
  except OSError as error:
    raise DamagedError(f"{DIGESTS}: {reason(error)}") from error


def check_sizes(folder: epath.Path, listed: Sequence[Digest]) -> None:
  """Checks that exactly the listed files exist, with their sizes.

  Raises:
    DamagedError: with the files that are missing, unlisted or of another size.
  """
  try:
    there = file_sizes(folder)
  except OSError as error:
    raise DamagedError(reason(error)) from error
  wanted = {digest.path: digest.size for digest in listed}
  wrong = []
  for path in sorted({*there, *wanted}):
    if path not in there:
      wrong.append(f"{path}: missing")
    elif path not in wanted:
      wrong.append(f"{path}: not in {DIGESTS}")
    elif there[path] != wanted[path]:
      wrong.append(f"{path}: {there[path]} bytes, and it should be {wanted[path]}")
  _raise_damaged(wrong)


def check_contents(
  folder: epath.Path, listed: Sequence[Digest], keep: Collection[str] = ()
) -> dict[str, bytes]:
  """Reads files in blocks, by several threads, and compares their digests.

  Args:
    folder: that the paths are relative to.
    listed: the files.
    keep: paths of small files whose content is returned, so that they need not be read again.

  Returns:
    path -> content of the files to be kept.

  Raises:
    DamagedError: with those that are not what was written.
    PermissionError: it concerns this process, not the file.
  """
  blocks: dict[str, list[bytes]] = {path: [] for path in keep}

  def one(digest: Digest) -> str:
    try:
      kept = blocks.get(digest.path)
      size, value = integrity.read_through(folder / digest.path, digest.size, kept)
    except PermissionError:
      raise
    except OSError as error:
      return f"{digest.path}: {reason(error)}"
    if (size, value) == (digest.size, digest.sha256):
      return ""
    return (
      f"{digest.path}: its bytes have changed (SHA-256 {value[:12]}, {digest.sha256[:12]} once)"
    )

  with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
    _raise_damaged([text for text in pool.map(one, listed) if text])
  read = {digest.path for digest in listed}
  return {path: b"".join(parts) for path, parts in blocks.items() if path in read}


def share_of(listed: Sequence[Digest], index: int, count: int) -> list[Digest]:
  """Returns the files that one of several processes checks, about as many bytes for each."""
  shares: list[list[Digest]] = [[] for _ in range(count)]
  loads = [0] * count
  for digest in sorted(listed, key=lambda d: (-d.size, d.path)):
    least = loads.index(min(loads))
    shares[least].append(digest)
    loads[least] += digest.size
  return shares[index]


def _raise_damaged(wrong: list[str]) -> None:
  if wrong:
    raise DamagedError("; ".join(forms.first(wrong, _NAMED_FILES)))


def check(path: epath.Path, verify: str) -> Verified:
  """Verifies that all files exist, and that the small ones are what was written.

  Each small file is read once: what is returned is what was verified.

  Args:
    path: a step's folder.
    verify: `full`; `size`: only the sizes of files; `off`: only Orbax's markers.

  Raises:
    UnreadableError: something is missing or damaged.
  """
  contents: dict[str, bytes] = {}
  large: list[Digest] = []
  if verify == OFF:
    _check_marks(path)
  try:
    if verify == OFF:
      file_sizes(path)  # plain files only: Orbax and TensorStore would wait for a FIFO
    else:
      listed = read_digests(path)
      check_sizes(path, listed)
    if verify == FULL:
      small = [d for d in listed if d.size <= SMALL_BYTES or d.path in _ALWAYS]
      large = [d for d in listed if d not in small]
      contents = check_contents(path, small, keep=JSON.values())
  except DamagedError as error:
    raise UnreadableError(str(error)) from error
  config, record = (read_json(path, item, contents.get(JSON[item])) for item in (CONFIG, RECORD))
  return Verified(path, config, record, tuple(large))


def check_share(path: epath.Path, listed: Sequence[Digest], together: Together) -> None:
  """Checks the content of this process's share of files.

  Raises:
    UnreadableError: one is damaged.
  """
  try:
    check_contents(path, share_of(listed, together.index, together.count))
  except DamagedError as error:
    raise UnreadableError(str(error)) from error


def read_json(path: epath.Path, item: str, content: bytes | None = None) -> dict[str, Any]:
  """Returns the JSON of an item (`config` or `record`) of a step's folder, which is not verified.

  Args:
    path: the step's folder.
    item: which.
    content: of its file, where that has been read.

  Raises:
    UnreadableError: it is missing, or is not JSON.
  """
  try:
    parsed = files.read_json(path / JSON[item]) if content is None else files.parse_json(content)
  except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
    raise UnreadableError(f"{item}/metadata: {one_line(error)}") from error
  if not isinstance(parsed, dict):
    raise UnreadableError(f"{item}/metadata: not a JSON object")
  return parsed


def _check_marks(path: epath.Path) -> None:
  """Checks the markers of a complete step, which Orbax does not."""
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
    files.read_json(path / STEP_METADATA)
  except (OSError, ValueError) as error:
    raise UnreadableError(f"{STEP_METADATA}: {one_line(error)}") from error


# ------------------------------ arrays ------------------------------


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
  check_share(path, checkpoint.large, together or Together())
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


def require_same(path: epath.Path, lines: list[str]) -> None:
  """Raises ValueError if there are differences between a step's arrays and the requested ones."""
  if lines:
    count = f"{len(lines)} {'array differs' if len(lines) == 1 else 'arrays differ'}"
    raise forms.refusal(f"{path} does not fit ({count}):", lines, _NAMED)


def stored_arrays(path: epath.Path) -> Mapping[str, Any]:
  """Returns name -> an object with the shape and dtype of each array of a step's folder.

  Raises:
    UnreadableError: the metadata is missing or broken.
  """
  # A Checkpointer would log the error and return None.
  metadata = _from_orbax(path, lambda path: ocp.PyTreeCheckpointHandler().metadata(path))
  return named_leaves(metadata.tree)


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
