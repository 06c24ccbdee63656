"""The tokenizer of a run: a copy of its files is in the workdir and in each checkpoint.

So evaluation, sampling and a resumed run need nothing but the run's own folder.
"""

from collections.abc import Callable

from etils import epath
from ml_collections import ConfigDict

from checkpointing import restore
from checkpointing.integrity import TOKENIZER
from input_pipeline.text import tokenizer
from runtime import files


def contents(config: ConfigDict) -> dict[str, bytes]:
  """Returns the files of the tokenizer of a finalized config, by name; none where it is bytes.

  Raises:
    ValueError: a file cannot be read.
  """
  spec = config.data.get("tokenizer") or tokenizer.BYTES
  return {name: tokenizer.read(path) for name, path in tokenizer.load(spec).files.items()}


def write(config: ConfigDict, workdir: epath.Path, require: Callable[[], None]) -> None:
  """Writes a copy of the tokenizer to WORKDIR/tokenizer; raises as `contents`, or OSError."""
  if found := contents(config):
    (workdir / TOKENIZER).mkdir(parents=True, exist_ok=True)
    for name, content in found.items():
      files.replace(workdir / TOKENIZER / name, content, require=require)


def of_checkpoint(location: str) -> epath.Path | None:
  """Returns the folder of the tokenizer in a checkpoint; None where there is none.

  Args:
    location: as of `checkpointing.restore.parse_location`.
  """
  try:
    folder, step = restore.parse_location(location)
  except (ValueError, OSError):
    return None  # whoever reads the checkpoint says what is wrong
  steps = restore.steps(folder)
  if not steps:
    return None
  found = folder / str(steps[-1] if step is None else step) / TOKENIZER
  return found if found.is_dir() else None


def adopt(config: ConfigDict, location: str) -> None:
  """Lets a config read the tokenizer that a checkpoint was trained with.

  Args:
    config: not finalized yet.
    location: of the checkpoint.

  Raises:
    ValueError: data.tokenizer is another one.
  """
  found = of_checkpoint(location)
  if found is None or "tokenizer" not in config.data:
    return
  if given := config.data.tokenizer:
    try:
      other = tokenizer.load(given).digest
    except ValueError:  # no longer there
      other = None
    if other not in (None, tokenizer.load(found).digest):
      raise ValueError(
        f"data.tokenizer={given} is another tokenizer than the one that {location} was trained "
        f"with, which is in {found}; leave data.tokenizer unset"
      )
  config.data.tokenizer = str(found)


def adopt_missing(config: ConfigDict, workdir: epath.Path) -> None:
  """Lets a run that resumes read its own copy where data.tokenizer names what is gone."""
  given = config.data.get("tokenizer")
  if not given or given == tokenizer.BYTES or epath.Path(given).expanduser().exists():
    return
  if (found := of_checkpoint(str(workdir))) is not None:
    config.data.tokenizer = str(found)
