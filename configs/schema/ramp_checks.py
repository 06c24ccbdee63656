"""What is wrong with ramps: data.batch_size_ramp and data.sequence_length_ramp."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from input_pipeline.ramp import Ramp
from input_pipeline.sources import catalog
from training.tasks import TASKS

# Key -> the key of what its last stage has, and an example.
RAMPS = {
  "batch_size_ramp": ("global_batch_size", "((0, 8), (100, 16))"),
  "sequence_length_ramp": ("sequence_length", "((0, 64), (100, 128))"),
}


def ramp_of(data: ConfigDict) -> Ramp:
  """Returns the ramp of a section `data`; the constant one where `wrong` refuses it."""
  if any(True for key in RAMPS for _ in _form(data, key)):
    return Ramp.constant(max(1, data.global_batch_size))
  return Ramp.of(data)


def wrong(config: ConfigDict, sizes: Mapping[str, int]) -> Iterator[str]:
  """Yields what is wrong with the ramps of a finalized config.

  Args:
    config: finalized.
    sizes: mesh axis -> size.
  """
  data = config.data
  faults = [line for key in RAMPS for line in _form(data, key)]
  yield from faults
  if not faults:
    if data.batch_size_ramp and data.skip_batches:
      yield (
        "data.skip_batches: with data.batch_size_ramp batches have different sizes; name rows with "
        "data.skip_rows"
      )
    yield from _rows(config, sizes)
    yield from _lengths(config)


def _form(data: ConfigDict, key: str) -> Iterator[str]:
  """Yields what is wrong with one of them by itself."""
  ramp, (last, example) = data[key], RAMPS[key]
  if not ramp:
    return
  if not isinstance(ramp, tuple) or not all(_is_stage(stage) for stage in ramp):
    yield f"data.{key}={ramp!r}: stages (step, value from there on), such as {example}"
    return
  steps, values = zip(*ramp, strict=True)
  if steps[0] != 0:
    yield f"data.{key}={ramp}: the first stage begins at step 0, such as {example}"
  for name, numbers in (("step", steps), ("value", values)):
    if any(a >= b for a, b in itertools.pairwise(numbers)):
      yield f"data.{key}={ramp}: each {name} is larger than the one before"
  if min(values) < 1:
    yield f"data.{key}={ramp}: each value is at least 1"
  elif values[-1] != data[last]:
    yield (
      f"data.{key}={ramp} ends with {values[-1]}, and data.{last}={data[last]}: the last stage has "
      f"that; set data.{last}={values[-1]}"
    )
  elif key == "sequence_length_ramp" and any(data[last] % value for value in values):
    bad = next(value for value in values if data[last] % value)
    yield f"data.{key}={ramp}: {bad} does not divide data.{last}={data[last]} into equal rows"


def _is_stage(stage: Any) -> bool:
  return (
    isinstance(stage, tuple) and len(stage) == 2 and all(type(number) is int for number in stage)
  )


def _rows(config: ConfigDict, sizes: Mapping[str, int]) -> Iterator[str]:
  """Yields stages whose rows the batch axes and the microbatches do not divide."""
  count, axes = config.training.gradient_accumulation_steps, config.partitioning.activations.batch
  parts = count
  for axis in axes:
    parts *= sizes.get(axis, 1)
  names = " x ".join(f"{axis}={sizes.get(axis, 1)}" for axis in axes)
  for step, rows in config.data.batch_size_ramp:
    if parts > 0 and rows % parts and rows != config.data.global_batch_size:
      yield (
        f"data.batch_size_ramp: {rows} rows from step {step} on are not divisible by the batch "
        f"axes {names} and {count} microbatches = {parts}; make it {rows // parts * parts or parts}"
      )


def _lengths(config: ConfigDict) -> Iterator[str]:
  """Yields what does not go with rows that are cut; layouts are checked stage by stage."""
  data, task = config.data, TASKS[config.task]
  if not data.sequence_length_ramp:
    return
  if whole := [name for name, (letters, _) in task.batch.items() if letters[:2] != "BT"]:
    yield (
      f"data.sequence_length_ramp: rows of {config.task} cannot be cut: {', '.join(whole)} of a "
      f"batch belongs to a whole row; leave it out"
    )
  elif data.name in catalog.RENDERED:
    yield f"data.sequence_length_ramp: {data.name} are never cut; leave it out"
