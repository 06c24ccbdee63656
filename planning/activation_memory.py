"""Activation memory of the layers, from the traced gradients of one device's part of the model.

A layer's saved activations are the results that its scan stacks. The memory of one layer while its
gradients are computed follows from the lifetime of each array in the body of the backward scan.
Matmuls, reductions, gathers and kernels write their results; elementwise operations are fused into
their consumers, as XLA does, and keep their inputs alive, or their result if that is smaller.
"""

import contextlib
import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

# Not covered by JAX's compatibility policy (JEP 15856): the types of a jaxpr's parts, which
# jax.make_jaxpr returns, have no other public name since those of jax.core were deprecated.
from jax.extend import core
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from ml_collections import ConfigDict

from models import model_spec
from models.layer_stack import order_of, trip_counts
from models.spec import latent_sizes
from partitioning.constraints import activation_layout
from partitioning.dims import axes_size
from partitioning.parallel import ring_attention
from planning import attention_kernels, passes
from training.setup import Job
from training.specs import resolve
from training.step import make_program

# Primitives whose results are written.
_WRITTEN = {
  *("dot_general", "conv_general_dilated", "pallas_call", "gather", "scatter", "scatter-add"),
  *("scan", "while", "sort", "cumsum", "concatenate", "reduce_sum", "reduce_max", "device_put"),
}
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CLOSED = {"scan", "while", "pallas_call"}  # primitives whose bodies are not inspected


class OfTheLayers(NamedTuple):
  """Bytes per device.

  Attributes:
    kept: saved activations of all layers, on the device.
    most: the peak of one layer beyond them.
    offloaded: saved activations of all layers, in the host's memory.
  """

  kept: int
  most: int
  offloaded: int


def by_the_layers(job: Job) -> OfTheLayers:
  """Returns the memory of the layers' activations.

  For a model without a scan over layers only the peak, which is that of the model.
  """
  config, share = part(job)
  jaxpr = gradients(job, config)
  found: list[tuple] = []
  for trips, count in Counter(loops(config.model)).items():
    both = (_scans(jaxpr, trips, count, reverse=way) for way in (False, True))
    found += zip(*both, strict=False)
  if not found:
    return OfTheLayers(0, int(share * _most_at_once(jaxpr, 0, 0, 0)), 0)
  kept, most, offloaded = 0, 0, 0
  for forward, back in found:
    _, carried = fixed_and_carried(forward)
    for x in forward.outvars[carried:]:
      size, host = _bytes(job, config, x), is_offloaded(x)
      kept, offloaded = kept + size * (not host), offloaded + size * host
    constants, carried = fixed_and_carried(back)
    most = max(most, _most_at_once(body(back), constants, carried, carried))
  return OfTheLayers(int(share * kept), int(share * most), int(share * offloaded))


def loops(model: ConfigDict) -> tuple[int, ...]:
  """Returns the trip counts of the loops over a model's layers; the first has most of its work."""
  return () if "layers" not in model else (*trip_counts(order_of(model)),)


def is_offloaded(x: Any) -> bool:
  """Returns whether an array is in the host's memory."""
  return getattr(x.aval, "memory_space", None) == jax.memory.Space.Host


def _scans(jaxpr: Any, trips: int, count: int, *, reverse: bool) -> list[core.JaxprEqn]:
  """Returns the scans over layers that have so many iterations; of so many, those that are there.

  Of more scans of that length (chunks of the loss, steps of a ring) they have the most inputs: the
  parameters.
  """
  found = [
    one
    for one in equations(jaxpr)
    if one.primitive.name == "scan"
    and (one.params["length"], one.params["reverse"]) == (trips, reverse)
  ]
  return sorted(found, key=lambda one: -len(one.invars))[:count]


def body(scan: core.JaxprEqn) -> Any:
  """Returns the jaxpr of one iteration of a scan."""
  inner = scan.params["jaxpr"]
  return getattr(inner, "jaxpr", inner)


def fixed_and_carried(scan: core.JaxprEqn) -> tuple[int, int]:
  """Returns the number of constant arguments, and of carried ones.

  Found by their shapes, since those of scanned arguments include all iterations: JAX has changed
  the names of the parameters with these numbers.
  """
  turn = body(scan)
  same, carried = (
    sum(x.aval.shape == y.aval.shape for x, y in zip(*pair, strict=True))
    for pair in ((scan.invars, turn.invars), (scan.outvars, turn.outvars))
  )
  return same - carried, carried


def part(job: Job, *, at_once: bool = True) -> tuple[ConfigDict, float]:
  """Returns the config of one device's computation, and its tokens as a share of that config's.

  Where `context` gathers keys and values, a device's part of the queries of all rows has as many
  scores as a smaller number of full rows; a ring step has half of its keys at a time.

  Args:
    job: of all devices.
    at_once: for a ring, one step, and for pipeline stages, a chunk's layers and one microbatch;
      else all of them.
  """
  config, legend = copy.deepcopy(job.config), job.legend
  model, data = config.model, config.data
  decoder = model.name == "transformer"  # the keys of another model may mean anything
  table, sizes = job.activations.table, job.devices.sizes

  def parts(letter: str) -> int:
    return axes_size(table[legend[letter].name], sizes) if letter in legend else 1

  rows = data.global_batch_size / parts("B") / passes.of_job(job).microbatches
  with config.unlocked():
    config.training.gradient_accumulation_steps = 1
    if job.program.pipeline and at_once:
      model.layers = passes.layers_of_a_chunk(job)
    if decoder and not at_once:  # memory has separate formulas for logits
      model.vocabulary_size, model.vocabulary_multiple = legend["V"].size // parts("V"), 1
    for name, letter in (("feedforward_size", "F"), ("heads", "N")):
      if name in model and model.name in ("transformer", "mlp", "vit"):
        model[name] = max(1, model[name] // parts(letter))
    if decoder and model.experts:
      _own_experts(model, parts)
      config.training.grouped_matmul = "tiles"  # whose operations are in the trace
    if decoder:
      split = model.kv_heads // parts("K") if model.kv_heads % parts("K") == 0 else model.kv_heads
      model.kv_heads = math.gcd(split, model.heads)
    if decoder and (around := parts("T")) > 1:
      length, heads = data.sequence_length, (job.config.model.heads, job.config.model.kv_heads)
      if at_once and ring_attention.use_ring(model.context_attention, length, around, *heads):
        data.sequence_length, rows = length // (2 * around), 2 * rows  # half of the scores
      else:
        rows /= around
      model.context_attention = "gather"  # a single device has no ring
    if model.name == "vit":  # as many scores as fewer images have
      rows /= parts("T")
    # Of a pipeline that is traced with its ticks, the rows of all microbatches.
    parts_traced = 1 if at_once or not job.program.pipeline else config.training.microbatches
    data.global_batch_size = max(1, int(rows)) * parts_traced
  return config, rows * parts_traced / data.global_batch_size


def _own_experts(model: ConfigDict, parts: Callable[[str], int]) -> None:
  """Gives a model the experts of one device, with as many rows as it has where they are spread.

  Of E experts, k for each token, a device has E / P, and k n rows of n tokens, which are of all
  devices: as many as if its own tokens chose among its own experts alone. It has at least k here,
  so that the rows are as many.
  """
  for name, letter in (("expert_feedforward_size", "M"), ("shared_feedforward_size", "W")):
    model[name] = -(-model[name] // parts(letter))
  model.experts = max(model.experts_per_token, model.experts // parts("E"))
  model.router_groups = model.router_top_groups = 1


def gradients(job: Job, config: ConfigDict, *, ticks: bool = False) -> Any:
  """Returns the jaxpr of the gradients of a batch on a single device.

  Args:
    job: of all devices.
    config: of `part`.
    ticks: of a pipeline, with the ticks of its schedule; else its layers alone.
  """
  program = make_program(resolve(config))
  schedule = job.program.pipeline if ticks else None
  program = dataclasses.replace(program, pipeline=schedule)
  names = {"B": config.data.global_batch_size, "T": config.data.sequence_length}
  batch = {}
  for name, placement in job.placements["batch"].items():
    name = name.removeprefix("batch/")
    whole = job.batch[name]
    shape = tuple(
      names.get(letter, size) for letter, size in zip(placement.letters, whole.shape, strict=True)
    )
    batch[name] = jax.ShapeDtypeStruct(shape, whole.dtype)
  key = jax.eval_shape(jax.random.key, 0)
  with _one_device(job, config, stages=schedule.stages if schedule else 1):
    return jax.make_jaxpr(program.gradients)(program.params, batch, key, program.variables).jaxpr


@contextlib.contextmanager
def _one_device(job: Job, config: ConfigDict, stages: int = 1) -> Iterator[None]:
  """Sets a mesh of manual axes and tables that shard nothing, so there is no communication.

  Except the sequence, if the job shards it: attention then does not skip the blocks of scores above
  the diagonal, since a device's queries are from all of the sequence. And except the stages, which
  a pipeline's region splits the layers over.
  """
  legend, tables = model_spec(config).legend, config.partitioning
  activations, parameters = (dict.fromkeys(t, ()) for t in (tables.activations, tables.parameters))
  sizes = dict.fromkeys(job.mesh.axis_names, 1)
  if "T" in legend:
    name = legend["T"].name
    axes = [axis for axis in tables.activations[name] if job.devices.sizes[axis] > 1]
    activations[name] = tuple(axes)
    sizes |= {axis: job.devices.sizes[axis] for axis in axes}
  sizes["stage"] = stages
  kinds = tuple(AxisType.Auto if a == "stage" and stages > 1 else AxisType.Manual for a in sizes)
  first, platform = job.mesh.devices.flat[0], job.devices.platform
  # The mesh's may be simulated ones in place of GPUs.
  kind = first.device_kind if first.platform == platform else platform
  device = AbstractDevice(kind, None, platform)
  mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, abstract_device=device)
  with (
    jax.sharding.use_abstract_mesh(mesh),
    activation_layout(legend, activations, parameters=parameters),
  ):
    yield


def is_literal(x: Any) -> bool:
  """Returns whether an atom of a jaxpr is a literal, and not a variable."""
  return isinstance(x, core.Literal)


def equations(jaxpr: Any) -> Iterator[core.JaxprEqn]:
  """Yields all equations, including nested ones."""
  for equation in jaxpr.eqns:
    yield equation
    for value in equation.params.values():
      for inner in value if isinstance(value, (tuple, list)) else [value]:
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from equations(inner)


def _bytes(job: Job, config: ConfigDict, x: Any) -> float:
  """Returns the bytes of a stacked result.

  With sequence parallelism a residual is split, and so are latent vectors.
  """
  sizes = (config.model.model_size, *latent_sizes(config.model))
  regions = config.partitioning.sequence_parallel and x.aval.shape[-1] in sizes
  return bytes_of(x) / (job.devices.sizes["tensor"] if regions else 1)


def bytes_of(x: Any) -> int:
  """Returns the bytes of a variable; 0 for a random key."""
  itemsize = getattr(getattr(x.aval, "dtype", None), "itemsize", 0)
  return math.prod(getattr(x.aval, "shape", ())) * itemsize


@dataclasses.dataclass
class _Line:
  """An equation with its inputs and outputs, by names that are unique over all bodies.

  Attributes:
    written: whether its results are, and not fused into what reads them.
    read: names of its inputs.
    given: names of its outputs.
    sizes: bytes of its outputs.
    inside: bytes of what it has in memory beside them while it runs.
  """

  written: bool
  read: list[int]
  given: list[int]
  sizes: list[int]
  inside: int = 0


@dataclasses.dataclass
class _Names:
  """Names the variables of a body and of those that it calls.

  Attributes:
    lines: the equations, in order.
    count: of names.
  """

  lines: list[_Line] = dataclasses.field(default_factory=list)
  count: int = 0

  def fresh(self) -> int:
    """Returns a new name."""
    self.count += 1
    return self.count

  def walk(self, jaxpr: Any, names: dict[Any, int]) -> list[int]:
    """Adds the lines of a body; returns the names of its results."""

    def get(x: Any) -> int:
      return 0 if is_literal(x) else names.get(x, 0)

    for equation in jaxpr.eqns:
      read, inner = list(map(get, equation.invars)), inlined(equation)
      if inner is None:
        given = [self.fresh() for _ in equation.outvars]
        sizes = list(map(bytes_of, equation.outvars))
        self.lines.append(_Line(is_written(equation), read, given, sizes, _inside(equation)))
      else:
        passed = read[len(read) - len(inner.invars) :]
        given = self.walk(inner, dict(zip(inner.invars, passed, strict=True)))
      names.update(zip(equation.outvars, given, strict=True))
    return list(map(get, jaxpr.outvars))


def inlined(equation: core.JaxprEqn) -> Any:
  """Returns the body that an equation calls; None if it is a primitive."""
  if equation.primitive.name in _CLOSED or attention_kernels.is_call(equation):
    return None
  if equation.primitive.name == "cond":
    return equation.params["branches"][0].jaxpr  # another has as much, or skips all
  found = next((equation.params[name] for name in _BODIES if name in equation.params), None)
  return getattr(found, "jaxpr", found)


def is_written(equation: core.JaxprEqn) -> bool:
  """Returns whether an operation writes its results to memory, whoever reads them."""
  return equation.primitive.name in _WRITTEN or attention_kernels.is_call(equation)


def _inside(equation: core.JaxprEqn) -> int:
  """Returns the peak of one iteration of a scan without what it carries, which is updated in place.

  Of the loops inside a layer, attention's is over blocks of scores.
  """
  if equation.primitive.name != "scan":
    return 0
  constants, carried = fixed_and_carried(equation)
  return _most_at_once(body(equation), constants + carried, 0, 0)


def _most_at_once(jaxpr: Any, constants: int, carried: int, results: int) -> int:
  """Returns the peak of live bytes in a body, without its arguments.

  Args:
    jaxpr: a body.
    constants: number of constant arguments, which come first.
    carried: number of carried arguments after them, which count.
    results: number of results that live to the end; the others are stored as they are computed.
  """
  found = _Names()
  names = {x: found.fresh() for x in jaxpr.invars}
  sizes: dict[int, int] = {}
  of: dict[int, set[int]] = {0: set()}  # name -> the arrays that it keeps alive
  own = [names[x] for x in jaxpr.invars[constants : constants + carried]]
  for x, name in names.items():
    of[name] = {name} if name in own else set()
    if name in own:
      sizes[name] = bytes_of(x)
  last = found.walk(jaxpr, names)[:results]
  for line in found.lines:
    behind = set().union(*(of.get(name, set()) for name in line.read))
    for name, size in zip(line.given, line.sizes, strict=True):
      written = line.written or size < sum(sizes[x] for x in behind)
      of[name] = {name} if written else behind
      if written:
        sizes[name] = size
  return _peak(found.lines, sizes, of, own, last)


def _peak(
  lines: list[_Line],
  sizes: dict[int, int],
  of: dict[int, set[int]],
  first: list[int],
  last: list[int],
) -> int:
  """Returns the largest sum of the sizes of live arrays."""
  ends = {x: at for at, line in enumerate(lines) for name in line.read for x in of.get(name, ())}
  ends |= {x: len(lines) for name in last for x in of.get(name, ())}
  alive, most = set(first), 0
  for at, line in enumerate(lines):
    alive |= {name for name in line.given if name in sizes}
    most = max(most, sum(sizes[x] for x in alive) + line.inside)
    alive = {x for x in alive if ends.get(x, -1) > at}
  return most
