"""Forms of JSON that others have written: key -> what its value must be, and what of it is not.

A file from outside may hold any type, or any number, under any key. Whoever reads one checks it by
a table first: a value without its form is refused by key, before it causes an error far from here.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

MOST = 2**31 - 1  # of a size or a number of things
MOST_LAYERS = 4096  # of a model; whoever reads its config makes a list of them
MOST_STEP = 2**53  # up to which floats are exact
MOST_NUMBER = 1e300  # sums of such numbers are finite
_NAMED = 8  # so many keys are named in a message
_LONGEST = 60  # characters of a value in it


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of value: what it is called, and how it is recognized."""

  name: str
  fits: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Each:
  """An object whose values, by any name, all have one form."""

  form: Any


@dataclasses.dataclass(frozen=True)
class Exactly:
  """An object with these keys and no others."""

  keys: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Needs:
  """An object with these keys, which may have `more`, and others."""

  keys: Mapping[str, Any]
  more: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class OrNull:
  """A value of a form, or null."""

  form: Any


def is_whole(value: Any, least: int = 0, most: float = math.inf) -> bool:
  """Returns whether a value is an int within limits; true and false are none."""
  return type(value) is int and least <= value <= most


def is_number(value: Any) -> bool:
  """Returns whether a value is a number that can be computed with; true and false are none."""
  return type(value) in (int, float) and abs(value) <= MOST_NUMBER


ANY = Kind("anything", lambda value: True)
TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
COUNT = Kind("an integer", is_whole)
NUMBER = Kind("a number", is_number)


def whole(least: int = 1, most: int = MOST) -> Kind:
  """Returns the kind of whole numbers within limits."""
  name = f"a whole number of at least {least:,} and at most {most:,}"
  return Kind(name, lambda v: is_whole(v, least, most))


SIZE, STEP = whole(), whole(0, MOST_STEP)
AT_LEAST_0 = Kind("a number of at least 0", lambda value: is_number(value) and value >= 0)
ABOVE_0 = Kind("a number above 0", lambda value: is_number(value) and value > 0)


def check(value: Any, form: Any, where: str) -> None:
  """Raises ValueError where a value has not its form: `WHERE: KEY: X is expected, Y is there`."""
  if found := [*wrong(value, form)]:
    raise ValueError(f"{where}: {'; '.join(first(found, _NAMED))}")


def first(lines: list[str], count: int) -> list[str]:
  """Returns the first lines of a message, and how many more there are."""
  more = len(lines) - count
  return [*lines[:count], *([f"and {more:,} more"] if more > 0 else [])]


def refusal(head: str, lines: list[str], most: int = MOST) -> ValueError:
  """Returns an error with a line for each thing that is wrong, and at most so many of them."""
  return ValueError("\n  ".join([head, *first(lines, most)]))


def wrong(value: Any, form: Any, name: str = "") -> Iterator[str]:
  """Yields a text for each part of a value that has not its form.

  A list with one form holds any number of such values; a tuple holds one of each form. Of an
  object, keys that are missing or unknown are passed over.
  """
  if isinstance(form, OrNull):
    if value is None:
      return
    form = form.form
  if isinstance(form, Kind):
    if not form.fits(value):
      yield _differs(name, form.name, value)
  elif isinstance(form, list | tuple):
    if not isinstance(value, list) or (isinstance(form, tuple) and len(value) != len(form)):
      what = f"a list of {len(form)}" if isinstance(form, tuple) else "a list"
      yield _differs(name, what, value)
      return
    forms = form if isinstance(form, tuple) else form * len(value)
    for index, (inner, its_form) in enumerate(zip(value, forms, strict=True)):
      yield from wrong(inner, its_form, f"{name}[{index}]")
  elif not isinstance(value, dict):
    yield _differs(name, "an object", value)
  else:
    yield from _wrong_keys(value, form, name)


def _wrong_keys(value: Mapping[str, Any], form: Any, name: str) -> Iterator[str]:
  if isinstance(form, Exactly) and set(value) != set(form.keys):
    keys = ", ".join(form.keys)
    yield f"{name}: the keys {keys} are expected, and {', '.join(value) or 'none'} are there"
  if isinstance(form, Needs):
    if missing := [key for key in form.keys if key not in value]:
      yield f"{name}{': ' if name else ''}{', '.join(missing)} is missing"
    form = {**form.keys, **form.more}
  forms = form.keys if isinstance(form, Exactly) else form
  for key, inner in value.items():
    its_form = form.form if isinstance(form, Each) else forms.get(key, ANY)
    if its_form is not ANY:
      yield from wrong(inner, its_form, f"{name}.{shortened(key)}" if name else shortened(key))


def _differs(name: str, what: str, value: Any) -> str:
  named = f"{name}: " if name else ""
  return f"{named}{what} is expected, and {shortened(json.dumps(value))} is there"


def shortened(text: str) -> str:
  """Returns a text as a message shows it."""
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def plain(config: ConfigDict) -> dict[str, Any]:
  """Returns a config as JSON has it: nested dicts, tuples as lists."""
  return json.loads(config.to_json_best_effort())


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns dotted key -> value, as JSON gives it back (tuples are lists)."""
  found = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      found.update(flat(value, f"{prefix}{key}."))
    else:
      found[prefix + key] = json.loads(json.dumps(value))
  return found
