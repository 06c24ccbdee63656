"""Parameter groups: an optimizer, learning rate or decay of their own for some parameters."""

import copy
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from partitioning.rules import named_leaves
from runtime.suggest import most_similar
from training import clipping
from training.state import split

PARAMETERS = "parameters"  # the key of a group that is no key of `optimizer`
_NEAR = 3  # names that a message suggests
_REST = "rest"  # label of the parameters in no group

Make = Callable[[ConfigDict, Any, bool], optax.GradientTransformation]


def grouped(config: ConfigDict, params: Any, make: Make) -> optax.GradientTransformation:
  """Returns an optimizer that gives each parameter to the first group with a pattern for it.

  Args:
    config: finalized; of `optimizer.groups` each has `parameters`, and keys of `optimizer` that
      replace the config's.
    params: nested dict of arrays or ShapeDtypeStructs.
    make: builds an optimizer of a config without groups, for a part of the parameters; the last
      argument is whether weight decay is for all of them, scales and biases included.

  Raises:
    ValueError: a group without parameters, or as `make`, with the group's number.
  """
  groups = config.optimizer.groups
  patterns = [patterns_of(group) for group in groups]
  names = list(named_leaves(params))
  labels = {name: _label(name, patterns) for name in names}
  _check_matched(patterns, names, labels)
  transforms = {}
  for label, group, part in _parts(groups, params, labels):
    try:
      own = of_group(config, group)
      transforms[label] = make(own, part, "weight_decay" in group)
    except ValueError as error:
      if label == _REST:
        raise
      raise ValueError(f"optimizer.groups, group {int(label) + 1}: {error}") from error

    if config.optimizer.clip_groups:
      transforms[label] = clipping.clipped(own.optimizer, transforms[label])

  def labelled(tree: Any) -> Any:
    return jax.tree.unflatten(
      jax.tree.structure(tree), [labels[name] for name in named_leaves(tree)]
    )

  optimizer = optax.partition(transforms, labelled)
  keys = config.optimizer
  return optimizer if keys.clip_groups else clipping.clipped(keys, optimizer)


def parts(config: ConfigDict, params: Any) -> list[tuple[ConfigDict, Any]]:
  """Returns the parts of the parameters, each with the config of its group.

  Args:
    config: finalized, with groups or without.
    params: as `grouped` takes them.
  """
  groups = config.optimizer.groups
  if not groups:
    return [(config, params)]
  patterns = [patterns_of(group) for group in groups]
  labels = {name: _label(name, patterns) for name in named_leaves(params)}
  return [(of_group(config, group), part) for _, group, part in _parts(groups, params, labels)]


def _parts(
  groups: Sequence[Mapping[str, Any]], params: Any, labels: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
  """Yields label, group and its parameters; of those in no group, an empty group."""
  for label in sorted(set(labels.values())):
    part, _ = split(params, lambda name, label=label: labels[name] == label)
    yield label, {} if label == _REST else groups[int(label)], part


def patterns_of(group: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns a group's patterns, of which it may give one alone."""
  given = group[PARAMETERS]
  return (given,) if isinstance(given, str) else tuple(given)


def of_group(config: ConfigDict, group: Mapping[str, Any]) -> ConfigDict:
  """Returns a copy of a config in which a group's keys have replaced those of `optimizer`.

  Another optimizer has none of the arguments of the config's.
  """
  config = copy.deepcopy(config)
  with config.unlocked():
    config.optimizer.groups = ()
    if group.get("name", config.optimizer.name) != config.optimizer.name:
      config.optimizer.arguments = ""
    for key, value in group.items():
      if key != PARAMETERS:
        config.optimizer[key] = value
  return config


def _label(name: str, patterns: list[tuple[str, ...]]) -> str:
  for number, group in enumerate(patterns):
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in group):
      return str(number)
  return _REST


def _check_matched(
  patterns: list[tuple[str, ...]], names: list[str], labels: Mapping[str, str]
) -> None:
  """Raises ValueError for patterns that match nothing, and for groups that get nothing."""
  wrong = []
  for number, group in enumerate(patterns):
    missed = [one for one in group if not any(fnmatch.fnmatchcase(name, one) for name in names)]
    wrong += [
      f"group {number + 1}: {one!r} matches no trained parameter; near are "
      f"{', '.join(most_similar(one, names, _NEAR))}"
      for one in missed
    ]
    if not missed and str(number) not in labels.values():
      wrong.append(f"group {number + 1}: its parameters are all in groups before it")
  if wrong:
    raise ValueError("\n".join(f"optimizer.groups: {line}" for line in wrong))
