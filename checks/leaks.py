"""Leaks: which positions' outputs change when one token changes.

One token is changed at a time, and the outputs of every position of every row are compared with
those before, to the bit: a position that may not see the token must not change at all. What may be
seen follows from the description: causality, documents, windows, padding. Zeros among the
parameters, such as zero-initialized projections, would hide a leak, so noise is added to all.
"""

from collections.abc import Iterator

import jax
import numpy as np

from checks.case import Case, is_float, leaf_of, replaced, to_host
from checks.program import DescriptionError
from checks.report import Finding, Outcome

_MOST_POSITIONS = 48  # that are changed, in each of
_MOST_ROWS = 3
_WIDEST = 64  # columns of a drawing
# What a leak crosses -> its likely cause.
_CAUSES = {
  "border of a document": "the mask leaves out the documents: segments are not passed to the "
  "kernel, or are compared wrongly",
  "future": "the causal mask is missing, or is counted from the device's own block of positions",
  "window": "the window is longer than it says (the own position counts), or its mask is dropped",
  "padding": "padding is not masked where keys and values are read",
}


def check(case: Case, first: Case | None = None) -> Outcome:
  """Looks for leaks on one mesh."""
  del first
  describe = case.describe
  if describe.outputs is None or not describe.tokens:
    return Outcome("leaks", case.name, skipped="it needs describe.outputs and describe.tokens")
  tokens = leaf_of(case.rows, describe.tokens)
  if tokens.ndim != 2:
    shape = list(tokens.shape)
    raise DescriptionError(f"describe.tokens must be [rows, positions], and is {shape}")
  rows, places = _spread(tokens.shape[0], _MOST_ROWS), _spread(tokens.shape[1], _MOST_POSITIONS)
  real = leaf_of(case.rows, describe.segments) > 0 if describe.segments else tokens == tokens
  others = _changed(case, tokens, real, rows, places)
  chosen = np.arange(len(rows))
  own = others[chosen, :, rows]
  others[chosen, :, rows] = False
  expected = np.stack([expected_of(case, row, places) for row in rows])
  known = real[rows][:, None, :]  # outputs at padding are nobody's concern
  leaks = own & ~expected & known
  missing = expected & ~own & known & real[np.ix_(rows, places)][:, :, None]
  findings = list(_findings(case, rows, places, leaks, missing, others))
  worst = int(np.argmax((leaks | missing).sum((1, 2))))
  drawing = draw(expected[worst], own[worst], known[worst], places, rows[worst])
  if findings:
    findings[0] = Finding(**{**vars(findings[0]), "lines": drawing})
  note = f"{len(rows)} rows, {len(places)} of {tokens.shape[1]} positions changed in each"
  return Outcome("leaks", case.name, findings, note, lines=() if findings else drawing)


def _spread(size: int, most: int) -> np.ndarray:
  """Returns indices, spread evenly."""
  return np.unique(np.linspace(0, size - 1, min(size, most)).astype(int))


def expected_of(case: Case, row: int, places: np.ndarray) -> np.ndarray:
  """Returns [changed position, position]: whether the output may change."""
  describe = case.describe
  changed, seen = places[:, None], np.arange(leaf_of(case.rows, describe.tokens).shape[1])[None, :]
  back = seen - changed + describe.looks_ahead
  allowed = back >= 0 if describe.causal else np.ones(back.shape, bool)
  if describe.window:
    reach = describe.layers * (describe.window - 1) + describe.looks_ahead
    allowed &= (back <= reach) & (back >= -reach)
  if describe.segments:
    segments = leaf_of(case.rows, describe.segments)[row]
    allowed &= segments[changed] == segments[seen]
  return allowed


def _changed(case: Case, tokens, real, rows, places) -> np.ndarray:
  """Returns [row, changed position, B, T]: whether the outputs there differ from those before."""
  run = jax.jit(case.describe.outputs, in_shardings=case.shardings)
  state, _ = case.place(_noisy(case.start))

  def outputs(batch) -> np.ndarray:
    found = to_host(run(state, case.place(batch=batch)[1]))
    if found.shape[:2] != tokens.shape:
      raise DescriptionError(
        f"describe.outputs gives {list(found.shape)}, and must begin with {list(tokens.shape)}"
      )
    return found.reshape(*tokens.shape, -1)

  before = outputs(case.rows)
  changed = np.zeros((len(rows), len(places), *tokens.shape), bool)
  values = np.unique(tokens[real])  # without the one that pads
  for i, j in np.ndindex(*changed.shape[:2]):
    place, other = (rows[i], places[j]), tokens.copy()
    following = int(np.searchsorted(values, tokens[place], side="right"))
    other[place] = values[following % len(values)]
    after = outputs(replaced(case.rows, case.describe.tokens, other))
    changed[i, j] = ((after != before) & ~(np.isnan(after) & np.isnan(before))).any(-1)
  return changed


def _noisy(tree):
  draw = np.random.default_rng(0)

  def noisy(x):
    if not is_float(x):
      return x
    size = max(float(np.sqrt(np.mean(np.square(np.float64(x))))) if x.size else 0.0, 0.02)
    return (np.float64(x) + 0.3 * size * draw.standard_normal(x.shape)).astype(x.dtype)

  return jax.tree.map(noisy, tree)


def _findings(case, rows, places, leaks, missing, others) -> Iterator[Finding]:
  def where(i, j, t) -> str:
    return f"row {rows[i]}: the output at position {t} with the token at {places[j]}"

  if leaks.any():
    every = np.argwhere(leaks)
    kinds = [_crosses(case, rows[i], places[j], t) for i, j, t in every]
    counts = {name: kinds.count(name) for name in _CAUSES if name in kinds}
    cause = _CAUSES[max(counts, key=counts.__getitem__)]
    if {"border of a document", "future"} <= {*counts}:
      cause = "the mask is dropped, or what it adds to masked scores is not low enough"
    what = f"{len(every)} outputs change with a token that they must not see"
    yield Finding(what, where(*every[0]), counts, cause)
  if missing.any():
    yield Finding(
      f"{int(missing.sum())} outputs do not change with a token that they should see",
      where(*np.argwhere(missing)[0]),
      {"of": int(missing.size)},
      "a block of keys and values that is dropped, a window that is too short, a mask that cuts "
      "documents or blocks of the sequence too early",
    )
  if others.any():
    i, j, row, t = np.argwhere(others)[0]
    yield Finding(
      f"{int(others.sum())} outputs change with a token of another row",
      f"the output of row {row} at position {t} with the token of row {rows[i]} at {places[j]}",
      {"rows that change": len(np.unique(np.argwhere(others)[:, 2]))},
      "rows share something: statistics or scales of the whole batch, capacity of experts, rows "
      "that are joined to one sequence",
    )


def _crosses(case: Case, row: int, changed: int, seen: int) -> str:
  describe = case.describe
  if describe.segments:
    segments = leaf_of(case.rows, describe.segments)[row]
    if segments[changed] == 0:
      return "padding"
    if segments[changed] != segments[seen]:
      return "border of a document"
  future = describe.causal and seen + describe.looks_ahead < changed
  return "future" if future else "window"


def draw(expected, found, known, places, row) -> list[str]:
  """Returns the expected pattern beside the found one: a line for each changed position."""
  step, thin = -(-found.shape[1] // _WIDEST), max(1, len(places) // _WIDEST)
  marks = np.where(found & expected, "#", np.where(found, "L", np.where(expected, "o", ".")))
  left, right = (np.where(known, x, " ")[:, ::step] for x in (np.where(expected, "#", "."), marks))
  every = f", every {step}th" if step > 1 else ""
  legend = "   found   # changes  L leak  o should change and does not"
  pairs = zip(places[::thin], left[::thin], right[::thin], strict=True)
  return [
    f"row {row}; a line for each changed token, a column for each output{every}",
    f"       {'expected':<{left.shape[1]}}{legend}",
    *(f"{place:>5}  {''.join(a)}   {''.join(b)}".rstrip() for place, a, b in pairs),
  ]
