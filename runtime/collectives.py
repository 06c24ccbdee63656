"""The collectives of a compiled program: kind, mesh axes, payload and number of runs."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from runtime import hlo, units

KINDS = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective instruction of a compiled program.

  Attributes:
    name: the instruction's name in the HLO text.
    kind: one of `KINDS`. An all-reduce that a TPU program fuses with the slice of its result
      (a computation named `all-reduce-scatter`) is the reduce-scatter that it runs as.
    axes: the mesh axes along which the devices of a group differ, in the mesh's order.
    bytes: the payload V of one run, per device: the larger of all operands and all results,
      summed over the elements of a tuple. That is the reduced array for all-reduce, the
      gathered one for all-gather, the one before scattering for reduce-scatter, a device's full
      input (or output) for all-to-all, what it sends for collective-permute and
      collective-broadcast. In a ring of n devices each sends V (n - 1) / n in all-gather,
      reduce-scatter and all-to-all, and twice that in all-reduce.
    count: runs per execution of the program: the product of the trip counts of the loops
      around it. A loop whose trip count is not in the text counts as if it ran once. Each branch of
      a conditional counts as if it were taken, so that there it is an upper bound.
    source: `op_name (file:line)` of its source line, as far as the text has it, else of the fusion
      or loop around it.
    whole: whether every group is a full product of `axes`. False for, say, pairs within an
      axis of 4: `axes` then names the axes that vary. The group of a permute is the set of
      devices that its pairs connect.
    arrays: number of arrays of one run. XLA combines small collectives, differently in each
      version; the number of arrays does not depend on that.
    groups: the devices of each group, by their places in `mesh.devices.flat`.
    pairs: (source, target) of a permute, likewise.
    exact: whether the trip counts of all loops around it are in the text.
    in_loop: whether there is a loop around it.
  """

  name: str
  kind: str
  axes: tuple[str, ...]
  bytes: int
  count: int
  source: str
  whole: bool = True
  arrays: int = 1
  groups: tuple[tuple[int, ...], ...] = ()
  pairs: tuple[tuple[int, int], ...] = ()
  exact: bool = True
  in_loop: bool = False


class Row(NamedTuple):
  """Collectives of one kind along the same axes.

  `count` and `bytes` are runs and payload bytes per device of one execution of the program; where
  they are not exact, of one in which each loop of an unknown trip count runs once.
  """

  kind: str
  axes: tuple[str, ...]
  count: int
  bytes: int
  exact: bool = True


# ---- Program -> records ----


def collectives(hlo_text: str, mesh: Mesh) -> list[Collective]:
  """Returns the collectives that one execution of a compiled program runs, in program order.

  Each instruction reached from ENTRY appears once, whatever calls it; an asynchronous pair
  counts at its start. Those without communication between devices are omitted. Transfers between
  TPU slices count at their send. Other sends, and collectives inside custom kernels, are not seen.

  Args:
    hlo_text: optimized HLO, `jitted.lower(...).compile().as_text()`.
    mesh: the mesh that it was compiled for. The ids in the text are positions in
      `mesh.devices.flat`, not device ids.

  Raises:
    ValueError: not an HLO program, unknown device groups or element types, or ids that this mesh
      does not have.
  """
  program = hlo.parse(hlo_text)
  found: dict[tuple[str, str], Collective] = {}
  for frame, instruction, (count, exact, in_loop) in _runs(program):
    key = frame.computation.name, instruction.name
    if before := found.get(key):
      total, exact = before.count + count, before.exact and exact
      found[key] = dataclasses.replace(before, count=total, exact=exact)
    elif record := _record(program, frame, instruction, count, mesh):
      found[key] = dataclasses.replace(record, exact=exact, in_loop=in_loop)
  return list(found.values())


def _runs(program: hlo.Program):
  """Yields (frame, instruction, runs) for each way from ENTRY.

  Runs are their count, whether it is exact, and whether there is a loop around them.
  """
  speaking: dict[str, bool] = {}

  def communicates(name: str) -> bool:
    """Returns whether there is a collective below; other loops need not be parsed."""
    if name not in speaking:
      speaking[name] = any(
        _kind(i) or any(map(communicates, i.called()))
        for i in program.computations[name].instructions.values()
      )
    return speaking[name]

  def visit(frame: hlo.Frame, runs: tuple[int, bool, bool], chains: set):
    for instruction in frame.computation.instructions.values():
      if _kind(instruction):
        # A TPU program repeats one asynchronous collective in each fusion that it overlaps
        # with, marked as links of one chain. Channel ids alone are not unique.
        chain = re.search(r'\bchain_id="?(\d+)', instruction.attributes)
        channel = re.search(r"\bchannel_id=(\d+)", instruction.attributes)
        link = (instruction.opcode, channel and channel[1], chain and chain[1])
        if not (chain and link in chains):
          yield frame, instruction, runs
        chains.add(link)
      elif not any(map(communicates, instruction.called())):
        continue
      elif instruction.opcode == "while":
        trips, (count, exact, _) = hlo.trip_count(program, frame, instruction), runs
        exact, trips = exact and trips is not None, 1 if trips is None else trips
        for inner, extra in zip(
          hlo.loop_frames(program, frame, instruction), (1, 0), strict=True
        ):  # The condition is tried once more than the body runs.
          yield from visit(inner, (count * (trips + extra), exact, True), set())
      else:
        for name in instruction.called():
          inner = hlo.Frame(program.computations[name], instruction, frame)
          scope = chains if instruction.opcode == "fusion" else set()
          yield from visit(inner, runs, scope)

  yield from visit(hlo.Frame(program.computations[program.entry]), (1, True, False), set())


def _kind(instruction: hlo.Instruction) -> str | None:
  if instruction.opcode == "send":
    return _over_slices(instruction)
  kind = instruction.opcode.removesuffix("-start")
  return kind if kind in KINDS else None


# Transfers that programs for several TPU slices delegate to the runtime.
_BETWEEN_SLICES = {
  "ALL_REDUCE": "all-reduce",
  "ALL_GATHER": "all-gather",
  "REDUCE_SCATTER": "reduce-scatter",
  "ALL_TO_ALL": "all-to-all",
  "ONE_TO_ONE": "collective-permute",
}


def _over_slices(instruction: hlo.Instruction) -> str | None:
  """Returns the collective that a transfer between slices implements; in a program it is a send."""
  found = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
  if found is None:
    return None
  if found[1] not in _BETWEEN_SLICES:
    raise ValueError(f"HLO instruction {instruction.name}: unknown transfer type {found[1]}")
  return _BETWEEN_SLICES[found[1]]


def _across(mesh: Mesh) -> list[list[int]]:
  """Returns the indices of devices at the same place of their slices."""
  groups: dict[tuple, list[int]] = defaultdict(list)
  for place, device in enumerate(mesh.devices.flat):
    groups[tuple(device.coords), getattr(device, "core_on_chip", 0)].append(place)
  return list(groups.values())


def _record(program, frame: hlo.Frame, instruction, count, mesh) -> Collective | None:
  kind, computation, site = _kind(instruction), frame.computation, frame.site
  if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
    kind = "reduce-scatter"
  try:
    sent = instruction.opcode == "send"
    groups = _across(mesh) if sent else _groups(instruction, mesh.size)
    axes, whole = _axes(groups, mesh)
    payload = _payload(computation, instruction)
  except ValueError as error:
    raise ValueError(f"HLO instruction {instruction.name}: {error}") from error
  if not axes:
    return None
  # Instructions inside a fusion often carry no metadata; the fusion does.
  line = hlo.source(program.frames, instruction.attributes)
  line = line or (hlo.source(program.frames, site.attributes) if site else "")
  arrays = 1 if sent else len(instruction.operands)
  groups = tuple(tuple(map(int, group)) for group in groups)
  pairs = tuple(map(tuple, _pairs(instruction) or []))
  return Collective(
    instruction.name, kind, axes, payload, count, line, whole, arrays, groups, pairs
  )


def _payload(computation: hlo.Computation, instruction: hlo.Instruction) -> int:
  """Returns the larger of operands and results, in bytes per device."""
  result, parts = instruction.shape, hlo.elements(instruction.shape)
  if instruction.opcode == "send":  # (what is sent, context, token)
    return hlo.shape_bytes(parts[0])
  # A start returns (operands, results, contexts...). all-reduce-start may return its results
  # alone: they are as large as its operands, which count anyway.
  if instruction.opcode.endswith("-start") and len(parts) > 1:
    result = parts[1]
  sent = sum(map(hlo.shape_bytes, computation.operand_shapes(instruction)))
  return max(hlo.shape_bytes(result), sent)


# ---- Device groups -> mesh axes ----


def _groups(instruction: hlo.Instruction, device_count: int) -> list[Sequence[int]]:
  """Returns the groups of positions that communicate.

  Raises:
    ValueError: an unknown syntax.
  """
  attributes = instruction.settings
  if (pairs := _pairs(instruction)) is not None:
    return _connected(pairs)
  found = re.search(
    r"\breplica_groups=(?P<text>\{\}|(?P<lists>\{\{.*?\}\})|(?P<iota>\[[\d,]+\]<=\S*?(?=,? |,?$))"
    r"|mesh\[(?P<mesh>.*?)\](?:,? ?device_ids=\((?P<ids>.*?)\)(?= ))? \{(?P<axes>.*?)\})",
    attributes,
  )
  everyone = [list(range(device_count))]
  if found is None:
    if "replica_groups=" in attributes:
      text = attributes.split("replica_groups=")[1][:80]
      raise ValueError(f"replica_groups={text} is in no known syntax")
    return everyone
  if found["text"] == "{}":
    return everyone
  if found["mesh"] is not None:
    return _mesh_groups(found["mesh"], found["ids"], found["axes"])
  groups = _lists(found["lists"]) if found["lists"] else _iota(found["iota"])
  # With a channel but without global ids a group lists replicas. An SPMD program has one
  # replica, and all of its devices take part.
  if groups == [[0]] and "channel_id=" in attributes and "use_global" not in attributes:
    return everyone
  return groups


def _pairs(instruction: hlo.Instruction) -> list[list[int]] | None:
  """Returns [source, target] of each pair of a permute; None for other collectives."""
  found = re.search(r"\bsource_target_pairs=(\{.*?\}\}|\{\})", instruction.settings)
  return _lists(found[1]) if found else None


def _lists(text: str) -> list[list[int]]:
  """Reads `{{0,1},{2,3}}`."""
  return [
    [int(i) for i in re.findall(r"\d+", group)] for group in re.findall(r"\{([^{}]+)\}", text)
  ]


def _iota(text: str) -> list[list[int]]:
  """Reads `[2,4]<=[4,2]T(1,0)`: 0..7 as 4 rows of 2, transposed, cut into 2 groups of 4."""
  shape, _, numbers = text.partition("<=")
  return _numbers(numbers).reshape([int(i) for i in re.findall(r"\d+", shape)]).tolist()


def _numbers(text: str) -> np.ndarray:
  """Reads `[4,2]T(1,0)`, an enumeration in another order, or a plain list of ids."""
  if not text.startswith("["):
    return np.array([int(i) for i in text.split(",")])
  dims, _, permutation = text.partition("]")
  sizes = [int(i) for i in re.findall(r"\d+", dims)]
  ids = np.arange(math.prod(sizes)).reshape(sizes)
  order = [int(i) for i in re.findall(r"\d+", permutation)]
  return (ids.transpose(order) if order else ids).reshape(-1)


def _mesh_groups(mesh: str, ids: str | None, axes: str) -> list[list[int]]:
  """Reads `mesh['a'=4,'b'=2], device_ids=([8]) {'a':(2)2}`.

  The mesh is XLA's, with names and sizes that need not be ours, so only its ids are used.
  `'a':(2)2` is a part of an axis: of its size, the factor 2 inside a factor 2.
  """
  sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", mesh)}
  positions = np.arange(math.prod(sizes.values()))
  rest = positions.copy()
  for name, outside, part in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", axes):
    if name not in sizes:
      raise ValueError(f"mesh[{mesh}] {{{axes}}} names an axis that it does not have")
    size = int(part or sizes[name])
    after = list(sizes).index(name) + 1
    inside = sizes[name] // (int(outside or 1) * size)
    stride = math.prod(list(sizes.values())[after:]) * inside
    rest -= positions // stride % size * stride
  devices = _numbers(ids) if ids else positions
  return [devices[rest == first].tolist() for first in np.unique(rest)]


def _connected(pairs: Iterable[Sequence[int]]) -> list[list[int]]:
  """Returns the sets of devices connected by pairs (source, target), ignoring copies to itself."""
  groups: list[set[int]] = []
  for pair in (pair for pair in pairs if pair[0] != pair[1]):
    touched = [group for group in groups if group & set(pair)]
    groups = [group for group in groups if not group & set(pair)]
    groups.append(set(pair).union(*touched))
  return [sorted(group) for group in groups]


def _axes(groups: Sequence[Sequence[int]], mesh: Mesh) -> tuple[tuple[str, ...], bool]:
  """Returns the axes along which groups vary, and whether each is a full product of them."""
  sizes = tuple(mesh.shape.values())
  if (last := max((max(group) for group in groups), default=0)) >= mesh.size:
    names = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    raise ValueError(
      f"names device {last}, and the mesh ({names}) has {mesh.size}; pass the mesh that the "
      "program was compiled for"
    )
  varied = set()
  for group in groups:
    coordinates = np.unravel_index(np.asarray(group), sizes)
    varied |= {i for i, column in enumerate(coordinates) if len(np.unique(column)) > 1}
  full = math.prod(sizes[i] for i in varied)
  whole = all(len(set(group)) == full for group in groups)
  return tuple(axis for i, axis in enumerate(mesh.axis_names) if i in varied), whole


# ---- Records -> table ----


def summarize(records: Iterable[Collective]) -> list[Row]:
  """Returns a row per kind, axes and whether the count is exact; most bytes first."""
  totals: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
  for record in records:
    total = totals[record.kind, record.axes, record.exact]
    total[0] += record.count
    total[1] += record.count * record.bytes
  rows = [
    Row(kind, axes, count, size, exact) for (kind, axes, exact), (count, size) in totals.items()
  ]
  return sorted(rows, key=lambda row: (-row.bytes, row.kind, row.axes, not row.exact))


def short_summary(rows: Sequence[Row]) -> str:
  """Returns the payload bytes per device by mesh axes: `7.0 MiB over tensor, 1.3 MiB over data`.

  A plus is as in `format_summary`, and the text without collectives too.
  """
  sums: dict[str, tuple[int, bool]] = {}
  for row in rows:
    size, exact = sums.get("+".join(row.axes), (0, True))
    sums["+".join(row.axes)] = size + row.bytes, exact and row.exact
  if not sums:
    return "no collectives"
  largest = sorted(sums.items(), key=lambda item: -item[1][0])
  texts = [
    f"{units.size(size)}{'' if exact else '+'} over {axes}" for axes, (size, exact) in largest
  ]
  return f"collectives per device: {', '.join(texts)}"


def format_summary(rows: Sequence[Row]) -> str:
  """Returns the rows as text: runs, payload bytes per device of one run (the mean), their product.

  ```
  all-reduce  data    12 x    1.2 MiB =   14.4 MiB
  all-to-all  expert  6+ x  512.0 KiB =    3.0 MiB
  total              18+              =   17.4 MiB
  ```
  A count with a plus is not exact: loops of an unknown trip count, such as rounds of an exchange of
  tokens, count once. Without collectives the text is `no collectives`.
  """
  if not rows:
    return "no collectives"
  lines = [(row.kind, "+".join(row.axes), *row[2:]) for row in rows]
  exact = all(row.exact for row in rows)
  lines.append(("total", "", sum(row.count for row in rows), sum(x.bytes for x in rows), exact))
  counted = [f"{line[2]}{'' if line[4] else '+'}" for line in lines]
  kinds, axes = (max(len(line[i]) for line in lines) for i in range(2))
  counts = max(map(len, counted))
  text = []
  for (kind, names, count, size, _), runs in zip(lines, counted, strict=True):
    each = "" if kind == "total" else f"x {units.size(size / (count or 1)):>10}"
    product = f" = {units.size(size):>10}"
    text.append(f"{kind:<{kinds}}  {names:<{axes}}  {runs:>{counts}} {each:<12}{product}".rstrip())
  return "\n".join(text)
