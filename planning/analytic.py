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
from models.layer_stack import STACKS
from models.spec import in_8_bits
from models.transformer_dims import DOWN_PROJECTIONS, is_latent, latent_sizes
from partitioning.dims import axes_size, spec_axes
from partitioning.dtypes import wide_dtype
from partitioning.rules import Placement
from partitioning.shardings import bytes_per_device, shard_shape
from planning import exchange_terms, interconnect, passes, traced_cost
from planning.exchange_terms import Term, axes_of_activations, tokens_of_a_device
from planning.interconnect import Places, Wire
from planning.passes import Passes
from planning.step_time import Sent, Times
from training.optimizers import schedule_free
from training.optimizers.build import matrix_groups
from training.setup import Job

_LATENTS = "latent vectors"

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
  found = sent(job, places, rates)
  hidden = sum(one.seconds for term, one in found if term.hidden)
  share = max(0.0, hidden - busy) / hidden if hidden else 0.0
  waited = tuple(
    dataclasses.replace(one, exposed_seconds=share * one.seconds) if term.hidden else one
    for term, one in found
  )
  return Times(busy + sum(one.exposed_seconds for one in waited), compute, memory, work, waited)


def sent(job: Job, places: Places, rates: Rates) -> list[tuple[Term, Sent]]:
  """Returns the communication of a step with its time, as if nothing were hidden."""
  found = []
  for term in terms(job):
    axes = tuple(axis for axis in job.mesh.axis_names if axis in term.axes)
    wire = _wire(term.kind, groups(job, axes), places)
    size = round(term.elements * term.itemsize)
    seconds = term.runs * interconnect.seconds(term.kind, size, wire, rates)
    found.append((term, Sent(term.kind, axes, size, term.runs, term.why, wire, seconds, seconds)))
  return found


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
    every += [*_of_activations(job), *exchange_terms.of_job(job)]
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
  config, sizes, runs = job.config, job.devices.sizes, passes.of_job(job)
  narrow = np.dtype(config.training.compute_dtype).itemsize
  reduced = 4 if config.training.gradient_reduction_dtype == "float32" else narrow
  once = job.program.reduce_once_over
  for name, placement in job.placements["parameters"].items():
    # A parameter that such an axis shards sees the tokens of all devices along it, as experts do;
    # fsdp's shards are gathered.
    own = {*spec_axes(placement.spec)} - {"fsdp"}
    batch = tuple(axis for axis in axes_of_activations(job, "batch") if axis not in own)
    rows = tuple(axis for axis in batch if axis != once)
    shard = math.prod(shard_shape(placement.shape, placement.spec, sizes))
    stacked = placement.letters.startswith(STACKS)
    layers = placement.shape[0] if stacked else 1
    here = layers // (sizes["stage"] if stacked else 1)
    split = "fsdp" in spec_axes(placement.spec)
    whole = shard * (sizes["fsdp"] if split else 1) / here
    if job.program.gathered is not None:
      yield from _once_per_step(job, placement, round(whole * here))
      split, rows = False, tuple(axis for axis in batch if axis not in ("data", "fsdp"))
    scale = len(placement.letters.lstrip("".join(STACKS))) == 1
    wide = wide_dtype(placement.dtype).itemsize  # as a step widens it, and its gradient is
    gathered = wide if scale else narrow
    shared = (wide if scale else reduced, True)
    # Inside the scan over the layers, in both passes of each microbatch (scales are saved for the
    # second one); else once.
    forward, back = _runs(runs, job, placement)
    again = back if config.partitioning.reshard_after_forward and not scale else 0
    if split:
      itemsize = 1 if in_8_bits(name, config.training.matmul_dtype) else gathered
      gathers = forward + again if layers > 1 else 1
      yield Term("all-gather", ("fsdp",), gathers, whole, f"{name}, gathered", itemsize, True)
    if name not in job.program.trained:
      continue
    if "r" in placement.letters and "tensor" not in spec_axes(placement.spec):
      # The half of an adapter that tensor does not split: each device has a part of the gradient.
      why = f"the gradient of {name}, which tensor does not split"
      yield Term(
        "all-reduce",
        ("tensor",),
        back,
        whole / (sizes["fsdp"] if split else 1),
        why,
        *shared,
      )
    why = f"the gradient of {name}"
    # A down-projection, whose input is not gathered over tensor. Where fsdp gathers the kernel,
    # tensor's devices add up theirs, even if they are equal.
    down = not scale and placement.letters in DOWN_PROJECTIONS
    if split and not scale:
      yield Term("reduce-scatter", ("fsdp",), back, whole, why, *shared)
      over = (*(axis for axis in rows if axis != "fsdp"), *(("tensor",) if down else ()))
      yield Term("all-reduce", over, back, whole / sizes["fsdp"], why, *shared)
    else:
      yield Term("all-reduce", rows, back, whole, why, *shared)
      if down and config.partitioning.sequence_parallel:
        yield Term("all-reduce", ("tensor",), back, whole, why, *shared)
    if once:  # of all microbatches, when nothing is left to compute
      yield Term("all-reduce", (once,), 1, shard, f"{why}, added up", wide)
    partial = config.partitioning.sequence_parallel and "tensor" not in spec_axes(placement.spec)
    if scale and partial:
      yield Term("all-reduce", ("tensor",), back, whole, why, *shared)
    part = shard / here if not scale else whole
    yield Term("all-reduce", ("context",), back, part, why, *shared)


def _once_per_step(job: Job, placement: Placement, elements: int) -> Iterator[Term]:
  """Yields those of a parameter that a pipeline gathers before the first tick.

  Args:
    job: whose pipeline gathers once per step.
    placement: of the parameter.
    elements: of it on a device, gathered over fsdp.
  """
  name, split = placement.name, "fsdp" in spec_axes(placement.spec)
  stored = np.dtype(placement.dtype)
  if split:
    itemsize = np.dtype(job.program.gathered.dtypes.get(name, stored)).itemsize
    yield Term("all-gather", ("fsdp",), 1, elements, f"{name}, once per step", itemsize)
  if name not in job.program.trained:
    return
  why, itemsize = f"the gradient of {name}, added up", wide_dtype(stored).itemsize
  if split:
    yield Term("reduce-scatter", ("fsdp",), 1, elements, why, itemsize)
    yield Term("all-reduce", ("data",), 1, elements / job.devices.sizes["fsdp"], why, itemsize)
  else:
    yield Term("all-reduce", ("data", "fsdp"), 1, elements, why, itemsize)


def _runs(runs: Passes, job: Job, placement: Placement) -> tuple[int, int]:
  """Returns how often a parameter is read in forward passes, and has a gradient in backward ones.

  Of stacked parameters, each layer counts.
  """
  if placement.letters.startswith(STACKS):
    layers, every = placement.shape[0], job.config.model.layers
    return runs.forward * layers // every, runs.backward * layers // every
  if placement.name.startswith("embed/"):
    again = job.config.model.tied_embeddings and job.program.pipeline
    return runs.enter, runs.entered + (runs.leave if again else 0)
  return runs.leave, runs.leave


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
  config, sizes, runs = job.config, job.devices.sizes, passes.of_job(job)
  forward, back = runs.forward, runs.backward
  narrow = np.dtype(config.training.compute_dtype).itemsize
  tokens = tokens_of_a_device(job) / runs.microbatches
  width = tokens * config.model.model_size
  # Latent attention with a latent vector of queries does not gather the residual.
  latents = [tokens * size for size in latent_sizes(config.model)]
  inputs = 1 if config.model.query_latent_size == 0 else 0
  sums = 2 * forward + (1 + inputs) * back + runs.enter + runs.leave
  gathers = (1 + inputs) * forward + (3 + inputs) * back + runs.leave + runs.entered
  if config.partitioning.collective_matmul:
    why, parts = "the embedding, between blocks", sizes["tensor"]
    for kind, often in (("reduce-scatter", runs.enter), ("all-gather", runs.entered)):
      yield Term(kind, ("tensor",), often, width, why, narrow)
    why = "activations between blocks, while others are multiplied"
    others = sums + gathers - runs.enter - runs.entered
    dtype = config.training.matmul_dtype
    # The gathers of inputs in both passes; of float8 those of the gradients of outputs too.
    small = {"compute": 0, "int8": forward + back, "float8": forward + 2 * back}[dtype]
    small *= 1 + inputs
    rings = [(width, others - small, narrow), (width, small, 1)]
    for one in latents:
      rings += [(one, back, narrow), (one, forward + back, 1 if small else narrow)]
    for size, times, itemsize in rings:
      times *= parts - 1
      yield Term("collective-permute", ("tensor",), times, size / parts, why, itemsize, True)
  elif config.partitioning.sequence_parallel:
    why = "activations between blocks"
    yield Term("reduce-scatter", ("tensor",), sums, width, f"{why}, scattered", narrow)
    for size in latents:
      scattered = f"{_LATENTS}, scattered"
      yield Term("reduce-scatter", ("tensor",), back, size, scattered, narrow)
    itemsize = narrow
    if config.training.matmul_dtype != "compute" and not config.lora.rank:
      of_blocks = (1 + inputs) * (forward + back)  # in both passes
      gathers, itemsize = gathers - of_blocks, 1
      yield Term("all-gather", ("tensor",), of_blocks, width, "inputs of blocks, in 8 bits", 1)
    yield Term("all-gather", ("tensor",), gathers, width, f"{why}, gathered", narrow)
    for size in latents:
      yield Term("all-gather", ("tensor",), forward + back, size, f"{_LATENTS}, gathered", itemsize)
  else:
    why = "partial sums of both blocks, and of their gradients"
    # Of attention's input also where fsdp gathers the down-projections.
    again = back if latents and sizes["fsdp"] > 1 else 0
    yield Term("all-reduce", ("tensor",), sums + again, width, why, narrow)
    for size in latents:
      yield Term("all-reduce", ("tensor",), back, size, f"gradients of {_LATENTS}", narrow)
  yield from _of_rotary_keys(job, tokens, narrow)
  why = "the cross-entropy over a split vocabulary"
  yield Term("all-reduce", ("tensor",), 3 * runs.leave, tokens, why, 4)
  kv_heads = config.model.kv_heads
  if config.model.query_key_norm_across_heads:
    split = (
      2 if kv_heads % sizes["tensor"] == 0 else 1
    )  # queries, and keys if their heads are split
    why = "sums of squares over all heads, and their gradients"
    yield Term("all-reduce", ("tensor",), split * (forward + back), tokens, why, 4)
  if sizes["tensor"] > 1 and kv_heads % sizes["tensor"]:
    heads = tokens * config.model.head_size
    why = "gradients of keys and values that query heads share"
    yield Term("all-reduce", ("tensor",), 2 * back, heads, why, narrow)
    yield Term("all-gather", ("tensor",), 2 * back, heads * kv_heads, why, narrow)
    kernel = config.model.model_size * config.model.head_size * kv_heads
    why = "gradients of the kernels of keys and values"
    yield Term("all-reduce", ("tensor",), 2 * back, kernel, why, narrow)


def _of_encoder(job: Job) -> Iterator[Term]:
  """Yields those of a vision transformer's activations, over tensor and context."""
  config, sizes, dims = job.config, job.devices.sizes, job.legend
  runs = config.training.gradient_accumulation_steps * config.model.layers
  narrow = np.dtype(config.training.compute_dtype).itemsize
  parts = math.prod(sizes[axis] for axis in axes_of_activations(job, "batch", "sequence"))
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
  runs, split = passes.of_job(job), config.partitioning.sequence_parallel
  why, size = "rotary keys, and their gradients", tokens * config.model.rotary_size
  ways = {"all-gather": runs.forward, "reduce-scatter": runs.backward}
  for kind, often in (ways if split else {"all-reduce": runs.backward}).items():
    yield Term(kind, ("tensor",), often, size, why, itemsize)


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
