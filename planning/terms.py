"""Communication of a train step by formula: a function per source, exact to the byte.

`tests/parity` compares these terms with compiled programs, `planning/analytic.py` multiplies them
by times, and docs/budgets.md is printed from them, with these docstrings. Their letters: L layers,
D model, F feedforward, N heads, K key/value heads, H head, V padded vocabulary; d, f, c, t, P the
sizes of `data`, `fsdp`, `context`, `tensor`, `expert`; m microbatches, b rows of one on a device, T
tokens of a row on a device; W numbers in the kernels of a layer, as `tensor` splits them.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import jax
import numpy as np

from models.attention import CACHE, STATES
from models.latent_attention import DOWN_PROJECTIONS
from models.layer_stack import mixer_class
from models.spec import in_8_bits, is_latent, latent_sizes
from partitioning.dtypes import wide_dtype
from partitioning.parallel import pipeline, split_sequence
from partitioning.parallel.expert_exchange import ROUNDS, Exchange
from partitioning.rules import Placement, axes_size, shard_shape, spec_axes, spec_entries
from planning.step_facts import StepFacts
from runtime.layer_kinds import (
  MLP,
  layers_of_type,
  mixer_layers,
  parts_of_layers,
  sparse_layers,
)
from training.optimizers import first_order
from training.optimizers.build import matrix_groups
from training.specs import resolve

_DECODER, _ENCODER = "transformer", "vit"  # of other models only parameters have terms
_LATENTS = "latent vectors"


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
    arrays: that a run carries; elements are those of all of them.
    every: steps between the steps that send it.
  """

  kind: str
  axes: tuple[str, ...]
  runs: int
  elements: float
  why: str
  itemsize: int
  hidden: bool = False
  arrays: int = 1
  every: int = 1


Source = Callable[[StepFacts], Iterator[Term]]


def step_terms(step: StepFacts) -> list[Term]:
  """Returns the communication of a step, but for `scalars`."""
  return [term for source in SOURCES for term in sent_by(source, step)]


def sent_by(source: Source, step: StepFacts) -> list[Term]:
  """Returns the terms of a source; those whose axes all have size 1 are omitted."""
  kept = []
  for term in source(step):
    axes = tuple(axis for axis in term.axes if step.sizes[axis] > 1)
    if axes and term.runs and term.elements:
      kept.append(dataclasses.replace(term, axes=axes))
  return kept


# ------------------------------ parameters ------------------------------


@dataclasses.dataclass(frozen=True)
class _Parameter:
  """A parameter, as collectives see it.

  Attributes:
    placement: of it.
    layers: on a device; 1 if it is not stacked.
    shard: elements of a layer on a device.
    whole: likewise, gathered over fsdp.
    split: whether fsdp splits it.
    vector: whether it is a scale or a bias.
    by_hand: whether the code gathers it and scatters its gradient; else constraints alone do.
    forward: how often it is read in forward passes; of a stacked one, each layer counts.
    back: how often it has a gradient in backward passes.
  """

  placement: Placement
  layers: int
  shard: float
  whole: float
  split: bool
  vector: bool
  by_hand: bool
  forward: int
  back: int


def _parameters(step: StepFacts) -> Iterator[_Parameter]:
  sizes = step.sizes
  for one in step.gathered_parameters.values():
    stacked = one.letters.startswith(step.stacks)
    layers = one.shape[0] // sizes["stage"] if stacked else 1
    shard = math.prod(shard_shape(one.shape, one.spec, sizes)) / layers
    split = "fsdp" in spec_axes(one.spec)
    yield _Parameter(
      one,
      layers,
      shard,
      shard * (sizes["fsdp"] if split else 1),
      split,
      len(one.letters.lstrip("".join(step.stacks))) == 1,
      stacked or (step.kind != _ENCODER and one.name != "positions/table"),
      *_runs(step, one),
    )


def _runs(step: StepFacts, placement: Placement) -> tuple[int, int]:
  runs = step.passes
  if placement.letters.startswith(step.stacks):
    layers, every = placement.shape[0], step.model.layers
    return runs.forward * layers // every, runs.backward * layers // every
  if placement.name.startswith("embed/"):
    return runs.enter, runs.entered + (runs.leave if step.model.tied_embeddings else 0)
  return runs.leave, runs.leave


def parameter_gathers(step: StepFacts) -> Iterator[Term]:
  """Yields the all-gathers of parameters over fsdp.

  Kernels of the layers inside the scan, and again in its backward pass, because gathered kernels
  are not saved: m 2 L W; with `partitioning.reshard_after_forward=False` m L W. Norms' scales,
  which are saved: m 2 L D. What is outside of the layers, once: 2 V D / t + D. The gradient of a
  lookup does not read the table, that of the logits follows them immediately, and XLA hoists both
  out of the loop over microbatches. A pipeline that gathers once per step: everything once.
  """
  at_once = step.program.gathered
  for one in _parameters(step):
    name, stored = one.placement.name, one.placement.dtype
    if one.split and at_once is not None:
      size, why = round(one.whole * one.layers), f"{name}, once per step"
      itemsize = np.dtype(at_once.dtypes.get(name, stored)).itemsize
      yield Term("all-gather", ("fsdp",), 1, size, why, itemsize)
    elif one.split:
      again = one.back if step.partitioning.reshard_after_forward and not one.vector else 0
      # A scan over one layer is no loop.
      runs = one.forward + again if _is_loop(step, one.placement) else 1
      itemsize = wide_dtype(stored).itemsize if one.vector else step.compute_itemsize
      itemsize = 1 if in_8_bits(name, step.training.matmul_dtype) else itemsize
      yield Term("all-gather", ("fsdp",), runs, one.whole, f"{name}, gathered", itemsize, True)


def _is_loop(step: StepFacts, placement: Placement) -> bool:
  return placement.letters.startswith(step.stacks) and placement.shape[0] > 1


def gradient_reductions(step: StepFacts) -> Iterator[Term]:
  """Yields the sums of gradients over the devices that have other rows, or parts of the sequence.

  Of kernels that fsdp splits a reduce-scatter, the transpose of the gather, m (L W + 2 V D / t),
  and an all-reduce of the shard over `data`: m (L W + 2 V D / t) / f. Of scales, and of what
  constraints alone shard, an all-reduce of the full gradient over both, m (2 L + 1) D: XLA emits no
  reduce-scatter from constraints. Where microbatches are added up before the reduction over `data`,
  that is of shards, once, all layers as one array. Over `context` the same shards once more: XLA
  reduces over one sharded dim after the other. With sequence parallelism each device along `tensor`
  has the gradients of its tokens: of scales m (2 L + 1) D, of latent attention's down-projections m
  L D (Q + C + I) / f. Where fsdp gathers the latter they are summed without it too, although they
  are equal, which shard_map does not know; likewise adapters' halves that `tensor` does not split.
  Tied embeddings have a gradient of each use, and both are reduced. Groups with an outer optimizer
  sum no gradients over `data`, but every H steps, when they meet, what they have changed: the same
  shards; the table has a step in which they do.
  """
  for one in _parameters(step):
    if one.placement.name in step.trained:
      yield from _reductions(step, one)


def _reductions(step: StepFacts, one: _Parameter) -> Iterator[Term]:
  name, letters, held = one.placement.name, one.placement.letters, spec_axes(one.placement.spec)
  sizes, once = step.sizes, step.summed_once_over
  wide, split, whole = wide_dtype(one.placement.dtype).itemsize, one.split, one.whole
  # A parameter that such an axis shards sees the tokens of all devices along it, as experts do;
  # fsdp's shards are gathered.
  rows = tuple(a for a in step.axes("batch") if (a not in held or a == "fsdp") and a != once)
  if step.program.gathered is not None:
    yield from _reduced_at_once(step, one, wide)
    split, rows = False, tuple(axis for axis in rows if axis not in ("data", "fsdp"))
  reduced = 4 if step.training.gradient_reduction_dtype == "float32" else step.compute_itemsize
  itemsize, why = wide if one.vector else reduced, f"the gradient of {name}"
  reduce = functools.partial(Term, runs=one.back, why=why, itemsize=itemsize, hidden=True)
  sequence, tensor = step.partitioning.sequence_parallel, "tensor" not in held
  # Down-projections, whose input is not gathered over tensor; halves of adapters, and routers.
  down = not one.vector and letters in DOWN_PROJECTIONS
  half = tensor and ("r" in letters or letters == "LDe")
  kind, of_tensor = "all-reduce", sequence and (down or (tensor and _of_tokens(one)))
  if split and one.by_hand and not one.vector:
    yield reduce("reduce-scatter", ("fsdp",), elements=whole)
    over = (*(axis for axis in rows if axis != "fsdp"), *(("tensor",) if down or half else ()))
    yield reduce("all-reduce", over, elements=whole / sizes["fsdp"])
    of_tensor = False
  elif sequence and name == "positions/table":  # each device has those of its own positions
    yield reduce("all-reduce", rows, elements=whole / sizes["tensor"])
    kind = "all-gather" if step.kind == _ENCODER else "all-reduce"
    of_tensor = True
  else:
    yield reduce("all-reduce", (*rows, *(("tensor",) if half else ())), elements=whole)
  if once:  # of all microbatches, when nothing is left to compute; or of what groups have changed
    apart = step.program.spec.outer
    of = f"{why}, added up" if apart is None else f"what groups have changed of {name}"
    every = 1 if apart is None else apart.every_steps
    yield Term("all-reduce", (once,), 1, one.shard * one.layers, of, wide, every=every)
  if of_tensor or (one.vector and letters.endswith("H") and tensor):  # of a device's heads
    yield reduce(kind, ("tensor",), elements=whole)
  yield reduce("all-reduce", ("context",), elements=whole if one.vector else one.shard)


def _of_tokens(one: _Parameter) -> bool:
  """Returns whether each device has the gradients of a parameter of its own tokens."""
  name = one.placement.name
  return name == "patches/kernel" or (one.vector and not name.startswith("head/"))


def _reduced_at_once(step: StepFacts, one: _Parameter, itemsize: int) -> Iterator[Term]:
  """Yields the sums of a gradient where a pipeline gathers parameters before the first tick."""
  size, why = round(one.whole * one.layers), f"the gradient of {one.placement.name}, added up"
  if one.split:
    yield Term("reduce-scatter", ("fsdp",), 1, size, why, itemsize)
    yield Term("all-reduce", ("data",), 1, size / step.sizes["fsdp"], why, itemsize)
  else:
    yield Term("all-reduce", ("data", "fsdp"), 1, size, why, itemsize)


def updated_parameters(step: StepFacts) -> Iterator[Term]:
  """Yields the all-gathers of updated parameters over data: ZeRO-1.

  Each device updates its part of every parameter and gathers the other parts: (L W + 2 V D / t +
  (2 L + 1) D) / f. Of schedule-free parameters the iterates too, before the forward pass.
  """
  averaged = first_order.averaged(step.state.optimizer)
  if not any("data" in axes for axes in step.partitioning.optimizer.values()):
    return
  for one in _parameters(step):
    name, itemsize = one.placement.name, np.dtype(one.placement.dtype).itemsize
    if "data" in spec_axes(one.placement.spec) or name not in step.trained:
      continue
    for what in ("updated", "its iterate")[: 1 + (name in averaged)]:
      size = one.shard * one.layers
      yield Term("all-gather", ("data",), 1, size, f"{name}, {what}", itemsize)


def matrix_exchanges(step: StepFacts) -> Iterator[Term]:
  """Yields the exchanges of whole matrices of Muon and SOAP.

  Matrices of the same shape and sharding are stacked, those of all layers and also transposed ones.
  All-to-alls bring them whole to the devices that compute with them, and the results back; where
  devices with the same shards share the work, all-gathers bring the results to all of them. What a
  stack lacks for an equal number on all devices is sent as zeros. Muon: 2 A B numbers of an A x B
  matrix. SOAP: 4 A B + 2 (A A + B B) in a step, 2 A B + 2 (A A + B B) more in one that refreshes
  its bases. With ZeRO-1 moments are split over `data` too, and exchanged along it.
  """
  sizes, trained = step.sizes, step.program.split(step.program.params)[0]
  for how, group in matrix_groups(resolve(step.keys).optimizer, trained, sizes):
    of, itemsize = f"matrices of {group.shape[0]} x {group.shape[1]}", how.dtype.itemsize
    axes = tuple(axis for axis in sizes if axis in group.exchanged)
    for move in how.moves(group):
      turn = group.each // group.rounds * group.elements(move.kind, sizes)
      runs, why = (move.there + move.back) * group.rounds, f"{of}, {move.why}"
      yield Term("all-to-all", axes, runs, turn, why, itemsize)
      whole, runs = turn * axes_size(group.shared, sizes), move.back * group.rounds
      yield Term("all-gather", group.shared, runs, whole, why, itemsize)


# ------------------------------ activations ------------------------------


def embeddings(step: StepFacts) -> Iterator[Term]:
  """Yields the sums of embedded tokens over tensor, which splits the vocabulary.

  An all-reduce, m b T D; with sequence parallelism a reduce-scatter, and of the gradient an
  all-gather, each m b T D.
  """
  if step.kind != _DECODER:
    return
  runs, why = step.passes, "embedded tokens"
  sequence = step.partitioning.sequence_parallel
  kind = "reduce-scatter" if sequence else "all-reduce"
  yield Term(kind, ("tensor",), runs.enter, step.width, why, step.compute_itemsize)
  if sequence and "embed/table" in step.trained:
    why = f"gradients of {why}"
    yield Term("all-gather", ("tensor",), runs.entered, step.width, why, step.compute_itemsize)


def blocks(step: StepFacts) -> Iterator[Term]:
  """Yields the sums of partial results over tensor, and the gathers of their inputs.

  All-reduces, forward of both blocks of a layer, backward of the gradients of their inputs and of
  the logits, each summed over its uses first: m (4 L + 1) b T D. With sequence parallelism
  reduce-scatters of the same, and all-gathers of the inputs in both passes, which are saved
  sharded, of the logits' input, and of the gradients of both outputs: m (6 L + 1) b T D. With
  collective matmuls both as rings: t - 1 times a device passes on its part of the sequence, in
  halves, one for each direction, where it can be halved and t is not 2: m (10 L + 2) (t - 1) / t b
  T D. In 8 bits, inputs take a byte each. Where queries have a latent vector of Q numbers, as keys
  and values one of C: of attention's input they are gathered instead, and their gradients summed,
  m L b T (Q + C) for each; without sequence parallelism, where fsdp gathers the down-projections,
  that input's gradient all the same: the devices have equal ones, which shard_map does not know.
  """
  model, sizes, runs = step.model, step.sizes, step.passes
  if step.kind not in (_DECODER, _ENCODER):
    return
  forward, back, narrow, width = runs.forward, runs.backward, step.compute_itemsize, step.width
  leave = runs.leave if step.kind == _DECODER else 0
  latents = [step.tokens * size for size in latent_sizes(model)]
  inputs = 0 if "query_latent_size" in model and model.query_latent_size else 1
  others = parts_of_layers(model) - 1 if step.kind == _DECODER else 1  # beside attention
  sums = (1 + others) * forward + (others + inputs) * back + leave
  gathers = (others + inputs) * forward + (1 + 2 * others + inputs) * back + leave
  dtype, why = step.training.matmul_dtype, "activations between blocks"
  if step.partitioning.collective_matmul:
    why, parts = f"{why}, while others are multiplied", sizes["tensor"]
    # The gathers of inputs in both passes; of float8 those of the gradients of outputs too.
    small = {"compute": 0, "int8": forward + back, "float8": forward + 2 * back}[dtype]
    small *= others + inputs
    rings = [(width, sums + gathers - small, narrow), (width, small, 1)]
    for one in latents:
      rings += [(one, back, narrow), (one, forward + back, 1 if small else narrow)]
    halves = 1 if parts == 2 or step.length // (sizes["context"] * parts) % 2 else 2
    for size, times, itemsize in rings:
      times *= parts - 1
      ring = Term("collective-permute", ("tensor",), times, size / parts, why, itemsize, True)
      yield dataclasses.replace(ring, arrays=halves)
  elif step.partitioning.sequence_parallel:
    yield Term("reduce-scatter", ("tensor",), sums, width, f"{why}, scattered", narrow)
    for size in latents:
      yield Term("reduce-scatter", ("tensor",), back, size, f"{_LATENTS}, scattered", narrow)
    itemsize = narrow
    if dtype != "compute" and not step.keys.lora.rank:
      of_blocks = (others + inputs) * (forward + back)  # in both passes
      gathers, itemsize = gathers - of_blocks, 1
      yield Term("all-gather", ("tensor",), of_blocks, width, "inputs of blocks, in 8 bits", 1)
    yield Term("all-gather", ("tensor",), gathers, width, f"{why}, gathered", narrow)
    for size in latents:
      yield Term("all-gather", ("tensor",), forward + back, size, f"{_LATENTS}, gathered", itemsize)
  else:
    why = "partial sums of both blocks, and of their gradients"
    again = back if latents and sizes["fsdp"] > 1 else 0
    yield Term("all-reduce", ("tensor",), sums + again, width, why, narrow)
    for size in latents:
      yield Term("all-reduce", ("tensor",), back, size, f"gradients of {_LATENTS}", narrow)


def attention_heads(step: StepFacts) -> Iterator[Term]:
  """Yields what attention sends over tensor, of heads that its devices share.

  Where `tensor` does not divide the key/value heads, for keys and for values: an all-reduce of the
  gradients that the query heads of a group share, one head in each group of t / K devices, m L b T
  H; from these an all-gather of all heads' gradients, m L b T K H; and an all-reduce of the
  replicated kernels' gradients, m L D K H, divided by t, since shard_map does not know that they
  are equal. Of the I numbers of latent attention's rotary keys, which all heads share, a gather and
  a scatter, or an all-reduce of gradients: m L b T I. Of norms across heads a sum of squares of
  each token in both passes: m 2 L b T for queries, and as many for keys whose heads are split.
  """
  model, runs = step.model, step.passes
  if step.kind != _DECODER:
    return
  narrow, tokens = step.compute_itemsize, step.tokens
  forward, back = runs.forward, runs.backward
  if is_latent(model):
    why, size = "rotary keys, and their gradients", tokens * model.rotary_size
    ways = {"all-gather": forward, "reduce-scatter": back}
    split = step.partitioning.sequence_parallel
    for kind, often in (ways if split else {"all-reduce": back}).items():
      yield Term(kind, ("tensor",), often, size, why, narrow)
  whole = model.kv_heads % step.sizes["tensor"] > 0
  if model.query_key_norm_across_heads:
    often, why = (1 if whole else 2) * (forward + back), "sums of squares over all heads"
    yield Term("all-reduce", ("tensor",), often, tokens, f"{why}, and their gradients", 4)
  if whole:
    heads, why = tokens * model.head_size, "gradients of keys and values that query heads share"
    yield Term("all-reduce", ("tensor",), 2 * back, heads, why, narrow)
    yield Term("all-gather", ("tensor",), 2 * back, heads * model.kv_heads, why, narrow)
    kernel = model.model_size * model.head_size * model.kv_heads
    why = "gradients of the kernels of keys and values"
    yield Term("all-reduce", ("tensor",), 2 * back, kernel, why, narrow)


def cross_entropy(step: StepFacts) -> Iterator[Term]:
  """Yields the vocabulary-parallel cross-entropy over tensor.

  The largest logit, the sum of exponentials and the target's logit of each token: m 3 b T.
  """
  if step.kind == _DECODER:
    why = "the cross-entropy over a split vocabulary"
    yield Term("all-reduce", ("tensor",), 3 * step.passes.leave, step.tokens, why, 4)


def sequence_attention(step: StepFacts) -> Iterator[Term]:
  """Yields what attention sends over context, which splits the sequence.

  As a ring: keys and values are passed to the next device c - 1 times, and again in the backward
  pass, with their gradients, which take one more hop back to their own device: m L (6 (c - 1) + 2)
  b T K H / t; and for the zigzag order tokens, targets and weights of complete rows, m 3 b T c.
  By heads (Ulysses) all-to-alls of queries, keys, values and outputs, and of their gradients: m L 4
  b T (N + K) H / t, K being the key/value heads as often repeated as c t asks for. Else all-gathers
  of keys and values of complete rows, m L 2 b T c K H / t, and all-reduces of their gradients,
  before those of a group's query heads are added: m L 2 b T c N H / t.
  """
  model, sizes, runs = step.model, step.sizes, step.passes
  if step.kind not in (_DECODER, _ENCODER):
    return
  attend = 1.0
  if step.kind == _DECODER:
    attend -= (mixer_layers(model) + layers_of_type(model, MLP)) / model.layers
  forward, back = (round(often * attend) for often in (runs.forward, runs.backward))
  around, tensor, narrow, axes = (
    sizes["context"],
    sizes["tensor"],
    step.compute_itemsize,
    ("context",),
  )
  pair = queries = step.width / tensor
  if step.kind == _DECODER:
    heads = model.kv_heads // tensor if model.kv_heads % tensor == 0 else model.kv_heads
    # On average: the heads of values may have another size than those of keys.
    pair = step.tokens * heads * (model.head_size + model.value_head_size) / 2
    queries = pair / heads * model.heads / tensor
    if step.way == split_sequence.ULYSSES:
      often = 2 * (forward + back)
      why = "queries and outputs, heads in exchange for the sequence"
      yield Term("all-to-all", axes, often, queries, why, narrow)
      pair *= split_sequence.repeats(model.kv_heads, around, tensor) * model.kv_heads
      why = "keys and values, heads in exchange for the sequence"
      yield Term("all-to-all", axes, often, pair / (heads * tensor), why, narrow)
      return
    if step.way == split_sequence.RING:
      why, others = "keys, values and their gradients, around the ring", around - 1
      often = 2 * others * forward + (4 * others + 2) * back
      yield Term("collective-permute", axes, often, pair, why, narrow)
      why = "tokens, targets and weights of whole rows, in zigzag order"
      yield Term("all-gather", axes, 3 * runs.microbatches, step.tokens * around, why, 4)
      return
  why = "keys and values of whole rows"
  yield Term("all-gather", axes, 2 * forward, pair * around, why, narrow)
  why = f"gradients of {why}"
  yield Term("all-reduce", axes, 2 * back, queries * around, why, narrow)


def mixer_states(step: StepFacts) -> Iterator[Term]:
  """Yields what layers with mixers send over context, which splits the sequence.

  Each of a device's p pieces of a row, two in a ring's zigzag order, says what it does to a state,
  S -> A S + B, with A of h h numbers of a head by the delta rule and of one without, B of h u, and
  has the w - 1 inputs that the convolution of the next piece sees. They are all-gathered, forward
  and where the backward pass computes them again, and their gradients reduce-scattered: of y layers
  with N heads m y 3 b c p N (A + B) / t (of fixed decays no gradients), and m y 3 b c p (w - 1) for
  each channel of a convolution. With stages at most that: in a backward tick XLA may gather once
  what is computed again twice.
  """
  model = step.model
  if step.kind != _DECODER or not (layers := mixer_layers(model)):
    return
  pieces = step.sizes["context"] * (2 if step.way == split_sequence.RING else 1)
  rows = pieces * step.tokens * step.sizes["context"] / step.length
  share, runs, axes = layers / step.layers, step.passes, ("context",)
  forward, back = (round(often * share) for often in (runs.forward, runs.backward))
  itemsize = wide_dtype(np.dtype(step.training.compute_dtype)).itemsize
  for name in mixer_class(model.mixer).cached:
    letters = CACHE[name].removeprefix("yB")
    sizes = [step.legend[letter].size / step.parts(letter) for letter in letters]
    elements, why = rows * math.prod(sizes), "inputs that the convolutions of the next pieces see"
    parts = [elements]
    if name == STATES:
      heads, size, _ = sizes
      by_delta = model.mixer in ("gated_delta", "kimi_delta")
      parts += [rows * heads * (size**2 if by_delta else 1)]
      why = "what pieces of rows do to the states of mixers"
    yield Term("all-gather", axes, forward + back, sum(parts), why, itemsize, arrays=len(parts))
    if model.mixer == "lightning":  # whose decays are fixed
      parts = parts[:1]
    why = f"gradients of {why}"
    yield Term("reduce-scatter", axes, back, sum(parts), why, itemsize, arrays=len(parts))


def routers(step: StepFacts) -> Iterator[Term]:
  """Yields what the routers of layers with experts send over tensor, beside other `blocks`.

  Gradients of tokens by way of the router, m L b T D, and of their gates to k experts, m L b T k.
  With sequence parallelism gates and experts of the tokens are gathered in both passes, m L 4 b T
  k, and the gradients of gates scattered, m L b T k.
  """
  if not step.experts:
    return
  forward, back = _sparse_passes(step)
  tokens, why = step.tokens, "gates of the tokens"
  gates = tokens * step.model.experts_per_token
  if step.partitioning.sequence_parallel:
    often = 2 * (forward + back)
    yield Term("all-gather", ("tensor",), often, gates, f"{why}, and their experts", 4)
    yield Term("reduce-scatter", ("tensor",), back, gates, f"gradients of {why}", 4)
  else:
    yield Term("all-reduce", ("tensor",), back, gates, f"gradients of {why}", 4)
    why = "gradients of the inputs of routers"
    yield Term("all-reduce", ("tensor",), back, step.width, why, step.compute_itemsize)


def _sparse_passes(step: StepFacts) -> tuple[int, int]:
  """Returns the forward and backward passes of layers with experts."""
  runs, model = step.passes, step.model
  share = sparse_layers(model), model.layers
  return runs.forward * share[0] // share[1], runs.backward * share[0] // share[1]


def expert_exchange(step: StepFacts) -> Iterator[Term]:
  """Yields the exchange of tokens over expert, of one round in each layer with experts.

  Of n tokens of a device with k experts each, in buffers of C rows from one device to another,
  which is `model.expert_capacity` times n k / P, rounded up to a multiple of 8. In rounds, as
  all-to-alls: tokens and gates to their experts and results back; in the backward pass tokens and
  gates again with the gradients of results, and those of tokens and gates back: L (5 P C D + 3 P C)
  for each round, whose number is known when it runs. In both passes, since no layer saves it, how
  many tokens each device has for each of E experts, which sets the rounds: 2 L E. Gathered: tokens
  of all devices with their experts and gates in both passes, and the gradients of results, L (3 P n
  D + 4 P n k); reduce-scatters of results, and of the gradients of tokens and of gates, L (2 P n D
  + P n k).
  """
  model, devices = step.model, step.sizes["expert"]
  if not step.experts or devices == 1:
    return
  narrow, axes, (forward, back) = step.compute_itemsize, ("expert",), _sparse_passes(step)
  tokens, each = round(step.tokens), model.experts_per_token
  if model.expert_exchange == ROUNDS:
    own = model.experts // devices
    given = Exchange("rounds", "", devices, own, model.expert_capacity, None, "", 1)
    rows, size = devices * given.buffer(tokens, each), model.model_size
    why = "rows of the exchange of tokens"
    yield Term("all-to-all", axes, 2 * forward + 3 * back, rows * size, why, narrow)
    yield Term("all-to-all", axes, forward + 2 * back, rows, "gates of the exchange of tokens", 4)
    why = "how many tokens are exchanged"
    yield Term("all-to-all", axes, forward + back, model.experts, why, 4)
    return
  every, why = tokens * devices, "tokens of all devices with the experts"
  yield Term("all-gather", axes, forward + 2 * back, every * model.model_size, why, narrow)
  yield Term("all-gather", axes, 2 * (forward + back), every * each, f"{why}, their gates", 4)
  yield Term("reduce-scatter", axes, forward + back, every * model.model_size, why, narrow)
  yield Term("reduce-scatter", axes, back, every * each, f"{why}, their gates", 4)


def pipeline_sends(step: StepFacts) -> Iterator[Term]:
  """Yields what pipeline stages send.

  Two permutes in each of the M v + S - 1 ticks of M microbatches through S stages of v chunks, also
  in those of the bubble: outputs to the next stage, gradients of inputs to the one before, 2 (M v +
  S - 1) b T D, where b are the rows of a microbatch on a device, and T tokens as the residual has
  them. Once per step an all-reduce of the gradients of what is not in layers, 2 V D / (f t) + D /
  f. Interleaved: the parameters of chunks to the stages that compute with them, and their gradients
  back, once per step, in r rounds: in each every stage sends one chunk, and a round in which every
  chunk stays where it is sends nothing.
  """
  schedule, axes = step.pipeline, ("stage",)
  if schedule is None or step.kind != _DECODER:
    return
  count, narrow = step.training.gradient_accumulation_steps, step.compute_itemsize
  ticks, size = count * schedule.forward_ticks, step.residual_elements
  # While a tick's backward pass is computed, what its forward pass has returned can be sent.
  yield Term("collective-permute", axes, ticks, size, "outputs of stages", narrow, True)
  yield Term("collective-permute", axes, ticks, size, "gradients of their inputs", narrow)
  for name, elements in step.of_stages(split=False):
    if name in step.trained:
      why = f"the gradient of {name}, of the first stage and the last"
      yield Term("all-reduce", axes, count, elements, why, 4)
  rounds = pipeline.exchanges(schedule.stages, schedule.chunks)
  moving = count * sum(any(to != i for i, (_, to, _) in enumerate(one)) for one in rounds)
  dtypes = step.program.gathered.dtypes if step.program.gathered is not None else {}
  for name, elements in step.of_stages(split=True) if schedule.chunks > 1 else ():
    why, each = f"{name}, to the stages that compute with it", elements / schedule.chunks
    itemsize = np.dtype(dtypes.get(name, np.float32)).itemsize
    yield Term("collective-permute", axes, moving, each, why, itemsize)
    if name in step.trained:
      yield Term("collective-permute", axes, moving, each, f"the gradient of {name}, back", 4)


SOURCES: tuple[Source, ...] = (
  parameter_gathers,
  gradient_reductions,
  updated_parameters,
  matrix_exchanges,
  embeddings,
  blocks,
  attention_heads,
  cross_entropy,
  sequence_attention,
  mixer_states,
  routers,
  expert_exchange,
  pipeline_sends,
)


def scalars(step: StepFacts) -> Iterator[Term]:
  """Yields the all-reduces of scalars, and of a few numbers of each row.

  They have no time in a plan: XLA combines them with others. The sums of losses and of weights, of
  each microbatch, or of groups with an outer optimizer loss and norm, of each step; of pipeline
  stages the sum of losses once more. The norm of the gradients: a scalar for each parameter and
  each of its dims that is sharded while the squares are summed, where replicas are sharded along
  the first dim that their number divides. Metrics of experts, with sequence parallelism those of
  each row over tensor too; and in each pass of such a layer the most tokens that any two devices
  exchange: where they are gathered it is a metric. With sequence parallelism, the vision
  transformer's mean over the patches, b D.
  """
  sizes, once, runs = step.sizes, step.summed_once_over, step.passes
  rows = tuple(axis for axis in step.axes("batch") if axis != once)
  for axes, often in ((rows, runs.leave), ((once,) if once else (), 1), (("context",), runs.leave)):
    yield Term("all-reduce", axes, 2 * often, 1, "sums of losses and of weights", 4)
  if step.pipeline is not None:
    yield Term("all-reduce", ("stage",), 1, 1, "the sum of losses, of the last stage", 4)
  norm: dict[tuple[str, ...], int] = defaultdict(int)
  for spec in jax.tree.leaves(step.program.split(step.program.norm_specs)[0]):
    for cut in spec_entries(spec):
      norm[tuple(axis for axis in sizes if axis in cut)] += 1
  for axes, often in norm.items():
    yield Term("all-reduce", axes, often, 1, "the norm of the gradients", 4)
  if step.experts:
    yield from _scalars_of_experts(step, rows)
  if step.kind == _ENCODER and step.partitioning.sequence_parallel:
    size, why = step.width / step.legend["T"].size, "the mean over the patches"
    yield Term("all-reduce", ("tensor",), runs.microbatches, size, why, 4)


def _scalars_of_experts(step: StepFacts, rows: tuple[str, ...]) -> Iterator[Term]:
  model, sizes, runs = step.model, step.sizes, step.passes.leave
  layers, why = sparse_layers(model), "metrics of the experts"
  yield Term("all-reduce", rows, runs, layers * model.experts, why, 4)
  yield Term("all-reduce", rows, 6 * runs, 1, why, 4)
  if step.partitioning.sequence_parallel:
    each = step.tokens * sizes["context"] / step.length
    yield Term("all-reduce", ("tensor",), 2 * layers * runs, each * model.experts, why, 4)
    yield Term("all-reduce", ("tensor",), 2 * (layers + 1) * runs, each, why, 4)
  if sizes["expert"] > 1:
    often = 2 if model.expert_exchange == ROUNDS else 1
    axes, why = tuple(axis for axis in sizes if axis != "stage"), "the most tokens exchanged"
    yield Term("all-reduce", axes, often * layers, 1, why, 4)
