"""The command line's `--config=FILE[:RECIPE]` and `--config.key=value`, with errors people can use.

absl and ml_collections parse; what they raise (in five shapes, some with a traceback as their
text) becomes one ValueError that names the thing and the way out.
"""

import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from runtime.suggest import nearest

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "configs"
NOT_STRATEGIES = ("__init__.py", "base.py", "decoders.py", "recipes.py")


def parse(argv: list[str], names: tuple[str, ...] = ("config",)) -> list[str]:
  """Parses absl's flags and returns the words that are left, the program's name first.

  Args:
    argv: the command line.
    names: the flags that hold configs.

  Raises:
    ValueError: an unknown flag or config key (with the nearest known one), a wrong type, a
      missing config file, or what the config's own `get_config` refuses.
  """
  argv = [_with_underscores(word) for word in argv]
  for name in names:
    _check_file(argv, name)
  try:
    return flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    raise ValueError(_unknown_flag(error)) from error
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
    for name in names:
      _check_overrides(argv, name)
    raise ValueError(_root(error)) from error


def with_settings(argv: list[str], names: tuple[str, ...]) -> list[str]:
  """Returns a command line on which each `--set key=value` stands as an override of every config.

  Args:
    argv: the command line.
    names: the flags that hold configs.

  Raises:
    ValueError: a setting without a key or a value.
  """
  settings = [value for given, value in _values(argv, "set") if given == "set"]
  there = [flag for flag in names if any(given == flag for given, _ in _values(argv, flag))]
  set_keys(settings)
  return [*argv, *(f"--{flag}.{setting}" for flag in there for setting in settings)]


def set_keys(settings: Sequence[str]) -> list[str]:
  """Returns the dotted keys of `key=value` settings; raises ValueError for what is none."""
  for setting in settings:
    if "=" not in setting.strip("="):
      raise ValueError(f"--set {setting}: give key=value, such as data.global_batch_size=16")
  return [setting.partition("=")[0] for setting in settings]


def name(flag: flags.FlagHolder) -> str:
  """Returns `dp4_tp2_lm` for `--config=configs/dp4_tp2.py`: the strategy and the recipe."""
  path = config_flags.get_config_filename(flags.FLAGS[flag.name])
  strategy = os.path.splitext(os.path.basename(path))[0]
  return f"{strategy}_{flag.value.argument}".replace("=", "-").replace(",", "_")


def keys(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, ConfigDict, str]]:
  """Yields every key as (dotted name, the section that holds it, its name there)."""
  for key in config:
    value = config[key]
    if isinstance(value, ConfigDict):
      yield from keys(value, f"{prefix}{key}.")
    else:
      yield prefix + key, config, key


def strategies() -> list[str]:
  """Returns the strategy files that are shipped, as `configs/NAME.py`."""
  files = sorted(os.listdir(FOLDER))
  return [f"configs/{f}" for f in files if f.endswith(".py") and f not in NOT_STRATEGIES]


def _values(argv: list[str], flag: str) -> Iterator[tuple[str, str]]:
  """Yields (flag's full name, value) of `--flag=value` and `--flag value`, nested keys included."""
  for position, word in enumerate(argv):
    given, equals, value = word.lstrip("-").partition("=")
    if word.startswith("-") and (given == flag or given.startswith(flag + ".")):
      following = argv[position + 1] if position + 1 < len(argv) else ""
      yield given, value if equals else following


def _check_file(argv: list[str], flag: str) -> None:
  for given, value in _values(argv, flag):
    path = value.partition(":")[0]
    if given == flag and not os.path.isfile(path):
      known = strategies()
      raise ValueError(
        f"--{flag}={value}: there is no config file {path!r}{nearest(path, known)} "
        f"(shipped are {', '.join(known)})"
      )


def _check_overrides(argv: list[str], flag: str) -> None:
  """Raises for the first override that names no key, or whose value is of another type."""
  given = list(_values(argv, flag))
  files = [value for name, value in given if name == flag]
  if not files:
    return
  config = _load(files[-1])
  known = {dotted: section.get_type(key) for dotted, section, key in keys(config)}
  for full, value in given:
    key = full.removeprefix(flag).removeprefix(".")
    if not key:
      continue
    if key not in known and any(other.startswith(key + ".") for other in known):
      raise ValueError(f"--{full}={value}: {key} is a section; set one of its keys")
    if key not in known:
      raise ValueError(f"--{full}={value}: unknown config key {key!r}{nearest(key, known)}")
    wanted = KINDS.get(known[key])
    if wanted and not wanted[0](value):
      raise ValueError(f"--{full}={value}: {key} is {wanted[1]}, not {value!r}")


def _is(convert: Callable[[str], object], text: str) -> bool:
  try:
    convert(text)
  except ValueError:
    return False
  return True


# type of a key -> (does a text fit it, how it is called)
KINDS = {
  int: (lambda text: _is(int, text), "a whole number"),
  float: (lambda text: _is(float, text), "a number"),
  bool: (lambda text: text.lower() in ("true", "false", "1", "0"), "true or false"),
}


def _load(value: str) -> ConfigDict:
  """Returns the config of `FILE[:ARGUMENT]` without overrides."""
  path, colon, argument = value.partition(":")
  spec = importlib.util.spec_from_file_location("strategy", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(argument) if colon else module.get_config()


def _with_underscores(word: str) -> str:
  """Returns `--accept_changes=x` for `--accept-changes=x`: people write flags both ways."""
  given, equals, value = word.partition("=")
  return given[:2] + given[2:].replace("-", "_") + equals + value if given[:2] == "--" else word


def _unknown_flag(error: flags.UnrecognizedFlagError) -> str:
  known = [name for name in flags.FLAGS if not name.startswith("test_")]
  return f"unknown flag --{error.flagname}{nearest(error.flagname, known)}; --help lists all"


def _root(error: BaseException) -> str:
  """Returns the message of the exception that began it, not of those that wrapped it."""
  while error.__cause__ is not None or error.__context__ is not None:
    error = error.__cause__ or error.__context__
  return str(error)
