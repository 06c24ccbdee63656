"""What is printed about the rows that were opened."""

from ml_collections import ConfigDict

from input_pipeline.ramp import Ramp
from input_pipeline.source import Source
from training import splits
from training.metrics.console import say_wrapped


def rows(config: ConfigDict, train: Source, validation: Source) -> None:
  """Prints tokens, padding and epochs of rows that are an index over documents."""
  steps, ramp = config.training.steps, Ramp.of(config.data)
  for text in (splits.report_text(train, steps, ramp), splits.report_text(validation)):
    if text:
      say_wrapped(text)


def bad(source: Source) -> None:
  """Prints which records of a split cannot be read, if that is allowed."""
  if source.bad:
    say_wrapped(f"{source.name}: {source.bad}")
