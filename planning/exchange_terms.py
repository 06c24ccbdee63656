"""Communication of a step by formula: attention over a split sequence, experts, pipeline stages."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from partitioning.parallel import expert_exchange, ring_attention
from planning import passes
from runtime.layer_kinds import sparse_layers
from training.setup import Job


@dataclasses.dataclass(frozen=True)
class Term:
  """The collectives of one kind and cause.

  Attributes:
    kind: of `collectives.KINDS`.
    axes: of the mesh; those of size 1 are dropped.
    runs: in one step.
    elements: of the payload of one run, per device.
    why: the arrays that they carry.
    itemsize: bytes of an element.
    hidden: whether matmuls can run at the same time.
  """

  kind: str
  axes: tuple[str, ...]
  runs: int
  elements: float
  why: str
  itemsize: int
  hidden: bool = False


def of_job(job: Job) -> Iterator[Term]:
  """Yields the terms of a decoder."""
  yield from _of_context(job)
  yield from _of_experts(job)
  yield from _of_stages(job)


def axes_of_activations(job: Job, *dims: str) -> tuple[str, ...]:
  """Returns the mesh axes that shard these dims of activations, by the config's table."""
  table = job.config.partitioning.activations
  return tuple(axis for dim in dims for axis in table.get(dim, ()))


def tokens_of_a_device(job: Job) -> float:
  """Returns the tokens of a step on one device."""
  sizes, data = job.devices.sizes, job.config.data
  parts = math.prod(sizes[axis] for axis in axes_of_activations(job, "batch", "sequence"))
  return data.global_batch_size * data.sequence_length / parts


def _of_context(job: Job) -> Iterator[Term]:
  """Yields those of attention over a split sequence."""
  config, sizes = job.config, job.devices.sizes
  model, runs = config.model, passes.of_job(job)
  narrow, around = np.dtype(config.training.compute_dtype).itemsize, sizes["context"]
  tokens, tensor = tokens_of_a_device(job) / runs.microbatches, sizes["tensor"]
  heads = model.kv_heads // tensor if model.kv_heads % tensor == 0 else model.kv_heads
  # On average: the heads of values may have another size than those of keys.
  pair = tokens * heads * (model.head_size + model.value_head_size) / 2
  length = config.data.sequence_length
  if ring_attention.use_ring(model.context_attention, length, around, model.heads, model.kv_heads):
    why = "keys, values and their gradients, around the ring"
    others = around - 1
    often = 2 * others * runs.forward + (4 * others + 2) * runs.backward
    yield Term("collective-permute", ("context",), often, pair, why, narrow)
  else:
    why = "keys and values of whole rows"
    yield Term("all-gather", ("context",), 2 * runs.forward, pair * around, why, narrow)
    queries = pair / heads * around * model.heads / tensor
    why = f"gradients of {why}"
    yield Term("all-reduce", ("context",), 2 * runs.backward, queries, why, narrow)


def _of_experts(job: Job) -> Iterator[Term]:
  """Yields those of the exchange of tokens, of one round in each layer with experts."""
  model, devices = job.config.model, job.devices.sizes["expert"]
  if not model.experts or devices == 1:
    return
  narrow, runs = np.dtype(job.config.training.compute_dtype).itemsize, passes.of_job(job)
  forward, back = (
    often * sparse_layers(model) // model.layers for often in (runs.forward, runs.backward)
  )
  tokens, each = round(tokens_of_a_device(job) / runs.microbatches), model.experts_per_token
  axes = ("expert",)
  if model.expert_exchange == expert_exchange.ROUNDS:
    own = model.experts // devices
    given = expert_exchange.Exchange("rounds", "", devices, own, model.expert_capacity, None, "", 1)
    rows = devices * given.buffer(tokens, each)
    # Tokens out and results back; backward tokens and gradients out, and gradients back.
    why = "rows of the exchange of tokens"
    yield Term("all-to-all", axes, 2 * forward + 3 * back, rows * model.model_size, why, narrow)
    yield Term("all-to-all", axes, forward + 2 * back, rows, "gates of the exchange of tokens", 4)
    yield Term(
      "all-to-all", axes, forward + back, model.experts, "how many tokens are exchanged", 4
    )
    return
  every, why = tokens * devices, "tokens of all devices with the experts"
  yield Term("all-gather", axes, forward + 2 * back, every * model.model_size, why, narrow)
  yield Term("all-gather", axes, 2 * (forward + back), every * each, f"{why}, their gates", 4)
  yield Term("reduce-scatter", axes, forward + back, every * model.model_size, why, narrow)
  yield Term("reduce-scatter", axes, back, every * each, f"{why}, their gates", 4)


def _of_stages(job: Job) -> Iterator[Term]:
  """Yields those of pipeline stages: two permutes in a tick, and once what is replicated."""
  config, schedule = job.config, job.program.pipeline
  if schedule is None:
    return
  count, axes = config.training.gradient_accumulation_steps, ("stage",)
  narrow = np.dtype(config.training.compute_dtype).itemsize
  ticks, size = count * schedule.forward_ticks, passes.residual_elements(job)
  # While a tick's backward pass is computed, what its forward pass has returned can be sent.
  yield Term("collective-permute", axes, ticks, size, "outputs of stages", narrow, True)
  yield Term("collective-permute", axes, ticks, size, "gradients of their inputs", narrow)
  for name, elements in passes.of_stages(job, split=False):
    if name in job.program.trained:
      why = f"the gradient of {name}, of the first stage and the last"
      yield Term("all-reduce", axes, count, elements, why, 4)
  for name, elements in passes.of_stages(job, split=True) if schedule.chunks > 1 else ():
    why, each = f"{name}, to the stages that compute with it", elements / schedule.chunks
    dtypes = job.program.gathered.dtypes if job.program.gathered is not None else {}
    itemsize, runs = np.dtype(dtypes.get(name, np.float32)).itemsize, count * schedule.chunks
    yield Term("collective-permute", axes, runs, each, why, itemsize)
    if name in job.program.trained:
      yield Term("collective-permute", axes, runs, each, f"the gradient of {name}, back", 4)
