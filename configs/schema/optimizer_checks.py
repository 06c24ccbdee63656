"""Which keys of an optimizer go together, and what they are where they are not set.

A recipe says learning rate, weight decay and schedule of its optimizer. Where another one is chosen
by its name alone, the optimizer's own follow.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from configs.schema import recipes
from runtime.suggest import nearest
from training.optimizer import DefaultScale, optimizer_keys, optimizer_row, optimizers_with

# ------------------------------ the optimizer's own values ------------------------------

# Keys of `optimizer` that are derived where they are not set.
DERIVED = {"learning_rate": float, "weight_decay": float, "schedule": str}


def unset(optimizer: ConfigDict) -> None:
  """Makes the derived keys of a recipe placeholders."""
  for key, kind in DERIVED.items():
    del optimizer[key]
    optimizer[key] = config_dict.placeholder(kind)


def finalize_optimizer(
  keys: ConfigDict, recipe: ConfigDict, argument: str, factor: float = 1.0
) -> None:
  """Fills in the derived keys; `keys` is unlocked.

  Args:
    keys: the section `optimizer` as parsed, with overrides.
    recipe: that of the recipe.
    argument: which recipe, as given.
    factor: of the learning rate, for the width of the model.
  """
  row = optimizer_row(keys.name)
  scale = row.default if recipe.name == "adamw" else DefaultScale()
  rate = recipe.learning_rate and recipe.learning_rate * scale.rate
  if row.lm_rate is not None and recipes.parse(argument)[0] == "lm":
    rate = row.lm_rate
  values = {
    "learning_rate": rate and rate * factor,
    "weight_decay": recipe.weight_decay * scale.decay,
    "schedule": row.schedule or recipe.schedule,
  }
  for key, value in values.items():
    if keys[key] is None:
      keys[key] = value


def names_of(optimizer: ConfigDict) -> list[str]:
  """Returns the optimizers that a config uses, each once: its own, and those of groups."""
  groups = [group for group in optimizer.groups if isinstance(group, Mapping)]
  return [*dict.fromkeys([optimizer.name, *(one["name"] for one in groups if "name" in one)])]


def optimizer_errors(optimizer: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the schedule of an optimizer that takes one alone."""
  for name in names_of(optimizer):
    only = optimizer_row(name).schedule
    if only and optimizer.schedule != only:
      whose = "" if optimizer.name == name else ", which is that of all groups"
      yield (
        f"optimizer.schedule={optimizer.schedule}{whose}: {name} averages the parameters where "
        f"others lower the learning rate; set optimizer.schedule={only} (the warm-up stays)"
      )


def outer_errors(
  optimizer: ConfigDict,
  training: ConfigDict,
  partitioning: ConfigDict,
  mesh: ConfigDict,
  mesh_dcn: ConfigDict,
) -> Iterator[str]:
  """Yields what does not go with groups that train on their own."""
  every, steps = optimizer.outer_every_steps, training.steps
  if not every:
    return
  key = f"optimizer.outer_every_steps={every}"
  if mesh_dcn.data < 2:
    yield (
      f"{key} with mesh_dcn.data={mesh_dcn.data}: groups of devices train on their own, and there "
      f"is one; set mesh_dcn.data to their number"
    )
  if mesh.data != 1:
    yield (
      f"{key} with mesh.data={mesh.data}: the devices of a group split their batch by fsdp; set "
      f"mesh.data=1 and mesh.fsdp={mesh.data}"
    )
  if steps % every:
    whole = steps // every * every
    near = [str(n) for n in (whole, whole + every) if n]
    yield (
      f"{key} with training.steps={steps}: the parameters would lack what the last {steps - whole} "
      f"steps have changed; set training.steps to a multiple of it, such as {' or '.join(near)}"
    )
  if split := [dim for dim, axes in partitioning.optimizer.items() if "data" in axes]:
    yield (
      f"{key} with partitioning.optimizer.{split[0]}={tuple(partitioning.optimizer[split[0]])}: "
      f"each group has all of its optimizer's state; leave data out, fsdp splits it"
    )
  if others := [name for name in names_of(optimizer) if not optimizer_row(name).elementwise]:
    yield (
      f"{key} with {' and '.join(others)}: it may exchange matrices between all devices, or take "
      f"gradients elsewhere; take one of "
      f"{', '.join(optimizers_with(lambda row: row.elementwise))}"
    )


def optimizer_text(optimizer: ConfigDict) -> str:
  """Returns a line about the optimizer of a finalized config, its derived values filled in."""
  decay = f", weight decay {optimizer.weight_decay:g}" if optimizer.weight_decay else ""
  warmup = optimizer.warmup_steps
  rises = f" after {warmup:,} step{'' if warmup == 1 else 's'} of warm-up" if warmup else ""
  outer = ""
  if every := optimizer.outer_every_steps:
    outer = f"; groups meet every {every:,} step{'' if every == 1 else 's'}"
  return (
    f"optimizer: {optimizer.name}, learning rate {optimizer.learning_rate:g}{decay}; schedule: "
    f"{optimizer.schedule}{rises}{outer}"
  )


# ------------------------------ parameter groups ------------------------------

EXAMPLE = '({"parameters": "embed/*", "learning_rate": 1e-3, "weight_decay": 0.0},)'
# Keys of `optimizer` that a group may not have for itself.
SHARED = (
  *("groups", "ema_decays", "state_dtype", "state_memory", "schedule", "final_fraction"),
  *("clip_groups", "clip_quantile", "clip_window"),
  *("outer_every_steps", "outer_learning_rate", "outer_momentum"),
  *("warmup_steps", "warmup_tokens", "decay_steps", "decay_tokens", "decay"),
)


def group_errors(optimizer: ConfigDict) -> Iterator[str]:
  """Yields a line for each mistake in optimizer.groups of a finalized config."""
  groups = optimizer.groups
  if not isinstance(groups, tuple) or not all(isinstance(group, Mapping) for group in groups):
    yield f"optimizer.groups={groups!r}: a tuple of groups, such as {EXAMPLE}"
    return
  for number, group in enumerate(groups):
    yield from _group(optimizer, group, f"optimizer.groups, group {number + 1}")


def _group(optimizer: ConfigDict, group: Mapping[str, Any], where: str) -> Iterator[str]:
  patterns = group.get("parameters", ())
  patterns = (patterns,) if isinstance(patterns, str) else patterns
  several = isinstance(patterns, tuple) and patterns != ()
  if not several or not all(isinstance(one, str) for one in patterns):
    yield f"{where}: `parameters` is a pattern of their names or several, such as {EXAMPLE}"
  own = {key: value for key, value in group.items() if key != "parameters"}
  known = [key for key in optimizer if key not in SHARED]
  used = optimizer_keys(group.get("name", optimizer.name))
  for key, value in own.items():
    if key in SHARED and key in optimizer:
      yield f"{where}: {key} is the same for all groups; set optimizer.{key}"
    elif key not in known:
      yield f"{where}: unknown key {key!r}; one of {', '.join(known)}{nearest(key, known)}"
    elif type(value) is not type(optimizer[key]) and not _number(value, optimizer[key]):
      yield f"{where}: {key}={value!r} is no {type(optimizer[key]).__name__}"
    elif key in ("learning_rate", "weight_decay") and value < 0:
      yield f"{where}: {key}={value}: at least 0"
    elif key == "clip_norm" and not (optimizer.clip_groups and value >= 0):
      yield f"{where}: clip_norm={value}: at least 0, and with optimizer.clip_groups=true only"
    elif key not in ("name", "arguments", "learning_rate", "clip_norm", *used):
      name = group.get("name", optimizer.name)
      yield f"{where}: {key}={value!r}: {name} does not use it; it uses {', '.join(used)}"
  if not own:
    yield f"{where}: it has no key of its own, so it changes nothing; such as {EXAMPLE}"


def _number(value: Any, like: Any) -> bool:
  return isinstance(like, float) and type(value) is int
