"""The verb `check`: checks of a train step that need not be ours."""

import functools
from collections.abc import Callable

from checks import __main__ as checks
from commands import flags


def run(*words: str) -> Callable[[], int]:
  """Returns what checks the file that is named."""
  options = [f"--mesh={sizes}" for sizes in flags.MESH.value]
  files = {"json": flags.JSON.value, "html": flags.HTML.value, "only": flags.ONLY.value}
  options += [f"--{name}={value}" for name, value in files.items() if value]
  switches = {"attached": flags.ATTACHED.value, "debug": flags.DEBUG.value}
  options += [f"--{name}" for name, value in switches.items() if value]
  return functools.partial(checks.main, [*words, *options])
