"""Extensions: a config file anywhere may register models, data sources, callbacks and more.

The tables that can be extended are dicts next to what they name: `models.MODELS`, ... A file
registers an entry under a new name:

  MODELS.register("vit", sys.modules[__name__])

docs/extending.md shows each.
"""

import importlib.util
import os
import pathlib
import sys
import sysconfig
import traceback
from types import ModuleType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(
  pathlib.Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")
)
_TABLES: list["Table"] = []
_LOADED: dict[pathlib.Path, None] = {}  # in the order of `load`


class Table(dict):
  """A registry, name -> value, with entries from files outside the project."""

  def __init__(self, what: str, ours: dict[str, Any], *, numerics: bool = True):
    """Takes the project's own entries.

    Args:
      what: the kind of entry, for messages: "model".
      ours: name -> value.
      numerics: whether an entry determines what a run computes: then the file that registers it is
        part of the code version in checkpoints.
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


def load(path: str | os.PathLike) -> ModuleType:
  """Executes a config file and returns its module; it can import modules from its folder.

  Its folder is last on the path, so that it cannot shadow the project's modules or a library's.
  While the file runs, `sys.modules[__name__]` is its module.

  Raises:
    ValueError: the folders of two config files have modules with the same name, of which Python
      would import only the first.
    Exception: what the file raises.
  """
  path = pathlib.Path(path).resolve()
  _require_one_module_of_each_name(path.parent)
  if str(path.parent) not in sys.path:
    sys.path.append(str(path.parent))
  name = f"config_of_{path.stem}"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  _LOADED[path] = None
  return module


def loaded() -> list[pathlib.Path]:
  """Returns the config files that `load` has executed, so that other processes load the same."""
  return [*_LOADED]


def registered(what: str, name: str) -> Any:
  """Returns what a config file has registered in a table; None where none has.

  Without an import of the table's module, which may be slow: whatever has registered has imported
  it.

  Args:
    what: the entries of the table are: "model".
    name: of the entry.
  """
  tables = (table for table in _TABLES if table.what == what and name in table.origins)
  return next((table[name] for table in tables), None)


def _require_one_module_of_each_name(folder: pathlib.Path) -> None:
  for other in {path.parent for path in _LOADED} - {folder}:
    for name in {module.__name__.partition(".")[0] for module in _modules(other)}:
      for rival in (folder / f"{name}.py", folder / name / "__init__.py"):
        if rival.exists():
          raise ValueError(
            f"{rival}: {other} has a module {name!r} too, and Python would import only one of "
            f"them; rename one"
          )


def _modules(folder: pathlib.Path) -> list[ModuleType]:
  """Returns the modules imported from a folder, except the project's and libraries'."""
  if any(folder.is_relative_to(library) for library in _LIBRARIES):
    return []
  found = []
  for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if not file or name.partition(".")[0] in ("__main__", "main"):
      continue
    path = pathlib.Path(file)
    ours = path.is_relative_to(ROOT) and (ROOT / name.partition(".")[0]).is_dir()
    library = any(path.is_relative_to(library) for library in _LIBRARIES)
    if path.is_relative_to(folder) and not ours and not library:
      found.append(module)
  return found


def files(*, numerics: bool = False) -> list[pathlib.Path]:
  """Returns the files that have registered something, and the modules from their folders.

  Args:
    numerics: only for entries that determine what a run computes.
  """
  found = {
    origin
    for table in _TABLES
    if table.numerics or not numerics
    for origin in table.origins.values()
  }
  configs = {*_LOADED}  # one that has registered nothing is not part of another's code
  for folder in {path.parent for path in found}:
    beside = {pathlib.Path(module.__file__).resolve() for module in _modules(folder)}
    found |= beside - configs
  return sorted(found)


def error_text(error: BaseException) -> str:
  """Returns `FILE:LINE: TypeError: its message` for an error of a user's file, in one line.

  The place is the innermost frame in a user's file, or else the innermost of all.
  """
  place = ""
  if isinstance(error, SyntaxError) and error.filename:
    place = f"{error.filename}:{error.lineno}: "
    error = type(error)(error.msg)
  else:
    frames = traceback.extract_tb(error.__traceback__)
    for frame in [one for one in frames if is_outside(one.filename)][-1:] or frames[-1:]:
      place = f"{frame.filename}:{frame.lineno}: "
  return place + " ".join(f"{type(error).__name__}: {error}".split())


def placed(error: Exception) -> Exception:
  """Returns an error with its place in a user's file, as `error_text`; itself where it has none."""
  frames = traceback.extract_tb(error.__traceback__)
  if not any(is_outside(frame.filename) for frame in frames):
    return error
  named = UserCodeError(error_text(error))
  named.__cause__ = error
  return named


class UserCodeError(ValueError):
  """A user's file has raised; the message names file and line."""


def is_outside(filename: str) -> bool:
  """Returns whether a file is a user's: neither the project's, nor a library's, nor Python's."""
  path = pathlib.Path(filename)
  parts = {*_LOADED, *(origin for table in _TABLES for origin in table.origins.values())}
  if path.resolve() in parts:
    return True
  within = any(path.is_relative_to(folder) for folder in (*_LIBRARIES, ROOT))
  return not within and not filename.startswith("<")
