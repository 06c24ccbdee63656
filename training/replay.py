"""A replay of one step: its activations, the loss of each row, its gradients and its update.

The step's rows with the step's random keys, as `Program.step_and_gradients` has them, and a forward
pass of which activations are recorded. What is reported of an array is small: no activation of all
layers is in memory at once.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from models import activations
from models.losses import Batch
from models.spec import MTP_LAYERS, STACKS
from partitioning.dtypes import wide_dtype
from partitioning.rules import named_leaves
from runtime.layer_kinds import stack_of
from training.gradients import split_rows
from training.setup import Job
from training.state import State
from training.step import Program
from training.tasks import DPO, GRPO

_ADAPTER = re.compile(r"/lora_[ab]$")
Found = Mapping[str, Mapping[str, np.ndarray]]  # name -> what `_numbers` has found


@dataclasses.dataclass(frozen=True)
class Array:
  """An array of the step in numbers.

  Attributes:
    name: of an activation or parameter; of stacked layers such as `layer 2: mlp`.
    rms: root mean square of its elements.
    largest: magnitude of the largest.
    elements: how many it has.
    bad: how many are not finite at each index of the first dim: of an activation [B], of each row.
    first: indices of the first that is not finite; () where all are.
    value: of that element.
  """

  name: str
  rms: float
  largest: float
  elements: int
  bad: np.ndarray
  first: tuple[int, ...]
  value: float

  @property
  def finite(self) -> bool:
    """Returns whether all elements are."""
    return not self.bad.any()


@dataclasses.dataclass(frozen=True)
class Observed:
  """What a step computes, each in the order of computation.

  Attributes:
    parameters: before the step.
    activations: of the forward pass.
    losses: [B], the mean loss of each row; with weight 0, 0.
    gradients: of the trained parameters, those of the loss first: in backward order.
    updated: parameters after the step.
  """

  parameters: list[Array]
  activations: list[Array]
  losses: np.ndarray
  gradients: list[Array]
  updated: list[Array]


def check(task: str, sizes: Mapping[str, int], outer_every_steps: int = 0) -> None:
  """Raises ValueError for a task, mesh sizes or an outer optimizer that cannot be replayed."""
  if outer_every_steps:
    raise ValueError(
      f"optimizer.outer_every_steps={outer_every_steps}: a replay looks at a step of all devices, "
      f"and groups have parameters of their own"
    )
  if (stages := sizes.get("stage", 1)) > 1:
    raise ValueError(
      f"mesh.stage={stages}: a replay looks at the activations of whole rows in all layers, and a "
      f"stage has those of its layers; set mesh.stage=1 (and another axis larger): any mesh reads "
      f"the checkpoint"
    )
  if task in (DPO, GRPO):
    what = "pairs" if task == DPO else "answers that are drawn"
    raise ValueError(f"the task {task}: a replay needs rows of one text, not of {what}")


# ------------------------------ on the devices ------------------------------


def _numbers(x: jax.Array) -> dict[str, jax.Array]:
  """Returns the numbers of an array, the first dim of which are its rows; see `_array`."""
  x = jax.lax.stop_gradient(x)
  bad, values = ~jnp.isfinite(x), x.astype(wide_dtype(x.dtype))
  of_rows = jnp.sum(bad, axis=tuple(range(1, x.ndim)), dtype=jnp.int32)
  row = jnp.argmax(of_rows > 0)
  # Of one row alone: an argmax over all elements would gather the array on every device.
  bad_of_row, values_of_row = (one[row].reshape(-1) for one in (bad, values))
  at, largest = jnp.argmax(bad_of_row), jnp.max(jnp.abs(values))
  scale = jnp.where(largest > 0, largest, jnp.ones_like(largest))  # squares would overflow
  return {
    "rms": scale * jnp.sqrt(jnp.mean(jnp.square(values / scale))),
    "largest": largest,
    "bad": of_rows,
    "at": jnp.asarray(at, jnp.int32),
    "value": values_of_row[at],
    "row_shape": jnp.asarray(x.shape[1:], jnp.int32),
  }


def _of_parameters(program: Program, tree: Any) -> dict[str, dict[str, jax.Array]]:
  """Returns name -> numbers [1, ...] of parameters; of stacked layers [1, L, ...]."""
  found = {}
  for name, x in named_leaves(tree).items():
    stacked = bool(program.stack(name))
    rows = x if x.ndim > stacked else x[..., None]
    numbers = jax.vmap(_numbers)(rows) if stacked else _numbers(rows)
    found[name] = {key: value[None] for key, value in numbers.items()}
  return found


def observe_step(program: Program, state: State, batch: Batch) -> dict[str, Any]:
  """Returns the numbers of what is in `Observed`, and the sums of the losses and weights of rows.

  Args:
    program: without pipeline stages.
    state: before the step.
    batch: of the step.
  """
  count = program.spec.gradient_accumulation_steps
  key = jax.random.fold_in(jax.random.key(program.spec.seed), state.step)
  keys = jax.random.split(key, count) if count > 1 else key[None]
  params = program.gradient_point(state)

  def of_microbatch(variables: Any, one: tuple[Batch, jax.Array]) -> tuple[Any, Any]:
    microbatch, key = one

    def loss(weights: jax.Array) -> tuple[jax.Array, Any]:
      with activations.recording(_numbers) as found:
        sums, after = program.forward(params, variables, {**microbatch, "weights": weights}, key)
      return sums["loss"], (found, after)

    # The loss is linear in the weights: its gradient is the loss of each token.
    losses, (found, after) = jax.grad(loss, has_aux=True)(microbatch["weights"])
    return after, (found, losses * microbatch["weights"])

  microbatches = split_rows(batch, count)
  _, (found, losses) = jax.lax.scan(of_microbatch, state.variables or {}, (microbatches, keys))
  after, _, grads = program.step_and_gradients(state, batch)
  return {
    "parameters": _of_parameters(program, state.params),
    "activations": found,
    "losses": losses.reshape(*losses.shape[:2], -1).sum(-1),
    "weights": microbatches["weights"].reshape(*losses.shape[:2], -1).sum(-1),
    "gradients": _of_parameters(program, grads),
    "updated": _of_parameters(program, after.params),
  }


# ------------------------------ as lists ------------------------------


def compile_observer(
  job: Job, batch: Mapping[str, jax.Array | jax.ShapeDtypeStruct]
) -> Callable[[State, Mapping[str, jax.Array]], Observed]:
  """Returns what computes a step to look into it; it donates nothing.

  Args:
    job: the run; see `check`.
    batch: one of the shape of the step's, or an abstract one.
  """
  compiled = job.compile(
    lambda state, batch: observe_step(job.program, state, batch),
    *(job.state, batch),
    in_shardings=(job.state_shardings, job.batch_shardings),
    out_shardings=NamedSharding(job.mesh, PartitionSpec()),
  ).function

  order, program = functools.partial(_in_order, job.config.model), job.program

  def observe(state: State, batch: Mapping[str, jax.Array]) -> Observed:
    found = jax.device_get(compiled(state, dict(batch)))
    losses, weights = (_of_batch(found[name]) for name in ("losses", "weights"))
    return Observed(
      order(*_parameters(program, found["parameters"])),
      order(*_activations(found["activations"])),
      losses / np.where(weights == 0, 1, weights),
      order(*_parameters(program, found["gradients"]))[::-1],
      order(*_parameters(program, found["updated"])),
    )

  return observe


def _of_batch(numbers: np.ndarray) -> np.ndarray:
  """Returns [B] of [microbatches, rows]: row r is of microbatch r % their count."""
  return numbers.swapaxes(0, 1).reshape(-1)


def _array(name: str, numbers: Mapping[str, np.ndarray]) -> Array:
  """Returns an array of what `_numbers` has found in each microbatch."""
  bad = _of_batch(numbers["bad"])
  row = int(np.argmax(bad > 0))
  of_row = row % len(numbers["bad"])
  shape, at = tuple(numbers["row_shape"][of_row].tolist()), int(numbers["at"][of_row])
  return Array(
    name,
    rms=float(np.sqrt(np.mean(np.square(numbers["rms"], dtype=np.float64)))),
    largest=float(np.max(numbers["largest"])),
    elements=len(bad) * math.prod(shape),
    bad=bad,
    first=(row, *map(int, np.unravel_index(at, shape))) if bad.any() else (),
    value=float(numbers["value"][of_row]),
  )


def _activations(found: Found) -> tuple[Found, dict[str, str]]:
  """Returns activations and their stacks: they are recorded in the order of the forward pass."""
  letters = {stack: letter for letter, stack in STACKS.items()}
  return found, {name: letters.get(name[: name.find("/") + 1], "") for name in found}


def _parameters(program: Program, found: Found) -> tuple[Found, dict[str, str]]:
  """Returns parameters or gradients, and their stacks, in the order of the model's table."""
  rules = list(program.letters)

  def place(name: str) -> tuple[int, str]:
    names = name, _ADAPTER.sub("/kernel", name)  # adapters stand at the table's end
    matching = (i for i, rule in enumerate(rules) for n in names if re.fullmatch(rule, n))
    return min(matching, default=0), name

  return found, {name: program.stack(name) for name in sorted(found, key=place)}


def _in_order(model: ConfigDict, found: Found, letters: Mapping[str, str]) -> list[Array]:
  """Returns arrays in the order of computation: all of a layer, then all of the next.

  Args:
    model: the section of the config.
    found: name -> numbers.
    letters: of the stack of layers that has an array, or ""; in the order of one layer.
  """
  behind, listed = False, []
  for place, (name, letter) in enumerate(letters.items()):
    numbers = found[name]
    if not letter:
      listed.append((2 if behind else 0, 0, place, _array(name, numbers)))
      continue
    behind = True
    stack, layers = STACKS[letter], range(numbers["at"].shape[1])
    if stack == MTP_LAYERS:
      layers = [model.layers + n for n in layers]
    elif "layer_types" in model:
      layers = [i for i in range(model.layers) if stack_of(model, i) == stack]
    for row, layer in enumerate(layers):
      title = f"layer {layer + 1}: {name.removeprefix(stack)}"
      one = _array(title, {key: x[:, row] for key, x in numbers.items()})
      listed.append((1, layer, place, one))
  return [one for *_, one in sorted(listed, key=lambda one: one[:3])]
