"""Whether a saved step is complete and intact: its markers, its checksums, and its JSON.

A step's folder, as it is committed:

  STEP/commit_success.txt, STEP/_CHECKPOINT_METADATA    Orbax's marks
  STEP/config/metadata, STEP/record/metadata            JSON
  STEP/state/                                           the arrays, in TensorStore's OCDBT format
  STEP/digests                                          what all of these should be
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from etils import epath

from checkpointing import checksums
from checkpointing.checksums import DamagedError, Digest
from checkpointing.consensus import Together
from runtime import files

STATE, CONFIG, RECORD = "state", "config", "record"
TOKENIZER = "tokenizer"  # a folder of files, where the tokens are not bytes
_JSON = {item: f"{item}/metadata" for item in (CONFIG, RECORD)}
COMMITTED = "commit_success.txt"
STEP_METADATA = "_CHECKPOINT_METADATA"
FULL, SIZE, OFF = "full", "size", "off"  # checkpoint.verify
# Files up to this size are checked by every process, before it trusts the names in them; shapes and
# dtypes are in TensorStore's index, which has its own checksums. Of the larger files, with the
# arrays, each process checks a share.
SMALL_BYTES = 2**20


class UnreadableError(Exception):
  """A step's folder is damaged: a file is missing, truncated or changed."""


@dataclasses.dataclass(frozen=True)
class Verified:
  """A step whose files all exist, with its config and record.

  Attributes:
    path: of the step's folder.
    config: of the run.
    record: versions, metrics and more.
    large: the files whose content has not been compared with their digests yet.
  """

  path: epath.Path
  config: dict[str, Any]
  record: dict[str, Any]
  large: tuple[Digest, ...] = ()

  @property
  def step(self) -> int:
    """Returns its number."""
    return int(self.path.name)


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
      checksums.sizes(path)  # plain files only: Orbax and TensorStore would wait for a FIFO
    else:
      listed = checksums.read(path)
      checksums.check_sizes(path, listed)
    if verify == FULL:
      small = [d for d in listed if d.size <= SMALL_BYTES or d.path in _JSON.values()]
      large = [d for d in listed if d not in small]
      contents = checksums.check_contents(path, small, keep=_JSON.values())
  except DamagedError as error:
    raise UnreadableError(str(error)) from error
  config, record = (read_json(path, item, contents.get(_JSON[item])) for item in (CONFIG, RECORD))
  return Verified(path, config, record, tuple(large))


def check_share(path: epath.Path, listed: Sequence[Digest], together: Together) -> None:
  """Checks the content of this process's share of files.

  Raises:
    UnreadableError: one is damaged.
  """
  try:
    checksums.check_contents(path, checksums.share(listed, together.index, together.count))
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
    parsed = files.read_json(path / _JSON[item]) if content is None else files.parse_json(content)
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


def one_line(error: BaseException) -> str:
  """Returns the beginning of an error's message: one line of at most 300 characters."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = " ".join(f"{type(error).__name__}: {error}".split()).partition(" [tensorstore_spec=")[0]
  return text if len(text) <= 300 else f"{text[:300]}..."
