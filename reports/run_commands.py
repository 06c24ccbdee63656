"""The commands that a run's page offers: to resume, evaluate and sample it."""

import shlex
from collections.abc import Sequence

from reports.run_files import Run
from reports.run_sections import Section

# Flags of `train` alone, which other verbs refuse.
_OF_TRAIN = ("--accept_changes", "--accept-changes")


def of_run(run: Run) -> list[tuple[str, str]]:
  """Returns (what it does, command); those of its newest start that has a command line."""
  given = [one["command"] for one in run.starts if isinstance(one.get("command"), str)]
  given = [text for text in given if text]
  folder = shlex.quote(run.folder)
  found = []
  if given:
    try:
      words = shlex.split(given[-1])
    except ValueError:  # printable has cut a very long one
      words = []
    if words:
      how = "resume" if run.done < run.total else "continue, after raising training.steps"
      found.append((how, shlex.join(_with_verb(words, ""))))
      words = _without(words, _OF_TRAIN)
      found.append(("evaluate", shlex.join(_with_verb(words, "evaluate"))))
      if run.unit == "tokens":
        prompt = "--prompt=" + (_prompt(run) or "The ")
        found.append(("sample", shlex.join([*_with_verb(words, "sample"), prompt])))
  found.append(("this page", f"python main.py report --workdir={folder}"))
  found.append(("compare", f"python main.py report --workdir={folder} --against=OTHER_WORKDIR"))
  return found


def _prompt(run: Run) -> str:
  samples = run.events("sample")
  return str(samples[-1].get("prompt", "")) if samples else ""


def _with_verb(words: Sequence[str], verb: str) -> list[str]:
  """Returns `python main.py [VERB] --flag ...` with another verb; "" is that of training."""
  head, rest = list(words[:2]), list(words[2:])
  if rest and not rest[0].startswith("-"):
    rest = rest[1:]
  return [*head, *([verb] if verb else []), *rest]


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
  """Returns the words without flags, given as `--flag=value` or `--flag value`."""
  kept, skip = [], False
  for word in words:
    if skip:
      skip = False
    elif word in flags:
      skip = True
    elif word.partition("=")[0] not in flags:
      kept.append(word)
  return kept


def section(run: Run) -> Section:
  """Returns the section of the commands."""
  return Section("Commands", "commands", {"commands": of_run(run)})
