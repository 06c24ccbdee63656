"""The timeline of a layer, forward and backward: compute, transfers and what is waited for.

A layer is an iteration of the loop over layers, as `planning/schedule.py` simulates it.
"""

import dataclasses
import itertools
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from planning.schedule import Interval, Loop
from planning.step_time import Times
from runtime import hlo

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Functions that are called from everywhere; what a reader looks for is who calls them.
_HELPERS = (f"{ROOT / 'partitioning'}/",)
_COMPILING = tuple(f"{ROOT / name}" for name in ("training/setup.py", "planning/", "commands/"))
_HELPER = 2  # of `_rank`
_IN_ALL = ("collectives.py", "sharded_function.py")  # of the helpers, those in every stack
_AWAY = 4  # instructions from one without metadata to one that has it
_NEARLY_ALL = 0.8  # of the instructions in a loop: the rest may have been moved into it
_OUTSIDE = 2  # iterations that a compiler has been seen to compute outside of a loop, at most
COPIES = "copies into on-chip memory"


@dataclasses.dataclass(frozen=True)
class Bar:
  """A part of a row: begin and end in seconds; `text` says what is sent or computed."""

  begin: float
  end: float
  text: str

  @property
  def seconds(self) -> float:
    """Returns how long it is."""
    return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class Gap:
  """What a device waits for.

  Attributes:
    seconds: in one step.
    runs: how often it is sent in one.
    what: the transfer.
    line: of our code that causes it; "" if the program does not show it.
    when: the pass in which it is; likewise.
  """

  seconds: float
  runs: int
  what: str
  line: str
  when: str


@dataclasses.dataclass(frozen=True)
class Layer:
  """One iteration of a loop over layers.

  Attributes:
    title: `forward` or `backward`.
    line: of the loop.
    layers: that an iteration computes.
    outside: layers that are computed outside of the loop.
    runs: iterations in one step.
    seconds: of one.
    compute: bars whose text is what bounds them: matmul, HBM, or a loop within.
    transfers: row -> bars; a row is what is sent along the same mesh axes, or to or from the host.
    waits: when nothing is computed.
    parts: function -> seconds of compute, most first.
  """

  title: str
  line: str
  layers: int
  outside: int
  runs: int
  seconds: float
  compute: tuple[Bar, ...]
  transfers: Mapping[str, tuple[Bar, ...]]
  waits: tuple[Bar, ...]
  parts: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Timeline:
  """The layers that were found, the gaps of the whole step, and what was not found.

  Attributes:
    layers: at most one forward and one backward.
    gaps: of the whole step, the most expensive first.
    missing: sentences about what is not there.
  """

  layers: tuple[Layer, ...]
  gaps: tuple[Gap, ...]
  missing: tuple[str, ...]


def of(program: hlo.Program, times: Times, layers: int | None) -> Timeline:
  """Returns the timeline of a program.

  Args:
    program: as compiled.
    times: of `step_time.times` for it.
    layers: of the model; None if it has none in a loop.
  """
  names = _Names(program, times)
  loops = {title: one for title in ("forward", "backward") if (one := _loop(title, names, layers))}
  missing = ["the model has no layers"]
  if layers:
    absent = (title for title in ("forward", "backward") if title not in loops)
    missing = [f"no loop over {layers} layers in the {title} pass" for title in absent]
  shown = (_layer(title, one, names, layers) for title, one in loops.items())
  return Timeline(tuple(shown), tuple(_gaps(names)), tuple(missing))


class _Names:
  """What the instructions of a program are called in a timeline."""

  def __init__(self, program: hlo.Program, times: Times):
    self.program, self.times = program, times
    self._sent = {one.name: one for one in times.sent}
    self._where = {
      name: (computation, one)
      for computation in program.computations.values()
      for name, one in computation.instructions.items()
    }
    self._takes: dict[str, list[str]] = defaultdict(list)  # instruction -> operands
    self._users: dict[str, list[str]] = defaultdict(list)
    self._sites: dict[str, list[str]] = defaultdict(list)  # computation -> what calls it
    for name, (_, one) in self._where.items():
      for called in one.called():
        self._sites[called].append(name)
      for operand in one.operand_names:
        if operand in self._where:
          self._takes[name].append(operand)
          self._users[operand].append(name)

  def row(self, name: str) -> str:
    """Returns the row of a transfer: `fsdp over ICI`, `to host`."""
    if name in self._sent:
      sent = self._sent[name]
      return f"{'+'.join(sent.axes)} over {sent.wire.network}"
    return self.times.moved.get(name, COPIES)

  def what(self, name: str) -> str:
    """Returns a transfer in words: `all-gather over fsdp of bf16[4096,14336]`."""
    shape = _array(self._where[name][1].shape)
    if name in self._sent:
      sent = self._sent[name]
      return f"{sent.kind} over {'+'.join(sent.axes)} of {shape}"
    direction = self.times.moved.get(name)
    return f"copy {direction} of {shape}" if direction else COPIES

  def runs(self, name: str) -> int:
    """Returns how often a transfer is sent in one step; 1 if the text does not show it."""
    return self._sent[name].runs if name in self._sent else self.times.runs[name]

  def line(self, name: str) -> str:
    """Returns the line of our code behind an instruction: `models/layers.py:334, MLP.__call__`."""
    place = self._place(name)
    return "" if place is None else place_text(place)

  def lines(self, name: str) -> str:
    """Returns that line, and the function of a helper through which it causes a transfer."""
    helpers = [place for place in self._ours(name) if rank(place) == _HELPER][:1]
    shown = dict.fromkeys([self.line(name), *map(place_text, helpers)])
    return ", through ".join(filter(None, shown))

  def when(self, name: str) -> str:
    """Returns the pass that an instruction belongs to, by the name that autodiff gives it."""
    called = hlo.op_name(self._shown(name))
    if "rematted_computation" in called:
      return "recomputed in the backward pass"
    passes = {"transpose(": "in the backward pass", "jvp(": "in the forward pass"}
    return next((text for mark, text in passes.items() if mark in called), "")

  def loop(self, loop: Loop) -> str:
    """Returns the line of a loop, or else the innermost line behind nearly all of its body."""
    frames = self.program.frames
    if not (lines := hlo.stack(frames, loop.site.attributes)):
      stacks = [hlo.stack(frames, text) for text in self._inside(loop)]
      common = Counter(place for stack in filter(None, stacks) for place in {*stack})
      enough = _NEARLY_ALL * sum(map(bool, stacks))
      longest = max(stacks, key=len, default=())
      lines = tuple(place for place in longest if common[place] >= enough)
    return next((place_text(place) for place in lines if is_ours(place)), "")

  def is_backward(self, loop: Loop) -> bool:
    """Returns whether a loop is of the backward pass, by its name or by most of its body's."""
    named = [hlo.op_name(loop.site.attributes)]
    if not named[0]:
      named = [*filter(None, map(hlo.op_name, self._inside(loop)))]
    return 2 * sum("transpose(" in name for name in named) > len(named)

  def _inside(self, loop: Loop) -> list[str]:
    """Returns the attributes of what a loop's body computes."""
    return [self._where[name][1].attributes for one in loop.body.compute for name in one.names]

  def part(self, name: str) -> str:
    """Returns the part of a model that an instruction belongs to: a class, function or file."""
    place = self._place(name)
    if place is None:
      return "unknown"
    first = place.function.partition(".")[0]
    return pathlib.Path(place.file).stem if not first or first.startswith(("_", "<")) else first

  def _place(self, name: str) -> hlo.Place | None:
    """Returns the line that says most, the innermost of several."""
    return max(self._ours(name), key=rank, default=None)

  def _ours(self, name: str) -> list[hlo.Place]:
    """Returns the lines of this project behind an instruction, innermost first."""
    return [*filter(is_ours, self._stack(self._shown(name)))]

  def _shown(self, name: str) -> str:
    """Returns the attributes of an instruction, or of one near it that shows a line of the model.

    The compiler drops those of what it merges, and JAX the callers of what it transposes.
    """
    best, said = "", -1
    for text in itertools.chain([self._where[name][1].attributes], self._around(name)):
      says = max(map(rank, self._stack(text)), default=-1)
      if says > said:
        best, said = text, says
      if said > _HELPER:
        break
    return best or self._where[name][1].attributes

  def _around(self, name: str) -> Iterator[str]:
    """Yields the attributes of what an instruction takes, from near to far, then of its users."""
    for neighbours in (self._takes, self._users):
      ahead = dict.fromkeys([name, *self._sites.get(self._where[name][0].name, ())])
      for _ in range(_AWAY):
        ahead = dict.fromkeys(other for one in ahead for other in neighbours.get(one, ()))
        yield from (self._where[one][1].attributes for one in ahead)

  def _stack(self, attributes: str) -> tuple[hlo.Place, ...]:
    return hlo.stack(self.program.frames, attributes)


def is_ours(place: hlo.Place) -> bool:
  """Returns whether a line of code is this project's."""
  return place.file.startswith(f"{ROOT}/") and "/site-packages/" not in place.file


def rank(place: hlo.Place) -> int:
  """Returns how much a line says: most a line of the model, little one that is in every stack."""
  if not is_ours(place) or place.file.startswith(_COMPILING):
    return 0
  if place.file.endswith(_IN_ALL):
    return 1
  return _HELPER if place.file.startswith(_HELPERS) else _HELPER + 1


def place_text(place: hlo.Place) -> str:
  """Returns a line of code as `models/layers.py:334, MLP.__call__`."""
  function = place.function.replace("<locals>.", "")
  return f"{place.file.removeprefix(f'{ROOT}/')}:{place.line}" + (function and f", {function}")


def _array(shape: str) -> str:
  """Returns the largest array of a shape, without its layout."""
  parts = hlo.elements(shape) or [shape]
  return re.sub(r"\{.*", "", max(parts, key=hlo.shape_bytes).strip("()"))


def _loop(title: str, names: _Names, layers: int | None) -> Loop | None:
  """Returns the loop over layers of a pass: that in which most time is spent.

  An iteration may compute several layers, and the compiler computes the first or the last ones
  outside of the loop where that lets it start transfers earlier. Loops over chunks of something
  else stand in other files than the models', or within a layer.
  """
  found = [
    one
    for one in names.times.loops
    if layers
    and one.trips > 1
    and _layers_each(one, layers)
    and names.is_backward(one) == (title == "backward")
  ]
  models = [one for one in found if names.loop(one).startswith("models/")]
  all_of_them = [one for one in found if layers % one.trips == 0]
  return max(models or all_of_them, key=lambda one: one.runs * one.body.seconds, default=None)


def _layers_each(loop: Loop, layers: int) -> int:
  """Returns how many layers an iteration computes; 0 if the loop is over something else."""
  each = (n for n in range(1, layers + 1) if layers % n == 0)
  return next((n for n in each if 0 <= layers // n - loop.trips <= _OUTSIDE), 0)


def _layer(title: str, loop: Loop, names: _Names, layers: int) -> Layer:
  body, each = loop.body, _layers_each(loop, layers)
  rows: dict[str, list[Bar]] = {}
  for one in body.transfers:
    row = names.row(one.names[0])
    if row != COPIES:  # they are part of the work that the compiler schedules ahead
      rows.setdefault(row, []).append(_bar(one, names))
  parts: dict[str, float] = {}
  for one in body.compute:
    part = names.part(one.names[0])
    parts[part] = parts.get(part, 0.0) + one.end - one.begin
  return Layer(
    title,
    names.loop(loop),
    each,
    layers - loop.trips * each,
    loop.runs,
    body.seconds,
    tuple(Bar(one.begin, one.end, one.bound) for one in body.compute),
    {row: tuple(bars) for row, bars in sorted(rows.items())},
    tuple(_bar(one, names) for one in body.waits),
    dict(sorted(parts.items(), key=lambda item: -item[1])),
  )


def _bar(one: Interval, names: _Names) -> Bar:
  return Bar(one.begin, one.end, " and ".join(map(names.what, one.names)))


def _gaps(names: _Names) -> Iterator[Gap]:
  """Yields what is waited for in a step, the most expensive first."""
  for name, seconds in sorted(names.times.waited.items(), key=lambda item: -item[1]):
    if seconds > 0:
      yield Gap(seconds, names.runs(name), names.what(name), names.lines(name), names.when(name))
