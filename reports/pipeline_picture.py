"""A pipeline schedule as a picture, as text and on a page: a row per stage, its passes, the bubble.

Time goes from left to right. All stages do the same kind of work at a time, so a column is a
forward pass or a backward pass of every stage, and a cell without one is a part of the bubble.
"""

import itertools
import textwrap
from typing import Any, NamedTuple

from partitioning.parallel.pipeline_schedule import Schedule, Unit, Work
from reports.grid import gap_text, shown

ROWS, COLUMNS = 12, 96  # more stages, and more columns on a page, are drawn with a gap
BUBBLE, GAP = "░", "…"
PIXELS = 9  # of a character on a page
# A backward pass takes three times as long as a forward pass, since it computes that again.
LENGTHS = {Work.FORWARD: 1, Work.BACKWARD: 3}


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


# ------------------------------ on a page ------------------------------


def for_page(schedule: Schedule, layers: int) -> dict[str, Any]:
  """Returns the lanes of the stages and the layers of each, for the macro `schedules` of a page.

  Widths are times, and a bar's tooltip has its layers.

  Args:
    schedule: of a mesh with stages.
    layers: of the model.
  """
  every, stages, several = columns(schedule), shown(schedule.stages, ROWS), schedule.chunks > 1
  places = _middle_left_out(len(every), COLUMNS)
  lengths = [1 if place is None else LENGTHS[every[place].work] for place in places]
  whole = sum(lengths)

  def bar(stage: int, place: int | None, left: int, length: int) -> dict[str, Any]:
    where = {"left": 100 * left / whole, "width": 100 * length / whole}
    if place is None:
      return {**where, "kind": "gap", "text": GAP, "title": "left out"}
    unit, work = at(schedule, stage, every[place]), every[place].work.value
    said = f"no {work} pass"
    if unit:
      computed = _range_text(chunk_layers(schedule, layers, stage)[unit.chunk])
      said = f"{work} pass of microbatch {unit.microbatch}, layers {computed}"
    title = f"stage {stage}, tick {every[place].tick}: {said}"
    text, kind = (_name(unit, several), work) if unit else ("", "bubble")
    return {**where, "kind": kind, "text": text, "title": title}

  lefts = [0, *itertools.accumulate(lengths)][:-1]
  rows = [
    {"name": gap_text(stages, schedule.stages), "bars": []}
    if stage is None
    else {
      "name": f"stage {stage}",
      "bars": [bar(stage, *one) for one in zip(places, lefts, lengths, strict=True)],
    }
    for stage in stages
  ]
  return {
    "title": title(schedule),
    "rows": rows,
    "pixels": round(PIXELS * whole * (1 + len(_name(_last(schedule), several)))),
    "layers": [layers_text(schedule, layers, stage) for stage in range(schedule.stages)],
  }
