"""python main.py --config=configs/tp8.py"""

from configs import base


def get_config(argument=None):
  return base.get_config(argument, mesh=dict(tensor=8))
