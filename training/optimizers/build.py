"""Builds the optimizer of a spec from its row in `training.optimizer`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from etils import epy

from models.mup import VECTORS
from partitioning.rules import named_leaves
from runtime.suggest import nearest
from training.optimizer import OPTIMIZERS, Optimizer, imported, optimizer_row
from training.optimizers.spec import REST, OptimizerSpec, Part, parse_arguments, tree_of_names
from training.schedules import learning_rate_schedule

with epy.lazy_imports():  # of groups and muP, averages, state in fewer bytes, and matrices
  from partitioning.parallel import matrix_groups as shared_matrices
  from training import averages
  from training.optimizers import groups, low_precision, muon

WIDE = ("float32", "float64")  # dtypes in which moments are stored as they are computed


def make_optimizer(spec: OptimizerSpec, params: Any) -> optax.GradientTransformation:
  """Returns an optimizer; clipping by the norm of all gradients is the step's.

  Args:
    spec: what it follows.
    params: a tree of arrays or ShapeDtypeStructs, float32 or wider, with which an optimizer of
      optax is tried.

  Raises:
    ValueError: an unknown optimizer or argument, an optimizer that the step cannot use, or groups
      that do not fit the parameters, with the group's number.
  """
  parts = _parts_by_group(spec, params)
  transforms = {}
  for part in parts:
    try:
      optimizer = _of_part(part)
    except ValueError as error:
      if not spec.groups or part.label == REST:
        raise
      raise ValueError(f"optimizer.groups, group {int(part.label) + 1}: {error}") from error
    transforms[part.label] = clipped(part.spec, optimizer) if spec.clip_groups else optimizer
  if spec.groups:
    optimizer = groups.joined([(part.label, part.params) for part in parts], transforms)
  else:
    [optimizer] = transforms.values()
  if not spec.clip_groups:
    optimizer = clipped(spec, optimizer)
  _check_matrices(parts)
  if spec.state_dtype not in WIDE:
    optimizer = low_precision.stored_narrow(spec, optimizer, params)
  return averages.averaged(optimizer, spec.ema_decays) if spec.ema_decays else optimizer


def gradient_point(spec: OptimizerSpec) -> Callable[[Any, Any], Any]:
  """Returns (trained parameters, optimizer's state) -> where a step takes its gradients."""
  rows = [optimizer_row(name) for name in spec.names]
  points = {imported(row.gradient_point) for row in rows if row.gradient_point}

  def point(params: Any, state: Any) -> Any:
    for one in points:
      params = one(params, state)
    return params

  return point


def _parts_by_group(spec: OptimizerSpec, params: Any) -> list[Part]:
  return groups.parts_by_group(spec, params) if spec.groups else [Part(REST, spec, params)]


def _parts_by_width(spec: OptimizerSpec, params: Any) -> list[tuple[OptimizerSpec, Any]]:
  return groups.parts_by_width(spec, params) if spec.widths.base_width else [(spec, params)]


def _of_part(part: Part) -> optax.GradientTransformation:
  """Returns the optimizer of a part, with muP's learning rates where `model.base_width` is set."""
  found = _parts_by_width(part.spec, part.params)
  made = {
    str(i): _of_one_name(own, params, part.decays_all) for i, (own, params) in enumerate(found)
  }
  if len(made) == 1:
    return made["0"]
  return groups.joined([(str(i), params) for i, (_, params) in enumerate(found)], made)


def _check_matrices(parts: list[Part]) -> None:
  """Raises ValueError if an optimizer of matrices gets none, in all parts that it has."""
  names: dict[str, list[str]] = {}
  for part in parts:
    if optimizer_row(part.spec.name).of_matrices:
      names.setdefault(part.spec.name, []).extend(named_leaves(part.params))
  for part in parts:
    if mine := names.pop(part.spec.name, None):
      muon.HiddenMatrices(part.spec).refuse_none(mine)


def _of_one_name(
  spec: OptimizerSpec, params: Any, decays_all: bool = False
) -> optax.GradientTransformation:
  """Returns the optimizer of a spec without groups; see `make_optimizer`.

  `decays_all` is whether weight decay is for scales and biases too.
  """
  row = find(spec.name)
  given = arguments(row, spec, _all if decays_all else decayed)
  build = functools.partial(imported(row.build), **given)
  schedule = learning_rate_schedule(spec, spec.steps)
  if row.fits_every_step:
    return build(learning_rate=schedule)
  optimizer, wrong = _tried(build, schedule, params)
  if not wrong:
    return optimizer
  # Some take no schedule, since they use the rate not only as a factor.
  optimizer, wrong = _tried(build, spec.learning_rate, params)
  if wrong:
    raise ValueError(f"optimizer.name={spec.name}: the step cannot use it: {wrong}")
  if spec.schedule != "constant" or spec.warmup_steps:
    raise ValueError(
      f"optimizer.name={spec.name}: its learning rate is a number, not a schedule; set "
      f"optimizer.schedule=constant and optimizer.warmup_steps=0"
    )
  return optimizer


def matrix_groups(
  spec: OptimizerSpec, params: Any, sizes: Mapping[str, int]
) -> list[tuple[Any, "shared_matrices.Group"]]:
  """Returns the groups of matrices of Muon or SOAP, as devices share them, and how it computes.

  Args:
    spec: what the optimizer follows.
    params: a tree of the trained parameters, arrays or ShapeDtypeStructs.
    sizes: mesh axis -> size.
  """
  found = []
  for part in _parts_by_group(spec, params):
    for own, mine in _parts_by_width(part.spec, part.params):
      row = optimizer_row(own.name)
      if row.whole_matrices:
        kind, given = imported(row.whole_matrices), _all_arguments(row, own)
        how = kind(**{field.name: given[field.name] for field in dataclasses.fields(kind)})
        found += [(how, group) for group in how.groups(mine, sizes)]
  return found


def _all_arguments(row: Optimizer, spec: OptimizerSpec) -> dict[str, Any]:
  """Returns all arguments of an optimizer, those by default among them."""
  taken = inspect.signature(imported(row.build)).parameters
  return {**{name: one.default for name, one in taken.items()}, **arguments(row, spec)}


def decayed(params: Any) -> Any:
  """Returns a tree of booleans: True for kernels and tables, False for scales and biases."""
  return tree_of_names(params, lambda name: not name.endswith(VECTORS))


def _all(params: Any) -> Any:
  return tree_of_names(params, lambda name: True)


# ------------------------------ by name ------------------------------


def find(name: str) -> Optimizer:
  """Returns the row of an optimizer, a new one for one of optax that no table has.

  Raises:
    ValueError: there is none of this name, or it cannot be used here, with the reason.
  """
  found = optimizer_row(name)
  if found.refused:
    raise ValueError(f"optimizer.name={name}: {found.refused}")
  if name not in OPTIMIZERS and name not in names_in_optax():
    near = nearest(name, [*OPTIMIZERS, *names_in_optax()])
    raise ValueError(
      f"optimizer.name={name!r}: one of {', '.join(OPTIMIZERS)}, or one of optax's by its name, "
      f"such as lion or contrib.adopt{near}"
    )
  return found


@functools.cache
def names_in_optax() -> list[str]:
  """Returns the names of optax's optimizers: its functions that take a learning rate."""
  return [
    prefix + name
    for prefix, module in (("", optax), ("contrib.", optax.contrib))
    for name, function in sorted(vars(module).items())
    if inspect.isfunction(function)
    and not name.startswith(("_", "scale_by_"))
    and "learning_rate" in inspect.signature(function).parameters
  ]


# ------------------------------ its arguments ------------------------------


def arguments(
  row: Optimizer, spec: OptimizerSpec, decays: Callable[[Any], Any] = decayed
) -> dict[str, Any]:
  """Returns all arguments of an optimizer except its learning rate.

  Args:
    row: of the table.
    spec: without groups.
    decays: parameters -> a tree of booleans, which of them weight decay is for.

  Raises:
    ValueError: everything that is wrong with `optimizer.arguments`, a line each.
  """
  taken = inspect.signature(imported(row.build)).parameters
  given = parse_arguments(spec.arguments)
  mask = next((m for m in ("mask", "weight_decay_mask") if m in taken), None)
  _check_keys(row, spec, taken)
  found = {argument: spec.value(key) for key, argument in row.keys.items()}
  follows = imported(row.of_model)(spec)
  found |= follows
  ours = {argument: f"set optimizer.{key}" for key, argument in row.keys.items()}
  ours["learning_rate"] = "set optimizer.learning_rate"
  ours |= dict.fromkeys(follows, "it follows from the model")
  if mask:
    found[mask], ours[mask] = decays, "scales and biases never decay"
  if "weight_decay" in row.keys:
    pass  # it says itself what that does
  elif mask and "weight_decay" in taken:
    found["weight_decay"], ours["weight_decay"] = weight_decay(spec), "set optimizer.weight_decay"
  elif spec.weight_decay and row.decays:
    raise ValueError(
      f"optimizer.weight_decay={spec.weight_decay}: {spec.name} takes none that leaves scales and "
      f"biases alone; set it to 0{_own_decay(taken)}"
    )
  wrong = [f"{name}: {ours[name]}" for name in given if name in ours]
  wrong += [
    f"{name}: {spec.name} has no such argument{nearest(name, set(taken) - set(ours))}"
    for name in given
    if not _takes(taken, name)
  ]
  needed = [
    n
    for n, parameter in taken.items()
    if parameter.default is parameter.empty and parameter.kind not in _ANY
  ]
  wrong += [f"{n}: it has no default" for n in needed if n not in {*found, *ours, *given}]
  if wrong:
    raise ValueError(
      "optimizer.arguments:\n"
      + "\n".join(f"  {line}" for line in wrong)
      + f"\nit is {spec.name}({_signature(taken)})"
    )
  return {**found, **given}


def weight_decay(spec: OptimizerSpec) -> float:
  """Returns the factor that an optimizer multiplies by the learning rate and the parameter.

  With `optimizer.independent_weight_decay` a step at the peak removes `optimizer.weight_decay` of a
  parameter whatever the peak is. Source: arXiv:2309.14322, section 3.2.1.
  """
  if not spec.independent_weight_decay:
    return spec.weight_decay
  return spec.weight_decay / spec.learning_rate


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args, **kwargs


def _takes(taken: Mapping[str, inspect.Parameter], name: str) -> bool:
  return name in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())


def _check_keys(
  row: Optimizer, spec: OptimizerSpec, taken: Mapping[str, inspect.Parameter]
) -> None:
  """Raises ValueError where `Optimizer.keys` names no key of the config, or no argument."""
  wrong = [
    f"optimizer.{key} is no key of this config{nearest(key, spec.keys)}"
    for key in row.keys
    if key not in spec.keys
  ]
  wrong += [
    f"{argument} is no argument of {_signature(taken)}{nearest(argument, list(taken))}"
    for argument in row.keys.values()
    if not _takes(taken, argument)
  ]
  if wrong:
    origin = OPTIMIZERS.origins.get(spec.name, __name__)
    lines = "\n".join(f"  {line}" for line in wrong)
    raise ValueError(
      f"optimizer.name={spec.name}, registered by {origin}, Optimizer.keys:\n{lines}"
    )


def _own_decay(taken: Mapping[str, inspect.Parameter]) -> str:
  """Returns how to set the optimizer's own decay argument."""
  own = next((name for name in taken if name.startswith("weight_decay")), None)
  return f", and give its own as optimizer.arguments={own}=..." if own else ""


def _signature(taken: Mapping[str, inspect.Parameter]) -> str:
  """Returns `learning_rate, b1=0.9`: without types, which fill pages."""
  return ", ".join(
    name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"
    for name, parameter in taken.items()
  )


def _tried(build: Callable, rate: Any, params: Any) -> tuple[Any, str]:
  """Returns an optimizer, and why the step cannot use it; "" where it can."""
  try:
    optimizer = build(learning_rate=rate)
    with jax.numpy_dtype_promotion("standard"):
      state = jax.eval_shape(optimizer.init, params)
      updates, after = jax.eval_shape(optimizer.update, params, state, params)
  except Exception as error:  # whatever a function of another library raises
    return None, f"{type(error).__name__}: {error}".splitlines()[0]
  if _types(after) != _types(state) or _types(updates) != _types(params):
    return None, "its state or its updates change their types from step to step"
  if any(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state)):
    return None, "its state has a typed random key, which a checkpoint cannot hold"
  return optimizer, ""


def _types(tree: Any) -> list[tuple[str, tuple[int, ...], Any]]:
  return [(name, leaf.shape, leaf.dtype) for name, leaf in named_leaves(tree).items()]


# ------------------------------ clipping ------------------------------


class Clipped(NamedTuple):
  """The state of an optimizer whose gradients are clipped by a quantile.

  Attributes:
    count: int32 scalar, the number of updates.
    norms: float32 [W], those of the last W gradients, in a ring; NaN where there is none yet.
    inner: the optimizer's own state.
  """

  count: jax.Array
  norms: jax.Array
  inner: Any


def clipped(
  spec: OptimizerSpec, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Returns an optimizer that clips by group, or by a quantile of past norms.

  Clipping by one limit for the norm of all gradients is the step's (`training/step.py`).

  Args:
    spec: what it follows.
    optimizer: what updates the parameters.
  """
  if spec.clip_quantile:
    return by_quantile(optimizer, spec.clip_quantile, spec.clip_window)
  if spec.clip_groups and spec.clip_norm:
    return by_norm(optimizer, spec.clip_norm)
  return optimizer


def by_norm(optimizer: optax.GradientTransformation, limit: float) -> optax.GradientTransformation:
  """Returns an optimizer whose gradients are scaled down to a norm of at most `limit`."""

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return optimizer.update(_scaled(updates, optax.tree.norm(updates), limit), state, params)

  return optax.GradientTransformation(optimizer.init, update)


def by_quantile(
  optimizer: optax.GradientTransformation, quantile: float, window: int
) -> optax.GradientTransformation:
  """Returns an optimizer that clips to a quantile of the last norms, the new one among them.

  Source: arXiv:2007.14469 (AutoClip), with a window.

  Args:
    optimizer: what updates the parameters.
    quantile: above 0 and below 1.
    window: W, how many norms.
  """

  def init(params: Any) -> Clipped:
    norms = jnp.full((window,), jnp.nan, jnp.float32)
    return Clipped(jnp.zeros((), jnp.int32), norms, optimizer.init(params))

  def update(updates: Any, state: Clipped, params: Any = None) -> tuple[Any, Clipped]:
    norm = optax.tree.norm(updates)
    norms = state.norms.at[state.count % window].set(norm.astype(jnp.float32))
    limit = jnp.nanquantile(norms, quantile).astype(norm.dtype)
    updates, inner = optimizer.update(_scaled(updates, norm, limit), state.inner, params)
    return updates, Clipped(state.count + 1, norms, inner)

  return optax.GradientTransformation(init, update)


def _scaled(updates: Any, norm: jax.Array, limit: jax.Array | float) -> Any:
  """Returns gradients of this norm, scaled down to the limit."""
  scale = limit / jnp.maximum(norm, limit)
  return jax.tree.map(lambda x: x * scale.astype(x.dtype), updates)
