"""The tokenizer of a run, its chat template, and the config.json of the model folder it began with.

A copy is in the workdir and in each checkpoint. So evaluation, sampling and a resumed run need
nothing but the run's own folder.
"""

import os
import pathlib
from collections.abc import Callable, Mapping

from etils import epath, epy
from ml_collections import ConfigDict

from input_pipeline import catalog
from input_pipeline.text import tokenizer
from runtime import files
from training.checkpointing import integrity
from training.checkpointing.integrity import TOKENIZER

with epy.lazy_imports():  # of runs with tokens other than bytes, or with a model folder
  from input_pipeline.text import tokenizer_files
  from interop import hf_folder
  from training.checkpointing import reading


def contents(data: ConfigDict, model: ConfigDict) -> dict[str, bytes]:
  """Returns the files of the tokenizer of a finalized config, by name; none where it is bytes.

  The file of data.chat_template is one of them, and those of the model's folder, if it has one.

  Raises:
    ValueError: a file cannot be read.
  """
  spec = data.get("tokenizer") or tokenizer.BYTES
  found = {name: tokenizer_files.read(path) for name, path in tokenizer.load(spec).files.items()}
  if given := data.get("chat_template"):
    path = epath.Path(given).expanduser()
    found[_templates()[path.suffix == ".json"]] = tokenizer_files.read(path)
  if "folder" in model:
    folder = hf_folder.local(model.folder, "model.folder")
    for name in (hf_folder.CONFIG, hf_folder.GENERATION):
      if name not in found and (folder / name).exists():
        found[name] = tokenizer_files.read(folder / name)
    from interop import hf_config  # of models of a folder alone

    found[hf_folder.CONFIG] = hf_config.decoder_config(found[hf_folder.CONFIG])
  return found


def _templates() -> tuple[str, str]:
  """Returns what a file of data.chat_template is called in the copy; the second, if it is JSON."""
  return tokenizer_files.TEMPLATE_FILE, "chat_template.json"


def write(found: Mapping[str, bytes], workdir: epath.Path, require: Callable[[], None]) -> None:
  """Writes `contents` to WORKDIR/tokenizer; raises OSError."""
  if found:
    (workdir / TOKENIZER).mkdir(parents=True, exist_ok=True)
  for name, content in found.items():
    files.replace(workdir / TOKENIZER / name, content, require=require)


def of_checkpoint(location: str) -> epath.Path | None:
  """Returns the folder of the tokenizer in a checkpoint; None where there is none.

  Args:
    location: as of `training.checkpointing.reading.parse_location`.
  """
  try:
    folder, step = reading.parse_location(location)
  except (ValueError, OSError):
    return None  # whoever reads the checkpoint says what is wrong
  steps = integrity.steps(folder)
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
  if hf_folder.is_adapter(location):
    config.checkpoint.initialize_from = config.checkpoint.initialize_from or location
  elif hf_folder.is_model(location) and "folder" in config.model:
    config.model.folder = config.model.folder or location
  if found is None or "tokenizer" not in config.data:
    return
  _adopt_template(config.data, found)
  _adopt_model(config.data, config.model, found, location)
  if not _has_tokenizer(found):
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


def adopt_missing(data: ConfigDict, model: ConfigDict, workdir: epath.Path) -> None:
  """Lets a run that resumes read its own copy of files that its sections name and that are gone."""
  gone = "folder" in model and not os.path.isdir(os.path.expanduser(model.folder))
  if gone and (found := of_checkpoint(str(workdir))) is not None:
    _adopt_model(data, model, found, str(workdir))
  if data.get("chat_template") and (found := of_checkpoint(str(workdir))) is not None:
    _adopt_template(data, found)
  given = data.get("tokenizer")
  if not given or given == tokenizer.BYTES or epath.Path(given).expanduser().exists():
    return
  if (found := of_checkpoint(str(workdir))) is not None and _has_tokenizer(found):
    data.tokenizer = str(found)


def _adopt_model(data: ConfigDict, model: ConfigDict, folder: epath.Path, location: str) -> None:
  """Lets a config read the copied config.json; raises ValueError where it names another model."""
  if "folder" not in model or not (folder / hf_folder.CONFIG).exists():
    return
  copy, given = folder / hf_folder.CONFIG, model.folder
  there = epath.Path(given).expanduser() / hf_folder.CONFIG
  if given and hf_folder.is_model(given) and there.exists():
    said = [
      hf_folder.read_config(pathlib.Path(path.parent), "model.folder") for path in (copy, there)
    ]
    if said[0] != said[1]:
      raise ValueError(
        f"model.folder={given} is another model than the one of {location}, whose config.json is "
        f"in {folder}; leave model.folder unset"
      )
  model.folder = str(folder)
  if not _has_tokenizer(folder):
    data.tokenizer = data.tokenizer or tokenizer.BYTES


def _has_tokenizer(folder: epath.Path) -> bool:
  """Returns whether a copy has more than the chat template of a run on bytes."""
  files_ = (tokenizer_files.TOKENIZER_FILE, tokenizer_files.SENTENCEPIECE_FILE)
  return any((folder / name).exists() for name in files_)


def _adopt_template(data: ConfigDict, folder: epath.Path) -> None:
  """Lets a config's section read a copied chat template, unless it names a file that is there."""
  given = data.get("chat_template")
  if data.get("name") not in catalog.RENDERED:
    return
  if given and epath.Path(given).expanduser().exists():
    return
  for name in _templates()[::-1]:
    if (folder / name).exists():
      data.chat_template = str(folder / name)
      return
