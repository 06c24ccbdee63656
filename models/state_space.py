"""Layers of constant state without the delta rule, linear attention with a decay.

Names carry their dims: a head has h dims in queries and keys and u in values; of A heads, A / G
share queries and keys.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.layers import Linear, Norm
from models.mixers import TAILS, TAPS, Recurrent, draw_decays, draw_taps, gates_at_borders
from models.positions import Layer, Rows
from models.spec import DecoderSpec
from partitioning.constraints import constrain
from partitioning.dtypes import wide_dtype

LEAST_DECAY = 1.0  # of the factors that are drawn, as the authors of Mamba-2 do


def flops(spec: DecoderSpec) -> int:
  """Returns operations per token of a recurrence: a query reads, a key writes."""
  return 4 * spec.mixer_heads * spec.mixer_head_size * spec.mixer_value_head_size


class Mamba2(Recurrent):
  """Mamba-2: its B are keys, its C queries, its x values. Source: arXiv:2405.21060, section 7.

  The norm of the output is one of the channels of each of the G groups; that of Bamba, Granite 4
  and Nemotron-H comes behind the gate.
  """

  projections = "query", "key", "value", "gate", "decay"
  cached = ("states", *TAILS)
  constants = (*TAPS, *(f"{one}_bias" for one in TAPS), "skip")

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str):
    """Draws the projections, convolutions and decays; D begins with ones."""
    super().__init__(spec, rngs=rngs, name=name)
    self.limits, self.groups = spec.mixer_step_limits, spec.mixer_key_heads
    for one, letters in zip(TAPS, ("Gh", "Gh", "Au"), strict=True):
      setattr(self, one, draw_taps(spec, f"w{letters}", rngs))
      zeros = jnp.zeros(spec.sizes(letters), spec.parameter_dtype)
      setattr(self, f"{one}_bias", nnx.Param(zeros))
    self.log_factor, self.step_bias = draw_decays(spec, rngs, LEAST_DECAY)
    self.skip = nnx.Param(jnp.ones(spec.sizes("A"), spec.parameter_dtype))
    self.order, self.epsilon = spec.mixer_norm, spec.norm_epsilon
    if self.order != "none":
      self.norm = Norm(f"{name}/norm", spec)
    self.out = Linear(f"{name}/out", spec, rngs=rngs, scale=spec.out_scale)

  @staticmethod
  def dims(spec: DecoderSpec) -> dict[str, str]:
    """Returns parameter -> letters."""
    norm = {} if spec.mixer_norm == "none" else {"norm/scale": "Au"}
    return {
      "(query|key)/kernel": "DGh",
      "(value|gate)/kernel": "DAu",
      "decay/kernel": "DA",
      "(query_taps|key_taps)": "wGh",
      "value_taps": "wAu",
      "(query_taps_bias|key_taps_bias)": "Gh",
      "value_taps_bias": "Au",
      "(log_factor|step_bias|skip)": "A",
      **norm,
      "out/kernel": "AuD",
    }

  flops = staticmethod(flops)

  def _gates(self, others: list[Array], v: Array, layer: Layer, rows: Rows) -> tuple[Array, Array]:
    """Returns logarithms of decays, and steps, which are the strengths."""
    del v, layer
    wide, [step_BTA] = wide_dtype(self.dtype), others
    factor, bias = (
      constrain(x[...].astype(wide), "A")[None, None] for x in (self.log_factor, self.step_bias)
    )
    step_BTA = jax.nn.softplus(step_BTA.astype(wide) + bias)
    if self.limits:
      step_BTA = jnp.clip(step_BTA, *self.limits)
    return gates_at_borders(-jnp.exp(factor) * step_BTA, step_BTA, rows)

  def _gated(self, x_BTAu: Array, given: list[Array]) -> Float[Array, "B T A u"]:
    """Returns the output, gated before its norm, after it, or without one."""
    wide = wide_dtype(self.dtype)
    x_BTAu, gate_BTAu = x_BTAu.astype(wide), jax.nn.silu(given[-1].astype(wide))
    if self.order == "before_gate":
      return self._normed(x_BTAu) * gate_BTAu
    gated_BTAu = x_BTAu * gate_BTAu
    return gated_BTAu if self.order == "none" else self._normed(gated_BTAu)

  def _normed(self, x_BTAu: Float[Array, "B T A u"]) -> Float[Array, "B T A u"]:
    """Returns x, of root mean square 1 in each group of heads, times the scale."""
    groups = self.groups
    mean_BTA = jnp.mean(x_BTAu * x_BTAu, axis=-1)
    mean_BTG = jnp.mean(mean_BTA.reshape(*mean_BTA.shape[:2], groups, -1), axis=-1)
    mean_BTA = constrain(jnp.repeat(mean_BTG, mean_BTA.shape[2] // groups, axis=2), "BTA")
    scale_Au = constrain(self.norm.scale[...], "Au").astype(x_BTAu.dtype)
    return x_BTAu * jax.lax.rsqrt(mean_BTA + self.epsilon)[..., None] * scale_Au[None, None]


# ------------------------------ lightning attention ------------------------------

EPSILON = 1e-6  # of the norm of the output, whatever `model.norm_epsilon` is, as in MiniMax-01


class Lightning(Recurrent):
  """Lightning attention, whose heads have fixed decays. Source: arXiv:2501.08313, section 2.2."""

  projections = "query", "key", "value", "gate"
  cached = ("states",)

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str):
    """Draws the projections."""
    super().__init__(spec, rngs=rngs, name=name)
    self.norm = Norm(f"{name}/norm", spec, epsilon=EPSILON)
    self.out = Linear(f"{name}/out", spec, rngs=rngs, scale=spec.out_scale)

  @staticmethod
  def dims(spec: DecoderSpec) -> dict[str, str]:
    """Returns parameter -> letters."""
    del spec
    kernels = {"(query|key)/kernel": "DGh", "(value|gate)/kernel": "DAu", "out/kernel": "AuD"}
    return {**kernels, "norm/scale": "Au"}

  flops = staticmethod(flops)

  def _gated(self, out_BTAu: Array, given: list[Array]) -> Float[Array, "B T A u"]:
    wide = wide_dtype(self.dtype)
    return self.norm(out_BTAu).astype(wide) * jax.nn.sigmoid(given[-1].astype(wide))

  def _gates(self, others: list[Array], v: Array, layer: Layer, rows: Rows) -> tuple[Array, Array]:
    """Returns logarithms of decays, from 2 ** (-8 / A) to 2 ** -8 of the layer's, and strengths."""
    del others
    wide, heads = wide_dtype(self.dtype), v.shape[2]
    slopes_A = 2.0 ** (-8.0 / heads * (jnp.arange(heads, dtype=wide) + 1))
    ones_BTA = jnp.ones(v.shape[:3], wide)
    log_decay_BTA = ones_BTA * (-layer.decay * slopes_A)[None, None]
    gates = gates_at_borders(log_decay_BTA, ones_BTA, rows)
    return constrain(gates[0], "BTA"), constrain(gates[1], "BTA")
