"""Steps as jaxprs: the same sums in another order, and intermediate values with their lines.

Only public parts of JAX are used, and of an equation only what every version since 0.6 has: how
many arguments of a scan are carried follows from their shapes.
"""

import collections
import dataclasses
import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LIBRARIES = tuple(
  os.path.dirname(os.path.abspath(file)) + os.sep for file in (jax.__file__, __file__)
)
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# Elementwise operations and those that move numbers are not recorded: what is cut over devices goes
# wrong in the others, and their number is what takes time to compile.
_PASSED_OVER = frozenset(
  re.findall(
    r"\w+",
    "abs add add_any and broadcast_in_dim clamp convert_element_type copy copy_p cos div eq erf "
    "exp exp2 expm1 ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg "
    "not or pcast pow pvary reshape reshard rsqrt select_n sharding_constraint sign sin slice sqrt "
    "square squeeze stop_gradient sub tanh transpose xor",
  )
)


def step_jaxpr(step: Callable, *arguments: Any) -> Any:
  """Returns the closed jaxpr of a step, and the structure of its result."""
  return jax.make_jaxpr(lambda *args: step(*args), return_shape=True)(*arguments)


def source_line(equation: Any) -> str:
  """Returns `file:line` of the innermost frame outside of JAX; "" if it is unknown."""
  traceback = equation.source_info.traceback
  for frame in traceback.frames if traceback else ():
    if not os.path.abspath(frame.file_name).startswith(_LIBRARIES):
      return f"{short(frame.file_name)}:{frame.line_num}"
  return ""


def short(text: str) -> str:
  """Returns a text with the names of files below the working directory relative to it."""
  return text.replace(os.getcwd() + os.sep, "")


def evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], rule: Callable) -> list:
  """Evaluates a jaxpr, equation by equation.

  Args:
    jaxpr: an open one.
    consts: of its constvars.
    arguments: of its invars.
    rule: (equation, values) -> results, or None to have the equation as it is.
  """
  environment: dict[Any, Any] = {}

  def read(atom: Any) -> Any:
    return atom.val if hasattr(atom, "val") else environment[atom]

  environment.update(zip(jaxpr.constvars, consts, strict=True))
  environment.update(zip(jaxpr.invars, arguments, strict=True))
  for equation in jaxpr.eqns:
    values = [read(atom) for atom in equation.invars]
    results = rule(equation, values)
    if results is None:
      results = bind(equation, values)
    environment.update(zip(equation.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def bind(equation: Any, values: Sequence[Any]) -> list:
  """Returns the results of an equation as it is."""
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
  for key in _CALLS:
    inner = equation.params.get(key)
    if inner is not None and len(open_of(inner)[0].invars) == len(equation.invars):
      return open_of(inner)
  return None


def open_of(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
  """Returns (open jaxpr, constants) of a closed or an open one."""
  return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def scan(equation: Any, values: Sequence[Any], body: Callable) -> list:
  """Runs a scan with another body.

  Args:
    equation: of the scan.
    values: its arguments.
    body: (open jaxpr, constants, arguments) -> (results, more), where more is stacked as well.

  Returns:
    The results, and at the end the stacked `more`.
  """
  jaxpr, consts = open_of(equation.params["jaxpr"])
  carried = sum(
    len(outer.aval.shape) == len(inner.aval.shape)
    for outer, inner in zip(equation.outvars, jaxpr.outvars, strict=True)
  )
  scanned = sum(
    len(outer.aval.shape) != len(inner.aval.shape)
    for outer, inner in zip(equation.invars, jaxpr.invars, strict=True)
  )
  fixed = len(values) - carried - scanned

  def one(carry, slices):
    results, more = body(jaxpr, consts, [*values[:fixed], *carry, *slices])
    return tuple(results[:carried]), (tuple(results[carried:]), more)

  carry, (stacked, more) = jax.lax.scan(
    one,
    tuple(values[fixed : fixed + carried]),
    tuple(values[fixed + carried :]),
    length=equation.params["length"],
    reverse=equation.params["reverse"],
  )
  return [*carry, *stacked, more]


# ---- Sums in two halves ----


def in_halves(step: Callable, *arguments: Any) -> Callable:
  """Returns a step that takes each sum in two halves, which rounds otherwise.

  Sums in while loops, branches and `shard_map` stay as they are.
  """
  closed, shape = step_jaxpr(step, *arguments)
  tree = jax.tree.structure(shape)

  def rule(equation, values):
    name = equation.primitive.name
    if name == "dot_general":
      return _dot_in_halves(equation, *values)
    if name == "reduce_sum":
      return _sum_in_halves(equation, values[0])
    if name == "scan":
      run = lambda jaxpr, consts, args: (evaluate(jaxpr, consts, args, rule), ())  # noqa: E731
      return scan(equation, values, run)[:-1]
    if inner := called(equation):
      return evaluate(*inner, values, rule)
    return None

  def halved(state, batch):
    flat = jax.tree.leaves((state, batch))
    return jax.tree.unflatten(tree, evaluate(closed.jaxpr, closed.consts, flat, rule))

  return halved


def _dot_in_halves(equation, left, right):
  (left_dims, right_dims), _ = equation.params["dimension_numbers"]
  if not left_dims or left.shape[left_dims[0]] < 2:
    return None
  parts = []
  for start in (True, False):
    cut = left.shape[left_dims[0]] // 2
    ends = (0, cut) if start else (cut, left.shape[left_dims[0]])
    sides = [
      jax.lax.slice_in_dim(side, *ends, axis=dims[0])
      for side, dims in ((left, left_dims), (right, right_dims))
    ]
    parts += bind(equation, sides)
  return [parts[0] + parts[1]]


def _sum_in_halves(equation, value):
  axis = max(equation.params["axes"], key=lambda i: value.shape[i], default=None)
  if axis is None or value.shape[axis] < 2:
    return None
  cut = value.shape[axis] // 2
  halves = [
    jax.lax.slice_in_dim(value, start, end, axis=axis)
    for start, end in ((0, cut), (cut, value.shape[axis]))
  ]
  first, second = (bind(equation, [half])[0] for half in halves)
  return [first + second]


# ---- Intermediate values ----


@dataclasses.dataclass(frozen=True)
class Label:
  """A place in a program: its operation, line, global shape and dtype, and which one of these.

  Of what is computed in a scan, the shape begins with the scan's length, `loop` is the number of
  the outermost scan, counted from 1, and `backwards` whether it runs from its end.
  """

  operation: str
  line: str
  shape: tuple[int, ...]
  dtype: str
  number: int = 0
  loop: int = dataclasses.field(default=0, compare=False)
  backwards: bool = dataclasses.field(default=False, compare=False)

  def __str__(self):
    inside = ", in a scan" if self.loop else ""
    which = f" (number {self.number + 1} of its line)" if self.number else ""
    shape = ",".join(map(str, self.shape))
    return (
      f"{self.operation} {self.dtype}[{shape}] at {self.line or 'an unknown line'}{inside}{which}"
    )


class Recorder:
  """A function (state, batch) -> the floating-point results of a step's operations, in order.

  Results in scans are stacked. Inside while loops, branches and `shard_map` nothing is recorded:
  their results are those of one operation.
  """

  def __init__(self, step: Callable, *arguments: Any):
    """Traces the step for arguments of these shapes."""
    self._closed, _ = step_jaxpr(step, *arguments)
    self.labels: list[Label] = []
    shapes = jax.eval_shape(self, *arguments)
    self.bytes = sum(math.prod(one.shape) * one.dtype.itemsize for one in shapes)

  def __call__(self, state: Any, batch: Any) -> list[jax.Array]:
    """Runs the step, and returns what is recorded."""
    flat = jax.tree.leaves((state, batch))
    labels, values = self._run(self._closed.jaxpr, self._closed.consts, flat)[1:]
    self.labels = labels
    return values

  def _run(self, jaxpr, consts, arguments):
    """Returns (results, labels, recorded values)."""
    labels, recorded = [], []

    def rule(equation, values):
      if equation.primitive.name == "scan":
        inner: list[Label] = []

        def body(jaxpr, consts, args):
          results, found, kept = self._run(jaxpr, consts, args)
          inner[:] = found
          return results, tuple(kept)

        *results, more = scan(equation, values, body)
        loop = {"loop": 1 + max((one.loop for one in labels), default=0)}
        loop["backwards"] = equation.params["reverse"]
        for label in inner:
          shape = (equation.params["length"], *label.shape)
          labels.append(dataclasses.replace(label, shape=shape, **loop))
        recorded.extend(more)
        return results
      if inlined := called(equation):
        results, found, kept = self._run(*inlined, values)
        labels.extend(found)
        recorded.extend(kept)
        return results
      results = bind(equation, values)
      name = equation.primitive.name
      for value in results if name not in _PASSED_OVER else ():
        if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating):
          labels.append(Label(name, source_line(equation), value.shape, str(value.dtype)))
          recorded.append(value)
      return results

    return evaluate(jaxpr, consts, arguments, rule), labels, recorded

  def labelled(self, values: Sequence[Any]) -> dict[Label, Any]:
    """Returns label -> value, numbering those of the same operation, line, shape and dtype."""
    counts: collections.Counter[Label] = collections.Counter()
    found = {}
    for label, value in zip(self.labels, values, strict=True):
      found[dataclasses.replace(label, number=counts[label])] = value
      counts[label] += 1
    return found


def first_difference(ours: dict[Label, Any], theirs: dict[Label, Any], bound: float):
  """Compares recorded values in the order of computation.

  Args:
    ours: label -> value, in the order of the program.
    theirs: likewise, of another program; what only one of them has is left out.
    bound: of the relative L2 difference.

  Returns:
    (the first label that differs, its difference, the last one before it, the labels that theirs
    alone has between the two); the first is None if all are equal, the last before may be None.
  """
  last = None
  for label, place in _in_order([label for label in ours if label in theirs]):
    difference = apart(ours[label][place], theirs[label][place])
    if not difference <= bound:
      return label, difference, last, _alone(ours, list(theirs), last, label)
    last = label
  return None, 0.0, last, []


def _in_order(labels: list[Label]):
  """Yields (label, index): those of a scan iteration by iteration."""
  for loop, group in itertools.groupby(labels, lambda label: label.loop):
    inside = list(group)
    if not loop:
      yield from ((label, ...) for label in inside)
      continue
    steps = range(inside[0].shape[0])
    for i in reversed(steps) if inside[0].backwards else steps:
      yield from ((label, i) for label in inside)


def _alone(ours, order: list[Label], last: Label | None, label: Label) -> list[Label]:
  begin, end = order.index(last) + 1 if last else 0, order.index(label)
  if begin <= end:
    between = order[begin:end]
  else:  # the next iteration of a scan
    loop = order[end].loop
    between = [one for one in order[begin:] if one.loop == loop]
    between += [one for one in order[:end] if one.loop == loop]
  return [one for one in between if one not in ours]


def apart(ours: np.ndarray, theirs: np.ndarray) -> float:
  """Returns the relative L2 difference; infinities and NaNs at the same places are equal."""
  finite = np.isfinite(ours)
  if (finite != np.isfinite(theirs)).any():
    return np.inf
  ours, theirs = np.float64(ours[finite]), np.float64(theirs[finite])
  return float(np.linalg.norm(ours - theirs)) / (float(np.linalg.norm(ours)) or 1.0)


def likely(label: Label) -> str:
  """Returns a likely cause of a difference that begins at an operation."""
  name = label.operation
  if name == "shard_map":
    return (
      "the function under shard_map: a psum over an axis that is missing or taken twice, a mean of "
      "the devices' means, or positions and masks counted from the device's own block"
    )
  if name.startswith("random") or name.startswith("threefry"):
    return "random numbers that depend on the sharding of the array they fill"
  if name in ("reduce_sum", "dot_general", "reduce_max", "cumsum"):
    return "a sum over a dim that is cut over devices, taken of a part of it"
  return "this operation, which is given the same and returns something else"
