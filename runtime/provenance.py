"""Provenance of a checkpoint besides its config: a digest of the code and the library versions."""

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import sys
from collections.abc import Iterable
from typing import Any

from runtime import extensions, files

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What determines the numbers of a run: its parameters, its batches, its steps. A folder counts with
# everything below it. A change in one of these needs --accept-changes=versions.code to resume,
# except of comments and docstrings; one anywhere else (pages, messages, saving) does not.
NUMERICS = (
  "models",
  "input_pipeline",  # rows and their order
  "partitioning/constraints.py",
  "partitioning/dtypes.py",
  "partitioning/parallel",
  "partitioning/mesh.py",  # the order of devices is the order of sums
  "partitioning/torus.py",  # likewise
  "partitioning/rules.py",
  "partitioning/verdict.py",  # placement
  "training/reference.py",  # of preferences
  "runtime/layer_kinds.py",  # which layers have experts
  "training/setup.py",  # precision
  "training/splits.py",  # seeds and splits
  "training/teacher_rows.py",
  "training/averages.py",
  "training/elastic.py",  # the order of sums
  "training/gradients.py",  # the order of sums
  "training/microbatches.py",  # likewise
  "training/optimizer.py",
  "training/optimizers",
  "training/outer.py",
  "training/rewards.py",
  "training/verifiers.py",
  "inference/grpo.py",  # what rewards make of answers
  "training/schedules.py",
  "training/bad_steps.py",  # which rows are skipped
  "training/state.py",
  "training/step.py",
  "training/specs.py",
  "training/tasks.py",  # the arrays of a batch
)
# Folders of which some files determine numbers. A test requires each of their files to be either
# above or in its own list of those that do not.
PACKAGES = ("input_pipeline", "models", "partitioning", "training")
_MOST_PROGRAMS = 4096  # whose digests are kept; a run has some hundred
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
# Everything that a run may import; the processes of one run must agree on it.
RUN = (
  *PACKAGES,
  "commands",
  "configs",
  "inference",
  "interop",
  "processes",
  "reports",
  "runtime",
  "main.py",
)


def source_files(names: Iterable[str]) -> list[pathlib.Path]:
  """Returns the Python files and templates of files and folders, relative, in a fixed order.

  Raises:
    FileNotFoundError: there is no such file or folder.
  """
  found = set()
  for name in names:
    path = ROOT / name
    if not path.exists():
      raise FileNotFoundError(f"{path}: listed as code of a run, and not there")
    files = path.rglob("*") if path.is_dir() else [path]
    found.update(file for file in files if file.suffix in (".py", ".j2"))
  return sorted(path.relative_to(ROOT) for path in found)


def digests(
  names: Iterable[str], more: Iterable[pathlib.Path] = (), *, comments: bool = False
) -> dict[str, str]:
  """Returns name -> digest of source files.

  Args:
    names: files and folders of the project.
    more: files of extensions; of their names, the last part counts, since a folder may move.
    comments: whether comments, docstrings and formatting count, which is faster.
  """
  found: dict[str, list[bytes]] = {}
  named = [(path.as_posix(), ROOT / path) for path in source_files(names)]
  for name, path in named + sorted((path.name, path) for path in more):
    content = extensions.source(path)
    content = content if comments or path.suffix != ".py" else _PROGRAMS.digest(content)
    found.setdefault(name, []).append(hashlib.sha256(content).digest())
  _PROGRAMS.save()
  return {name: _hex(b"".join(sorted(parts))) for name, parts in found.items()}


def digest(
  names: Iterable[str], more: Iterable[pathlib.Path] = (), *, comments: bool = False
) -> str:
  """Returns one digest of all files of `digests`, which has the arguments."""
  found = digests(names, more, comments=comments)
  return _hex("\n".join(f"{name} {one}" for name, one in sorted(found.items())).encode())


def _hex(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:16]


def program(source: bytes) -> bytes:
  """Returns a digest of what Python executes: without comments, docstrings and formatting.

  It is the same under every version of Python that parses the source alike, unlike `ast.dump`. A
  source that uses docstrings keeps them; one that Python cannot parse counts as it is.
  """
  try:
    tree = ast.parse(source)
  except (SyntaxError, ValueError):
    return source
  parts: list[str] = []
  _write(tree, parts, docstrings=b"__doc__" in source)
  return hashlib.sha256("".join(parts).encode()).digest()


def _write(node: Any, parts: list[str], *, docstrings: bool) -> None:
  """Appends the text of a node of a syntax tree without what Python's versions add as empty."""
  if isinstance(node, ast.AST):
    parts.append(f"{type(node).__name__}(")
    constant = isinstance(node, ast.Constant)
    for name in ("value",) if constant else node._fields:
      value = getattr(node, name, None)
      if constant or (value is not None and value != []):
        parts.append(f"{name}=")
        _write(value, parts, docstrings=docstrings)
    parts.append(")")
  elif isinstance(node, list):
    parts.append("[")
    for one in node:
      if docstrings or not _is_text(one):
        _write(one, parts, docstrings=docstrings)
    parts.append("]")
  else:
    parts.append(f"{node!a},")  # `repr` shows what this version's Unicode tables know


def _is_text(node: Any) -> bool:
  """Returns whether a statement is a string alone: a docstring, or one of an attribute."""
  is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
  return is_constant and isinstance(node.value.value, str)


class _Programs:
  """The digests of `program`, kept beside Python's bytecode: computing them takes 0.6 s a start.

  A digest is found by the bytes of the source and of this file, so that it is never out of date.
  Where Python writes no bytecode, nothing is written either.
  """

  def __init__(self):
    """Reads nothing yet."""
    bytecode = pathlib.Path(importlib.util.cache_from_source(__file__))
    self._path = bytecode.with_name(f"programs.{sys.implementation.cache_tag}.json")
    self._own = pathlib.Path(__file__).read_bytes()
    self._known: dict[str, str] | None = None  # digest of a source -> hexadecimal of `program`
    self._read = 0  # how many of them were in the file

  def digest(self, source: bytes) -> bytes:
    """Returns what `program` returns."""
    if self._known is None:
      self._known = {}
      with contextlib.suppress(OSError, ValueError, TypeError):  # there is none yet, or damaged
        self._known = dict(files.read_json(self._path))
      self._read = len(self._known)
    key = hashlib.sha256(self._own + source).hexdigest()
    if key not in self._known:
      self._known[key] = program(source).hex()
    return bytes.fromhex(self._known[key])

  def save(self) -> None:
    """Writes what is new; a folder that cannot be written to is left as it is."""
    if self._known and len(self._known) > self._read and not sys.dont_write_bytecode:
      self._read = len(self._known)
      newest = dict([*self._known.items()][-_MOST_PROGRAMS:])
      with contextlib.suppress(OSError):
        self._path.parent.mkdir(exist_ok=True)
        files.replace(self._path, json.dumps(newest), shared=True)


_PROGRAMS = _Programs()


def versions() -> dict[str, str]:
  """Returns name -> version of what computes a run's numbers; for `code`, a digest.

  Libraries that a user's files import count besides the project's own.
  """
  return dict(_versions(tuple(extensions.files(numerics=True))))


def code_files() -> dict[str, str]:
  """Returns name -> digest of the files of which `versions` has one digest."""
  return digests(NUMERICS, extensions.files(numerics=True))


@functools.cache
def _versions(more: tuple[pathlib.Path, ...]) -> dict[str, str]:
  known = {_normal(name) for name in _requirements()}
  packages = importlib.metadata.packages_distributions() if more else {}
  theirs = {name for top in extensions.libraries(more) for name in packages.get(top, ())}
  names = [*LIBRARIES, *sorted(name for name in theirs if _normal(name) not in known)]
  found = {name: importlib.metadata.version(name) for name in names}
  return {"code": digest(NUMERICS, more), "python": platform.python_version(), **found}


def _normal(name: str) -> str:
  return name.lower().replace("_", "-")


def _requirements() -> list[str]:
  lines = (ROOT / "requirements.txt").read_text().splitlines()
  return sorted({line.partition("==")[0] for line in lines if "==" in line})


def everything() -> dict[str, Any]:
  """Returns the digest of all code that a run may reach, and the version of every library.

  More than `versions`, and not kept in checkpoints: what the processes of one run must share.
  Each file of an extension has a digest of its own, so that a message names the one that differs.
  A library that is not installed here has the version "missing".
  """
  return dict(_everything(tuple(extensions.files())))


@functools.cache
def _everything(more: tuple[pathlib.Path, ...]) -> dict[str, Any]:
  found: dict[str, Any] = {f"versions.{name}": _version(name) for name in _requirements()}
  for path in more:
    found.setdefault(f"code of {path.name}", []).append(digest((), [path], comments=True))
  return {"code": digest(RUN, comments=True), "versions.python": platform.python_version(), **found}


def _version(name: str) -> str:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return "missing"
