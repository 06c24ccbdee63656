"""A coordinate check: whether activations and their changes are as large at every width.

Source: arXiv:2203.03466, appendix D.1. The model of a config is trained at several widths for a few
steps, on the same batches; the size of an activation is the root mean square of its elements.
"""

import copy
import dataclasses
import fractions
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from input_pipeline import ramp
from models import activations
from models.activations import STACKED
from models.losses import Batch
from partitioning.dtypes import wide_dtype
from training.schedules import CONSTANT
from training.setup import Job
from training.state import State
from training.step import Program
from training.tasks import DPO, GRPO

STEPS, SEEDS = 5, 3
# The largest slope of log size over log width that counts as flat: at 4 times the width an
# activation is at most 1.5 times as large.
BOUND = 0.3
DEFAULT = (fractions.Fraction(1, 4), fractions.Fraction(1, 2), 1, 2)  # widths over model.model_size
# Keys of `model` that grow with its width; heads stay as large, and become more.
_WIDTHS = ("model_size", "feedforward_size", "heads", "kv_heads")
_EXPERT_WIDTHS = ("expert_feedforward_size", "shared_feedforward_size")  # with model.experts
_LAYERS = 4  # that are shown, the last one among them
# Of the first steps of a long run, a warm-up would show little.
_CONSTANT = {
  **CONSTANT,
  **ramp.OFF,
  "optimizer.ema_decays": (),
  "training.loss_chunks": 1,  # all logits at once
}


@dataclasses.dataclass(frozen=True)
class Point:
  """An activation, by width.

  Attributes:
    name: such as `layer 2: mlp`.
    wide: whether it has a width itself, as the residual has and logits have not.
    sizes: of [steps + 1, widths, seeds]: its root mean square before each step and after the last.
    changes: likewise: that of its difference from initialization.
  """

  name: str
  wide: bool
  sizes: np.ndarray
  changes: np.ndarray


# Of one width: activation -> the size of its last dim, and root mean squares of it and of its
# difference from initialization, [2, seeds, steps + 1] or, of stacked layers, [2, seeds, steps + 1,
# L]; in the order of the forward pass.
Trained = Mapping[str, tuple[int, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Slope:
  """How the size of an activation depends on the width: as width ** value.

  Attributes:
    point: the activation.
    change: of its change after the last step; else of its size at initialization.
    value: the exponent.
    flat: whether it is near enough to 0.
  """

  point: Point
  change: bool
  value: float
  flat: bool


# ------------------------------ the family of configs ------------------------------


def widths(model: ConfigDict, given: Sequence[str]) -> list[int]:
  """Returns the widths to train, in ascending order.

  Args:
    model: the section of a finalized config.
    given: as on the command line; (): a quarter, a half, one and two times the config's width.

  Raises:
    ValueError: fewer than two widths, or one that the model cannot have.
  """
  if wrong := [one for one in given if not one.strip().isdecimal()]:
    raise ValueError(f"--widths: {wrong[0]!r} is no whole number; such as --widths=64,128,256")
  chosen = sorted({int(one) for one in given})
  step = width_step(model)
  if not given:
    chosen = [int(share * model.model_size) for share in DEFAULT]
    chosen = [width for width in chosen if width % step == 0 and width]
  if wrong := [width for width in chosen if width < 1 or width % step]:
    sizes = ", ".join(f"model.{key}={model[key]}" for key in _widths(model))
    raise ValueError(
      f"--widths={','.join(given)}: {wrong[0]} is not a multiple of {step}, so that heads and "
      f"other widths would not be whole numbers ({sizes})"
    )
  if len(chosen) < 2:
    raise ValueError(
      f"--widths={','.join(map(str, chosen))}: at least two widths, multiples of {step}"
    )
  return chosen


def _widths(model: ConfigDict) -> list[str]:
  """Returns the keys of the widths that a model has."""
  found = [key for key in _WIDTHS if key in model]
  return [*found, *(key for key in _EXPERT_WIDTHS if model.get("experts") and model[key])]


def width_step(model: ConfigDict) -> int:
  """Returns the number that a width must be a multiple of, so that all widths are whole numbers."""
  return model.model_size // math.gcd(*(model[key] for key in _widths(model)))


def check(
  model: ConfigDict, lora: ConfigDict, task: str, *, steps: int, sizes: Mapping[str, int]
) -> None:
  """Raises ValueError for a finalized config that cannot be checked.

  Its width cannot be chosen, there are no steps, or pipeline stages among the sizes of the mesh.
  """
  if steps < 1:
    raise ValueError(f"--steps={steps}: at least 1")
  if (stages := sizes.get("stage", 1)) > 1:
    raise ValueError(
      f"mesh.stage={stages}: a coordinate check looks at the activations of a whole batch, and a "
      f"stage has those of its layers, of one microbatch after another; set mesh.stage=1"
    )
  if model.get("folder"):
    raise ValueError(
      f"model.folder={model.folder}: a trained model has the width it has; check a recipe "
      f"or a preset"
    )
  if lora.rank or task in (DPO, GRPO):
    what = f"lora.rank={lora.rank}" if lora.rank else f"the task {task}"
    raise ValueError(f"{what}: a coordinate check trains a model from the start; check without it")


def of_width(config: ConfigDict, resolved: ConfigDict, width: int) -> ConfigDict:
  """Returns a config, not finalized, of the same model at another width.

  All widths are in proportion. Heads are as large, and there are more of them.

  Args:
    config: as parsed.
    resolved: the same config, finalized.
    width: of the model.
  """
  config = copy.deepcopy(config)
  with config.unlocked():
    config.update_from_flattened_dict({**_CONSTANT, **overrides(resolved, width)})
  return config


def overrides(resolved: ConfigDict, width: int) -> dict[str, Any]:
  """Returns the dotted keys that give a finalized config's model another width; see `of_width`."""
  ratio = fractions.Fraction(width, resolved.model.model_size)
  changed = {f"model.{k}": int(resolved.model[k] * ratio) for k in _widths(resolved.model)}
  if "head_size" in resolved.model:
    changed["model.head_size"] = resolved.model.head_size
  changed["optimizer.learning_rate"] = resolved.optimizer.learning_rate  # the same at all widths
  return changed


# ------------------------------ training and recording ------------------------------


def activations_of(program: Program, state: State, batch: Batch) -> dict[str, jax.Array]:
  """Returns name -> activation of a forward pass without dropout; of stacked layers, layers first.

  Raises:
    ValueError: the model records none.
  """
  with activations.recording() as found:
    program.sums(state.params, batch, variables=state.variables)
  if not found:
    raise ValueError(
      f"model.name={program.spec.model!r}: it records no activations; call "
      f"models.activations.record in its forward pass"
    )
  return found


def _rms(found: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the root mean squares of activations by name, scalars; of stacked layers, [L]."""

  def one(name: str, x: jax.Array) -> jax.Array:
    axes = tuple(range(1 if name.startswith(STACKED) else 0, x.ndim))
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(wide_dtype(x.dtype))), axis=axes))

  return {name: one(name, x) for name, x in found.items()}


def train(
  job: Job,
  batch: Callable[[int], Mapping[str, jax.Array]],
  steps: int,
  seeds: int = SEEDS,
  said: Callable[[str], None] = lambda what: None,
) -> Trained:
  """Trains one width from several initializations.

  Args:
    job: prepared.
    batch: step, counted from 0 -> the global batch, placed as the job's. All sizes are those of the
      batch of step 0.
    steps: how many to take.
    seeds: how many initializations.
    said: is told what happens next.
  """
  everywhere = NamedSharding(job.mesh, PartitionSpec())
  placed = job.state_shardings
  with job.tracing():  # in the order in which the model records activations
    shapes = jax.eval_shape(
      lambda *given: activations_of(job.program, *given), job.state, job.batch
    )

  def sizes_and_changes(state: State, first: State, batch: Batch) -> tuple[Any, Any]:
    now, before = (activations_of(job.program, one, batch) for one in (state, first))
    return _rms(now), _rms({name: x - before[name] for name, x in now.items()})

  said("compiling")
  init, step = job.compile_init().function, job.compile_train_step().function
  measure = job.compile(
    sizes_and_changes,
    *(job.state, job.state, job.batch),
    in_shardings=(placed, placed, job.batch_shardings),
    out_shardings=everywhere,
  ).function
  found: list[list[Any]] = []
  for seed in range(seeds):
    state = init(jax.random.key(job.config.seed + seed))
    first = jax.tree.map(jnp.copy, state)  # the step takes the memory of what it is given
    found.append([measure(state, first, batch(0))])
    for number in range(steps):
      said(f"seed {seed + 1} of {seeds}, step {number + 1} of {steps}")
      state, _ = step(state, batch(number))
      found[-1].append(measure(state, first, batch(0)))
  rows = jax.device_get(found)
  values = lambda name: np.array(  # noqa: E731
    [[[of_step[part][name] for of_step in row] for row in rows] for part in (0, 1)]
  )
  return {name: (x.shape[-1], values(name)) for name, x in shapes.items()}


# ------------------------------ what it shows ------------------------------


def points(by_width: Sequence[Trained]) -> list[Point]:
  """Returns the activations of all widths, in the order of the forward pass; of some layers."""
  names, found = list(by_width[0]), []
  stacked = [name for name in names if name.startswith(STACKED)]
  for name in names:
    if name not in stacked:
      found.append(_point(by_width, name, name))
    elif name == stacked[0]:  # all of a layer, then the next
      for layer in shown_layers(by_width[0][name][1].shape[-1]):
        for each in stacked:
          title = f"layer {layer + 1}: {each.removeprefix(STACKED)}"
          found.append(_point(by_width, each, title, layer))
  return found


def _point(by_width: Sequence[Trained], name: str, title: str, layer: int | None = None) -> Point:
  lengths, arrays = zip(*(one[name] for one in by_width), strict=True)
  if layer is not None:
    arrays = [array[..., layer] for array in arrays]
  return Point(
    title, len({*lengths}) > 1, *np.moveaxis(np.stack(arrays), (1, 3, 0, 2), (0, 1, 2, 3))
  )


def shown_layers(count: int) -> list[int]:
  """Returns the numbers of the layers that are shown, counted from 0: all, or some of many."""
  if count <= _LAYERS:
    return list(range(count))
  return [round((i + 1) * count / _LAYERS) - 1 for i in range(_LAYERS)]


def slopes(found: Sequence[Point], at: Sequence[int], bound: float = BOUND) -> list[Slope]:
  """Returns the slopes of sizes at initialization and of changes after the last step.

  A change of hidden activations that falls with the width is not flat: that part of the model stops
  to learn. Under muP logits fall, at initialization as one over the square root of the width, and
  with them the part of their change that is due to the initial unembedding; only if they grow they
  are not flat.

  Args:
    found: of `points`.
    at: the widths.
    bound: of a slope that counts as flat.
  """
  result = []
  for point in found:
    for change, values in ((False, point.sizes[0]), (True, point.changes[-1])):
      value = slope(values, at)
      flat = abs(value) <= bound if change and point.wide else value <= bound
      result.append(Slope(point, change, value, flat))
  return result


def slope(values: np.ndarray, at: Sequence[int]) -> float:
  """Returns the exponent with which values grow with the width, by least squares of logarithms.

  Args:
    values: [widths, seeds]; infinite where one is not finite, or where none is above 0.
    at: the widths.
  """
  if not np.all(np.isfinite(values)) or not np.all(values > 0):
    return math.inf
  return float(np.polyfit(np.log(at), np.mean(np.log(values), axis=1), 1)[0])
