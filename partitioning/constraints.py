"""Sharding constraints of activations, by their letters: `constrain(x_BTD, "BTD")`.

`activation_layout` sets the activation table, the legend and the mesh's sizes while a function is
traced. The mesh is the one of `jax.set_mesh`; there is no default.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from partitioning.rules import (
  Axes,
  Failure,
  Legend,
  Table,
  partition_spec,
  resolve,
  spec_axes,
  spec_entries,
)

BATCH = "B"  # the letter of the batch in every legend


@dataclasses.dataclass(frozen=True)
class Constraint:
  """One activation as it was traced."""

  letters: str
  shape: tuple[int, ...]
  spec: PartitionSpec
  notes: tuple[str, ...]
  failures: tuple[Failure, ...]


@dataclasses.dataclass
class ActivationLayout:
  """The activation table in force, and the activations that have been traced under it.

  Attributes:
    legend: letter -> Dim.
    table: dim name -> mesh axes, for activations.
    parameters: likewise, for parameters: how kernels are sharded before they are used.
    gradient_dtype: in which the gradients of kernels are reduced by hand; None: that of matmuls.
    collective_matmul: whether matmuls around a gathered or scattered sequence are rings.
    reshard_after_forward: whether gathered kernels are gathered again in the backward pass, and not
      kept for it.
    slices: mesh axis -> slices that it spans, of the axes that span several.
    platform: of the devices, where a program is compiled for them: cpu, gpu or tpu; else "".
    checking: True while the layout is checked: failures are recorded and not raised, so that one
      message has all of them. The traced code is the same either way.
    seen: the traced activations, in order, each once.
  """

  legend: Legend
  table: Table
  parameters: Table = dataclasses.field(default_factory=dict)
  checking: bool = False
  gradient_dtype: jnp.dtype | None = None
  collective_matmul: bool = False
  reshard_after_forward: bool = True
  slices: Mapping[str, int] = dataclasses.field(default_factory=dict)
  platform: str = ""
  seen: list[Constraint] = dataclasses.field(default_factory=list)

  def axes(self) -> set[str]:
    """Returns the mesh axes larger than 1 that an activation was split over."""
    return set().union(*(spec_axes(constraint.spec) for constraint in self.seen))


@dataclasses.dataclass(frozen=True)
class BatchPart:
  """The rows that a region has of each batch, where mesh axes that split the batch are manual.

  Attributes:
    axes: those axes, the first ones of the batch.
    count: the number of parts.
  """

  axes: Axes
  count: int

  def index(self) -> jax.Array:
    """Returns which part the device has, int32."""
    return jax.lax.axis_index(self.axes)


_LAYOUT: contextvars.ContextVar[ActivationLayout | None] = contextvars.ContextVar(
  "activation_layout", default=None
)
_BATCH_PART: contextvars.ContextVar[BatchPart | None] = contextvars.ContextVar(
  "batch_part", default=None
)


@contextlib.contextmanager
def activation_layout(legend: Legend, table: Table, **more: Any) -> Iterator[ActivationLayout]:
  """Sets the tables that shard arrays inside the block; yields the record of what is traced.

  Args:
    legend: letter -> Dim.
    table: dim name -> mesh axes, for activations.
    **more: further fields of `ActivationLayout`.
  """
  layout = ActivationLayout(legend, table, **more)
  with layout_in_force(layout):
    yield layout


@contextlib.contextmanager
def layout_in_force(layout: ActivationLayout) -> Iterator[None]:
  """Sets a layout inside the block, such as `current_layout`'s with another table."""
  token = _LAYOUT.set(layout)
  try:
    yield
  finally:
    _LAYOUT.reset(token)


@contextlib.contextmanager
def inside_batch_part(part: BatchPart) -> Iterator[None]:
  """Says which rows of the batch the region has that is traced inside the block."""
  token = _BATCH_PART.set(part)
  try:
    yield
  finally:
    _BATCH_PART.reset(token)


def batch_part() -> BatchPart | None:
  """Returns which rows of the batch the region that is traced has; None outside of such regions."""
  return _BATCH_PART.get()


def current_layout(caller: str = "the model") -> tuple[ActivationLayout, dict[str, int]]:
  """Returns the activation layout in force, and mesh axis -> size.

  Args:
    caller: who asks, for the message.

  Raises:
    RuntimeError: no `activation_layout` or no mesh is set.
  """
  layout = _LAYOUT.get()
  if layout is None:
    raise RuntimeError(f"{caller}: no activation_layout() is in force")
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    raise RuntimeError(f"{caller}: no mesh is set; use jax.set_mesh(mesh)")
  return layout, dict(mesh.shape)


def axes_splitting(letter: str) -> Axes:
  """Returns the axes larger than 1, manual ones among them, that split a dim of activations."""
  layout, sizes = current_layout()
  return tuple(axis for axis in layout.table[layout.legend[letter].name] if sizes[axis] > 1)


def on_cpus() -> bool:
  """Returns whether the program is for CPUs; true outside of a layout."""
  layout = _LAYOUT.get()
  return layout is None or layout.platform == "cpu"


def on_gpus() -> bool:
  """Returns whether the program is compiled for GPUs, attached or not."""
  layout = _LAYOUT.get()
  return jax.default_backend() == "gpu" or (layout is not None and layout.platform == "gpu")


def slices_of(axes: Axes) -> int:
  """Returns how many slices axes span together; 1 outside of a layout."""
  layout = _LAYOUT.get()
  return 1 if layout is None else math.prod(layout.slices.get(axis, 1) for axis in axes)


def automatic_layout(caller: str = "the model") -> tuple[ActivationLayout, dict[str, int]]:
  """Returns `current_layout`, its tables without the axes that are manual here.

  A region that is manual over some axes, such as pipeline stages, is sharded over the others.
  """
  layout, sizes = current_layout(caller)
  if not (manual := manual_axes()):
    return layout, sizes
  tables = (
    {name: tuple(axis for axis in axes if axis not in manual) for name, axes in table.items()}
    for table in (layout.table, layout.parameters)
  )
  return dataclasses.replace(
    layout, **dict(zip(("table", "parameters"), tables, strict=True))
  ), sizes


def constrain(x: jax.Array, letters: str) -> jax.Array:
  """Returns `x` with the sharding constraint that the activation table has for its letters.

  Acts under `jax.jit` only. Axes that a surrounding `jax.shard_map` has made manual are left out,
  since the compiler does not shard over them there; if all axes are manual, `x` is returned
  unchanged.

  Args:
    x: an array of any dtype.
    letters: one letter of the model's legend per dim of `x`.

  Raises:
    RuntimeError: no `activation_layout` or no mesh is set.
    ValueError: a wrong rank, an unknown letter, a size other than the legend's, or a dim that is
      not divisible by its axes (`with_sharding_constraint` alone would accept that and return
      another layout: jax#26946).
  """
  layout, sizes = automatic_layout(f'constrain(x, "{letters}")')
  spec, fits = _recorded(letters, x.shape, layout, sizes)
  if not fits or on_one_device():
    return x
  return jax.lax.with_sharding_constraint(x, spec)


def on_one_device() -> bool:
  """Returns whether all axes of the mesh are manual, so that arrays are one device's shards."""
  return len(manual_axes()) == len(jax.sharding.get_abstract_mesh().axis_names)


def manual_axes() -> set[str]:
  """Returns the mesh axes that surrounding `jax.shard_map`s have made manual."""
  mesh = jax.sharding.get_abstract_mesh()
  kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return {axis for axis, kind in kinds if kind == AxisType.Manual}


def automatic_spec(spec: PartitionSpec) -> PartitionSpec:
  """Returns a spec without the axes that surrounding regions have made manual."""
  manual = manual_axes()
  entries = spec_entries(spec)
  return partition_spec([tuple(axis for axis in axes if axis not in manual) for axes in entries])


def record(letters: str, shape: tuple[int, ...], layout: ActivationLayout | None = None) -> None:
  """Records an activation that the table shards without a call of `constrain`.

  For example an operand inside a `jax.shard_map`, which the compiler does not shard.

  Args:
    letters: one letter of the model's legend per dim.
    shape: of the array before that region.
    layout: `automatic_layout` outside that region; None: the current one.

  Raises:
    ValueError: as `constrain`.
  """
  found, sizes = automatic_layout(f'record("{letters}")')
  _recorded(letters, shape, layout or found, sizes)


def _recorded(
  letters: str,
  shape: tuple[int, ...],
  layout: ActivationLayout,
  sizes: dict[str, int],
) -> tuple[PartitionSpec, bool]:
  """Records an activation; returns its spec, and whether its dims can be sharded so.

  Raises:
    ValueError: they cannot, and no layout is being checked.
  """
  found = resolve(letters, shape, layout.legend, layout.table, sizes)
  entry = Constraint(letters, shape, found.spec, found.notes, found.failures)
  if (part := _BATCH_PART.get()) is not None:
    entry = _of_complete_batch(letters, shape, layout, sizes, part)
  if entry not in layout.seen:
    layout.seen.append(entry)
  if found.failures and not layout.checking:
    raise ValueError(
      f"activation {letters} of shape {shape}: " + "; ".join(map(str, found.failures))
    )
  return found.spec, not found.failures


def _of_complete_batch(
  letters: str,
  shape: tuple[int, ...],
  layout: ActivationLayout,
  sizes: dict[str, int],
  part: BatchPart,
) -> Constraint:
  """Returns the record of an activation of which a region has only some rows."""
  batch = layout.legend[BATCH].name
  shape = tuple(
    size * part.count if letter == BATCH else size
    for letter, size in zip(letters, shape, strict=True)
  )
  table = {**layout.table, batch: (*part.axes, *layout.table[batch])}
  found = resolve(letters, shape, layout.legend, table, sizes)
  return Constraint(letters, shape, found.spec, found.notes, found.failures)


def tie_to(x: jax.Array, facts: Any) -> tuple[jax.Array, Any]:
  """Returns both unchanged, behind an `optimization_barrier`: `facts` now depend on `x`.

  For the inputs of masks. If they depend on no parameter and no activation, JAX hoists them, and
  everything computed from them alone, out of a scan over layers or ring steps, and passes the
  result in: for each use, a mask of the size of all scores of all steps (as seen in jaxprs of jax
  0.10.2).

  Args:
    x: an activation.
    facts: a tree of arrays.
  """
  return jax.lax.optimization_barrier((x, facts))
