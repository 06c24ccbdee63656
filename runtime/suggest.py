"""The suggestion at the end of a message about an unknown name: `; did you mean 'x'?`."""

import difflib
from collections.abc import Iterable

# Of difflib's ratio: 2 x matching characters / characters of both. Transposed letters in a name of
# three keep it (mlp, mpl: 0.67); names that share a few letters do not (wikitext, kitti: 0.62).
CUTOFF = 0.65


def closest(name: str, known: Iterable[str]) -> str | None:
  """Returns the known name that a misspelled one was meant to be; None where none is similar.

  Dotted names are compared part by part, so that a section which both share does not make two
  keys similar. The last part alone decides where a section was left out or is another one, and
  then it must be the same.
  """
  parts = name.split(".")

  def similarity(other: str) -> float:
    others = other.split(".")
    if len(parts) == len(others):
      similar = min(_ratio(*pair) for pair in zip(parts, others, strict=True))
      if similar >= CUTOFF:
        return similar
    return CUTOFF if "." in other and others[-1] == parts[-1] else 0.0

  best = max(known, key=similarity, default=None)
  return best if best is not None and similarity(best) >= CUTOFF else None


def nearest(name: str, known: Iterable[str]) -> str:
  """Returns `; did you mean 'x'?`, or nothing where no known name is similar."""
  found = closest(name, known)
  return f"; did you mean {found!r}?" if found is not None else ""


def most_similar(name: str, known: Iterable[str], count: int) -> list[str]:
  """Returns that many of the known names, the most similar first, however little they are."""
  return sorted(known, key=lambda other: -_ratio(name, other))[:count]


def _ratio(one: str, other: str) -> float:
  one, other = one.lower(), other.lower()
  ratio = difflib.SequenceMatcher(None, one, other).ratio()
  # A name that another one ends with is rather that (global_batch_size) than one that goes on
  # (batch_size_ramp).
  return ratio + 0.1 if ratio >= CUTOFF and other.endswith(f"_{one}") else ratio
