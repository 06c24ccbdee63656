"""Learning rate, weight decay and schedule where they are not set: the optimizer's own.

A recipe says those of its optimizer. Where another one is chosen by its name alone, these follow.
"""

import dataclasses
from collections.abc import Iterator

from ml_collections import ConfigDict, config_dict

SCHEDULE_FREE = "schedule_free_adamw"
# Keys of `optimizer` that are derived where they are not set.
DERIVED = {"learning_rate": float, "weight_decay": float, "schedule": str}


@dataclasses.dataclass(frozen=True)
class Beside:
  """What an optimizer takes where AdamW's values are known.

  Attributes:
    rate: its learning rate over AdamW's.
    decay: its weight decay over AdamW's.
  """

  rate: float = 1.0
  decay: float = 1.0


# Learning rates of the recipe `lm`, the best of those that `python -m benchmarks.optimizers` tried.
OF_LM = {"adafactor": 8e-2, "lion": 4e-3, "muon": 3.2e-2}
# Of other recipes.
BESIDE_ADAMW = {
  # Its rate is relative to the root mean square of a parameter: 4e-2 and 8e-2 of `lm` ended alike.
  # Decay as published: none.
  "adafactor": Beside(5.0, 0.0),
  # Its update is larger, and its decay as much more as its rate is less. Source: arXiv:2302.06675,
  # section 5.
  "lion": Beside(1 / 8, 8.0),
}


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
  beside = of(keys.name) if recipe.name == "adamw" else Beside()
  rate = recipe.learning_rate and recipe.learning_rate * beside.rate
  values = {
    "learning_rate": OF_LM.get(keys.name, rate) if _is_lm(config.argument) else rate,
    "weight_decay": recipe.weight_decay * beside.decay,
    "schedule": "constant" if keys.name == SCHEDULE_FREE else recipe.schedule,
  }
  for key, value in values.items():
    if keys[key] is None:
      keys[key] = value


def _is_lm(argument: str) -> bool:
  """Returns whether a recipe, as given, is `lm` or its model with another data set."""
  parts = dict(part.split("=") for part in argument.split(",")) if "=" in argument else {}
  return parts.get("model", "lm") == "lm" if parts else argument == "lm"


def of(name: str) -> Beside:
  """Returns the values of an optimizer beside AdamW's; those of AdamW where they are not known."""
  return BESIDE_ADAMW.get(name, Beside())


def wrong(optimizer: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the schedule of an optimizer that has none."""
  groups = optimizer.groups if isinstance(optimizer.groups, tuple) else ()
  names = [optimizer.name, *(group.get("name", "") for group in groups if hasattr(group, "get"))]
  if SCHEDULE_FREE in names and optimizer.schedule != "constant":
    whose = "" if optimizer.name == SCHEDULE_FREE else ", which is that of all groups"
    yield (
      f"optimizer.schedule={optimizer.schedule}{whose}: {SCHEDULE_FREE} averages the parameters "
      f"where others lower the learning rate; set optimizer.schedule=constant (the warm-up stays)"
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
