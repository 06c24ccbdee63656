"""The layout as one HTML page: drawings, bytes, rules, and what each mesh axis costs.

The page needs nothing else: style and drawings stand in it. It follows the reader's light or dark
setting, and prints in black and white with everything unfolded.
"""

import dataclasses
import html as markup
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jax.sharding import NamedSharding

from analysis import collectives
from partitioning import shardings
from partitioning.constraints import Constraint
from partitioning.mesh import mesh_text
from partitioning.rules import Placement
from reports import drawings as pictures
from reports.html import HEAD, TAIL
from training.setup import Job

FIGURE_WIDTH = 720  # pixels that a drawing may take: enough for 8 columns without a gap


@dataclasses.dataclass(frozen=True)
class Side:
  """One of the layouts that the page shows.

  Attributes:
    title: such as `dp4_tp2_lm`.
    job: a prepared job.
    costs: the collectives of its compiled train step.
    kind: of its devices; "": as they say themselves.
  """

  title: str
  job: Job
  costs: Sequence[collectives.Row]
  kind: str = ""

  @property
  def sizes(self) -> Mapping[str, int]:
    """Returns mesh axis -> size."""
    return self.job.devices.sizes

  def dims(self, letters: str) -> tuple[str, ...]:
    """Returns `("D model", "F feedforward")`."""
    return tuple(f"{letter} {self.job.legend[letter].name}" for letter in letters)

  def drawing(self, array: Placement | Constraint, title: str = "") -> str:
    """Returns how an array lies, as SVG."""
    lies = NamedSharding(self.job.mesh, array.spec)
    dims = self.dims(array.letters)
    return _svg(pictures.picture(array.shape, lies, title=title, dims=dims))


def html(
  job: Job, against: Job | None = None, *, titles: tuple[str, str] = ("this layout", "the other")
) -> str:
  """Returns the page; compiles the train step of each job for its collectives.

  Args:
    job: a prepared job.
    against: another one, to be shown beside it; what differs is marked.
    titles: of the two.
  """
  jobs = [job] if against is None else [job, against]
  sides = [Side(title, one, _costs(one)) for title, one in zip(titles, jobs, strict=False)]
  page = Page(sides)
  name = " against ".join(side.title for side in sides)
  parts = [
    HEAD.replace("TITLE", markup.escape(f"Layout: {name}")),
    f"<h1>Layout: {markup.escape(name)}</h1>",
    meshes(sides),
    "<h2>What a device holds</h2>",
    _totals(sides),
    "<h2>What each mesh axis costs</h2>",
    _all_costs(sides),
    "<h2>Parameters</h2>",
    legend(sides),
    page.section("parameters"),
    "<h2>Batch</h2>",
    page.section("batch"),
    "<h2>Optimizer state</h2>",
    page.section("optimizer", folded=True),
    "<h2>Activations</h2>",
    *(_activations(side, several=len(sides) > 1) for side in sides),
    TAIL,
  ]
  return "\n".join(parts)


# ------------------------------ arrays ------------------------------


class Page:
  """The sections of arrays; arrays that lie alike share one numbered drawing."""

  def __init__(self, sides: Sequence[Side]):
    """Starts without drawings."""
    self._sides = sides
    self._numbers: dict[tuple, int] = {}

  def section(self, title: str, *, folded: bool = False) -> str:
    """Returns the arrays of `parameters`, `optimizer` or `batch`, grouped by module."""
    sections = [side.job.placements[title] for side in self._sides]
    names = list(dict.fromkeys(name for section in sections for name in section))
    groups: dict[str, list[str]] = {}
    for name in names:
      groups.setdefault(_group(name), []).append(name)
    return "\n".join(
      self._module(group, {n: [s.get(n) for s in sections] for n in names}, folded)
      for group, names in groups.items()
    )

  def _module(self, group: str, arrays: Mapping[str, list[Placement | None]], folded: bool) -> str:
    """Returns one module: its table, then the drawings that no module before it has shown."""
    rows, fresh = [], {}
    for name, pair in arrays.items():
      key = tuple(p and (p.shape, p.letters, str(p.spec)) for p in pair)
      if key not in self._numbers:
        self._numbers[key] = len(self._numbers) + 1
        fresh[key] = []
      if key in fresh:
        fresh[key].append((name, pair))
      rows.append(self._row(name, pair, self._numbers[key]))
    sums = [
      sum(shardings.bytes_per_device(pair[i], side.sizes) for pair in arrays.values() if pair[i])
      for i, side in enumerate(self._sides)
    ]
    heads = ["array", "dims", "shape", "type", *([""] if len(self._sides) > 1 else [])]
    heads += ["spec", "shard", "bytes/device", "copies", "drawing", "rule"]
    figures = "".join(self._figure(self._numbers[key], members) for key, members in fresh.items())
    count = f"{len(arrays)} array{'s' if len(arrays) > 1 else ''}"
    weights = " | ".join(f"{shardings.size_text(size)} per device" for size in sums)
    return (
      f"<details{'' if folded else ' open'}><summary><b>{markup.escape(group)}</b> "
      f"<small>{count}, {weights}</small></summary>"
      f'<div class="module">{table(heads, rows)}<div class="figures">{figures}</div></div>'
      "</details>"
    )

  def _row(self, name: str, pair: Sequence[Placement | None], number: int) -> tuple[str, list[str]]:
    """Returns (class, cells) of one array."""
    known = [p for p in pair if p]
    lies = [
      _lies(p, side.sizes) if p else ["not there", "", "", ""]
      for p, side in zip(pair, self._sides, strict=True)
    ]
    differs = len(lies) > 1 and lies[0] != lies[1]
    if len(lies) > 1:
      lies = [[side.title, *lie] for side, lie in zip(self._sides, lies, strict=True)]
    letters = known[0].letters
    words = " ".join(self._sides[0 if pair[0] else 1].dims(letters))
    notes = [f"note: {note}" for p in known for note in p.notes]
    cells = [
      f"{'≠ ' if differs else ''}{_lines([name])}",
      f'<span title="{markup.escape(words)}">{markup.escape(letters or "-")}</span>',
      _lines(shardings.shape_text(p.shape) for p in known),
      _lines(str(np.dtype(p.dtype)) for p in known),
      # A line per side, also where both are the same.
      *("<br>".join(map(markup.escape, texts)) for texts in zip(*lies, strict=True)),
      f'<a href="#drawing-{number}">{number}</a>',
      _lines([*(p.rule for p in known), *notes]),
    ]
    return "differs" if differs else "", cells

  def _figure(self, number: int, members: Sequence[tuple[str, list[Placement | None]]]) -> str:
    """Returns the drawing of arrays that lie alike, on each side."""
    names = ", ".join(markup.escape(name) for name, _ in members)
    drawn = [
      side.drawing(p) if p else "<p>not there</p>"
      for p, side in zip(members[0][1], self._sides, strict=True)
    ]
    titles = [f"<h4>{markup.escape(side.title)}</h4>" for side in self._sides]
    if len(drawn) == 1:
      titles = [""]
    elif drawn[0] == drawn[1]:
      drawn, titles = drawn[:1], ["<h4>both</h4>"]
    drawings = [f"<div>{title}{one}</div>" for title, one in zip(titles, drawn, strict=True)]
    return (
      f'<figure id="drawing-{number}"><figcaption><b>{number}</b> {names}</figcaption>'
      f'<div class="pair">{"".join(drawings)}</div></figure>'
    )


def _group(name: str) -> str:
  """Returns the module of an array: `layers/mlp` of `optimizer/0/mu/layers/mlp/up/kernel`."""
  words = name.split("/")[:-1]
  if words[:1] == ["optimizer"]:
    return "/".join(words[:3])
  return "/".join(words[:2]) or name


def _lies(placement: Placement, sizes: Mapping[str, int]) -> list[str]:
  """Returns spec, shard, bytes per device, copies."""
  return [
    shardings.spec_text(placement.spec, len(placement.shape)),
    shardings.shape_text(shardings.shard_shape(placement.shape, placement.spec, sizes)),
    shardings.size_text(shardings.bytes_per_device(placement, sizes)),
    str(shardings.copies(placement, sizes)),
  ]


def _lines(texts: Iterable[str]) -> str:
  """Returns a line per text, each text once; names may be broken after a slash."""
  lines = (markup.escape(text).replace("/", "/<wbr>") for text in dict.fromkeys(texts))
  return "<br>".join(lines)


def _activations(side: Side, *, several: bool) -> str:
  rows, figures = [], []
  for c in side.job.activations.seen:
    dims = ", ".join(side.dims(c.letters))
    cells = [
      c.letters,
      dims,
      shardings.shape_text(c.shape),
      shardings.spec_text(c.spec, len(c.shape)),
    ]
    rows.append(("", [markup.escape(cell) for cell in [*cells, "; ".join(c.notes)]]))
    figures.append(f"<figure>{side.drawing(c, c.letters)}</figure>")
  title = f"{side.title}: " if several else ""
  return (
    f"<details><summary>{markup.escape(title)}<b>{len(rows)} layouts</b> "
    "<small>in the order of the forward pass</small></summary>"
    + table(["letters", "dims", "shape", "spec", "note"], rows)
    + f'<div class="figures">{"".join(figures)}</div></details>'
  )


# ------------------------------ mesh, sums, costs ------------------------------


def meshes(sides: Sequence[Side]) -> str:
  """Returns a drawing of each side's mesh."""
  figures = []
  for side in sides:
    device = side.job.mesh.devices.flat[0]
    kind = "simulated CPU devices" if side.job.devices.simulated else device.device_kind
    kind = side.kind or kind
    caption = f"{mesh_text(side.sizes, side.job.devices.slices)}, {side.job.mesh.size} {kind}"
    if len(sides) > 1:
      caption = f"{side.title}: {caption}"
    numbers = {device.id: "" for device in side.job.mesh.devices.flat}
    drawn = _svg(pictures.holdings("", side.job.mesh, numbers))
    text = f"<figcaption><b>Mesh</b> {markup.escape(caption)}</figcaption>"
    figures.append(f"<figure>{text}{drawn}</figure>")
  return f'<div class="figures">{"".join(figures)}</div>'


def _totals(sides: Sequence[Side]) -> str:
  """Returns the table of sums: elements, bytes per device, bytes that every device holds."""
  rows = []
  for i, side in enumerate(sides):
    sections = {title: list(ps.values()) for title, ps in side.job.placements.items()}
    held = [*sections["parameters"], *sections["optimizer"]]
    count = sum(math.prod(p.shape) for p in sections["parameters"])
    sums = [
      *(sum(shardings.bytes_per_device(p, side.sizes) for p in ps) for ps in sections.values()),
      sum(shardings.bytes_per_device(p, side.sizes) for p in held),
      shardings.replicated_bytes(held, side.sizes),
    ]
    texts = [f"{count:,}", *map(shardings.size_text, sums)]
    if i and texts != rows[0][1][1:]:
      texts = [
        f"≠ {text}" if text != other else text
        for text, other in zip(texts, rows[0][1][1:], strict=True)
      ]
    rows.append(("", [markup.escape(text) for text in (side.title, *texts)]))
  titles = [f"{title}/device" for title in sides[0].job.placements]
  heads = ["", "parameters", *titles, "parameters + optimizer/device", "of it on every device"]
  return table(heads, rows)


def _costs(job: Job) -> list[collectives.Row]:
  """Compiles the train step and returns its collectives."""
  text = job.compile_train_step().function.as_text()
  return collectives.summarize(collectives.collectives(text, job.mesh))


def _all_costs(sides: Sequence[Side]) -> str:
  """Returns the collectives of one train step, on each side."""
  platform = sides[0].job.devices.platform
  tables = "".join(f"<div>{_costs_table(side, sides)}</div>" for side in sides)
  return (
    f"<p><small>One train step, as compiled for {platform}; bytes are the payload per device. "
    "Where the program does not tell how often a collective runs, runs is ? and its bytes count "
    f'once.</small></p><div class="pair">{tables}</div>'
  )


def _costs_table(side: Side, sides: Sequence[Side]) -> str:
  """Returns one side's collectives, grouped by the axes that they run along."""
  by_axes: dict[tuple[str, ...], list[collectives.Row]] = {}
  for row in side.costs:
    by_axes.setdefault(row.axes, []).append(row)
  most = max(1, *(sum(row.bytes for row in one.costs) for one in sides))
  lines = []
  for axes, found in by_axes.items():
    name = " + ".join(f"{axis}={side.sizes[axis]}" for axis in axes)
    size = sum(row.bytes for row in found)
    bar = f'<i class="bar" style="width:{max(1, 200 * size // most)}px"></i>'
    lines.append(("sum", [markup.escape(name), "sum", "", "", shardings.size_text(size), bar]))
    for row in found:
      each = shardings.size_text(row.bytes / (row.count or 1))
      runs = "?" if row.count is None else str(row.count)
      lines.append(("", ["", row.kind, runs, each, shardings.size_text(row.bytes), ""]))
  along = {axis for axes in by_axes for axis in axes}
  silent = [f"{a}={size}" for a, size in side.sizes.items() if size > 1 and a not in along]
  title = f"<h3>{markup.escape(side.title)}</h3>" if len(sides) > 1 else ""
  heads = ["mesh axis", "collective", "runs", "bytes each", "bytes per step", ""]
  rows = table(heads, lines) if lines else "<p>No collectives.</p>"
  said = f"<p>Nothing is sent along {', '.join(silent)}.</p>" if silent else ""
  return title + rows + said


def legend(sides: Sequence[Side]) -> str:
  """Returns the letters of each model."""
  texts = []
  for side in sides:
    letters = [
      f"<b>{markup.escape(letter)}</b> {markup.escape(dim.name)}"
      + ("" if dim.size is None else f" {dim.size}")
      for letter, dim in side.job.legend.items()
    ]
    texts.append(f"<p>Dims: {', '.join(letters)}</p>")
  return (
    "".join(dict.fromkeys(texts)) + "<p><small>In the drawings, each block names the devices that "
    "hold it; hatched blocks are held by more than one.</small></p>"
  )


def _svg(drawn: pictures.Picture | pictures.Holdings) -> str:
  # Within HTML the namespace is known.
  return pictures.svg(drawn, width=FIGURE_WIDTH).replace(
    ' xmlns="http://www.w3.org/2000/svg"', "", 1
  )


def table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
  """Returns a table.

  Args:
    heads: plain text.
    rows: (class of the row, cells as HTML).
  """
  head = "".join(f"<th>{markup.escape(text)}</th>" for text in heads)
  body = "".join(
    f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    for kind, cells in rows
  )
  return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
