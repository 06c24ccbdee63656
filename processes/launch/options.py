"""The command line of what starts the processes of a run: options, `--`, the command."""

import argparse
from collections.abc import Mapping
from typing import Any


def parse(
  arguments: list[str], description: str, options: Mapping[str, tuple[Any, str]]
) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
  """Returns the options, with `processes` and `command`, and the parser for further errors.

  Exits with 2 and one message where they are wrong: a number is at least 0, processes at least 1.

  Args:
    arguments: of the command line.
    description: what `--help` prints first.
    options: name -> default, whose type is the option's, and help.
  """
  split = arguments.index("--") if "--" in arguments else len(arguments)
  parser = argparse.ArgumentParser(
    prog="launch",
    usage=argparse.SUPPRESS,
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--processes", type=int, required=True, help="how many")
  for name, (default, text) in options.items():
    parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
  found = parser.parse_args(arguments[:split])
  for name, value in vars(found).items():
    least = 1 if name == "processes" else 0
    if not isinstance(value, str) and not value >= least:
      parser.error(f"--{name}={value}: must be at least {least}")
  found.command = arguments[split + 1 :]
  if not found.command:
    parser.error("no command; write it after the options: -- python main.py --config=...")
  return found, parser
