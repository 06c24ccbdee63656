"""Recognizes the entries of a folder of checkpoints that this application has created.

A folder of checkpoints may contain anything else: `7/` with a user's notes, `50.saving_notes/`, a
link to a step elsewhere. What is removed, renamed or counted as a step is recognized by its
content, not only by its name. The rest is reported and left alone.
"""

import contextlib
import os
import re

from etils import epath

from checkpointing import checksums
from checkpointing.integrity import COMMITTED, CONFIG, RECORD, STATE, STEP_METADATA, TOKENIZER
from runtime import files

SAVING, REMOVING = ".saving", ".removing"
ITEMS = frozenset({STATE, CONFIG, RECORD})
# The names in a step's folder, at its top and below. After a kill they may have a suffix:
# `state.orbax-checkpoint-tmp`, `digests.tmp`, `manifest.ocdbt.__lock`.
_ENDING = r"([._-].*)?"
_FILES = {checksums.FILE, COMMITTED, STEP_METADATA}
_TOP = re.compile(f"({'|'.join(map(re.escape, sorted({*ITEMS, *_FILES, TOKENIZER})))}){_ENDING}")
_BELOW = re.compile(
  rf"(metadata|_METADATA|_sharding|{STEP_METADATA}|{re.escape(COMMITTED)}|manifest\.ocdbt|"
  rf"array_metadatas|(ocdbt\.)?process_\d+|d|[0-9a-f]{{32}}){_ENDING}"
)
_TOKENIZER = re.compile(rf"[\w.-]+\.(json|model|jinja){_ENDING}")
_ORBAX = r"(\.orbax-checkpoint-tmp(-\d+)?)"  # Orbax's suffix of incomplete files
_LEFT = re.compile(rf"\d+((\.saving(-\w+)*|\.removing(-\d+)?){_ORBAX}?|{_ORBAX})")


def is_step(path: epath.Path) -> bool:
  """Returns whether a path is a step's folder that was saved here, intact or damaged.

  Its file of digests has the right title, or it has the folders of all items.
  """
  if not (path.name.isdecimal() and str(int(path.name)) == path.name):
    return False
  names = _entries(path)
  return names >= ITEMS or (checksums.FILE in names and checksums.begins(path))


def is_leftover(path: epath.Path) -> bool:
  """Returns whether a path was left by a killed or failed save or removal."""
  return _LEFT.fullmatch(path.name) is not None and _is_folder(path) and only_ours(path)


def only_ours(path: epath.Path) -> bool:
  """Returns whether a folder has only entries that a save writes, by all the names in it."""
  return _all_named(path, _TOP)


def _all_named(path: epath.Path, names: re.Pattern) -> bool:
  for name in _entries(path):
    below = _TOKENIZER if name == TOKENIZER else _BELOW
    if not name.startswith(".") and not (names.fullmatch(name) and _all_named(path / name, below)):
      return False
  return True


def foreign(folder: epath.Path) -> list[str]:
  """Returns the names in a folder of checkpoints that look like steps and are not."""
  named = [child for child in folder.iterdir() if re.match(r"\d+(\.|$)", child.name)]
  return sorted(
    child.name
    for child in named
    if not (is_step(child) or is_leftover(child) or re.search(r"\.broken(-\d+)?$", child.name))
  )


def free(folder: epath.Path, name: str) -> epath.Path:
  """Returns the first of NAME, NAME-2, NAME-3, ... that does not exist."""
  number, path = 2, folder / name
  while os.path.lexists(path) if files.is_local(path) else path.exists():
    number, path = number + 1, folder / f"{name}-{number}"
  return path


def _is_folder(path: epath.Path) -> bool:
  """Returns whether a path is a folder, and not a link to one."""
  return path.is_dir() and not (files.is_local(path) and os.path.islink(path))


def _entries(path: epath.Path) -> set[str]:
  """Returns the names in a folder; none if it is not a folder, or cannot be listed."""
  if not _is_folder(path):
    return set()
  with contextlib.suppress(OSError):
    return {child.name for child in path.iterdir()}
  return set()
