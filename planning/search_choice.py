"""Which of the estimated settings are compiled next, and which are the best: without JAX."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
  """What the compiler, or a short run, says about a setting.

  Attributes:
    estimate: the setting and what it takes by formula.
    bytes: per device, at the peak; 0 if it failed.
    seconds: of a step; None if it does not fit, or failed.
    failed: why; "" if it did not.
  """

  estimate: Estimate
  bytes: int
  seconds: float | None
  failed: str = ""

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


def front(points: Sequence[tuple[float, float]]) -> list[int]:
  """Returns the points that no other one is below in both numbers: the Pareto front, in order."""
  order = sorted(range(len(points)), key=lambda i: points[i])
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
