"""The rows of all keys, by section and by model."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ml_collections import ConfigDict, config_dict

from configs.keys import run
from configs.keys.data import DATA
from configs.keys.grpo import GRPO
from configs.keys.model import DECODER, MLP, VIT
from configs.keys.optimizer import OPTIMIZER
from configs.keys.row import ACCEPT, MAY_CHANGE, REFUSED, Key, Required, Rows, Unset
from configs.keys.training import TRAINING
from runtime import extensions

# Section -> its rows, but for those of `model`; "" is the config itself.
SECTIONS: dict[str, Rows] = {
  "": run.GENERAL,
  "data": DATA,
  "training": TRAINING,
  "optimizer": OPTIMIZER,
  "evaluation": run.EVALUATION,
  "mesh": run.MESH,
  "mesh_dcn": run.MESH_DCN,
  "partitioning": run.PARTITIONING,
  "lora": run.LORA,
  "grpo": GRPO,
  "distillation": run.DISTILLATION,
  "metrics": run.METRICS,
  "checkpoint": run.CHECKPOINT,
  "profile": run.PROFILE,
  "processes": run.PROCESSES,
  "planning": run.PLANNING,
}
# Kind of model -> the rows of its section `model`.
MODELS: dict[str, Rows] = {"transformer": DECODER, "mlp": MLP, "vit": VIT}
# Recipe -> keys that it alone has, or that mean something else in it.
RECIPES: dict[str, dict[str, Key]] = {
  "hf": {
    "model.folder": Key(
      "",
      "model=hf: a folder with config.json and safetensors, or hf://OWNER/NAME",
      resume=MAY_CHANGE,
    ),
    "data.sequence_length": Key(Unset(int), "2048, or the model's most", unit="tokens"),
    "optimizer.learning_rate": Key(Unset(float), "1e-5; of adapters 2e-4"),
  },
  "mlp_tutorial": {
    "model.model_size": Key(Unset(int), "W: 8192 on an accelerator, 512 on a CPU", unit="dims")
  },
}
# `model.NAME` -> the row of a decoder's key that a config file has added, for a part of its own.
KEYS: extensions.Table = extensions.Table("key", {}, numerics=False)
# Section -> what a change of its keys means where a run resumes, unless a row says otherwise.
_RESUME = {
  **dict.fromkeys(("data", "model", "lora"), REFUSED),
  **dict.fromkeys(("mesh", "mesh_dcn", "partitioning", "processes", "planning"), MAY_CHANGE),
  **dict.fromkeys(("metrics", "evaluation", "checkpoint", "profile"), MAY_CHANGE),
}


def section(name: str, /, **given: Any) -> dict[str, Any]:
  """Returns the defaults of a section, with some keys replaced and others added."""
  return {**_defaults(SECTIONS[name]), **given}


def model(name: str, /, **given: Any) -> dict[str, Any]:
  """Returns the defaults of the section `model` of a kind of model, with some keys replaced."""
  return {**_defaults(model_rows(name)), **given}


def model_rows(name: str) -> Rows:
  """Returns the rows of the section `model` of a kind of model, those of config files among them.

  Args:
    name: of the model; one that is registered has those of the kind that it extends.
  """
  kind = extensions.kind_of_model(name)
  own = KEYS if kind == "transformer" else {}
  return {**MODELS.get(kind, {}), **{key.removeprefix("model."): row for key, row in own.items()}}


def _defaults(rows: Rows) -> dict[str, Any]:
  """Returns key -> default, of those that have one."""
  return {
    key: config_dict.placeholder(row.default.kind)
    if isinstance(row.default, Unset)
    else row.default
    for key, row in rows.items()
    if not isinstance(row.default, Required)
  }


def find(key: str, recipe: str = "", kind: str = "transformer") -> Key | None:
  """Returns the row of a dotted key; None for a key of a user's own.

  Args:
    key: such as `training.steps`.
    recipe: whose own rows count first.
    kind: of model.
  """
  if key in RECIPES.get(recipe, {}):
    return RECIPES[recipe][key]
  part, _, last = key.rpartition(".")
  if part != "model":
    return SECTIONS.get(part, {}).get(last)
  return model_rows(kind).get(last) or next(
    (rows[last] for rows in MODELS.values() if last in rows), None
  )


def rows(config: ConfigDict) -> Iterator[tuple[str, Key, Any]]:
  """Yields (dotted key, its row, its value) of every key of a config that has a row."""
  for name in ("model", *SECTIONS):
    of_section = model_rows(config.model.name) if name == "model" else SECTIONS[name]
    values = config[name] if name else config
    for key, row in of_section.items():
      if key in values:
        yield f"{name}.{key}" if name else key, row, values[key]


Result = TypeVar("Result")


def with_sections(function: Callable[..., Result], config: ConfigDict, **others: Any) -> Result:
  """Calls a function with the sections and keys of a config that its parameters name.

  So it says by its parameters what it reads. `others` are further arguments, where it names them.
  """
  names = inspect.signature(function).parameters
  return function(**{name: others[name] if name in others else config[name] for name in names})


def needing(what: str) -> dict[str, Any]:
  """Returns dotted key -> its value where nobody reads it, of the keys that need what is named.

  Those that need one of these, in later rows, are among them.
  """
  found: dict[str, Any] = {}
  for name, of_section in (("model", model_rows("transformer")), *SECTIONS.items()):
    for key, row in of_section.items():
      if row.needs == what or row.needs.partition("=")[0] in found:
        found[f"{name}.{key}"] = row.unread
  return found


def resume_class(key: str) -> str:
  """Returns what a change of a dotted key means where a run resumes."""
  row = find(key)
  own = RECIPES["hf"].get(key) or row
  if own is not None and own.resume:
    return own.resume
  return _RESUME.get(key.partition(".")[0], ACCEPT)
