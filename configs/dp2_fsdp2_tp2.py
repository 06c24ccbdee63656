"""python main.py --config=configs/dp2_fsdp2_tp2.py"""

from configs import base


def get_config(argument=None):
  return base.get_config(argument, mesh=dict(data=2, fsdp=2, tensor=2))
