"""Configs as the command line leaves them."""

import importlib

from configs.schema import finalize
from partitioning.mesh_sizes import AXES

SIZES = dict.fromkeys(AXES, 1)


def load(strategy="single", argument=None, /, **overrides):
  """Returns a shipped config as the command line would leave it; overrides are dotted keys."""
  config = importlib.import_module(f"configs.{strategy}").get_config(argument)
  for key, value in overrides.items():
    config.update_from_flattened_dict({key: value})
  return config


def finalized(argument=None, platform="cpu", /, **overrides):
  """Returns a finalized config."""
  return finalize.finalize(load("single", argument, **overrides), platform)
