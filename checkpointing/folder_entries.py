"""Which entries of a folder of checkpoints this application has made.

A folder of checkpoints may hold anything else: `7/` with somebody's notes, `50.saving_notes/`, a
link to a step elsewhere. What is removed, renamed or counted as a step is recognized by its content
and not by its name alone. The rest is reported, and left alone.
"""

import contextlib
import os
import re

from etils import epath

from checkpointing import checksums
from checkpointing.integrity import COMMITTED, CONFIG, RECORD, STATE, STEP_METADATA
from runtime import files

SAVING, REMOVING = ".saving", ".removing"
ITEMS = frozenset({STATE, CONFIG, RECORD})
# All that a step's folder holds, at its top and below. What a kill has left may have an ending:
# `state.orbax-checkpoint-tmp`, `digests.tmp`, `manifest.ocdbt.__lock`.
_ENDING = r"([._-].*)?"
_FILES = {checksums.FILE, COMMITTED, STEP_METADATA}
_TOP = re.compile(f"({'|'.join(map(re.escape, sorted(ITEMS | _FILES)))}){_ENDING}")
_BELOW = re.compile(
  rf"(metadata|_METADATA|_sharding|{STEP_METADATA}|{re.escape(COMMITTED)}|manifest\.ocdbt|"
  rf"array_metadatas|(ocdbt\.)?process_\d+|d|[0-9a-f]{{32}}){_ENDING}"
)
_ORBAX = r"(\.orbax-checkpoint-tmp(-\d+)?)"  # Orbax adds it to what it has not written to the end
_LEFT = re.compile(rf"\d+((\.saving(-\w+)*|\.removing(-\d+)?){_ORBAX}?|{_ORBAX})")


def is_step(path: epath.Path) -> bool:
  """Returns whether a path is a step's folder that was saved here, intact or damaged.

  Its file of digests begins as ours do, or it holds the folders of all items.
  """
  if not (path.name.isdecimal() and str(int(path.name)) == path.name):
    return False
  names = _entries(path)
  return names >= ITEMS or (checksums.FILE in names and checksums.begins(path))


def is_leftover(path: epath.Path) -> bool:
  """Returns whether a path is what a save or a removal has left that was killed or has failed."""
  return _LEFT.fullmatch(path.name) is not None and _is_folder(path) and only_ours(path)


def only_ours(path: epath.Path) -> bool:
  """Returns whether a folder holds nothing but what a save writes there, by all the names in it."""
  return _all_named(path, _TOP)


def _all_named(path: epath.Path, names: re.Pattern) -> bool:
  for name in _entries(path):
    if not name.startswith(".") and not (names.fullmatch(name) and _all_named(path / name, _BELOW)):
      return False
  return True


def foreign(folder: epath.Path) -> list[str]:
  """Returns the names in a folder of checkpoints that look like ours and are not."""
  named = [child for child in folder.iterdir() if re.match(r"\d+(\.|$)", child.name)]
  return sorted(
    child.name
    for child in named
    if not (is_step(child) or is_leftover(child) or re.search(r"\.broken(-\d+)?$", child.name))
  )


def free(folder: epath.Path, name: str) -> epath.Path:
  """Returns the first of NAME, NAME-2, NAME-3, ... that is not there."""
  number, path = 2, folder / name
  while os.path.lexists(path) if files.is_local(path) else path.exists():
    number, path = number + 1, folder / f"{name}-{number}"
  return path


def _is_folder(path: epath.Path) -> bool:
  """Returns whether a path is a folder, and no link to one."""
  return path.is_dir() and not (files.is_local(path) and os.path.islink(path))


def _entries(path: epath.Path) -> set[str]:
  """Returns the names in a folder; none of what is no folder, or cannot be listed."""
  if not _is_folder(path):
    return set()
  with contextlib.suppress(OSError):
    return {child.name for child in path.iterdir()}
  return set()
