"""A small mixture of experts beside a dense decoder in which a token uses as many parameters.

  python main.py --config=configs/experiments/experts.py:experts
  python main.py --config=configs/experiments/experts.py:dense

8 experts, 2 of them for each token, each half as wide as the dense MLP; the first on a mesh of
data=2 x expert=4, the second on data=8. Both are the byte-level decoder of the recipe lm, with its
data and its schedule, and read the same rows. Expected after 400 steps: 2.090 bits per byte on the
evaluation split with experts, 2.093 without (docs/experts.md), on eight simulated devices on two
shared x86-64 cores. The first takes about 350 s of processor time, estimated from 20 steps.
"""

from ml_collections import ConfigDict

from configs import base

EXPERTS, EACH = 8, 2


def get_config(argument: str | None = None) -> ConfigDict:
  """Returns the config of a side: experts (default) or dense."""
  side = base.variant(argument, "experts", "dense")
  mesh = dict(data=2, expert=4) if side == "experts" else dict(data=8)
  config = base.get_config("lm", mesh=mesh)
  config.training.steps = 400
  config.evaluation.update(every_steps=0, final_steps=0)
  if side == "experts":
    config.model.update(
      experts=EXPERTS,
      experts_per_token=EACH,
      expert_feedforward_size=384 // EACH,  # so that a token passes as many as in the dense side
    )
    config.training.balance_loss = 0.01
  return config
