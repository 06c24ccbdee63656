"""A config, as strategy files call for it.

What is known of each key is its row in `configs/keys`; what a recipe sets is in
`schema/recipes.py`. `schema/finalize.py` fills in unset keys (None) after all overrides, and
`schema/validate.py` finds keys that do not go together.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict, config_dict

from configs.keys import table
from configs.schema import axis_tables, model_sizes, optimizer_checks, recipes


def get_config(argument: str | None = None, *, mesh: Mapping[str, int] | None = None) -> ConfigDict:
  """Returns a locked config for a strategy (the mesh) and a recipe (the argument).

  Args:
    argument: what follows the colon in `--config=FILE:ARGUMENT`: a recipe's name (default
      `lm`), or `model=NAME,data=NAME` to pick the two apart.
    mesh: axis name -> size, for the axes larger than 1.

  Raises:
    ValueError: an unknown recipe, model or data set, with the nearest known name.
  """
  config = recipes.base(argument or "lm")
  optimizer_checks.unset(config.optimizer)
  model_sizes.unset(config.model)
  config.update(table.section("", argument=argument or "lm"))
  config.mesh = ConfigDict(table.section("mesh", **(mesh or {})))
  config.mesh_dcn = ConfigDict(table.section("mesh_dcn"))
  config.partitioning = _partitioning(config.model.name)
  for name in ("lora", "metrics", "checkpoint", "profile", "processes", "planning"):
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


def _partitioning(model: str) -> ConfigDict:
  """Returns the axis tables of a model: dim name -> mesh axes, outermost first."""
  tables = axis_tables.AXIS_TABLES[model]
  unset = {name: config_dict.placeholder(tuple) for name in tables["parameters"]}
  return ConfigDict(
    {
      "parameters": dict(tables["parameters"]),
      "activations": dict(tables["activations"]),
      "optimizer": unset,  # as parameters. Another table than theirs is ZeRO-1
      **table.section("partitioning"),
    }
  )
