"""8-way fully sharded: parameters, gradients and optimizer state are split.

python main.py --config=configs/fsdp8.py

@@RESULT@@
"""

from configs import base


def get_config(argument=None):
  """Returns the config of this strategy for a recipe: lm (default), mlp, mlp_tutorial."""
  return base.get_config(argument, mesh=dict(fsdp=8))
