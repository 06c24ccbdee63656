"""The settings that `search` looks among: meshes, rematerialization, microbatches and others.

A setting is a dict of overrides: dotted config key -> value.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from configs.schema import step_checks, validate
from partitioning.mesh_sizes import AXES
from partitioning.parallel.pipeline_schedule import GPIPE
from runtime import rematerialization
from runtime.extensions import kind_of_model
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


@dataclasses.dataclass(frozen=True)
class Space:
  """The settings of a config.

  Attributes:
    keys: the config, with overrides; of `tables` and `variants`, resolved.
  """

  keys: ConfigDict

  def axes(self, asked: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the mesh axes whose size is searched; the others stay as the config has them.

    Args:
      asked: names; by default all that the model has a use for.

    Raises:
      ValueError: an unknown axis, or one of the others has size -1.
    """
    for name in asked:
      if name not in AXES:
        known = f"the axes are {', '.join(AXES)}"
        near = nearest(name, AXES)
        raise ValueError(f"--axes={','.join(asked)}: unknown axis {name!r}; {known}{near}")
    decoder = kind_of_model(self.keys.model.name) == "transformer"
    useful = {"context": decoder, "expert": decoder and bool(self.keys.model.get("experts"))}
    useful[STAGE] = decoder and self.keys.model.layers > 1
    found = tuple(axis for axis in AXES if (axis in asked if asked else useful.get(axis, True)))
    for axis, size in self.keys.mesh.items():
      if axis not in found and size < 1:
        raise ValueError(
          f"mesh.{axis}={size}: {axis} is not searched (--axes={','.join(found)}), so give its size"
        )
    return found

  def meshes(self, names: Sequence[str], devices: int, layers: int = 0) -> list[dict[str, int]]:
    """Returns all sizes of the axes whose product with those of the others is the device count.

    Args:
      names: of the axes that are searched.
      devices: of a slice.
      layers: that pipeline stages, over all slices, have to divide; 0: any number.

    Raises:
      ValueError: the other axes do not divide the devices.
    """
    rest = math.prod(size for axis, size in self.keys.mesh.items() if axis not in names)
    if devices % rest:
      fixed = ", ".join(
        f"mesh.{k}={v}" for k, v in self.keys.mesh.items() if k not in names and v > 1
      )
      raise ValueError(f"{fixed}: {devices} devices cannot be divided by {rest}")
    found = (
      dict(zip(names, sizes, strict=True)) for sizes in _products(devices // rest, len(names))
    )
    over = self.keys.mesh_dcn[STAGE]
    return [one for one in found if layers % (one.get(STAGE, self.keys.mesh[STAGE]) * over) == 0]

  def stages(self, setting: Mapping[str, Any]) -> int:
    """Returns the pipeline stages of a setting, over all slices."""
    return setting.get(f"mesh.{STAGE}", self.keys.mesh[STAGE]) * self.keys.mesh_dcn[STAGE]

  def tables(self) -> tuple[str, ...]:
    """Returns values of `training.rematerialization`, those that recompute least first.

    That of the config is among them; of a model without layers to recompute, it is the only one.
    """
    given = self.keys.training.rematerialization
    if REMATERIALIZATION in validate.unread(self.keys):
      return (given,)
    names = rematerialization.names_of(self.keys.model)
    found = [one for one in (TABLES if names else rematerialization.PRESETS) if _knows(one, names)]
    return tuple(dict.fromkeys([*found, given]))

  def variants(self, setting: Mapping[str, Any], chunks: int, more: int = 0) -> Iterator[Setting]:
    """Yields changes of a setting that save little time, or memory at little cost.

    Args:
      setting: from which they differ.
      chunks: of its loss, as chosen.
      more: microbatches of its pipeline, more than it has; 0: it has no pipeline, or no more.
    """
    if kind_of_model(self.keys.model.name) != "transformer":
      return
    fsdp = setting.get("mesh.fsdp", self.keys.mesh.fsdp)
    if fsdp > 1 and self.keys.partitioning.reshard_after_forward:
      yield {**setting, RESHARD: False}
    if more:  # a smaller bubble, of smaller matmuls
      yield {**setting, OF_A_PIPELINE: more}
    for count in sorted({max(1, chunks // 2), 2 * chunks} - {chunks}):
      yield {**setting, LOSS_CHUNKS: count}

  def changed(self, setting: Mapping[str, Any]) -> Setting:
    """Returns the part of a setting that differs from the config."""
    return {key: value for key, value in setting.items() if self._value(key) != value}

  def without_pipeline(self) -> Setting:
    """Returns overrides that leave out what is said of pipelines, for meshes without stages."""
    said = dict(step_checks.OF_STAGES)
    if self.keys.training.microbatches is None:
      del said[OF_A_PIPELINE]
    return self.changed(said)

  def chunks_of_stage(self) -> int:
    """Returns the parts of the layers that each stage of a pipeline has."""
    training = self.keys.training
    return training.pipeline_chunks if training.pipeline == "interleaved" else 1

  def more_microbatches(self, stages: int, rows: int, count: int) -> Sequence[int]:
    """Returns numbers of a pipeline's microbatches above one of them, ascending.

    Args:
      stages: of the pipeline.
      rows: of a stage's devices, which microbatches divide.
      count: that there are.
    """
    whole = stages if self.keys.training.pipeline == "interleaved" else 1
    return [n for n in microbatches(rows) if n > count and n % whole == 0]

  def divided_inputs(self, parts: Mapping[str, int]) -> int:
    """Returns the bytes of the inputs of chunks that more microbatches divide; GPipe keeps all."""
    return 0 if self.keys.training.pipeline == GPIPE else parts.get("saved inputs of chunks", 0)

  def _value(self, key: str) -> Any:
    found = self.keys
    for part in key.split("."):
      found = found[part]
    return found


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
  """Yields all ways to write a number as a product of so many factors, in order."""
  if count == 0:
    if number == 1:
      yield ()
    return
  for first in (n for n in range(1, number + 1) if number % n == 0):
    for others in _products(number // first, count - 1):
      yield (first, *others)


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


def text(setting: Mapping[str, Any]) -> str:
  """Returns overrides to copy: `--config.mesh.fsdp=64 --config.training.rematerialization=dots`."""
  return " ".join(f"--config.{key}={value}" for key, value in setting.items())


# What stages compute again of a layer, as a share of its matmuls: a forward pass, which is 1 of 3
# passes, and of attention kernels 2 of 7 matmuls.
_AGAIN = 2 / 7


def ticks_of_step(stages: int, microbatches: int, chunks: int) -> float:
  """Returns the ticks of a step for each that a pipeline without a bubble would take."""
  return 1 + (stages - 1) / (microbatches * chunks)


def least_by_stages(stages: int, rows: int, chunks: int) -> float:
  """Returns how often stages compute, at least, what the same devices compute without them.

  Layers with the bubble of as many microbatches as there are rows, and a forward pass again; what
  is before and after the layers on each stage.

  Args:
    stages: of the pipeline.
    rows: of a stage's devices, which microbatches divide.
    chunks: of each stage.
  """
  return min(float(stages), (1 + _AGAIN) * ticks_of_step(stages, rows, chunks))
