"""The teacher of a config: its model, whose vocabulary and tokens have to be those of the run."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from configs import base
from configs.keys import table
from input_pipeline.text import tokenizer
from interop import hf_folder
from training import run_tokenizer, teacher_rows
from training.checkpointing import integrity, reading

KEY = teacher_rows.KEY
_TASKS = ("causal_lm", "dpo")


def finalize_teacher(config: ConfigDict, finalize: Callable[[ConfigDict], ConfigDict]) -> None:
  """Fills in the model of a config's teacher; `config` is finalized but for this, and unlocked.

  Args:
    config: has a teacher.
    finalize: a config, for the same platform.

  Raises:
    ValueError: no model is there, or its tokens are others than those of the run.
  """
  location, keys = config.distillation.teacher, config.distillation
  keys.top = 0
  if teacher_rows.is_stored(location):
    _finalize_stored(config, location)
    return
  if hf_folder.is_model(location):
    model, its_tokenizer = _of_folder(config, finalize)
  else:
    model, its_tokenizer = _of_run(location)
  own = config.data.tokenizer
  wrong = [
    f"model.{key}={config.model[key]} here, and {model[key]} there"
    for key in ("vocabulary_size", "vocabulary_multiple")
    if config.model[key] != model[key]
  ]
  if own != tokenizer.CHARACTERS and _digest(own) != _digest(its_tokenizer):
    wrong.append(f"data.tokenizer={own} here, and {its_tokenizer} there")
  if wrong:
    raise ValueError(
      f"{KEY}={location}: an id of the teacher has to be the same token here, and they differ: "
      f"{'; '.join(wrong)}; take the teacher's: --config.data.tokenizer={its_tokenizer}"
    )
  if model["positions"] != "learned":  # it reads rows of any length
    model = {**model, "max_positions": config.data.sequence_length}
  keys.model = tuple(sorted((key, _tuples(value)) for key, value in model.items()))


def _finalize_stored(config: ConfigDict, location: str) -> None:
  """Fills in what is stored of a teacher; raises ValueError for what it cannot be used with."""
  keys, known = config.distillation, teacher_rows.about(location)
  pairs = {
    "model.vocabulary_size": (config.model.vocabulary_size, known.vocabulary_size),
    "model.separate_documents": (config.model.separate_documents, known.separate_documents),
    "distillation.temperature": (keys.temperature, known.temperature),
  }
  wrong = [f"{key}={ours} here, and {theirs} there" for key, (ours, theirs) in pairs.items()]
  wrong = [line for line, pair in zip(wrong, pairs.values(), strict=True) if pair[0] != pair[1]]
  if keys.divergence != "forward":
    wrong.append(
      f"distillation.divergence={keys.divergence} averages over what the model may say, and of "
      f"all but the teacher's {known.top} likeliest tokens only the sum is stored"
    )
  if config.data.sequence_length_ramp:
    wrong.append("data.sequence_length_ramp cuts rows that the teacher has read as a whole")
  if wrong:
    raise ValueError(f"{KEY}={location}, stored of {known.teacher}: {'; '.join(wrong)}")
  keys.model, keys.top = (), known.top


def _digest(location: str) -> str:
  return tokenizer.load(location).digest


def _of_run(location: str) -> tuple[Mapping[str, Any], str]:
  """Returns the section `model` of a run's finalized config, and the run's tokenizer."""
  try:
    folder, step = reading.parse_location(location)
    step = integrity.steps(folder)[-1] if step is None else step
    saved = reading.read_json(folder / str(step), integrity.CONFIG)
    model, rank = saved["model"], saved["lora"]["rank"]
    if saved["task"] not in _TASKS:
      raise ValueError(f"its task is {saved['task']}, and a teacher predicts tokens")
    if rank:
      raise ValueError(
        f"it has adapters (lora.rank={rank}); name what they give merged: python main.py export "
        f"{location} --to=FOLDER --merge"
      )
  except (KeyError, TypeError, ValueError, OSError, integrity.UnreadableError) as error:
    raise ValueError(f"{KEY}={location}: {error}") from error
  if saved["data"]["tokenizer"] == tokenizer.BYTES:
    return model, tokenizer.BYTES
  return model, os.fspath(run_tokenizer.of_checkpoint(location))


def _of_folder(
  config: ConfigDict, finalize: Callable[[ConfigDict], ConfigDict]
) -> tuple[Mapping[str, Any], str]:
  """Returns the section `model` that `model=hf` derives of a folder, and the folder's tokenizer."""
  if hf_folder.is_adapter(location := config.distillation.teacher):
    raise ValueError(f"{KEY}={location} has adapters alone; merge them into their base first")
  theirs = base.get_config("hf")
  theirs.model.folder = location
  theirs.data.sequence_length = config.data.sequence_length
  theirs.model.vocabulary_multiple = config.model.vocabulary_multiple
  theirs = finalize(theirs)
  return theirs.model.to_dict(), theirs.data.tokenizer


def _tuples(value: Any) -> Any:
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def of_teacher(config: ConfigDict) -> ConfigDict:
  """Returns a run's finalized config with its teacher as the model, which is not trained."""
  described = copy.deepcopy(config)
  with described.unlocked():
    described.model = ConfigDict(dict(config.distillation.model))
    for key in ("separate_documents", "context_attention"):
      described.model[key] = config.model[key]
    described.lora.rank, described.evaluation.ema_decay = 0, 0.0
    described.training.update(scan_unroll=1, rematerialization="none", matmul_dtype="compute")
  return described


def teacher_errors(
  config: ConfigDict, checks: Sequence[Callable[..., Iterator[str]]], sizes: Mapping[str, int]
) -> Iterator[str]:
  """Yields what of a run's mesh and settings does not go with its teacher's model.

  Args:
    config: finalized.
    checks: of a model, as `validate.OF_MODELS` has them.
    sizes: mesh axis -> size.
  """
  described = of_teacher(config)
  for check in checks:
    lines = table.with_sections(check, described, sizes=sizes)
    yield from (f"{KEY}={config.distillation.teacher}: {line}" for line in lines)
