"""Leaks: which positions' outputs change when one token changes.

One token is changed at a time, and the outputs of every position of every row are compared with
those before, to the bit: a position that may not see the token must not change at all. What may be
seen follows from the description: causality, documents, windows, padding. Zeros among the
parameters, such as zero-initialized projections, would hide a leak, so noise is added to all.
"""

from collections.abc import Sequence

import jax
import numpy as np

from checks.case import Case, is_float, leaf_of, replaced, to_host
from checks.program import DescriptionError
from checks.report import Finding, Outcome

_MOST_POSITIONS = 48  # that are changed, in each of
_MOST_ROWS = 3
_WIDEST = 64  # columns of a drawing


def check(cases: Sequence[Case]) -> list[Outcome]:
  """Looks for leaks on every mesh."""
  return [check_one(case) for case in cases]


def check_one(case: Case) -> Outcome:
  """Looks for leaks on one mesh."""
  describe = case.describe
  if describe.outputs is None or not describe.tokens:
    return Outcome("leaks", case.name, skipped="it needs describe.outputs and describe.tokens")
  tokens = leaf_of(case.rows, describe.tokens)
  rows, places = _chosen(tokens)
  changed = _changed(case, tokens, rows, places)
  expected = np.stack([expected_of(case, row, places) for row in rows])
  own = np.stack([changed[i, :, row] for i, row in enumerate(rows)])
  others = changed.copy()
  for i, row in enumerate(rows):
    others[i, :, row] = False
  known = _real(case, tokens)[rows][:, None, :]  # outputs at padding are nobody's concern
  leaks, missing = (
    own & ~expected & known,
    expected & ~own & known & _real(case, tokens)[np.ix_(rows, places)][:, :, None],
  )
  findings = list(_findings(case, rows, places, leaks, missing, others))
  worst = int(np.argmax((leaks | missing).sum((1, 2))))
  drawing = draw(expected[worst], own[worst], known[worst], places, rows[worst])
  note = f"{len(rows)} rows, {len(places)} of {tokens.shape[1]} positions changed in each"
  if findings:
    findings[0] = Finding(**{**vars(findings[0]), "lines": drawing})
  return Outcome("leaks", case.name, findings, note, lines=() if findings else drawing)


def _chosen(tokens: np.ndarray) -> tuple[list[int], np.ndarray]:
  """Returns the rows and the positions that are changed, spread evenly."""
  if tokens.ndim != 2:
    raise DescriptionError(
      f"describe.tokens must be [rows, positions], and is {list(tokens.shape)}"
    )
  rows = np.unique(np.linspace(0, len(tokens) - 1, _MOST_ROWS).astype(int)).tolist()
  count = min(tokens.shape[1], _MOST_POSITIONS)
  return rows, np.unique(np.linspace(0, tokens.shape[1] - 1, count).astype(int))


def _real(case: Case, tokens: np.ndarray) -> np.ndarray:
  """Returns [B, T]: which positions are not padding."""
  name = case.describe.segments
  return leaf_of(case.rows, name) > 0 if name else np.ones(tokens.shape, bool)


def expected_of(case: Case, row: int, places: np.ndarray) -> np.ndarray:
  """Returns [changed position, position]: whether the output may change."""
  describe = case.describe
  tokens = leaf_of(case.rows, describe.tokens)
  changed, seen = places[:, None], np.arange(tokens.shape[1])[None, :]
  back = seen - changed + describe.looks_ahead
  allowed = back >= 0 if describe.causal else np.ones(back.shape, bool)
  if describe.window:
    reach = describe.layers * (describe.window - 1) + describe.looks_ahead
    allowed &= (back <= reach) & (back >= -reach)
  if describe.segments:
    segments = leaf_of(case.rows, describe.segments)[row]
    allowed &= segments[places][:, None] == segments[None, :]
  return allowed


def _changed(case: Case, tokens, rows, places) -> np.ndarray:
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
  values = np.unique(tokens[_real(case, tokens)])  # without the one that pads
  for i, row in enumerate(rows):
    for j, place in enumerate(places):
      other = tokens.copy()
      at = int(np.searchsorted(values, tokens[row, place], side="right"))
      other[row, place] = values[at % len(values)]
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


def _findings(case, rows, places, leaks, missing, others):
  causes = {
    "document": "the mask leaves out the documents: segments are not passed to the kernel, or are "
    "compared wrongly",
    "future": "the causal mask is missing, or is counted from the device's own block of positions",
    "window": "the window is longer than it says (the own position counts), or its mask is dropped",
    "padding": "padding is not masked where keys and values are read",
  }
  if leaks.any():
    kinds = dict.fromkeys(causes, 0)
    for i, j, t in np.argwhere(leaks):
      kinds[_kind(case, rows[i], places[j], t)] += 1
    i, j, t = np.argwhere(leaks)[0]
    cause = causes[max(kinds, key=lambda name: kinds[name])]
    if kinds["document"] and kinds["future"]:
      cause = "the mask is dropped, or what it adds to masked scores is not low enough"
    yield Finding(
      f"{int(leaks.sum())} outputs change with a token that they must not see",
      f"row {rows[i]}: the output at position {t} with the token at {places[j]}",
      {
        f"over a border of {name}" if name == "document" else name: n
        for name, n in kinds.items()
        if n
      },
      cause,
    )
  if missing.any():
    i, j, t = np.argwhere(missing)[0]
    yield Finding(
      f"{int(missing.sum())} outputs do not change with a token that they should see",
      f"row {rows[i]}: the output at position {t} with the token at {places[j]}",
      {"of": int((leaks | missing).size)},
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


def _kind(case: Case, row: int, changed: int, seen: int) -> str:
  describe = case.describe
  if describe.segments:
    segments = leaf_of(case.rows, describe.segments)[row]
    if segments[changed] == 0:
      return "padding"
    if segments[changed] != segments[seen]:
      return "document"
  future = describe.causal and seen + describe.looks_ahead < changed
  return "future" if future else "window"


def draw(expected, found, known, places, row) -> list[str]:
  """Returns the expected pattern beside the found one: a line for each changed position."""
  step = -(-found.shape[1] // _WIDEST)
  every = slice(None, None, step)
  marks = np.where(found & expected, "#", np.where(found, "L", np.where(expected, "o", ".")))
  left, right = np.where(expected, "#", "."), np.where(known, marks, " ")
  left = np.where(known, left, " ")
  width = left[0][every].size
  shown = [
    f"row {row}; a line for each changed token, a column for each output"
    + (f", every {step}th" if step > 1 else ""),
    f"       {'expected':<{width}}   found   # changes  L leak  o should change and does not",
  ]
  thin = max(1, len(places) // _WIDEST)
  for i in range(0, len(places), thin):
    lines = ("".join(line[i][every]) for line in (left, right))
    shown.append(f"{places[i]:>5}  {'   '.join(lines)}".rstrip())
  return shown
