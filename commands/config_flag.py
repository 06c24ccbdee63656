"""The flags `--config=FILE[:RECIPE]` and `--config.key=value`, with helpful errors."""

import ast
import inspect
import os
import pathlib
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence

from absl import flags
from ml_collections import ConfigDict

from configs import base
from runtime import extensions
from runtime.suggest import closest, elsewhere, nearest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "configs"
EXPERIMENTS = FOLDER / "experiments"
_OF_RUNS = f"{ROOT / 'commands' / 'run_config.py'}:"  # what begins --config of a run's own config


class ConfigFlag:
  """A flag that names a config.

  Attributes:
    name: of the flag.
    location: what it is given, FILE[:RECIPE] or what `of_run` returns; "" where it is not given.
    value: the config with its overrides; None likewise.
    overridden: the dotted keys that the command line sets.
  """

  def __init__(self, flag: flags.FlagHolder):
    self.name, self.location = flag.name, ""
    self.value: ConfigDict | None = None
    self.overridden: list[str] = []

  def read(self, location: str, settings: Sequence[tuple[str, str]]) -> None:
    """Loads the config, and sets its keys.

    Args:
      location: as the attribute.
      settings: dotted keys with their values.

    Raises:
      ValueError: there is no such config, or its own `get_config` refuses; an unknown key (with the
        nearest known one), or a value of the wrong type.
    """
    self.location = location
    self.value = load(self.name, location) if location else None
    self.overridden = [key for key, _ in settings] if location else []
    if location:
      known = {key: (section, last) for key, section, last in keys(self.value)}
      for key, text in settings:
        set_key(known, key, text, self.name)
      self.value.lock()


def set_key(known: Mapping[str, tuple[ConfigDict, str]], key: str, text: str, flag: str) -> None:
  """Sets a key of a config by the text of its value.

  Args:
    known: dotted key -> its section and its name there.
    key: dotted.
    text: the value, as on a command line.
    flag: that names the config, for the message.

  Raises:
    ValueError: an unknown key (with the nearest known one), or a value of the wrong type.
  """
  given = f"--{flag}.{key}={text}"
  if key not in known and any(other.startswith(key + ".") for other in known):
    raise ValueError(f"{given}: {key} is a section; set one of its keys")
  if key not in known:
    raise ValueError(f"{given}: unknown config key {key!r}{nearest(key, known)}")
  section, last = known[key]
  try:
    section[last] = parsed(section.get_type(last), text)
  except ValueError as error:
    raise ValueError(f"{given}: {key} is {error}, not {text!r}") from error


def parsed(kind: type, text: str) -> object:
  """Returns the value that a text stands for; raises ValueError with what it should be.

  A tuple is one of Python's; any other text is a tuple of that text alone. `1e3` is a whole number.
  """
  if kind is bool:
    if text.lower() not in ("true", "false", "1", "0"):
      raise ValueError("true or false")
    return text.lower() in ("true", "1")
  if kind in (int, float):
    try:
      power = re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", text) and kind is int
      return int(float(text)) if power and float(text).is_integer() else kind(text)
    except ValueError as error:
      raise ValueError("a whole number" if kind is int else "a number") from error
  if kind is str:
    return text
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = text
  return value if kind is not tuple or isinstance(value, tuple) else (value,)


def set_keys(settings: Sequence[str]) -> list[str]:
  """Returns the dotted keys of `key=value` settings; raises ValueError for a malformed one."""
  for setting in settings:
    if "=" not in setting.strip("="):
      raise ValueError(f"--set {setting}: give key=value, such as data.global_batch_size=16")
  return [setting.partition("=")[0] for setting in settings]


def of_run(folder: str) -> str:
  """Returns the value of --config that stands for the config of a run."""
  return f"{_OF_RUNS}{folder}"


def run_in(value: str) -> str:
  """Returns the folder of a run in what `of_run` returns; "" in other values of --config."""
  return value.removeprefix(_OF_RUNS) if value.startswith(_OF_RUNS) else ""


def name(flag: ConfigFlag) -> str:
  """Returns `dp4_tp2_lm` for `--config=configs/dp4_tp2.py`: the strategy and the recipe.

  Of a file that chooses model and data itself it is the file's name and its variant, where one is
  given; of a run's config the name of the run's folder.
  """
  if run := run_in(flag.location):
    return pathlib.PurePath(run).name
  path, _, given = flag.location.partition(":")
  strategy, recipe = os.path.splitext(os.path.basename(path))[0], flag.value.argument
  named = given or ("" if "=" in recipe else recipe)
  return f"{strategy}_{named}".rstrip("_").replace("=", "-").replace(",", "_")


def keys(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, ConfigDict, str]]:
  """Yields every key as (dotted name, its section, its name in the section)."""
  for key in config:
    value = config[key]
    if isinstance(value, ConfigDict):
      yield from keys(value, f"{prefix}{key}.")
    else:
      yield prefix + key, config, key


def leaves(config: ConfigDict) -> Iterator[tuple[str, object]]:
  """Yields every (dotted key, value)."""
  return ((dotted, section[key]) for dotted, section, key in keys(config))


def named(words: Sequence[str], known: Sequence[str]) -> list[str]:
  """Returns the known keys that words name: a key, a section, or the beginning of keys.

  Args:
    words: `training.steps`, `training`, `training.st`; or as a flag, `--config.training.steps`.
    known: dotted keys, whose order is kept.

  Raises:
    ValueError: no key begins with one of the words.
  """
  names = [word.removeprefix("--").removeprefix("config.").rstrip(".") for word in words]
  chosen = set()
  for name in names:
    inside = [key for key in known if key == name or key.startswith(f"{name}.")]
    if not (found := inside or [key for key in known if key.startswith(name)]):
      sections = {key.rpartition(".")[0] for key in known} - {""}
      raise ValueError(f"no config key begins with {name!r}{nearest(name, [*known, *sections])}")
    chosen.update(found)
  return [key for key in known if key in chosen]


def strategies() -> list[str]:
  """Returns the strategy files that are shipped, as `configs/NAME.py`."""
  others = ("__init__.py", "base.py")
  return [f"configs/{path.name}" for path in sorted(FOLDER.glob("*.py")) if path.name not in others]


def load(flag: str, value: str) -> ConfigDict:
  """Returns the config of `FILE[:ARGUMENT]` without overrides.

  Raises:
    ValueError: there is no such file, it is not a strategy, or its `get_config` fails.
  """
  if run := run_in(value):
    from commands import run_config  # of runs alone

    return run_config.get_config(run)
  path, colon, argument = value.partition(":")
  if not os.path.isfile(path):
    raise ValueError(f"--{flag}={value}: {no_such_file(path)}")
  shipped = f"; give a strategy, such as {strategies()[0]}"
  if not path.endswith(".py"):
    raise ValueError(f"--{flag}={value}: {path} is not a Python file{shipped}")
  get_config = getattr(_module(flag, value), "get_config", None)
  if not callable(get_config):
    raise ValueError(f"--{flag}={value}: {path} defines no function get_config{shipped}")
  if len(taken := inspect.signature(get_config).parameters) > 1:
    raise ValueError(
      f"--{flag}={value}: get_config of a strategy takes only the recipe, and that of {path} "
      f"takes {', '.join(taken)}{shipped}"
    )
  try:
    config = get_config(argument) if colon else get_config()
  except (Exception, SystemExit) as error:
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, ValueError) and not extensions.is_outside(innermost.filename):
      raise  # the project's own refusal, such as that of an unknown recipe
    why = extensions.error_text(error)
    raise ValueError(f"--{flag}={value}: get_config of {path} fails: {why}") from error
  what = "" if isinstance(config, ConfigDict) else f"a {type(config).__name__}"
  if not what and (missing := [key for key in base.get_config() if key not in config]):
    what = f"a config without {', '.join(missing)}"
  if what:
    raise ValueError(
      f"--{flag}={value}: get_config of {path} returns {what}, not what base.get_config(recipe, "
      f"mesh=...) returns"
    )
  return config


def no_such_file(path: str) -> str:
  """Returns that there is no such config file, with one of a similar name, and what is shipped."""
  known = {pathlib.Path(file).stem: file for file in strategies()}
  complete = {path.stem: f"configs/experiments/{path.name}" for path in EXPERIMENTS.glob("*.py")}
  near = closest(pathlib.Path(path).stem, shipped := {**complete, **known})
  hint = f"; did you mean {shipped[near]!r}?" if near else ""
  return f"there is no config file {path!r}{hint} (shipped are {', '.join(known.values())})"


def _module(flag: str, value: str):
  """Returns the module of a config file.

  Raises:
    ValueError: it cannot be imported.
  """
  path, colon, argument = value.partition(":")
  try:
    return extensions.load(path, argument if colon else None)
  except (Exception, SystemExit) as error:
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, ValueError) and innermost.filename == extensions.__file__:
      raise ValueError(f"--{flag}={value}: {error}") from error  # names the files itself
    why = extensions.error_text(error)
    raise ValueError(f"--{flag}={value}: {path} cannot be imported: {why}") from error


def unknown_flag(name: str) -> str:
  """Returns the refusal of a flag that there is not, with the nearest flag or config key."""
  settings = [key for key, _, _ in keys(base.get_config())]
  if (key := closest(name, settings)) and (name == key or "." in name or key in elsewhere(name)):
    hint = f"; did you mean '--config.{key}'?"
  else:
    hint = nearest(name, [flag for flag in flags.FLAGS if not flag.startswith("test_")])
  return f"unknown flag --{name}{hint}; --help lists all"
