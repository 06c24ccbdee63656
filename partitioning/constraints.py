"""Activations keep the layout that their letters name: `constrain(x_BTD, "BTD")`.

The activation table, the legend and the mesh's sizes are set for the time of a trace by
`activation_layout`; the mesh itself is the one of `jax.set_mesh`. Nothing here invents one.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from partitioning.dims import Legend, Table, resolve, spec_axes


@dataclasses.dataclass(frozen=True)
class Constraint:
  """One activation as it was traced."""

  letters: str
  shape: tuple[int, ...]
  spec: PartitionSpec
  notes: tuple[str, ...]
  failures: tuple[str, ...]


@dataclasses.dataclass
class ActivationLayout:
  """The activation table in force, and, where `collect` is set, what was constrained by it.

  Attributes:
    legend: letter -> Dim.
    table: dim name -> mesh axes, for activations.
    parameters: likewise, for parameters: how kernels lie before they are used.
    collect: True while the layout is judged: failures are gathered instead of raised, so
      that all of them come in one message.
    seen: the constraints met in tracing, in order, each once.
  """

  legend: Legend
  table: Table
  parameters: Table = dataclasses.field(default_factory=dict)
  collect: bool = False
  seen: list[Constraint] = dataclasses.field(default_factory=list)

  def axes(self) -> set[str]:
    """Returns the mesh axes larger than 1 that an activation was split over."""
    return set().union(*(spec_axes(constraint.spec) for constraint in self.seen))


_LAYOUT: contextvars.ContextVar[ActivationLayout | None] = contextvars.ContextVar(
  "activation_layout", default=None
)


@contextlib.contextmanager
def activation_layout(
  legend: Legend, table: Table, *, parameters: Table | None = None, collect: bool = False
) -> Iterator[ActivationLayout]:
  """Sets the tables by which `constrain` and `regions` lay out arrays inside the block."""
  layout = ActivationLayout(legend, table, parameters or {}, collect)
  token = _LAYOUT.set(layout)
  try:
    yield layout
  finally:
    _LAYOUT.reset(token)


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


def constrain(x: jax.Array, letters: str) -> jax.Array:
  """Returns `x`, laid out over the mesh as the activation table says for its letters.

  Acts under `jax.jit` only. Axes that a surrounding `jax.shard_map` has made manual are
  left out, since inside it they are not the compiler's to lay out.

  Args:
    x: an array of any dtype.
    letters: one letter of the model's legend per dim of `x`.

  Raises:
    RuntimeError: no `activation_layout` or no mesh is set.
    ValueError: a wrong rank, an unknown letter, a size that is not the legend's, or a dim
      that its axes do not divide (`with_sharding_constraint` alone would accept that and
      return another layout: jax#26946).
  """
  layout, sizes = current_layout(f'constrain(x, "{letters}")')
  mesh = jax.sharding.get_abstract_mesh()
  manual = {
    axis
    for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if kind == AxisType.Manual
  }
  table = {
    name: tuple(axis for axis in axes if axis not in manual) for name, axes in layout.table.items()
  }
  resolved = resolve(letters, x.shape, layout.legend, table, sizes)
  if layout.collect:
    entry = Constraint(letters, x.shape, resolved.spec, resolved.notes, resolved.failures)
    if entry not in layout.seen:
      layout.seen.append(entry)
    return x
  if resolved.failures:
    raise ValueError(f"activation {letters} of shape {x.shape}: " + "; ".join(resolved.failures))
  return jax.lax.with_sharding_constraint(x, resolved.spec)


def together(x: jax.Array, facts: Any) -> tuple[jax.Array, Any]:
  """Returns both as they are; `facts` count as computed from `x` from here on.

  For what masks are made of. Where it follows from no parameter and no activation, JAX computes it
  and all that follows from it alone before a scan over layers or rounds, and hands it in: a mask
  then is there as an array of the size of all scores, of every round, for each of its uses (as
  seen in jaxprs of jax 0.10.2).

  Args:
    x: an activation.
    facts: a tree of arrays.
  """
  return jax.lax.optimization_barrier((x, facts))
