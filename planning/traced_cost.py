"""FLOPs and HBM traffic of a step on one device, from what is traced, without a compiler.

Traced are its gradients, and the matmuls of Muon's or SOAP's update. The trace shows what would
run: plain attention writes all scores, a kernel does not, and rematerialized layers repeat their
forward pass. Matmuls, reductions, gathers and kernels read their arguments from HBM and write their
results to it. Elementwise operations are fused into their consumers, as XLA does, unless a matmul
reads them, or the result has at most half of the bytes of its inputs. A reduction reads its
argument separately: a compiler that fuses a complete softmax moves less.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from models import model_spec
from models.layer_pattern import layer_pattern
from models.spec import latent_sizes
from partitioning.parallel.pipeline_schedule import GPIPE
from planning import activation_memory, attention_kernels
from planning.roofline import Work
from training.optimizers.build import matrix_groups
from training.optimizers.spec import optimizer_spec
from training.setup import Job

_VIEWS = {"slice", "dynamic_slice", "squeeze", "split"}  # read where they are used
_SAME = {
  *("optimization_barrier", "sharding_constraint", "copy", "pvary", "pcast", "name"),
  *("reshape", "transpose", "expand_dims"),
}
_IMPLICIT = {"broadcast_in_dim", "iota"}  # written by no framework: done where they are read
# They read whole arrays: what is elementwise is not fused into them.
_WHOLE = {"dot_general", "conv_general_dilated", "pallas_call", "scan", "while"}

Roots = Mapping[int, int]  # arrays in HBM, by number -> bytes


class _Fused(dict):
  """Roots of a fused value, which is not in HBM itself."""


def operations(job: Job, *, fused: bool = True) -> list[tuple[Work, int, bool]]:
  """Returns (work, runs, whether in float32) of the operations of a step's gradients.

  Args:
    job: a prepared job.
    fused: elementwise operations are fused, as compilers do; else each reads its arguments and
      writes its result, as in a framework that runs them one by one.
  """
  config, share = activation_memory.part(job, at_once=False)
  tracer = _Tracer(
    share, _kind_shares(config), _in_place(job, config), fused=fused, ends=_ends_share(job)
  )
  jaxpr = activation_memory.gradients(job, config, ticks=True)
  count = job.config.training.gradient_accumulation_steps
  inputs = {x: tracer.fresh(x) for x in [*jaxpr.invars, *jaxpr.constvars]}
  tracer.close(jaxpr, tracer.walk(jaxpr, inputs, count), count)
  return tracer.found


def _ends_share(job: Job) -> float:
  """Returns the share of the ticks in which the losses are computed, of those that may do so.

  The last stage decides how long a tick takes, where the others skip them.
  """
  schedule = job.program.pipeline
  if schedule is None:
    return 0.0
  first = 0 if schedule.kind == GPIPE else schedule.first_backward
  return schedule.microbatches / (schedule.forward_ticks - first)


def _kind_shares(config: ConfigDict) -> tuple[float, ...]:
  """Returns the share of each kind of layers that the scan over them switches between."""
  if config.model.name != "transformer":
    return ()
  pattern = layer_pattern(model_spec(config))
  return tuple(pattern.windows.count(kind) / config.model.layers for kind in pattern.kinds)


def _in_place(job: Job, config: ConfigDict) -> dict[tuple[int, ...], float]:
  """Returns shape -> share of the work of kernels that multiply a device's part of the residual.

  They are latent attention's down-projections, with sequence parallelism. In the trace, their dims
  are (output, residual).

  Args:
    job: of all devices.
    config: of what is traced.
  """
  model = config.model
  if not config.partitioning.sequence_parallel or not (sizes := latent_sizes(model)):
    return {}
  share = 1 / job.devices.sizes["tensor"]
  sizes = {*sizes, model.rotary_size} - {model.feedforward_size}  # whose kernel has such a shape
  return {(size, model.model_size): share for size in sizes}


def of_matrices(job: Job) -> list[tuple[Work, int, bool]]:
  """Returns (work, runs, whether in float32) of matmuls of whole matrices on one device."""
  trained = job.program.split(job.program.params)[0]
  found = []
  for how, group in matrix_groups(optimizer_spec(job.config), trained, job.devices.sizes):
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
    return {self._count: activation_memory.bytes_of(x)}

  def walk(self, jaxpr: Any, roots: dict[Any, Roots], runs: int) -> list[Roots]:
    """Records a body's work; returns the roots of its results.

    Args:
      jaxpr: the body.
      roots: of its arguments.
      runs: how often it runs in a step.
    """
    for equation in jaxpr.eqns:
      read = [{} if activation_memory.is_literal(x) else roots.get(x, {}) for x in equation.invars]
      name, inner = equation.primitive.name, activation_memory.inlined(equation)
      if name in _WHOLE or attention_kernels.is_call(equation):
        read = [
          self._written(x, one, roots, runs) for x, one in zip(equation.invars, read, strict=True)
        ]
      if attention_kernels.is_call(equation):
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
    return [{} if activation_memory.is_literal(x) else roots.get(x, {}) for x in jaxpr.outvars]

  def close(self, jaxpr: Any, results: list[Roots], runs: int) -> None:
    """Records that the results of a body are written, if they are not in HBM yet."""
    for x, behind in zip(jaxpr.outvars, results, strict=True):
      if isinstance(behind, _Fused):
        self._note(Work(0, _read(x, behind) + activation_memory.bytes_of(x)), runs)

  def _written(self, x: Any, behind: Roots, roots: dict[Any, Roots], runs: int) -> Roots:
    """Records that an argument is written, if it is not in HBM yet; returns its new roots."""
    if isinstance(behind, _Fused):
      self._note(Work(0, _read(x, behind) + activation_memory.bytes_of(x)), runs)
      behind = roots[x] = self.fresh(x)
    return behind

  def _loop(self, equation: Any, runs: int) -> list[Roots]:
    """Records a loop's work; each iteration reads a part of its inputs."""
    if equation.primitive.name == "scan":
      inner, turns = activation_memory.body(equation), equation.params["length"]
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
    size += sum(map(activation_memory.bytes_of, equation.outvars))
    self._note(Work(flops, size, attention=flops), runs)
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
    results = sum(map(activation_memory.bytes_of, equation.outvars))
    name = equation.primitive.name
    if name == "gather":
      self._note(Work(0, 2 * results), runs)
    elif name.startswith("scatter"):
      size = 3 * activation_memory.bytes_of(equation.invars[2])  # read, and read and written there
      self._note(Work(0, size), runs)
    elif name == "dynamic_update_slice":
      self._note(Work(0, 2 * activation_memory.bytes_of(equation.invars[1])), runs)
    elif name == "device_put":  # between the memories of device and host: HBM has one end of it
      self._note(Work(0, results), runs)
    elif activation_memory.is_written(equation):
      there = sum(_read(x, behind) for x, behind in zip(equation.invars, read, strict=True))
      flops, fused = _flops(equation), attention_kernels.flops(equation)
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
  return min(activation_memory.bytes_of(x), sum(behind.values()))


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
  if name == "conv_general_dilated":
    kernel = equation.invars[1].aval.shape
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * results * math.prod(kernel) / features
  return 0.0
