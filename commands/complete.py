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
  if waits:
    found = _values(waits, word, keys, known)
  elif word.startswith("--") and "=" in word:
    flag, _, value = word.partition("=")
    found = ((f"{flag}={v}", what) for v, what in _values(_name(flag), value, keys, known))
  elif word.startswith("-"):
    found = _flags(verb, given, word, keys, known)
  else:
    found = _words(verb, given, word, keys, known)
  yield from {name: what for name, what in found if name.startswith(word)}.items()


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
  name, equals, value = word.partition("=")
  if verb in ("help", "config") and not equals:
    yield from _dotted(word, keys, " ")
  elif known["takes"].get(verb or "train") and re.fullmatch(r"[a-z_0-9.]+", name):
    if equals:
      found = _values(f"config.{name}", value, keys, known)
      yield from ((f"{name}={one}", what) for one, what in found)
    else:
      yield from _dotted(word, keys, "=")
      yield from ((f"{folder}/", "") for folder in _PLACES if os.path.isdir(folder))
  if verb == "report":
    yield from _paths(word)
  elif "/" in word:
    yield from _config(word, known)  # or a folder, of runs
  if verb == "completion":
    yield from ((f"{shell} ", "") for shell in _SHELLS)
  if verb != "help" and not word:
    yield from _flags(verb, given, "--", keys, known)


def _flags(
  verb: str, given: Mapping[str, str], word: str, keys: Mapping[str, Sequence], known: Mapping
) -> Found:
  for flag in _CONFIGS:
    if word.startswith(f"--{flag}."):
      yield from _dotted(word, keys, "=", f"--{flag}.")
      return
  verb = verb or "train"
  for name, flag in known["flags"].items():
    taken = flag["verbs"] is None or verb in flag["verbs"]
    if taken and (name not in given or flag["many"]):
      yield f"--{name}{' ' if flag['bool'] else '='}", flag["help"]
  if "config" in given and known["takes"].get(verb):
    yield "--config.", "a config key"
  yield "--help ", "help about the verb"


def _dotted(typed: str, keys: Mapping[str, Sequence], end: str, prefix: str = "") -> Found:
  """Yields keys of the section that is typed, and the sections below it."""
  inside = typed[len(prefix) :].rpartition(".")[0]
  for key, (_, meaning) in keys.items():
    if inside and not key.startswith(f"{inside}."):
      continue
    rest = key[len(inside) + 1 :] if inside else key
    section, dot, _ = rest.partition(".")
    start = f"{inside}." if inside else ""
    if dot:
      yield f"{prefix}{start}{section}.", "a section"
    else:
      yield f"{prefix}{key}{end}", meaning


# Table of a user's parts -> the keys that name one.
_TABLES = {
  "MLPS": ("model.mlp",),
  "ATTENTION": ("model.attention",),
  "NORMS": ("model.norm",),
  "ACTIVATIONS": ("model.activation",),
  "POSITION_EMBEDDINGS": ("model.positions",),
  "METRICS": ("training.metrics", "evaluation.metrics"),
}


def _keys(location: str | None, known: Mapping) -> Mapping[str, Sequence]:
  """Returns the keys of the config that is given, with what its file and those it imports register.

  The files are read, not executed.
  """
  found = dict(_of_recipe(location, known))
  path = (location or "").partition(":")[0]
  path = os.path.expanduser(path if path.endswith(".py") else f"{path}.py")
  left, seen = [path], set()
  while left:
    path = left.pop()
    if path in seen or os.path.abspath(path).startswith(ROOT + os.sep) or not os.path.isfile(path):
      continue
    seen.add(path)
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
      text = file.read()
      left += [
        os.path.join(os.path.dirname(path), f"{name}.py")
        for name in re.findall(r"^(?:import|from) (\w+)", text, re.M)
      ]
      for table, name in re.findall(r"\b([A-Z_]+)\.register\(\s*[\"']([\w.]+)[\"']", text):
        if table == "KEYS":
          found[name] = [[], ""]
        for key in _TABLES.get(table, ()):
          words, meaning = found.get(key, ((), ""))
          found[key] = [[*words, name], meaning]
  return found


def _of_recipe(location: str | None, known: Mapping) -> Mapping[str, Sequence]:
  """Returns the keys of the recipe that `--config` names; of all where there is none."""
  file, _, argument = (location or "").partition(":")
  model = re.sub(r"^.*model=|,.*$", "", argument) if "=" in argument else argument
  if argument and model in known["keys"]:
    return known["keys"][model]
  experiment = f"{os.sep}experiments{os.sep}" in file
  if model in known["recipes"] or (location is not None and not argument and not experiment):
    return known["keys"]["lm"]
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
    yield from ((f"{word} ", "") for word in (keys[key][0] if key in keys else ()))
    if key in _PATH_KEYS:
      yield from _paths(value)
  elif name == "set":
    key, equals, _ = value.partition("=")
    if equals:
      yield from ((f"{key}={word} ", "") for word in (keys[key][0] if key in keys else ()))
    else:
      yield from _dotted(value, keys, "=")
  elif name == "accept_changes":
    done = value[: value.rfind(",") + 1]
    yield from ((done + key, what) for key, what in _dotted(value[len(done) :], keys, ""))
  elif name in known["flags"]:
    row = known["flags"][name]
    yield from ((word if word.endswith(":") else f"{word} ", "") for word in row["values"])
    if row["bool"]:
      yield from (("true ", ""), ("false ", ""))
    if row["path"]:
      yield from _paths(value)


def _config(value: str, known: Mapping) -> Found:
  """Yields config files; behind the colon recipes, or model=NAME,data=NAME."""
  file, colon, argument = value.partition(":")
  if not value:
    yield from ((f"{file} ", "") for file in known["strategies"])
    return
  if not colon:
    for path in _files(value):
      if path.endswith(os.sep):
        yield path, ""
      elif path.endswith(".py") and not path.endswith("__init__.py"):
        yield f"{path} ", ""
    return
  done = argument[: argument.rfind(",") + 1]
  part = argument[len(done) :]
  name, equals, _ = part.partition("=")
  if equals:
    known_values = known["recipes"] if name == "model" else known["data"] if name == "data" else []
    yield from ((f"{file}:{done}{name}={one}", "") for one in known_values)
    return
  if not done:
    yield from ((f"{file}:{recipe} ", "") for recipe in known["recipes"])
  yield from ((f"{file}:{done}{key}=", "") for key in ("model", "data") if f"{key}=" not in done)


def _paths(value: str) -> Found:
  yield from ((path if path.endswith(os.sep) else f"{path} ", "") for path in _files(value))


def _files(value: str) -> Iterator[str]:
  """Yields the files and folders that begin so, as typed; those in a folder as `folder/`."""
  pattern = glob.escape(os.path.expanduser(value)) + "*"
  for path in glob.iglob(pattern):
    name = os.path.basename(path)
    if re.fullmatch(r"[\w.,:=@%+/-]+", name) and name != "__pycache__":
      yield os.path.join(os.path.dirname(value), name) + (os.sep if os.path.isdir(path) else "")


if __name__ == "__main__":
  main(sys.argv[1:])
