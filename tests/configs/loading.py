"""Configs as the command line leaves them."""

import ast
import importlib
from typing import Any

import pytest

from configs.schema import finalize, validate
from partitioning.mesh_sizes import AXES

SIZES = dict.fromkeys(AXES, 1)


def settings(text: str) -> dict[str, Any]:
  """Returns dotted key -> value of `training.steps=3 optimizer.name=sgd`."""
  found = {}
  for word in text.split():
    key, _, value = word.partition("=")
    try:
      found[key] = ast.literal_eval(value)
    except (SyntaxError, ValueError):
      found[key] = value
  return found


def load(strategy="single", argument=None, /, **overrides):
  """Returns a shipped config as the command line would leave it; overrides are dotted keys."""
  config = importlib.import_module(f"configs.{strategy}").get_config(argument)
  for key, value in overrides.items():
    config.update_from_flattened_dict({key: value})
  return config


def finalized(argument=None, platform="cpu", /, **overrides):
  """Returns a finalized config."""
  return finalize.finalize(load("single", argument, **overrides), platform)


def checked(text="", argument=None, platform="cpu"):
  """Returns a finalized config that is not refused; `text` is of `settings`."""
  config = finalized(argument, platform, **settings(text))
  validate.check(config, {**SIZES, **config.mesh})
  return config


def refusal(text, argument=None, platform="cpu"):
  """Returns the lines with which a config is refused; `text` is of `settings`."""
  with pytest.raises(ValueError, match="the config is refused") as error:
    checked(text, argument, platform)
  return str(error.value).splitlines()[1:]
