"""Llama 3 8B from scratch on 160 billion tokens of FineWeb-Edu, on a v5p-128. NOT RUN: planned.

  hf download meta-llama/Meta-Llama-3-8B --include "*token*" --local-dir tokenizers/llama3
  python main.py prepare --config=configs/experiments/llama3_8b_v5p_128.py
  python main.py --config=configs/experiments/llama3_8b_v5p_128.py --workdir=gs://BUCKET/llama
  python main.py plan --config=configs/experiments/llama3_8b_v5p_128.py --topology=v5p-128

The loss is not known. By `plan` (compiled), 38,147 steps of 4,194,304 tokens take 27.9 GiB of 95
per chip and 10.8 s each: 4.8 days, 7,308 chip-hours, MFU 76.7 % (68.2 % with causal attention
counted half). The second command downloads the data set and tokenizes it: run it on a machine with
many cores, and give both `data.data_dir` in a file system that all hosts see.
"""

from ml_collections import ConfigDict

from configs import base

FILES = "hf://HuggingFaceFW/fineweb-edu/sample/350BT/*.parquet"


def get_config(argument: str | None = None) -> ConfigDict:
  """Returns the config; it has one variant."""
  base.variant(argument)
  config = base.get_config("model=llama3_8b,data=text", mesh=dict(fsdp=64))  # 64 chips
  config.data.update(files=FILES, text_feature="text", tokenizer="tokenizers/llama3")
  config.data.update(global_batch_size=512, evaluation_fraction=0.0001)
  config.training.steps = 38_147  # of 4,194,304 tokens: 20 per parameter
  config.training.on_bad_step = "roll_back"
  config.optimizer.warmup_steps = 2000
  config.evaluation.update(every_steps=1000, steps=8)
  config.checkpoint.update(every_steps=500, keep=3)
  return config
