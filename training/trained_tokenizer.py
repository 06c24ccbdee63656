"""The tokenizer that a run trains before its data are prepared: data.train_tokenizer."""

from ml_collections import ConfigDict

from input_pipeline import catalog
from training.metrics.console import preparing
from training.tasks import TASKS


def train_missing(config: ConfigDict) -> None:
  """Trains the tokenizer that data.train_tokenizer asks for, unless data.tokenizer names one.

  Every process does: the same documents give the same tokenizer.

  Args:
    config: not finalized yet.

  Raises:
    ValueError: the data are no documents of a TFDS data set, or as of `train_tokenizer.train_on`.
  """
  data = config.data
  if not data.get("train_tokenizer") or data.tokenizer:
    return
  if TASKS[config.task].rows != "text" or data.name in (*catalog.OF_FILES, *catalog.RENDERED):
    raise ValueError(
      f"data.train_tokenizer={data.train_tokenizer} is for TFDS data sets with text, and "
      f"data.name={data.name!r} is none; run `prepare --train_tokenizer=N` instead, and leave "
      f"data.train_tokenizer=0"
    )
  from input_pipeline.text import train_tokenizer  # imports a library that others do not need

  with preparing("a tokenizer") as waiting:
    data.tokenizer = train_tokenizer.trained_once(data, data.train_tokenizer, waiting.tick)
