"""What the tests of the command line share."""

import json
import pathlib

from tests.helpers.compiling import FAST

# Compiles with little effort.
QUICKLY = f"--config.compiler_options={FAST}"
# Flags of a decoder that trains in seconds.
TINY_LM = [
  "--config.model.layers=1",
  "--config.model.model_size=32",
  "--config.model.feedforward_size=48",
  "--config.data.sequence_length=16",
  "--config.data.evaluation_split=test[:1]",
  "--config.evaluation.every_steps=3",
  "--config.evaluation.steps=2",
  "--config.evaluation.sample_tokens=0",
  "--config.metrics.every_steps=2",
  "--config.metrics.report=False",
  QUICKLY,
]
# Flags of a classifier that takes half as long: for what does not depend on the model.
TINY_MLP = [
  "--config.model.model_size=16",
  "--config.evaluation.every_steps=3",
  "--config.evaluation.steps=2",
  "--config.evaluation.final_steps=2",
  "--config.metrics.every_steps=2",
  "--config.metrics.report=False",
  QUICKLY,
]


def lines_of(workdir: pathlib.Path) -> list[dict]:
  """Returns the lines of metrics.jsonl, but for those about where the time went."""
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [line for line in lines if "goodput" not in line]
