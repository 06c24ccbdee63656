"""Builds the optimizer of a config from its row in `training.optimizer`."""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from models.mup import VECTORS
from partitioning.parallel.matrix_groups import Group
from partitioning.rules import named_leaves
from runtime.suggest import nearest
from training import averages, clipping, optimizer_groups
from training.optimizer import OPTIMIZERS, Optimizer, imported, optimizer_row, optimizers_with
from training.optimizers import state_dtype, width_scaling
from training.optimizers.arguments import parse_arguments
from training.optimizers.hidden_matrices import UnfitError, hidden_matrices
from training.schedules import learning_rate_schedule


def sgd(learning_rate, momentum=0.0, nesterov=False, accumulator_dtype=None):
  """Returns stochastic gradient descent; a momentum of 0 has no state.

  Raises:
    ValueError: Nesterov's momentum without a momentum.
  """
  if nesterov and not momentum:
    raise ValueError("optimizer.arguments: nesterov=True needs optimizer.momentum above 0")
  return optax.sgd(learning_rate, momentum or None, nesterov, accumulator_dtype)


def muon_dimensions(config: ConfigDict) -> Mapping[str, Any]:
  """Returns the dimension numbers of optax's Muon.

  Without them it takes arrays of rank 2, and leaves the kernels of stacked layers to Adam.
  """
  hidden = hidden_matrices(config)

  def of(params):
    leaves = named_leaves(params)
    matrices = hidden.of(leaves)
    found = [
      optax.contrib.MuonDimensionNumbers(matrices[name].rows, matrices[name].columns)
      if name in matrices
      else None
      for name in leaves
    ]
    return jax.tree.unflatten(jax.tree.structure(params), found)

  return {"muon_weight_dimension_numbers": of}


def make_optimizer(config: ConfigDict, params: Any) -> optax.GradientTransformation:
  """Returns the config's optimizer; clipping by the norm of all gradients is the step's.

  Args:
    config: finalized.
    params: a tree of arrays or ShapeDtypeStructs, float32 or wider, with which an optimizer of
      optax is tried.

  Raises:
    ValueError: an unknown optimizer or argument, or an optimizer that the step cannot use.
  """
  make = width_scaling.scaled(_of_one_name)
  if config.optimizer.groups:
    optimizer = optimizer_groups.grouped(config, params, make)
  else:
    optimizer = clipping.clipped(config.optimizer, make(config, params))
  _check_matrices(config, params)
  optimizer = state_dtype.stored_narrow(config, optimizer, params)
  decays = config.optimizer.ema_decays
  return averages.averaged(optimizer, decays) if decays else optimizer


def _check_matrices(config: ConfigDict, params: Any) -> None:
  """Raises UnfitError if an optimizer of matrices gets none, in all groups that it has."""
  parts = optimizer_groups.parts(config, params)
  for name in optimizers_with(lambda one: one.of_matrices):
    mine = [(own, part) for own, part in parts if own.optimizer.name == name]
    if mine:
      hidden_matrices(mine[0][0]).refuse_none([n for _, part in mine for n in named_leaves(part)])


def _of_one_name(
  config: ConfigDict, params: Any, decays_all: bool = False
) -> optax.GradientTransformation:
  """Returns the optimizer of a config without groups; see `make_optimizer`.

  `decays_all` is whether weight decay is for scales and biases too.
  """
  keys, name = config.optimizer, config.optimizer.name
  found = find(name)
  given = arguments(found, config, _all if decays_all else decayed)
  build = functools.partial(imported(found.build), **given)
  schedule = learning_rate_schedule(config)
  if found.fits_every_step:
    return build(learning_rate=schedule)
  optimizer, wrong = _tried(build, schedule, params)
  if not wrong:
    return optimizer
  # Some take no schedule, since they use the rate not only as a factor.
  optimizer, wrong = _tried(build, keys.learning_rate, params)
  if wrong:
    raise ValueError(f"optimizer.name={name}: the step cannot use it: {wrong}")
  if keys.schedule != "constant" or keys.warmup_steps:
    raise ValueError(
      f"optimizer.name={name}: its learning rate is a number, not a schedule; set "
      f"optimizer.schedule=constant and optimizer.warmup_steps=0"
    )
  return optimizer


def matrix_groups(
  config: ConfigDict, params: Any, sizes: Mapping[str, int]
) -> list[tuple[Any, Group]]:
  """Returns the groups of matrices of Muon or SOAP, as devices share them, and how it computes.

  Args:
    config: finalized.
    params: a tree of the trained parameters, arrays or ShapeDtypeStructs.
    sizes: mesh axis -> size.
  """
  found = []
  groups = optimizer_groups.parts(config, params)
  for one, part in itertools.chain.from_iterable(width_scaling.parts(*group) for group in groups):
    own = optimizer_row(one.optimizer.name)
    if own.whole_matrices:
      how = imported(own.whole_matrices)(**arguments(own, one))
      found += [(how, group) for group in how.groups(part, sizes)]
  return found


def decayed(params):
  """Returns a tree of booleans: True for kernels and tables, False for scales and biases."""
  flags = [not name.endswith(VECTORS) for name in named_leaves(params)]
  return jax.tree.unflatten(jax.tree.structure(params), flags)


def _all(params):
  return jax.tree.map(lambda _: True, params)


# ---- By name ----


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


# ---- Its arguments ----


def arguments(
  row: Optimizer, config: ConfigDict, decays: Callable[[Any], Any] = decayed
) -> dict[str, Any]:
  """Returns all arguments of an optimizer except its learning rate.

  Args:
    row: of the table.
    config: finalized.
    decays: parameters -> a tree of booleans, which of them weight decay is for.

  Raises:
    ValueError: everything that is wrong with `optimizer.arguments`, a line each.
  """
  keys, taken = config.optimizer, inspect.signature(imported(row.build)).parameters
  given = parse_arguments(keys.arguments)
  mask = next((m for m in ("mask", "weight_decay_mask") if m in taken), None)
  _check_keys(row, keys, taken)
  found = {argument: keys[key] for key, argument in row.keys.items()}
  follows = imported(row.of_model)(config)
  found |= follows
  ours = {argument: f"set optimizer.{key}" for key, argument in row.keys.items()}
  ours["learning_rate"] = "set optimizer.learning_rate"
  ours |= dict.fromkeys(follows, "it follows from the model")
  if mask:
    found[mask], ours[mask] = decays, "scales and biases never decay"
  if "weight_decay" in row.keys:
    pass  # it says itself what that does
  elif mask and "weight_decay" in taken:
    found["weight_decay"], ours["weight_decay"] = weight_decay(keys), "set optimizer.weight_decay"
  elif keys.weight_decay and row.decays:
    raise ValueError(
      f"optimizer.weight_decay={keys.weight_decay}: {keys.name} takes none that leaves scales and "
      f"biases alone; set it to 0{_own_decay(taken)}"
    )
  wrong = [f"{name}: {ours[name]}" for name in given if name in ours]
  wrong += [
    f"{name}: {keys.name} has no such argument{nearest(name, set(taken) - set(ours))}"
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
      + f"\nit is {keys.name}({_signature(taken)})"
    )
  return {**found, **given}


def weight_decay(keys: ConfigDict) -> float:
  """Returns the factor that an optimizer multiplies by the learning rate and the parameter.

  With `optimizer.independent_weight_decay` a step at the peak removes `optimizer.weight_decay` of a
  parameter whatever the peak is. Source: arXiv:2309.14322, section 3.2.1.
  """
  if not keys.independent_weight_decay:
    return keys.weight_decay
  return keys.weight_decay / keys.learning_rate


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args, **kwargs


def _takes(taken: Mapping[str, inspect.Parameter], name: str) -> bool:
  return name in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())


def _check_keys(row: Optimizer, keys: ConfigDict, taken: Mapping[str, inspect.Parameter]) -> None:
  """Raises ValueError where `Optimizer.keys` names no key of the config, or no argument."""
  wrong = [
    f"optimizer.{key} is no key of this config{nearest(key, list(keys))}"
    for key in row.keys
    if key not in keys
  ]
  wrong += [
    f"{argument} is no argument of {_signature(taken)}{nearest(argument, list(taken))}"
    for argument in row.keys.values()
    if not _takes(taken, argument)
  ]
  if wrong:
    origin = OPTIMIZERS.origins.get(keys.name, __name__)
    lines = "\n".join(f"  {line}" for line in wrong)
    raise ValueError(
      f"optimizer.name={keys.name}, registered by {origin}, Optimizer.keys:\n{lines}"
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
  except UnfitError:
    raise
  except Exception as error:  # whatever a function of another library raises
    return None, f"{type(error).__name__}: {error}".splitlines()[0]
  if _types(after) != _types(state) or _types(updates) != _types(params):
    return None, "its state or its updates change their types from step to step"
  if any(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state)):
    return None, "its state has a typed random key, which a checkpoint cannot hold"
  return optimizer, ""


def _types(tree: Any) -> list[tuple[str, tuple[int, ...], Any]]:
  return [(name, leaf.shape, leaf.dtype) for name, leaf in named_leaves(tree).items()]
