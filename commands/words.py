"""The words of a command line: a verb, a config or a run, `key=value`, and flags.

  python main.py [VERB] [CONFIG | RUN] [KEY=VALUE ...] [--FLAG=VALUE ...]

The name of a verb wins; else a file is a config, with or without `.py`, and a folder is a run,
whose config is taken. A word is `key=value` if what is before its first `=` is a dotted name, so
a folder of such a name is written `./lr=0.1`.
"""

import dataclasses
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
CONFIGS = ("config", "against")  # flags that name a config
DEFAULT = "configs/dp4_tp2.py:lm_bpe"  # the job of README and `make train`
_MEANS_PATH = re.compile(r"[/:]|\.py$")
_SETTING = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")
# Of which one is in the workdir of each run: those of `training.workdir_files` and a checkpoint's.
_FILES = ("given.json", "metrics.jsonl", "checkpoints")


def asks_for_help(argv: Sequence[str]) -> bool:
  """Returns whether a command line asks for help."""
  words = argv[1:]
  return words[:1] == [HELP] or any(w in HELP_WORDS or w.startswith("--help=") for w in words)


@dataclasses.dataclass
class Line:
  """A command line, taken apart.

  Attributes:
    verb: "" where none is named.
    configs: flag -> what names its config, of those that are given.
    settings: (flag of a config, dotted key, value) of each override, in order.
    flags: the others, as `--name=value` or `--name`.
    words: what the verb takes besides, such as config keys.
  """

  verb: str = ""
  configs: dict[str, str] = dataclasses.field(default_factory=dict)
  settings: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
  flags: list[str] = dataclasses.field(default_factory=list)
  words: list[str] = dataclasses.field(default_factory=list)

  def values(self, flag: str) -> list[str]:
    """Returns the values of a flag that names no config."""
    return [one.partition("=")[2] for one in self.flags if one.startswith(f"--{flag}=")]


def read(given: Sequence[str], owners: Mapping[str, Sequence[str]], *, asks: bool = False) -> Line:
  """Returns a command line, taken apart.

  Args:
    given: what follows the program's name.
    owners: flag -> the verbs that take it.
    asks: whether it asks for help, about whatever its words are.

  Raises:
    ValueError: a word that is no verb and nothing that it takes, or two configs.
  """
  line, places = Line(), []
  for word, is_flag in joined(given, () if asks else flags.FLAGS):
    of_verb = VERBS.get(line.verb, VERBS["train"])
    if is_flag:
      _add_flag(line, word)
    elif not line.verb and (word in VERBS or word == HELP):
      line.verb = word
    elif of_verb.config == "none" and of_verb.words:
      line.words.append(word)
    elif _SETTING.match(word) and of_verb.config != "none":
      key, _, value = word.partition("=")
      line.settings.append(("config", key, value))
    elif (line.verb == "config" or asks) and not (_MEANS_PATH.search(word) or run_folder(word)):
      line.words.append(word)  # a config key
    elif word not in VERBS and (place := _place(word)):
      places.append((word, place))
    elif asks:
      line.words.append(word)
    else:
      raise ValueError(_unknown(word, line.verb))
  _add_places(line, places, owners)
  return line


def add_default(line: Line) -> None:
  """Gives a command line a config: where it has none, that of the run it names, or the default.

  The default is announced on standard error.

  Raises:
    ValueError: --checkpoint is no run's, so that its config is not known.
  """
  if VERBS[line.verb or "train"].config != "required" or "config" in line.configs:
    return
  for flag in ("checkpoint", "workdir"):
    for value in line.values(flag):
      if folder := run_folder(value):
        line.configs["config"] = config_flag.of_run(folder)
        if not line.values("workdir"):
          line.flags.append(f"--workdir={folder}")
        return
      if flag == "checkpoint":
        raise ValueError(
          f"no config, and --checkpoint={value} is no run's, whose config would be taken; give "
          f"--config=FILE"
        )
  print(f"config: {DEFAULT}, since none is given", file=sys.stderr, flush=True)
  here = os.path.isfile(DEFAULT.partition(":")[0])
  line.configs["config"] = DEFAULT if here else str(config_flag.ROOT / DEFAULT)


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
    name, equals, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_")  # people write flags both ways
    of_key = name.partition(".")[0] in CONFIGS
    takes = not equals and (of_key or (name in known and not flags.FLAGS[name].boolean))
    if not word.startswith("-") or word == "-":
      yield word, False
    elif takes and (following := next(rest, None)) is not None:
      yield f"--{name}={following}", True
    else:
      yield f"--{name}{equals}{value}", True


def _add_flag(line: Line, flag: str) -> None:
  name, equals, value = flag[2:].partition("=")
  of, dot, key = name.partition(".")
  if name == "against" and line.verb == "report":
    line.words.append(value)  # a run
  elif name in CONFIGS and equals:
    folder = run_folder(value) if name == "against" and not _config_file(value) else None
    line.configs[name] = config_flag.of_run(folder) if folder else _config_file(value) or value
  elif of in CONFIGS and dot and equals:
    line.settings.append((of, key, value))
  else:
    line.flags.append(flag)


def _config_file(text: str) -> str | None:
  """Returns `FILE.py[:RECIPE]` for a config file, whose `.py` may be left out."""
  path, colon, recipe = text.partition(":")
  for one in (path, f"{path}.py"):
    if os.path.isfile(one):
      return f"{one}{colon}{recipe}"
  return None


def _place(word: str) -> str | None:
  """Returns what names the config of a file or a run; None for neither."""
  if config := _config_file(word):
    return config
  return config_flag.of_run(folder) if (folder := run_folder(word)) else None


def _add_places(
  line: Line, places: Sequence[tuple[str, str]], owners: Mapping[str, Sequence[str]]
) -> None:
  """Adds the configs and runs that are named by words, each with what names its config.

  Raises:
    ValueError: there are more than the verb takes, or a checkpoint for a verb that reads none.
  """
  verb = line.verb or "train"
  for word, config in places:
    flag = "against" if "config" in line.configs and verb in owners["against"] else "config"
    if flag in line.configs:
      raise ValueError(_two_configs(word, config, line.configs["config"], verb))
    line.configs[flag] = config
    folder = config_flag.run_in(config)
    if not folder:
      continue
    if epath.Path(word) != epath.Path(folder):
      if verb not in owners["checkpoint"] or flag != "config":
        raise ValueError(f"{word}: {verb} takes a run, not one of its checkpoints; give {folder}")
      line.flags.append(f"--checkpoint={word}")
    of_run = verb in owners["workdir"] and verb not in ("sweep", "forecast")  # of many runs
    if flag == "config" and of_run and not line.values("workdir"):
      line.flags.append(f"--workdir={folder}")


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
