"""Data, fully sharded and tensor parallel at once, 2 x 2 x 2.

python main.py --config=configs/dp2_fsdp2_tp2.py

To expect after 200 steps: 2.3 to 2.5 bits per byte on the evaluation split (docs/models.md).
"""

from configs import base


def get_config(argument=None):
  """Returns the config of this strategy for a recipe: lm (default), mlp, mlp_tutorial, vit."""
  return base.get_config(argument, mesh=dict(data=2, fsdp=2, tensor=2))
