"""A decoder on Python's standard library, tokenized by a BPE of 4,096 tokens trained on it.

  python main.py prepare --config=configs/experiments/python_bpe.py:tokenizer --train_tokenizer=4096
  python main.py --config=configs/experiments/python_bpe.py

--config=configs/dp4_tp2.py:lm_bpe, which `make train` runs, trains the tokenizer itself.

Gives, after 128 steps, 4.864 nats per token on the evaluation split: 1.958 bits per byte, where the
byte-level decoder has 2.418 in as much time (Python 3.11.7's library). Took 10 and 146 s of
processor time on two shared x86-64 cores, as eight simulated devices.
"""

from ml_collections import ConfigDict

from configs import base
from input_pipeline.text import tokenizer


def get_config(argument: str | None = None) -> ConfigDict:
  """Returns the config of a stage: train (default), or tokenizer, which has none yet.

  Raises:
    ValueError: there is no such stage, or training has no tokenizer yet.
  """
  stage = base.variant(argument, "train", "tokenizer")
  config = base.get_config("lm", mesh=dict(data=4, tensor=2))
  config.training.steps = 128
  config.evaluation.final_steps = 0  # the whole split
  if stage == "train":
    config.data.tokenizer = tokenizer.resolve(config.data)
    if config.data.tokenizer == tokenizer.BYTES:
      raise ValueError(
        "no tokenizer is trained for data.name='python_source' in this data_dir; train one: "
        "python main.py prepare --config=configs/experiments/python_bpe.py:tokenizer "
        "--train_tokenizer=4096"
      )
  return config
