"""A search on one topology: workers estimate, compile and run; here is chosen what is next."""

import copy
import dataclasses
import json
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from commands import plan_process
from planning import search_results
from planning.search_results import Estimate, Found, Tried
from reports import search_report
from runtime import files
from runtime.units import clock
from training.metrics.console import say

# Settings by formula that are wanted for each that is compiled.
_SPARE = 2
# How often the best settings are run again at the end of a search on attached devices.
_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Asked:
  """What is searched.

  Attributes:
    config: as parsed, with overrides.
    title: of the config.
    axes: of the mesh, whose size is searched; () for all that the model has a use for.
    batches: rows of a step that are tried; () for those of the config.
    compilations: the most settings that are compiled on a topology.
    simulate: simulated devices instead of the attached ones.
    debug: shows the output of workers.
    command: the command line, which the pages of plans show.
  """

  config: ConfigDict
  title: str
  axes: tuple[str, ...] = ()
  batches: tuple[int, ...] = ()
  compilations: int = 6
  simulate: bool = False
  debug: bool = False
  command: str = ""


def of_topology(asked: Asked, name: str | None) -> Found:
  """Returns what is found on a topology; None: the attached devices.

  Raises:
    ValueError: every setting is refused.
  """
  most = max(_SPARE * asked.compilations, search_results.LISTED)
  place = plan_process.place(asked.config, name or "attached", f"search {asked.title}")
  request = {"axes": asked.axes, "batches": asked.batches, "most": most, "cache": str(place or "")}
  request["compilations"] = asked.compilations
  found = _answer("formulas", asked, name, request)
  estimates = tuple(Estimate(**one) for one in found.pop("estimates"))
  found = Found(**found, estimates=estimates)
  if not found.estimates:
    reasons = "\n".join(f"  {count} times: {why}" for why, count in [*found.refused.items()][:3])
    raise ValueError(f"every setting on {found.topology} is refused:\n{reasons}")
  if name is None:
    machine = f"{found.topology}.{platform.node()}"
    found = _measured(asked, found, place and place.with_name(f"{place.name}.{machine}.runs.jsonl"))
  elif found.compiled and asked.compilations:
    found = _compiled(asked, name, found)
  return found if found.fits else dataclasses.replace(found, nearest=_nearest(asked, name, found))


def _compiled(asked: Asked, name: str, found: Found) -> Found:
  """Returns a search with its best settings compiled, the config as given first."""
  tried: list[Tried] = []
  began = time.monotonic()
  while one := _next(asked, found, tried, trusted=True):
    label = f"search: {found.topology}, {len(tried) + 1} of at most {asked.compilations}"
    try:
      plan = plan_process.made(
        with_setting(asked.config, one.setting),
        name,
        title=asked.title,
        label=f"{label}, {one.mesh_text}",
        command=asked.command,
      )["plan"]
    except (ValueError, RuntimeError) as error:
      why = next(iter(str(error).splitlines()), "failed").removeprefix("error: ")
      tried.append(Tried(one, 0, None, why))
    else:
      size, seconds = plan["peak_bytes_per_device"], plan["step_seconds"]
      fits = plan["fits"] and plan["allocated_bytes_per_device"] <= found.limit
      tried.append(Tried(one, size, seconds["expected"] if fits else None))
    _say_tried(tried, search_results.COMPILER, began, asked.compilations - len(tried))
  return dataclasses.replace(found, tried=tried, source=search_results.COMPILER)


def _measured(asked: Asked, found: Found, kept: epath.Path | None = None) -> Found:
  """Returns a search with its best settings run for a few steps; the best of them again.

  Args:
    asked: what is searched.
    found: by formula.
    kept: where runs are kept until the search ends: one that was stopped does not repeat them.
  """
  if not asked.compilations:
    return found
  tried: list[Tried] = []
  runs = _Runs(asked, kept)
  began = time.monotonic()
  while one := _next(asked, found, tried, trusted=False):
    of = f"{len(tried) + 1} of {asked.compilations}"
    tried += runs.of([one], 1, f"search: {found.topology}, run {of}, {one.mesh_text}")
    more = asked.compilations - len(tried) + _ROUNDS // 2 * search_results.FINALISTS[0]
    _say_tried(tried, search_results.RUN, began, more)
  final = [one.estimate for one in search_results.finalists(tried)]
  if len(final) > 1:
    label = f"search: {found.topology}, the best {len(final)} again"
    again = {one.estimate.key: one for one in runs.of(final, _ROUNDS, label)}
    tried = [_faster(one, again.get(one.estimate.key, one)) for one in tried]
  if kept:
    kept.unlink(missing_ok=True)
  return dataclasses.replace(found, tried=tried, source=search_results.RUN)


def _say_tried(tried: Sequence[Tried], source: str, began: float, more: int) -> None:
  """Says what was found of the last setting, and how long the others take at most."""
  line = search_report.tried_line(len(tried), tried[-1], source)
  left = (time.monotonic() - began) / len(tried) * more
  say(f"{line}; {clock(left)} left at most" if more and left >= 1 else line)


def _faster(one: Tried, other: Tried) -> Tried:
  """Returns the faster one of two runs of a setting."""
  return min((one, other), key=lambda run: (run.seconds is None, run.seconds))


class _Runs:
  """Short runs of settings on the attached devices; a stopped search's are known."""

  def __init__(self, asked: Asked, kept: epath.Path | None):
    """Reads the runs that are kept."""
    self._asked, self._kept = asked, kept
    text = kept.read_text() if kept and kept.exists() else ""
    self._known = dict(map(json.loads, text.splitlines()))

  def of(self, estimates: Sequence[Estimate], rounds: int, label: str) -> list[Tried]:
    """Returns what is measured of settings, each in so many rounds."""
    settings = [one.setting for one in estimates]
    key = json.dumps([settings, rounds], sort_keys=True)
    if key not in self._known:
      request = {"settings": settings, "rounds": rounds}
      try:
        self._known[key] = _answer("measure", self._asked, None, request, label)
      except RuntimeError as error:
        failed = {"bytes": 0, "seconds": None, "failed": str(error)}
        return [Tried(one, **failed) for one in estimates]
      if self._kept:
        lines = (json.dumps(pair) for pair in self._known.items())
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        files.replace(self._kept, "\n".join(lines) + "\n")
    return [Tried(one, **run) for one, run in zip(estimates, self._known[key], strict=True)]


def _next(asked: Asked, found: Found, tried: Sequence[Tried], *, trusted: bool) -> Estimate | None:
  """Returns the setting to try next: the config as given, then those expected to be fastest.

  By short runs, in the second half of them first the best one's other divisions of the rows.
  """
  if len(tried) >= asked.compilations:
    return None
  given = [one for one in found.estimates if one.key == found.given]
  if given and not tried:
    return given[0]
  half = not trusted and 2 * len(tried) >= asked.compilations
  if half and (one := search_results.divided_otherwise(found.estimates, tried, found.limit)):
    return one
  return search_results.upcoming(found.estimates, tried, found.limit, trusted=trusted)


def _nearest(asked: Asked, name: str | None, found: Found) -> list[Any]:
  """Returns what would fit where nothing does, starting from what needs the least memory."""
  known = {one.estimate.key: one.bytes for one in found.tried if one.bytes}
  least = min(found.estimates, key=lambda one: known.get(one.key, one.bytes))
  scale = known.get(least.key, least.bytes) / least.bytes
  request = {"setting": least.setting, "scale": scale}
  ways = _answer("nearest", asked, name, request)
  return [({**least.setting, **more}, other, size) for more, other, size in ways]


def _answer(
  task: str,
  asked: Asked,
  topology: str | None,
  request: Mapping[str, Any],
  label: str = "search",
) -> Any:
  """Returns what a worker answers.

  Raises:
    ValueError: it refused.
    WorkerError: it failed.
  """
  given = {"task": task, "config": asked.config, "topology": topology, "simulate": asked.simulate}
  return plan_process.answer({**given, **request}, debug=asked.debug, label=label, say=say)


def with_setting(config: ConfigDict, setting: Mapping[str, Any]) -> ConfigDict:
  """Returns a copy of a config with the overrides of a setting."""
  config = copy.deepcopy(config)
  config.update_from_flattened_dict(dict(setting))
  return config
