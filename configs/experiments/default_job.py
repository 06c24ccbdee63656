"""The recipe lm: a byte-level decoder of 0.66 M parameters on Python's standard library.

  python main.py --config=configs/experiments/default_job.py

The same as --config=configs/dp4_tp2.py, but that the whole split is evaluated at the end.
`make train` runs lm_bpe, the same on tokens.

Gives, after 200 steps, 1.676 nats per byte on the evaluation split: 2.418 bits per byte (Python
3.11.7's library). Took 148 s of processor time on two shared x86-64 cores, as eight simulated
devices; 3 minutes beside other work.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(argument: str | None = None) -> ConfigDict:
  """Returns the config; it has one variant."""
  base.variant(argument)
  config = base.get_config("lm", mesh=dict(data=4, tensor=2))
  config.evaluation.final_steps = 0
  return config
