"""Is a step whole? Its marks, its digests, and the JSON in it.

A step's folder, as it is committed:

  STEP/commit_success.txt, STEP/_CHECKPOINT_METADATA    Orbax's marks
  STEP/config/metadata, STEP/record/metadata            JSON
  STEP/state/                                           the arrays, in TensorStore's OCDBT format
  STEP/digests                                          what all of these should be
"""

from collections.abc import Sequence
from typing import Any

from etils import epath

from checkpointing import checksums
from checkpointing.checksums import DamagedError, Digest
from checkpointing.consensus import Together
from runtime import files

STATE, CONFIG, RECORD = "state", "config", "record"
COMMITTED = "commit_success.txt"
STEP_METADATA = "_CHECKPOINT_METADATA"
FULL, SIZE, OFF = "full", "size", "off"  # checkpoint.verify
# Files up to this size are checked by every process, before it trusts the names in them; shapes and
# dtypes stand in TensorStore's index, which has checksums of its own. Of the larger files, which
# hold the arrays, each process checks a share.
SMALL_BYTES = 2**20


class UnreadableError(Exception):
  """A step's folder is torn: a file of it is missing, cut short or not what it should be."""


def check(path: epath.Path, verify: str) -> list[Digest]:
  """Looks whether everything is there, and whether the small files are what was written.

  Args:
    path: a step's folder.
    verify: `full`; `size`: of no file more than its size; `off`: only Orbax's marks.

  Returns:
    The files whose content is still to be checked.

  Raises:
    UnreadableError: something is missing or damaged.
  """
  if verify == OFF:
    _check_marks(path)
  try:
    if verify == OFF:
      checksums.sizes(path)  # plain files only: Orbax and TensorStore would wait for a FIFO
      return []
    listed = checksums.read(path)
    checksums.check_sizes(path, listed)
    if verify == SIZE:
      return []
    small = [digest for digest in listed if digest.size <= SMALL_BYTES]
    checksums.check_contents(path, small)
  except DamagedError as error:
    raise UnreadableError(str(error)) from error
  return [digest for digest in listed if digest.size > SMALL_BYTES]


def check_share(path: epath.Path, listed: Sequence[Digest], together: Together) -> None:
  """Checks the content of this process's share of files.

  Raises:
    UnreadableError: one is damaged.
  """
  try:
    checksums.check_contents(path, checksums.share(listed, together.index, together.count))
  except DamagedError as error:
    raise UnreadableError(str(error)) from error


def read_json(path: epath.Path, item: str, verify: str) -> dict[str, Any]:
  """Returns the JSON of an item (`config` or `record`) of a step's folder.

  Raises:
    UnreadableError: it is missing, is not JSON, or another file of the step is damaged.
  """
  if verify != OFF:
    check(path, verify)
  try:
    content = files.read_json(path / item / "metadata")
  except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
    raise UnreadableError(f"{item}/metadata: {one_line(error)}") from error
  if not isinstance(content, dict):
    raise UnreadableError(f"{item}/metadata: not a JSON object")
  return content


def _check_marks(path: epath.Path) -> None:
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
    files.read_json(path / STEP_METADATA)
  except (OSError, ValueError) as error:
    raise UnreadableError(f"{STEP_METADATA}: {one_line(error)}") from error
  for item in (CONFIG, RECORD):
    read_json(path, item, OFF)


def one_line(error: BaseException) -> str:
  """Returns what an error began with, in at most 300 characters of one line."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = " ".join(f"{type(error).__name__}: {error}".split()).partition(" [tensorstore_spec=")[0]
  return text if len(text) <= 300 else f"{text[:300]}..."
