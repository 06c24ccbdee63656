"""The parts of the tour: chapters of scenes, and the output of a scene.

A chapter is a module with TITLE, OPENING and SCENES. Its functions take their layouts as
arguments with defaults, so that the tests can run them with other layouts and read the findings.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import resolve_sizes

DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Shown:
  """The output of a scene.

  Attributes:
    findings: sentences, each computed from the result.
    pictures: of `reports.drawings`.
    text: a table or a message, shown unchanged.
    measured_text: like text, with measurements on this machine.
    measured: like findings, with measurements on this machine. docs/tour.md omits both.
  """

  findings: list[str]
  pictures: list[Any] = dataclasses.field(default_factory=list)
  text: str = ""
  measured_text: str = ""
  measured: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Scene:
  """A function with its explanation and the display of its result.

  Attributes:
    title: its heading.
    code: the function that runs, and whose source is printed. Its docstring explains it.
    show: result of `code` -> Shown.
    parts: functions that the code calls and that are printed before it.
  """

  title: str
  code: Callable[[], Any]
  show: Callable[[Any], Shown]
  parts: tuple[Callable, ...] = ()

  def play(self) -> Shown:
    """Runs the code and returns what it shows."""
    return self.show(self.code())

  @property
  def about(self) -> str:
    """Returns the paragraphs of the docstring, each on one line."""
    paragraphs = inspect.getdoc(self.code).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)

  @property
  def source(self) -> str:
    """Returns the text of the functions that run, without their docstrings."""
    return "\n\n\n".join(_without_docstring(part) for part in (*self.parts, self.code))


def _without_docstring(function: Callable) -> str:
  text = textwrap.dedent(inspect.getsource(function))
  [definition] = ast.parse(text).body
  first = definition.body[0]
  lines = text.rstrip().splitlines()
  if ast.get_docstring(definition) is not None:
    del lines[first.lineno - 1 : first.end_lineno]
    if not lines[first.lineno - 1].strip():
      del lines[first.lineno - 1]
  return "\n".join(lines)


def mesh_of(**sizes: int) -> Mesh:
  """Returns the project's mesh, axis=size, over as many of the devices as it needs."""
  resolved = resolve_sizes(sizes, None)
  count = 1
  for size in resolved.values():
    count *= size
  return make_mesh(resolved, jax.devices()[:count])
