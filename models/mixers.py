"""Layers of constant state in place of attention: what they share, Gated DeltaNet, convolutions.

They have attention's interface. A document's first token begins anew, so the documents of a packed
row have no influence on one another. Where the sequence is split, a device has one piece of it, or
in the zigzag order of rings two: the last inputs of the convolution and what each piece does to the
state are all-gathered.

Names carry their dims: a head has h dims in queries and keys and u in values; of A heads, A / G
share queries and keys.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key, Shaped

from models import recurrence
from models.attention import CACHE, Cache
from models.layers import Linear, Norm, adapter_dropout, named
from models.positions import Layer, Rows
from models.spec import RESIDUAL, DecoderSpec
from partitioning.constraints import axes_splitting, constrain, current_layout, manual_axes
from partitioning.dtypes import scaled, wide_dtype
from partitioning.parallel import collectives
from partitioning.parallel.matmuls import Dropped, column_parallel, row_parallel
from partitioning.parallel.sharded_function import on_shards
from partitioning.rules import Axes
from runtime.rematerialization import ATTENTION_OUTPUT

UNIT_EPSILON = 1e-6  # added to the squared length of queries and keys
LARGEST_DECAY = 16.0  # of the factors that are drawn
STEPS = (1e-3, 0.1)  # the smallest and the largest that are drawn

# ------------------------------ pieces of rows ------------------------------


@dataclasses.dataclass(frozen=True)
class Pieces:
  """The pieces of the sequence that a device has, as further rows of the batch.

  Attributes:
    axes: that split the sequence here.
    each: pieces of a device: two of the zigzag order, one otherwise.
    numbers: of them in the text; None: there is one piece.
  """

  axes: Axes
  each: int
  numbers: Int[Array, " p"] | None

  @classmethod
  def of(cls, rows: Rows, slots_T: Int[Array, " T"]) -> "Pieces":
    """Returns those of the device, by the slots of its tokens; inside of a region."""
    axes = tuple(axis for axis in axes_splitting("T") if axis in manual_axes())
    if not axes:
      return cls((), 1, None)
    each = 2 if rows.ring else 1
    size = slots_T.shape[0] // each
    return cls(axes, each, slots_T[::size] // size)

  def split(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "Bp t ..."]:
    """Returns the pieces as rows."""
    return x.reshape(x.shape[0] * self.each, x.shape[1] // self.each, *x.shape[2:])

  def joined(self, x: Float[Array, "Bp t ..."]) -> Float[Array, "B T ..."]:
    """Returns the device's part of each row: the inverse of `split`."""
    return x.reshape(x.shape[0] // self.each, x.shape[1] * self.each, *x.shape[2:])

  def gathered(self, x: Float[Array, "Bp ..."]) -> Float[Array, "P B ..."]:
    """Returns numbers of all pieces of all devices, in the order of the text."""
    x = jnp.moveaxis(x.reshape(-1, self.each, *x.shape[1:]), 1, 0)
    x = collectives.all_gather(x, self.axes, 0)
    count = x.shape[0]
    order = [n for i in range(count // self.each) for n in (i, count - 1 - i)[: self.each]]
    return x[np.argsort(order)]

  def own(self, x: Float[Array, "P B ..."]) -> Float[Array, "Bp ..."]:
    """Returns those of the device's pieces, of `gathered`."""
    x = jnp.moveaxis(jnp.take(x, self.numbers, axis=0), 0, 1)
    return x.reshape(-1, *x.shape[2:])


def convolution(
  x: Float[Array, "B T ..."],
  taps: Float[Array, "w ..."],
  positions_BT: Int[Array, "B T"],
  pieces: Pieces,
  tail: Float[Array, "B o ..."] | None,
) -> tuple[Float[Array, "B T ..."], Float[Array, "Bp To ..."]]:
  """Returns a causal convolution of each channel within documents, and its inputs with the tail.

  Args:
    x: the channels.
    taps: of each channel; the last is the token's own.
    positions_BT: within documents.
    pieces: of the sequence.
    tail: the last inputs before these, of a cache; None: these are complete rows.
  """
  most = taps.shape[0] - 1
  x = pieces.split(x)
  if tail is None:
    tail = jnp.zeros_like(x[:, :most])
    if pieces.axes and most:
      ends = pieces.gathered(x[:, x.shape[1] - most :])
      tail = pieces.own(jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]))
  positions = pieces.split(positions_BT)
  inputs = jnp.concatenate([tail, x], axis=1)
  out = 0
  for back in range(most + 1):
    there = (positions >= back).reshape(*positions.shape, *(1,) * (x.ndim - 2)).astype(x.dtype)
    shifted = jax.lax.slice_in_dim(inputs, most - back, most - back + x.shape[1], axis=1)
    out += taps[most - back][None, None] * (shifted * there)
  return pieces.joined(out), inputs


def new_tail(inputs: Float[Array, "B To ..."], most: int, rows: Rows) -> Array:
  """Returns the last inputs of each row that are no padding, for the cache; of `convolution`."""
  if rows.counts_B is None:
    return inputs[:, inputs.shape[1] - most :]
  cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=most, axis=0)
  return jax.vmap(cut)(inputs, rows.counts_B)


def through_pieces(
  q: Array, k: Array, v: Array, log_decay: Array, strength: Array, pieces: Pieces, *, delta: bool
) -> Float[Array, "B T N U"]:
  """Returns the outputs of `recurrence.recurrence` for complete rows, whose pieces devices have."""
  q, k, v, log_decay, strength = map(pieces.split, (q, k, v, log_decay, strength))
  if pieces.axes:
    found = recurrence.summary(k, v, log_decay, strength, delta=delta)
    start = pieces.own(recurrence.first_states(*map(pieces.gathered, found), delta=delta))
  else:
    start = jnp.zeros((*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1]), v.dtype)
  return pieces.joined(recurrence.recurrence(q, k, v, log_decay, strength, start, delta=delta)[0])


def serving(x: Float[Array, "B T G h"], heads: int, own: int) -> Float[Array, "B T g h"]:
  """Returns the queries or keys of a device's heads, where `tensor` may not divide those.

  Args:
    x: of the device: all G where they are replicated.
    heads: A, of values, on all devices.
    own: of these, on this device; inside of a region.
  """
  axes = tuple(axis for axis in axes_splitting("A") if axis in manual_axes())
  groups, parts = x.shape[2], heads // own
  if not axes or current_layout()[0].legend["G"].size != groups:
    return x
  device = jax.lax.axis_index(axes)
  if parts % groups == 0:  # all of the device's are served by one
    return jax.lax.dynamic_slice_in_dim(x, device * groups // parts, 1, axis=2)
  served = (device * own + jnp.arange(own, dtype=jnp.int32)) // (heads // groups)
  return jnp.take(x, served, axis=2)


def gates_at_borders(log_decay: Array, strength: Array, rows: Rows) -> tuple[Array, Array]:
  """Returns decays that begin anew with each document; padding decays and writes nothing.

  Args:
    log_decay: logarithms, [B, T, heads], or of each row [B, T, heads, h], at most 0.
    strength: of what is written, [B, T, heads].
    rows: of the tokens.
  """

  def of_heads(mask_BT: Array, x: Array) -> Array:
    return mask_BT.reshape(*mask_BT.shape, *(1,) * (x.ndim - 2))

  begins = of_heads(rows.positions_BT == 0, log_decay)
  log_decay = jnp.where(begins, jnp.full_like(log_decay, -jnp.inf), log_decay)
  if rows.counts_B is None:
    return log_decay, strength
  slots_T = jnp.arange(strength.shape[1], dtype=jnp.int32)
  there = slots_T[None] < rows.counts_B[:, None]
  return tuple(jnp.where(of_heads(there, x), x, jnp.zeros_like(x)) for x in (log_decay, strength))


def facts(rows: Rows, batch: int, length: int) -> tuple[Array, Array]:
  """Returns positions [B, T] and slots [T] of rows; the slots are read of complete rows alone."""
  return jnp.broadcast_to(rows.positions_BT, (batch, length)), rows.slots_BT[0]


# ------------------------------ what mixers share ------------------------------


class Mixer(nnx.Module):
  """Projections of the layer's input, what mixes tokens, a gate, and the projection out."""

  projections: tuple[str, ...]  # names of the linear layers of the input
  cached: tuple[str, ...]  # names of the arrays of its cache
  named_as = ("query", "key", "value", "gate")  # of the first projections, to rematerialize
  letters = "BTAu"  # of what is projected out

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str):
    """Draws the projections of the input."""
    self.dtype, self.adapter_dropout = spec.compute_dtype, spec.lora.dropout
    for one in self.projections:
      setattr(self, one, Linear(f"{name}/{one}", spec, rngs=rngs))

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
    inputs = dropped(key=keys[0], letters=RESIDUAL.inside, shape=x_BRD.shape)
    projected = self._projected(x_BRD, inputs)
    count = len(self.named_as)
    given = [named(x, one) for x, one in zip(projected[:count], self.named_as, strict=True)]
    out, cache = self._mixed(given, projected[count:], layer, rows, cache)
    gated = self._gated(named(out, ATTENTION_OUTPUT), given).astype(self.dtype)
    gated = constrain(gated, self.letters)
    inputs = dropped(key=keys[1], letters=self.letters, shape=gated.shape)
    return row_parallel(gated, self.out, RESIDUAL, inputs), cache

  def _projected(self, x_BRD: Float[Array, "B R D"], inputs: Dropped | None) -> list[Array]:
    """Returns the projections of the layer's input, those of `named_as` first."""
    linear = [getattr(self, one) for one in self.projections]
    return column_parallel(x_BRD, linear, RESIDUAL, inputs)


class Recurrent(Mixer):
  """A state that keys and values write, and queries read, token after token."""

  delta = False  # whether what a key reads is replaced
  constants: tuple[str, ...] = ()  # parameters that a device's part of `_mixed` reads

  def _gates(self, others: list[Array], v: Array, layer: Layer, rows: Rows) -> tuple[Array, Array]:
    """Returns logarithms of decays and strengths, of `others` than the named projections."""
    raise NotImplementedError

  def _mixed(
    self,
    given: list[Array],
    others: list[Array],
    layer: Layer,
    rows: Rows,
    cache: Cache | None,
  ) -> tuple[Float[Array, "B T A u"], Cache | None]:
    """Returns the outputs of convolutions and recurrence, and the cache, each device its own."""
    wide, (q, k, v, _) = wide_dtype(self.dtype), given
    gates, heads = self._gates(others, v, layer, rows), v.shape[2]
    letters = [_CONSTANTS[name] for name in self.constants]
    params = [getattr(self, name)[...].astype(wide) for name in self.constants]
    params = [constrain(x, one) for x, one in zip(params, letters, strict=True)]
    count = len(params)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def on_device(q, k, v, decay, strength, *given):
      own = dict(zip(self.constants, given[:count], strict=True))
      positions, slots, *cached = given[count:]
      pieces, state = Pieces.of(rows, slots), cached[0] if cached else None
      tails, convolved, kept = [*cached[1:]] or [None] * 3, [], []
      for name, x, tail in zip(_CHANNELS, (q, k, v), tails, strict=True):
        x = x.astype(wide)
        if f"{name}_taps" in own:
          tail = None if tail is None else tail.astype(wide)
          x, inputs = convolution(x, own[f"{name}_taps"], positions, pieces, tail)
          kept.append(inputs)
        if f"{name}_taps_bias" in own:
          x = x + own[f"{name}_taps_bias"][None, None]
        convolved.append(jax.nn.silu(x))
      q, k = (serving(x, heads, v.shape[2]) for x in convolved[:2])
      v = convolved[2]
      if self.delta:
        q, k = map(of_unit_length, (q, k))
        q = q * jnp.asarray(q.shape[-1] ** -0.5, wide)
      if state is None:
        out = through_pieces(q, k, v, decay, strength, pieces, delta=self.delta)
      else:
        out, state = recurrence.recurrence(q, k, v, decay, strength, state, delta=self.delta)
      if "skip" in own:
        out = out + own["skip"][None, None, :, None] * v
      out = out.astype(self.dtype)
      if state is None:
        return out
      taps = [x for name, x in own.items() if name.endswith("_taps")]
      pairs = zip(kept, taps, strict=True)
      return out, state, *(new_tail(x, len(w) - 1, rows).astype(self.dtype) for x, w in pairs)

    decays = "BTA" if gates[0].ndim == 3 else "BTAh"
    letters = [*(f"BT{x}" for x in _CHANNELS.values()), decays, "BTA", *letters, "BT", "T"]
    arrays = [q, k, v, *gates, *params, *facts(rows, *v.shape[:2])]
    if cache is None:
      return on_shards(on_device, letters, "BTAu", *arrays), None
    found = on_device(*arrays, *(cache[name] for name in self.cached))
    of_cache = [CACHE[name][1:] for name in self.cached]
    out, *new = (constrain(x, one) for x, one in zip(found, ("BTAu", *of_cache), strict=True))
    return out, cache | dict(zip(self.cached, new, strict=True))


_CHANNELS = {"query": "Gh", "key": "Gh", "value": "Au"}  # what a convolution is of -> its letters
_CONSTANTS = {f"{one}_taps": f"w{letters}" for one, letters in _CHANNELS.items()}
_CONSTANTS |= {f"{one}_taps_bias": letters for one, letters in _CHANNELS.items()}
_CONSTANTS["skip"] = "A"
TAPS = tuple(f"{one}_taps" for one in _CHANNELS)
TAILS = tuple(f"{one}_tails" for one in _CHANNELS)

# ------------------------------ Gated DeltaNet ------------------------------


class GatedDeltaNet(Recurrent):
  """Gated DeltaNet. Source: arXiv:2412.06464; as in Qwen3-Next."""

  projections = "query", "key", "value", "gate", "decay", "strength"
  cached = ("states", *TAILS)
  delta, constants = True, TAPS
  decays = "A"  # letters of a token's decays: of heads, or of each of their rows
  gate_activation = staticmethod(jax.nn.silu)

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str):
    """Draws the projections, convolutions and decays."""
    super().__init__(spec, rngs=rngs, name=name)
    for one, letters in _CHANNELS.items():
      setattr(self, f"{one}_taps", draw_taps(spec, f"w{letters}", rngs))
    self.log_factor, self.step_bias = draw_decays(spec, rngs, steps=self.decays)
    plain = dataclasses.replace(spec, norm_scale_from_one=False)
    self.norm = Norm(f"{name}/norm", plain, epsilon=spec.mixer_norm_epsilon or None)
    self.most = 2 if spec.mixer_negative_eigenvalues else 1
    self.out = Linear(f"{name}/out", spec, rngs=rngs, scale=spec.out_scale)

  @staticmethod
  def dims(spec: DecoderSpec) -> dict[str, str]:
    """Returns parameter -> letters."""
    del spec
    return {
      "(query|key)/kernel": "DGh",
      "(value|gate)/kernel": "DAu",
      "(decay|strength)/kernel": "DA",
      "(query_taps|key_taps)": "wGh",
      "value_taps": "wAu",
      "(log_factor|step_bias)": "A",
      "norm/scale": "u",
      "out/kernel": "AuD",
    }

  @staticmethod
  def flops(spec: DecoderSpec) -> int:
    """Returns operations per token of the recurrence: a key and a query read, a key writes."""
    return 6 * spec.mixer_heads * spec.mixer_head_size * spec.mixer_value_head_size

  def _gated(self, out_BTAu: Array, given: list[Array]) -> Float[Array, "B T A u"]:
    wide = wide_dtype(self.dtype)
    return self.norm(out_BTAu).astype(wide) * self.gate_activation(given[-1].astype(wide))

  def _gates(self, others: list[Array], v: Array, layer: Layer, rows: Rows) -> tuple[Array, Array]:
    """Returns logarithms of decays, and strengths; padding decays and writes nothing."""
    del v, layer
    wide, (decay, strength_BTA) = wide_dtype(self.dtype), others
    bias = constrain(self.step_bias[...].astype(wide), self.decays)[None, None]
    factor = constrain(self.log_factor[...].astype(wide), "A")[None, None]
    factor = factor.reshape(*factor.shape, *(1,) * (bias.ndim - factor.ndim))
    log_decay = -jnp.exp(factor) * jax.nn.softplus(decay.astype(wide) + bias)
    strength_BTA = scaled(jax.nn.sigmoid(strength_BTA.astype(wide)), self.most)
    return gates_at_borders(log_decay, strength_BTA, rows)


def draw_decays(
  spec: DecoderSpec, rngs: nnx.Rngs, least: float = 0.0, steps: str = "A"
) -> tuple[nnx.Param, nnx.Param]:
  """Draws logarithms of the heads' decays, from `least` on, and the biases of their steps."""
  dtype = spec.parameter_dtype
  uniform = functools.partial(jax.random.uniform, dtype=dtype)
  least = max(least, jnp.finfo(dtype).tiny)
  factor_A = uniform(rngs.params(), spec.sizes("A"), minval=least, maxval=LARGEST_DECAY)
  first, last = (jnp.log(jnp.asarray(x, dtype)) for x in STEPS)
  step = jnp.exp(uniform(rngs.params(), spec.sizes(steps), minval=first, maxval=last))
  inverse = step + jnp.log(-jnp.expm1(-step))  # of softplus
  return nnx.Param(jnp.log(factor_A)), nnx.Param(inverse)


def draw_taps(spec: DecoderSpec, letters: str, rngs: nnx.Rngs) -> nnx.Param:
  """Draws a convolution's taps uniformly within fan_in ** -0.5, as PyTorch does."""
  bound = jnp.asarray(spec.convolution_size**-0.5, spec.parameter_dtype)
  shape = spec.sizes(letters)
  drawn = jax.random.uniform(rngs.params(), shape, spec.parameter_dtype, -1, 1)
  return nnx.Param(drawn * bound)


def of_unit_length(x: Float[Array, "*X H"]) -> Float[Array, "*X H"]:
  """Returns x over its length along the last dim."""
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT_EPSILON)


# ------------------------------ short convolutions ------------------------------


class ShortConvolution(Mixer):
  """out(output_gate(x) * convolution(input_gate(x) * channels(x))). Source: LFM2, 2511.23404."""

  projections = "input_gate", "output_gate", "channels"
  cached = ("channel_tails",)
  named_as, letters = ("query", "gate", "value"), "BTX"

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str):
    """Draws the projections and the convolution."""
    super().__init__(spec, rngs=rngs, name=name)
    self.taps = draw_taps(spec, "wX", rngs)
    self.out = Linear(f"{name}/out", spec, rngs=rngs, scale=spec.out_scale)

  @staticmethod
  def dims(spec: DecoderSpec) -> dict[str, str]:
    """Returns parameter -> letters."""
    del spec
    return {"(input_gate|output_gate|channels)/kernel": "DX", "taps": "wX", "out/kernel": "XD"}

  @staticmethod
  def flops(spec: DecoderSpec) -> int:
    """Returns operations per token of the convolution and its gates."""
    return (2 * spec.convolution_size + 2) * spec.model_size

  def _gated(self, out_BTX: Float[Array, "B T X"], given: list[Array]) -> Float[Array, "B T X"]:
    del given  # gated where the convolution is computed
    return out_BTX

  def _mixed(
    self,
    given: list[Array],
    others: list[Array],
    layer: Layer,
    rows: Rows,
    cache: Cache | None,
  ) -> tuple[Float[Array, "B T X"], Cache | None]:
    """Returns the gated outputs of the convolution, and the cache, each device its own."""
    del others, layer
    wide = wide_dtype(self.dtype)
    taps_wX = constrain(self.taps[...].astype(wide), "wX")
    most = taps_wX.shape[0] - 1

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def on_device(before, after, v, taps, positions, slots, tail=None):
      tail = None if tail is None else tail.astype(wide)
      before, after, v = (x.astype(wide) for x in (before, after, v))
      out, inputs = convolution(before * v, taps, positions, Pieces.of(rows, slots), tail)
      out = (after * out).astype(self.dtype)
      return out if tail is None else (out, new_tail(inputs, most, rows).astype(self.dtype))

    arrays = [*given, taps_wX, *facts(rows, *given[0].shape[:2])]
    if cache is None:
      letters = ["BTX", "BTX", "BTX", "wX", "BT", "T"]
      return on_shards(on_device, letters, "BTX", *arrays), None
    [name] = self.cached
    out_BTX, tail = on_device(*arrays, cache[name])
    return constrain(out_BTX, "BTX"), cache | {name: constrain(tail, "BoX")}
