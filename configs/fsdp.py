"""Fully sharded over all the devices that there are (8 where they are simulated).

python main.py --config=configs/fsdp.py

To expect: 2.3 to 2.5 bits per held-out byte after 200 steps (python_source 1.0.0 as built by
CPython 3.11.7; measured 2.415 on 2 cores); with :mlp at least 97 % of the held-out digits; with
:mlp_tutorial a loss of 28.2 before the first step and 18.6 after 30 (W = B = 512, on a CPU).
"""

from configs import base


def get_config(argument=None):
  """Returns the config of this strategy for a recipe: lm (default), mlp, mlp_tutorial."""
  return base.get_config(argument, mesh=dict(fsdp=-1))
