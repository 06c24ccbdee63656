"""One CPU device: the reference that every other strategy is compared with.

python main.py --config=configs/single.py

To expect after 200 steps: 2.3 to 2.5 bits per byte on the evaluation split (docs/models.md).
"""

from configs import base


def get_config(argument=None):
  """Returns the config of this strategy for a recipe: lm (default), mlp, mlp_tutorial, vit."""
  return base.get_config(argument, mesh=dict())
