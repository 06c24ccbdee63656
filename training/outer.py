"""DiLoCo: groups of devices that train on their own, and an outer optimizer where they meet.

Each group has its own copy of the trained parameters and its own state of the inner optimizer, and
takes steps with its rows of every batch. Every H steps the mean of what the groups' copies have
changed is one step of SGD with Nesterov momentum on the parameters of the state, from which the
groups continue. So these are what is evaluated, sampled and exported; between meetings they stand
still. Source: arXiv:2311.08105, algorithm 1.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from partitioning.constraints import BatchPart, inside_batch_part
from partitioning.rules import Placement
from training import microbatches
from training.specs import GROUPS, OuterSpec, StepSpec
from training.state import State, merged

_OF_GROUPS = ("optimizer/replicas/", "optimizer/inner/")  # the others are the same for all groups


class Outer(NamedTuple):
  """The optimizer's state; G is the number of groups.

  Attributes:
    replicas: trees like the trained parameters, [G, ...].
    inner: the state of the inner optimizer, [G, ...].
    momentum: a tree like the trained parameters, of their changes; {} without momentum.
  """

  replicas: Any
  inner: Any
  momentum: Any


def around(spec: OuterSpec, inner: optax.GradientTransformation) -> optax.GradientTransformation:
  """Returns an optimizer whose initial state is that of all groups; the step updates it."""

  def init(params: Any) -> Outer:
    of_groups = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (spec.groups, *x.shape)), (params, inner.init(params))
    )
    return Outer(*of_groups, jax.tree.map(jnp.zeros_like, params) if spec.momentum else {})

  return optax.GradientTransformation(init, inner.update)


def of_one_group(state: Outer) -> Outer:
  """Returns a state without the dim of the groups: what the tables of the layout are for."""
  one = jax.tree.map(lambda x: x[0], (state.replicas, state.inner))
  return Outer(*one, state.momentum)


def placed(placements: Mapping[str, Placement], groups: int) -> dict[str, Placement]:
  """Returns the placements of the state from those without the dim of the groups."""
  return {
    name: dataclasses.replace(
      one,
      shape=(groups, *one.shape),
      letters="",
      rule=f"{one.rule}, of each group",
      spec=PartitionSpec(GROUPS, *one.spec),
    )
    if name.startswith(_OF_GROUPS)
    else one
    for name, one in placements.items()
  }


def check_groups(
  spec: StepSpec, sizes: Mapping[str, int], parameters: Mapping[str, Placement], variables: Any
) -> None:
  """Refuses a program whose groups could not take steps by themselves; raises ValueError."""
  if why := microbatches.reduction_obstacle(spec, sizes, parameters, variables):
    raise ValueError(
      f"optimizer.outer_every_steps={spec.outer.every_steps}: each group has its own part of the "
      f"batch, and {why}; set it to 0"
    )


def train_step(
  spec: OuterSpec,
  step: Callable[[State, Any], tuple[State, dict[str, jax.Array]]],
  split: Callable[[Any], tuple[Any, Any]],
  state: State,
  batch: Any,
) -> tuple[State, dict[str, jax.Array]]:
  """Returns the state after a step of each group, and means of their metrics.

  Args:
    spec: of the groups.
    step: of one group, on its own rows.
    split: parameters -> the trained ones, and the others.
    state: the optimizer's is `Outer`.
    batch: of all groups; each takes an equal part of its rows, in order.
  """
  anchor, frozen = split(state.params)
  outer: Outer = state.optimizer

  def of_group(batch: Any, of_groups: Any, shared: Any) -> Any:
    (replica, inner), (number, frozen) = jax.tree.map(lambda x: x[0], of_groups), shared
    with inside_batch_part(BatchPart((GROUPS,), spec.groups)):
      after, metrics = step(State(number, merged(replica, frozen), inner), batch)
    mean = {n: x if n == "learning_rate" else jax.lax.pmean(x, GROUPS) for n, x in metrics.items()}
    return jax.tree.map(lambda x: x[None], (split(after.params)[0], after.optimizer)), mean

  parts, whole = PartitionSpec(GROUPS), PartitionSpec()
  region = jax.shard_map(
    of_group,
    in_specs=(parts, parts, whole),
    out_specs=(parts, whole),
    axis_names={GROUPS},
    check_vma=False,
  )
  of_groups = outer.replicas, outer.inner
  (replicas, inner), metrics = region(batch, of_groups, (state.step, frozen))
  anchor, replicas, momentum = jax.lax.cond(
    (state.step + 1) % spec.every_steps == 0,
    lambda *given: meet(spec, *given),
    lambda *given: given,
    *(anchor, replicas, outer.momentum),
  )
  params = merged(anchor, frozen)
  return State(state.step + 1, params, Outer(replicas, inner, momentum), state.variables), metrics


def meet(spec: OuterSpec, anchor: Any, replicas: Any, momentum: Any) -> tuple[Any, Any, Any]:
  """Returns parameters, replicas and momentum after the groups have met.

  Args:
    spec: of the groups.
    anchor: the parameters from which the groups have started.
    replicas: where they are now, [G, ...].
    momentum: as `Outer` has it.
  """
  change = jax.tree.map(lambda old, new: jnp.mean(old[None] - new, axis=0), anchor, replicas)
  if spec.momentum:
    momentum = jax.tree.map(lambda m, c: spec.momentum * m + c, momentum, change)
    change = jax.tree.map(lambda m, c: c + spec.momentum * m, momentum, change)  # Nesterov's
  anchor = jax.tree.map(lambda old, c: old - spec.learning_rate * c, anchor, change)
  return anchor, jax.tree.map(lambda a, r: jnp.broadcast_to(a, r.shape), anchor, replicas), momentum
