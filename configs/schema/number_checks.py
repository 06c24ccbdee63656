"""Ranges of numbers that a run would otherwise compute with, whatever they are."""

import math
from collections.abc import Iterator

from ml_collections import ConfigDict

AT_LEAST_0 = (
  "optimizer.epsilon",
  "partitioning.max_replicated_bytes",
  "planning.price_per_chip_hour",
  "planning.token_budget",
  "model.bias_standard_deviation",
  "model.embedding_standard_deviation",
  "model.shared_feedforward_size",
)
ABOVE_0 = ("model.attention_scale", "model.norm_epsilon", "model.rotary_base")
FINITE = (  # their least is in `expert_checks`
  "model.expert_capacity",
  "model.gate_limit",
  "model.router_scale",
  "model.up_offset",
  "training.balance_loss",
  "training.router_bias_rate",
  "training.router_z_loss",
)
DECAYS = ("optimizer.beta_1", "optimizer.beta_2")  # of moving averages


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each number of a finalized config that is outside its range."""
  for names, fits, range_ in (
    (AT_LEAST_0, lambda value: 0 <= value < math.inf, "at least 0"),
    (ABOVE_0, lambda value: 0 < value < math.inf, "above 0"),
    (FINITE, math.isfinite, "a finite number"),
    (DECAYS, lambda value: 0 <= value < 1, "at least 0 and below 1, such as 0.9"),
  ):
    for name in names:
      section, key = name.split(".")
      value = config[section].get(key)  # a model may not have the key
      if value is not None and not fits(value):
        yield f"{name}={value}: {range_}"
