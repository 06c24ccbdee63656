"""python main.py --config=configs/dp4_tp2.py"""

from configs import base


def get_config(argument=None):
  return base.get_config(argument, mesh=dict(data=4, tensor=2))
