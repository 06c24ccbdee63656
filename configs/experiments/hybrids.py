"""A decoder with attention alone, and with a mixer in three layers of four, in rows of 2,048 bytes.

  python main.py --config=configs/experiments/hybrids.py:attention seed=0
  python main.py --config=configs/experiments/hybrids.py:gated_delta seed=0
  python main.py --config=configs/experiments/hybrids.py:kimi_delta seed=0

Each has 0.295 M parameters, a narrower MLP where the mixer has more, and reads the same 160 rows of
a seed, 327,680 bytes. In bits per byte on 64 rows of the evaluation split: 3.39, 3.28 and 3.28 of
attention, 2.86, 2.83 and 2.80 with Gated DeltaNet, 2.86, 2.85 and 2.79 with Kimi Delta
Attention (docs/models.md). Took 62, 82 and 99 s of processor time, as one simulated device on two
shared x86-64 cores.
"""

from ml_collections import ConfigDict

from configs import base

# Variant -> width of the MLP, by which all have as many parameters.
WIDTHS = {"attention": 256, "gated_delta": 236, "kimi_delta": 220}


def get_config(argument: str | None = None) -> ConfigDict:
  """Returns the config of a variant: what three layers of four have, the fourth attention."""
  mixer = base.variant(argument, *WIDTHS)
  config = base.get_config("lm")
  config.model.update(layers=4, model_size=64, heads=2, kv_heads=2, feedforward_size=WIDTHS[mixer])
  if mixer != "attention":
    config.model.update(mixer=mixer, layer_types=("mixer", "mixer", "mixer", "full"))
  config.data.update(sequence_length=2048, global_batch_size=1)
  config.training.steps = 160
  config.optimizer.learning_rate = 5e-3
  config.evaluation.update(every_steps=0, final_steps=64, sample_tokens=0)
  return config
