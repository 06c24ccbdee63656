"""python main.py --config=configs/fsdp.py"""

from configs import base


def get_config(argument=None):
  return base.get_config(argument, mesh=dict(fsdp=-1))
