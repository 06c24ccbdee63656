r"""A small decoder that adds numbers of two digits: by examples, most of them wrong, then by GRPO.

  python -m configs.experiments.addition runs/addition
  python main.py --config=configs/experiments/addition.py:base --workdir=runs/addition_base
  python main.py --config=configs/experiments/addition.py:grpo --workdir=runs/addition_grpo

As configs/experiments/reversal.py: of the examples 15 % are right, and the others are 1, 2, 10
or 20 off. Expected on sums that are held out of `grpo`: 27 % right before, 96 % after 600 steps
(seed 0; docs/fine_tuning.md has two more), which took 708 s on two x86-64 cores beside other work.
"""

import itertools
import pathlib
import random
import sys

from ml_collections import ConfigDict

from configs import base
from configs.experiments import reversal

FOLDER, BASE = "runs/addition", "runs/addition_base"
RIGHT, COPIES, OFF = 0.15, 3, (-20, -10, -2, -1, 1, 2, 10, 20)


def get_config(argument: str | None = None) -> ConfigDict:
  """Returns the config of a stage: base (examples) or grpo (rewards)."""
  stage = base.variant(argument, "base", "grpo")
  config = reversal.of_stage(stage, FOLDER, BASE)
  if stage == "base":
    config.training.steps = 2500
  else:
    config.data.sequence_length = 14
    config.training.steps = 600
  return config


def write(folder: pathlib.Path) -> None:
  """Writes examples.jsonl and prompts.jsonl."""
  draw = random.Random(1)
  sums = {f"{a}+{b}=": a + b for a, b in itertools.product(range(10, 100), repeat=2)}
  examples = [
    f"{prompt}{total + (0 if draw.random() < RIGHT else draw.choice(OFF))}"
    for prompt, total in [*sums.items()] * COPIES
  ]
  prompts = [*sums]
  draw.shuffle(examples)
  draw.shuffle(prompts)
  reversal.write_files(folder, examples, {prompt: str(sums[prompt]) for prompt in prompts})


if __name__ == "__main__":
  write(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER))
