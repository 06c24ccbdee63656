"""A pipeline schedule as a picture, as text and as SVG: a row per stage, its passes, the bubble.

Time goes from left to right. All stages do the same kind of work at a time, so a column is a
forward pass or a backward pass of every stage, and a cell without one is a part of the bubble.
"""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from markupsafe import Markup

from partitioning.parallel.pipeline_schedule import Schedule, Unit, Work
from reports.grid import gap_text, shown

ROWS, COLUMNS = 12, 96  # more stages, and more columns of an SVG, are drawn with a gap
BUBBLE, GAP = "░", "…"
# Of an SVG, in pixels: a character, the height of a row, what is around it. A backward pass takes
# three times as long as a forward pass, since it computes that again.
CHARACTER, ROW, LEFT, TOP, BACKWARD = 7, 22, 64, 46, 3
STYLE = """
.pipeline { font: 11px ui-monospace, Menlo, Consolas, monospace; max-width: none; }
.pipeline text { fill: #1f2328; text-anchor: middle; }
.pipeline .name { text-anchor: start; }
.pipeline rect { stroke: #59636e; stroke-width: .5; }
.pipeline .forward { fill: #b6d7f5; }
.pipeline .backward { fill: #f7dcae; }
.pipeline path { stroke: #59636e; }
@media (prefers-color-scheme: dark) {
  .pipeline text { fill: #e6edf3; }
  .pipeline .forward { fill: #17446e; }
  .pipeline .backward { fill: #6b4a10; }
}
"""


class Column(NamedTuple):
  """A part of a tick, in which every stage has a pass of the same kind, or waits."""

  tick: int
  work: Work


def columns(schedule: Schedule) -> list[Column]:
  """Returns the parts of all ticks in the order of time: forward before backward passes."""
  found = []
  for tick in range(schedule.ticks):
    found += [Column(tick, Work.FORWARD)] if tick < schedule.forward_ticks else []
    found += [Column(tick, Work.BACKWARD)] if tick >= schedule.first_backward else []
  return found


def at(schedule: Schedule, stage: int, column: Column) -> Unit | None:
  """Returns what a stage computes then; None: it waits."""
  units = schedule.at(stage, column.tick)
  return next((unit for unit in units if unit.work == column.work), None)


def title(schedule: Schedule) -> str:
  """Returns the schedule in a line: its sizes, ticks, and the share of the bubble."""
  chunks = f" of {schedule.chunks} chunks each" if schedule.chunks > 1 else ""
  rounds = schedule.units + schedule.stages - 1
  return (
    f"pipeline {schedule.kind}: {schedule.microbatches} microbatches, {schedule.stages} stages"
    f"{chunks}; {schedule.ticks} ticks; bubble {schedule.stages - 1}/{rounds} = "
    f"{100 * schedule.bubble:.1f} %"
  )


def chunk_layers(schedule: Schedule, layers: int, stage: int) -> list[range]:
  """Returns the layers of each chunk of a stage, in the order of the model.

  Args:
    schedule: whose stages times chunks divide the layers.
    layers: of the model.
    stage: counted from 0.
  """
  each = layers // (schedule.stages * schedule.chunks)
  starts = [(chunk * schedule.stages + stage) * each for chunk in range(schedule.chunks)]
  return [range(start, start + each) for start in starts]


def layers_text(schedule: Schedule, layers: int, stage: int) -> str:
  """Returns which layers a stage computes, and which it stores if those are others: `0-1, 8-9`."""
  computed = ", ".join(map(_range_text, chunk_layers(schedule, layers, stage)))
  if schedule.chunks == 1:
    return computed
  each = layers // schedule.stages
  return f"{computed} (stores {_range_text(range(stage * each, (stage + 1) * each))})"


def text(schedule: Schedule, layers: int, *, picture: bool = True, width: int = 80) -> str:
  """Returns the schedule in lines of at most this width.

  Args:
    schedule: of a mesh with stages.
    layers: of the model.
    picture: False leaves out the picture.
    width: in characters.
  """
  lines = textwrap.wrap(title(schedule), width, subsequent_indent="  ")
  if picture:
    lines += _rows(schedule, width)
  stages = shown(schedule.stages, ROWS)
  texts = [
    gap_text(stages, schedule.stages)
    if stage is None
    else f"stage {stage}: {layers_text(schedule, layers, stage)}"
    for stage in stages
  ]
  return "\n".join([*lines, *_wrapped("layers of " + "; ".join(texts), width)])


def _wrapped(line: str, width: int) -> list[str]:
  return textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ")


def _rows(schedule: Schedule, width: int) -> list[str]:
  """Returns the picture: a line of headings, one per stage, and the legend."""
  every, several = columns(schedule), schedule.chunks > 1
  label = len(f"  stage {schedule.stages - 1} ")
  cell = 1 + len(_name(_last(schedule), several))
  places = _middle_left_out(len(every), (width - label) // cell)
  head = [GAP if i is None else every[i].work.value[0].upper() for i in places]
  lines = [" " * label + "".join(f"{one:>{cell}}" for one in head)]
  stages = shown(schedule.stages, ROWS)
  for stage in stages:
    if stage is None:
      lines.append(f"  {gap_text(stages, schedule.stages)}")
      continue
    units = [None if i is None else at(schedule, stage, every[i]) for i in places]
    cells = [
      GAP if i is None else _name(unit, several) if unit else BUBBLE * (cell - 1)
      for i, unit in zip(places, units, strict=True)
    ]
    name = f"  stage {stage}"
    lines.append(f"{name:<{label}}" + "".join(f"{one:>{cell}}" for one in cells))
  legend = (
    f"F forward, B backward pass of a microbatch{'.chunk' if several else ''}; {BUBBLE} bubble"
  )
  missing = len(every) - len(places) + 1
  more = f"; {GAP} {missing} columns left out" if None in places else ""
  return [*lines, *_wrapped(f"{legend}{more}", width)]


def _last(schedule: Schedule) -> Unit:
  """Returns the last forward pass of a stage, which has the longest name."""
  return Unit(Work.FORWARD, schedule.microbatches - 1, schedule.chunks - 1)


def _name(unit: Unit, several: bool) -> str:
  """Returns the number of the microbatch, with that of the chunk where a stage has several."""
  return f"{unit.microbatch}.{unit.chunk}" if several else f"{unit.microbatch}"


def _middle_left_out(count: int, most: int) -> list[int | None]:
  """Returns positions, with one None for those left out between the first and the last ones."""
  if count <= most:
    return list(range(count))
  first = most // 2
  return [*range(first), None, *range(count - (most - first - 1), count)]


def _range_text(numbers: range) -> str:
  last = numbers.stop - 1
  return f"{numbers.start}" if len(numbers) == 1 else f"{numbers.start}-{last}"


# ------------------------------ SVG ------------------------------


def svg(schedule: Schedule, layers: int) -> str:
  """Returns the picture as SVG; widths are times, and a cell's tooltip has its layers.

  Args:
    schedule: of a mesh with stages.
    layers: of the model.
  """
  every, several = columns(schedule), schedule.chunks > 1
  unit = CHARACTER * (1 + len(_name(_last(schedule), several)))
  widths = {Work.FORWARD: unit, Work.BACKWARD: BACKWARD * unit}
  places, lefts, x = _middle_left_out(len(every), COLUMNS), [], LEFT
  for place in places:
    lefts.append(x)
    x += unit if place is None else widths[every[place].work]
  stages = shown(schedule.stages, ROWS)
  height = TOP + ROW * len(stages)
  parts = [_text(4, 14, f"{title(schedule)}", "name")]
  hatch = _hatch(schedule)
  legend = (("forward", "forward pass"), ("backward", "backward pass"), (hatch, "bubble"))
  for number, (kind, name) in enumerate(legend):
    parts.append(f'<rect class="{kind}" x="{LEFT + 120 * number}" y="22" width="14" height="12"/>')
    parts.append(_text(LEFT + 120 * number + 20, 32, name, "name"))
  for row, stage in enumerate(stages):
    y = TOP + ROW * row
    name = gap_text(stages, schedule.stages) if stage is None else f"stage {stage}"
    parts.append(_text(4, y + 15, name, "name"))
    for place, left in zip(places, lefts, strict=True) if stage is not None else ():
      if place is None:
        parts.append(_text(left + unit / 2, y + 15, "..."))
        continue
      parts += _cell(schedule, layers, stage, every[place], (left, y, widths[every[place].work]))
  style = f"{STYLE}.pipeline .{hatch} {{ fill: url(#{hatch}); }}\n"
  # The title may be wider than a small schedule.
  across, down = max(x + 6, 8 + CHARACTER * len(title(schedule))), height + 6
  return (
    '<svg xmlns="http://www.w3.org/2000/svg" class="pipeline" '
    f'viewBox="0 0 {across} {down}" width="{across}" height="{down}" role="img">'
    f"<title>{escape(title(schedule))}</title><style>{style}</style><defs>"
    f'<pattern id="{hatch}" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V5"/></pattern></defs>'
    f"{''.join(parts)}</svg>"
  )


def for_page(schedule: Schedule, layers: int) -> dict[str, Any]:
  """Returns the picture and the layers of each stage, for the macro `schedules` of a page."""
  stages = range(schedule.stages)
  return {
    "picture": Markup(svg(schedule, layers)),
    "layers": [layers_text(schedule, layers, stage) for stage in stages],
  }


def _cell(
  schedule: Schedule, layers: int, stage: int, column: Column, box: Sequence[int]
) -> list[str]:
  """Returns a pass of a stage, or its waiting, in a box (left, top, width)."""
  unit, (left, top, width) = at(schedule, stage, column), box
  kind = column.work.value if unit else _hatch(schedule)
  if unit:
    of = _range_text(chunk_layers(schedule, layers, stage)[unit.chunk])
    said = f"{kind} pass of microbatch {unit.microbatch}, layers {of}"
  else:
    said = f"no {column.work.value} pass"
  parts = [
    f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{ROW}">'
    f"<title>stage {stage}, tick {column.tick}: {said}</title></rect>"
  ]
  if unit:
    parts.append(_text(left + width / 2, top + 15, _name(unit, schedule.chunks > 1)))
  return parts


def _text(x: float, y: float, said: str, kind: str = "") -> str:
  of = f' class="{kind}"' if kind else ""
  return f'<text{of} x="{x:g}" y="{y:g}">{escape(said)}</text>'


def _hatch(schedule: Schedule) -> str:
  """Returns the id of the bubble's hatching: a page may have two pictures."""
  return "-".join(map(str, ("bubble", *dataclasses.astuple(schedule))))
