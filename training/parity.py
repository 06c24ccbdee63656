"""Parity of two layouts: compares every raw gradient and three steps, tensor by tensor.

The norm is relative L2 per tensor: element-wise, rounding alone gives meaningless differences. In
float64 only a bug can exceed the bound.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from input_pipeline import ramp
from partitioning.rules import named_leaves, shape_text
from runtime import forms
from training.averages import FIELD, Averaged
from training.schedules import CONSTANT
from training.setup import Job
from training.splits import Data, open_data
from training.state import State

BOUNDS = {"float32": 1e-5, "float64": 1e-12}
STEPS = 3
# In place of AdamW, which divides a constant factor of a gradient away.
SGD = {
  "optimizer.name": "sgd",
  "optimizer.arguments": "",
  "optimizer.groups": (),
  "optimizer.clip_groups": False,
  "optimizer.clip_quantile": 0.0,
  "optimizer.clip_window": 50,
  "optimizer.ema_decays": (),
  "optimizer.state_memory": "device",
  "optimizer.learning_rate": 0.05,
  "optimizer.momentum": 0.9,
  **CONSTANT,
}
_SAME_DATA = ("name", "global_batch_size", "shuffle")  # keys that decide a batch
_MOST_NAMED = 12
SAME, ROUNDING = "to the bit", "rounding"
_OWN_ROUNDING = 50  # epsilons, relative to a tensor's own size, that are less than either bound


@dataclasses.dataclass(frozen=True)
class Trained:
  """The results of three steps, as full arrays on the host.

  Attributes:
    text: the compiled program, which also returns the gradients.
    gradients: of the first step, raw: before clipping and optimizer.
    losses: of each step.
    norms: likewise, the global norm that clipping uses.
    parameters: after the last step; with `optimizer.ema_decays` also their averages.
  """

  text: str
  gradients: dict[str, np.ndarray]
  losses: list[float]
  norms: list[float]
  parameters: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Difference:
  """The distance of one tensor from the other side's.

  Attributes:
    what: `loss`, `gradient`, `norm` or `parameter`.
    name: the tensor's, or the step's.
    distance: relative L2; infinite where one side is not finite.
    note: SAME where all bits are, or ROUNDING where it is no more than the rounding of all tensors
      of its kind; then it may be relative to all of these, which the note says.
  """

  what: str
  name: str
  distance: float
  note: str = ""


class CopiesDifferError(RuntimeError):
  """Replicas differ between devices."""


def prove(config: ConfigDict, platform: str, keep: Collection[str] = ()) -> None:
  """Changes a config, before it is finalized, to what a comparison needs.

  Args:
    config: of one side; changed.
    platform: TPUs have no float64.
    keep: dotted keys to leave unchanged.

  Raises:
    ValueError: parameters in bfloat16, whose rounding is larger than what a comparison looks for,
      or groups with an outer optimizer, whose steps no other mesh takes.
  """
  if every := config.optimizer.outer_every_steps:
    raise ValueError(
      f"optimizer.outer_every_steps={every}: groups of devices take steps of their own, which no "
      f"other mesh takes; compare with --set optimizer.outer_every_steps=0"
    )
  values: dict[str, Any] = {
    "training.matmul_precision": "highest",
    "training.stochastic_rounding": None,
    "optimizer.state_dtype": None,
    "training.gradient_reduction_dtype": "compute",  # both would be of float64
    **ramp.OFF,  # both sides take the batches of the last stage
  }
  if "training.parameter_dtype" not in keep:
    values["training.parameter_dtype"] = "float32" if platform == "tpu" else "float64"
  dtype = values.get("training.parameter_dtype", config.training.parameter_dtype)
  if dtype not in BOUNDS:
    raise ValueError(
      f"training.parameter_dtype={dtype}: layouts are compared in {' or '.join(BOUNDS)}, where "
      f"rounding is smaller than what a wrong layout changes; leave it out"
    )
  values["training.compute_dtype"] = dtype
  if config.optimizer.name != "sgd" and "optimizer.name" not in keep:
    values.update(SGD)
  for key, value in values.items():
    if key not in keep:
      config.update_from_flattened_dict({key: value})


def bring_together(jobs: Sequence[Job]) -> list[Data]:
  """Opens the data of two jobs, which must train the same parameters on the same batches.

  Raises:
    ValueError: they do not, with all that differs; or as `open_data`.
  """
  data = [open_data(job) for job in jobs]
  ours, wanted = jobs
  lines = [
    f"{name}: {a} and {b}"
    for name, a, b in [
      ("seed", ours.config.seed, wanted.config.seed),
      ("task", ours.config.task, wanted.config.task),
      *((f"data.{k}", ours.config.data[k], wanted.config.data[k]) for k in _SAME_DATA),
      ("the rows' digest", *(one.train.source.fingerprint for one in data)),
      ("training.parameter_dtype", *(job.config.training.parameter_dtype for job in jobs)),
    ]
    if a != b
  ]
  lines += _other_arrays(*({f"batch/{name}": x for name, x in job.batch.items()} for job in jobs))
  lines += _other_arrays(*(named_leaves(job.state.params) for job in jobs))
  if lines:
    head = "the two do not train the same parameters on the same batches:"
    fix = "\n--set key=value sets a key on both sides"
    raise ValueError(f"{forms.refusal(head, lines, _MOST_NAMED)}{fix}")
  return data


def _other_arrays(ours: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
  ours, wanted = (
    {name: f"{leaf.dtype}{shape_text(leaf.shape)}" for name, leaf in side.items()}
    for side in (ours, wanted)
  )
  return [
    f"{name}: {ours.get(name, 'absent')} and {wanted.get(name, 'absent')}"
    for name in sorted({*ours, *wanted})
    if ours.get(name) != wanted.get(name)
  ]


def compare(jobs: Sequence[Job], data: Sequence[Data]) -> list[Difference]:
  """Trains both for three steps on the same batches, one after the other; see `differences`."""
  trained = [
    take_steps(job, lambda step, job=job, one=one: one.train.batch(step, job.batch_shardings))
    for job, one in zip(jobs, data, strict=True)
  ]
  return differences(*trained)


def beyond(found: Sequence[Difference], bound: float) -> list[Difference]:
  """Returns the differences beyond the bound, in the order in which a step makes the tensors."""
  return [one for one in found if not one.distance <= bound]


def take_steps(
  job: Job, batch: Callable[[int], Mapping[str, jax.Array]], state: State | None = None
) -> Trained:
  """Takes three steps and gives the first one's gradients too.

  Args:
    job: prepared, under x64 where its parameters are float64.
    batch: step, counted from 0 -> the global batch, placed as the job's.
    state: to begin with, and not to be used afterwards; None: the job's own.

  Raises:
    LayoutError: a leaf of the state is not sharded as its spec says.
    CopiesDifferError: replicas differ between devices.
  """
  shardings = job.state_shardings
  trained, _ = job.program.split(shardings.params)
  compiled = job.compile(
    job.program.step_and_gradients,
    job.state,
    job.batch,
    in_shardings=(shardings, job.batch_shardings),
    out_shardings=(shardings, NamedSharding(job.mesh, PartitionSpec()), trained),
  ).function
  state = job.initial_state() if state is None else state
  first, losses, norms = {}, [], []
  for step in range(STEPS):
    state, metrics, gradients = compiled(state, batch(step))
    if step == 0:
      first = _on_host(gradients, "gradient")
    losses.append(float(metrics["loss"]))
    norms.append(float(metrics["grad_norm"]))
    job.check_placed(state)
  parameters = _on_host(state.params, "parameter")
  if isinstance(state.optimizer, Averaged):
    averages = _on_host(state.optimizer.averages, "average")
    parameters |= {f"{FIELD}/{name}": average for name, average in averages.items()}
  return Trained(compiled.as_text(), first, losses, norms, parameters)


def differences(ours: Trained, wanted: Trained) -> list[Difference]:
  """Compares losses, gradients, norms and parameters, in the order in which a step makes them.

  Raises:
    ValueError: the tensors differ in name, shape or dtype.
  """
  found = [*_numbers("loss", ours.losses, wanted.losses)]
  found += _tensors("gradient", ours.gradients, wanted.gradients)
  found += _numbers("norm", ours.norms, wanted.norms)
  found += _tensors("parameter", ours.parameters, wanted.parameters)
  return found


def _numbers(what: str, ours: list[float], wanted: list[float]) -> list[Difference]:
  return [
    _difference(what, f"step {step}", np.float64(a), np.float64(b))
    for step, (a, b) in enumerate(zip(ours, wanted, strict=True), start=1)
  ]


def _tensors(
  what: str, ours: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]
) -> list[Difference]:
  """Compares tensor by tensor, some of which are mathematically zero.

  A bias that cancels has a gradient of zero, and only rounding errors on either side: a difference
  within the rounding error of all tensors together is measured by their size.
  """
  signatures = [{n: (x.shape, x.dtype.name) for n, x in side.items()} for side in (ours, wanted)]
  if signatures[0] != signatures[1]:
    odd = sorted({n for n, _ in signatures[0].items() ^ signatures[1].items()})
    raise ValueError(f"{what}s differ in name, shape or dtype: {', '.join(odd)}")
  codes = {n for n, x in wanted.items() if jnp.issubdtype(x.dtype, jnp.integer)}  # never rounded
  epsilons = {n: 0.0 if n in codes else float(jnp.finfo(x.dtype).eps) for n, x in wanted.items()}
  ours, wanted = ({name: _wide(x) for name, x in side.items()} for side in (ours, wanted))
  squares = (np.sum(np.square(x)) for name, x in wanted.items() if name not in codes)
  everything = math.sqrt(sum(map(float, squares)))
  return [
    _difference(what, name, ours[name], value, epsilons[name], everything)
    for name, value in wanted.items()
  ]


def _wide(x: np.ndarray) -> np.ndarray:
  """Returns bfloat16 and integers, which frozen parameters may be, as what NumPy computes in."""
  narrow = x.dtype == jnp.bfloat16 or jnp.issubdtype(x.dtype, jnp.integer)
  return x.astype(np.float32) if narrow else x


def _difference(
  what: str,
  name: str,
  ours: np.ndarray,
  wanted: np.ndarray,
  epsilon: float = 0.0,
  everything: float = 0.0,
) -> Difference:
  """Returns |ours - wanted| / |wanted|, in L2.

  Args:
    what: of the result.
    name: likewise.
    ours: one side.
    wanted: the other.
    epsilon: of its dtype.
    everything: the size of all tensors of its kind.
  """
  if not (np.all(np.isfinite(ours)) and np.all(np.isfinite(wanted))):
    return Difference(what, name, math.inf)
  if ours.tobytes() == wanted.tobytes():
    return Difference(what, name, 0.0, SAME)
  far, scale = (float(np.linalg.norm(x)) for x in (ours - wanted, wanted))
  if far > epsilon * everything:
    return Difference(what, name, far / scale if scale else math.inf)
  if far <= _OWN_ROUNDING * epsilon * scale:
    return Difference(what, name, far / scale if far else 0.0, ROUNDING)
  return Difference(what, name, far / everything, f"{ROUNDING}, relative to all {what}s")


def _on_host(tree: Any, what: str) -> dict[str, np.ndarray]:
  """Returns name -> the full array; all replicas of a shard must be the same."""
  return {name: _whole(leaf, f"{what} {name}") for name, leaf in named_leaves(tree).items()}


def _whole(leaf: jax.Array, name: str) -> np.ndarray:
  pieces: dict[Any, tuple[np.ndarray, jax.Device]] = {}
  for shard in leaf.addressable_shards:
    place = tuple(part.indices(size) for part, size in zip(shard.index, leaf.shape, strict=True))
    value = np.asarray(shard.data)
    first, device = pieces.setdefault(place, (value, shard.device))
    if first.tobytes() != value.tobytes():
      raise CopiesDifferError(
        f"{name}: {device} and {shard.device} have different numbers for the same shard, which "
        f"should be replicas"
      )
  if leaf.is_fully_addressable:
    return np.asarray(leaf)
  everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
  return np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(leaf))
