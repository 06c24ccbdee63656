"""The config of a run, by its folder: `python main.py sample runs/first`.

A run keeps its config as it was parsed, before any value was derived, so that what follows from
an override (`train runs/first training.steps=1000`) is derived again. `--config` takes this file
as any other one, with the run's folder in the place of a recipe.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from configs import base
from runtime import extensions, files, forms
from training import workdir_files
from training.checkpointing import integrity, reading


def get_config(location: str) -> ConfigDict:
  """Returns the config of a run as it was parsed.

  The files that the run was begun with are executed, since they may register what it names.

  Args:
    location: the run's folder.

  Raises:
    ValueError: the config cannot be read, a file of it is gone, or its keys are not this code's.
  """
  fix = f"give the config with --config=FILE --workdir={location}"
  try:
    origin, saved, config_files = _saved(epath.Path(location))
  except (OSError, ValueError, KeyError, TypeError, integrity.UnreadableError) as error:
    raise ValueError(f"the config of {location} cannot be read ({error}); {fix}") from error
  if "argument" not in saved:
    raise ValueError(f"{origin} has no key 'argument', the recipe; {fix}")
  for file, argument in config_files.items():
    _execute(file, argument, f"{location} was begun with {file}", fix)
  config = base.get_config(saved["argument"])
  known = forms.flat(forms.plain(config))
  own = any(map(_is_users, config_files))  # which may have keys of its own
  if (unknown := [key for key in saved if key not in known]) and not own:
    raise ValueError(f"{origin}: unknown config keys {', '.join(unknown)}; {fix}")
  changed = {key: value for key, value in saved.items() if key not in known or known[key] != value}
  try:
    with config.unlocked():
      for key, value in changed.items():
        *sections, name = key.split(".")
        functools.reduce(ConfigDict.__getitem__, sections, config)[name] = _tuples(value)
  except (TypeError, ValueError, KeyError) as error:
    raise ValueError(f"{origin}: {key}={value!r} does not fit: {error}; {fix}") from error
  return config


def _execute(file: str, argument: str | None, what: str, fix: str) -> None:
  """Executes a config file; of a user's also `get_config`, which may change what it imports.

  Raises:
    ValueError: it is gone, or fails.
  """
  path = extensions.ROOT / file
  if not path.is_file():
    raise ValueError(f"{what}, which is not there; {fix}")
  try:
    module = extensions.load(path, argument)
    if _is_users(file):
      module.get_config(*([] if argument is None else [argument]))
  except (Exception, SystemExit) as error:
    raise ValueError(f"{what}, which fails: {extensions.error_text(error)}; {fix}") from error


def _is_users(file: str) -> bool:
  return pathlib.Path(file).is_absolute()


def _saved(folder: epath.Path) -> tuple[epath.Path, dict[str, Any], dict[str, str | None]]:
  """Returns the file that has a run's config, its dotted keys, and config file -> argument.

  Where the config as parsed is not there, it is the finalized one, of the workdir or a checkpoint.
  """
  given, resolved = folder / workdir_files.GIVEN, folder / workdir_files.CONFIG
  config_files: dict[str, str | None] = {}
  if given.exists():
    origin, found = given, files.read_json(given)
    found, config_files = found["config"], dict(found["config_files"])
  elif resolved.exists():
    origin, found = resolved, files.read_json(resolved)
  else:
    steps = [int(one.name) for one in (folder / "checkpoints").iterdir() if one.name.isdecimal()]
    if not steps:
      raise ValueError(f"it has neither {given.name} nor {resolved.name} nor a checkpoint")
    origin = folder / "checkpoints" / str(max(steps))
    found = reading.read_json(origin, integrity.CONFIG)
  return origin, forms.flat(found), config_files


def _tuples(value: Any) -> Any:
  """Returns a value of JSON with tuples in place of lists, as configs have them."""
  if isinstance(value, Mapping):
    return {key: _tuples(one) for key, one in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, list) else value
