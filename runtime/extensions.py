"""Extensions: a config file anywhere may register models, data sources, callbacks and more.

The tables that can be extended are dicts next to what they name: `models.MODELS`, ... A file
registers an entry under a new name:

  MODELS.register("vit", sys.modules[__name__])

docs/extending.md shows each.
"""

import ast
import functools
import importlib.util
import linecache
import os
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from etils.epy.lazy_imports_utils import LazyModule

ROOT = pathlib.Path(__file__).resolve().parents[1]


def library_folders(path: Iterable[str]) -> tuple[pathlib.Path, ...]:
  """Returns the folders of installed packages: Python's own, and of a path those with metadata.

  `pip install --target` and the modules of a cluster put packages into a folder of PYTHONPATH.

  Args:
    path: as `sys.path`.
  """
  own = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
  there = [one for one in path if any(pathlib.Path(one).glob("*.dist-info"))]
  return tuple(dict.fromkeys(pathlib.Path(one).resolve() for one in (*own, *there)))


_LIBRARIES = library_folders(filter(None, sys.path))
_TABLES: list["Table"] = []
_LOADED: dict[pathlib.Path, str | None] = {}  # path -> argument, in the order of `load`


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


def load(path: str | os.PathLike, argument: str | None = None) -> ModuleType:
  """Executes a config file and returns its module; it can import modules from its folder.

  Its folder is last on the path, so that it cannot shadow the project's modules or a library's.
  While the file runs, `sys.modules[__name__]` is its module.

  Args:
    path: of the file.
    argument: with which its `get_config` will be called; None: without.

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
  _LOADED[path] = argument
  return module


def loaded() -> list[pathlib.Path]:
  """Returns the config files that `load` has executed, so that other processes load the same."""
  return [*_LOADED]


def arguments() -> dict[str, str | None]:
  """Returns path -> argument of what `load` has executed; a file of the project is relative."""
  return {str(path).removeprefix(f"{ROOT}{os.sep}"): one for path, one in _LOADED.items()}


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


def registered_names(what: str) -> tuple[str, ...]:
  """Returns the names that config files have registered in a table, as `registered` finds it."""
  return tuple(name for table in _TABLES if table.what == what for name in table.origins)


def kind_of_model(name: str) -> str:
  """Returns the project's model that a model is: a registered one may extend the spec of one.

  Args:
    name: `model.name`.
  """
  return getattr(getattr(registered("model", name), "SPEC", None), "kind", "") or name


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
  """Returns the files that register or change something, and what they import from their user.

  A file that only sets keys of a config is not among them: the keys are compared.

  Args:
    numerics: only for what determines what a run computes.
  """
  registering = (table for table in _TABLES if table.numerics or not numerics)
  found = {origin for table in registering for origin in table.origins.values()}
  found |= {path for path in _imported(_LOADED) if changes_imported(source(path))}
  found |= {pathlib.Path(name).resolve() for name in _replaced()}
  configs = {*_LOADED}  # one that has registered nothing is not part of another's code
  for folder in {path.parent for path in found}:
    beside = {pathlib.Path(module.__file__).resolve() for module in _modules(folder)}
    found |= beside - configs
  return sorted(_imported(found))


def source(path: pathlib.Path) -> bytes:
  """Returns the source of a file, or of a cell of a notebook, which has no file."""
  if path.exists():
    return path.read_bytes()
  return "".join(linecache.getlines(str(path))).encode()


def libraries(paths: Iterable[pathlib.Path]) -> set[str]:
  """Returns the installed top-level packages that files import, but for Python's own."""
  imported = {name.partition(".")[0] for path in paths for name in _imports(source(path))}
  there = {*sys.builtin_module_names, *sys.stdlib_module_names}
  ours = {name for name in imported if _is_ours(name)}
  return {name for name in imported - there - ours if name and not _find(name, ROOT)}


def _imported(paths: Iterable[pathlib.Path]) -> set[pathlib.Path]:
  """Returns files and all of a user's that they import, also inside of functions."""
  found, left = set(), [*paths]
  while left:
    path = left.pop()
    if path not in found:
      found.add(path)
      left += [file for name in _imports(source(path)) if (file := _find(name, path.parent))]
  return found


def _imports(text: bytes) -> set[str]:
  """Returns the dotted names of the modules that a source may import; relative ones as beside."""
  found = set()
  for node in ast.walk(_parsed(text)):
    names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
    if isinstance(node, ast.ImportFrom):
      module = node.module or ""
      names = [module, *(f"{module}.{name}".lstrip(".") for name in names)]
    for name in names:
      parts = name.split(".")
      found |= {".".join(parts[: end + 1]) for end in range(len(parts))}
  return found - {""}


def _find(name: str, folder: pathlib.Path) -> pathlib.Path | None:
  """Returns a user's file of a module, which need not be imported yet; None for other modules."""
  if _is_ours(name):
    return None
  file = getattr(sys.modules.get(name), "__file__", None)
  places = [file] if file else []
  for place in () if file else (folder, *filter(None, sys.path)):
    base = pathlib.Path(place).joinpath(*name.split("."))
    places += [base.with_suffix(".py"), base / "__init__.py"]
  for path in map(pathlib.Path, places):
    if path.suffix == ".py" and path.is_file():
      library = any(path.resolve().is_relative_to(one) for one in _LIBRARIES)
      return None if library else path.resolve()
  return None


def _is_ours(name: str) -> bool:
  """Returns whether a module is one of the project's packages or main.py."""
  top = name.partition(".")[0]
  return (ROOT / top).is_dir() or (ROOT / f"{top}.py").exists()


def changes_imported(text: bytes) -> bool:
  """Returns whether a source changes what it imports: `layers.MLPS["feedforward"] = MyMLP`.

  That is an assignment to a part of it; or, where it does more than define, a call for its effect,
  such as `jax.config.update(...)` or `setattr(block, ...)`. To register is no change.
  """
  tree = _parsed(text)
  imported = {
    (alias.asname or alias.name).partition(".")[0]
    for node in ast.walk(tree)
    if isinstance(node, ast.Import | ast.ImportFrom)
    for alias in node.names
  }
  for node in ast.walk(tree):  # other names for it
    if isinstance(node, ast.Assign) and _root(node.value) in imported:
      imported |= {target.id for target in node.targets if isinstance(target, ast.Name)}
  for node in ast.walk(tree):
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    for target in targets if isinstance(node, ast.stmt) else ():
      for part in ast.walk(target) if target else ():
        is_part = isinstance(part, ast.Attribute | ast.Subscript)
        if is_part and not isinstance(part.ctx, ast.Load) and _root(part) in imported:
          return True
  return any(_has_effect(call, imported) for call in _calls_at_start(tree))


def _calls_at_start(tree: ast.AST) -> Iterator[ast.Call]:
  """Yields the calls that are statements of a module or of its `get_config`."""
  for node in ast.iter_child_nodes(tree):
    defines = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
      yield node.value
    elif not defines or getattr(node, "name", "") == "get_config":
      yield from _calls_at_start(node)


# Methods of dicts and lists that change these.
_CHANGING = ("update", "setdefault", "pop", "clear", "append", "extend", "insert", "remove")


def _has_effect(call: ast.Call, imported: set[str]) -> bool:
  """Returns whether a call may change something that is imported, not what it is given."""
  function, attribute = _root(call.func), getattr(call.func, "attr", "")
  if function in ("print", "logging", "warnings", "sys") or attribute == "register":
    return False
  if attribute in _CHANGING and function in imported:
    return True
  given = {_root(one) for one in (*call.args, *(keyword.value for keyword in call.keywords))}
  if given & imported:
    return function in imported or not attribute  # not config.update(SIZES)
  return function in imported and given <= {None}  # or it changes what it is given


def _root(node: ast.AST) -> str | None:
  """Returns `a` of `a.b[c].d`; None of other expressions."""
  while isinstance(node, ast.Attribute | ast.Subscript):
    node = node.value
  return node.id if isinstance(node, ast.Name) else None


@functools.cache
def _parsed(text: bytes) -> ast.AST:
  try:
    return ast.parse(text)
  except (SyntaxError, ValueError):  # it has changed since Python has read it
    return ast.Module([], [])


def _replaced() -> set[str]:
  """Returns the files of a user whose functions stand in place of the project's own."""
  found = set()
  for table in (table for table in _TABLES if table.numerics):
    ours = (table[name] for name in table.keys() - table.origins.keys())
    # Of a module that is imported later, any attribute would import it.
    found.update(_file_of(one) for one in ours if isinstance(one, type | FunctionType))
  for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None) or ""
    if not (file.startswith(f"{ROOT}{os.sep}") and _is_ours(name)):
      continue
    for value in list(vars(module).values()):
      parts = [value]
      if isinstance(value, type):
        parts = [*vars(value).values()] if value.__module__ == name else [value]
      found.update(map(_file_of, parts))
  return {file for file in found if file and _is_users(file)}


def _file_of(value: Any) -> str | None:
  """Returns the file that defines a class, function, property, method or partial."""
  if isinstance(value, type):
    return getattr(sys.modules.get(value.__module__), "__file__", None)
  if isinstance(value, ModuleType | LazyModule):  # of the latter, any attribute would import it
    return None
  for inner in ("__func__", "fget", "func", "__wrapped__"):
    value = getattr(value, inner, value)
  return getattr(getattr(value, "__code__", None), "co_filename", None)


def _is_users(file: str) -> bool:
  """Returns whether code is of a file or a cell of a notebook outside of project and libraries."""
  if file.startswith("<"):
    return file.startswith("<ipython-input")
  return _is_elsewhere(file, (*_LIBRARIES, ROOT))


@functools.cache
def _is_elsewhere(file: str, folders: tuple[pathlib.Path, ...]) -> bool:
  """Returns whether a file is in none of some folders; asked of each function of the project."""
  path = pathlib.Path(file).resolve()
  return not any(path.is_relative_to(folder) for folder in folders)


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
  parts = {*_LOADED, *(origin for table in _TABLES for origin in table.origins.values())}
  return pathlib.Path(filename).resolve() in parts or _is_users(filename)
