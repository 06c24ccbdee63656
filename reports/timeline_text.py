"""The timeline of a layer as text: a row of compute, a row per kind of transfer, and the gaps."""

from collections.abc import Iterator, Sequence

from planning.timeline import Bar, Gap, Layer, Timeline

WIDTH, LABEL = 76, 23  # of the rows, and of their names
LEGEND = "█ bound by matmuls  ▒ by HBM  ▓ an inner loop  · waiting  ▄ sending  ▁ in part of it"
_COMPUTE = {"matmul": "█", "HBM": "▒", "loop": "▓", "wait": "·"}
_MARKED = 0.01  # of a layer: the least wait that gets a number
_ROUNDING = 1e-6
_PARTS = 0.02  # of its compute: the least part that is named


def lines(timeline: Timeline | None) -> Iterator[str]:
  """Yields the lines; each fits 100 columns."""
  for layer in timeline.layers if timeline else ():
    yield from _layer(layer)
  if timeline and timeline.layers:
    yield f"  {LEGEND}"
  yield from missing_lines(timeline)
  if timeline:
    yield from gap_lines(timeline.gaps[:1])


def missing_lines(timeline: Timeline | None) -> Iterator[str]:
  """Yields what there is no timeline of, and why."""
  if timeline is None:
    yield "timeline of a layer: none without a compiled program"
  else:
    yield from (f"timeline of a layer: {missing}" for missing in timeline.missing)


def head(layer: Layer) -> str:
  """Returns the title of a layer with its times."""
  several = f"{layer.layers} layers" if layer.layers > 1 else "a layer"
  waits = sum(one.seconds for one in layer.waits)
  return (
    f"{several}, {layer.title}: {milliseconds(layer.seconds)} ms, of which it waits "
    f"{milliseconds(waits)} ms; {layer.runs} times a step"
  )


def where(layer: Layer) -> str:
  """Returns the line of the loop, and how many layers are outside of it."""
  others = f"{layer.outside} {'layer' if layer.outside == 1 else 'layers'} outside of it"
  at = layer.line and f"loop at {layer.line}"
  return "; ".join(filter(None, (at, layer.outside and others)))


def parts(layer: Layer) -> str:
  """Returns which functions the compute is in: `MLP 67 %, Attention 17 %`."""
  total = sum(layer.parts.values())
  shares = {name: seconds / total for name, seconds in layer.parts.items() if total}
  named = [f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= _PARTS]
  return ", ".join(named)


def gap_lines(gaps: Sequence[Gap]) -> Iterator[str]:
  """Yields the most expensive gaps: what is waited for, and the line of code that causes it."""
  for gap in gaps:
    each = f" ({gap.runs} x {milliseconds(gap.seconds / gap.runs)} ms)" if gap.runs > 1 else ""
    yield f"most expensive gap: {milliseconds(gap.seconds)} ms of a step{each}, to wait for"
    yield f"  the {gap.what}{gap.when and ', '}{gap.when}"
    line = gap.line or "its line of code is not in the program"
    yield from (f"  {part}" for part in line.replace(", through", ",\nthrough").splitlines())


def milliseconds(seconds: float) -> str:
  """Returns milliseconds with three digits, at most as many decimals: `0.006`, `3.73`, `117`."""
  value = 1e3 * seconds
  if value >= 100:
    return f"{value:,.0f}"
  return f"{value:.3g}" if value >= 0.1 or not value else f"{value:.3f}"


def _layer(layer: Layer) -> Iterator[str]:
  yield head(layer)
  if said := where(layer):
    yield f"  {said}"
  waits = [Bar(one.begin, one.end, "wait") for one in layer.waits]
  yield _row("compute", _computed([*layer.compute, *waits], layer.seconds))
  for name, bars in layer.transfers.items():
    yield _row(name, _sent(bars, layer.seconds))
  if numbers := _numbers(layer):
    yield _row("waiting, ms", numbers)
  if named := parts(layer):
    yield f"  compute is in {named}"


def _row(name: str, cells: str) -> str:
  name = name if len(name) < LABEL - 2 else f"{name[: LABEL - 6]}..."
  return f"  {name:<{LABEL - 2}}{cells}".rstrip()


def _shares(bars: Sequence[Bar], seconds: float) -> list[dict[str, float]]:
  """Returns for each cell how long the bars of each text are in it."""
  cells: list[dict[str, float]] = [{} for _ in range(WIDTH)]
  each = seconds / WIDTH
  for bar in bars:
    first, last = int(bar.begin / each), min(int(bar.end / each), WIDTH - 1)
    for at in range(first, last + 1):
      inside = min(bar.end, (at + 1) * each) - max(bar.begin, at * each)
      if inside > _ROUNDING * each:
        cells[at][bar.text] = cells[at].get(bar.text, 0.0) + inside
  return cells


def _computed(bars: Sequence[Bar], seconds: float) -> str:
  """Returns a character for each cell: what takes most of it."""
  cells = _shares(bars, seconds)
  return "".join(_COMPUTE[max(cell, key=cell.get)] if cell else " " for cell in cells)


def _sent(bars: Sequence[Bar], seconds: float) -> str:
  """Returns a character for each cell: by how much of it something is sent."""
  one = [Bar(bar.begin, bar.end, "") for bar in bars]
  cells = _shares(one, seconds)
  half = seconds / WIDTH / 2
  return "".join(("▄" if sum(cell.values()) >= half else "▁") if cell else " " for cell in cells)


def _numbers(layer: Layer) -> str:
  """Returns the milliseconds of the largest waits below them, as far as they do not overlap."""
  cells = [" "] * WIDTH
  for bar in sorted(layer.waits, key=lambda bar: -bar.seconds):
    text = milliseconds(bar.seconds)
    middle = int((bar.begin + bar.end) / 2 / layer.seconds * WIDTH)
    at = max(0, min(middle - len(text) // 2, WIDTH - len(text)))
    around = cells[max(at - 1, 0) : at + len(text) + 1]
    if bar.seconds >= _MARKED * layer.seconds and not "".join(around).strip():
      cells[at : at + len(text)] = text
  return "".join(cells).rstrip()
