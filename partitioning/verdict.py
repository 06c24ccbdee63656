"""The verdict: checks tables, names and traced activations before memory is allocated.

One message lists everything that is wrong with a layout. This module knows nothing of models or
training: it is given shapes, letters, tables, and a function that traces the program.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from partitioning import rules
from partitioning.constraints import ActivationLayout, activation_layout
from partitioning.rules import (
  Failure,
  LayoutError,
  Legend,
  Overrides,
  Placement,
  Table,
  resolve,
  shape_text,
)

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
  beside: Mapping[str, tuple[Mapping[str, str], Legend]] | None = None,
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
    beside: branch of `params` that is another model's -> its `names` and `legend`.
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
  beside, given = beside or {}, (tables["parameters"], sizes, overrides)
  own = {name: part for name, part in params.items() if name not in beside} if beside else params
  parameters, failures = rules.place_parameters(own, names, legend, *given)
  states, wrong = rules.place_optimizer(
    optimizer, parameters, legend, tables["optimizer"], sizes, overrides, init=optimizer_init
  )
  if not failures:  # else the parameters' failures would be repeated
    failures += wrong
  for branch, (rows, letters) in beside.items():
    leaves = rules.named_leaves(params[branch], f"{branch}/")
    renamed = {f"{branch}/{row}": of_row for row, of_row in rows.items()}
    placed, wrong = rules.place_parameters(leaves, renamed, letters, *given)
    parameters, failures = parameters | placed, failures + wrong
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
    state = [*parameters.values(), *states.values()]
    failures += rules.over_replicated(state, sizes, max_replicated_bytes)
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
