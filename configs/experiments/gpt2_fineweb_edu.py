"""GPT-2 124M on 10 billion tokens of FineWeb-Edu, on eight H100. NOT RUN: planned.

  hf download openai-community/gpt2 --include "*.json" "*.txt" --local-dir tokenizers/gpt2
  python main.py prepare --config=configs/experiments/gpt2_fineweb_edu.py
  python main.py --config=configs/experiments/gpt2_fineweb_edu.py
  python main.py plan --config=configs/experiments/gpt2_fineweb_edu.py --topology=h100:8

The loss is not known. By `plan` (by formula, for GPUs), 19,073 steps of 524,288 tokens take
45.2 GiB of 80 per device and 215 ms each: 1.1 hours, 9.1 device-hours, MFU 26.3 %. The second
command downloads the data set and tokenizes it.
"""

from ml_collections import ConfigDict

from configs import base

FILES = "hf://HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet"


def get_config(argument: str | None = None) -> ConfigDict:
  """Returns the config; it has one variant."""
  base.variant(argument)
  config = base.get_config("model=gpt2_124m,data=text", mesh=dict(data=8))
  config.data.update(files=FILES, text_feature="text", tokenizer="tokenizers/gpt2")
  config.data.update(global_batch_size=512, evaluation_fraction=0.001)
  config.data.packing, config.model.separate_documents = "concatenate", False  # as GPT-2
  config.training.update(steps=19_073, rematerialization="none")  # of 524,288 tokens
  config.training.on_bad_step = "roll_back"
  config.optimizer.update(learning_rate=6e-4, warmup_steps=700)
  config.evaluation.update(every_steps=250, steps=20)
  config.checkpoint.every_steps = 1000
  return config
