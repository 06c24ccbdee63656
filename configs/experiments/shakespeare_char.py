"""A small decoder on the characters of Shakespeare, at nanoGPT's setting for a CPU.

  curl -O https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
  python main.py --config=configs/experiments/shakespeare_char.py
  python main.py --config=configs/experiments/shakespeare_char.py:gpt

nanoGPT publishes a validation loss of 1.88 nats per character (an estimate on 20 batches). Here the
loss on all of the last tenth of the text is 1.7043 with rotary positions, RMSNorm and a gated MLP,
and 1.8417 with nanoGPT's own blocks (gpt). Took 220 s and 198 s of processor time on two shared
x86-64 cores, on one simulated device.
"""

from ml_collections import ConfigDict

from configs import base
from configs.schema import recipes


def get_config(argument: str | None = None) -> ConfigDict:
  """Returns the config of a model: lm, with the blocks of that recipe (default), or gpt."""
  model = base.variant(argument, "lm", "gpt")
  config = base.get_config("model=lm,data=text", mesh=dict())
  config.model.update(layers=4, heads=4, kv_heads=4)
  if model == "gpt":
    config.model.update(recipes.GPT_2, biases="none", activation="gelu_erf", feedforward_size=512)
    config.model.embedding_standard_deviation = 0.02
  config.data.update(files="input.txt", tokenizer="characters", evaluation_fraction=0.1)
  config.data.update(global_batch_size=12, sequence_length=64)
  config.training.steps = 2000  # of which 100 warm up
  config.optimizer.update(learning_rate=1e-3, beta_2=0.99)
  config.evaluation.update(every_steps=250, steps=20, final_steps=0)
  return config
