"""Steps as jaxprs: the same sums in another order, and intermediate values with their lines.

Only public parts of JAX are used, and of an equation only what every version since 0.6 has: how
many arguments of a scan are carried follows from their shapes.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Frames in these are not lines of the program.
_LIBRARIES = tuple(
  os.path.dirname(os.path.abspath(file)) + os.sep for file in (jax.__file__, __file__)
)
_LIBRARY = re.compile(r"-packages/(jax|flax|optax|chex|equinox|haiku)/")
# Elementwise operations and those that move numbers are not recorded: what is cut over devices goes
# wrong in the others, and their number is what takes time to compile.
_PASSED_OVER = re.compile(
  "abs|add|add_any|and|broadcast_in_dim|clamp|convert_element_type|copy|copy_p|cos|div|eq|erf|exp|"
  "exp2|expm1|ge|gt|integer_pow|iota|is_finite|le|log|log1p|logistic|lt|max|min|mul|ne|neg|not|or|"
  "pcast|pow|pvary|reshape|reshard|rsqrt|select_n|sharding_constraint|sign|sin|slice|sqrt|square|"
  "squeeze|stop_gradient|sub|tanh|transpose|xor"
)


def step_jaxpr(step: Callable, *arguments: Any) -> Any:
  """Returns the closed jaxpr of a step, and the structure of its result."""
  return jax.make_jaxpr(lambda *args: step(*args), return_shape=True)(*arguments)


def source_line(equation: Any) -> str:
  """Returns `file:line` of the innermost frame outside of JAX and Flax; "" if it is unknown."""
  traceback = equation.source_info.traceback
  for frame in traceback.frames if traceback else ():
    file = os.path.abspath(frame.file_name)
    if not file.startswith(_LIBRARIES) and not _LIBRARY.search(file):
      return f"{short(frame.file_name)}:{frame.line_num}"
  return ""


def short(text: str) -> str:
  """Returns a text with the names of files below the working directory relative to it."""
  return text.replace(os.getcwd() + os.sep, "")


def bind(equation: Any, values: Sequence[Any]) -> list:
  """Returns the results of an equation."""
  parameters, functions = equation.primitive.get_bind_params(equation.params), ()
  if isinstance(parameters, tuple):  # until jax 0.8
    functions, parameters = parameters
  with equation.ctx.manager:
    results = equation.primitive.bind(*functions, *values, **parameters)
  return list(results) if equation.primitive.multiple_results else [results]


def called(equation: Any) -> tuple[Any, Sequence[Any]] | None:
  """Returns the (jaxpr, constants) that an equation calls once on its own arguments, else None."""
  if equation.primitive.name in ("scan", "while", "cond", "shard_map", "pallas_call", "switch"):
    return None
  for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    inner = equation.params.get(key)
    if inner is not None and len(_open(inner)[0].invars) == len(equation.invars):
      return _open(inner)
  return None


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
  """Returns (open jaxpr, constants) of a closed or an open one."""
  return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def scanned_shapes(jaxpr: Any) -> set[tuple[int, ...]]:
  """Returns the shape of each array that a scan of a jaxpr takes slices of."""
  found = set()
  for equation in jaxpr.eqns:
    if equation.primitive.name == "scan" and (length := equation.params["length"]) > 1:
      shapes = (tuple(atom.aval.shape) for atom in equation.invars)
      found |= {shape for shape in shapes if shape[:1] == (length,)}
    if inner := called(equation):
      found |= scanned_shapes(inner[0])
  return found


def line_of(jaxpr: Any, result: Any) -> str:
  """Returns the line of the operation that makes a variable of a jaxpr; "" if it is unknown."""
  for equation in jaxpr.eqns:
    for place, variable in enumerate(equation.outvars):
      if variable is result:
        inner = called(equation)
        line = line_of(inner[0], inner[0].outvars[place]) if inner else ""
        return line or source_line(equation)
  return ""


# ---- Evaluation, equation by equation ----


@dataclasses.dataclass(frozen=True)
class Label:
  """A place in a program: its operation, line, global shape and dtype.

  Of what is computed in a scan, the shape begins with the scan's length, `loop` is the number of
  the outermost scan, counted from 1, and `backwards` whether it runs from its end.
  """

  operation: str
  line: str
  shape: tuple[int, ...]
  dtype: str
  loop: int = dataclasses.field(default=0, compare=False)
  backwards: bool = dataclasses.field(default=False, compare=False)

  def __str__(self):
    inside = ", in a scan" if self.loop else ""
    shape = ",".join(map(str, self.shape))
    return f"{self.operation} {self.dtype}[{shape}] at {self.line or 'an unknown line'}{inside}"


class Replay:
  """A step evaluated equation by equation: (state, batch) -> (its result, recorded values).

  Recorded are the floating-point results of its operations, in order; those in scans are stacked.
  While loops, branches and `shard_map` are one operation each.
  """

  def __init__(self, step: Callable, *arguments: Any, rule: Callable[..., list] | None = None):
    """Traces the step for arguments of these shapes.

    Args:
      step: (state, batch) -> a tree.
      *arguments: state and batch.
      rule: (equation, values) -> results, instead of its own; nothing is recorded then.
    """
    self._closed, shape = step_jaxpr(step, *arguments)
    self._tree, self._rule = jax.tree.structure(shape), rule
    self.labels: list[Label] = []
    recorded = jax.eval_shape(self, *arguments)[1]
    self.bytes = sum(math.prod(one.shape) * one.dtype.itemsize for one in recorded)

  def __call__(self, state: Any, batch: Any) -> tuple[Any, list[jax.Array]]:
    """Runs the step, and returns its result and what is recorded."""
    self.labels, recorded = [], []
    flat = jax.tree.leaves((state, batch))
    results = self._run(self._closed.jaxpr, self._closed.consts, flat, self.labels, recorded)
    return jax.tree.unflatten(self._tree, results), recorded

  def _run(self, jaxpr, consts, arguments, labels: list, recorded: list) -> list:
    """Returns the results of an open jaxpr, and adds what is recorded to both lists."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
    read = lambda atom: atom.val if hasattr(atom, "val") else values[atom]  # noqa: E731
    for equation in jaxpr.eqns:
      given = [read(atom) for atom in equation.invars]
      name = equation.primitive.name
      if name == "scan":
        results = self._scan(equation, given, labels, recorded)
      elif inner := called(equation):
        results = self._run(*inner, given, labels, recorded)
      else:
        results = (self._rule or bind)(equation, given)
        for value in results if not (self._rule or _PASSED_OVER.fullmatch(name)) else ():
          if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating):
            labels.append(Label(name, source_line(equation), value.shape, str(value.dtype)))
            recorded.append(value)
      values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def _scan(self, equation, values, labels: list, recorded: list) -> list:
    jaxpr, consts = _open(equation.params["jaxpr"])
    alike = lambda ours, its: [len(a.aval.shape) == len(b.aval.shape) for a, b in zip(ours, its)]  # noqa: E731,B905
    carried = sum(alike(equation.outvars, jaxpr.outvars))
    scanned = alike(equation.invars, jaxpr.invars).count(False)
    fixed, inside = len(values) - carried - scanned, []

    def body(carry, slices):
      inside.clear()
      kept: list = []
      results = self._run(jaxpr, consts, [*values[:fixed], *carry, *slices], inside, kept)
      return results[:carried], (results[carried:], kept)

    length, backwards = equation.params["length"], equation.params["reverse"]
    start, slices = values[fixed : fixed + carried], values[fixed + carried :]
    carry, (stacked, more) = jax.lax.scan(body, start, slices, length=length, reverse=backwards)
    loop = 1 + max((label.loop for label in labels), default=0)
    for label in inside:
      known = {"shape": (length, *label.shape), "loop": loop, "backwards": backwards}
      labels.append(dataclasses.replace(label, **known))
    recorded += more
    return [*carry, *stacked]


def in_halves(equation: Any, values: Sequence[Any]) -> list:
  """Returns the results of an equation, of a sum by its two halves: it rounds otherwise."""
  axes: Sequence[int] = ()
  if equation.primitive.name == "dot_general":
    axes = [dims[0] for dims in equation.params["dimension_numbers"][0] if dims]
  elif equation.primitive.name == "reduce_sum":
    axes = sorted(equation.params["axes"], key=lambda i: values[0].shape[i])[-1:]
  if not axes or (size := values[0].shape[axes[0]]) < 2:
    return bind(equation, values)
  halves = [
    bind(
      equation, [jax.lax.slice_in_dim(x, *ends, axis=i) for x, i in zip(values, axes, strict=True)]
    )[0]
    for ends in ((0, size // 2), (size // 2, size))
  ]
  return [halves[0] + halves[1]]
