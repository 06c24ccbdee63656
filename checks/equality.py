"""Equality: a step must give the same on every mesh.

The same state and batches are trained for three steps on two meshes. The arithmetic is float64
where the program allows it, and the bound of each tensor follows from the rounding that is measured
for it: the step on the first mesh with every sum taken in two halves. Where a tensor differs, both
programs are run again with their intermediate values recorded, and the first of these that differs
in the order of computation is named with its line.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from checks import jaxprs
from checks.case import Case, is_float, named_leaves, to_host, x64
from checks.program import DescriptionError
from checks.report import Finding, Outcome
from runtime.collectives import size_text

STEPS = 3
# The least bounds of relative L2 differences, by the width of the numbers, and the factor on what
# is measured: another mesh cuts sums into more parts than two.
LEAST = {"float64": 1e-11, "float32": 1e-5}
FACTOR = 10
_FLOOR = 1e-7  # of the largest tensor of its kind: below it, a tensor is zero but for rounding
_MOST_RECORDED = 2**30  # bytes
_ELEMENTWISE = (
  "every recorded product, sum and gather is equal: what comes after them elementwise, such as a "
  "factor; or the compiler, if it is gone where intermediate values are kept"
)


@dataclasses.dataclass(frozen=True)
class Trained:
  """Three steps of a program on one mesh.

  Attributes:
    dtype: of the arithmetic: float64 or float32, the latter also for narrower programs.
    tensors: name -> array, in the order of computation: the loss and gradients (or changes of the
      state) of the first step, the other losses, the state at the end.
  """

  dtype: str
  tensors: dict[str, np.ndarray]


def check(cases: Sequence[Case]) -> list[Outcome]:
  """Compares every mesh with the first one."""
  first, *others = cases
  reference, halves = reference_of(first)
  bounds = bounds_of(reference, halves)
  return [compare(first, reference, bounds, other) for other in others]


@functools.cache  # `invariance` asks for it again
def reference_of(case: Case) -> tuple[Trained, Trained]:
  """Returns a mesh's three steps, and the same with every sum in two halves."""
  wide = allows_float64(case)
  return train(case, wide=wide), train(case, wide=wide, halves=True)


def bounds_of(reference: Trained, halves: Trained) -> dict[str, float]:
  """Returns the bound of each tensor's relative difference."""
  measured = differences(reference.tensors, halves.tensors)
  return {name: max(LEAST[reference.dtype], FACTOR * one) for name, one in measured.items()}


def compare(
  first: Case, reference: Trained, bounds: dict[str, float], other: Case, *, record: bool = True
) -> Outcome:
  """Compares one mesh with the first one.

  Args:
    first: the mesh to compare with.
    reference: what was trained on it.
    bounds: of each tensor.
    other: the mesh that is compared.
    record: whether to look for the operation where a difference begins, which compiles twice.
  """
  findings = list(_initial(first, other))
  found = train(other, wide=reference.dtype == "float64", start=first.start)
  relative = differences(reference.tensors, found.tensors)
  beyond = {name: one for name, one in relative.items() if not one <= bounds[name]}
  if beyond:
    findings.append(_difference(first, other, reference, found, beyond, bounds, record))
  worst = max(relative, key=lambda name: relative[name] / bounds[name])
  note = f"{reference.dtype}, {len(relative)} tensors; nearest to its bound: {worst}, "
  note += f"{relative[worst]:.1e} of {bounds[worst]:.1e}"
  return Outcome("equality", other.name, findings, note)


# ---- Three steps ----


def widened(tree: Any) -> Any:
  """Returns a tree of the host with its floating-point leaves as float64."""
  return jax.tree.map(lambda x: np.asarray(x, np.float64) if is_float(x) else x, tree)


def allows_float64(case: Case) -> bool:
  """Returns whether a step takes a float64 state and returns one, and a float64 loss."""
  state, batch = widened(case.start), widened(case.rows)
  with x64(True):
    try:
      out, metrics = jax.eval_shape(case.program.step, state, batch)
    except Exception:  # whatever a program raises over a dtype that it does not know
      return False
  kept = jax.tree.map(lambda a, b: a.dtype == b.dtype, state, out)
  return all(jax.tree.leaves(kept)) and loss_of(metrics, case.describe.loss).dtype == np.float64


def train(case: Case, *, wide: bool, start: Any = None, halves: bool = False) -> Trained:
  """Trains three steps, each on a batch of its own.

  Args:
    case: the program.
    wide: in float64.
    start: the initial state, instead of the program's own.
    halves: with each sum in two halves.
  """
  cast = widened if wide else lambda tree: tree
  states = [cast(case.start if start is None else start)]
  batches = [cast(case.batch(number)) for number in range(STEPS)]
  losses, first = [], None
  with x64(wide):
    arguments = case.place(states[0], batches[0])
    step = jaxprs.in_halves(case.program.step, *arguments) if halves else None
    run, state = case.jitted(step), arguments[0]
    for number, batch in enumerate(batches):
      state, metrics = run(state, case.place(batch=batch)[1])
      first = first or metrics
      losses.append(np.asarray(loss_of(metrics, case.describe.loss)))
      if number in (0, STEPS - 1):
        states.append(to_host(state))
  if case.describe.gradients:
    its = _floats(first[case.describe.gradients])
    changes = {f"gradient of {name}": value for name, value in its.items()}
  else:
    before, after = _floats(states[0]), _floats(states[1])
    changes = {f"change of {name}": after[name] - before[name] for name in after}
  tensors = {"loss at step 1": losses[0], **changes}
  tensors |= {f"loss at step {i + 2}": loss for i, loss in enumerate(losses[1:])}
  tensors |= {f"{name} after step {STEPS}": value for name, value in _floats(states[-1]).items()}
  return Trained("float64" if wide else "float32", tensors)


def loss_of(metrics: Any, name: str) -> Any:
  """Returns the loss among the metrics. Raises DescriptionError if it is not there."""
  leaves = named_leaves(metrics)
  if name not in leaves:
    raise DescriptionError(f"the metrics have no {name!r} (Description.loss); {', '.join(leaves)}")
  return leaves[name]


def _floats(tree: Any) -> dict[str, np.ndarray]:
  leaves = named_leaves(to_host(tree))
  return {name: np.asarray(x, np.float64) for name, x in leaves.items() if is_float(x)}


def differences(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
  """Returns the relative L2 difference of each tensor.

  A tensor that is zero but for rounding, next to the largest of its kind, is measured by that one.
  """
  sizes: dict[str, float] = {}
  for name, value in ours.items():
    kind = name.split()[0]
    sizes[kind] = max(sizes.get(kind, 0.0), float(np.linalg.norm(value)))
  found = {}
  for name, value in ours.items():
    size = max(float(np.linalg.norm(value)), _FLOOR * sizes[name.split()[0]]) or 1.0
    difference = float(np.linalg.norm(value - theirs[name]))
    found[name] = difference / size if np.isfinite(difference) else np.inf
  return found


# ---- What differs, and where it begins ----


def _initial(first: Case, other: Case):
  """Yields a finding where the initial states differ beyond the last bits of a number."""
  ours, theirs = _floats(first.start), _floats(other.start)
  found = differences(ours, theirs)
  apart = [name for name, one in found.items() if not one <= 1e-6]
  if apart:
    yield Finding(
      f"{len(apart)} of {len(found)} leaves start with other values than on {first.name}",
      apart[0],
      {"relative difference": found[apart[0]]},
      "the initializer depends on how its result is sharded: a key folded with the place of a "
      "device, a random bit generator that is not partitionable, or a shape padded by the mesh",
    )


def _difference(first, other, reference, found, beyond, bounds, record) -> Finding:
  named = next(iter(beyond))
  place, cause, lines = "", "", []
  if record:
    place, cause, lines = _begins(first, other, reference, max(bounds.values()))
  numbers = {"relative difference": beyond[named], "bound": bounds[named]}
  if times := _times(reference.tensors[named], found.tensors[named], bounds[named]):
    numbers["times the one on the first mesh"] = times
    cause = "a sum over devices that is missing or taken twice, a mean of means, a factor"
  table = [f"{name:<48} {one:.1e} of {bounds[name]:.1e}" for name, one in beyond.items()]
  more = [f"... {len(table) - 8} more"] if len(table) > 8 else []
  return Finding(
    f"{named} differs from {first.name}; {len(beyond)} of {len(bounds)} tensors do",
    place or named,
    numbers,
    cause or "it is computed differently there",
    [*lines, *table[:8], *more],
  )


def _times(ours: np.ndarray, theirs: np.ndarray, bound: float) -> float | None:
  """Returns n or 1/n where theirs is so many times ours, for a whole n of 2 to 64; else None."""
  ratio = float((ours * theirs).sum() / ((ours * ours).sum() or 1.0))
  if not np.isfinite(ratio) or ratio <= 0:
    return None
  whole = round(ratio) if ratio > 1 else 1 / round(1 / ratio)
  near = np.linalg.norm(theirs - whole * ours) <= max(1e-4, bound) * np.linalg.norm(theirs)
  return float(whole) if near and whole != 1 and 1 / 64 <= whole <= 64 else None


def _begins(first: Case, other: Case, reference: Trained, widest: float):
  """Returns (where, likely cause, lines) of the first recorded result that differs."""
  wide = reference.dtype == "float64"
  bound = max(1e-8 if wide else 1e-3, widest)
  cast = widened if wide else lambda tree: tree
  recorded = []
  for case in (first, other):
    given, rows = cast(first.start), cast(first.rows)
    with x64(wide):
      arguments = case.place(given, rows)
      record = jaxprs.Recorder(case.program.step, *arguments)
      if record.bytes > _MOST_RECORDED:
        return "", "", [f"{size_text(record.bytes)} of activations: too many to be recorded"]
      values = case.jitted(record, out=False)(*arguments)
      recorded.append(record.labelled([np.asarray(value) for value in values]))
  label, difference, last, alone = jaxprs.first_difference(*recorded, bound)
  if label is None:
    return "", _ELEMENTWISE, []
  lines = [f"last that is equal: {last}"] if last else []
  own = {(one.operation, one.line): one for one in alone}  # of several results, the last
  lines += [f"on {other.name} alone: {one}" for one in [*own.values()][-3:]]
  lines.append(f"first that differs: {label}, by {difference:.1e}")
  blamed = alone[-1] if alone and label.operation != "shard_map" else label
  return str(blamed), jaxprs.likely(blamed), lines
