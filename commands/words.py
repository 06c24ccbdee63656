"""The words of a command line: a verb, a config or a run, and `key=value`; they become flags.

  python main.py [VERB] [CONFIG | RUN] [KEY=VALUE ...] [--FLAG=VALUE ...]

The name of a verb wins; else a file is a config, with or without `.py`, and a folder is a run,
whose config is taken. A word is `key=value` if what is before its first `=` is a dotted name, so
a folder of such a name is written `./lr=0.1`.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from absl import flags
from etils import epath, epy

from commands import config_flag
from commands.verbs import VERBS
from runtime import files
from runtime.suggest import nearest

with epy.lazy_imports():  # of runs with a model folder
  from interop import hf_folder

HELP = "help"
HELP_WORDS = (
  *("-h", "-help", "--help", "-?", "--helpfull", "--helpshort", "--helpxml", "--help=true"),
)
DEFAULT = "configs/dp4_tp2.py:lm_bpe"  # the job of README and `make train`
_MEANS_PATH = re.compile(r"[/:]|\.py$")
_SETTING = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")
# Of which one is in the workdir of each run: those of `training.workdir_files` and a checkpoint's.
_FILES = ("given.json", "metrics.jsonl", "checkpoints")


def asks_for_help(argv: Sequence[str]) -> bool:
  """Returns whether a command line asks for help."""
  words = argv[1:]
  return words[:1] == [HELP] or any(w in HELP_WORDS or w.startswith("--help=") for w in words)


def as_flags(
  argv: Sequence[str], owners: Mapping[str, Sequence[str]], *, asks: bool = False
) -> list[str]:
  """Returns a command line whose words are a verb and what that verb takes; the others are flags.

  Args:
    argv: as given, with the program's name.
    owners: flag -> the verbs that take it.
    asks: whether it asks for help, about whatever its words are.

  Raises:
    ValueError: a word that is none of these, or two configs.
  """
  verb, found, places = "", [], []
  for word, is_flag in joined(argv[1:], () if asks else flags.FLAGS):
    if is_flag:
      found.append(_completed(word))
    elif not verb and (word in VERBS or word == HELP):
      verb = word
    elif verb in VERBS and VERBS[verb].config == "none" and VERBS[verb].words:
      found.append(word)
    elif _SETTING.match(word) and VERBS.get(verb, VERBS["train"]).config != "none":
      found.append(f"--config.{word}")
    elif (verb == "config" or asks) and not (_MEANS_PATH.search(word) or run_folder(word)):
      found.append(word)  # a config key
    elif word not in VERBS and (place := _place(word)):
      places.append(place)
    elif asks:
      found.append(word)
    else:
      raise ValueError(_unknown(word, verb))
  found = [*_of_places(places, found, verb or "train", owners), *found]
  # Keys are parsed as those of the config that is before them.
  found.sort(key=lambda word: not re.match(r"--?(config|against)=", word))
  return [argv[0], *([verb] if verb else []), *found]


def with_default(argv: list[str], verb: str) -> list[str]:
  """Returns a command line with a config: without one, that of the run it names, or the default.

  The default is announced on standard error.

  Raises:
    ValueError: --checkpoint is no run's, so that its config is not known.
  """
  if VERBS[verb].config != "required" or _given(argv, "config"):
    return argv
  for flag in ("checkpoint", "workdir"):
    for value in _given(argv, flag):
      if folder := run_folder(value):
        more = [] if _given(argv, "workdir") else [f"--workdir={folder}"]
        return [argv[0], f"--config={config_flag.of_run(folder)}", *argv[1:], *more]
      if flag == "checkpoint":
        raise ValueError(
          f"no config, and --checkpoint={value} is no run's, whose config would be taken; give "
          f"--config=FILE"
        )
  print(f"config: {DEFAULT}, since none is given", file=sys.stderr, flush=True)
  path = DEFAULT if os.path.isfile(DEFAULT.partition(":")[0]) else config_flag.ROOT / DEFAULT
  return [argv[0], f"--config={path}", *argv[1:]]


def run_folder(text: str) -> str | None:
  """Returns the workdir of a run, or of one of its checkpoints; None of anything else.

  Args:
    text: `RUN`, `RUN/checkpoints`, `RUN/checkpoints/STEP` or `RUN/STEP`.
  """
  files.require_library(text)
  path = epath.Path(text).expanduser()
  places = [path]
  if path.name.isdecimal():
    places.append(path.parent)
  if places[-1].name == "checkpoints":
    places.append(places[-1].parent)
  return next((str(one) for one in places if any((one / name).exists() for name in _FILES)), None)


# ------------------------------ what a word is ------------------------------


def joined(words: Sequence[str], known: Iterable[str]) -> Iterator[tuple[str, bool]]:
  """Yields each word, and whether it is a flag; a flag's value that follows it is joined to it.

  Args:
    words: behind the program's name.
    known: the flags whose values are looked for, besides those of configs.
  """
  rest = iter(words)
  for word in rest:
    name, equals, _ = word.lstrip("-").replace("-", "_").partition("=")
    of_key = name.partition(".")[0] in ("config", "against")
    takes = not equals and (of_key or (name in known and not flags.FLAGS[name].boolean))
    if not word.startswith("-") or word == "-":
      yield word, False
    elif takes and (value := next(rest, None)) is not None:
      yield f"{word}={value}", True
    else:
      yield word, True


def _completed(flag: str) -> str:
  """Returns `--config=FILE.py:RECIPE` for `--config=FILE:RECIPE`; other flags as they are."""
  name, equals, value = flag.partition("=")
  if not equals or name.lstrip("-") not in ("config", "against"):
    return flag
  if path := _config_file(value):
    return f"{name}={path}"
  if name.lstrip("-") == "against" and (folder := run_folder(value)):
    return f"{name}={config_flag.of_run(folder)}"
  return flag


def _config_file(text: str) -> str | None:
  """Returns `FILE.py[:RECIPE]` for a config file, whose `.py` may be left out."""
  path, colon, recipe = text.partition(":")
  for one in (path, f"{path}.py"):
    if os.path.isfile(one):
      return f"{one}{colon}{recipe}"
  return None


def _place(word: str) -> tuple[str, str] | None:
  """Returns (word, its config) of a config file or a run; None for neither."""
  if config := _config_file(word):
    return word, config
  if folder := run_folder(word):
    return word, config_flag.of_run(folder)
  return None


def _of_places(
  places: Sequence[tuple[str, str]],
  others: Sequence[str],
  verb: str,
  owners: Mapping[str, Sequence[str]],
) -> list[str]:
  """Returns the flags for configs and runs.

  Raises:
    ValueError: there are more than the verb takes, or a checkpoint for a verb that reads none.
  """
  found = []
  names = ["config", *(["against"] if verb in owners["against"] else [])]
  for word, config in places:
    free = [name for name in names if not _given([*found, *others], name)]
    if not free:
      raise ValueError(_two_configs(word, config, _given([*found, *others], "config")[0], verb))
    found.append(f"--{free[0]}={config}")
    folder = config_flag.run_in(config)
    if not folder:
      continue
    if epath.Path(word) != epath.Path(folder):
      if verb not in owners["checkpoint"] or free[0] != "config":
        raise ValueError(f"{word}: {verb} takes a run, not one of its checkpoints; give {folder}")
      found.append(f"--checkpoint={word}")
    if free[0] == "config" and verb in owners["workdir"] and not _given(others, "workdir"):
      found.append(f"--workdir={folder}")
  return found


def _given(argv: Sequence[str], flag: str) -> list[str]:
  """Returns the values of `--FLAG=`."""
  pairs = (word.lstrip("-").partition("=") for word in argv if word.startswith("-"))
  return [value for name, equals, value in pairs if equals and name == flag]


# ------------------------------ what is refused ------------------------------


def _two_configs(word: str, location: str, other: str, verb: str) -> str:
  other = config_flag.run_in(other) or other
  if not config_flag.run_in(location):
    return f"{word} and {other}: two configs; give one"
  where = "checkpoint" if verb in ("evaluate", "sample", "export") else "workdir"
  return (
    f"{word} has its own config, and {other} is given, too: leave that out, or name the run with "
    f"--config={other} --{where}={word}"
  )


def _unknown(word: str, verb: str) -> str:
  """Returns why a word is refused."""
  if word in VERBS or (verb and not _is_path(word)):
    more = "" if verb in VERBS and VERBS[verb].config == "none" else _FOLLOWS
    return f"unexpected {word!r} after the verb; {more}options begin with --"
  if hf_folder.is_model(word):
    verb = verb if verb in ("evaluate", "sample", "export") else "evaluate"
    return (
      f"{word} is a model folder, not a run; for example: python main.py {verb} "
      f"--config=configs/single.py:model=hf --checkpoint={word}"
    )
  if os.path.isdir(word):
    return f"{word} is no run's folder: it has none of {', '.join(_FILES)}"
  if _is_path(word):
    return f"{word}: there is no run, and {config_flag.no_such_file(word.partition(':')[0])}"
  return f"unknown verb {word!r}; there are {', '.join(VERBS)}{nearest(word, VERBS)}"


def _is_path(word: str) -> bool:
  """Returns whether a word cannot but mean a config file or a folder."""
  return bool(_MEANS_PATH.search(word)) or os.path.isdir(word)


_FOLLOWS = "a config file, a run's folder or key=value may follow, and "
