"""Line charts as SVG, by matplotlib: for pages, whose style sheet has their colors.

Importing this imports matplotlib, so a training run does not: its page is made by another process.
"""

import dataclasses
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

# A color here -> the CSS variable in its place: the page decides, by the reader's dark mode.
INK, GRID, ACCENT = "#010203", "#010204", "#010205"
SERIES = tuple(f"#0102{number:02x}" for number in range(16, 24))
MARKS = {"restart": "#010231", "rollback": "#010232", "bad": "#010233", "checkpoint": "#010234"}
_VARIABLES = {
  INK: "--soft",
  GRID: "--line",
  ACCENT: "--accent",
  **{color: f"--series-{number}" for number, color in enumerate(SERIES)},
  **{color: f"--mark-{name}" for name, color in MARKS.items()},
}
# Inches; a page shows 96 pixels of each, or fewer on a narrow screen.
NARROW, WIDE, HEIGHT = 4.5, 9.2, 2.4
SMALLEST_SHARE = 0.01
_STEPS = (1, 2, 5, 10)  # multiples that an axis takes: their labels fit the margin
_MARGINS = (0.62, 0.12, 0.42, 0.1)  # left, right, bottom, top
POINTS = 400  # of a line; see `thinned`
FEW = 100  # points of a line up to which it is never faint
LOGARITHMIC = 30.0  # largest over smallest value from which on an axis is logarithmic
SETTINGS = {
  "svg.fonttype": "none",  # text stays text
  "svg.hashsalt": "meshwright",  # ids are the same each time
  "font.size": 9,
  "font.family": "sans-serif",
  "path.simplify": False,  # `thinned` has kept extremes
  "axes.edgecolor": GRID,
  "axes.labelcolor": INK,
  "xtick.color": INK,
  "ytick.color": INK,
  "text.color": INK,
}


@dataclasses.dataclass(frozen=True)
class Line:
  """A line of a chart.

  Attributes:
    label: its name.
    points: (step, value) in the order of steps.
    color: its number among SERIES.
    dotted: show each point, such as of evaluations.
    joined: whether a line joins them; else each is a diamond.
    faint: thin and pale where it has many points, over which another line is to be seen.
  """

  label: str
  points: Sequence[tuple[float, float]]
  color: int = 0
  dotted: bool = False
  joined: bool = True
  faint: bool = False


@dataclasses.dataclass(frozen=True)
class Mark:
  """Something that happened at a step.

  Attributes:
    kind: of MARKS.
    step: where.
    text: what is shown when the pointer is over it.
  """

  kind: str
  step: float
  text: str


@dataclasses.dataclass(frozen=True)
class Chart:
  """Lines over steps.

  Attributes:
    title: with the unit.
    lines: at least one, of which each has a point.
    marks: drawn across all lines.
    percent: values are shares of 1.
    from_zero: the axis of values begins at 0.
    logarithmic: the axis of values is logarithmic if they are above 0 and differ enough.
    over: what the lines go over.
  """

  title: str
  lines: Sequence[Line]
  marks: Sequence[Mark] = ()
  percent: bool = False
  from_zero: bool = False
  logarithmic: bool = False
  over: str = "step"


def thinned(
  points: Sequence[tuple[float, float]], most: int = POINTS
) -> Sequence[tuple[float, float]]:
  """Returns at most `most` points: of each stretch of steps those with the least and largest value.

  So no spike is lost. The first point and the last are kept.
  """
  if len(points) <= most:
    return points
  first, *inner, last = points
  stretches = most // 2 - 1
  kept = [first]
  for number in range(stretches):
    start = number * len(inner) // stretches
    part = inner[start : (number + 1) * len(inner) // stretches]
    ends = {part.index(choose(part, key=lambda one: one[1])) for choose in (min, max)}
    kept += [part[place] for place in sorted(ends)]
  return [*kept, last]


def data(chart: Chart) -> Markup:
  """Returns the points of a chart as JSON, as templates/charts.js takes them."""
  lines = [
    {
      **{"label": line.label, "color": line.color % len(SERIES), "joined": line.joined},
      **{"dotted": line.dotted or not line.joined, "faint": _is_faint(line)},
      "points": [[x, float(f"{y:.6g}")] for x, y in thinned(line.points)],
    }
    for line in chart.lines
  ]
  marks = [[mark.step, mark.text] for mark in chart.marks]
  values = {"lines": lines, "marks": marks, "percent": chart.percent}
  return Markup(json.dumps(values, separators=(",", ":")).replace("<", "\\u003c"))


def svg(chart: Chart, *, name: str, wide: bool = False) -> Markup:
  """Returns a chart as an SVG element for a page; its attributes say where its axes are.

  Args:
    chart: with finite values.
    name: unique on the page: a prefix of ids.
    wide: about twice as wide.
  """
  with matplotlib.rc_context(SETTINGS):
    width = WIDE if wide else NARROW
    figure = Figure(figsize=(width, HEIGHT))
    left, right, bottom, top = _MARGINS  # fixed: finding them would take half of the time
    axes = figure.add_axes(
      (left / width, bottom / HEIGHT, 1 - (left + right) / width, 1 - (bottom + top) / HEIGHT)
    )
    for number, line in enumerate(chart.lines):
      _draw(axes, line, f"line{number}")
    for number, mark in enumerate(chart.marks):
      _mark(axes, mark, f"mark{number}")
    _scale(axes, chart)
    box = [72 * inches for inches in (left, top, width - left - right, HEIGHT - bottom - top)]
    ends = (*axes.get_xlim(), *axes.get_ylim())
    where = {"name": name, "log": str(int(axes.get_yscale() == "log"))}
    where |= {"box": _numbers(box), "range": _numbers(ends)}
  titles = {f"line{number}": line.label for number, line in enumerate(chart.lines)}
  titles |= {f"mark{number}": mark.text for number, mark in enumerate(chart.marks)}
  drawn = for_page(figure, chart.title, name, titles)
  texts = (Markup(' data-{}="{}"').format(key, value) for key, value in where.items())
  return drawn.replace("<svg", Markup("<svg") + Markup("").join(texts), 1)


def _numbers(values: Iterable[float]) -> str:
  return " ".join(f"{value:.10g}" for value in values)


def _is_faint(line: Line) -> bool:
  return line.faint and min(len(line.points), POINTS) > FEW


_METADATA = ("Creator", "Date", "Format", "Type")


def _draw(axes: Axes, line: Line, gid: str) -> None:
  xs, ys = zip(*thinned(line.points), strict=True)
  alone = len(xs) == 1
  faint = _is_faint(line)
  axes.plot(
    xs,
    ys,
    color=SERIES[line.color % len(SERIES)],
    linewidth=1.0 if faint else 1.5,
    linestyle="-" if line.joined else "",
    alpha=0.7 if faint else 1.0,
    marker="D" if not line.joined else "o" if line.dotted or alone else "",
    markersize=3.5 if line.joined else 5.5,
    gid=gid,
  )


def _mark(axes: Axes, mark: Mark, gid: str) -> None:
  color = MARKS[mark.kind]
  if mark.kind == "checkpoint":
    bottom = axes.get_xaxis_transform()
    axes.plot(
      [mark.step], [0.0], marker="^", markersize=5, color=color, transform=bottom, clip_on=False,
      gid=gid, linestyle="",
    )  # fmt: skip
  else:
    style = {"restart": "--", "rollback": "-", "bad": ":"}[mark.kind]
    axes.axvline(mark.step, color=color, linestyle=style, linewidth=1.3, gid=gid)


def _scale(axes: Axes, chart: Chart) -> None:
  values = [value for line in chart.lines for _, value in line.points]
  low, high = min(values), max(values)
  plain_axes(axes)
  axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=_STEPS))
  axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number_text(x)))
  axes.set_xlabel(chart.over, labelpad=1)
  if chart.logarithmic and low > 0 and high / low > LOGARITHMIC:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_formatter(NullFormatter())
  else:
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=_STEPS))
  shown = percent_text if chart.percent else number_text
  axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: shown(y)))
  if chart.from_zero:  # a share below a hundredth is drawn as next to nothing
    axes.set_ylim(0.0, 1.05 * max(high, SMALLEST_SHARE if chart.percent else 0.0) or 1.0)


def plain_axes(axes: Axes, grid: str = "y") -> None:
  """Leaves out what is not needed of axes; `grid` is as of matplotlib."""
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(axis=grid, color=GRID, linewidth=0.7)
  axes.tick_params(length=0)


def number_text(value: float) -> str:
  """Returns `12.5k`, `0.002`, `1e-05`: a number of an axis."""
  for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
    if abs(value) >= size:
      return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
  return f"{value:.4g}"


def number_order(text: str) -> tuple[float, str]:
  """Returns by what texts are sorted: numbers by their size, before others."""
  try:
    return float(text), ""
  except ValueError:
    return float("inf"), text


def percent_text(value: float) -> str:
  """Returns `12.5 %`."""
  return f"{100 * value:.3g} %"


_PATTERN = re.compile("|".join(map(re.escape, _VARIABLES)))


def for_page(figure: Figure, label: str, name: str, titles: Mapping[str, str]) -> Markup:
  """Returns the element of a figure, with unique ids, the page's colors and fonts, and tooltips.

  Args:
    figure: drawn under `SETTINGS`, in colors of this module.
    label: what it shows.
    name: unique on the page: a prefix of ids.
    titles: id of an artist -> what is shown when the pointer is over it.
  """
  file = io.StringIO()
  with matplotlib.rc_context(SETTINGS):
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
  text = file.getvalue()
  text = text[text.index("<svg") :]
  text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
  box = re.search(r'viewBox="([^"]+)"', text)[1]
  body = text[text.index(">") + 1 : text.rindex("</svg>")]
  body = body.replace("xlink:href", "href")
  body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", body)
  body = _PATTERN.sub(lambda found: f"var({_VARIABLES[found[0]]})", body)
  body = re.sub(r"<style.*?</style>|font-family: [^;\"]*; ?", "", body, flags=re.DOTALL)
  body = re.sub(r"\s*\n\s*", "\n", body)
  body = re.sub(
    rf'<g id="{name}-([^"]*)">',
    lambda found: found[0] + (f"<title>{escape(t)}</title>" if (t := titles.get(found[1])) else ""),
    body,
  )
  return Markup(f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">{body}</svg>')
