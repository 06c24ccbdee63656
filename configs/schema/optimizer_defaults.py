"""Learning rate, weight decay and schedule where they are not set: the optimizer's own.

A recipe says those of its optimizer. Where another one is chosen by its name alone, these follow.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict, config_dict

from training.optimizer import DefaultScale, optimizer_row

# Keys of `optimizer` that are derived where they are not set.
DERIVED = {"learning_rate": float, "weight_decay": float, "schedule": str}


def unset(config: ConfigDict) -> None:
  """Makes the derived keys of a recipe's config placeholders."""
  for key, kind in DERIVED.items():
    del config.optimizer[key]
    config.optimizer[key] = config_dict.placeholder(kind)


def finalize(config: ConfigDict, chosen: ConfigDict) -> None:
  """Fills in the derived keys; `config` is unlocked.

  Args:
    config: as parsed, with overrides.
    chosen: its recipe.
  """
  keys, recipe = config.optimizer, chosen.optimizer
  row = optimizer_row(keys.name)
  scale = row.default if recipe.name == "adamw" else DefaultScale()
  rate = recipe.learning_rate and recipe.learning_rate * scale.rate
  if row.lm_rate is not None and _is_lm(config.argument):
    rate = row.lm_rate
  values = {
    "learning_rate": rate,
    "weight_decay": recipe.weight_decay * scale.decay,
    "schedule": row.schedule or recipe.schedule,
  }
  for key, value in values.items():
    if keys[key] is None:
      keys[key] = value


def _is_lm(argument: str) -> bool:
  """Returns whether a recipe, as given, is `lm` or its model with another data set."""
  parts = dict(part.split("=") for part in argument.split(",")) if "=" in argument else {}
  return parts.get("model", "lm") == "lm" if parts else argument == "lm"


def wrong(optimizer: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the schedule of an optimizer that takes one alone."""
  groups = optimizer.groups if isinstance(optimizer.groups, tuple) else ()
  names = [optimizer.name, *(group.get("name", "") for group in groups if hasattr(group, "get"))]
  for name in names:
    only = optimizer_row(name).schedule
    if only and optimizer.schedule != only:
      whose = "" if optimizer.name == name else ", which is that of all groups"
      yield (
        f"optimizer.schedule={optimizer.schedule}{whose}: {name} averages the parameters where "
        f"others lower the learning rate; set optimizer.schedule={only} (the warm-up stays)"
      )


def text(optimizer: ConfigDict) -> str:
  """Returns a line about the optimizer of a finalized config, its derived values filled in."""
  decay = f", weight decay {optimizer.weight_decay:g}" if optimizer.weight_decay else ""
  warmup = optimizer.warmup_steps
  rises = f" after {warmup:,} step{'' if warmup == 1 else 's'} of warm-up" if warmup else ""
  return (
    f"optimizer: {optimizer.name}, learning rate {optimizer.learning_rate:g}{decay}; schedule: "
    f"{optimizer.schedule}{rises}"
  )
