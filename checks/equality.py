"""Equality: a step must give the same on every mesh.

The same state and batches are trained for three steps on two meshes. The arithmetic is float64
where the program allows it, and the bound of each tensor follows from the rounding that is measured
for it: the step on the first mesh with every sum taken in two halves. Where a tensor differs, both
programs are run again with their intermediate values recorded, and the first of these that differs
in the order of computation is named with its line.
"""

import difflib
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from checks import jaxprs
from checks.case import Case, is_float, named_leaves, to_host, x64
from checks.program import DescriptionError
from checks.report import SHOWN, Finding, Outcome
from runtime import units

STEPS = 3
# The least bounds of relative L2 differences, and the factor on what is measured: another mesh cuts
# sums into more parts than two.
LEAST, LEAST_IN_FLOAT32 = 1e-11, 1e-5
FACTOR = 10
_FLOOR = 1e-7  # of the largest tensor of its kind: below it, a tensor is zero but for rounding
_MOST_RECORDED = 2**30  # bytes
_ELEMENTWISE = (
  "every recorded product, sum and gather is equal: what comes after them elementwise, such as a "
  "factor; or the compiler, if it is gone where intermediate values are kept"
)
# Operation where a difference begins -> its likely cause.
_CAUSES = {
  "shard_map": "the function under shard_map: a psum over an axis that is missing or taken twice, "
  "a mean of the devices' means, or positions and masks counted from the device's own block",
  "random.*|threefry.*": "random numbers that depend on the sharding of the array they fill",
  "reduce_sum|dot_general|reduce_max|cumsum": "a sum over a dim that is cut over devices, taken of "
  "a part of it",
  ".*": "this operation, which is given the same and returns something else",
}


Tensors = dict[str, np.ndarray]  # by name, in the order of computation


def check(case: Case, first: Case, *, record: bool = True) -> Outcome | None:
  """Compares a mesh with the first one.

  Args:
    case: the mesh that is compared.
    first: the mesh to compare with.
    record: whether to look for the operation where a difference begins, which compiles twice.
  """
  if case is first:
    return None
  reference, bounds, wide = reference_of(first)
  found = train(case, wide=wide, start=first.start)
  relative = differences(reference, found)
  findings = list(_initial(first, case))
  if beyond := beyond_bounds(relative, bounds):
    findings.append(_difference(first, case, found, beyond, record))
  worst = max(relative, key=lambda name: relative[name] / bounds[name])
  note = (
    f"{'float64' if wide else 'float32'}, {len(relative)} tensors; nearest to its bound: {worst}, "
  )
  note += f"{relative[worst]:.1e} of {bounds[worst]:.1e}"
  return Outcome("equality", case.name, findings, note)


@functools.cache  # for the other meshes, and for `invariance`
def reference_of(case: Case) -> tuple[Tensors, dict[str, float], bool]:
  """Returns three steps of a mesh, the bounds of relative differences, and whether in float64."""
  wide = allows_float64(case)
  found, halves = (train(case, wide=wide, halves=halves) for halves in (False, True))
  least = LEAST if wide else LEAST_IN_FLOAT32
  measured = differences(found, halves)
  return found, {name: max(least, FACTOR * one) for name, one in measured.items()}, wide


def beyond_bounds(relative: dict[str, float], bounds: dict[str, float]) -> dict[str, float]:
  """Returns the differences that are beyond their bounds, or no numbers."""
  return {name: one for name, one in relative.items() if not one <= bounds[name]}


# ---- Three steps ----


def cast(tree: Any, *, wide: bool) -> Any:
  """Returns a tree of the host with its floating-point leaves as float64, if it is to be wide."""
  return jax.tree.map(lambda x: np.asarray(x, np.float64) if wide and is_float(x) else x, tree)


def allows_float64(case: Case) -> bool:
  """Returns whether a step takes a float64 state and returns one, and a float64 loss."""
  state, batch = cast((case.start, case.rows), wide=True)
  with x64(True):
    try:
      out, metrics = jax.eval_shape(case.program.step, state, batch)
    except Exception:  # whatever a program raises over a dtype that it does not know
      return False
  kept = jax.tree.map(lambda a, b: a.dtype == b.dtype, state, out)
  return all(jax.tree.leaves(kept)) and loss_of(metrics, case.describe.loss).dtype == np.float64


def train(case: Case, *, wide: bool, start: Any = None, halves: bool = False) -> Tensors:
  """Trains three steps, each on a batch of its own.

  Args:
    case: the program.
    wide: in float64; else in what the program computes in.
    start: the initial state, instead of the program's own.
    halves: with each sum in two halves.

  Returns:
    The loss and gradients (or changes of the state) of the first step, the other losses, and the
    state at the end.
  """
  states = [cast(case.start if start is None else start, wide=wide)]
  batches = [cast(case.batch(number), wide=wide) for number in range(STEPS)]
  found = []
  with x64(wide):
    arguments = case.place(states[0], batches[0])
    step = case.program.step
    if halves:
      halved = jaxprs.Replay(step, *arguments, rule=jaxprs.in_halves)
      step = lambda state, batch: halved(state, batch)[0]  # noqa: E731
    run, state = case.jitted(step), arguments[0]
    for batch in batches:
      state, metrics = run(state, case.place(batch=batch)[1])
      states.append(to_host(state))
      found.append(to_host(metrics))
  loss, *losses = (loss_of(metrics, case.describe.loss) for metrics in found)
  if case.describe.gradients:
    its = _floats(found[0][case.describe.gradients])
    changes = {f"gradient of {name}": value for name, value in its.items()}
  else:
    before, after = _floats(states[0]), _floats(states[1])
    changes = {f"change of {name}": after[name] - before[name] for name in after}
  tensors = {"loss at step 1": loss, **changes}
  tensors |= {f"loss at step {i + 2}": loss for i, loss in enumerate(losses)}
  return tensors | {f"{x} after step {STEPS}": value for x, value in _floats(states[-1]).items()}


def loss_of(metrics: Any, name: str) -> Any:
  """Returns the loss among the metrics. Raises DescriptionError if it is not there."""
  leaves = named_leaves(metrics)
  if name not in leaves:
    raise DescriptionError(f"the metrics have no {name!r} (Description.loss); {', '.join(leaves)}")
  return leaves[name]


def _floats(tree: Any) -> dict[str, np.ndarray]:
  leaves = named_leaves(to_host(tree))
  return {name: np.asarray(x, np.float64) for name, x in leaves.items() if is_float(x)}


def differences(ours: Tensors, theirs: Tensors) -> dict[str, float]:
  """Returns the relative L2 difference of each tensor.

  A tensor that is zero but for rounding, next to the largest of its kind, is measured by that one.
  One with infinities or NaNs differs from any.
  """
  sizes: dict[str, float] = {}
  for name, value in ours.items():
    kind = name.split()[0]
    sizes[kind] = max(sizes.get(kind, 0.0), float(np.linalg.norm(value)))
  return {
    name: apart(value, theirs[name], least=_FLOOR * sizes[name.split()[0]])
    if np.isfinite(value).all()
    else np.inf
    for name, value in ours.items()
  }


def apart(ours: np.ndarray, theirs: np.ndarray, least: float = 0.0) -> float:
  """Returns the relative L2 difference; infinities and NaNs at the same places are equal.

  Args:
    ours: an array.
    theirs: likewise.
    least: the norm of ours, where its own is smaller.
  """
  finite = np.isfinite(ours)
  if (finite != np.isfinite(theirs)).any():
    return np.inf
  ours, theirs = np.float64(ours[finite]), np.float64(theirs[finite])
  return float(np.linalg.norm(ours - theirs)) / (max(float(np.linalg.norm(ours)), least) or 1.0)


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


def _difference(first: Case, other: Case, found: Tensors, beyond, record: bool) -> Finding:
  reference, bounds, _ = reference_of(first)
  named = next(iter(beyond))
  place, cause, lines = _begins(first, other) if record else ("", "", [])
  numbers = {"relative difference": beyond[named], "bound": bounds[named]}
  if times := _times(reference[named], found[named], bounds[named]):
    numbers["times the one on the first mesh"] = times
    cause = "a sum over devices that is missing or taken twice, a mean of means, a factor"
  table = [f"{name:<48} {one:.1e} of {bounds[name]:.1e}" for name, one in beyond.items()]
  more = [f"... {len(table) - SHOWN} more"] if len(table) > SHOWN else []
  return Finding(
    f"{named} differs from {first.name}; {len(beyond)} of {len(bounds)} tensors do",
    place or named,
    numbers,
    cause or "it is computed differently there",
    [*lines, *table[:SHOWN], *more],
  )


def _times(ours: np.ndarray, theirs: np.ndarray, bound: float) -> float | None:
  """Returns n or 1/n where theirs is so many times ours, for a whole n of 2 to 64; else None."""
  ratio = float((ours * theirs).sum() / ((ours * ours).sum() or 1.0))
  if not np.isfinite(ratio) or ratio <= 0:
    return None
  whole = round(ratio) if ratio > 1 else 1 / round(1 / ratio)
  near = np.linalg.norm(theirs - whole * ours) <= max(1e-4, bound) * np.linalg.norm(theirs)
  return float(whole) if near and whole != 1 and 1 / 64 <= whole <= 64 else None


def _begins(first: Case, other: Case) -> tuple[str, str, list[str]]:
  """Returns (where, likely cause, lines) of the first recorded result that differs."""
  _, bounds, wide = reference_of(first)
  try:
    recorded = [_record(case, first, wide) for case in (first, other)]
  except MemoryError as error:
    return "", "", [str(error)]
  bound = max(1e-8 if wide else 1e-3, *bounds.values())
  label, difference, last, alone = first_difference(*recorded, bound)
  if label is None:
    return "", _ELEMENTWISE, []
  lines = [f"last that is equal: {last}"] if last else []
  own = {(one.operation, one.line): one for one in alone}  # of several results, the last
  lines += [f"on {other.name} alone: {one}" for one in [*own.values()][-3:]]
  lines.append(f"first that differs: {label}, by {difference:.1e}")
  blamed = alone[-1] if alone and label.operation != "shard_map" else label
  cause = next(text for name, text in _CAUSES.items() if re.fullmatch(name, blamed.operation))
  return str(blamed), cause, lines


@functools.cache  # of the first mesh, for all others
def _record(case: Case, first: Case, wide: bool) -> "Recorded":
  """Returns the intermediate values of a step from the first mesh's state and rows.

  Raises:
    MemoryError: there are too many.
  """
  with x64(wide):
    arguments = case.place(*cast((first.start, first.rows), wide=wide))
    replay = jaxprs.Replay(case.program.step, *arguments)
    if replay.bytes > _MOST_RECORDED:
      raise MemoryError(f"{units.size(replay.bytes)} of activations: too many to be recorded")
    values = case.jitted(lambda *given: replay(*given)[1], out=False)(*arguments)
    return list(zip(replay.labels, map(np.asarray, values), strict=True))


Recorded = Sequence[tuple[jaxprs.Label, np.ndarray]]  # in the order of the program


def first_difference(ours: Recorded, theirs: Recorded, bound: float):
  """Compares recorded values in the order of computation, those of scans by iteration.

  Args:
    ours: of a program.
    theirs: of another one; what only one of them has is left out.
    bound: of the relative L2 difference.

  Returns:
    (the first label that differs, its difference, the last one before it, the labels that theirs
    alone has between the two); the first is None if all are equal, the last before may be None.
  """
  one, other = _by_iteration(ours), _by_iteration(theirs)
  keys = ([(label, str(place)) for label, _, place in run] for run in (one, other))
  matched = difflib.SequenceMatcher(None, *keys, autojunk=False)
  last, alone = None, []
  for kind, i, end, j, stop in matched.get_opcodes():
    if kind != "equal":
      alone += [label for label, _, _ in other[j:stop]]
      continue
    for (label, value, place), (_, its, _) in zip(one[i:end], other[j:stop], strict=True):
      difference = apart(value[place], its[place])
      if not difference <= bound:
        return label, difference, last, alone
      last, alone = label, []
  return None, 0.0, last, []


def _by_iteration(recorded: Recorded) -> list[tuple[jaxprs.Label, np.ndarray, Any]]:
  """Returns (label, value, index) in the order of computation."""
  found = []
  for loop, group in itertools.groupby(recorded, lambda pair: pair[0].loop):
    inside = list(group)
    length, backwards = inside[0][0].shape[:1], inside[0][0].backwards
    steps = range(*length) if loop else [...]
    for place in reversed(steps) if backwards else steps:
      found += [(label, value, place) for label, value in inside]
  return found
