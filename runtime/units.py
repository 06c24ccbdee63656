"""Numbers as pages and tables show them; without JAX."""

import humanize


def size(count: float) -> str:
  """Returns bytes: `1.3 MiB`."""
  return humanize.naturalsize(count, binary=True)


def seconds(value: float) -> str:
  """Returns the time of something short: `3.19 s`, `12 ms`, `45 us`."""
  if value >= 1 or value == 0:
    return f"{value:,.3g} s" if value < 1000 else f"{value:,.0f} s"
  return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"


def number(value: float) -> str:
  """Returns a number with three digits, without an exponent unless it is huge or tiny."""
  if 1000 <= value < 1e15:
    return f"{round(value):,}" if value < 1e6 else humanize.intword(value, "%.3g")
  return f"{value:.3g}"


def clock(value: float) -> str:
  """Returns the time of something long: `1:02:03` or `2:03`."""
  minutes, rest = divmod(round(value), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(share: float) -> str:
  """Returns `37.2 %`."""
  return f"{100 * share:.1f} %"


def plain(value: object) -> str:
  """Returns a number of a table with five digits; other values as they are."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return str(value)
  if isinstance(value, int) or abs(value) >= 1e5:
    return f"{value:,.0f}"
  return f"{value:.5g}"
