"""Communication and time of a step by formula, for topologies without a compiler.

The terms are those of `docs/budgets.md`, which tests verify for compiled programs, with the bytes
of each array from its layout. Source of the times: the scaling book, chapter on training.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from analysis.chips import Chip, Rates
from analysis.roofline import Work, matmul_seconds
from models.transformer_dims import DOWN_PROJECTIONS, in_8_bits, is_latent, latent_sizes
from partitioning.dims import axes_size, spec_axes
from partitioning.parallel import expert_exchange, ring_attention
from partitioning.shardings import bytes_per_device, shard_shape
from planning import interconnect, traced_cost
from planning.interconnect import Places, Wire
from planning.step_time import Sent, Times
from runtime.layer_kinds import sparse_layers
from training.optimizer import matrix_groups
from training.optimizers import schedule_free
from training.setup import Job

_LATENTS = "latent vectors"

_STACKS = ("L", "Z")  # letters of stacked layers: of all or those with experts, of those without


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


Operations = Sequence[tuple[Work, int, bool]]


def times(
  job: Job,
  places: Places,
  chip: Chip,
  rates: Rates,
  *,
  fused: bool = True,
  traced: Operations | None = None,
) -> Times:
  """Returns how long a step takes.

  Operations of the traced gradients run one after another, each for the longer of its FLOPs and its
  HBM traffic; then the optimizer passes over the state. The communication of FSDP and data
  parallelism overlaps with that as far as possible; that of `tensor` and `context` is exposed.

  Args:
    job: a prepared job.
    places: of its mesh's devices in the topology.
    chip: of a device.
    rates: achieved shares of the chip's constants.
    fused: as of `traced_cost.operations`.
    traced: of `traced_cost.operations`, if it is known; else it is traced here.
  """
  if traced is None:
    traced = traced_cost.operations(job, fused=fused)
  bandwidth = rates.bandwidth(chip)
  update = Work(0, _bytes(job))
  work, compute, busy = update, 0.0, update.bytes / bandwidth
  for one, runs, wide in [*traced, *traced_cost.of_matrices(job)]:
    work += one * runs
    # On GPUs float32 runs as TF32, at half the speed of bfloat16 (NVIDIA's data sheets).
    seconds = matmul_seconds(one, chip, rates) * (2 if wide and not chip.torus else 1)
    compute += runs * seconds
    busy += runs * max(seconds, one.bytes / bandwidth)
  memory = work.bytes / bandwidth
  found = []
  for term in terms(job):
    axes = tuple(axis for axis in job.mesh.axis_names if axis in term.axes)
    wire = _wire(term.kind, groups(job, axes), places)
    size = round(term.elements * term.itemsize)
    seconds = term.runs * interconnect.seconds(term.kind, size, wire, rates)
    found.append((term, Sent(term.kind, axes, size, term.runs, term.why, wire, seconds, seconds)))
  hidden = sum(one.seconds for term, one in found if term.hidden)
  share = max(0.0, hidden - busy) / hidden if hidden else 0.0
  sent = tuple(
    dataclasses.replace(one, exposed_seconds=share * one.seconds) if term.hidden else one
    for term, one in found
  )
  return Times(busy + sum(one.exposed_seconds for one in sent), compute, memory, work, sent)


def _wire(kind: str, found: list[list[int]], places: Places) -> Wire:
  """Returns the slowest link of the groups; those of a permute pass arrays around a ring."""
  if kind == "collective-permute":
    return places.route(
      [pair for one in found for pair in zip(one, one[1:] + one[:1], strict=True)]
    )
  return min(map(places.wire, found), key=lambda wire: wire.bandwidth)


def groups(job: Job, axes: tuple[str, ...]) -> list[list[int]]:
  """Returns groups of places in `mesh.devices.flat` that differ only along these axes."""
  sizes = tuple(job.mesh.shape.values())
  numbers = np.arange(job.mesh.size).reshape(sizes)
  chosen = [job.mesh.axis_names.index(axis) for axis in axes]
  numbers = np.moveaxis(numbers, chosen, range(len(chosen)))
  return numbers.reshape(math.prod(sizes[i] for i in chosen), -1).T.tolist()


def terms(job: Job) -> list[Term]:
  """Returns the communication of a step; terms whose axes all have size 1 are omitted."""
  sizes = job.devices.sizes
  every = [*_of_parameters(job), *_of_the_optimizer(job), *_of_matrices(job)]
  if job.config.model.name == "transformer":
    every += [*_of_activations(job), *_of_context(job), *_of_experts(job)]
  if job.config.model.name == "vit":
    every += _of_encoder(job)
  kept = []
  for term in every:
    axes = tuple(axis for axis in term.axes if sizes[axis] > 1)
    if axes and term.runs and term.elements:
      kept.append(dataclasses.replace(term, axes=axes))
  return kept


def _of_parameters(job: Job) -> Iterator[Term]:
  """Yields the all-gathers of kernels over fsdp, and the reductions of all gradients."""
  config, sizes = job.config, job.devices.sizes
  count = config.training.gradient_accumulation_steps
  narrow = np.dtype(config.training.compute_dtype).itemsize
  reduced = 4 if config.training.gradient_reduction_dtype == "float32" else narrow
  once = job.program.reduce_once_over
  for name, placement in job.placements["parameters"].items():
    # Experts see the tokens of all devices along their axis; other parameters are replicated there.
    batch = () if "E" in placement.letters else ("expert",)
    rows = tuple(axis for axis in ("data", "fsdp", *batch) if axis != once)
    shard = math.prod(shard_shape(placement.shape, placement.spec, sizes))
    layers = placement.shape[0] if placement.letters.startswith(_STACKS) else 1
    split = "fsdp" in spec_axes(placement.spec)
    whole = shard * (sizes["fsdp"] if split else 1) / layers
    scale = len(placement.letters.lstrip("".join(_STACKS))) == 1
    wide = np.dtype(placement.dtype).itemsize if scale else narrow
    shared = (wide if scale else reduced, True)
    # Inside the scan over the layers, in both passes of each microbatch (scales are saved for the
    # second one); else once.
    both = 2 if config.partitioning.reshard_after_forward and not scale else 1
    passes = count * both * layers if layers > 1 else 1
    if split:
      itemsize = 1 if in_8_bits(config, name) else wide
      yield Term("all-gather", ("fsdp",), passes, whole, f"{name}, gathered", itemsize, True)
    if name not in job.program.trained:
      continue
    if "r" in placement.letters and "tensor" not in spec_axes(placement.spec):
      # The half of an adapter that tensor does not split: each device has a part of the gradient.
      why = f"the gradient of {name}, which tensor does not split"
      yield Term(
        "all-reduce",
        ("tensor",),
        count * layers,
        whole / (sizes["fsdp"] if split else 1),
        why,
        *shared,
      )
    why = f"the gradient of {name}"
    # A down-projection, whose input is not gathered over tensor. Where fsdp gathers the kernel,
    # tensor's devices add up theirs, even if they are equal.
    down = not scale and placement.letters in DOWN_PROJECTIONS
    if split and not scale:
      yield Term("reduce-scatter", ("fsdp",), count * layers, whole, why, *shared)
      over = (*(() if once else ("data",)), *batch, *(("tensor",) if down else ()))
      yield Term("all-reduce", over, count * layers, whole / sizes["fsdp"], why, *shared)
    else:
      yield Term("all-reduce", rows, count * layers, whole, why, *shared)
      if down and config.partitioning.sequence_parallel:
        yield Term("all-reduce", ("tensor",), count * layers, whole, why, *shared)
    if once:  # of all microbatches, when nothing is left to compute
      itemsize = np.dtype(placement.dtype).itemsize
      yield Term("all-reduce", (once,), 1, shard, f"{why}, added up", itemsize)
    partial = config.partitioning.sequence_parallel and "tensor" not in spec_axes(placement.spec)
    if scale and partial:
      yield Term("all-reduce", ("tensor",), count * layers, whole, why, *shared)
    part = shard / layers if not scale else whole
    yield Term("all-reduce", ("context",), count * layers, part, why, *shared)


def _of_the_optimizer(job: Job) -> Iterator[Term]:
  """Yields those of ZeRO-1: each device updates its shard of a parameter, then all-gathers it.

  Of schedule-free parameters the iterates, sharded likewise, are gathered before the forward pass.
  """
  averaged = schedule_free.averaged(job.state.optimizer)
  sizes, optimizer = job.devices.sizes, job.config.partitioning.optimizer
  if not any("data" in axes for axes in optimizer.values()):
    return
  for name, placement in job.placements["parameters"].items():
    if "data" in spec_axes(placement.spec) or name not in job.program.trained:
      continue
    shard = math.prod(shard_shape(placement.shape, placement.spec, sizes))
    itemsize = np.dtype(placement.dtype).itemsize
    yield Term("all-gather", ("data",), 1, shard, f"{name}, updated", itemsize)
    if name in averaged:
      yield Term("all-gather", ("data",), 1, shard, f"{name}, its iterate", itemsize)


def _of_matrices(job: Job) -> Iterator[Term]:
  """Yields those of Muon and SOAP: matrices whole to devices, and what is computed of them back.

  Of SOAP those of a step that refreshes its bases.
  """
  sizes, trained = job.devices.sizes, job.program.split(job.program.params)[0]
  for how, group in matrix_groups(job.config, trained, sizes):
    of, itemsize = f"matrices of {group.shape[0]} x {group.shape[1]}", how.dtype.itemsize
    axes = tuple(axis for axis in sizes if axis in group.exchanged)
    for move in how.moves(group):
      turn = group.each // group.rounds * group.elements(move.kind, sizes)
      runs, why = (move.there + move.back) * group.rounds, f"{of}, {move.why}"
      yield Term("all-to-all", axes, runs, turn, why, itemsize)
      whole, runs = turn * axes_size(group.shared, sizes), move.back * group.rounds
      yield Term("all-gather", group.shared, runs, whole, why, itemsize)


def _of_activations(job: Job) -> Iterator[Term]:
  """Yields those of tensor parallelism: partial results forward, gradients backward."""
  config, sizes = job.config, job.devices.sizes
  count, layers = config.training.gradient_accumulation_steps, config.model.layers
  narrow = np.dtype(config.training.compute_dtype).itemsize
  tokens = _tokens(job) / count
  width = tokens * config.model.model_size
  # Latent attention with a latent vector of queries does not gather the residual.
  latents = [tokens * size for size in latent_sizes(config.model)]
  inputs = 1 if config.model.query_latent_size == 0 else 0
  sums = count * ((3 + inputs) * layers + 2)
  gathers = count * ((4 + 2 * inputs) * layers + 2)
  if config.partitioning.collective_matmul:
    why, parts = "the embedding, between blocks", sizes["tensor"]
    for kind in ("reduce-scatter", "all-gather"):
      yield Term(kind, ("tensor",), count, width, why, narrow)
    why = "activations between blocks, while others are multiplied"
    runs = sums + gathers - 2 * count
    for size, times in ((width, runs), *((one, 3 * count * layers) for one in latents)):
      times *= parts - 1
      yield Term("collective-permute", ("tensor",), times, size / parts, why, narrow, True)
  elif config.partitioning.sequence_parallel:
    why = "activations between blocks"
    yield Term("reduce-scatter", ("tensor",), sums, width, f"{why}, scattered", narrow)
    for size in latents:
      scattered = f"{_LATENTS}, scattered"
      yield Term("reduce-scatter", ("tensor",), count * layers, size, scattered, narrow)
    itemsize = narrow
    if config.training.matmul_dtype != "compute" and not config.lora.rank:
      of_blocks = count * (2 + 2 * inputs) * layers  # in both passes
      gathers, itemsize = gathers - of_blocks, 1
      yield Term("all-gather", ("tensor",), of_blocks, width, "inputs of blocks, in 8 bits", 1)
    yield Term("all-gather", ("tensor",), gathers, width, f"{why}, gathered", narrow)
    for size in latents:
      runs = 2 * count * layers
      yield Term("all-gather", ("tensor",), runs, size, f"{_LATENTS}, gathered", itemsize)
  else:
    why = "partial sums of both blocks, and of their gradients"
    # Of attention's input also where fsdp gathers the down-projections.
    again = count * layers if latents and sizes["fsdp"] > 1 else 0
    yield Term("all-reduce", ("tensor",), sums + again, width, why, narrow)
    for size in latents:
      yield Term(
        "all-reduce", ("tensor",), count * layers, size, f"gradients of {_LATENTS}", narrow
      )
  yield from _of_rotary_keys(job, tokens, narrow)
  why = "the cross-entropy over a split vocabulary"
  yield Term("all-reduce", ("tensor",), 3 * count, tokens, why, 4)
  kv_heads = config.model.kv_heads
  if config.model.query_key_norm_across_heads:
    split = (
      2 if kv_heads % sizes["tensor"] == 0 else 1
    )  # queries, and keys if their heads are split
    why = "sums of squares over all heads, and their gradients"
    yield Term("all-reduce", ("tensor",), 2 * split * count * layers, tokens, why, 4)
  if sizes["tensor"] > 1 and kv_heads % sizes["tensor"]:
    heads = tokens * config.model.head_size
    why = "gradients of keys and values that query heads share"
    yield Term("all-reduce", ("tensor",), 2 * count * layers, heads, why, narrow)
    yield Term("all-gather", ("tensor",), 2 * count * layers, heads * kv_heads, why, narrow)
    kernel = config.model.model_size * config.model.head_size * kv_heads
    why = "gradients of the kernels of keys and values"
    yield Term("all-reduce", ("tensor",), 2 * count * layers, kernel, why, narrow)


def _of_encoder(job: Job) -> Iterator[Term]:
  """Yields those of a vision transformer's activations, over tensor and context."""
  config, sizes, dims = job.config, job.devices.sizes, job.legend
  runs = config.training.gradient_accumulation_steps * config.model.layers
  narrow = np.dtype(config.training.compute_dtype).itemsize
  parts = math.prod(sizes[axis] for axis in ("data", "fsdp", "context"))
  rows = config.data.global_batch_size / config.training.gradient_accumulation_steps
  width = rows * dims["T"].size / parts * dims["D"].size
  if config.partitioning.collective_matmul:
    why, times = "activations between blocks, while others are multiplied", sizes["tensor"] - 1
    size = width / sizes["tensor"]
    yield Term("collective-permute", ("tensor",), 10 * runs * times, size, why, narrow, True)
  elif config.partitioning.sequence_parallel:
    why = "activations between blocks"
    yield Term("reduce-scatter", ("tensor",), 4 * runs, width, f"{why}, scattered", narrow)
    yield Term("all-gather", ("tensor",), 6 * runs, width, f"{why}, gathered", narrow)
  else:
    why = "partial sums of both blocks, and of their gradients"
    yield Term("all-reduce", ("tensor",), 4 * runs, width, why, narrow)
  why, size = "keys and values of whole images", width * sizes["context"] / sizes["tensor"]
  yield Term("all-gather", ("context",), 2 * runs, size, why, narrow)
  yield Term("all-reduce", ("context",), 2 * runs, size, f"gradients of {why}", narrow)


def _of_rotary_keys(job: Job, tokens: float, itemsize: int) -> Iterator[Term]:
  """Yields those of latent attention's keys that all heads share."""
  config = job.config
  if not is_latent(config.model):
    return
  runs = config.training.gradient_accumulation_steps * config.model.layers
  split = config.partitioning.sequence_parallel
  why, size = "rotary keys, and their gradients", tokens * config.model.rotary_size
  for kind in ("all-gather", "reduce-scatter") if split else ("all-reduce",):
    yield Term(kind, ("tensor",), runs, size, why, itemsize)


def _of_context(job: Job) -> Iterator[Term]:
  """Yields those of attention over a split sequence."""
  config, sizes = job.config, job.devices.sizes
  model, count = config.model, config.training.gradient_accumulation_steps
  narrow, around = np.dtype(config.training.compute_dtype).itemsize, sizes["context"]
  tokens, tensor = _tokens(job) / count, sizes["tensor"]
  heads = model.kv_heads // tensor if model.kv_heads % tensor == 0 else model.kv_heads
  # On average: the heads of values may have another size than those of keys.
  pair = tokens * heads * (model.head_size + model.value_head_size) / 2
  times_each = count * model.layers
  length = config.data.sequence_length
  if ring_attention.use_ring(model.context_attention, length, around, model.heads, model.kv_heads):
    why = "keys, values and their gradients, around the ring"
    runs = times_each * (6 * (around - 1) + 2)
    yield Term("collective-permute", ("context",), runs, pair, why, narrow)
  else:
    why = "keys and values of whole rows"
    yield Term("all-gather", ("context",), 2 * times_each, pair * around, why, narrow)
    queries = pair / heads * around * model.heads / tensor
    yield Term("all-reduce", ("context",), 2 * times_each, queries, f"gradients of {why}", narrow)


def _of_experts(job: Job) -> Iterator[Term]:
  """Yields those of the exchange of tokens, of one round in each layer with experts."""
  model, devices = job.config.model, job.devices.sizes["expert"]
  if not model.experts or devices == 1:
    return
  count = job.config.training.gradient_accumulation_steps
  narrow = np.dtype(job.config.training.compute_dtype).itemsize
  layers, axes = count * sparse_layers(model), ("expert",)
  tokens, each = round(_tokens(job) / count), model.experts_per_token
  if model.expert_exchange == expert_exchange.ROUNDS:
    own = model.experts // devices
    given = expert_exchange.Exchange("rounds", "", devices, own, model.expert_capacity, None, "", 1)
    rows = devices * given.buffer(tokens, each)
    # Tokens out and results back; backward tokens and gradients out, and gradients back.
    why = "rows of the exchange of tokens"
    yield Term("all-to-all", axes, 5 * layers, rows * model.model_size, why, narrow)
    yield Term("all-to-all", axes, 3 * layers, rows, "gates of the exchange of tokens", 4)
    yield Term("all-to-all", axes, 2 * layers, model.experts, "how many tokens are exchanged", 4)
    return
  every, why = tokens * devices, "tokens of all devices with the experts"
  yield Term("all-gather", axes, 3 * layers, every * model.model_size, why, narrow)
  yield Term("all-gather", axes, 4 * layers, every * each, f"{why}, their gates", 4)
  yield Term("reduce-scatter", axes, 2 * layers, every * model.model_size, why, narrow)
  yield Term("reduce-scatter", axes, layers, every * each, f"{why}, their gates", 4)


def _tokens(job: Job) -> float:
  """Returns the tokens of a step on one device."""
  sizes, data = job.devices.sizes, job.config.data
  return (
    data.global_batch_size
    * data.sequence_length
    / math.prod(sizes[axis] for axis in ("data", "fsdp", "expert", "context"))
  )


def _bytes(job: Job) -> float:
  """Returns the HBM traffic of the optimizer: parameters, gradients and its state.

  Gradients that are accumulated are read, added and written once per microbatch.
  """
  sizes, count = job.devices.sizes, job.config.training.gradient_accumulation_steps
  held = {
    title: sum(
      bytes_per_device(p, sizes)
      for p in job.placements[title].values()
      if title == "optimizer" or p.name in job.program.trained
    )
    for title in ("parameters", "optimizer")
  }
  sums = 3 * count if count > 1 else 0
  return 2.0 * (2 * held["parameters"] + held["optimizer"]) + sums * held["parameters"]
