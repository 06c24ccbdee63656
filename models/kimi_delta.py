"""Kimi Delta Attention. Source: arXiv:2510.26692.

Gated DeltaNet with a decay of each row of a head's state, and not of the head alone. Decays and
gates are projections of small vectors of each token, of as many numbers as a head has.

Names carry their dims, besides those of `mixers.py`: j of the vectors of decays, i of gates.
"""

import functools

import jax
from flax import nnx
from jaxtyping import Array, Float

from models.layers import Linear
from models.mixers import GatedDeltaNet
from models.spec import RESIDUAL, DecoderSpec
from partitioning.constraints import constrain
from partitioning.parallel.matmuls import Dropped, column_parallel
from partitioning.parallel.sharded_function import Residual

# Each token where it is: the vectors are gathered along the sequence, not the residual.
_IN_PLACE = Residual(between=RESIDUAL.between, inside=RESIDUAL.between)
_DECAYS, _GATES = (Residual(between=f"BR{x}", inside=f"BT{x}") for x in "ji")


class KimiDelta(GatedDeltaNet):
  """Kimi Delta Attention."""

  decays = "Ah"
  gate_activation = staticmethod(jax.nn.sigmoid)

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str):
    """Draws the projections, convolutions and decays."""
    super().__init__(spec, rngs=rngs, name=name)
    linear = functools.partial(Linear, spec=spec, rngs=rngs)
    self.decay_latent = linear(f"{name}/decay_latent")
    self.gate_latent = linear(f"{name}/gate_latent")

  @staticmethod
  def dims(spec: DecoderSpec) -> dict[str, str]:
    """Returns parameter -> letters."""
    kept = {
      row: letters
      for row, letters in GatedDeltaNet.dims(spec).items()
      if not row.startswith(("(value|gate)", "(decay|strength)", "(log_factor|step_bias)"))
    }
    return {
      "decay_latent/kernel": "Dj",
      "gate_latent/kernel": "Di",
      "value/kernel": "DAu",
      "strength/kernel": "DA",
      "decay/kernel": "jAh",
      "gate/kernel": "iAu",
      "log_factor": "A",
      "step_bias": "Ah",
      **kept,
    }

  def _projected(self, x_BRD: Float[Array, "B R D"], inputs: Dropped | None) -> list[Array]:
    """Returns queries, keys, values, gates, and what decays and strengths are made of."""
    of_residual = [self.query, self.key, self.value, self.strength]
    q, k, v, strength = column_parallel(x_BRD, of_residual, RESIDUAL, inputs)
    vectors = column_parallel(x_BRD, [self.decay_latent, self.gate_latent], _IN_PLACE)
    decay, gate = (
      column_parallel(constrain(x, residual.between), [linear], residual)[0]
      for x, residual, linear in zip(
        vectors, (_DECAYS, _GATES), (self.decay, self.gate), strict=True
      )
    )
    return [q, k, v, gate, decay, strength]
