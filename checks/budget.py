"""Budget: the collectives of the compiled step by mesh axis, and those that need not be there.

What is looked for: a gather of all layers' parameters at once; an all-reduce of gradients that are
then kept in full, where a reduce-scatter would do; rows of the batch that are gathered; what the
compiler replicates to change its sharding ("involuntary full rematerialization"); and more bytes
than the description allows.

On CPUs a reduce-scatter is compiled as an all-reduce of which each device takes its slice. That is
no finding: compilers for TPUs and GPUs join the two.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax

from checks import jaxprs
from checks.case import Case
from checks.report import SHOWN, Finding, Outcome, counted
from runtime import collectives, hlo, units
from runtime.collectives import Collective

# Collectives of a smaller part of the state than this are left alone: losses, norms.
LEAST_SHARE = 0.005


def check(case: Case, first: Case | None = None) -> Outcome | None:
  """Reads the compiled step of a mesh of more than one device."""
  del first
  if case.program.mesh.size == 1:
    return None
  records = collectives.collectives(case.text, case.program.mesh)
  least = LEAST_SHARE * sum(leaf.nbytes for leaf in case.leaves.values())
  budgets = set(case.describe.budget)
  large = [one for one in records if one.bytes >= least and not _names(one) & budgets]
  closed, _ = jaxprs.step_jaxpr(case.program.step, *case.place())
  scanned = jaxprs.scanned_shapes(closed.jaxpr)
  stacked = {name for name, leaf in case.leaves.items() if leaf.shape in scanned}
  findings = [*_involuntary(case), *_over_budget(case, records)]
  findings += _gathered_at_once(case, large, {name for name in stacked if any(case.cut[name])})
  findings += _rows_gathered(case, large)
  findings += _not_scattered(case, large, stacked)
  total = sum(one.bytes * one.count for one in records)
  note = f"{units.size(total)} per device in {sum(one.count for one in records)} collectives"
  return Outcome("budget", case.name, findings, note, lines=table(records))


def table(records: Sequence[Collective]) -> list[str]:
  """Returns the runs and bytes by kind and axes, in loops and outside."""
  places = {"in loops": True, "outside of loops": False}
  parts = {
    title: [one for one in records if one.in_loop == there] for title, there in places.items()
  }
  summary = lambda part: collectives.format_summary(collectives.summarize(part))  # noqa: E731
  return [
    line for title, part in parts.items() for line in (f"{title}:", *summary(part).split("\n"))
  ]


def _names(record: Collective) -> set[str]:
  """Returns the keys of describe.budget that a collective counts for."""
  axes = "+".join(record.axes)
  return {axes, f"{record.kind} {axes}"}


def _where(record: Collective) -> str:
  name, _, line = jaxprs.short(record.source).rpartition(" (")
  name = name if len(name) < 60 else f"...{name[-56:]}"
  place = "in a loop" if record.in_loop else "outside of loops"
  return f"{name} ({line}, {place}" if name else f"{line or record.name}, {place}"


def _rows_of(found: Mapping[str, Collective]) -> list[str]:
  return [f"{units.size(one.bytes):>10}  {name}: {_where(one)}" for name, one in found.items()][
    :SHOWN
  ]


# ---- What need not be there ----


def _involuntary(case: Case) -> Iterator[Finding]:
  said = [line for line in case.compiled[2] if "nvoluntary full remat" in line]
  found = []
  for line in said:
    operation = re.search(r"operation:? %?([\w.\-]+) = (\w+\[[\d,]*\])", line)
    place = jaxprs.short(hlo.source(case.hlo.frames, line)) or "an unknown line"
    cut = re.search(r"from sharding (\{.*?\}) to (\{.*?\})", line)
    name = " ".join(operation.groups()) if operation else "an operation"
    found.append((f"{name} at {place}", f": {cut[1]} -> {cut[2]}" if cut else ""))
  if found:
    lines = dict.fromkeys(map("".join, found))
    yield Finding(
      f"the compiler replicates {counted(len(lines), 'tensor', 'tensors')} to change the sharding",
      found[0][0],
      {"warnings of involuntary full rematerialization": len(said)},
      "two sharding constraints that no collective leads between, or a gather from a table whose "
      "dim is sharded over the axis that cuts the rows: constrain the operand before it",
      list(lines)[:SHOWN],
    )


def _over_budget(case: Case, records) -> Iterator[Finding]:
  for key, most in case.describe.budget.items():
    ours = [one for one in records if key in _names(one)]
    total = sum(one.bytes * one.count for one in ours)
    if total > most:
      yield Finding(
        f"{key} takes more than describe.budget allows",
        _where(max(ours, key=lambda one: one.bytes * one.count)),
        {"total_bytes": total, "budget_bytes": most, "runs": sum(one.count for one in ours)},
        "a collective was added, or one moved into a loop",
        table(ours),
      )


def _gathered_at_once(case: Case, records, stacked: set[str]) -> Iterator[Finding]:
  """Yields a finding where stacked parameters are gathered before the scan that uses them."""
  gathers = [one for one in records if one.kind == "all-gather" and not one.in_loop]
  found = {name: one for one in gathers for name in _origins(case, one.name) & stacked}
  size, every = (sum(case.leaves[name].nbytes for name in names) for names in (found, stacked))
  if not found or size < 0.3 * every:
    return
  yield Finding(
    f"the parameters of all {case.leaves[next(iter(found))].shape[0]} layers are gathered at once, "
    "before the scan over layers",
    _where(max(found.values(), key=lambda one: one.bytes)),
    {"leaves": len(found), "gathered_bytes": size, "of sharded stacked leaves_bytes": every},
    "a sharding constraint or a cast of the stacked parameters outside of the scan, or gathers "
    "that the compiler moved out of it; every device then holds all layers",
    _rows_of(found),
  )


def _rows_gathered(case: Case, records) -> Iterator[Finding]:
  """Yields a finding where something that is no parameter is gathered over the batch's axes."""
  known = set().union(*(_counts(case, name) for name in case.cut))
  found = [
    one
    for one in records
    if one.kind == "all-gather"
    and set(one.axes) <= case.row_axes
    and not known & {math.prod(dims) for _, dims in _arrays(case, one)[1]}
  ]
  if not found:
    return
  found.sort(key=lambda one: -one.bytes * one.count)
  largest = found[0]
  yield Finding(
    f"activations are gathered over {'+'.join(largest.axes)}, which cuts the batch",
    _where(largest),
    {"one_bytes": largest.bytes, "runs": sum(one.count for one in found)}
    | {"total_bytes": sum(one.bytes * one.count for one in found)},
    "a sharding constraint without the batch's axes, or an operation over rows: each device then "
    "computes the rows of all; if it is meant, give it a budget in describe.budget",
    [f"{units.size(one.bytes):>10} x {one.count}  {_where(one)}" for one in found[:SHOWN]],
  )


def _not_scattered(case: Case, records, stacked: set[str]) -> Iterator[Finding]:
  """Yields a finding for gradients of sharded parameters that are reduced and kept in full."""
  found: dict[str, Collective] = {}
  for one in (record for record in records if record.kind == "all-reduce"):
    computation, arrays = _arrays(case, one)
    for name, dims in arrays:
      for leaf, cut in case.cut.items():
        axes = set().union(*cut) & set(one.axes) & case.row_axes
        ours = [_local(case, leaf, axes)] if len(cut) > 1 else []
        if one.in_loop and leaf in stacked and len(cut) > 2:
          ours.append(_local(case, leaf, axes, layer=True))
        if axes and _sizes(dims) in ours and _kept(case.hlo, computation, name):
          found[leaf] = one
  if not found:
    return
  largest = max(found.values(), key=lambda one: one.bytes)
  yield Finding(
    f"the gradients of {counted(len(found), 'sharded leaf', 'sharded leaves')} are all-reduced, "
    "and kept in full everywhere",
    _where(largest),
    {"leaves_bytes": sum(case.leaves[leaf].nbytes for leaf in found)}
    | {"one all-reduce_bytes": largest.bytes},
    "a reduce-scatter would do, with half of the bytes: the gradients are constrained to be "
    "replicated, or something of all of them (a norm, a cast) is computed before they are sharded",
    _rows_of(found),
  )


# ---- Shapes on a device ----


def _sizes(dims: Sequence[int]) -> list[int]:
  """Returns dims without their order and those of 1: layouts change both."""
  return sorted(size for size in dims if size > 1)


def _local(case: Case, name: str, whole: Iterable[str], *, layer: bool = False) -> list[int]:
  """Returns the sizes of a leaf, or of one of its layers, that is not cut over the axes `whole`."""
  cut = [case.parts(axes.difference(whole)) for axes in case.cut[name]]
  local = [size // part for size, part in zip(case.leaves[name].shape, cut, strict=True)]
  return _sizes(local[layer:])


def _counts(case: Case, name: str) -> set[int]:
  """Returns the numbers of elements that a device may have of a leaf or of one of its layers."""
  axes = set().union(*case.cut[name])
  some = [chosen for n in range(len(axes) + 1) for chosen in itertools.combinations(axes, n)]
  return {math.prod(_local(case, name, one, layer=x)) for one in some for x in (False, True)}


def _dims(shape: str) -> list[int]:
  return [int(size) for size in re.search(r"\[([\d,]*)", shape + "[")[1].split(",") if size]


# ---- The compiled program ----

_MOVED = ("bitcast", "copy", "convert", "reshape", "transpose", "get-tuple-element")


def _arrays(case: Case, record: Collective) -> tuple[hlo.Computation, list[tuple[str, list[int]]]]:
  """Returns the computation of a collective, and (instruction, dims) of each array it returns."""
  computation = next(
    one for one in case.hlo.computations.values() if record.name in one.instructions
  )
  taken = [
    (one.name, _dims(one.shape))
    for one in computation.instructions.values()
    if one.opcode == "get-tuple-element" and one.operand_names[0] == record.name
  ]
  shape = computation.instructions[record.name].shape
  whole = [(record.name, _dims(one)) for one in hlo.elements(shape) or [shape]]
  return computation, taken or whole


def _origins(case: Case, name: str) -> set[str]:
  """Returns the state leaves that an instruction of ENTRY only moves."""
  one = case.hlo.computations[case.hlo.entry].instructions.get(name)
  if one and one.opcode == "parameter":
    paths = jax.tree_util.tree_flatten_with_path(case.start)[0]
    said = re.sub(r"^\w+", "", hlo.op_name(one.attributes).replace("\\", ""))
    same = [jax.tree_util.keystr(path) == said for path, _ in paths]
    return set(itertools.compress(case.cut, same))
  moved = one and (one.opcode in (*_MOVED, "fusion", "call") and len(one.operands) == 1)
  if moved or (one and one.opcode.startswith(("all-gather", "collective-permute"))):
    return set().union(*(_origins(case, operand) for operand in one.operand_names))
  return set()


def _kept(program: hlo.Program, computation: hlo.Computation, name: str) -> bool:
  """Returns whether a value is used in full, and not only its slices; as far as it can be seen."""
  for user in computation.instructions.values():
    if name not in user.operand_names:
      continue
    if user.opcode in _MOVED or user.opcode.endswith("-done"):
      kept = _kept(program, computation, user.name)
    elif user.opcode in ("fusion", "call"):
      inner = program.computations[user.called()[0]]
      places = [str(i) for i, operand in enumerate(user.operand_names) if operand == name]
      given = (one for one in inner.instructions.values() if one.opcode == "parameter")
      kept = any(_kept(program, inner, one.name) for one in given if one.operands[0] in places)
    else:
      kept = user.opcode not in ("dynamic-slice", "slice", "tuple", "while", "conditional")
    if kept:
      return True
  return False
