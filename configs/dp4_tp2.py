"""4-way data by 2-way tensor parallel: the main job.

python main.py --config=configs/dp4_tp2.py:lm_bpe

To expect after 128 steps: 1.9 to 2.0 bits per byte on the evaluation split. Without a recipe it is
lm, on bytes: 2.3 to 2.5 after 200 steps (docs/data.md).
"""

from configs import base


def get_config(argument=None):
  """Returns the config of this strategy for a recipe: lm (default), lm_bpe, mlp, ..."""
  return base.get_config(argument, mesh=dict(data=4, tensor=2))
