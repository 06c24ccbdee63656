"""What may follow on a command line: the shells' functions of `completion` call this file.

It is run as a script, without `site`, and imports the standard library alone: it has to answer
while a key is pressed. What there is to complete is made by commands/completion.py, which
imports the application, and kept until one of the files that it is made of changes.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join("~", ".cache", "meshwright", "completion")
# Whose files decide what there is.
SOURCES = (
  "commands",
  "configs",
  "configs/keys",
  "configs/schema",
  "reports/tour",
  "runtime",
  "input_pipeline",
)
_SECONDS = 20
_CONFIGS = ("config", "against")
_PATH_KEYS = ("data.files", "data.data_dir", "data.tokenizer", "data.chat_template", "model.folder")
_PATH_KEYS += ("data.evaluation_files", "checkpoint.initialize_from", "compilation_cache_dir")
_PLACES = ("configs", "runs")  # of configs and runs, as a rule
_SHELLS = ("bash", "zsh", "fish")
Found = Iterator[tuple[str, str]]  # a whole word, with a space where it is complete; what it means


def main(arguments: Sequence[str]) -> None:
  """Prints a line for each candidate: the word, a tab and what it means.

  Args:
    arguments: the shell; of bash, the characters that separate words while it completes; the
      command line up to the cursor.
  """
  shell, breaks, line = arguments
  words = split(line)
  known = index()
  if known is None:
    return
  found = sorted(candidates(words[:-1], words[-1], known))
  # bash replaces what is behind the last of its separators.
  cut = max((words[-1].rfind(each) for each in breaks), default=-1) + 1 if shell == "bash" else 0
  for word, what in found:
    print(word[cut:] if shell == "bash" else f"{word}\t{' '.join(what.split())}")


def split(line: str) -> list[str]:
  """Returns the words behind main.py, the last of them being typed, without their quotes."""
  words: list[str] = []
  for quote in ("", "'", '"'):  # one of which may be open
    with contextlib.suppress(ValueError):
      words = shlex.split(f"{line}\0{quote}")  # so that the last one is there where it is empty
      break
  words = [word.removesuffix("\0") for word in words]
  names = [os.path.basename(word) for word in words[:-1]]
  return words[len(names) - names[::-1].index("main.py") if "main.py" in names else 0 :]


# ------------------------------ what there is ------------------------------


def index() -> Mapping | None:
  """Returns what there is to complete, made anew if a source has changed; None if that fails."""
  path = os.path.join(os.path.expanduser(FOLDER), hashlib.sha256(ROOT.encode()).hexdigest()[:16])
  stamp = _stamp()
  with contextlib.suppress(OSError, ValueError, KeyError):
    with open(path, encoding="utf-8") as file:
      kept = json.load(file)
    if kept["stamp"] == stamp:
      return kept
  with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
    command = [sys.executable, "-m", "commands.completion"]
    made = subprocess.run(
      command, cwd=ROOT, capture_output=True, timeout=_SECONDS, check=True, stdin=subprocess.DEVNULL
    )
    found = {**json.loads(made.stdout), "stamp": stamp}
    with contextlib.suppress(OSError):
      os.makedirs(os.path.dirname(path), exist_ok=True)
      with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
        json.dump(found, file)
      os.replace(f"{path}.{os.getpid()}", path)
    return found
  return None


def _stamp() -> str:
  """Returns a digest of the names, sizes and times of the files that the index is made of."""
  seen = []
  for folder in SOURCES:
    with contextlib.suppress(OSError), os.scandir(os.path.join(ROOT, folder)) as entries:
      for entry in entries:
        if entry.name.endswith(".py"):
          stat = entry.stat()
          seen.append((folder, entry.name, stat.st_size, stat.st_mtime_ns))
  return hashlib.sha256(repr(sorted(seen)).encode()).hexdigest()


# ------------------------------ what may follow ------------------------------


def candidates(words: Sequence[str], word: str, known: Mapping) -> Found:
  """Yields what a word may become.

  Args:
    words: behind main.py, before it.
    word: as far as it is typed.
    known: of `index`.
  """
  verb, given, waits = _parse(words, known)
  keys = _keys(given.get("config") or next(filter(_is_config, words), None), known)
  before, typed = "", word
  if waits:
    found = _values(waits, word, keys, known)
  elif match := re.match(r"--(config|against)\.|--set=", word):
    before, typed = match[0], word[match.end() :]
    found = _settings(typed, keys)
  elif word.startswith("--") and "=" in word:
    flag, _, typed = word.partition("=")
    before, found = f"{flag}=", _values(_name(flag), typed, keys, known)
  elif word.startswith("-"):
    found = _flags(verb, given, known)
  else:
    found = _words(verb, given, word, keys, known)
  yield from {before + name: what for name, what in found if name.startswith(typed)}.items()


def _name(flag: str) -> str:
  """Returns `accept_changes` of `--accept-changes`."""
  return flag[2:].replace("-", "_")


def _parse(words: Sequence[str], known: Mapping) -> tuple[str, dict[str, str], str]:
  """Returns the verb, or ""; flag -> its value, of those that are given; the flag that waits."""
  verb, given, waits = "", {}, ""
  for word in words:
    name, equals, value = word.partition("=")
    if waits:
      given[waits], waits = word, ""
    elif not word.startswith("-"):
      verb = verb or (word if word in known["verbs"] or word == "help" else "")
    elif word.startswith("--"):
      name = _name(name)
      given[name] = value
      of_key = name.partition(".")[0] in _CONFIGS and "." in name
      takes = of_key or (name in known["flags"] and not known["flags"][name]["bool"])
      waits = name if takes and not equals else ""
  return verb, given, waits


def _words(
  verb: str, given: Mapping[str, str], word: str, keys: Mapping[str, Sequence], known: Mapping
) -> Found:
  if verb in ("", "help"):
    yield from ((f"{name} ", what) for name, what in known["verbs"].items())
    yield ("keys ", "all config keys") if verb else ("help ", "verbs, flags, config keys")
  if verb in ("help", "config") and "=" not in word:
    yield from _dotted(word, keys, " ")
  elif known["takes"].get(verb or "train") and re.match(r"[a-z_0-9.]*(=|$)", word):
    yield from _settings(word, keys)
    yield from ((f"{folder}/", "") for folder in _PLACES if os.path.isdir(folder))
  if verb == "report":
    yield from _paths(word)
  elif "/" in word:
    yield from _config(word, known)  # or a folder, of runs
  if verb == "completion":
    yield from ((f"{shell} ", "") for shell in _SHELLS)
  if verb != "help" and not word:
    yield from _flags(verb, given, known)


def _flags(verb: str, given: Mapping[str, str], known: Mapping) -> Found:
  verb = verb or "train"
  for name, flag in known["flags"].items():
    taken = flag["verbs"] is None or verb in flag["verbs"]
    if taken and (name not in given or flag["many"]):
      yield f"--{name}{' ' if flag['bool'] else '='}", flag["help"]
  if "config" in given and known["takes"].get(verb):
    yield "--config.", "a config key"
  yield "--help ", "help about the verb"


def _dotted(typed: str, keys: Mapping[str, Sequence], end: str) -> Found:
  """Yields keys of the section that is typed, and the sections below it."""
  start = typed[: typed.rfind(".") + 1]
  for key, (_, meaning) in keys.items():
    if key.startswith(start):
      section, dot, _ = key[len(start) :].partition(".")
      yield (f"{start}{section}.", "a section") if dot else (f"{key}{end}", meaning)


def _settings(typed: str, keys: Mapping[str, Sequence]) -> Found:
  """Yields `key=`, and behind it the values of the key."""
  key, equals, value = typed.partition("=")
  if not equals:
    yield from _dotted(typed, keys, "=")
    return
  yield from ((f"{key}={word} ", "") for word in (keys[key][0] if key in keys else ()))
  if key in _PATH_KEYS:
    yield from ((f"{key}={path}", what) for path, what in _paths(value))


def _keys(location: str | None, known: Mapping) -> Mapping[str, Sequence]:
  """Returns the keys of the recipe that a config's location names; of all where it names none."""
  argument = (location or "").partition(":")[2]
  recipe = re.sub(r"^.*model=|,.*$", "", argument) if "=" in argument else argument
  if recipe in known["keys"]:
    return known["keys"][recipe]
  return {key: row for keys in reversed(known["keys"].values()) for key, row in keys.items()}


def _is_config(word: str) -> bool:
  """Returns whether a word names a config file, whose `.py` may be left out."""
  path = word.partition(":")[0]
  return not word.startswith("-") and (path.endswith(".py") or os.path.isfile(f"{path}.py"))


def _values(name: str, value: str, keys: Mapping[str, Sequence], known: Mapping) -> Found:
  """Yields the values of a flag, or of a config key."""
  flag, dot, key = name.partition(".")
  if name in _CONFIGS:
    yield from _config(value, known)
  elif flag in _CONFIGS and dot:
    yield from ((one[len(key) + 1 :], what) for one, what in _settings(f"{key}={value}", keys))
  elif name == "set":
    yield from _settings(value, keys)
  elif name == "accept_changes":
    done = value[: value.rfind(",") + 1]
    yield from ((done + key, what) for key, what in _dotted(value[len(done) :], keys, ""))
  elif name in known["flags"]:
    row = known["flags"][name]
    words = ["true", "false"] if row["bool"] else row["values"]
    yield from ((word if word.endswith(":") else f"{word} ", "") for word in words)
    if row["path"]:
      yield from _paths(value)


def _config(value: str, known: Mapping) -> Found:
  """Yields config files; behind the colon recipes, or model=NAME,data=NAME."""
  file, colon, argument = value.partition(":")
  done = argument[: argument.rfind(",") + 1]
  if not value:
    yield from ((f"{file} ", "") for file in known["strategies"])
  elif not colon:
    yield from ((path, "") for path, _ in _paths(value) if re.search(r"/$|(?<!__)\.py $", path))
  else:
    named = {"model": known["recipes"], "data": known["data"]}
    name = argument[len(done) :].partition("=")[0]
    found = [f"{name}={one}" for one in named.get(name, ())]
    found = found or [f"{key}=" for key in named if f"{key}=" not in done]
    recipes = [] if done else [f"{recipe} " for recipe in known["recipes"]]
    yield from ((f"{file}:{done}{one}", "") for one in [*recipes, *found])


def _paths(value: str) -> Found:
  """Yields the files and folders that begin so, as typed; those in a folder as `folder/`."""
  for path in glob.iglob(glob.escape(os.path.expanduser(value)) + "*"):
    name = os.path.basename(path)
    if re.fullmatch(r"[\w.,:=@%+/-]+", name) and name != "__pycache__":
      end = os.sep if os.path.isdir(path) else " "
      yield os.path.join(os.path.dirname(value), name) + end, ""


if __name__ == "__main__":
  main(sys.argv[1:])
