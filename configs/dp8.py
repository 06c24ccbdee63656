"""8-way data parallel: the batch is split, every device holds all parameters.

python main.py --config=configs/dp8.py

@@RESULT@@
"""

from configs import base


def get_config(argument=None):
  """Returns the config of this strategy for a recipe: lm (default), mlp, mlp_tutorial."""
  return base.get_config(argument, mesh=dict(data=8))
