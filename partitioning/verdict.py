"""The verdict: checks tables, names and traced activations before memory is allocated.

One message lists everything that is wrong with a layout. This module knows nothing of models or
training: it is given shapes, letters, tables, and a function that traces the program.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from partitioning import optimizer_state, rules
from partitioning.constraints import ActivationLayout, activation_layout
from partitioning.rules import (
  Failure,
  LayoutError,
  Legend,
  Overrides,
  Placement,
  Table,
  axes_size,
  bytes_per_device,
  copies,
  overridden,
  partition_spec,
  replicated_bytes,
  resolve,
  shape_text,
  size_text,
  spec_entries,
)

# ------------------------------ the optimizer's state ------------------------------

# Most elements of an optimizer leaf that belongs to no parameter and is replicated.
SMALL = 64


def place_optimizer(
  abstract_opt_state: Any,
  parameters: Mapping[str, Placement],
  legend: Legend,
  table: Table,
  sizes: Mapping[str, int],
  overrides: Overrides = (),
  prefix: str = "optimizer/",
  init: Callable[[Any], Any] | None = None,
) -> tuple[dict[str, Placement], list[Failure]]:
  """Places every leaf of the optimizer's state by the dims of the parameter that it belongs to.

  A leaf of the parameter's shape has its letters; one whose shape is the parameter's with dims
  removed or set to 1 (Adafactor's rows and columns) has the letters of the remaining dims. Of
  squares of the size of one side of the parameter's matrices (SOAP's preconditioners), the rows are
  split over the axes of the matrices' rows, and the columns over those of their columns. Scales of
  an array in blocks are sharded as the array, whose blocks have to be whole on a device. Scalars,
  leaves of one element and small leaves of no parameter (a random key) are replicated. Any other
  leaf needs an override.

  Args:
    abstract_opt_state: the optimizer's state, arrays or ShapeDtypeStructs.
    parameters: the parameters' placements, which give the letters.
    legend: letter -> Dim.
    table: dim name -> mesh axes, for optimizer state (another one than the parameters' is ZeRO-1).
    sizes: mesh axis -> size.
    overrides: (name with its prefix, PartitionSpec entries).
    prefix: put before each leaf's name.
    init: the optimizer's, parameters -> state. It distinguishes dims of equal size; without it, a
      leaf for which they give different shardings needs an override.

  Returns:
    name -> Placement, and the failures.
  """
  tables, overrides = _Tables(legend, table, sizes), dict(overrides)
  by_path = {tuple(name.split("/")): name for name in parameters}
  leaves = optimizer_state.leaves_by_path(abstract_opt_state)
  owners = optimizer_state.owners(leaves, by_path)
  trial: dict | None = None
  placements, failures = {}, []
  for path, leaf in leaves.items():
    name = prefix + "/".join(path)
    owner = parameters[by_path[owners[path]]] if owners[path] else None
    ways = optimizer_state.candidates(leaf.shape, owner.shape) if owner else []
    wrong: tuple[Failure, ...] = ()
    if name in overrides:
      placement, wrong = overridden(name, leaf, "", overrides[name], sizes)
    elif rule := _replication_rule(leaf, owner):
      placement = Placement(name, leaf.shape, leaf.dtype, "", rule, PartitionSpec())
    elif owner and (block := optimizer_state.block_shape(path, leaf, leaves, owner.shape)):
      placement, wrong = _scales(name, leaf, owner, block, tables)
    else:
      found = [
        (_squares if isinstance(way, optimizer_state.Square) else _statistic)(
          name, leaf, owner, way, tables
        )
        for way in ways
      ]
      if len({placed.spec for placed, _ in found}) > 1 and init is not None:
        if trial is None:
          arrays = {
            p: jax.ShapeDtypeStruct(parameters[n].shape, parameters[n].dtype)
            for p, n in by_path.items()
          }
          trial = optimizer_state.kept_by_trial(init, arrays)
        by_trial = [kept for kept in trial.get(path, []) if kept in ways]
        found = [found[ways.index(kept)] for kept in by_trial[:1]] or found
      if len({placed.spec for placed, _ in found}) != 1:
        failures.append(_no_dims(name, leaf, owner, [placed.rule for placed, _ in found]))
        continue
      placement, wrong = found[0]
    placements[name] = placement
    failures.extend(failure.of(name) for failure in wrong)
  return placements, failures


class _Tables(NamedTuple):
  """What turns letters into a spec: arguments of `dims.resolve`."""

  legend: Legend
  table: Table
  sizes: Mapping[str, int]


def _replication_rule(leaf: Any, owner: Placement | None) -> str:
  """Returns the rule by which a leaf is replicated; "" where its dims decide."""
  if leaf.ndim == 0:
    return "scalar"
  if owner is not None and owner.shape == leaf.shape:
    return ""
  if leaf.size == 1:
    return "one element"
  if owner is None and leaf.size <= SMALL:
    return "no parameter's"
  return ""


def _statistic(
  name: str,
  leaf: Any,
  owner: Placement,
  kept: Sequence[int],
  tables: _Tables,
) -> tuple[Placement, tuple[Failure, ...]]:
  """Places a leaf that has these dims of its parameter."""
  if len(owner.letters) != len(owner.shape):  # the parameter's own failure, already reported
    return dataclasses.replace(owner, name=name, shape=leaf.shape, dtype=leaf.dtype), ()
  letters = "".join(owner.letters[i] for i in kept)
  gone = "".join(letter for i, letter in enumerate(owner.letters) if i not in kept)
  rule = f"as {owner.name}" + (f" without {gone}" if gone else "")
  notes: tuple[str, ...] = ()
  wrong: tuple[Failure, ...] = ()
  if owner.rule == "override":
    entries = spec_entries(owner.spec, len(owner.shape))
    entries = [entries[i] for i in kept]
  else:
    found = resolve(letters, tuple(owner.shape[i] for i in kept), *tables)
    entries, notes, wrong = spec_entries(found.spec, len(kept)), found.notes, found.failures
  if len(leaf.shape) == len(owner.shape):  # the others are of size 1
    axes = dict(zip(kept, entries, strict=True))
    entries = [axes.get(i, ()) for i in range(len(owner.shape))]
    letters = "" if gone else letters
  spec = partition_spec(entries)
  return Placement(name, leaf.shape, leaf.dtype, letters, rule, spec, notes), wrong


def _squares(
  name: str,
  leaf: Any,
  owner: Placement,
  square: optimizer_state.Square,
  tables: _Tables,
) -> tuple[Placement, tuple[Failure, ...]]:
  """Places squares of the size of one side of a parameter's matrices; see `place_optimizer`."""
  like = jax.ShapeDtypeStruct(owner.shape, leaf.dtype)
  whole, wrong = _statistic(name, like, owner, range(len(owner.shape)), tables)
  if len(owner.letters) != len(owner.shape):
    return dataclasses.replace(whole, shape=leaf.shape), wrong
  axes, notes = spec_entries(whole.spec, len(owner.shape)), list(whole.notes)
  entries = [axes[dim] for dim in square.stack]
  for dims in (square.rows, square.columns):
    split, size = tuple(axis for dim in dims for axis in axes[dim]), leaf.shape[-1]
    if size % axes_size(split, tables.sizes):
      notes.append(f"{size} is replicated over {' x '.join(split)}, which does not divide it")
      split = ()
    entries.append(split)
  side = "".join(owner.letters[dim] for dim in square.side)
  stack = "".join(owner.letters[dim] for dim in square.stack)
  letters = stack + 2 * side if len(side) == 1 else ""
  rule, spec = f"squares of {side} of {owner.name}", partition_spec(entries)
  return Placement(name, leaf.shape, leaf.dtype, letters, rule, spec, tuple(notes)), wrong


def _scales(
  name: str,
  leaf: Any,
  owner: Placement,
  block: Sequence[int],
  tables: _Tables,
) -> tuple[Placement, tuple[Failure, ...]]:
  """Places the scales of blocks as the array itself; refuses shards that would cut a block."""
  whole = jax.ShapeDtypeStruct(owner.shape, leaf.dtype)
  every = tuple(range(len(owner.shape)))
  placed, wrong = _statistic(name, whole, owner, every, tables)
  text = " x ".join(map(str, block))
  placement = dataclasses.replace(
    placed, shape=leaf.shape, letters="", rule=f"as {owner.name} in blocks of {text}"
  )
  if wrong:  # the failures of the codes
    return placement, ()
  entries = spec_entries(placed.spec, len(every))
  sizes = tables.sizes
  cut = [
    Failure(
      f"shards of {owner.shape[i] // axes_size(axes, sizes)} of dim {owner.letters[i]} = "
      f"{owner.shape[i]} (mesh axis {' x '.join(f'{axis}={sizes[axis]}' for axis in axes)}) would "
      f"cut blocks of {block[i]}, whose shape {text} is the same on every mesh; split it over at "
      f"most {leaf.shape[i]} devices, or set optimizer.state_dtype=bfloat16"
    )
    for i, axes in enumerate(entries)
    if leaf.shape[i] % axes_size(axes, sizes)
  ]
  return placement, tuple(cut)


def _no_dims(name: str, leaf: Any, owner: Placement | None, rules: Sequence[str]) -> Failure:
  """Returns the failure of a leaf that no rule places."""
  if owner is None:
    why = f"but it belongs to no parameter and has more than {SMALL} elements"
  elif rules:
    why = f"which is {' or '.join(rules)}: dims of equal size, sharded differently"
  else:
    why = f"but {owner.name} has shape {owner.shape}, and it is not that with dims removed"
  text = (
    f"shape {leaf.shape}, {why}; give it an explicit spec, "
    f'partitioning.overrides=(("{name}", ({"None, " * leaf.ndim})),)'
  )
  return Failure(text, array=name)


# ------------------------------ every array ------------------------------

TABLES = ("parameters", "activations", "optimizer")


@dataclasses.dataclass(frozen=True)
class Layout:
  """How all arrays of a program are sharded.

  Attributes:
    placements: `parameters`, `optimizer`, `batch`: name -> Placement.
    activations: how the activations are sharded, in the order of the forward pass.
  """

  placements: dict[str, dict[str, Placement]]
  activations: ActivationLayout


def check_layout(
  params: Any,
  optimizer: Any,
  batch: Mapping[str, jax.ShapeDtypeStruct],
  trace: Callable[[], Any],
  *,
  names: Mapping[str, str],
  batch_letters: Mapping[str, str],
  legend: Legend,
  tables: Mapping[str, Table],
  sizes: Mapping[str, int],
  overrides: Overrides = (),
  max_replicated_bytes: int | None = None,
  optimizer_init: Callable[[Any], Any] | None = None,
) -> Layout:
  """Places every array of a program, or refuses the layout.

  Args:
    params: a tree of arrays or ShapeDtypeStructs.
    optimizer: the optimizer's state, likewise.
    batch: name -> array.
    trace: traces, under the mesh, the forward pass that will be compiled.
    names: pattern of parameter names -> letters.
    batch_letters: name of an array of the batch -> its letters.
    legend: letter -> Dim.
    tables: of each of `TABLES`, dim name -> mesh axes.
    sizes: mesh axis -> size.
    overrides: (name, PartitionSpec entries) of parameters and optimizer leaves.
    max_replicated_bytes: per device, of parameters and optimizer state; None: no limit.
    optimizer_init: parameters -> optimizer state; distinguishes dims of equal size.

  Raises:
    LayoutError: with every failure in one message.
  """
  wrong = [
    failure
    for title in TABLES
    for failure in rules.check_table(f"partitioning.{title}", tables[title], legend, sizes)
  ]
  if wrong:  # every array would fail for the same reason
    raise LayoutError(wrong)
  parameters, failures = rules.place_parameters(
    params, names, legend, tables["parameters"], sizes, overrides
  )
  states, wrong = place_optimizer(
    optimizer, parameters, legend, tables["optimizer"], sizes, overrides, init=optimizer_init
  )
  if not failures:  # else the parameters' failures would be repeated
    failures += wrong
  failures += rules.unknown_overrides(overrides, [*parameters, *states])
  arrays = {}
  for key, array in batch.items():
    name, letters = f"batch/{key}", batch_letters[key]
    found = resolve(letters, array.shape, legend, tables["activations"], sizes)
    failures += [failure.of(name) for failure in found.failures]
    arrays[name] = Placement(
      name, array.shape, array.dtype, letters, "activations", found.spec, found.notes
    )
  placements = {"parameters": parameters, "optimizer": states, "batch": arrays}
  with activation_layout(
    legend, tables["activations"], parameters=tables["parameters"], checking=True
  ) as activations:
    trace()
  failures += _of_activations(activations, failures)
  if not failures:
    every = [placement for section in placements.values() for placement in section.values()]
    failures = rules.unused_axes(sizes, rules.used_axes(every) | activations.axes())
    failures += _replicated(placements, sizes, max_replicated_bytes)
  if failures:
    raise LayoutError(dict.fromkeys(failures))
  return Layout(placements, activations)


def _of_activations(activations: ActivationLayout, known: list[Failure]) -> list[Failure]:
  """Returns the failures of activations whose cause was not reported for another array."""
  causes = {failure.cause for failure in known}
  return [
    failure.of(f"activation {one.letters} {shape_text(one.shape)}")
    for one in activations.seen
    for failure in one.failures
    if failure.cause not in causes
  ]


def _replicated(
  placements: Mapping[str, Mapping[str, Placement]], sizes: Mapping[str, int], limit: int | None
) -> list[Failure]:
  """Returns a failure if more is replicated than allowed."""
  state = [*placements["parameters"].values(), *placements["optimizer"].values()]
  count = replicated_bytes(state, sizes)
  if limit is None or count <= limit:
    return []
  devices = math.prod(sizes.values())
  largest = max(
    (placement for placement in state if copies(placement, sizes) == devices),
    key=lambda placement: bytes_per_device(placement, sizes),
  )
  text = (
    f"{size_text(count)} per device are replicated; partitioning.max_replicated_bytes={limit} "
    f"({size_text(limit)}); the largest is {largest.name} {shape_text(largest.shape)}; split its "
    "dims in partitioning.parameters"
  )
  return [Failure(text)]
