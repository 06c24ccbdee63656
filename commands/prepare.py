"""The verb `prepare`: prepares the data that `train` would, on a machine without its devices."""

import copy
import sys
from collections.abc import Sequence

from ml_collections import ConfigDict
from rich.console import Console
from rich.text import Text

from commands import flags
from configs.keys import table
from configs.schema import finalize, validate
from input_pipeline import catalog
from input_pipeline.ramp import Ramp
from input_pipeline.source import Source
from input_pipeline.text import files, tokenizer
from input_pipeline.text.chat_documents import Example
from runtime import exit_codes
from runtime.printable import printable
from training import splits
from training.metrics.console import preparing, say
from training.tasks import TASKS

TRAINED = "black on green"
OPEN, CLOSE = "[[", "]]"  # around what is trained on, without a terminal
_LONGEST = 2_000  # characters of a part that are shown
_EXAMPLES = 2  # conversations that are printed


def run() -> int:
  """Prepares both splits and prints what they hold; returns the exit code."""
  if flags.TEACHER.value is not None:  # which is checked first
    flags.CONFIG.value.distillation.teacher = flags.TEACHER.value
  with files.listed_once():
    config, train, validation = _prepare(flags.CONFIG.value)
  say(f"train: {train.name}, {len(train):,} rows")
  say(f"evaluation: {validation.name}, {len(validation):,} rows")
  splits.announce(train, validation, config.training.steps, Ramp.of(config.data))
  if config.data.name == catalog.CONVERSATIONS:
    _show_conversations(splits.read_as(config.data, config.task))
  if train.tokenizer:
    say(f"tokenizer: {train.tokenizer}, {train.ids:,} tokens")
  if flags.TEACHER.value is not None:
    _store_teacher(flags.CONFIG.value, flags.TEACHER.value)
  return exit_codes.DONE


def _store_teacher(given: ConfigDict, location: str) -> None:
  """Stores the likeliest tokens of a teacher for the rows that are trained on."""
  from commands import build  # needs devices, as no other data do
  from configs.schema import teachers
  from training import base_parameters, setup, teacher_rows

  [its_devices] = build.start_devices(given)
  config, _ = build.finalized(given, its_devices)
  if config.distillation.top:
    raise ValueError(f"--teacher={location} is stored itself; name the run or the model folder")
  model, temperature = teachers.of_teacher(config), config.distillation.temperature
  with config.unlocked(), model.unlocked():
    for one in (config, model):
      one.distillation = table.section("distillation")
  job, source = setup.prepare(model, its_devices), splits.training_batches(config).source
  _, params, variables = base_parameters.model_state(job, location)
  with preparing(f"what {location} predicts") as waiting:
    stored = teacher_rows.stored(
      *(job, params, variables, source, config.data),
      location=location,
      top=flags.TEACHER_TOP.value,
      temperature=temperature,
      dtype=flags.DTYPE.value or teacher_rows.DTYPES[0],
      tick=waiting.tick,
    )
  say(f"teacher: {location}, {teacher_rows.size_text(stored)}; train with it:")
  say(f"distillation.teacher={stored.folder} distillation.temperature={temperature:g}")


def _prepare(config: ConfigDict) -> tuple[ConfigDict, Source, Source]:
  """Returns the finalized config and both splits, after training the tokenizer if one is asked."""
  if flags.TRAIN_TOKENIZER.value is not None:
    folder = _train_tokenizer(config, flags.TRAIN_TOKENIZER.value)
    say(f"trained the tokenizer {folder}")
    if config.data.name not in catalog.OF_FILES:  # whose default stays bytes
      say(f"train with it: --config.data.tokenizer={folder}")
      config.data.tokenizer = folder
  splits.train_missing_tokenizer(config)
  # Which devices there are decides sizes of models whose data are random alone.
  config = _checked(config)
  train = splits.training_batches(config).source
  return config, train, splits.evaluation_batches(config).source


def _checked(given: ConfigDict) -> ConfigDict:
  """Returns a config, finalized and checked; a mesh axis of -1 counts as 1."""
  config = finalize.finalize(given, "cpu")
  validate.check(config, {axis: abs(size) for axis, size in config.mesh.items()})
  return config


def _show_conversations(data: ConfigDict) -> None:
  """Prints some conversations, with what is trained on highlighted."""
  from input_pipeline import mixture  # imports libraries that others do not need

  console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
  colors = console.is_terminal
  for example in mixture.example_conversations(data, _EXAMPLES):
    heading = conversation_heading(example, colors)
    for text in (heading, conversation_text(example.segments, colors)):
      if colors:
        console.print(text)
      else:
        say(text.plain)


def _train_tokenizer(config: ConfigDict, size: int) -> str:
  """Trains a tokenizer on the files, and returns its folder; see `train_tokenizer.train_on`."""
  from input_pipeline.text import train_tokenizer  # imports a library that others do not need

  if TASKS[config.task].rows != "text" or config.data.name in catalog.RENDERED:
    raise ValueError(
      f"--train_tokenizer={size}: data.name={config.data.name!r} is no text; choose "
      f"--config=FILE:model=NAME,data={catalog.TEXT}"
    )
  # What is wrong with the config is said before the training, not after it.
  checked = copy.deepcopy(config)
  checked.data.tokenizer = tokenizer.BYTES
  _checked(checked)
  if config.data.tokenizer:
    raise ValueError(
      f"--train_tokenizer={size}: data.tokenizer={config.data.tokenizer} names another one; leave "
      f"one of them out"
    )
  with preparing("a tokenizer") as waiting:
    return train_tokenizer.train_on(config.data, size, waiting.tick)


def conversation_heading(example: Example, colors: bool) -> Text:
  """Returns a line above a conversation: where it is from, and how much of it is trained on."""
  how = "highlighted" if colors else f"in {OPEN}brackets{CLOSE}"
  return Text(
    f"{printable(example.place, newlines=False)}: {example.tokens:,} tokens, of which the "
    f"{example.trained:,} {how} are trained on:",
    style="bold" if colors else "",
  )


def conversation_text(segments: Sequence[tuple[bytes, bool]], colors: bool) -> Text:
  """Returns a conversation.

  Args:
    segments: its text in parts, each with whether it is trained on.
    colors: whether a terminal shows it.
  """
  shown = Text()
  for content, trained in segments:
    part = printable(content.decode(errors="replace"), longest=_LONGEST)
    if trained and colors:
      shown.append(part, TRAINED)
    else:
      shown.append(f"{OPEN}{part}{CLOSE}" if trained else part)
  return shown
