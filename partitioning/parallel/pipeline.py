"""Pipeline parallelism over the mesh axis `stage`, as one SPMD program.

One `jax.shard_map` is manual over `stage`; all other axes stay as they are outside, so constraints
and manual regions inside a stage shard over them. `1f1b` and `interleaved` are three scans over
ticks: with forward passes alone, with both, with backward passes alone. A backward pass is
`jax.vjp` of the chunk at its saved input, so the forward pass runs again; gradients are added up in
the carry of the scans. Memory does not grow with the microbatches, but for their tokens.

Nothing that a chunk computes may be a collective over `stage`: inside of `jax.vjp` its transpose
would be another one (psum becomes psum, as seen with jax 0.10.2 and 0.12.0). The two permutes of a
tick are outside.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.constraints import automatic_layout, constrain
from partitioning.dtypes import wide_dtype
from partitioning.mesh_sizes import STAGE
from partitioning.parallel.pipeline_schedule import GPIPE, Schedule

# ------------------------------ the layers of a stage ------------------------------
# The stack is stored in the order of the layers, split over `stage` into equal consecutive parts:
# an array, and so a checkpoint, is the same for any number of stages and chunks, and without a
# pipeline. With one chunk per stage these parts are the chunks. With more, chunk g of all is
# computed by stage g % stages, and sent there once per step; gradients are sent back once.


def exchanges(stages: int, chunks: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
  """Returns rounds, in each of which every stage sends one chunk and receives one.

  Args:
    stages: S.
    chunks: v, per stage.

  Returns:
    v rounds of S entries, by the sending stage: (chunk as it is stored there, the receiving stage,
    chunk as it is computed there), chunks counted from 0.
  """
  # The first chunks of stages that are S / gcd(S, v) apart go to one stage: those take turns.
  apart = stages // math.gcd(stages, chunks)

  def sent(number: int, stage: int) -> tuple[int, int, int]:
    chunk = (number + stage // apart) % chunks
    computed, to = divmod(stage * chunks + chunk, stages)
    return chunk, to, computed

  return tuple(tuple(sent(n, stage) for stage in range(stages)) for n in range(chunks))


def to_compute(stored: jax.Array, stages: int, chunks: int) -> jax.Array:
  """Returns a stage's layers as it computes them, [chunks, layers of a chunk, ...].

  Inside a region that is manual over `stage`.

  Args:
    stored: the stage's part of a stacked parameter, [layers of a stage, ...].
    stages: S.
    chunks: v, per stage.
  """
  parts = stored.reshape(chunks, -1, *stored.shape[1:])
  return _moved(parts, stages, chunks, back=False)


def to_store(computed: jax.Array, stages: int, chunks: int) -> jax.Array:
  """Returns what `to_compute` was given."""
  parts = _moved(computed, stages, chunks, back=True)
  return parts.reshape(-1, *parts.shape[2:])


def _moved(parts: jax.Array, stages: int, chunks: int, *, back: bool) -> jax.Array:
  """Sends every chunk to its stage, or back."""
  stage = jax.lax.axis_index(STAGE)
  result = jnp.zeros_like(parts)
  of_this = functools.partial(_of_stage, stage)
  for entries in exchanges(stages, chunks):
    moves = [(sender, to) for sender, (_, to, _) in enumerate(entries)]
    taken = [chunk for chunk, _, _ in entries]  # by the sender
    given = [0] * stages  # by the receiver
    for _, to, chunk in entries:
      given[to] = chunk
    if back:
      moves, taken, given = [(to, sender) for sender, to in moves], given, taken
    sent = jax.lax.dynamic_index_in_dim(parts, of_this(taken), keepdims=False)
    received = jax.lax.ppermute(sent, STAGE, moves)
    result = jax.lax.dynamic_update_index_in_dim(result, received, of_this(given), 0)
  return result


def _of_stage(stage: jax.Array, values: Sequence[int]) -> jax.Array:
  return jnp.asarray(values, jnp.int32)[stage]


# ------------------------------ one stage, tick by tick ------------------------------

Params = dict[str, jax.Array]  # name -> array
Scalars = dict[str, jax.Array]  # sums over microbatches, by name
LOSS = "loss"  # the sum that is differentiated


class Network(Protocol):
  """A network in three parts. `one` is a microbatch's part of the inputs.

  Attributes:
    residual: the letters of what goes from layer to layer.
  """

  residual: str

  def enter(self, params: Params, one: Any) -> jax.Array:
    """Returns what the first layer is given."""

  def layers(
    self, params: Params, x: jax.Array, one: Any, first: jax.Array
  ) -> tuple[jax.Array, Scalars, Any]:
    """Runs a chunk's layers.

    Args:
      params: with the chunk's part of the stacked parameters.
      x: what the layer before has returned.
      one: the microbatch.
      first: the number of the chunk's first layer, in the whole model.

    Returns:
      What the next layer is given; sums over the microbatch, among which LOSS may be; a tree of
      integers to be summed over microbatches, with the chunk's layers as their first dim.
    """

  def leave(self, params: Params, x: jax.Array, one: Any) -> Scalars:
    """Returns sums over the microbatch, LOSS among them, of what the last layer has returned."""


def _where(condition: jax.Array, tree: Any) -> Any:
  """Returns a tree of arrays, or of zeros where the condition is False."""
  return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)


def _plus(ours: Any, others: Any) -> Any:
  """Returns the sum of two trees, in the dtypes of the first."""
  return jax.tree.map(lambda x, y: x + y.astype(x.dtype), ours, others)


def _zeros(shapes: Any) -> Any:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _at(tree: Any, number: jax.Array) -> Any:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), tree)


class Stage:
  """One stage's part of a step, inside the region."""

  def __init__(self, pipeline: "Pipeline", trained: Params, frozen: Params, inputs: Any):
    self.pipeline, self.schedule, self.network = pipeline, pipeline.schedule, pipeline.network
    self.trained, self.frozen, self.inputs = trained, frozen, inputs
    self.layers = pipeline.layers // (self.schedule.stages * self.schedule.chunks)
    self.number = jax.lax.axis_index(STAGE)
    self.is_last = self.number == self.schedule.stages - 1
    zero = jnp.zeros((), jnp.int32)
    self.x = jax.eval_shape(self.network.enter, {**trained, **frozen}, _at(inputs, zero))
    first = jax.eval_shape(lambda: self.of_chunk(trained, zero))
    _, sums, counts = jax.eval_shape(self.chunk, first, self.zero(), zero, zero)
    self.no_layer_sums, self.no_counts = _zeros(sums), self._by_chunk(_zeros(counts))
    self.no_sums = _zeros(jax.eval_shape(self.leave, trained, self.zero(), zero))
    self.no_sums = {**self.no_layer_sums, **self.no_sums}

  # ------------------------------ arrays ------------------------------

  def zero(self) -> jax.Array:
    """Returns zeros like what goes from layer to layer."""
    return constrain(jnp.zeros(self.x.shape, self.x.dtype), self.network.residual)

  def to_next(self, x: jax.Array) -> jax.Array:
    """Sends an output to the next stage; the last one's go to the first, for the next chunk."""
    stages = self.schedule.stages
    return jax.lax.ppermute(x, STAGE, [(one, (one + 1) % stages) for one in range(stages)])

  def to_previous(self, gradient: jax.Array) -> jax.Array:
    """Sends the gradient of an input to the stage before."""
    stages = self.schedule.stages
    return jax.lax.ppermute(gradient, STAGE, [(one, (one - 1) % stages) for one in range(stages)])

  def of_layers(self, counts: Any) -> Any:
    """Returns counts with the stage's chunks as their first dim."""
    return counts if self.schedule.chunks > 1 else jax.tree.map(lambda x: x[None], counts)

  def _by_chunk(self, tree: Any) -> Any:
    chunks = self.schedule.chunks
    if chunks == 1:
      return tree
    return jax.tree.map(lambda x: jnp.zeros((chunks, *x.shape), x.dtype), tree)

  def _add_chunk(self, total: Any, new: Any, chunk: jax.Array) -> Any:
    """Adds to a chunk's part of arrays that have one for each chunk."""
    if self.schedule.chunks == 1:
      return _plus(total, new)
    return jax.tree.map(lambda x, y: x.at[chunk].add(y.astype(x.dtype)), total, new)

  def unit(self, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns microbatch and chunk of a unit, clipped to those there are, and whether it is one."""
    here = (number >= 0) & (number < self.schedule.units)
    return *self.schedule.unit(jnp.clip(number, 0, self.schedule.units - 1)), here

  # ------------------------------ what is computed ------------------------------

  def of_chunk(self, params: Params, chunk: jax.Array) -> Params:
    """Returns parameters with the chunk's part of the stacked ones."""
    if self.schedule.chunks == 1:
      return params
    stacked = self.pipeline.stacked
    return {name: _at(x, chunk) if stacked(name) else x for name, x in params.items()}

  def chunk(self, trained: Params, x: jax.Array, microbatch, chunk) -> Any:
    """Runs a chunk's layers, after the embedding where it is the first of all; `Network.layers`.

    Args:
      trained: with the chunk's part of the stacked ones.
      x: of the chunk before.
      microbatch: its number.
      chunk: among the stage's.
    """
    one = _at(self.inputs, microbatch)
    params = {**self.of_chunk(self.frozen, chunk), **trained}
    begins = (self.number == 0) & (chunk == 0)
    if self.pipeline.conditional:
      x = jax.lax.cond(begins, lambda x: self.network.enter(params, one), lambda x: x, x)
    else:
      x = jnp.where(begins, self.network.enter(params, one), x)
    first = (chunk * self.schedule.stages + self.number) * self.layers
    return self.network.layers(params, x, one, first)

  def leave(self, trained: Params, x: jax.Array, microbatch: jax.Array) -> Scalars:
    """Returns `Network.leave` of a microbatch."""
    return self.network.leave({**self.frozen, **trained}, x, _at(self.inputs, microbatch))

  def ends(self, chunk: jax.Array, here: jax.Array) -> jax.Array:
    """Returns whether a unit is one of the last chunk of all."""
    return here & self.is_last & (chunk == self.schedule.chunks - 1)

  # ------------------------------ GPipe ------------------------------

  def forward_alone(self, trained: Params) -> tuple[Scalars, Any]:
    """Returns the stage's sums and counts, by forward passes alone."""

    def tick(carry: Any, number: jax.Array) -> tuple[Any, None]:
      x, sums, counts = carry
      microbatch, chunk, here = self.unit(number - self.number)
      x, of_layers, new = run(self.of_chunk(trained, chunk), x, microbatch, chunk)
      x, of_layers, new = _where(here, (x, of_layers, new))
      _, of_last, _ = self.unit(number - (self.schedule.stages - 1))
      some = of_last == self.schedule.chunks - 1
      ends = self.ends(chunk, here)
      found = self._at_the_end(lambda x: leave(trained, x, microbatch), ends, some, x)
      sums = _plus(sums, self._all_sums(of_layers, _where(ends, found)))
      return (self.to_next(x), sums, self._add_chunk(counts, new, chunk)), None

    run = jax.checkpoint(self.chunk, prevent_cse=False)
    leave = jax.checkpoint(self.leave, prevent_cse=False)
    carry = self.zero(), self.no_sums, self.no_counts
    ticks = jnp.arange(self.schedule.forward_ticks, dtype=jnp.int32)
    (_, sums, counts), _ = jax.lax.scan(tick, carry, ticks)
    return sums, counts

  def gpipe(self) -> tuple[Params, Scalars, Any]:
    """Returns gradients, sums and counts; all forward passes run before the backward passes."""

    def loss(trained: Params) -> tuple[jax.Array, Any]:
      sums, counts = self.forward_alone(trained)
      return sums[LOSS], (sums, counts)

    grads, (sums, counts) = jax.grad(loss, has_aux=True)(self.trained)
    return self.pipeline.laid_out(grads), sums, counts

  def _at_the_end(
    self, function: Callable, ends: jax.Array, some: jax.Array, *given: jax.Array | Params
  ) -> Any:
    """Returns function(*given), of a microbatch that leaves the pipeline; anything of any other.

    Args:
      function: what is computed of it.
      ends: whether this stage has one that leaves.
      some: whether any stage may have one: the same on all devices.
      *given: what the function takes.
    """
    if not self.pipeline.conditional and self.schedule.chunks == 1:
      return function(*given)
    shapes = jax.eval_shape(function, *given)
    computed = ends if self.pipeline.conditional else some
    return jax.lax.cond(computed, function, lambda *_: _zeros(shapes), *given)

  def _all_sums(self, of_layers: Scalars, left: Scalars) -> Scalars:
    """Returns the sums of a chunk's layers and of a microbatch that leaves the pipeline."""
    both = {**self.no_sums, **of_layers}
    return {name: x + left[name] if name in left else x for name, x in both.items()}

  # ------------------------------ 1F1B ------------------------------

  def one_f_one_b(self) -> tuple[Params, Scalars, Any]:
    """Returns gradients, sums and counts; backward passes run as soon as they can."""
    schedule, zero = self.schedule, self.zero()

    def forward(number: jax.Array, x: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
      microbatch, chunk, here = self.unit(number - self.number)
      slot = chunk * schedule.slots + microbatch % schedule.slots
      kept = kept.at[slot].set(jnp.where(here, x, kept[slot]))
      y, _, _ = self.chunk(self.of_chunk(self.trained, chunk), x, microbatch, chunk)
      return _where(here, y), kept

    def only_forward(carry: Any, number: jax.Array) -> tuple[Any, None]:
      y, kept = forward(number, *carry)
      return (self.to_next(y), kept), None

    def both(carry: Any, number: jax.Array) -> tuple[Any, None]:
      x, gradient, kept, found = carry
      y, kept = forward(number, x, kept)
      gradient, found = self.backward(number, gradient, y, kept, found)
      return (self.to_next(y), self.to_previous(gradient), kept, found), None

    def only_backward(carry: Any, number: jax.Array) -> tuple[Any, None]:
      gradient, kept, found = carry
      gradient, found = self.backward(number, gradient, None, kept, found)
      return (self.to_previous(gradient), kept, found), None

    def ticks(first: int, last: int) -> jax.Array:
      return jnp.arange(first, last, dtype=jnp.int32)

    slots = schedule.chunks * schedule.slots
    kept = jax.vmap(lambda x: constrain(x, self.network.residual))(
      jnp.zeros((slots, *zero.shape), zero.dtype)
    )
    # In float32 or wider, also where parameters are gathered in the compute dtype.
    grads = {n: jnp.zeros(x.shape, wide_dtype(x.dtype)) for n, x in self.trained.items()}
    grads = self.pipeline.laid_out(grads)
    found = grads, self.no_sums, self.no_counts
    starts, ends = schedule.first_backward, schedule.forward_ticks
    (x, kept), _ = jax.lax.scan(only_forward, (zero, kept), ticks(0, starts))
    carry = x, zero, kept, found
    (_, gradient, kept, found), _ = jax.lax.scan(both, carry, ticks(starts, ends))
    carry = gradient, kept, found
    (_, _, found), _ = jax.lax.scan(only_backward, carry, ticks(ends, schedule.ticks))
    return found

  def backward(
    self, number: jax.Array, gradient: jax.Array, y: jax.Array | None, kept: jax.Array, found: Any
  ) -> tuple[jax.Array, Any]:
    """Runs a backward pass.

    Args:
      number: of the tick.
      gradient: of the chunk's output, from the next chunk.
      y: what the stage's forward pass of this tick has returned: of the last chunk, the output
        whose loss is differentiated. None: there is none in this tick.
      kept: the inputs of chunks.
      found: gradients, sums and counts so far.

    Returns:
      The gradient of the chunk's input; gradients, sums and counts.
    """
    schedule = self.schedule
    unit = number - schedule.first_backward - (schedule.stages - 1 - self.number)
    microbatch, chunk, here = self.unit(unit)
    chunk = schedule.chunks - 1 - chunk
    grads, sums, counts = found
    if y is not None:
      ends = self.ends(chunk, here)
      last = number - schedule.first_backward  # the unit of the last stage, whoever that is
      some = (last % (schedule.stages * schedule.chunks) < schedule.stages) & (last >= 0)
      left, of_others, own = self._loss_gradients(y, microbatch, ends, some)
      gradient = jnp.where(ends, own, gradient)
      grads = {**grads, **{n: grads[n] + x.astype(grads[n].dtype) for n, x in of_others.items()}}
    else:
      left = {}

    def run(trained: Params, x: jax.Array) -> Any:
      y, sums, counts = self.chunk(trained, x, microbatch, chunk)
      return (y, sums.get(LOSS, jnp.zeros((), y.dtype))), (sums, counts)

    x = kept[chunk * schedule.slots + microbatch % schedule.slots]
    (_, loss), pull, (of_layers, new) = jax.vjp(
      run, self.of_chunk(self.trained, chunk), x, has_aux=True
    )
    # Zero in, zero out: the gradients of what is no unit need no mask.
    of_params, gradient = pull((_where(here, gradient), here.astype(loss.dtype)))
    stacked = {name: x for name, x in of_params.items() if self.pipeline.stacked(name)}
    added = self._add_chunk({name: grads[name] for name in stacked}, stacked, chunk)
    others = {
      n: grads[n] + x.astype(grads[n].dtype) for n, x in of_params.items() if n not in stacked
    }
    of_layers, new = _where(here, (of_layers, new))
    sums = _plus(sums, self._all_sums(of_layers, left))
    grads = self.pipeline.laid_out({**added, **others})
    return gradient, (grads, sums, self._add_chunk(counts, new, chunk))

  def _loss_gradients(
    self, y: jax.Array, microbatch: jax.Array, ends: jax.Array, some: jax.Array
  ) -> tuple[Scalars, Params, jax.Array]:
    """Returns the sums of a microbatch that leaves, and its loss's gradients; zeros of any other.

    Args:
      y: the output of the last chunk.
      microbatch: its number.
      ends: whether this stage has one that leaves.
      some: whether any stage may have one: the same on all devices.

    Returns:
      The sums; gradients of parameters that are not stacked; the gradient of y.
    """
    others = {n: x for n, x in self.trained.items() if not self.pipeline.stacked(n)}

    def loss(others: Params, y: jax.Array) -> tuple[jax.Array, Scalars]:
      sums = self.leave({**self.trained, **others}, y, microbatch)
      return sums[LOSS], sums

    def real(others: Params, y: jax.Array) -> Any:
      value, pull, sums = jax.vjp(loss, others, y, has_aux=True)
      return sums, *pull(ends.astype(value.dtype))

    sums, *grads = self._at_the_end(real, ends, some, others, y)
    return _where(ends, sums), *grads


# ------------------------------ all stages ------------------------------


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """A network with its schedule.

  Attributes:
    schedule: of the stages of the mesh.
    network: what is computed.
    layers: of the whole model; the stages times the chunks divide them.
    stacked: whether a parameter has the layers as its first dim, by its name; stages have parts of
      those, and all of the others.
    laid_out: shards gradients inside of the region as their parameters are sharded; takes those by
      name, stacked ones with their chunks as the first dim where a stage has several.
    conditional: whether only the stages that use them compute embeddings and losses, by
      `jax.lax.cond`; else all stages do, and the results of the others are not used.
  """

  schedule: Schedule
  network: Network
  layers: int
  stacked: Callable[[str], bool]
  laid_out: Callable[[Params], Params] = lambda grads: grads
  conditional: bool = False

  def gradients(self, trained: Params, frozen: Params, inputs: Any) -> tuple[Params, Scalars, Any]:
    """Returns gradients of the summed loss, the sums, and the counts of all layers.

    Args:
      trained: parameters with gradients.
      frozen: parameters without.
      inputs: a tree of arrays with the microbatches as their first dim.
    """

    def on_stage(trained: Params, frozen: Params, inputs: Any) -> Any:
      stage = Stage(self, self._computed(trained), self._computed(frozen), inputs)
      found = stage.gpipe() if self.schedule.kind == GPIPE else stage.one_f_one_b()
      grads, sums, counts = found
      grads = {
        name: self._stored(x) if self.stacked(name) else jax.lax.psum(x, STAGE)
        for name, x in grads.items()
      }
      return grads, _summed(sums), stage.of_layers(counts)

    specs = self._specs(trained)
    out = specs, PartitionSpec(), self._counts_spec()
    found = self._region(on_stage, (specs, self._specs(frozen), PartitionSpec()), out)(
      trained, frozen, inputs
    )
    return *found[:2], self._all_layers(found[2])

  def sums(self, params: Params, inputs: Any) -> tuple[Scalars, Any]:
    """Returns the sums, and the counts of all layers, by forward passes alone."""

    def on_stage(params: Params, inputs: Any) -> Any:
      stage = Stage(self, {}, self._computed(params), inputs)
      sums, counts = stage.forward_alone({})
      return _summed(sums), stage.of_layers(counts)

    out = PartitionSpec(), self._counts_spec()
    sums, counts = self._region(on_stage, (self._specs(params), PartitionSpec()), out)(
      params, inputs
    )
    return sums, self._all_layers(counts)

  # ------------------------------ parameters and counts ------------------------------

  def _region(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    return jax.shard_map(
      function, in_specs=in_specs, out_specs=out_specs, axis_names={STAGE}, check_vma=False
    )

  def _specs(self, params: Params) -> dict[str, PartitionSpec]:
    return {
      name: PartitionSpec(STAGE) if self.stacked(name) else PartitionSpec() for name in params
    }

  def _counts_spec(self) -> PartitionSpec:
    return PartitionSpec(None, STAGE)  # chunks, then layers of a chunk

  def _all_layers(self, counts: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), counts)

  def _computed(self, params: Params) -> Params:
    """Returns parameters as a stage computes with them: by chunk, if it has several."""
    sizes = self.schedule.stages, self.schedule.chunks
    if self.schedule.chunks == 1:
      return params
    return {name: to_compute(x, *sizes) if self.stacked(name) else x for name, x in params.items()}

  def _stored(self, stacked: jax.Array) -> jax.Array:
    sizes = self.schedule.stages, self.schedule.chunks
    return stacked if sizes[1] == 1 else to_store(stacked, *sizes)


def _summed(tree: Any) -> Any:
  return jax.tree.map(lambda x: jax.lax.psum(x, STAGE), tree)


# ------------------------------ without a schedule ------------------------------


def relayed(
  function: Callable[[Any, jax.Array, Any, jax.Array], tuple[jax.Array, Any]],
  stacked: Any,
  x: jax.Array,
  others: Any,
  letters: str,
) -> tuple[jax.Array, Any]:
  """Runs a function on one stage after another: what has no schedule, such as generating text.

  Each stage's layers run where they are stored. While one stage computes, the others wait.

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
