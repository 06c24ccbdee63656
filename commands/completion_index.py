"""What there is to complete: `python -m commands.completion_index` prints it as JSON.

commands/complete.py, which shells call, keeps the answer until a file of this list changes.
"""

import json
import pathlib
import re

from absl import flags as absl_flags

from commands import config_flag, flags, help
from commands.verbs import VERBS
from configs import base
from configs.schema import recipes, validate
from configs.schema.presets import EXPERT_PRESETS, PRESETS
from input_pipeline import catalog
from runtime import chips
from training.optimizer import OPTIMIZERS

PATHS = {flag.name for flag in flags.PATHS}
DTYPES = ("float32", "bfloat16")


def build() -> dict[str, object]:
  """Returns verbs, flags with their values, config keys with theirs, and recipes."""
  return {
    "verbs": {name: verb.summary for name, verb in VERBS.items()},
    "takes": {name: verb.config != "none" for name, verb in VERBS.items()},
    "flags": {flag.name: _flag(flag) for flag in help.own_flags()},
    "keys": {recipe: _keys(recipe) for recipe in (*recipes.RECIPES, recipes.HF)},
    "strategies": config_flag.strategies(),
    "recipes": [*recipes.RECIPES, *PRESETS, *EXPERT_PRESETS, recipes.HF],
    "data": [*catalog.EMBEDDED, *catalog.OF_FILES],
  }


def chapters() -> list[str]:
  """Returns the chapters of the tour, read from its table: importing it would import JAX."""
  source = (pathlib.Path(__file__).resolve().parents[1] / "reports/tour/chapters.py").read_text()
  return re.findall(r'^  "(\w+)": \1,$', source, re.MULTILINE)


def _flag(flag: absl_flags.Flag) -> dict[str, object]:
  owners = {one.name: verbs for one, verbs in flags.OWNERS}
  values = {
    "chapter": chapters(),
    "topology": [f"{name}:" for name in chips.CHIPS],
    "dtype": [*DTYPES],
  }
  return {
    "help": help.said_by(flag),
    "verbs": owners.get(flag.name),
    "bool": bool(flag.boolean),
    "many": isinstance(flag, absl_flags.MultiFlag),
    "values": values.get(flag.name, []),
    "path": flag.name in PATHS,
  }


def _keys(recipe: str) -> dict[str, list]:
  """Returns dotted key -> [its words, its meaning]."""
  config = base.get_config(recipe)
  words = {"optimizer.name": (*OPTIMIZERS, "lion"), **validate.choices_of(config)}
  found = {}
  for key, section, name in config_flag.keys(config):
    row = help.key_row(key, recipe)
    known = [word for word in words.get(key, row.usual) if word]
    is_bool = section.get_type(name) is bool
    found[key] = [["true", "false"] if is_bool else known, row.meaning]
  return found


if __name__ == "__main__":
  print(json.dumps(build()))
