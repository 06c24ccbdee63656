"""The memory of a device as one stacked bar against its limit; of all pages."""

from collections.abc import Mapping
from typing import Any

from reports import units

SMALL = 0.1  # of the limit: what takes less is drawn to its own scale


def bar(
  parts: Mapping[str, float],
  limit: float | None = None,
  peak: float | None = None,
  *,
  beside: float = 0.0,
) -> dict[str, Any]:
  """Returns the bar for the macro `memory_bar` of a page.

  Args:
    parts: name -> bytes that are in memory together. A part has the color of its place.
    limit: of a device, in bytes; None where it is unknown.
    peak: measured, or by the compiler, where it is known besides the parts: a second line.
    beside: bytes of the longest bar beside this one, which has the same scale.
  """
  used = max(sum(parts.values()), peak or 0.0)
  within = limit is not None and max(used, beside) >= SMALL * limit
  most = max(used, beside, limit if within else 0.0) or 1.0
  text = units.size(used)
  if limit is not None:
    text += f" of {units.size(limit)} ({100 * used / limit:.3g} %)"
    text += "" if within else "; the bar is enlarged"
  return {
    "text": text,
    "parts": [
      {"name": name, "text": units.size(size), "percent": 100 * size / most, "number": number}
      for number, (name, size) in enumerate(parts.items())
    ],
    "limit": 100 * limit / most if within else None,
    "limit_text": "" if limit is None else f"memory of a device: {units.size(limit)}",
    "peak": None if peak is None else 100 * peak / most,
    "peak_text": "" if peak is None else f"peak: {units.size(peak)}",
  }
