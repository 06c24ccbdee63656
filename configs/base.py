"""A config, as strategy files call for it.

What is known of each key is its row in `configs/keys`; what a recipe sets is in
`schema/recipes.py`. `schema/finalize.py` fills in unset keys (None) after all overrides, and
`schema/validate.py` finds keys that do not go together.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict, config_dict

from configs.keys import table
from configs.schema import axis_tables, model_sizes, optimizer_checks, recipes
from runtime import extensions


def get_config(
  argument: str | None = None,
  *,
  mesh: Mapping[str, int] | None = None,
  axes: Mapping[str, tuple[str, ...]] | None = None,
) -> ConfigDict:
  """Returns a locked config for a strategy (the mesh) and a recipe (the argument).

  Args:
    argument: what follows the colon in `--config=FILE:ARGUMENT`: a recipe's name (default
      `lm`), or `model=NAME,data=NAME` to pick the two apart.
    mesh: axis name -> size, for the axes larger than 1.
    axes: dim of a part of your own -> the mesh axes that split it, in parameters and activations.

  Raises:
    ValueError: an unknown recipe, model or data set, with the nearest known name.
  """
  config = recipes.base(argument or "lm")
  optimizer_checks.unset(config.optimizer)
  model_sizes.unset(config.model)
  config.update(table.section("", argument=argument or "lm"))
  config.mesh = ConfigDict(table.section("mesh", **(mesh or {})))
  config.mesh_dcn = ConfigDict(table.section("mesh_dcn"))
  config.partitioning = _partitioning(config.model.name, axes or {})
  sections = ("lora", "distillation", "grpo", "metrics", "checkpoint", "profile", "processes")
  for name in (*sections, "planning"):
    config[name] = ConfigDict(table.section(name))
  config.lock()
  return config


def variant(argument: str | None, *names: str) -> str:
  """Returns the variant of an experiment that is asked for, by default the first; "" of the only.

  Raises:
    ValueError: there is no such variant.
  """
  if argument and argument not in names:
    known = f"there are {', '.join(names)}" if names else "there is one; leave it out"
    raise ValueError(f"--config=FILE:{argument}: unknown variant {argument!r}; {known}")
  return argument or next(iter(names), "")


def _partitioning(model: str, own: Mapping[str, tuple[str, ...]]) -> ConfigDict:
  """Returns the axis tables of a model: dim name -> mesh axes, outermost first.

  A registered model that has none has those of the kind that it extends.
  """
  tables = axis_tables.AXIS_TABLES
  tables = tables[model if model in tables else extensions.kind_of_model(model)]
  unset = {name: config_dict.placeholder(tuple) for name in (*tables["parameters"], *own)}
  return ConfigDict(
    {
      "parameters": {**tables["parameters"], **own},
      "activations": {**tables["activations"], **own},
      "optimizer": unset,  # as parameters. Another table than theirs is ZeRO-1
      **table.section("partitioning"),
    }
  )
