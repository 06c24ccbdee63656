"""What is wrong with a mixture: data.sources and data.stages."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from runtime.suggest import nearest

# Key of a source -> (its type, what stands for it where it is not given; None: it must be given).
KEYS = {
  "name": (str, None),
  "files": (str, None),
  "weight": (float, None),
  "evaluation_files": (str, ""),
  "text_feature": (str, ""),
  "maximum_epochs": (int, 1),
}
EXAMPLE = '({"name": "web", "files": "web/", "weight": 0.7}, ...)'


def wrong(data: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with data.sources and data.stages of a finalized config."""
  if not isinstance(data.sources, tuple) or not all(isinstance(s, Mapping) for s in data.sources):
    yield f"data.sources={data.sources!r}: a tuple of sources, such as {EXAMPLE}"
    return
  if not data.sources:
    if data.stages:
      yield "data.stages: there is no mixture; name its data.sources"
    return
  for key in ("files", "evaluation_files", "text_feature"):
    if data[key]:
      yield f"data.{key}={data[key]!r}: with data.sources, each source has its own {key}"
  faults = [line for number, source in enumerate(data.sources) for line in _source(source, number)]
  yield from faults
  if faults:
    return
  names = [source["name"] for source in data.sources]
  yield from (
    f"data.sources: {names.count(name)} sources have the name {name!r}; names must differ"
    for name in sorted({*names})
    if names.count(name) > 1
  )
  yield from _all_zero({s["name"]: s["weight"] for s in data.sources}, "data.sources")
  yield from _stages(data.stages, names)


def _source(source: Mapping[str, Any], number: int) -> Iterator[str]:
  where = f"data.sources, source {source.get('name') or number + 1!r}"
  for key in source:
    if key not in KEYS:
      yield f"{where}: unknown key {key!r}; a source has {', '.join(KEYS)}{nearest(key, KEYS)}"
  for key, (kind, default) in KEYS.items():
    if key not in source:
      if default is None:
        yield f"{where}: it has no {key}; such as {EXAMPLE}"
      continue
    value = source[key]
    if key == "weight":
      yield from _weight(value, where)
    elif type(value) is not kind:
      yield f"{where}: {key}={value!r} is not {'a text' if kind is str else 'an integer'}"
    elif key == "maximum_epochs" and value < 0:
      yield f"{where}: maximum_epochs={value}: at least 1, or 0 for no limit"
    elif key == "files" and not value:
      yield f"{where}: files='': name them"
    elif key == "name" and not re.fullmatch(r"[\w.-]+", value):
      yield f"{where}: the name is part of metrics' names; letters, digits, _ . and - only"


def _weight(value: Any, where: str) -> Iterator[str]:
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if not number or not 0 <= value < math.inf:
    yield f"{where}: weight={value!r}: a number of 0 or more"


def _all_zero(weights: Mapping[str, float], where: str) -> Iterator[str]:
  if not any(weights.values()):
    yield f"{where}: all weights are 0; at least one must be above 0"


def _stages(stages: Any, names: list[str]) -> Iterator[str]:
  example = f'((1000, {{"{names[0]}": 0.5}}),)'
  last = 0
  for stage in stages if isinstance(stages, tuple) else [stages]:
    pair = isinstance(stage, tuple) and len(stage) == 2
    if not (pair and type(stage[0]) is int and isinstance(stage[1], Mapping)):
      yield f"data.stages: {stage!r} is not a step with its weights, such as {example}"
      continue
    step, weights = stage
    where = f"data.stages, from step {step}"
    if step <= last:
      yield f"{where}: steps must ascend from 1; until then the weights of data.sources apply"
    last = max(last, step)
    for name, weight in weights.items():
      if name not in names:
        known = f"{', '.join(names)}{nearest(name, names)}"
        yield f"{where}: unknown source {name!r}; there are {known}"
      yield from _weight(weight, f"{where}, source {name!r}")
    yield from _all_zero(weights, where)
