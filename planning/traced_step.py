"""Memory, FLOPs and HBM traffic of a step on one device, from the traced gradients of its part."""

import contextlib
import copy
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

# Not covered by JAX's compatibility policy (JEP 15856): the types of a jaxpr's parts, which
# jax.make_jaxpr returns, have no other public name since those of jax.core were deprecated.
from jax.extend import core
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from ml_collections import ConfigDict

from models import fused_attention, model_spec
from models.layer_stack import order_of, trip_counts
from models.positions import layer_pattern
from models.spec import ModelSpec, hashable, latent_sizes
from partitioning.constraints import activation_layout
from partitioning.parallel import split_sequence
from partitioning.parallel.pipeline_schedule import GPIPE
from planning.roofline import Work, cudnn_attention
from planning.step_facts import StepFacts
from training.optimizers.build import matrix_groups
from training.specs import resolve
from training.step import make_program

# Fused attention kernels in traced programs, each counted as one operation.
#
# A kernel reads its arguments from HBM and writes its results to it: forward queries, keys and
# values, and the output with the logarithms of the sums of the softmax; backward these, the output
# and its gradient, and three gradients. Scores stay on the chip. There are JAX's splash attention
# for TPUs and cuDNN's attention for GPUs. The latter is a call by its name: where there is no GPU,
# what is inside of it is only a stand-in with the same matmuls.

# Splash attention -> its matmuls: of the scores (again), and of what is made of them.
_SPLASH = {"fwd": 2, "dkv": 4, "dq": 3}
# Primitives of JAX for cuDNN -> matmuls over the head size of queries and keys, and of values.
_CUDNN = {"dot_product_attention_fwd": (1, 1), "dot_product_attention_bwd": (3, 2)}


def is_kernel_call(equation: Any) -> bool:
  """Returns whether an equation is a call of cuDNN's attention, whose inside is not in HBM."""
  called = equation.primitive.name in ("jit", "pjit")
  return called and equation.params["name"] == fused_attention.CUDNN_KERNEL


def kernel_flops(equation: Any) -> float:
  """Returns the operations of the matmuls of a kernel; 0 for what is none, and for calls.

  Blocks of scores that the mask excludes are skipped.
  """
  name = equation.primitive.name
  if name == "pallas_call":
    return _of_splash(equation)
  products = _CUDNN.get(name.removesuffix("_wrapper"))
  return _of_cudnn(equation, *products) if products else 0.0


def _of_cudnn(equation: Any, over_keys: int, over_values: int) -> float:
  """Returns them of q_BTNH, k_BSKH and v_BSKU, the first arguments; the mask is causal."""
  (rows, queries, heads, size), (_, keys, _, _), (*_, of_values) = (
    x.aval.shape for x in equation.invars[:3]
  )
  window = equation.params["sliding_window_length"] or keys
  # Query t of `queries`, the last of which attends to the last key.
  pairs = np.minimum(np.arange(keys - queries, keys) + 1, window).sum()
  return 2.0 * rows * heads * float(pairs) * (over_keys * size + over_values * of_values)


def _of_splash(equation: Any) -> float:
  called = str(equation.params.get("name") or equation.params.get("name_and_src_info", ""))
  products = next((n for part, n in _SPLASH.items() if part in called), 0)
  arrays = [x.aval.shape for x in equation.invars if x.aval.ndim > 2 and x.aval.dtype.kind != "i"]
  if not products or len(arrays) < 2:
    return 0.0
  queries, keys = arrays[:2]
  tables = [x.aval for x in equation.invars if x.aval.ndim > 2 and x.aval.dtype.kind == "i"]
  share = 1.0  # where nothing is masked, or blocks are chosen at run time, by int32
  if tables and tables[0].dtype.itemsize < 4:
    grid = equation.params["grid_mapping"].grid  # ends in heads and blocks: of queries, of keys
    count, most = grid[-3 if "dkv" in called else -2], grid[-1]
    share = (1 + 1 / count) / 2 if most == count else most / count  # with a window, fewer
  return products * 2.0 * math.prod(queries) * keys[-2] * share


# Activation memory of the layers, from the traced gradients of one device's part of the model.
#
# A layer's saved activations are the results that its scan stacks. The memory of one layer while
# its gradients are computed follows from the lifetime of each array in the body of the backward
# scan. Matmuls, reductions, gathers and kernels write their results; elementwise operations are
# fused into their consumers, as XLA does, and keep their inputs alive, or their result if that is
# smaller.

_GROUPED = "ragged_dot_general"  # each group of rows by its own kernel
# Primitives whose results are written.
_WRITTEN = {
  *(
    "dot_general",
    _GROUPED,
    "conv_general_dilated",
    "pallas_call",
    "gather",
    "scatter",
    "scatter-add",
  ),
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


@dataclasses.dataclass(frozen=True)
class DevicePart:
  """One device's computation, as that of a single device.

  Attributes:
    step: of all devices.
    keys: the config of the single device.
    share: the device's tokens, as a share of that config's.
  """

  step: StepFacts
  keys: ConfigDict
  share: float


def by_the_layers(step: StepFacts) -> OfTheLayers:
  """Returns the memory of the layers' activations.

  For a model without a scan over layers only the peak, which is that of the model.
  """
  part = part_of(step)
  jaxpr = gradients(part)
  found: list[tuple] = []
  for trips, count in Counter(loops(part.keys.model)).items():
    both = (_scans(jaxpr, trips, count, reverse=way) for way in (False, True))
    found += zip(*both, strict=False)
  if not found:
    return OfTheLayers(0, int(part.share * _most_at_once(jaxpr, 0, 0, 0)), 0)
  kept, most, offloaded = 0, 0, 0
  for forward, back in found:
    _, carried = fixed_and_carried(forward)
    for x in forward.outvars[carried:]:
      size, host = _bytes(part, x), is_offloaded(x)
      kept, offloaded = kept + size * (not host), offloaded + size * host
    if step.platform == "gpu" and part.keys.training.scan_unroll >= forward.params["length"]:
      kept += forward.params["length"] * _matmul_arguments(forward)
    constants, carried = fixed_and_carried(back)
    most = max(most, _most_at_once(body(back), constants, carried, carried))
  return OfTheLayers(*(int(part.share * size) for size in (kept, most, offloaded)))


def _matmul_arguments(forward: core.JaxprEqn) -> int:
  """Returns the bytes of a layer's elementwise results that matmuls read, and that are not saved.

  XLA keeps them in a program of unrolled layers: in the backward pass the same are computed again,
  of the same saved arrays, which it merges with the first computation.
  """
  turn, fresh, lines = body(forward), itertools.count(1), []
  names = {x: next(fresh) for x in turn.invars}
  saved = {*_flattened(turn, names, lines, fresh)}
  rows = turn.invars[fixed_and_carried(forward)[0]].aval.shape[:2]  # of the residual, carried first
  made: dict[int, tuple[int, Any]] = {}  # name -> that of the first array with these elements
  kept: dict[int, int] = {}
  for equation, read, given in lines:
    primitive = equation.primitive.name
    same = primitive in _SAME and len(read) == len(given)
    for name, other in zip(given, read if same else given, strict=True):
      made[name] = made.get(other, (other, equation))
    if primitive != "dot_general":
      continue
    for x, name in zip(equation.invars, read, strict=True):
      first, maker = made.get(name, (name, None))
      if maker and not is_written(maker) and first not in saved and x.aval.shape[:2] == rows:
        kept[first] = bytes_of(x)
  return sum(kept.values())


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


def part_of(step: StepFacts, *, at_once: bool = True) -> DevicePart:
  """Returns one device's part of a step.

  Where `context` gathers keys and values, a device's part of the queries of all rows has as many
  scores as a smaller number of full rows; a ring step has half of its keys at a time.

  Args:
    step: of all devices.
    at_once: for a ring, one step, and for pipeline stages, a chunk's layers and one microbatch;
      else all of them.
  """
  keys, parts = copy.deepcopy(step.keys), step.parts
  model, data = keys.model, keys.data
  decoder = step.kind == "transformer"  # the keys of another model may mean anything
  rows = data.global_batch_size / parts("B") / step.passes.microbatches
  with keys.unlocked():
    keys.training.gradient_accumulation_steps = 1
    if step.pipeline and at_once:
      model.layers = step.chunk_layers
    teacher = ConfigDict(dict(keys.distillation.model))
    for one in (model, teacher) if teacher else (model,):
      _own_sizes(one, step, at_once=at_once)
    keys.distillation.model = hashable(teacher.to_dict())
    if decoder and model.experts and at_once:  # tiles' buffers are at least as large
      keys.training.grouped_matmul = "tiles"
    if decoder and (around := parts("T")) > 1:
      length = data.sequence_length
      if at_once and step.way == split_sequence.RING:
        data.sequence_length, rows = length // (2 * around), 2 * rows  # half of the scores
      else:
        rows /= around
      model.context_attention = "gather"  # a single device has no ring
    if step.kind == "vit":  # as many scores as fewer images have
      rows /= parts("T")
    # Of a pipeline that is traced with its ticks, the rows of all microbatches.
    parts_traced = 1 if at_once or not step.pipeline else keys.training.microbatches
    data.global_batch_size = max(1, int(rows)) * parts_traced
  return DevicePart(step, keys, rows * parts_traced / data.global_batch_size)


def _own_sizes(model: ConfigDict, step: StepFacts, *, at_once: bool) -> None:
  """Gives a model the sizes of one device's part of its dims; arguments as of `part_of`."""
  parts, decoder = step.parts, step.kind == "transformer"
  if decoder and not at_once:  # memory has separate formulas for logits
    model.vocabulary_size, model.vocabulary_multiple = step.legend["V"].size // parts("V"), 1
  for name, letter in (("feedforward_size", "F"), ("heads", "N")):
    if name in model and step.kind in ("transformer", "mlp", "vit"):
      model[name] = max(1, model[name] // parts(letter))
  if decoder and model.experts:
    _own_experts(model, parts)
  if decoder:
    split = model.kv_heads // parts("K") if model.kv_heads % parts("K") == 0 else model.kv_heads
    model.kv_heads = math.gcd(split, model.heads)


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


def _model_of(part: DevicePart) -> ModelSpec:
  """Returns the model of a device's part, its own dims split as the keys' sizes are."""
  model = model_spec(part.keys)
  if part.step.kind != "transformer":
    return model
  letters = [letter for own in model.own_dims().values() for letter in own]
  return dataclasses.replace(model, own_parts=tuple((x, part.step.parts(x)) for x in letters))


def gradients(part: DevicePart, *, ticks: bool = False) -> Any:
  """Returns the jaxpr of the gradients of a batch on a single device.

  Args:
    part: of `part_of`.
    ticks: of a pipeline, with the ticks of its schedule; else its layers alone.
  """
  step, data = part.step, part.keys.data
  program = make_program(dataclasses.replace(resolve(part.keys), model=_model_of(part)))
  schedule = step.pipeline if ticks else None
  program = dataclasses.replace(program, pipeline=schedule)
  names = {"B": data.global_batch_size, "T": data.sequence_length}
  batch = {}
  for name, placement in step.placements["batch"].items():
    name = name.removeprefix("batch/")
    whole = step.batch[name]
    shape = tuple(
      names.get(letter, size) for letter, size in zip(placement.letters, whole.shape, strict=True)
    )
    batch[name] = jax.ShapeDtypeStruct(shape, whole.dtype)
  key = jax.eval_shape(jax.random.key, 0)
  with _one_device(part, schedule.stages if schedule else 1):
    return jax.make_jaxpr(program.gradients)(program.params, batch, key, program.variables).jaxpr


@contextlib.contextmanager
def _one_device(part: DevicePart, stages: int = 1) -> Iterator[None]:
  """Sets a mesh of manual axes and tables that shard nothing, so there is no communication.

  Except the sequence, if it is sharded: attention then does not skip the blocks of scores above the
  diagonal, since a device's queries are from all of the sequence (not so where heads are exchanged
  for it: those are complete rows). And except the stages, which a
  pipeline's region splits the layers over.
  """
  step, tables = part.step, part.keys.partitioning
  legend = _model_of(part).legend
  activations, parameters = (dict.fromkeys(t, ()) for t in (tables.activations, tables.parameters))
  sizes = dict.fromkeys(step.mesh.axis_names, 1)
  if "T" in legend and step.way != split_sequence.ULYSSES:
    name = legend["T"].name
    axes = [axis for axis in tables.activations[name] if step.sizes[axis] > 1]
    activations[name] = tuple(axes)
    sizes |= {axis: step.sizes[axis] for axis in axes}
  sizes["stage"] = stages
  kinds = tuple(AxisType.Auto if a == "stage" and stages > 1 else AxisType.Manual for a in sizes)
  first, platform = step.mesh.devices.flat[0], step.platform
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


def _bytes(part: DevicePart, x: Any) -> float:
  """Returns the bytes of a stacked result.

  With sequence parallelism a residual is split, and so are latent vectors.
  """
  model, step = part.keys.model, part.step
  sizes = (model.model_size, *latent_sizes(model))
  regions = step.partitioning.sequence_parallel and x.aval.shape[-1] in sizes
  return bytes_of(x) / (step.sizes["tensor"] if regions else 1)


def bytes_of(x: Any) -> int:
  """Returns the bytes of a variable; 0 for a random key."""
  itemsize = getattr(getattr(x.aval, "dtype", None), "itemsize", 0)
  return math.prod(getattr(x.aval, "shape", ())) * itemsize


# An equation, and the names of its inputs and outputs, which are unique over all bodies.
Line = tuple[core.JaxprEqn, list[int], list[int]]


def _flattened(
  jaxpr: Any, names: dict[Any, int], lines: list[Line], fresh: Iterator[int]
) -> list[int]:
  """Adds the equations of a body and of those that it calls; returns the names of its results.

  Args:
    jaxpr: the body.
    names: of its arguments; those of its equations' results are added. 0 is of no variable.
    lines: the equations so far.
    fresh: new names.
  """

  def get(x: Any) -> int:
    return 0 if is_literal(x) else names.get(x, 0)

  for equation in jaxpr.eqns:
    read, inner = list(map(get, equation.invars)), inlined(equation)
    if inner is None:
      given = [next(fresh) for _ in equation.outvars]
      lines.append((equation, read, given))
    else:
      passed = read[len(read) - len(inner.invars) :]
      given = _flattened(inner, dict(zip(inner.invars, passed, strict=True)), lines, fresh)
    names.update(zip(equation.outvars, given, strict=True))
  return list(map(get, jaxpr.outvars))


def inlined(equation: core.JaxprEqn) -> Any:
  """Returns the body that an equation calls; None if it is a primitive."""
  if equation.primitive.name in _CLOSED or is_kernel_call(equation):
    return None
  if equation.primitive.name == "cond":
    branches = [one.jaxpr for one in equation.params["branches"]]
    # Another has as much, or skips all; of a grouped matmul the other is a kernel of its own.
    return next((one for one in branches if _has_grouped(one)), branches[0])
  found = next((equation.params[name] for name in _BODIES if name in equation.params), None)
  return getattr(found, "jaxpr", found)


def _has_grouped(body: Any) -> bool:
  return any(one.primitive.name == _GROUPED for one in body.eqns)


def is_written(equation: core.JaxprEqn) -> bool:
  """Returns whether an operation writes its results to memory, whoever reads them."""
  return equation.primitive.name in _WRITTEN or is_kernel_call(equation)


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
  fresh, lines = itertools.count(1), []
  names = {x: next(fresh) for x in jaxpr.invars}
  sizes = {names[x]: bytes_of(x) for x in jaxpr.invars[constants : constants + carried]}
  alive, most = {*sizes}, 0
  # Name -> the arrays that it keeps alive.
  behind = {name: {name} & alive for name in (0, *names.values())}
  last = _flattened(jaxpr, names, lines, fresh)[:results]
  for equation, read, given in lines:
    under = set().union(*(behind[name] for name in read))
    for x, name in zip(equation.outvars, given, strict=True):
      written = is_written(equation) or bytes_of(x) < sum(sizes[other] for other in under)
      behind[name] = {name} if written else under
      sizes |= {name: bytes_of(x)} if written else {}
  ends = {x: at for at, (_, read, _) in enumerate(lines) for name in read for x in behind[name]}
  ends |= {x: len(lines) for name in last for x in behind[name]}
  for at, (equation, _, given) in enumerate(lines):
    alive |= {name for name in given if name in sizes}
    most = max(most, sum(sizes[x] for x in alive) + _inside(equation))
    alive = {x for x in alive if ends.get(x, -1) > at}
  return most


# FLOPs and HBM traffic of a step on one device, from what is traced, without a compiler.
#
# Traced are its gradients, and the matmuls of Muon's or SOAP's update. The trace shows what would
# run: plain attention writes all scores, a kernel does not, and rematerialized layers repeat their
# forward pass. Matmuls, reductions, gathers and kernels read their arguments from HBM and write
# their results to it. Elementwise operations are fused into their consumers, as XLA does, unless a
# matmul reads them, or the result has at most half of the bytes of its inputs. A reduction reads
# its argument separately: a compiler that fuses a complete softmax moves less.

_VIEWS = {"slice", "dynamic_slice", "squeeze", "split"}  # read where they are used
_SAME = {
  *("optimization_barrier", "sharding_constraint", "copy", "pvary", "pcast", "name"),
  *("reshape", "transpose", "expand_dims"),
}
_IMPLICIT = {"broadcast_in_dim", "iota"}  # written by no framework: done where they are read
# They read whole arrays: what is elementwise is not fused into them.
_WHOLE = {"dot_general", _GROUPED, "conv_general_dilated", "pallas_call", "scan", "while"}

Roots = Mapping[int, int]  # arrays in HBM, by number -> bytes


class _Fused(dict):
  """Roots of a fused value, which is not in HBM itself."""


def operations(step: StepFacts, *, fused: bool = True) -> list[tuple[Work, int, bool]]:
  """Returns (work, runs, whether in float32) of the operations of a step's gradients.

  Args:
    step: whose gradients are traced.
    fused: elementwise operations are fused, as compilers do; else each reads its arguments and
      writes its result, as in a framework that runs them one by one.
  """
  part = part_of(step, at_once=False)
  tracer = _Tracer(
    part.share, _kind_shares(part), _in_place(part), fused=fused, ends=_ends_share(step)
  )
  jaxpr = gradients(part, ticks=True)
  count = step.training.gradient_accumulation_steps
  inputs = {x: tracer.fresh(x) for x in [*jaxpr.invars, *jaxpr.constvars]}
  tracer.close(jaxpr, tracer.walk(jaxpr, inputs, count), count)
  return tracer.found


def _ends_share(step: StepFacts) -> float:
  """Returns the share of the ticks in which the losses are computed, of those that may do so.

  The last stage decides how long a tick takes, where the others skip them.
  """
  schedule = step.pipeline
  if schedule is None:
    return 0.0
  first = 0 if schedule.kind == GPIPE else schedule.first_backward
  return schedule.microbatches / (schedule.forward_ticks - first)


def _kind_shares(part: DevicePart) -> tuple[float, ...]:
  """Returns the share of each kind of layers that the scan over them switches between."""
  if part.step.kind != "transformer":
    return ()
  pattern = layer_pattern(model_spec(part.keys))
  return tuple(pattern.windows.count(kind) / part.keys.model.layers for kind in pattern.kinds)


def _in_place(part: DevicePart) -> dict[tuple[int, ...], float]:
  """Returns shape -> share of the work of kernels that multiply a device's part of the residual.

  They are latent attention's down-projections, with sequence parallelism. In the trace, their dims
  are (output, residual).
  """
  model, step = part.keys.model, part.step
  if not step.partitioning.sequence_parallel or not (sizes := latent_sizes(model)):
    return {}
  share = 1 / step.sizes["tensor"]
  sizes = {*sizes, model.rotary_size} - {model.feedforward_size}  # whose kernel has such a shape
  return {(size, model.model_size): share for size in sizes}


def of_matrices(step: StepFacts) -> list[tuple[Work, int, bool]]:
  """Returns (work, runs, whether in float32) of matmuls of whole matrices on one device."""
  trained = step.program.split(step.program.params)[0]
  found = []
  for how, group in matrix_groups(resolve(step.keys).optimizer, trained, step.sizes):
    function, given = how.computed(group)
    tracer = _Tracer(1.0)
    jaxpr = jax.make_jaxpr(function)(*given).jaxpr
    given = {x: tracer.fresh(x) for x in jaxpr.invars}
    tracer.close(jaxpr, tracer.walk(jaxpr, given, group.rounds), group.rounds)
    found += tracer.found
  return found


def _tiles(body: Any) -> int:
  """Returns the tiles that the loop of a grouped matmul is over, of all rows of its buffer.

  1 for the body of another loop: its trip count is unknown.
  """
  names = [one.primitive.name for one in body.eqns]
  if "dot_general" not in names or "dynamic_slice" not in names:
    return 1
  cuts = [one for one in body.eqns if one.primitive.name == "dynamic_slice"]
  rows = [(one.invars[0].aval.shape, one.outvars[0].aval.shape) for one in cuts]
  return max((whole[0] // part[0] for whole, part in rows if len(whole) == 2), default=1)


class _Tracer:
  """Walks equations and records those that access HBM.

  Attributes:
    found: work, how often, whether it is a float32 matmul.
  """

  def __init__(
    self,
    share: float,
    kinds: tuple[float, ...] = (),
    in_place: Mapping[tuple[int, ...], float] | None = None,
    *,
    fused: bool = True,
    ends: float = 0.0,
  ):
    """Takes shares: the device's of the traced rows, those of the kinds of layers, and others.

    Args:
      share: of the traced rows.
      kinds: of the layers.
      in_place: of some kernels.
      fused: as of `operations`.
      ends: of the ticks of a pipeline in which losses are computed.
    """
    self.found: list[tuple[Work, int, bool]] = []
    self._share, self._kinds, self._fused, self._count = share, kinds, fused, 0
    self._ends, self._loops = ends, 0
    self._in_place = in_place or {}

  def fresh(self, x: Any) -> Roots:
    """Returns the roots of a variable that is an array in HBM."""
    self._count += 1
    return {self._count: bytes_of(x)}

  def walk(self, jaxpr: Any, roots: dict[Any, Roots], runs: int) -> list[Roots]:
    """Records a body's work; returns the roots of its results.

    Args:
      jaxpr: the body.
      roots: of its arguments.
      runs: how often it runs in a step.
    """
    for equation in jaxpr.eqns:
      read = [{} if is_literal(x) else roots.get(x, {}) for x in equation.invars]
      name, inner = equation.primitive.name, inlined(equation)
      if name in _WHOLE or is_kernel_call(equation):
        read = [
          self._written(x, one, roots, runs) for x, one in zip(equation.invars, read, strict=True)
        ]
      if is_kernel_call(equation):
        given = self._kernel(equation, read, runs)
      elif name in ("scan", "while"):
        given = self._loop(equation, runs)
      elif inner is not None:
        given = self._called(equation, inner, read, runs)
      elif name in _SAME and len(read) == len(equation.outvars):
        given = read
      elif name in _VIEWS:
        given = [self.fresh(x) if read[0] else {} for x in equation.outvars]
      else:
        given = self._one(equation, read, runs)
      roots.update(zip(equation.outvars, given, strict=True))
    return [{} if is_literal(x) else roots.get(x, {}) for x in jaxpr.outvars]

  def close(self, jaxpr: Any, results: list[Roots], runs: int) -> None:
    """Records that the results of a body are written, if they are not in HBM yet."""
    for x, behind in zip(jaxpr.outvars, results, strict=True):
      if isinstance(behind, _Fused):
        self._note(Work(0, _read(x, behind) + bytes_of(x)), runs)

  def _written(self, x: Any, behind: Roots, roots: dict[Any, Roots], runs: int) -> Roots:
    """Records that an argument is written, if it is not in HBM yet; returns its new roots."""
    if isinstance(behind, _Fused):
      self._note(Work(0, _read(x, behind) + bytes_of(x)), runs)
      behind = roots[x] = self.fresh(x)
    return behind

  def _loop(self, equation: Any, runs: int) -> list[Roots]:
    """Records a loop's work; each iteration reads a part of its inputs."""
    if equation.primitive.name == "scan":
      inner, turns = body(equation), equation.params["length"]
    else:
      inner = equation.params["body_jaxpr"].jaxpr
      turns = _tiles(inner)
    arguments = {x: self.fresh(x) for x in [*inner.invars, *inner.constvars]}
    self._loops += 1
    self.close(inner, self.walk(inner, arguments, runs * turns), runs * turns)
    self._loops -= 1
    return [self.fresh(x) for x in equation.outvars]

  def _kernel(self, equation: Any, read: list[Roots], runs: int) -> list[Roots]:
    """Records a call of cuDNN's attention: all matmuls inside, and its arguments and results."""
    body, inside = equation.params["jaxpr"].jaxpr, _Tracer(1.0, self._kinds)
    inside.walk(body, {x: inside.fresh(x) for x in body.invars}, 1)
    flops = sum(work.flops * count for work, count, _ in inside.found)
    if not flops:  # constants of the stand-in, which JAX takes out of the loop over layers
      return [{} for _ in equation.outvars]
    size = sum(_read(x, behind) for x, behind in zip(equation.invars, read, strict=True))
    size += sum(map(bytes_of, equation.outvars))
    head_size = equation.invars[0].aval.shape[-1]
    self._note(cudnn_attention(flops, size, head_size), runs)
    return [self.fresh(x) for x in equation.outvars]

  def _called(self, equation: Any, inner: Any, read: list[Roots], runs: int) -> list[Roots]:
    """Records a body's work; of a switch between kinds of layers, each branch's by its share."""
    passed = read[len(read) - len(inner.invars) :]
    branches, shares = [inner], [1.0]
    if equation.primitive.name == "cond":
      every = [one.jaxpr for one in equation.params["branches"]]
      # A branch without equations skips what the mask excludes.
      if len(every) == len(self._kinds) and all(one.eqns for one in every):
        branches, shares = every, self._kinds
      elif self._ends and self._loops == 1:  # of a tick, not of a layer: the other has zeros
        branches, shares = every[-1:], [self._ends]
    whole, given = self._share, []
    for branch, part in zip(branches, shares, strict=True):
      self._share = whole * part
      given = self.walk(branch, dict(zip(branch.invars, passed, strict=True)), runs)
    self._share = whole
    return given

  def _one(self, equation: Any, read: list[Roots], runs: int) -> list[Roots]:
    results = sum(map(bytes_of, equation.outvars))
    name = equation.primitive.name
    if name == "gather":
      self._note(Work(0, 2 * results), runs)
    elif name.startswith("scatter"):
      size = 3 * bytes_of(equation.invars[2])  # read, and read and written there
      self._note(Work(0, size), runs)
    elif name == "dynamic_update_slice":
      self._note(Work(0, 2 * bytes_of(equation.invars[1])), runs)
    elif name == "device_put":  # between the memories of device and host: HBM has one end of it
      self._note(Work(0, results), runs)
    elif is_written(equation):
      there = sum(_read(x, behind) for x, behind in zip(equation.invars, read, strict=True))
      flops, fused = _flops(equation), kernel_flops(equation)
      work = Work(flops + fused, there + results, flops if _rounded(equation) else 0.0, fused)
      shapes = [x.aval.shape for x in (*equation.invars, *equation.outvars)]
      share = min(self._in_place.get(shape, 1.0) for shape in shapes)
      self._note(work * share, runs, wide=_wide(equation))
    elif not self._fused and name not in _IMPLICIT:
      there = sum(_read(x, behind) for x, behind in zip(equation.invars, read, strict=True))
      self._note(Work(0, there + results), runs)
    else:
      behind = {root: size for one in read for root, size in one.items()}  # of all arguments
      if 2 * results > sum(behind.values()):
        return [_Fused(behind)] * len(equation.outvars)
      there = sum(_read(x, one) for x, one in zip(equation.invars, read, strict=True))
      self._note(Work(0, there + results), runs)
    return [self.fresh(x) for x in equation.outvars]

  def _note(self, work: Work, runs: int, *, wide: bool = False) -> None:
    self.found.append((work * self._share, runs, wide))


def _read(x: Any, behind: Roots) -> int:
  """Returns the bytes read for an argument: its own, or those of its roots."""
  return min(bytes_of(x), sum(behind.values()))


def _wide(equation: Any) -> bool:
  """Returns whether a matmul is in float32: an argument wider than 16 bits widens all."""
  if equation.primitive.name not in ("dot_general", "conv_general_dilated"):
    return False
  return any(x.aval.dtype.itemsize > 2 for x in equation.invars)


def _rounded(equation: Any) -> bool:
  """Returns whether an operation is a matmul of 8-bit operands."""
  named = equation.primitive.name == "dot_general"
  return named and all(x.aval.dtype.itemsize == 1 for x in equation.invars)


def _flops(equation: Any) -> float:
  """Returns the operations of a matmul or a convolution; else 0."""
  name, results = equation.primitive.name, math.prod(equation.outvars[0].aval.shape)
  if name == "dot_general":
    (contracted, _), _ = equation.params["dimension_numbers"]
    return 2.0 * results * math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
  if name == _GROUPED:  # rows times kernels, or rows times rows of a kernel's gradient
    return 2.0 * math.prod(equation.invars[0].aval.shape) * equation.outvars[0].aval.shape[-1]
  if name == "conv_general_dilated":
    kernel = equation.invars[1].aval.shape
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * results * math.prod(kernel) / features
  return 0.0
