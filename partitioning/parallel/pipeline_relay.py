"""One batch through all pipeline stages in turn: what has no schedule, such as generating text.

Each stage's layers run where they are stored. While one stage computes, the others wait.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.constraints import automatic_layout, constrain
from partitioning.parallel.pipeline_schedule import STAGE


def stages(layers: str) -> int:
  """Returns how many stages the layers are split over here; 1 inside of a stage.

  Args:
    layers: the letter of the dim of stacked layers.
  """
  layout, sizes = automatic_layout()
  axes = layout.parameters.get(layout.legend[layers].name, ())
  return sizes[STAGE] if STAGE in axes else 1


def relayed(
  function: Callable[[Any, jax.Array, Any, jax.Array], tuple[jax.Array, Any]],
  stacked: Any,
  x: jax.Array,
  others: Any,
  letters: str,
) -> tuple[jax.Array, Any]:
  """Runs a function on one stage after another.

  Args:
    function: takes a stage's part of `stacked`, what the stage before returned, `others`, and the
      stage's number; returns what the next stage is given, and a tree of arrays with the stage's
      layers as their first dim.
    stacked: a tree of arrays with the layers as their first dim, which the stages divide.
    x: what the first stage is given.
    others: a tree of arrays.
    letters: of x.

  Returns:
    What the last stage returned; the trees of all layers.
  """
  count = automatic_layout()[1][STAGE]
  ring = [(one, (one + 1) % count) for one in range(count)]

  def on_stage(stacked: Any, x: jax.Array, others: Any) -> tuple[jax.Array, Any]:
    number = jax.lax.axis_index(STAGE)

    def hop(carry: Any, turn: jax.Array) -> tuple[Any, None]:
      x, found = carry
      y, new = function(stacked, x, others, number)
      found = jax.tree.map(lambda a, b: jnp.where(turn == number, a, b), new, found)
      return (jax.lax.ppermute(constrain(y, letters), STAGE, ring), found), None

    shapes = jax.eval_shape(function, stacked, x, others, number)[1]
    none = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
    (x, found), _ = jax.lax.scan(hop, (x, none), jnp.arange(count, dtype=jnp.int32))
    return x[None], found  # after all hops what the last stage returned is with the first

  region = jax.shard_map(
    on_stage,
    in_specs=(PartitionSpec(STAGE), PartitionSpec(), PartitionSpec()),
    out_specs=(PartitionSpec(STAGE), PartitionSpec(STAGE)),
    axis_names={STAGE},
    check_vma=False,
  )
  x, found = region(stacked, x, others)
  return constrain(x[0], letters), found
