"""Estimates of a search: which are compiled next, which are the best, and what would fit.

Without JAX: the process that asks for a search does not import it.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from planning import search_space

# Seconds that a setting must be expected to take to be compiled, as a share of the best one's.
WORTH = 0.99
# How far below the formulas the time of a setting may be that is unlike those tried so far.
UNLIKE = 0.95
# Settings whose expected times differ by less than this share count as equally fast.
TIE = 0.002
# Of the time of the best one: what is slower in a single run, or by formula, is slower. Twice what
# runs of one setting differ by on simulated devices.
NEAR = 1.1
# The fewest and the most settings that are run again.
FINALISTS = (3, 6)


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A setting, and what it takes by formula.

  Attributes:
    setting: overrides that differ from the config.
    mesh: axis -> size over all slices, of the axes larger than 1.
    bytes: per device, at the peak.
    of_rows: those of them that microbatches divide.
    sums: those that several microbatches take in addition, for the sum of their gradients.
    seconds: of a step.
    compute: seconds of its matmuls.
    tokens: of a step, of all devices; examples of a task without tokens.
    rows: of a device, which microbatches divide.
    chunks: of the loss.
    rematerialization: what a layer saves.
    microbatches: of a step; with pipeline stages the product of the pipeline's and those whose
      gradients are accumulated.
    refused: why there is no such job; "" if there is.
  """

  setting: dict[str, Any]
  mesh: dict[str, int] = dataclasses.field(default_factory=dict)
  bytes: int = 0
  of_rows: int = 0
  sums: int = 0
  seconds: float = 0.0
  compute: float = 0.0
  tokens: int = 0
  rows: int = 1
  chunks: int = 1
  rematerialization: str = ""
  microbatches: int = 1
  refused: str = ""

  @property
  def seconds_per_token(self) -> float:
    """Returns the measure by which settings are compared, also with another batch size."""
    return self.seconds / self.tokens

  @property
  def key(self) -> str:
    """Returns the overrides as JSON."""
    return json.dumps(self.setting, sort_keys=True)

  @property
  def mesh_text(self) -> str:
    """Returns `fsdp=16 x tensor=4`."""
    return " x ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one device"

  def fits(self, limit: float) -> bool:
    """Returns whether it may run on a device with so many bytes, by formula."""
    return not self.refused and self.bytes <= limit


@dataclasses.dataclass(frozen=True)
class Tried:
  """What the compiler, a short run, or a formula says about a setting: a row of the table.

  Attributes:
    estimate: the setting and what it takes by formula.
    bytes: per device, at the peak; 0 if it failed.
    seconds: of a step; None if it does not fit, or failed.
    failed: why; "" if it did not.
    given: whether it is the config as it is.
    front: whether no other one takes both less memory and less time.
  """

  estimate: Estimate
  bytes: int
  seconds: float | None
  failed: str = ""
  given: bool = False
  front: bool = False

  @property
  def seconds_per_token(self) -> float:
    """Returns the measure by which settings are compared; it must fit."""
    return self.seconds / self.estimate.tokens


def upcoming(
  estimates: Iterable[Estimate], tried: Sequence[Tried], limit: float, *, trusted: bool
) -> Estimate | None:
  """Returns the setting to compile next; None if no other is expected to be better.

  The formulas are corrected by the ratios of what was found: by that of the same mesh, else by the
  smallest one of meshes that `data` and `fsdp` alone tell apart, else by the smallest one. What is
  unlike everything tried so far may be better than that by `UNLIKE`.

  Args:
    estimates: by formula.
    tried: so far.
    limit: bytes of a device.
    trusted: whether to stop where no setting is expected to be faster than the best one.
  """
  ran = [one for one in tried if one.seconds is not None]
  ratios = {one.estimate.mesh_text: one.seconds / one.estimate.seconds for one in ran}
  memory = {one.estimate.mesh_text: one.bytes / one.estimate.bytes for one in tried if one.bytes}
  least, near = min(ratios.values(), default=1.0), {}
  for one in ran:
    near[_inner(one.estimate)] = min(
      ratios[one.estimate.mesh_text], near.get(_inner(one.estimate), math.inf)
    )
  done, alike = {one.estimate.key for one in tried}, {_kind(one.estimate) for one in tried}

  def expected(one: Estimate) -> float:
    ratio = ratios.get(one.mesh_text, near.get(_inner(one), least))
    return one.seconds_per_token * ratio * (1.0 if _kind(one) in alike else UNLIKE)

  def order(one: Estimate) -> tuple[float, int, int]:
    # Of those that hardly differ the one with fewer overrides, and then with less memory.
    return round(math.log(expected(one)) / TIE), len(one.setting), one.bytes

  left = [
    one
    for one in estimates
    if one.key not in done and one.fits(limit / memory.get(one.mesh_text, 1.0))
  ]
  found = min(left, key=order, default=None)
  if found is None or not ran or not trusted:
    return found
  return found if expected(found) < WORTH * best(tried)[0].seconds_per_token else None


def divided_otherwise(
  estimates: Iterable[Estimate], tried: Sequence[Tried], limit: float
) -> Estimate | None:
  """Returns the best setting with its rows divided between `data` and `fsdp` in another way.

  What these cost beside each other the formulas do not know where collectives are copies: so each
  division is tried with the best table, not with others the divisions that were tried first.

  Args:
    estimates: by formula.
    tried: so far.
    limit: bytes of a device.

  Returns:
    The fastest by formula of those that are not tried and by formula take at most `NEAR` times as
    long as the best one; None if there is none.
  """
  ran = best(tried)
  if not ran:
    return None
  first = ran[0].estimate
  most = NEAR * first.seconds_per_token
  meshes = {one.estimate.mesh_text for one in tried if _kind(one.estimate) == _kind(first)}
  left = [
    one
    for one in estimates
    if _kind(one) == _kind(first) and one.mesh_text not in meshes and one.fits(limit)
    if one.seconds_per_token <= most
  ]
  return min(left, key=lambda one: (one.seconds_per_token, len(one.setting)), default=None)


def finalists(tried: Sequence[Tried]) -> list[Tried]:
  """Returns the settings that may be the fastest, as far as single runs tell: the fastest first."""
  ran = best(tried)
  near = [one for one in ran if one.seconds_per_token <= NEAR * ran[0].seconds_per_token]
  return (near if len(near) > FINALISTS[0] else ran[: FINALISTS[0]])[: FINALISTS[1]]


def _kind(one: Estimate) -> tuple[Any, ...]:
  """Returns what settings that take about the same time have in common."""
  return (_inner(one), one.rematerialization, one.microbatches, one.tokens)


def _inner(one: Estimate) -> tuple[Any, ...]:
  """Returns the mesh without `data` and `fsdp`, which divide the same rows."""
  return tuple((axis, size) for axis, size in one.mesh.items() if axis not in ("data", "fsdp"))


def best(tried: Sequence[Tried]) -> list[Tried]:
  """Returns the settings that fit, the fastest per token first."""
  return sorted(
    (one for one in tried if one.seconds is not None),
    key=lambda one: (one.seconds_per_token, one.bytes),
  )


def pareto_front(points: Iterable[tuple[float, float]]) -> list[int]:
  """Returns the points that no other one is below in both numbers: the Pareto front, in order."""
  points = [*points]
  order = sorted(range(len(points)), key=points.__getitem__)
  found, least = [], float("inf")
  for i in order:
    if points[i][1] < least:
      found.append(i)
      least = points[i][1]
  return found


def prices(given: Sequence[str], default: float, chips: Sequence[str]) -> Mapping[str, float]:
  """Returns chip -> price per chip-hour, of `v5p=4.2` or `4.2` for all.

  Args:
    given: values of `--price`.
    default: of `planning.price_per_chip_hour`; 0: unknown.
    chips: of the topologies that are searched.

  Raises:
    ValueError: a price that is no positive number, or of a chip that is not searched.
  """
  found = {chip: default for chip in chips if default}
  for text in given:
    chip, equals, value = text.rpartition("=")
    try:
      price = float(value)
    except ValueError:
      price = 0.0
    if not 0 < price < float("inf"):
      raise ValueError(f"--price={text}: give CHIP=PRICE per chip-hour, above 0, such as v5p=4.2")
    if equals and chip not in chips:
      raise ValueError(f"--price={text}: no topology has {chip!r}; searched are {', '.join(chips)}")
    found |= dict.fromkeys([chip] if equals else chips, price)
  return found


COMPILER, FORMULA, RUN = "compiler", "formula", "short run"
# Settings by formula alone that are listed.
LISTED = 8


@dataclasses.dataclass(frozen=True)
class Found:
  """A search on one topology.

  Attributes:
    topology: its name.
    note: how a cloud's name was interpreted; "" for other names.
    chip: its name.
    chips: of all slices.
    devices: of all slices, as JAX counts them.
    limit: bytes of a device that a setting may take.
    compiled: whether there is a compiler for it here.
    budget: tokens (or examples) to train on.
    unit: `tokens` or `examples`.
    over: overrides of mesh_dcn for the slices in the topology's name.
    given: the config's own setting, as a key of an estimate; None if it is not one.
    refused: why settings were refused -> how many.
    estimates: by formula.
    tried: by the compiler or short runs, in that order.
    source: of what was tried.
    price: per chip-hour; 0: unknown.
    nearest: what would fit, if nothing does: overrides, the topology if another, bytes by formula.
  """

  topology: str
  note: str
  chip: str
  chips: float
  devices: int
  limit: float
  compiled: bool
  budget: float
  unit: str
  given: str | None
  refused: Mapping[str, int]
  estimates: Sequence[Estimate]
  tried: Sequence[Tried] = ()
  source: str = FORMULA
  price: float = 0.0
  nearest: Sequence[tuple[dict[str, Any], str, int]] = ()
  over: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def fits(self) -> bool:
    """Returns whether any setting fits."""
    return self.best is not None

  @property
  def best(self) -> Tried | None:
    """Returns the fastest setting that fits."""
    return next((row for row in self.rows if row.seconds is not None), None)

  @property
  def as_given(self) -> Tried | None:
    """Returns the config's own setting; None if it is not for these devices."""
    return next((row for row in self.rows if row.given), None)

  @property
  def rows(self) -> list[Tried]:
    """Returns what was tried, the fastest first, then what failed; or the fastest by formula."""
    rows = self.tried if self.source != FORMULA else self._by_formula()
    fit = [row for row in rows if row.seconds is not None]
    ahead = {fit[i].estimate.key for i in pareto_front((r.bytes, r.seconds_per_token) for r in fit)}
    rows = [
      dataclasses.replace(row, given=key == self.given, front=key in ahead)
      for row in rows
      for key in [row.estimate.key]
    ]
    return sorted(
      rows,
      key=lambda row: (row.seconds is None, row.seconds and row.seconds_per_token, row.bytes),
    )

  def _by_formula(self) -> list[Tried]:
    """Returns the fastest settings, those of the Pareto front, and the config as given."""
    fit = [one for one in self.estimates if one.fits(self.limit)]
    fit.sort(key=lambda one: (one.seconds_per_token, one.bytes))
    ahead = pareto_front([(one.bytes, one.seconds_per_token) for one in fit])
    listed = {one.key for one in [*fit[:LISTED], *(fit[i] for i in ahead)]} | {self.given}
    return [
      Tried(one, one.bytes, one.seconds if one.fits(self.limit) else None)
      for one in self.estimates
      if one.key in listed
    ]

  def rate(self, row: Tried) -> float:
    """Returns the tokens per second and device."""
    return 1 / row.seconds_per_token / self.devices

  def hours(self, row: Tried) -> float:
    """Returns the hours that the budget takes."""
    return self.budget * row.seconds_per_token / 3600

  def cost(self, row: Tried) -> float | None:
    """Returns what the budget costs; None without a price."""
    return self.hours(row) * self.chips * self.price if self.price else None

  def as_json(self) -> dict[str, Any]:
    """Returns the part of search.json about this topology."""
    names = ("topology", "chip", "chips", "devices", "compiled", "unit", "source", "price")
    return {
      **{name: getattr(self, name) for name in names},
      "fits": self.fits,
      "limit_bytes_per_device": int(self.limit),
      "budget": self.budget,
      "refused": sum(self.refused.values()),
      "settings": [self._row_as_json(row) for row in self.rows],
      "by_formula": [
        {
          "overrides": search_space.text(one.setting),
          "peak_bytes_per_device": one.bytes,
          "step_seconds": one.seconds,
          "fits": one.fits(self.limit),
        }
        for one in self.estimates
      ],
      "nearest": [
        {"overrides": search_space.text(more), "topology": name, "peak_bytes_per_device": size}
        for more, name, size in self.nearest
      ],
    }

  def _row_as_json(self, row: Tried) -> dict[str, Any]:
    fits = row.seconds is not None
    return {
      "overrides": search_space.text(row.estimate.setting),
      "mesh": row.estimate.mesh,
      "fits": fits,
      "peak_bytes_per_device": row.bytes,
      "step_seconds": row.seconds,
      "step_seconds_by_formula": row.estimate.seconds,
      "peak_bytes_by_formula": row.estimate.bytes,
      "tokens_per_second_per_device": self.rate(row) if fits else None,
      "hours": self.hours(row) if fits else None,
      "cost": self.cost(row) if fits else None,
      "source": self.source,
      "failed": row.failed,
      "as_given": row.given,
      "pareto": row.front,
    }
