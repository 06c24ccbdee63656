"""The parts of the tour: chapters of scenes, and what a scene draws and says.

A chapter is a module with TITLE, OPENING and SCENES. A scene is a function: it runs, draws arrays,
and says what it has found in them; its source is shown above that.
"""

import ast
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from partitioning import rules
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import product_text, resolve_sizes
from reports import drawings
from runtime import collectives

DEVICES = 8
ROUNDING = 1e-6  # float32 sums of a few hundred terms, in another order


@dataclasses.dataclass(frozen=True)
class Shown:
  """The output of a scene.

  Attributes:
    findings: sentences.
    pictures: of `reports.drawings`.
    text: tables or messages, shown unchanged.
    measured: sentences with measurements on this machine, which docs/tour.md omits.
  """

  findings: list[str] = dataclasses.field(default_factory=list)
  pictures: list[Any] = dataclasses.field(default_factory=list)
  text: list[str] = dataclasses.field(default_factory=list)
  measured: list[str] = dataclasses.field(default_factory=list)

  def markdown(self, measured: Sequence[str]) -> str:
    """Returns what stands below the pictures; `measured` are the findings that come last."""
    blocks = ["```\n" + "\n\n".join(self.text) + "\n```"] if self.text else []
    findings = [wrapped(f"- {one}", indent="  ") for one in (*self.findings, *measured)]
    return "\n\n".join([*blocks, "Notice:", "\n".join(findings)])


@dataclasses.dataclass(frozen=True)
class Scene:
  """A function of the tour.

  Attributes:
    title: its heading.
    code: the function whose source is printed. Its docstring explains it.
    parts: functions that are printed before it.
    run: what runs; by default the code, without arguments.
  """

  title: str
  code: Callable
  parts: tuple[Callable, ...] = ()
  run: Callable[[], Any] | None = None

  def play(self) -> Shown:
    """Runs it, and returns what it has drawn and said."""
    _playing.append(Shown())
    (self.run or self.code)()
    return _playing.pop()

  @property
  def markdown(self) -> str:
    """Returns what stands above the pictures: what the docstring says, and the code."""
    paragraphs = inspect.getdoc(self.code).split("\n\n")
    about = "\n\n".join(wrapped(" ".join(one.split())) for one in paragraphs)
    return f"{about}\n\n```python\n{self.source}\n```"

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


def wrapped(paragraph: str, indent: str = "") -> str:
  """Returns a paragraph in lines as long as this project's; no word is broken."""
  whole = {"break_on_hyphens": False, "break_long_words": False}
  return "\n".join(textwrap.wrap(paragraph, 100, subsequent_indent=indent, **whole))


# ------------------------------ what the function of a scene calls ------------------------------

_playing: list[Shown] = []


def say(sentence: str) -> None:
  """Says what was found."""
  _playing[-1].findings.append(sentence)


def say_measured(sentence: str) -> None:
  """Says what was measured on this machine."""
  _playing[-1].measured.append(sentence)


def show(text: str) -> None:
  """Shows a table or a message unchanged."""
  _playing[-1].text.append(text)


def draw(x: jax.Array, title: str = "", dims: Sequence[str] = ("row", "column")) -> None:
  """Draws which devices have each block of an array; titled by its spec and mesh by default."""
  title = title or f"{spec(x)} on {mesh_text(x)}"
  _playing[-1].pictures.append(drawings.picture(x.shape, x.sharding, title=title, dims=dims))


def draw_held(title: str, mesh: Mesh, texts: Mapping[int, str]) -> None:
  """Draws what each device has: device id -> text."""
  _playing[-1].pictures.append(drawings.holdings(title, mesh, texts))


def mesh_of(**sizes: int) -> Mesh:
  """Returns the project's mesh, axis=size, over as many of the devices as it needs."""
  resolved = resolve_sizes(sizes, None)
  return make_mesh(resolved, jax.devices()[: math.prod(resolved.values())])


def sent(compiled: jax.stages.Compiled, mesh: Mesh) -> list[collectives.Row]:
  """Returns the collectives of one run of a compiled program."""
  return collectives.summarize(collectives.collectives(compiled.as_text(), mesh))


def sent_text(compiled: jax.stages.Compiled, mesh: Mesh) -> str:
  """Returns `nothing`, or `1 all-reduce along tensor (512 Bytes a device)`."""
  parts = [
    f"{row.count} {row.kind} along {'+'.join(row.axes)} ({rules.size_text(row.bytes)} a device)"
    for row in sent(compiled, mesh)
  ]
  return " and ".join(parts) or "nothing"


def spec(x: jax.Array) -> str:
  """Returns the spec of an array, `(data, tensor)`."""
  return rules.spec_text(x.sharding.spec, x.ndim)


def mesh_text(x: jax.Array) -> str:
  """Returns the mesh of an array, `data=4 x tensor=2`."""
  return product_text(x.sharding.mesh.shape)


def shard(x: jax.Array) -> tuple[int, ...]:
  """Returns the shape of one device's shard."""
  return x.sharding.shard_shape(x.shape)


def blocks(x: jax.Array) -> str:
  """Returns `8 blocks of [4, 4], each on one device`."""
  found = drawings.blocks(x.shape, x.sharding)
  [copies] = {len(ids) for ids in found.values()}
  where = "one device" if copies == 1 else f"{copies} devices"
  shape = rules.shape_text(shard(x))
  if len(found) == 1:
    return f"one block of {shape}, on {where}"
  return f"{len(found)} blocks of {shape}, each on {where}"


def same(ours, theirs) -> str:
  """Returns `the same, to the last bit`; raises AssertionError of arrays that are not.

  For numbers that are moved, or summed without rounding: every machine gets these bits.
  """
  np.testing.assert_array_equal(ours, theirs, strict=True)
  return "the same, to the last bit"


def close(ours, theirs) -> str:
  """Returns `the same, to rounding`; raises AssertionError of arrays that are not."""
  ours, theirs = (np.asarray(x) for x in (ours, theirs))
  assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDING * np.abs(theirs).max())
  return "the same, to rounding"


def numbers(values, places: int = 0) -> str:
  """Returns the values of an array on one line, rows parted by `|`."""
  values = np.asarray(values)
  if values.ndim > 1:
    return " | ".join(numbers(row, places) for row in values)
  return " ".join(f"{value:.{places}f}" for value in values.reshape(-1))


def held(x: jax.Array, places: int = 0) -> dict[int, str]:
  """Returns device id -> the numbers of its shard."""
  return {shard.device.id: numbers(shard.data, places) for shard in x.addressable_shards}


def held_text(x: jax.Array) -> str:
  """Returns `64 Bytes`, the size of one device's shard."""
  return rules.size_text(math.prod(shard(x)) * x.dtype.itemsize)
