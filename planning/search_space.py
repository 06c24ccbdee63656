"""The settings that `search` looks among: meshes, rematerialization, microbatches and others.

A setting is a dict of overrides: dotted config key -> value.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from configs.schema import validate
from partitioning.mesh_sizes import AXES
from runtime import rematerialization
from runtime.suggest import nearest

STAGE = "stage"
REMATERIALIZATION = "training.rematerialization"
MICROBATCHES = "training.gradient_accumulation_steps"
OF_A_PIPELINE = "training.microbatches"
LOSS_CHUNKS = "training.loss_chunks"
RESHARD = "partitioning.reshard_after_forward"
BATCH = "data.global_batch_size"

# Tables of a decoder's activations, from those that recompute least to those that keep least. To
# save attention's output spares the backward pass the attention kernel, its most expensive part.
TABLES = (
  "none",
  "dots,attention_output=save",
  "dots",
  "dots,attention_output=save,gate=recompute",
  "dots,attention_output=save,gate=recompute,up=recompute",
  "full,attention_output=save",
  "full",
  "full,layer_input=offload",
)

Setting = dict[str, Any]


def axes(config: ConfigDict, asked: Sequence[str] = ()) -> tuple[str, ...]:
  """Returns the mesh axes whose size is searched; the others stay as the config has them.

  Args:
    config: as parsed, with overrides.
    asked: names; by default all that the model has a use for.

  Raises:
    ValueError: an unknown axis, or one of the others has size -1.
  """
  for name in asked:
    if name not in AXES:
      known = f"the axes are {', '.join(AXES)}"
      near = nearest(name, AXES)
      raise ValueError(f"--axes={','.join(asked)}: unknown axis {name!r}; {known}{near}")
  decoder = config.model.name == "transformer"
  useful = {"context": decoder, "expert": decoder and bool(config.model.get("experts"))}
  useful[STAGE] = decoder and config.model.layers > 1
  found = tuple(axis for axis in AXES if (axis in asked if asked else useful.get(axis, True)))
  for axis, size in config.mesh.items():
    if axis not in found and size < 1:
      raise ValueError(
        f"mesh.{axis}={size}: {axis} is not searched (--axes={','.join(found)}), so give its size"
      )
  return found


def meshes(
  config: ConfigDict, names: Sequence[str], devices: int, layers: int = 0
) -> list[dict[str, int]]:
  """Returns all sizes of the axes whose product with those of the others is the device count.

  Args:
    config: as parsed, with overrides.
    names: of the axes that are searched.
    devices: of a slice.
    layers: that pipeline stages, over all slices, have to divide; 0: any number.

  Raises:
    ValueError: the other axes do not divide the devices.
  """
  rest = math.prod(size for axis, size in config.mesh.items() if axis not in names)
  if devices % rest:
    fixed = ", ".join(f"mesh.{k}={v}" for k, v in config.mesh.items() if k not in names and v > 1)
    raise ValueError(f"{fixed}: {devices} devices cannot be divided by {rest}")
  found = (dict(zip(names, sizes, strict=True)) for sizes in _products(devices // rest, len(names)))
  over = config.mesh_dcn[STAGE]
  return [one for one in found if layers % (one.get(STAGE, config.mesh[STAGE]) * over) == 0]


def stages(config: ConfigDict, setting: Mapping[str, Any]) -> int:
  """Returns the pipeline stages of a setting, over all slices."""
  return setting.get(f"mesh.{STAGE}", config.mesh[STAGE]) * config.mesh_dcn[STAGE]


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
  """Yields all ways to write a number as a product of so many factors, in order."""
  if count == 0:
    if number == 1:
      yield ()
    return
  for first in (n for n in range(1, number + 1) if number % n == 0):
    for others in _products(number // first, count - 1):
      yield (first, *others)


def tables(config: ConfigDict) -> tuple[str, ...]:
  """Returns values of `training.rematerialization`, those that recompute least first.

  That of the config is among them; of a model without layers to recompute, it is the only one.
  """
  given = config.training.rematerialization
  if REMATERIALIZATION in validate.unread(config):
    return (given,)
  names = rematerialization.names_of(config.model)
  found = [one for one in (TABLES if names else rematerialization.PRESETS) if _knows(one, names)]
  return tuple(dict.fromkeys([*found, given]))


def _knows(table: str, names: Sequence[str]) -> bool:
  """Returns whether a model has the activations that a table names."""
  parts = (part.partition("=")[0] for part in table.split(",") if "=" in part)
  return all(part in names for part in parts)


def least(tables: Sequence[str]) -> str:
  """Returns the table with the least memory."""
  return next((table for table in reversed(TABLES) if table in tables), tables[-1])


def microbatches(rows: int) -> list[int]:
  """Returns the numbers of microbatches into which the rows of a device can be divided."""
  return [count for count in range(1, rows + 1) if rows % count == 0]


def variants(
  config: ConfigDict, setting: Mapping[str, Any], chunks: int, more: int = 0
) -> Iterator[Setting]:
  """Yields changes of a setting that save little time, or memory at little cost.

  Args:
    config: as parsed, with overrides.
    setting: from which they differ.
    chunks: of its loss, as chosen.
    more: microbatches of its pipeline, more than it has; 0: it has no pipeline, or no more.
  """
  if config.model.name != "transformer":
    return
  if setting.get("mesh.fsdp", config.mesh.fsdp) > 1 and config.partitioning.reshard_after_forward:
    yield {**setting, RESHARD: False}
  if more:  # a smaller bubble, of smaller matmuls
    yield {**setting, OF_A_PIPELINE: more}
  for count in sorted({max(1, chunks // 2), 2 * chunks} - {chunks}):
    yield {**setting, LOSS_CHUNKS: count}


def text(setting: Mapping[str, Any]) -> str:
  """Returns overrides to copy: `--config.mesh.fsdp=64 --config.training.rematerialization=dots`."""
  return " ".join(f"--config.{key}={value}" for key, value in setting.items())


def changed(config: ConfigDict, setting: Mapping[str, Any]) -> Setting:
  """Returns the part of a setting that differs from the config."""
  return {key: value for key, value in setting.items() if _value(config, key) != value}


def _value(config: ConfigDict, key: str) -> Any:
  for part in key.split("."):
    config = config[part]
  return config
