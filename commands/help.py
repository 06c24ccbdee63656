"""`help`, `-h`, `--help`: the verbs, the flags of one, and config keys with default and meaning."""

import dataclasses
import functools
import os
import pathlib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from absl import flags

from commands import config_flag
from commands.verbs import VERBS
from commands.words import HELP, HELP_WORDS, Line
from configs import base
from configs.keys import table
from configs.keys.row import Key
from configs.schema import recipes
from runtime import exit_codes
from runtime.suggest import elsewhere, nearest

KEYS = "keys"  # `help keys`: all of them
WIDEST = 100
_COMMAND = "python main.py"


def text(line: Line, owners: Mapping[str, Sequence[str]]) -> str:
  """Returns the help: of all verbs, of one, of config keys, or of everything (`--helpfull`).

  With a config among the arguments, defaults are those of its recipe.

  Args:
    line: the command line.
    owners: flag -> the verbs that take it; of the other flags, all do.

  Raises:
    ValueError: the config cannot be loaded, or there is nothing of that name.
  """
  location = line.configs.get("config")
  config = config_flag.load("config", location) if location else base.get_config()
  recipe = dict(config_flag.leaves(recipes.base(config.argument)))
  values = {
    key: recipe.get(key) if value is None else value for key, value in config_flag.leaves(config)
  }
  if "--helpfull" in line.flags:
    verbs = (_of_verb(verb, owners) for verb in VERBS)
    return "\n\n".join([_overview(), *verbs, *_all_keys(values)])
  if not (topics := _topics(line)):
    return _overview()
  return "\n\n".join(_of_topic(topic, owners, values) for topic in topics)


def _topics(line: Line) -> list[str]:
  """Returns what help is asked about: words, what follows `--help=`, and flags after `help`."""
  found = [line.verb, *line.words]
  for flag in line.flags:
    if flag not in HELP_WORDS and (flag.startswith("--help=") or line.verb == HELP):
      found.append(flag.removeprefix("--help="))
  return [one for one in dict.fromkeys(found) if one not in ("", HELP, *HELP_WORDS)]


# ------------------------------ what is shown ------------------------------


def _overview() -> str:
  lines = [
    "Trains a model over a device mesh.",
    "",
    f"{_COMMAND} [VERB] [FILE[:RECIPE] | RUN] [KEY=VALUE ...] [--FLAG=VALUE ...]",
    "",
  ]
  widest = max(map(len, VERBS))
  for name, verb in VERBS.items():
    lines.append(f"  {name:<{widest}}  {verb.summary}")
  recipe_names = ", ".join(recipes.RECIPES)
  files = ", ".join(pathlib.PurePath(file).stem for file in config_flag.strategies())
  codes = "; ".join(f"{code} {meaning}" for code, meaning in exit_codes.MEANINGS.items())
  lines += [
    "",
    *_entry("FILE", f"a strategy, one of configs/*.py, or a file of your own: {files}"),
    *_entry("RUN", "a run's workdir, such as runs/first, whose config is taken"),
    *_entry("RECIPE", f"{recipe_names} (lm by default), or model=NAME,data=NAME"),
    *_entry("KEY", "one of the config's, such as training.steps or mesh.tensor"),
    "",
    *_entry(f"{_COMMAND} help VERB", "a verb's flags, with examples"),
    *_entry(f"{_COMMAND} help KEY", "a config key, or a section of them: training"),
    *_entry(f"{_COMMAND} help {KEYS}", "all config keys"),
    *_entry(f"{_COMMAND} config FILE", "their values, and where these come from"),
    "",
    *_wrapped(
      "As several processes, on one machine or many, each runs the same command (docs/running.md)."
    ),
    *_wrapped(f"Exit codes: {codes} (docs/running.md)."),
  ]
  return "\n".join(lines)


def _of_topic(topic: str, owners: Mapping[str, Sequence[str]], values: Mapping[str, object]) -> str:
  name = topic.lstrip("-").replace("-", "_")
  own = {flag.name: flag for flag in own_flags()}
  key = name.removeprefix("config.").rstrip(".")
  is_key = any(dotted.startswith(key) for dotted in values)
  if name in VERBS:
    return _of_verb(name, owners)
  of_key = is_key or any(dotted.endswith(f".{key}") for dotted in values)
  if name in own and (topic.startswith("-") or not of_key):
    taken = f"Taken by {', '.join(owners.get(name, VERBS))}."
    return "\n".join([*_flag_lines([own[name]]), "", *_wrapped(taken)])
  if key == KEYS:
    return "\n\n".join(_all_keys(values))
  if is_key:
    return _of_keys(key, config_flag.named([key], [*values]), values)
  if found := _search(key, values):
    return found
  known = [*VERBS, *own, *values, *(dotted.partition(".")[0] for dotted in values), KEYS]
  raise ValueError(
    f"help {topic}: there is no verb, flag or config key of that name{nearest(key, known)} "
    f"({_COMMAND} help: the verbs; help {KEYS}: the keys)"
  )


def _search(word: str, values: Mapping[str, object]) -> str:
  """Returns the keys, flags and verbs that a word is part of, in full if it is one key; or "".

  By names first: what a key is called elsewhere is one of its names.
  """
  texts = {f"--{flag.name}": meaning(flag) for flag in own_flags()}
  texts |= {name: f"{verb.summary}. {verb.text}" for name, verb in VERBS.items()}
  texts |= {key: key_row(key, values["argument"]).explained() for key in values}
  begins = re.compile(rf"(^|[-_\W]){re.escape(word)}", re.IGNORECASE)
  lasts = {name: name.rpartition(".")[2] for name in texts}
  meant = [name for name in elsewhere(word) if name in values]
  same = meant or [name for name, last in lasts.items() if last.lstrip("-") == word.lower()]
  near = [name for name, last in lasts.items() if begins.search(last) and name not in same]
  if len(same) == 1 or (not same and len(near) == 1):
    [name] = same or near
    found = (
      _of_keys(name, [name], values) if name in values else "\n".join(_entry(name, texts[name]))
    )
    return "\n".join([found, *(_wrapped(f"Also: {', '.join(near)}") if same and near else [])])
  found = [*same, *near] or [name for name, what in texts.items() if begins.search(what)]
  if not found or len(word) < 2:
    return ""
  lines = [line for name in found for line in _entry(name, texts[name].partition(". ")[0])]
  return "\n".join([f"{word} is part of:", *lines])


def _of_verb(name: str, owners: Mapping[str, Sequence[str]]) -> str:
  verb = VERBS[name]
  taken = "" if verb.config == "none" else "[FILE[:RECIPE] | RUN] [KEY=VALUE ...]"
  usage = " ".join(filter(None, (_COMMAND, name, verb.words, taken, "[--FLAG=VALUE ...]")))
  lines = [usage, "", *_wrapped(f"{name}: {verb.summary}. {verb.text}".strip())]
  if verb.examples:
    lines += ["", "Examples:", *(f"  {_COMMAND} {example}" for example in verb.examples)]
  its = [flag for flag in own_flags() if name in owners.get(flag.name, VERBS)]
  own = [flag for flag in its if flag.name in owners]
  general = [flag for flag in its if flag not in own]
  lines += ["", "Flags:", *_flag_lines(own, name)] if own else []
  lines += ["", *_wrapped(f"Of every verb: {', '.join(f'--{flag.name}' for flag in general)}.")]
  if verb.config != "none":
    lines += ["", *_wrapped(f"Config keys: {_COMMAND} help {KEYS}, or help SECTION.")]
  return "\n".join(lines)


def own_flags() -> list[flags.Flag]:
  """Returns the flags of commands/flags.py, without those of single keys."""
  own = flags.FLAGS.flags_by_module_dict().get("commands.flags", [])
  return [flag for flag in sorted(own, key=lambda flag: flag.name) if "." not in flag.name]


def meaning(flag: flags.Flag) -> str:
  """Returns the help of a flag, without what absl adds about how to repeat it."""
  return flag.help.partition(";\n")[0]


# Flag -> verbs -> what it means for them, where that is not what it means for the others.
_FOR_VERBS = {
  "workdir": {
    "evaluate sample export replay report": "The run to read; runs/CONFIG_RECIPE.",
    "plan": "Where plan.html and plan.json are written; runs/CONFIG_RECIPE.",
    "search": "Where search.html and search.json are written; runs/CONFIG_RECIPE.",
    "doctor": "The workdir to check; runs, or with --config runs/CONFIG_RECIPE.",
    "layout compare": "As of train, whose command may be given with another verb; not changed.",
  },
  "json": {"config": "Print JSON.", "check": "The file for its findings as JSON."},
  "topology": {"config": "The devices to derive it for: v5p-128 or h100:8; by default these here."},
}


def _flag_lines(those: Sequence[flags.Flag], verb: str = "") -> list[str]:
  lines = []
  for flag in those:
    default = "" if flag.default in (None, [], False) else f"={flag.default!r}"
    texts = {v: text for vs, text in _FOR_VERBS.get(flag.name, {}).items() for v in vs.split()}
    lines += _entry(f"--{flag.name}{default}", texts.get(verb) or meaning(flag))
  return lines


def _all_keys(values: Mapping[str, object]) -> Iterator[str]:
  """Yields the keys of each section, those of a section's sections among them."""
  for section in sorted({key.partition(".")[0] if "." in key else "" for key in values}):
    inside = [key for key in values if key.startswith(f"{section}.")]
    inside = inside or [key for key in values if "." not in key]
    yield _of_keys(section, inside, values)


def _of_keys(title: str, keys: Sequence[str], values: Mapping[str, object]) -> str:
  """Returns the default, unit and meaning of keys."""
  argument = values["argument"]
  lines = [f"{title or 'the config itself'}, defaults of {argument} (unset: derived):"]
  for key in keys:
    default = "unset" if values[key] is None else repr(values[key])
    lines += _entry(f"--config.{key}={default}", key_row(key, argument).explained())
  return "\n".join(lines)


# ------------------------------ lines ------------------------------


def _width() -> int:
  return min(shutil.get_terminal_size().columns, WIDEST)


def _wrapped(sentence: str, indent: str = "") -> list[str]:
  return textwrap.wrap(
    sentence,
    max(_width(), 20),
    initial_indent=indent,
    subsequent_indent=indent,
    break_on_hyphens=False,
  )


def _entry(name: str, what: str, column: int = 24) -> list[str]:
  """Returns a name and what it is, beside it where there is room, else below."""
  lines = _wrapped(what, " " * (column + 2))
  if lines and len(name) + 2 <= column:
    return [f"  {name:<{column}}{lines[0].lstrip()}", *lines[1:]]
  return [f"  {name}", *_wrapped(what, "      ")]


@dataclasses.dataclass(frozen=True)
class Styles:
  """How text is set off on a terminal; plain where `on` is False."""

  on: bool

  def bold(self, text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if self.on else text

  def dim(self, text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if self.on else text


def styles(stream: TextIO | None = None) -> Styles:
  """Returns the styles for a stream: none where it is no terminal, or by NO_COLOR."""
  stream = stream or sys.stdout
  plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
  return Styles(stream.isatty() and not plain)


def show(text: str, end: str = "\n") -> None:
  """Prints a text; a reader that has seen enough of it (`| head`) is no error."""
  try:
    print(text, end=end, flush=True)
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ------------------------------ config keys ------------------------------


def key_row(key: str, argument: str) -> Key:
  """Returns what is known of a key in a recipe; an empty row for a key of a user's own.

  Args:
    key: dotted.
    argument: the recipe, as in a config's `argument`.
  """
  return table.find(key, *_recipe(argument)) or Key(None)


@functools.cache  # of hundreds of keys
def _recipe(argument: str) -> tuple[str, str]:
  """Returns the recipe, and the name of its model."""
  return recipes.parse(argument)[0], recipes.base(argument).model.name
