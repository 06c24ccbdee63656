"""Extensions: a config file anywhere may register models, data sources, callbacks and more.

The tables that can be extended are dicts, each beside what it names: `models.MODELS`, ... A file
registers under a name of its own:

  MODELS.register("vit", sys.modules[__name__])
"""

import importlib.util
import os
import pathlib
import sys
from types import ModuleType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
_TABLES: list["Table"] = []


class Table(dict):
  """Name -> what it stands for, some of it from files outside of the project."""

  def __init__(self, what: str, ours: dict[str, Any], *, numerics: bool = True):
    """Takes the project's own entries.

    Args:
      what: the entries are, for messages: "model".
      ours: name -> value.
      numerics: whether an entry decides what a run computes: then the file that registers it
        belongs to the code that a checkpoint records.
    """
    super().__init__(ours)
    self.what, self.numerics = what, numerics
    self.origins: dict[str, pathlib.Path] = {}  # of the names that were registered
    _TABLES.append(self)

  def register(self, name: str, value: Any) -> Any:
    """Adds an entry and returns it; called by the file that makes it.

    Raises:
      ValueError: the name is taken, by the project or by another file. The same file may be
        executed again: then its entry is replaced.
    """
    origin = pathlib.Path(sys._getframe(1).f_code.co_filename).resolve()
    taken = self.origins.get(name)
    if name in self and taken != origin:
      by = f"by {taken}" if taken else "by the project"
      raise ValueError(f"{origin}: the {self.what} {name!r} is already registered {by}; rename it")
    self[name], self.origins[name] = value, origin
    return value


def load(path: str) -> ModuleType:
  """Executes a config file and returns its module; modules beside it can be imported by it.

  They are found last, so that none takes the place of the project's or a library's. While the file
  runs, `sys.modules[__name__]` is its module.
  """
  folder = os.path.dirname(os.path.abspath(path))
  if folder not in sys.path:
    sys.path.append(folder)
  name = f"config_of_{pathlib.Path(path).stem}"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


def files(*, numerics: bool = False) -> list[pathlib.Path]:
  """Returns the files that have registered something, and what they imported from their folders.

  Args:
    numerics: only of entries that decide what a run computes.
  """
  found = {
    origin
    for table in _TABLES
    if table.numerics or not numerics
    for origin in table.origins.values()
  }
  folders = {path.parent for path in found} - {ROOT}
  for module in list(sys.modules.values()):
    path = pathlib.Path(getattr(module, "__file__", None) or os.devnull)
    if path.parent in folders:
      found.add(path)
  return sorted(found)
