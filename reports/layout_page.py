"""The layout as an HTML page: shards by device, bytes, rules, collectives.

This module collects the content; `templates/layout.html.j2` renders it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from partitioning import rules
from partitioning.constraints import Constraint
from partitioning.mesh_sizes import mesh_text
from partitioning.rules import Placement, bytes_per_device, shape_text, size_text
from reports import drawings, pipeline_picture
from reports.grid import Sheet
from reports.html import memory_bar, render
from reports.layout_text import (
  activation_rows,
  matrix_lines,
  named_rows,
  of_layers,
  sharding_texts,
)
from runtime import chips, collectives
from training import named_activations
from training.setup import Job
from training.specs import resolve


@dataclasses.dataclass(frozen=True)
class Side:
  """One of the layouts that a page shows.

  Attributes:
    title: such as `dp4_tp2_lm`.
    job: a prepared job.
    costs: the collectives of its compiled train step.
    kind: of its devices; "": as the devices themselves report it.
  """

  title: str
  job: Job
  costs: Sequence[collectives.Row] = ()
  kind: str = ""

  @property
  def sizes(self) -> Mapping[str, int]:
    """Returns mesh axis -> size."""
    return self.job.devices.sizes

  @property
  def caption(self) -> str:
    """Returns the mesh's axes and the kind of its devices."""
    device = self.job.mesh.devices.flat[0]
    kind = "simulated CPU devices" if self.job.devices.simulated else device.device_kind
    axes = mesh_text(self.sizes, self.job.devices.slices)
    return f"{axes}, {self.job.mesh.size} {self.kind or kind}"

  @property
  def mesh(self) -> Sheet:
    """Returns the drawing of the mesh."""
    numbers = {device.id: "" for device in self.job.mesh.devices.flat}
    return drawings.holdings("", self.job.mesh, numbers)

  @property
  def legend(self) -> str:
    """Returns the letters of the model's dims: `B batch 32, D model 128`."""
    return ", ".join(
      f"{letter} {dim.name}" if dim.size is None else f"{letter} {dim.name} {dim.size}"
      for letter, dim in self.job.legend.items()
      if dim.size != 0  # the rank of adapters that the model does not have
    )

  @property
  def held(self) -> list[Placement]:
    """Returns parameters and optimizer state."""
    sections = self.job.placements
    return [*sections["parameters"].values(), *sections["optimizer"].values()]

  @property
  def stored(self) -> dict[str, int]:
    """Returns section -> bytes per device."""
    return {
      name: sum(bytes_per_device(p, self.sizes) for p in found.values())
      for name, found in self.job.placements.items()
    }

  @property
  def activations(self) -> list[tuple[list[str], Sheet]]:
    """Returns the row and the drawing of each constrained activation, in order."""
    drawn = [self.drawing(one, one.letters) for one in self.job.activations.seen]
    return [*zip(activation_rows(self.job.activations), drawn, strict=True)]

  @property
  def rematerialization(self) -> str:
    """Returns `training.rematerialization`."""
    return self.job.config.training.rematerialization

  @property
  def named(self) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """Returns `layout_text.named_rows`."""
    return named_rows(named_activations.of_job(self.job))

  @property
  def of_layers(self) -> str:
    """Returns of which layers these are."""
    return of_layers(self.job.program.pipeline)

  def dims(self, letters: str) -> tuple[str, ...]:
    """Returns `("D model", "F feedforward")`."""
    return tuple(f"{letter} {self.job.legend[letter].name}" for letter in letters)

  def drawing(self, array: Placement | Constraint, title: str = "") -> Sheet:
    """Returns the drawing of an array's shards."""
    sharding = NamedSharding(self.job.mesh, array.spec)
    dims = self.dims(array.letters)
    return drawings.picture(array.shape, sharding, title=title, dims=dims)


def html(
  job: Job,
  against: Job | None = None,
  *,
  titles: tuple[str, str] = ("this layout", "the other"),
  command: str = "",
) -> str:
  """Returns the page; compiles the train step of each job for its collectives.

  Args:
    job: a prepared job.
    against: a second one, shown side by side; differences are marked.
    titles: of the two.
    command: that asked for the page.
  """
  jobs = [job] if against is None else [job, against]
  sides = [Side(title, one, _costs(one)) for title, one in zip(titles, jobs, strict=False)]
  arrays = Arrays(sides)
  return render(
    "layout.html.j2",
    title=f"Layout: {' against '.join(side.title for side in sides)}",
    command=command,
    sides=sides,
    verdict=verdict(sides),
    bars=_bars(sides),
    totals=_totals(sides),
    platform=job.devices.platform,
    costs=[_costs_of(side, sides) for side in sides],
    pipelines=pipelines(sides),
    matrices={
      side.title: matrix_lines(resolve(side.job.config).optimizer, side.job.program, side.sizes)
      for side in sides
    },
    **{name: arrays.section(name) for name in ("parameters", "batch", "optimizer")},
  )


def pipelines(sides: Sequence[Side]) -> list[dict[str, Any]]:
  """Returns the pictures of the pipeline schedules, and which layers each stage has."""
  found = {}
  for side in sides:
    if (schedule := side.job.program.pipeline) is not None:
      layers = side.job.config.model.layers
      found[schedule, layers] = pipeline_picture.for_page(schedule, layers)
  return list(found.values())


def verdict(sides: Sequence[Side]) -> str:
  """Returns one sentence: what is placed where, or how much two layouts differ."""
  held = [size_text(sum(bytes_per_device(p, one.sizes) for p in one.held)) for one in sides]
  if len(sides) == 2:
    count, differ = _differing(sides)
    return (
      f"{sides[0].title} and {sides[1].title} shard {differ} of {count} arrays differently: "
      f"{held[0]} and {held[1]} of parameters and optimizer state per device."
    )
  [side] = sides
  count = sum(map(len, side.job.placements.values()))
  axes = mesh_text(side.sizes, side.job.devices.slices)
  return (
    f"{count} arrays are placed on {side.job.mesh.size} devices ({axes}), with {held[0]} of "
    "parameters and optimizer state per device."
  )


def _differing(sides: Sequence[Side]) -> tuple[int, int]:
  """Returns the arrays of two layouts, and how many of them are sharded differently."""
  names = dict.fromkeys(
    (section, name) for side in sides for section, ps in side.job.placements.items() for name in ps
  )
  pairs = [
    [_sharding(s.job.placements[section].get(name), s) for s in sides] for section, name in names
  ]
  return len(pairs), sum(ours != theirs for ours, theirs in pairs)


def _bars(sides: Sequence[Side]) -> list[dict[str, Any]]:
  """Returns the bar of each side, all of one scale."""
  most = max(sum(side.stored.values()) for side in sides)
  return [memory_bar(side.stored, _limit(side), beside=most) for side in sides]


def _limit(side: Side) -> float | None:
  """Returns the memory of a device by its data sheet; None where that is unknown, as of CPUs."""
  chip = chips.known(side.job.mesh.devices.flat[0])
  return chip.hbm_bytes if chip else None


# ------------------------------ arrays ------------------------------


class Arrays:
  """The sections of arrays; arrays that are sharded alike share one numbered drawing."""

  def __init__(self, sides: Sequence[Side]):
    """Starts without drawings."""
    self._sides = sides
    self._numbers: dict[tuple, int] = {}

  def section(self, title: str) -> list[dict[str, Any]]:
    """Returns the arrays of `parameters`, `optimizer` or `batch`, grouped by module."""
    sections = [side.job.placements[title] for side in self._sides]
    groups: dict[str, dict[str, list[Placement | None]]] = {}
    for name in dict.fromkeys(name for section in sections for name in section):
      groups.setdefault(_group(name), {})[name] = [section.get(name) for section in sections]
    return [self._module(group, arrays) for group, arrays in groups.items()]

  def _module(self, group: str, arrays: Mapping[str, list[Placement | None]]) -> dict[str, Any]:
    """Returns one module: its rows, then the drawings that were not shown before."""
    rows, fresh = [], {}
    for name, pair in arrays.items():
      key = tuple(p and (p.shape, p.letters, str(p.spec)) for p in pair)
      if key not in self._numbers:
        self._numbers[key] = len(self._numbers) + 1
        fresh[key] = {"number": self._numbers[key], "names": [], "drawings": self._drawings(pair)}
      if key in fresh:
        fresh[key]["names"].append(name)
      rows.append(self._row(name, pair, self._numbers[key]))
    sums = [
      sum(bytes_per_device(pair[i], side.sizes) for pair in arrays.values() if pair[i])
      for i, side in enumerate(self._sides)
    ]
    return {
      "name": group,
      "count": f"{len(arrays)} array{'s' if len(arrays) > 1 else ''}",
      "sizes": [f"{size_text(size)} per device" for size in sums],
      "rows": rows,
      "figures": list(fresh.values()),
    }

  def _row(self, name: str, pair: Sequence[Placement | None], number: int) -> dict[str, Any]:
    """Returns the row of one array; `shardings` has spec, shard, bytes, replicas of each side."""
    known = [p for p in pair if p]
    found = [_sharding(p, side) for p, side in zip(pair, self._sides, strict=True)]
    return {
      "name": name,
      "differs": len(found) > 1 and found[0] != found[1],
      "letters": known[0].letters or "-",
      "dims": " ".join(self._sides[0 if pair[0] else 1].dims(known[0].letters)),
      "shapes": _once(shape_text(p.shape) for p in known),
      "types": _once(str(np.dtype(p.dtype)) for p in known),
      "shardings": found,
      "drawing": number,
      "rules": _once([*(p.rule for p in known), *(f"note: {n}" for p in known for n in p.notes)]),
    }

  def _drawings(self, pair: Sequence[Placement | None]) -> list[tuple[str, Sheet | None]]:
    """Returns (title, drawing) of each side, or of both if they are the same."""
    drawn = [p and side.drawing(p) for p, side in zip(pair, self._sides, strict=True)]
    if len(drawn) == 1:
      return [("", drawn[0])]
    if drawn[0] == drawn[1]:
      return [("both", drawn[0])]
    return [(side.title, one) for side, one in zip(self._sides, drawn, strict=True)]


def _once(texts: Any) -> list[str]:
  return list(dict.fromkeys(texts))


def _group(name: str) -> str:
  """Returns the module of an array: `layers/mlp` of `optimizer/0/mu/layers/mlp/up/kernel`."""
  words = name.split("/")[:-1]
  if words[:1] == ["optimizer"]:
    return "/".join(words[:3])
  return "/".join(words[:2]) or name


def _sharding(placement: Placement | None, side: Side) -> list[str]:
  """Returns the texts of an array, or that it is not there."""
  if placement is None:
    return ["not there", "", "", ""]
  return sharding_texts(placement, side.sizes)


# ------------------------------ sums, collectives ------------------------------


def _totals(sides: Sequence[Side]) -> dict[str, Any]:
  """Returns the sums: elements, bytes per device, bytes replicated on every device."""
  rows = []
  for side in sides:
    sections = side.job.placements
    count = sum(math.prod(p.shape) for p in sections["parameters"].values())
    sums = [*side.stored.values(), sum(bytes_per_device(p, side.sizes) for p in side.held)]
    sums.append(rules.replicated_bytes(side.held, side.sizes))
    texts = [f"{count:,}", *map(size_text, sums)]
    first = rows[0] if rows else texts
    rows.append([t if t == other else f"≠ {t}" for t, other in zip(texts, first, strict=True)])
  heads = [f"{title}/device" for title in sides[0].job.placements]
  heads += ["parameters + optimizer/device", "replicated on every device"]
  return {"heads": ["parameters", *heads], "rows": rows}


def _costs(job: Job) -> list[collectives.Row]:
  """Compiles the train step and returns its collectives."""
  text = job.compile_train_step().function.as_text()
  return collectives.summarize(collectives.collectives(text, job.mesh))


def _costs_of(side: Side, sides: Sequence[Side]) -> dict[str, Any]:
  """Returns one side's collectives, grouped by the axes that they run along."""

  def numbers(row: collectives.Row) -> list[str]:
    """Returns runs, bytes of each, bytes per step."""
    runs = f"{row.count}{'' if row.exact else '+'}"
    return [runs, size_text(row.bytes / (row.count or 1)), size_text(row.bytes)]

  by_axes: dict[tuple[str, ...], list[collectives.Row]] = {}
  for row in side.costs:
    by_axes.setdefault(row.axes, []).append(row)
  most = max(1, *(sum(row.bytes for row in one.costs) for one in sides))
  along = {axis for axes in by_axes for axis in axes}
  return {
    "silent": [f"{a}={size}" for a, size in side.sizes.items() if size > 1 and a not in along],
    "axes": [
      {
        "name": " + ".join(f"{axis}={side.sizes[axis]}" for axis in axes),
        "size": size_text(size),
        "percent": round(100 * size / most, 2),
        "rows": [{"kind": row.kind, "numbers": numbers(row)} for row in found],
      }
      for axes, found in by_axes.items()
      for size in [sum(row.bytes for row in found)]
    ],
  }


# The drawings of a run's layout, stored as JSON: `layout.json`, for the page of the run.
#
# The page is written by a process without JAX, from files alone. So a run stores its drawings at
# its start: the mesh, and the largest parameters, one for each way of sharding.

MOST_DRAWINGS = 6
MOST_DEVICES = 1024  # of a mesh that is drawn


def stored_layout(job: Job) -> dict[str, Any]:
  """Returns what `layout.json` holds."""
  side = Side("", job)
  schedule = job.program.pipeline
  small = job.mesh.size <= MOST_DEVICES
  drawn = [
    {"names": names, "sheet": dataclasses.asdict(side.drawing(placement))}
    for names, placement in (_ways(job.placements["parameters"])[:MOST_DRAWINGS] if small else ())
  ]
  return {
    "caption": side.caption,
    "mesh": dataclasses.asdict(side.mesh) if small else None,
    "parameters": job.parameter_counts()[0],
    "bytes_per_device": side.stored,
    "replicated_bytes": rules.replicated_bytes(side.held, side.sizes),
    "drawings": drawn,
    "pipeline": schedule and {**dataclasses.asdict(schedule), "layers": job.config.model.layers},
  }


def _ways(parameters: Mapping[str, Placement]) -> list[tuple[list[str], Placement]]:
  """Returns (names, placement) of the parameters that are sharded alike, the largest first."""
  ways: dict[tuple, list[Placement]] = {}
  for p in parameters.values():
    ways.setdefault((p.shape, p.letters, str(p.spec)), []).append(p)
  found = [([p.name for p in same], same[0]) for same in ways.values()]
  return sorted(found, key=lambda one: -len(one[0]) * _whole_bytes(one[1]))


def _whole_bytes(placement: Placement) -> int:
  return math.prod(placement.shape) * np.dtype(placement.dtype).itemsize
