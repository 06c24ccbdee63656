"""Sums over a batch of what its rows say about experts, and metrics of them.

All but the counts are means over the sparse layers, times the weight of the batch, as every sum is
that a step divides by the weight of the global batch.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import load_balance
from models.load_balance import BALANCE, COUNTS, Z_LOSS
from models.losses import Sums

FULLEST_EXPERT = "fullest_expert"
SHARE = "expert_share/{}"  # a metric of each expert


def sums_of(
  rows: Mapping[str, jax.Array], weights_BT: Float[Array, "B T"], layers: int | None = None
) -> Sums:
  """Returns sums over the rows; {} of a model without experts.

  Args:
    rows: of `models.experts.Experts`, stacked over the sparse layers: [L, B] or [L, B, e].
    weights_BT: of the tokens in the loss.
    layers: the sparse layers of the model, where a pipeline stage has some of them; None: these.
  """
  if not rows:
    return {}
  counts_Le = jnp.sum(rows[COUNTS], axis=1, dtype=jnp.int32)
  layers = layers or counts_Le.shape[0]
  sums = {name: jnp.sum(x) / layers for name, x in rows.items() if name != COUNTS}
  dtype = sums[BALANCE].dtype
  fullest = (jnp.sum(load_balance.largest_load(counts_Le)) / layers).astype(dtype)
  weight = jnp.sum(weights_BT.astype(dtype))
  return {**sums, FULLEST_EXPERT: fullest * weight, COUNTS: counts_Le}


def auxiliary_loss(sums: Sums, balance: float, z: float) -> jax.Array | float:
  """Returns what the sums of `sums_of` add to the loss in training.

  Args:
    sums: of the batch.
    balance: `training.balance_loss`.
    z: `training.router_z_loss`.
  """
  total = 0.0
  for name, coefficient in ((BALANCE, balance), (Z_LOSS, z)):
    if coefficient and name in sums:
      total = total + coefficient * sums[name]
  return total


def shares(counts_Le: Int[Array, "L e"]) -> dict[str, jax.Array]:
  """Returns each expert's share of the assignments of all layers, by the metric's name."""
  share_e = jnp.mean(load_balance.token_shares(counts_Le), axis=0)
  width = len(str(share_e.shape[0] - 1))
  return {SHARE.format(str(expert).zfill(width)): x for expert, x in enumerate(share_e)}
