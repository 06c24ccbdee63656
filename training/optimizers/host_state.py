"""Optimizer state in pinned host memory: brought to the device and back layer by layer.

The state of stacked parameters is in host memory. They are updated in a loop over the layers of
each stack, so that the state of only one layer is on the device at a time; all at once, it would
take as much of the device's memory as without (seen in compiled programs). The state of the other
parameters (embeddings, the last norm) stays on the device: the TPU compiler cannot fetch an array
whose layout on the device differs (libtpu 0.0.42, an internal error).

Only for optimizers that update each element by itself. Source of the idea: arXiv:2101.06840
(ZeRO-Offload), where the update runs on the host.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from partitioning.rules import HOST, Placement, leaves_by_path, named_leaves, owners

Apply = Callable[[Any, Any], Any]  # (parameters, updates) -> parameters
Stack = Callable[[str], str]  # parameter name -> the stack whose layers are its first dim, or ""


def on_host(
  placements: Mapping[str, Placement], stack: Stack, params: Any, state: Any
) -> dict[str, Placement]:
  """Returns the placements of an optimizer's state, those of stacked arrays in host memory.

  Args:
    placements: of the state: name -> Placement.
    stack: of each parameter; the arrays of a stack have equally many layers.
    params: nested dict of the parameters that are trained, arrays or ShapeDtypeStructs.
    state: of the optimizer, likewise.

  Raises:
    ValueError: no array would be there.
  """
  stacked = _Stacked(stack, params, state)
  moved = named_leaves(stacked.all, "optimizer/")
  if not any(moved.values()):
    raise ValueError(
      "optimizer.state_memory=host: this optimizer has no state of stacked layers to move there; "
      "set it to device"
    )
  return {
    name: dataclasses.replace(one, memory=HOST, rule=f"{one.rule}, in the host's memory")
    if moved[name]
    else one
    for name, one in placements.items()
  }


def update(
  optimizer: optax.GradientTransformation,
  stack: Stack,
  apply: Apply,
  grads: Any,
  state: Any,
  params: Any,
) -> tuple[Any, Any]:
  """Returns the updated parameters, and the state, in its memories as before.

  Args:
    optimizer: one that updates each element by itself.
    stack: of each parameter.
    apply: adds updates to parameters.
    grads: nested dict of the gradients.
    state: of the optimizer; the arrays of stacked parameters are in host memory.
    params: nested dict of the parameters.
  """
  ours = _Stacked(stack, params, state)

  def of_stack(name: str, carry: tuple[Any, Any]) -> tuple[Any, Any]:
    """Updates the parameters of a stack and their state, layer by layer, in place."""
    mine = ours.of_stack(name)

    def layer(number: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
      """Updates one layer; of the other parameters it takes nothing."""

      def part(x: jax.Array, is_mine: bool) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, number, 1) if is_mine else x[:0] if x.ndim else x

      def put(x: jax.Array, new: jax.Array, is_mine: bool) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new, number, 0) if is_mine else x

      own = jax.tree.map(part, carry[0], mine[0])
      here = ours.moved(jax.tree.map(part, carry[1], mine[1]), jax.memory.Space.Device)
      updates, here = optimizer.update(jax.tree.map(part, grads, mine[0]), here, own)
      found = apply(own, updates), ours.moved(here, jax.memory.Space.Host)
      return tuple(
        jax.tree.map(put, old, new, flags)
        for old, new, flags in zip(carry, found, mine, strict=True)
      )

    return jax.lax.fori_loop(0, ours.layers[name], layer, carry)

  def others() -> tuple[Any, Any]:
    """Returns the other parameters, updated, and their state; of the stacked ones nothing."""

    def part(x: jax.Array, name: str) -> jax.Array:
      return x[:0] if name else x

    own, here = jax.tree.map(part, params, ours.params), jax.tree.map(part, state, ours.state)
    here = ours.moved(here, jax.memory.Space.Device)
    updates, here = optimizer.update(jax.tree.map(part, grads, ours.params), here, own)
    return apply(own, updates), here

  # The types of a jaxpr have memories; those of a program's arguments are not known to it.
  carry = params, ours.moved(state, jax.memory.Space.Host)
  for name in ours.layers:
    carry = of_stack(name, carry)
  return tuple(
    jax.tree.map(lambda x, other, name: x if name else other, *trees)
    for trees in zip(carry, others(), (ours.params, ours.state), strict=True)
  )


class _Stacked:
  """Which arrays are stacked.

  Attributes:
    params: a tree like the parameters: the stack of each, "" of none.
    state: likewise, like the state.
    layers: stack -> how many layers it has.
  """

  def __init__(self, stack: Stack, params: Any, state: Any):
    names, leaves = leaves_by_path(params), leaves_by_path(state)
    of = owners(leaves, names)
    stacks = {path: stack("/".join(path)) for path in names}
    self.layers = {stacks[path]: leaf.shape[0] for path, leaf in names.items() if stacks[path]}
    self.params = jax.tree.unflatten(jax.tree.structure(params), stacks.values())
    found = [stacks[of[path]] if leaf.ndim and of[path] else "" for path, leaf in leaves.items()]
    self.state = jax.tree.unflatten(jax.tree.structure(state), found)

  @property
  def all(self) -> Any:
    """Returns a tree like the state, of booleans: whether an array is of any stack."""
    return jax.tree.map(bool, self.state)

  def of_stack(self, name: str) -> tuple[Any, Any]:
    """Returns trees like the parameters and the state: whether an array is of this stack."""
    return jax.tree.map(name.__eq__, self.params), jax.tree.map(name.__eq__, self.state)

  def moved(self, state: Any, where: jax.memory.Space) -> Any:
    """Returns a state whose stacked arrays, or parts of them, are in a memory."""
    return jax.tree.map(lambda x, name: jax.device_put(x, where) if name else x, state, self.state)
