"""What of the data does not go together: batches, files, mixtures and ramps."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from input_pipeline import catalog
from input_pipeline.ramp import Ramp
from runtime import forms
from runtime.suggest import nearest
from training.tasks import DPO, GRPO, TASKS

# ------------------------------ data.sources and data.stages ------------------------------

_FILES = forms.Kind("a path", lambda value: isinstance(value, str) and value != "")
# A part of metrics' names.
_NAME = forms.Kind(
  "letters, digits, _ . and -",
  lambda value: isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) is not None,
)
SOURCE = forms.Needs(
  {"name": _NAME, "files": _FILES, "weight": forms.AT_LEAST_0},
  {
    **{"evaluation_files": forms.TEXT, "text_feature": forms.TEXT},
    "maximum_epochs": forms.COUNT,  # 0: no limit
  },
)
SOURCES_EXAMPLE = '({"name": "web", "files": "web/", "weight": 0.7}, ...)'


def mixture_errors(data: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with data.sources and data.stages of a finalized config."""
  if data.name not in catalog.OF_FILES:
    return
  if not isinstance(data.sources, tuple) or not all(isinstance(s, Mapping) for s in data.sources):
    yield f"data.sources={data.sources!r}: a tuple of sources, such as {SOURCES_EXAMPLE}"
    return
  if not data.sources:
    return
  faults = [line for number, source in enumerate(data.sources) for line in _source(source, number)]
  yield from faults
  if faults:
    return
  names = [source["name"] for source in data.sources]
  yield from (
    f"data.sources: {names.count(name)} sources have the name {name!r}; names must differ"
    for name in sorted({*names})
    if names.count(name) > 1
  )
  yield from _all_zero({s["name"]: s["weight"] for s in data.sources}, "data.sources")
  yield from _stages(data.stages, names)


def _source(source: Mapping[str, Any], number: int) -> Iterator[str]:
  where, known = (
    f"data.sources, source {source.get('name') or number + 1!r}",
    SOURCE.keys | SOURCE.more,
  )
  for key in source:
    if key not in known:
      yield f"{where}: unknown key {key!r}; a source has {', '.join(known)}{nearest(key, known)}"
  for line in forms.wrong(dict(source), SOURCE):
    yield f"{where}: {line}; a source is such as {SOURCES_EXAMPLE}"


def _all_zero(weights: Mapping[str, float], where: str) -> Iterator[str]:
  if not any(weights.values()):
    yield f"{where}: all weights are 0; at least one must be above 0"


def _stages(stages: Any, names: list[str]) -> Iterator[str]:
  example = f'((1000, {{"{names[0]}": 0.5}}),)'
  last = 0
  for stage in stages if isinstance(stages, tuple) else [stages]:
    pair = isinstance(stage, tuple) and len(stage) == 2
    if not (pair and type(stage[0]) is int and isinstance(stage[1], Mapping)):
      yield f"data.stages: {stage!r} is not a step with its weights, such as {example}"
      continue
    step, weights = stage
    where = f"data.stages, from step {step}"
    if step <= last:
      yield f"{where}: steps must ascend from 1; until then the weights of data.sources apply"
    last = max(last, step)
    for name, weight in weights.items():
      if name not in names:
        known = f"{', '.join(names)}{nearest(name, names)}"
        yield f"{where}: unknown source {name!r}; there are {known}"
      yield from forms.wrong(weight, forms.AT_LEAST_0, f"{where}, source {name!r}")
    yield from _all_zero(weights, where)


# ------------------------------ ramps of rows and of their length ------------------------------

# Key -> the key of what its last stage has, and an example.
RAMPS = {
  "batch_size_ramp": ("global_batch_size", "((0, 8), (100, 16))"),
  "sequence_length_ramp": ("sequence_length", "((0, 64), (100, 128))"),
}


def ramp_of(data: ConfigDict) -> Ramp:
  """Returns the ramp of a section `data`; the constant one where its form is refused."""
  if any(True for key in RAMPS for _ in _form(data, key)):
    return Ramp.constant(max(1, data.global_batch_size))
  return Ramp.of(data)


def ramp_errors(
  data: ConfigDict,
  training: ConfigDict,
  partitioning: ConfigDict,
  task: str,
  sizes: Mapping[str, int],
) -> Iterator[str]:
  """Yields what is wrong with the ramps: their form, and stages that cannot be divided."""
  faults = [line for key in RAMPS for line in _form(data, key)]
  yield from faults
  if faults:
    return
  count, axes = training.gradient_accumulation_steps, partitioning.activations.batch
  whole = count * parts(axes, sizes)
  names = " x ".join(f"{axis}={sizes.get(axis, 1)}" for axis in axes)
  for step, rows in data.batch_size_ramp:
    if whole > 0 and rows % whole and rows != data.global_batch_size:
      yield (
        f"data.batch_size_ramp: {rows} rows from step {step} on are not divisible by the batch "
        f"axes {names} and {count} microbatches = {whole}; make it {rows // whole * whole or whole}"
      )
  if not data.sequence_length_ramp:
    return
  arrays = TASKS[task].batch.items()
  if uncut := [name for name, (letters, _) in arrays if letters[:2] != "BT"]:
    yield (
      f"data.sequence_length_ramp: rows of {task} cannot be cut: {', '.join(uncut)} of a batch "
      f"belongs to a whole row; leave it out"
    )
  elif data.name in catalog.RENDERED:
    yield f"data.sequence_length_ramp: {data.name} are never cut; leave it out"


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


# ------------------------------ rows, files and conversations ------------------------------

MOST_TOKENS = 2**20  # of a row on a device: attention lists the pairs of its blocks of 128


def parts(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
  """Returns into how many parts mesh axes split a dim."""
  return math.prod(sizes.get(axis, 1) for axis in axes)


def batch_errors(
  data: ConfigDict, training: ConfigDict, partitioning: ConfigDict, sizes: Mapping[str, int]
) -> Iterator[str]:
  """Yields why a batch cannot be divided, or its rows are too long for the devices."""
  length, context = data.sequence_length, sizes.get("context", 1)
  if (length or 0) > MOST_TOKENS * context:
    yield (
      f"data.sequence_length={length:,}: at most {MOST_TOKENS * context:,} tokens, "
      f"{MOST_TOKENS:,} on each of mesh.context={context}"
    )
  size, steps = data.global_batch_size, training.gradient_accumulation_steps
  if size < 1 or steps < 1:  # refused as such
    return
  if size % steps:
    yield (
      f"data.global_batch_size={size} is not divisible by "
      f"training.gradient_accumulation_steps={steps}; make it {-(-size // steps) * steps}"
    )
    return
  axes = [axis for axis in partitioning.activations.batch if sizes.get(axis, 1) > 1]
  whole = parts(axes, sizes) * steps
  if size % whole:
    below, above = size // whole * whole, (size // whole + 1) * whole
    near = f"{below} or {above}" if below else f"{above}"
    microbatch = f" / {steps} accumulation steps" if steps > 1 else ""
    names = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
    product = f" = {whole // steps}" if len(axes) > 1 else ""
    yield (
      f"data.global_batch_size={size}{microbatch} is not divisible by the batch axes "
      f"{names}{product}; make it {near}"
    )


def skip_errors(data: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the rows that are skipped."""
  for batch in data.skip_batches:
    if type(batch) is not int or batch < 0:
      yield f"data.skip_batches: {batch!r} is not the number of a batch, such as (17, 18)"
  for rows in data.skip_rows:
    ends = rows if isinstance(rows, tuple) and len(rows) == 2 else (0, 0)
    if not all(type(end) is int for end in ends) or not 0 <= ends[0] < ends[1]:
      yield (
        f"data.skip_rows: {rows!r} is not a range of rows (first, the one behind the last), such "
        f"as ((544, 608),)"
      )


def file_errors(data: ConfigDict, task: str) -> Iterator[str]:
  """Yields what is wrong with the files that rows are read from."""
  of_files = data.name in catalog.OF_FILES
  if TASKS[task].rows != "text":
    if of_files:
      yield f"data.name={data.name!r}: {task} has no rows of text; take the recipe lm"
    return
  if not of_files:
    return
  for one, name in ((DPO, catalog.PREFERENCES), (GRPO, catalog.PROMPTS)):
    if (task == one) != (data.name == name):
      yield (
        f"data.name={data.name!r} with the task {task}: {name} and {one} go together; choose "
        f"--config=FILE:model=NAME,data={name}"
      )
  if not data.files and not data.sources:
    yield (
      f"data.files='': data.name={data.name!r} is read from files; name them, such as "
      f"--config.data.files=corpus"
    )
  of_row = {catalog.PREFERENCES: "pair", catalog.PROMPTS: "answer"}
  if one := of_row.get(data.name):
    if data.packing != "none":
      yield f"data.packing={data.packing!r}: a row of data={data.name} is one {one}; take none"
    if data.sources:
      yield f"data.sources: data={data.name} is not mixed; name its files with data.files"
  if data.name not in catalog.RENDERED:
    return
  if data.packing == "concatenate":
    yield "data.packing='concatenate': conversations are never split; take best_fit or none"
  sources = [source for source in data.sources if isinstance(source, Mapping)]
  for feature in (data.text_feature, *(source.get("text_feature", "") for source in sources)):
    if feature:
      forms = catalog.CONVERSATION_FORMS
      yield f"data.text_feature={feature!r}: conversations are read from {forms}; leave it empty"
