"""Budget: the collectives of the compiled step by mesh axis, and those that need not be there.

What is looked for: a gather of all layers' parameters at once; an all-reduce of gradients that are
then kept in full, where a reduce-scatter would do; rows of the batch that are gathered; what the
compiler replicates to change its sharding ("involuntary full rematerialization"); and more bytes
than the description allows.

On CPUs a reduce-scatter is compiled as an all-reduce of which each device takes its slice. That is
no finding: compilers for TPUs and GPUs join the two.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import jax

from checks import jaxprs
from checks.case import Case, axes_of, named_leaves
from checks.report import Finding, Outcome
from runtime import collectives, hlo
from runtime.collectives import size_text

# Collectives of a smaller part of the state than this are left alone: losses, norms.
LEAST_SHARE = 0.005


def check(cases: Sequence[Case]) -> list[Outcome]:
  """Reads the compiled step of every mesh of more than one device."""
  return [check_one(case) for case in cases if case.program.mesh.size > 1]


def check_one(case: Case) -> Outcome:
  """Reads the compiled step of one mesh."""
  records = collectives.collectives(case.compiled.text, case.program.mesh)
  state = _State(case)
  findings = [*_involuntary(case), *_over_budget(case, records)]
  findings += _gathered_at_once(case, records, state)
  findings += _rows_gathered(case, records, state)
  findings += _not_scattered(case, records, state)
  total = sum(one.bytes * one.count for one in records)
  note = f"{size_text(total)} per device in {sum(one.count for one in records)} collectives"
  return Outcome("budget", case.name, findings, note, lines=table(records))


class _State:
  """The shapes of the state's leaves, whole and as this mesh cuts them.

  Attributes:
    leaves: name -> (global shape, bytes of an element, the axes that cut each dim).
    least: bytes of a collective below which it is left alone.
    rows: the axes that cut the rows of the batch.
  """

  def __init__(self, case: Case):
    mesh = self.mesh = case.program.mesh
    leaves = named_leaves(case.start)
    shardings = jax.tree.leaves(case.shardings[0])
    self.leaves = {
      name: (
        leaf.shape,
        leaf.dtype.itemsize,
        [axes_of(sharding, leaf.shape, mesh, dim=i) for i in range(len(leaf.shape))],
      )
      for (name, leaf), sharding in zip(leaves.items(), shardings, strict=True)
    }
    self.least = LEAST_SHARE * sum(leaf.nbytes for leaf in leaves.values())
    rows = zip(jax.tree.leaves(case.rows), jax.tree.leaves(case.shardings[1]), strict=True)
    self.rows = set().union(*(axes_of(cut, leaf.shape, mesh, dim=0) for leaf, cut in rows))

  def axes(self, name: str) -> set[str]:
    return set().union(*self.leaves[name][2])

  def bytes(self, name: str) -> int:
    shape, width, _ = self.leaves[name]
    return math.prod(shape) * width

  def dims(self, name: str, whole: set[str]) -> list[int]:
    """Returns the dims that a device has of a leaf which is not cut over the axes `whole`."""
    shape, _, cut = self.leaves[name]
    parts = (math.prod(self.mesh.shape[axis] for axis in axes - whole) for axes in cut)
    return [size // part for size, part in zip(shape, parts, strict=True)]

  def sizes(self, name: str) -> set[int]:
    """Returns the numbers of elements that a device may have of a leaf or of one of its layers."""
    shape, _, _ = self.leaves[name]
    parts = {1}
    for axis in self.axes(name):
      parts |= {part * self.mesh.shape[axis] for part in parts}
    layers = {1, *shape[:1]}
    return {math.prod(shape) // part // layer for part in parts for layer in layers}


def _same(shape: Sequence[int], other: Sequence[int]) -> bool:
  """Returns whether two shapes have the same dims but for their order and dims of 1."""
  return sorted(d for d in shape if d > 1) == sorted(d for d in other if d > 1)


def table(records: Sequence[collectives.Collective]) -> list[str]:
  """Returns a line per kind, axes and place: inside or outside of loops."""
  sums: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
  for one in records:
    row = sums[one.kind, "+".join(one.axes), "in loops" if one.in_loop else "outside"]
    row[0] += one.count
    row[1] += one.count * one.bytes
  rows = sorted(sums.items(), key=lambda item: -item[1][1])
  return [
    f"{kind:<18} {axes:<16} {place:<8} {count:>5} x {size_text(size / (count or 1)):>10} = "
    f"{size_text(size):>10}"
    for (kind, axes, place), (count, size) in rows
  ]


def _where(record: collectives.Collective) -> str:
  name, _, line = jaxprs.short(record.source).rpartition(" (")
  name = name if len(name) < 60 else f"...{name[-56:]}"
  place = "in a loop" if record.in_loop else "outside of loops"
  return f"{name} ({line}, {place}" if name else f"{line or record.name}, {place}"


def _shapes(case: Case, record: collectives.Collective) -> list[list[int]]:
  """Returns the shapes of the arrays that a collective returns."""
  for computation in case.compiled.program.computations.values():
    instruction = computation.instructions.get(record.name)
    if instruction is not None:
      return [_dims(shape) for shape in hlo.elements(instruction.shape) or [instruction.shape]]
  return []


def _dims(shape: str) -> list[int]:
  dims = re.search(r"\[([^\]]*)\]", shape)
  return [int(dim) for dim in dims[1].split(",") if dim] if dims else []


# ---- What need not be there ----


def _involuntary(case: Case) -> Iterator[Finding]:
  said = [line for line in case.compiled.said.splitlines() if "nvoluntary full remat" in line]
  if not said:
    return
  operations = [re.search(r"operation:? %?([\w.\-]+) = (\w+\[[\d,]*\])", line) for line in said]
  frames = case.compiled.program.frames
  places = [_operation_place(line, frames) for line in said]
  named = [f"{one[1]} {one[2]}" if one else "an operation" for one in operations]
  shardings = [re.search(r"from sharding (\{.*?\}) to (\{.*?\})", line) for line in said]
  lines = dict.fromkeys(
    f"{name} at {place or 'an unknown line'}" + (f": {cut[1]} -> {cut[2]}" if cut else "")
    for name, place, cut in zip(named, places, shardings, strict=True)
  )
  yield Finding(
    f"the compiler replicates {len(lines)} tensors to change their sharding",
    f"{named[0]} at {places[0] or 'an unknown line'}",
    {"warnings of involuntary full rematerialization": len(said)},
    "two sharding constraints that no collective leads between, or a gather from a table whose dim "
    "is sharded over the axis that cuts the rows: constrain the operand before it",
    list(lines)[:8],
  )


def _operation_place(line: str, frames) -> str:
  name, place = hlo.op_name(line), next(iter(hlo.stack(frames, line)), None)
  return " ".join(filter(None, (name, place and f"({jaxprs.short(str(place))})")))


def _over_budget(case: Case, records) -> Iterator[Finding]:
  for key, most in case.describe.budget.items():
    *kind, axes = key.split()
    ours = [one for one in records if "+".join(one.axes) == axes and (not kind or one.kind in kind)]
    total = sum(one.bytes * one.count for one in ours)
    if total > most:
      largest = max(ours, key=lambda one: one.bytes * one.count)
      yield Finding(
        f"{key} takes more than describe.budget allows",
        _where(largest),
        {"total_bytes": total, "budget_bytes": most, "runs": sum(one.count for one in ours)},
        "a collective was added, or one moved into a loop",
        table(ours),
      )


def _expected(case: Case, record: collectives.Collective) -> bool:
  """Returns whether the description has a budget for these collectives."""
  axes = "+".join(record.axes)
  return axes in case.describe.budget or f"{record.kind} {axes}" in case.describe.budget


def _gathered_at_once(case: Case, records, state: _State) -> Iterator[Finding]:
  """Yields a finding where stacked parameters are gathered before the scan that uses them."""
  scanned = _scanned(case)  # a trace of the step
  stacked = {name for name, (shape, *_) in state.leaves.items() if shape in scanned}
  stacked = {name for name in stacked if state.axes(name)}
  found: dict[str, collectives.Collective] = {}
  for one in records:
    if one.kind != "all-gather" or one.in_loop or one.bytes < state.least or _expected(case, one):
      continue
    if not _of_parameter(case, one.name):
      continue
    for name in stacked:
      for whole in ({*one.axes}, state.axes(name)):
        if any(_same(shape, state.dims(name, whole)) for shape in _shapes(case, one)):
          found[name] = one
  size, every = (sum(map(state.bytes, names)) for names in (found, stacked))
  if not found or size < 0.3 * every:
    return
  largest = max(found.values(), key=lambda one: one.bytes)
  yield Finding(
    f"the parameters of all {state.leaves[next(iter(found))][0][0]} layers are gathered at once, "
    "before the scan over layers",
    _where(largest),
    {"leaves": len(found), "gathered_bytes": size, "of sharded stacked leaves_bytes": every},
    "a sharding constraint or a cast of the stacked parameters outside of the scan, or gathers "
    "that the compiler moved out of it; every device then holds all layers",
    [f"{size_text(one.bytes):>10}  {name}: {_where(one)}" for name, one in list(found.items())[:8]],
  )


def _of_parameter(case: Case, name: str) -> bool:
  """Returns whether an instruction of ENTRY only moves an argument of the program."""
  program = case.compiled.program
  instructions = program.computations[program.entry].instructions
  while name in instructions:
    instruction = instructions[name]
    if instruction.opcode == "parameter":
      return True
    moved = (*_MOVED, "all-gather", "collective-permute", "fusion", "call")
    if instruction.opcode not in moved or not instruction.operands:
      return False
    name = instruction.operand_names[0]
  return False


def _scanned(case: Case) -> set[tuple[int, ...]]:
  """Returns the shape of each array that a scan of the step takes slices of."""
  closed, _ = jaxprs.step_jaxpr(case.program.step, *case.place())
  found = set()

  def visit(jaxpr):
    for equation in jaxpr.eqns:
      if equation.primitive.name == "scan":
        length = equation.params["length"]
        shapes = (tuple(atom.aval.shape) for atom in equation.invars)
        found.update(shape for shape in shapes if shape and shape[0] == length > 1)
      if inner := jaxprs.called(equation):
        visit(inner[0])

  visit(closed.jaxpr)
  return found


def _rows_gathered(case: Case, records, state: _State) -> Iterator[Finding]:
  """Yields a finding where something that is no parameter is gathered over the batch's axes."""
  known = set().union(*(state.sizes(name) for name in state.leaves))
  found = [
    one
    for one in records
    if one.kind == "all-gather"
    and set(one.axes) <= state.rows
    and one.bytes >= state.least
    and not known & set(map(math.prod, _shapes(case, one)))
    and not _expected(case, one)
  ]
  if not found:
    return
  found.sort(key=lambda one: -one.bytes * one.count)
  largest = found[0]
  axes = "+".join(largest.axes)
  yield Finding(
    f"activations are gathered over {axes}, which cuts the batch",
    _where(largest),
    {"one_bytes": largest.bytes, "runs": sum(one.count for one in found)}
    | {"total_bytes": sum(one.bytes * one.count for one in found)},
    "a sharding constraint without the batch's axes, or an operation over rows: each device then "
    "computes the rows of all; if it is meant, give it a budget in describe.budget",
    [f"{size_text(one.bytes):>10} x {one.count}  {_where(one)}" for one in found[:8]],
  )


def _not_scattered(case: Case, records, state: _State) -> Iterator[Finding]:
  """Yields a finding for gradients of sharded parameters that are reduced and kept in full."""
  program, found, scanned = case.compiled.program, {}, _scanned(case)
  for one in records:
    if one.kind != "all-reduce" or one.bytes < state.least or _expected(case, one):
      continue
    computations = program.computations.values()
    computation = next(each for each in computations if one.name in each.instructions)
    for shape, name in _results(computation, one.name):
      for leaf in state.leaves:
        axes = state.axes(leaf) & set(one.axes) & state.rows
        dims = state.dims(leaf, axes)
        ours = _same(_dims(shape), dims)
        if one.in_loop and state.leaves[leaf][0] in scanned:  # of one layer
          ours = ours or (len(dims) > 2 and _same(_dims(shape), dims[1:]))
        if axes and ours and len(dims) > 1 and _kept(program, computation, name):
          found[leaf] = one
  if not found:
    return
  largest = max(found.values(), key=lambda one: one.bytes)
  yield Finding(
    f"the gradients of {len(found)} sharded leaves are all-reduced, and kept in full everywhere",
    _where(largest),
    {"leaves_bytes": sum(map(state.bytes, found)), "one all-reduce_bytes": largest.bytes},
    "a reduce-scatter would do, with half of the bytes: the gradients are constrained to be "
    "replicated, or something of all of them (a norm, a cast) is computed before they are sharded",
    [f"{name}: {_where(one)}" for name, one in list(found.items())[:8]],
  )


def _results(computation: hlo.Computation, name: str) -> Iterator[tuple[str, str]]:
  """Yields (shape, instruction) of each array that an instruction returns."""
  instruction = computation.instructions[name]
  if not instruction.shape.startswith("("):
    yield instruction.shape, name
    return
  for one in computation.instructions.values():
    if one.opcode == "get-tuple-element" and one.operand_names[0] == name:
      yield one.shape, one.name


_MOVED = ("bitcast", "copy", "convert", "reshape", "transpose", "get-tuple-element")


def _kept(program: hlo.Program, computation: hlo.Computation, name: str) -> bool:
  """Returns whether a value is used in full, and not only its slices; as far as it can be seen."""
  for user in computation.instructions.values():
    if name not in user.operand_names:
      continue
    if user.opcode in _MOVED:
      if _kept(program, computation, user.name):
        return True
    elif user.opcode in ("fusion", "call"):
      inner = program.computations[user.called()[0]]
      for place, operand in enumerate(user.operand_names):
        if operand == name and _kept(program, inner, _parameter(inner, place)):
          return True
    elif user.opcode not in ("dynamic-slice", "slice", "tuple", "while", "conditional"):
      return True
  return False


def _parameter(computation: hlo.Computation, place: int) -> str:
  return next(
    one.name
    for one in computation.instructions.values()
    if one.opcode == "parameter" and int(one.operands[0]) == place
  )
