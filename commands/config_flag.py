"""The flags `--config=FILE[:RECIPE]` and `--config.key=value`, with helpful errors.

absl and ml_collections parse; their errors (of five kinds, some with a traceback as their text)
become one ValueError with the cause and the fix.
"""

import ast
import inspect
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence

from absl import flags
from ml_collections import ConfigDict

from configs import base
from runtime import extensions
from runtime.suggest import closest, elsewhere, nearest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "configs"
EXPERIMENTS = FOLDER / "experiments"
_OF_RUNS = f"{ROOT / 'commands' / 'run_config.py'}:"  # what begins --config of a run's own config


def parse(argv: list[str], names: tuple[str, ...] = ("config",)) -> list[str]:
  """Parses absl's flags and returns the remaining words, the program's name first.

  Args:
    argv: the command line.
    names: the flags whose values are configs.

  Raises:
    ValueError: an unknown flag or config key (with the nearest known one), a wrong type, a
      missing config file, or what the config's own `get_config` refuses.
  """
  argv = [_with_underscores(word) for word in argv]
  for name in names:
    for value in config_values(argv, name):
      config = load(name, value)
      whole = {f"{name}.{key}" for key, of, last in keys(config) if of.get_type(last) is int}
      argv = [_with_whole_number(word, whole) for word in argv]
  try:
    return flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    raise ValueError(_unknown_flag(error)) from error
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError, SyntaxError) as error:
    for name in names:
      _check_overrides(argv, name)
    _check_types(argv)
    raise ValueError(_root(error)) from error


def with_settings(argv: list[str], names: tuple[str, ...]) -> list[str]:
  """Returns a command line with each `--set key=value` as an override of every config.

  Args:
    argv: the command line.
    names: the flags whose values are configs.

  Raises:
    ValueError: a setting without a key or a value.
  """
  settings = [value for given, value in _values(argv, "set") if given == "set"]
  there = [flag for flag in names if any(given == flag for given, _ in _values(argv, flag))]
  set_keys(settings)
  return [*argv, *(f"--{flag}.{setting}" for flag in there for setting in settings)]


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


def name(flag: flags.FlagHolder) -> str:
  """Returns `dp4_tp2_lm` for `--config=configs/dp4_tp2.py`: the strategy and the recipe.

  Of a file that chooses model and data itself it is the file's name and its variant, where one is
  given; of a run's config the name of the run's folder.
  """
  [*_, value] = config_values(sys.argv, flag.name)
  if run := run_in(value):
    return pathlib.PurePath(run).name
  path, _, given = value.partition(":")
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
  return [f"configs/{path.name}" for path in sorted(FOLDER.glob("*.py")) if _is_strategy(path)]


def _is_strategy(path: pathlib.Path) -> bool:
  """Returns whether a file defines `get_config(recipe)`, without running it."""
  for node in ast.parse(path.read_text()).body:
    if isinstance(node, ast.FunctionDef) and node.name == "get_config":
      return len(node.args.args) == 1 and not node.args.kwonlyargs
  return False


def config_values(argv: Sequence[str], flag: str) -> list[str]:
  """Returns the value of each `--FLAG=` that names a config."""
  return [value for given, value in _values(argv, flag) if given == flag]


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


def _values(argv: Sequence[str], flag: str) -> Iterator[tuple[str, str]]:
  """Yields (flag's full name, value) of `--flag=value` and `--flag value`, nested keys included."""
  for position, word in enumerate(argv):
    given, equals, value = word.lstrip("-").partition("=")
    if word.startswith("-") and (given == flag or given.startswith(flag + ".")):
      following = argv[position + 1] if position + 1 < len(argv) else ""
      yield given, value if equals else following


def _check_overrides(argv: list[str], flag: str) -> None:
  """Raises for the first override of an unknown key, or with a value of the wrong type."""
  given = list(_values(argv, flag))
  files = [value for name, value in given if name == flag]
  if not files:
    return
  config = load(flag, files[-1])
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


def _check_types(argv: list[str]) -> None:
  """Raises for the first flag, other than configs, with a value of the wrong type."""
  names = {"int": int, "float": float, "bool": bool}
  for full, flag in ((name, flags.FLAGS[name]) for name in flags.FLAGS):
    fits, called = KINDS.get(names.get(flag.flag_type()), (None, ""))
    for given, value in _values(argv, full) if fits else ():
      bare = flag.boolean and f"--{full}" in argv
      if given == full and not bare and not fits(value):
        raise ValueError(f"--{full}={value}: --{full} is {called}, not {value!r}")


def _with_underscores(word: str) -> str:
  """Returns `--accept_changes=x` for `--accept-changes=x`: people write flags both ways."""
  given, equals, value = word.partition("=")
  return given[:2] + given[2:].replace("-", "_") + equals + value if given[:2] == "--" else word


def _with_whole_number(word: str, whole: Collection[str]) -> str:
  """Returns `--config.training.steps=1000` for `--config.training.steps=1e3`.

  Args:
    word: of a command line.
    whole: the flags whose values are whole numbers.
  """
  given, _, value = word.partition("=")
  number = float(value) if re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", value) else 0.5
  is_whole = given.lstrip("-") in whole and number.is_integer()
  return f"{given}={number:.0f}" if is_whole else word


def _unknown_flag(error: flags.UnrecognizedFlagError) -> str:
  name = error.flagname
  settings = [key for key, _, _ in keys(base.get_config())]
  if (key := closest(name, settings)) and (name == key or "." in name or key in elsewhere(name)):
    hint = f"; did you mean '--config.{key}'?"
  else:
    hint = nearest(name, [flag for flag in flags.FLAGS if not flag.startswith("test_")])
  return f"unknown flag --{name}{hint}; --help lists all"


def _root(error: BaseException) -> str:
  """Returns the message of the exception that began it, not of those that wrapped it."""
  while error.__cause__ is not None or error.__context__ is not None:
    error = error.__cause__ or error.__context__
  return str(error)
