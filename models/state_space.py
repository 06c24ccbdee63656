"""Layers of constant state without the delta rule, linear attention with a decay.

Names carry their dims: a head has h dims in queries and keys and u in values; of A heads, A / G
share queries and keys.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from models import recurrence
from models.attention import Cache
from models.layers import Linear, Norm, adapter_dropout, named
from models.mixers import (
  Pieces,
  convolution,
  draw_decays,
  draw_taps,
  facts,
  gates_at_borders,
  new_tail,
  serving,
  through_pieces,
)
from models.positions import Layer, Rows
from models.spec import RESIDUAL, DecoderSpec
from partitioning.constraints import constrain
from partitioning.dtypes import wide_dtype
from partitioning.parallel.matmuls import column_parallel, row_parallel
from partitioning.parallel.sharded_function import on_shards
from runtime.rematerialization import ATTENTION_OUTPUT

LEAST_DECAY = 1.0  # of the factors that are drawn, as the authors of Mamba-2 do


_CHANNELS = {"query": "Gh", "key": "Gh", "value": "Au"}  # what a convolution is of -> its letters


def flops(spec: DecoderSpec) -> int:
  """Returns operations per token of a recurrence: a query reads, a key writes."""
  return 4 * spec.mixer_heads * spec.mixer_head_size * spec.mixer_value_head_size


class Mamba2(nnx.Module):
  """Mamba-2: its B are keys, its C queries, its x values. Source: arXiv:2405.21060, section 7.

  The norm of the output is one of the channels of each of the G groups; that of Bamba, Granite 4
  and Nemotron-H comes behind the gate.
  """

  cached = "states", "query_tails", "key_tails", "value_tails"

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str):
    """Draws the projections, convolutions and decays; D begins with ones."""
    self.dtype, self.limits = spec.compute_dtype, spec.mixer_step_limits
    self.groups = spec.mixer_key_heads
    linear = functools.partial(Linear, spec=spec, rngs=rngs)
    self.gate, self.value = linear(f"{name}/gate"), linear(f"{name}/value")
    self.key, self.query = linear(f"{name}/key"), linear(f"{name}/query")
    self.decay = linear(f"{name}/decay")
    for one, letters in _CHANNELS.items():
      setattr(self, f"{one}_taps", draw_taps(spec, f"w{letters}", rngs))
      zeros = jnp.zeros(spec.sizes(letters), spec.parameter_dtype)
      setattr(self, f"{one}_taps_bias", nnx.Param(zeros))
    self.log_factor, self.step_bias = draw_decays(spec, rngs, LEAST_DECAY)
    self.skip = nnx.Param(jnp.ones(spec.sizes("A"), spec.parameter_dtype))
    self.order, self.epsilon = spec.mixer_norm, spec.norm_epsilon
    if self.order != "none":
      self.norm = Norm(f"{name}/norm", spec)
    self.out = linear(f"{name}/out", scale=spec.out_scale)
    self.adapter_dropout = spec.lora.dropout

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

  def __call__(
    self,
    x_BRD: Float[Array, "B R D"],
    layer: Layer,
    rows: Rows,
    cache: Cache | None = None,
    key: Key[Array, ""] | None = None,
  ) -> tuple[Float[Array, "B R D"], Cache | None]:
    """Returns the residual's update, and the cache with these tokens in it; see attention."""
    del layer
    keys = (None, None) if key is None else jax.random.split(key)
    dropped = functools.partial(adapter_dropout, self.adapter_dropout, slots_T=rows.slots_BT[0])
    projections = [self.query, self.key, self.value, self.gate, self.decay]
    inputs = dropped(key=keys[0], letters=RESIDUAL.inside, shape=x_BRD.shape)
    q, k, v, gate, step = column_parallel(x_BRD, projections, RESIDUAL, inputs)
    q, k, v, gate = (
      named(x, name) for x, name in ((q, "query"), (k, "key"), (v, "value"), (gate, "gate"))
    )
    out_BTAu, cache = self._mixed((q, k, v), self._gates(step, rows), rows, cache)
    out_BTAu = named(out_BTAu, ATTENTION_OUTPUT)
    gated = constrain(self._gated(out_BTAu, gate).astype(self.dtype), "BTAu")
    inputs = dropped(key=keys[1], letters="BTAu", shape=gated.shape)
    return row_parallel(gated, self.out, RESIDUAL, inputs), cache

  def _gates(self, step_BTA: Array, rows: Rows) -> tuple[Array, Array]:
    """Returns logarithms of decays, and steps, which are the strengths."""
    wide = wide_dtype(self.dtype)
    factor, bias = (
      constrain(x[...].astype(wide), "A")[None, None] for x in (self.log_factor, self.step_bias)
    )
    step_BTA = jax.nn.softplus(step_BTA.astype(wide) + bias)
    if self.limits:
      step_BTA = jnp.clip(step_BTA, *self.limits)
    return gates_at_borders(-jnp.exp(factor) * step_BTA, step_BTA, rows)

  def _mixed(
    self, channels: tuple[Array, ...], gates: tuple[Array, Array], rows: Rows, cache: Cache | None
  ) -> tuple[Float[Array, "B T A u"], Cache | None]:
    """Returns the outputs of convolutions and recurrence, and the cache, each device its own.

    Args:
      channels: queries and keys [B, T, G, h], and values [B, T, A, u].
      gates: of `_gates`, each [B, T, A].
      rows: of the tokens.
      cache: of the layer.
    """
    wide = wide_dtype(self.dtype)
    of_channels = [(getattr(self, f"{x}_taps"), f"w{dims}") for x, dims in _CHANNELS.items()]
    of_channels += [(getattr(self, f"{x}_taps_bias"), dims) for x, dims in _CHANNELS.items()]
    constants = [(x[...].astype(wide), dims) for x, dims in [*of_channels, (self.skip, "A")]]
    most, heads = self.query_taps.shape[0] - 1, channels[-1].shape[2]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def on_device(q, k, v, decay, strength, *given):
      (*taps_and_biases, skip), (positions, slots), cached = given[:7], given[7:9], given[9:]
      pieces = Pieces.of(rows, slots)
      state, *tails = cached or (None,) * 4
      convolved, kept = [], []
      weights = zip(taps_and_biases[:3], taps_and_biases[3:], strict=True)
      for x, (taps, bias), tail in zip((q, k, v), weights, tails, strict=True):
        tail = None if tail is None else tail.astype(wide)
        x, inputs = convolution(x.astype(wide), taps, positions, pieces, tail)
        convolved.append(jax.nn.silu(x + bias[None, None]))
        kept.append(inputs)
      q, k = (serving(x, heads, v.shape[2]) for x in convolved[:2])
      v, skipped = convolved[2], skip[None, None, :, None] * convolved[2]
      if not cached:
        out = through_pieces(q, k, v, decay, strength, pieces, delta=False)
        return (out + skipped).astype(self.dtype)
      out, state = recurrence.recurrence(q, k, v, decay, strength, state, delta=False)
      tails = (new_tail(x, most, rows).astype(self.dtype) for x in kept)
      return (out + skipped).astype(self.dtype), state, *tails

    letters = [*(f"BT{x}" for x in _CHANNELS.values()), "BTA", "BTA", *(x for _, x in constants)]
    constrained = [constrain(x, one) for x, one in constants]
    given = [*channels, *gates, *constrained, *facts(rows, *gates[0].shape[:2])]
    if cache is None:
      return on_shards(on_device, [*letters, "BT", "T"], "BTAu", *given), None
    of_cache = ("BAhu", *(f"Bo{x}" for x in _CHANNELS.values()))
    found = on_device(*given, *(cache[name] for name in self.cached))
    out, *new = (constrain(x, one) for x, one in zip(found, ("BTAu", *of_cache), strict=True))
    return out, cache | dict(zip(self.cached, new, strict=True))

  def _gated(self, x_BTAu: Array, gate_BTAu: Array) -> Float[Array, "B T A u"]:
    """Returns the output, gated before its norm, after it, or without one."""
    wide = wide_dtype(self.dtype)
    x_BTAu, gate_BTAu = x_BTAu.astype(wide), jax.nn.silu(gate_BTAu.astype(wide))
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


class Lightning(nnx.Module):
  """Lightning attention, whose heads have fixed decays. Source: arXiv:2501.08313, section 2.2."""

  cached = ("states",)

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str):
    """Draws the projections."""
    self.dtype = spec.compute_dtype
    linear = functools.partial(Linear, spec=spec, rngs=rngs)
    self.query, self.key = linear(f"{name}/query"), linear(f"{name}/key")
    self.value, self.gate = linear(f"{name}/value"), linear(f"{name}/gate")
    self.norm = Norm(f"{name}/norm", spec, epsilon=EPSILON)
    self.out = linear(f"{name}/out", scale=spec.out_scale)
    self.adapter_dropout = spec.lora.dropout

  @staticmethod
  def dims(spec: DecoderSpec) -> dict[str, str]:
    """Returns parameter -> letters."""
    del spec
    kernels = {"(query|key)/kernel": "DGh", "(value|gate)/kernel": "DAu", "out/kernel": "AuD"}
    return {**kernels, "norm/scale": "Au"}

  flops = staticmethod(flops)

  def __call__(
    self,
    x_BRD: Float[Array, "B R D"],
    layer: Layer,
    rows: Rows,
    cache: Cache | None = None,
    key: Key[Array, ""] | None = None,
  ) -> tuple[Float[Array, "B R D"], Cache | None]:
    """Returns the residual's update, and the cache with these tokens in it; see attention."""
    keys = (None, None) if key is None else jax.random.split(key)
    dropped = functools.partial(adapter_dropout, self.adapter_dropout, slots_T=rows.slots_BT[0])
    projections = [self.query, self.key, self.value, self.gate]
    inputs = dropped(key=keys[0], letters=RESIDUAL.inside, shape=x_BRD.shape)
    projected = column_parallel(x_BRD, projections, RESIDUAL, inputs)
    names = ("query", "key", "value", "gate")
    q, k, v, gate = (named(x, name) for x, name in zip(projected, names, strict=True))
    out_BTAu, cache = self._mixed((q, k, v), self._gates(v, layer, rows), rows, cache)
    out_BTAu = named(out_BTAu, ATTENTION_OUTPUT)
    wide = wide_dtype(self.dtype)
    gated = self.norm(out_BTAu).astype(wide) * jax.nn.sigmoid(gate.astype(wide))
    gated = constrain(gated.astype(self.dtype), "BTAu")
    inputs = dropped(key=keys[1], letters="BTAu", shape=gated.shape)
    return row_parallel(gated, self.out, RESIDUAL, inputs), cache

  def _gates(self, v: Array, layer: Layer, rows: Rows) -> tuple[Array, Array]:
    """Returns logarithms of decays, from 2 ** (-8 / A) to 2 ** -8 of the layer's, and strengths."""
    wide, heads = wide_dtype(self.dtype), v.shape[2]
    slopes_A = 2.0 ** (-8.0 / heads * (jnp.arange(heads, dtype=wide) + 1))
    ones_BTA = jnp.ones(v.shape[:3], wide)
    log_decay_BTA = ones_BTA * (-layer.decay * slopes_A)[None, None]
    gates = gates_at_borders(log_decay_BTA, ones_BTA, rows)
    return constrain(gates[0], "BTA"), constrain(gates[1], "BTA")

  def _mixed(
    self, channels: tuple[Array, ...], gates: tuple[Array, Array], rows: Rows, cache: Cache | None
  ) -> tuple[Float[Array, "B T A u"], Cache | None]:
    """Returns the outputs of the recurrence, and the cache, each device its own; as of Mamba-2."""
    wide, heads = wide_dtype(self.dtype), channels[-1].shape[2]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def on_device(q, k, v, decay, strength, slots, state=None):
      q, k, v = (jax.nn.silu(x.astype(wide)) for x in (q, k, v))
      given = *(serving(x, heads, v.shape[2]) for x in (q, k)), v, decay, strength
      if state is None:
        return through_pieces(*given, Pieces.of(rows, slots), delta=False).astype(self.dtype)
      out, state = recurrence.recurrence(*given, state, delta=False)
      return out.astype(self.dtype), state

    given = [*channels, *gates, rows.slots_BT[0]]
    if cache is None:
      letters = ["BTGh", "BTGh", "BTAu", "BTA", "BTA", "T"]
      return on_shards(on_device, letters, "BTAu", *given), None
    [name] = self.cached
    out, state = on_device(*given, cache[name])
    return constrain(out, "BTAu"), cache | {name: constrain(state, "BAhu")}
