"""What is known of one key of a config."""

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.extensions import registered_names
from runtime.forms import MOST

# What a change of a key means where a run resumes. It does not change what is computed (up to
# rounding); it changes it from here on; it makes it a different run, to which the saved state does
# not belong.
MAY_CHANGE, ACCEPT, REFUSED = "may change", "needs acceptance", "refused"


@dataclasses.dataclass(frozen=True)
class Unset:
  """The default of a key that is derived where it is not set (`configs.schema.finalize`)."""

  kind: type


@dataclasses.dataclass(frozen=True)
class Required:
  """The default of a key that each recipe sets."""

  kind: type


DEFAULT = object()  # `off` of most keys


@dataclasses.dataclass(frozen=True)
class Key:
  """A row.

  Attributes:
    default: its value, `Unset` or `Required`.
    meaning: for help and docs/configuration.md.
    unit: of a number.
    least: the smallest number that it may be, unless it has `above`; see `smallest`.
    above: a number that it has to be above.
    below: a number that it has to be below.
    most: the largest whole number that it may be.
    finite: it may be any number but inf and nan.
    choices: the words that it may be, of the project's.
    registry: what a config file may register further words as (`runtime.extensions.Table`).
    usual: words that it often is; others are possible.
    resume: what a change means where a run resumes: `MAY_CHANGE`, `ACCEPT` or `REFUSED`; "": as for
      most keys of the section.
    readers: who reads it, where not everybody does; see `configs.schema.validate`.
    needs: what has to be on for it to be read: `model.experts`, `optimizer.schedule=wsd`, or one of
      several values, separated by `|`.
    excludes: what may not be on beside it, as `needs` names it -> why.
    off: its value where nobody reads it.
  """

  default: Any
  meaning: str = ""
  unit: str = ""
  least: float | None = None
  above: float | None = None
  below: float | None = None
  most: int = MOST
  finite: bool = False
  choices: tuple[str, ...] = ()
  registry: str = ""
  usual: tuple[str, ...] = ()
  resume: str = ""
  readers: tuple[str, ...] = ()
  needs: str = ""
  excludes: Mapping[str, str] = dataclasses.field(default_factory=dict)
  off: Any = DEFAULT

  def explained(self) -> str:
    """Returns the meaning behind the unit, in brackets, where it does not name that.

    Words that config files have registered come last.
    """
    named = not self.unit or self.unit in self.meaning
    meaning = self.meaning if named else f"[{self.unit}] {self.meaning}".rstrip()
    own = registered_names(self.registry)
    return f"{meaning}; registered: {', '.join(own)}" if own else meaning

  @property
  def words(self) -> tuple[str, ...]:
    """Returns the words that it may be, those of config files among them."""
    return self.choices + registered_names(self.registry)

  @property
  def unread(self) -> Any:
    """Returns its value where nobody reads it."""
    return self.default if self.off is DEFAULT else self.off

  @property
  def smallest(self) -> float | None:
    """Returns the smallest number that it may be: 1 of a whole one whose default is not 0, else 0.

    None where it has no such bound.
    """
    if self.least is not None or self.above is not None or self.finite:
      return self.least
    default = self.default
    kind = default.kind if isinstance(default, Unset | Required) else type(default)
    return int(kind is int and default != 0) if kind in (int, float) else None

  def range_errors(self, value: Any) -> Iterator[str]:
    """Yields what range a number is outside of; nothing for a value that is unset."""
    if value is None:
      return
    if isinstance(value, int) and value > self.most:
      yield f"at most {self.most:,}"
      return
    bounds = (
      ("at least", self.smallest, operator.ge),
      ("above", self.above, operator.gt),
      ("below", self.below, operator.lt),
    )
    given = [one for one in bounds if one[1] is not None]
    inside = all(math.isfinite(value) and holds(value, bound) for _, bound, holds in given)
    if not inside:
      yield " and ".join(f"{name} {bound}" for name, bound, _ in given)
    if self.finite and not math.isfinite(value):
      yield "a finite number"


Rows = Mapping[str, Key]


def shared(rows: Rows, **fields: Any) -> Rows:
  """Returns rows with fields that all of them have alike."""
  return {key: dataclasses.replace(row, **fields) for key, row in rows.items()}
