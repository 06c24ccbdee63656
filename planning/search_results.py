"""What a search has found on a topology: its settings in order, and what would fit."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planning import search_choice, search_space
from planning.search_choice import Estimate, Tried

COMPILER, FORMULA, RUN = "compiler", "formula", "short run"
# Settings by formula alone that are listed.
LISTED = 8


@dataclasses.dataclass(frozen=True)
class Row:
  """A setting in the table.

  Attributes:
    estimate: by formula.
    bytes: per device, at the peak.
    seconds: of a step; None if it does not fit, or failed.
    source: of both: `COMPILER`, `FORMULA` or `RUN`.
    failed: why there are none; "" if there are.
    given: whether it is the config as it is.
    front: whether no other one takes both less memory and less time.
  """

  estimate: Estimate
  bytes: int
  seconds: float | None
  source: str
  failed: str = ""
  given: bool = False
  front: bool = False

  @property
  def seconds_per_token(self) -> float:
    """Returns the measure by which settings are compared; it must fit."""
    return self.seconds / self.estimate.tokens


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
  def best(self) -> Row | None:
    """Returns the fastest setting that fits."""
    return next((row for row in self.rows if row.seconds is not None), None)

  @property
  def as_given(self) -> Row | None:
    """Returns the config's own setting; None if it is not for these devices."""
    return next((row for row in self.rows if row.given), None)

  @property
  def rows(self) -> list[Row]:
    """Returns what was tried, the fastest first, then what failed; or the fastest by formula."""
    rows = list(self._rows())
    fit = [row for row in rows if row.seconds is not None]
    front = search_choice.front([(row.bytes, row.seconds_per_token) for row in fit])
    ahead = {fit[i].estimate.key for i in front}
    rows = [dataclasses.replace(row, front=row.estimate.key in ahead) for row in rows]
    return sorted(
      rows,
      key=lambda row: (row.seconds is None, row.seconds and row.seconds_per_token, row.bytes),
    )

  def _rows(self) -> Iterator[Row]:
    if self.source != FORMULA:
      for one in self.tried:
        given = one.estimate.key == self.given
        yield Row(one.estimate, one.bytes, one.seconds, self.source, one.failed, given)
      return
    fit = [one for one in self.estimates if one.fits(self.limit)]
    fit.sort(key=lambda one: (one.seconds_per_token, one.bytes))
    ahead = search_choice.front([(one.bytes, one.seconds_per_token) for one in fit])
    listed = {one.key for one in [*fit[:LISTED], *(fit[i] for i in ahead)]}
    for one in self.estimates:
      if one.key in listed:
        yield Row(one, one.bytes, one.seconds, FORMULA, given=one.key == self.given)
      elif one.key == self.given:
        seconds = one.seconds if one.fits(self.limit) else None
        yield Row(one, one.bytes, seconds, FORMULA, given=True)

  def rate(self, row: Row) -> float:
    """Returns the tokens per second and device."""
    return 1 / row.seconds_per_token / self.devices

  def hours(self, row: Row) -> float:
    """Returns the hours that the budget takes."""
    return self.budget * row.seconds_per_token / 3600

  def cost(self, row: Row) -> float | None:
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

  def _row_as_json(self, row: Row) -> dict[str, Any]:
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
      "source": row.source,
      "failed": row.failed,
      "as_given": row.given,
      "pareto": row.front,
    }
