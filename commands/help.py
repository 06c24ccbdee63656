"""`help`, `-h`, `--help`: the verbs, every flag, and every config key with its default and meaning.

The meanings are the comments at the defaults in configs/, so that they are written once.
"""

import ast
import functools
import inspect
import io
import sys
import tokenize
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict

from commands import config_flag
from configs import base
from configs.schema import defaults, recipes

WORDS = ("-h", "-help", "--help", "-?", "--helpfull", "--helpshort", "--helpxml", "--help=true")


def asked(argv: Sequence[str]) -> bool:
  """Returns whether a command line asks for help."""
  return any(word in WORDS for word in argv[1:]) or argv[1:2] == ["help"]


def text(argv: Sequence[str]) -> str:
  """Returns the help; with a `--config` among the arguments, the defaults of its recipe.

  Raises:
    ValueError: the config cannot be loaded.
  """
  argv = [word for word in argv if word not in WORDS]
  given = config_flag.config_values(argv, "config")
  config = config_flag.load("config", given[-1]) if given else base.get_config()
  others = "the recipe lm; of another: help --config=configs/dp8.py:mlp"
  main = sys.modules["main" if "main" in sys.modules else "__main__"]
  return "\n".join(
    [
      inspect.getdoc(main) or "",
      "",
      "Flags (a verb's name first: of that verb only):",
      *_flag_lines(),
      "",
      f"Config keys, with the defaults of {given[-1] if given else others}",
      "(unset: derived when the run starts):",
      *_key_lines(config),
    ]
  )


def _flag_lines() -> list[str]:
  own = flags.FLAGS.flags_by_module_dict().get("commands.flags", [])
  return [
    line
    for flag in sorted(own, key=lambda flag: flag.name)
    if not flag.name.partition(".")[2]
    for line in _line(f"--{flag.name}", _default(flag.default), flag.help.partition(";\n")[0])
  ]


def _default(value) -> str:
  return "" if value in (None, []) else repr(value)


def _key_lines(config: ConfigDict) -> list[str]:
  recipe = config.argument if config.argument in recipes.RECIPES else "lm"
  lines = []
  for key, section, name in config_flag.keys(config):
    value = section[name]
    meaning = comments().get((recipe, key)) or comments().get(("", key), "")
    lines += _line(f"--config.{key}", "unset" if value is None else repr(value), meaning)
  return lines


def _line(name: str, default: str, meaning: str) -> list[str]:
  equals = f"={default}" if default else ""
  return [f"  {name}{equals}{f'  # {meaning}' if meaning else ''}"]


@functools.cache
def comments() -> dict[tuple[str, str], str]:
  """Returns (recipe or "", dotted key) -> the comment at its default in configs/."""
  found = {}
  for module in (base, defaults, recipes):
    source = inspect.getsource(module)
    beside = _beside(source)
    for function in ast.parse(source).body:
      if isinstance(function, ast.FunctionDef):
        for key, first, last in _defaults(function):
          meaning = beside.get(last) or _above(beside, source.splitlines(), first)
          recipe = function.name if function.name in recipes.RECIPES else ""
          if meaning:
            found.setdefault((recipe, key), meaning)
  return found


def _defaults(function: ast.FunctionDef):
  """Yields (dotted key, first line, last line) of the defaults in a function's code."""
  for node in ast.walk(function):
    if isinstance(node, ast.Assign):
      target = node.targets[0]
      name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
      if isinstance(target, ast.Attribute):
        yield name, node.lineno, node.end_lineno
      section = function.name.strip("_") if name == "common" else name
    elif isinstance(node, ast.Return) and function.name == "_partitioning":
      section = "partitioning"
    else:
      continue
    for literal in ast.walk(node.value):
      if isinstance(literal, ast.Dict):
        for key, value in zip(literal.keys, literal.values, strict=True):
          if isinstance(key, ast.Constant):
            yield f"{section}.{key.value}", key.lineno, value.end_lineno


def _beside(source: str) -> dict[int, str]:
  """Returns line -> its comment."""
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


def _above(beside: dict[int, str], lines: Sequence[str], line: int) -> str:
  """Returns the comment that fills the lines above a line."""
  first = line
  while first - 1 in beside and lines[first - 2].lstrip().startswith("#"):
    first -= 1
  return " ".join(beside[number] for number in range(first, line))
