"""Where tokens are: rotary embeddings, what differs between layers, slots and positions of rows.

Rotary position embeddings are those of arXiv:2104.09864. Scaled variants let rows be longer than
those of pretraining. `model.rotary_scaling` names one with its numbers: `("yarn", {"factor": 4.0,
"original_length": 32768})`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models.losses import Batch
from models.spec import STORED_TEACHER, DecoderSpec
from partitioning.constraints import constrain
from partitioning.dtypes import wide_dtype
from partitioning.parallel.split_sequence import RING, devices_along
from runtime.layer_kinds import MIXER, MLP, WITH_MIXER, layer_type


def rotary_frequencies(
  size: int,
  base: float,
  scaling: tuple = (),
  *,
  dtype: jnp.dtype,
  length: int = 0,
) -> Float[Array, " h"]:
  """Returns the angle between one position and the next of each of the pairs, in radians.

  Args:
    size: dims of a head that are rotated, twice the number of pairs.
    base: of the geometric series.
    scaling: a spec's `rotary_scaling`. Four numbers are Llama 3's (factor, low, high, length):
      frequencies of less than `low` rotations in `length` positions are divided by `factor`, those
      of more than `high` are unchanged, those in between are interpolated. Source:
      `rope_type: llama3` in Llama 3.1's configuration. () changes none.
    dtype: of the result, float32 or wider.
    length: tokens of a row of training; some kinds have other frequencies for longer rows.
  """
  if scaling and isinstance(scaling[0], str):
    kind, numbers = scaling[0], dict(scaling[1])
    if kind != "llama3":
      return jnp.asarray(_FREQUENCIES[kind](size, base, numbers, length), dtype)
    scaling = tuple(numbers[name] for name in ("factor", "low", "high", "original_length"))
  half = size // 2
  frequency_h = jnp.asarray(base, dtype) ** (-jnp.arange(half, dtype=dtype) / half)
  if not scaling:
    return frequency_h
  factor, low, high, original = (jnp.asarray(value, dtype) for value in scaling)
  turns_h = original * frequency_h / jnp.asarray(2 * math.pi, dtype)
  share_h = jnp.clip((turns_h - low) / (high - low), 0, 1)
  return frequency_h * (share_h + (1 - share_h) / factor)


def _plain(size: int, base: float) -> np.ndarray:
  return base ** (-np.arange(0, size, 2, dtype=np.float64) / size)


def _linear(size: int, base: float, numbers: Mapping[str, Any], length: int) -> np.ndarray:
  """Position interpolation: as if all positions were divided. Source: arXiv:2306.15595."""
  del length
  return _plain(size, base) / numbers["factor"]


def _dynamic(size: int, base: float, numbers: Mapping[str, Any], length: int) -> np.ndarray:
  """NTK-aware scaling by the length of the row; rows up to the original length are unchanged.

  Source: `rope_type: dynamic` of the transformers library; arXiv:2309.00071, section 3.1.
  """
  factor, original = numbers["factor"], numbers["original_length"]
  stretch = factor * max(length, original) / original - (factor - 1)
  return _plain(size, base * stretch ** (size / (size - 2)))


def _yarn(size: int, base: float, numbers: Mapping[str, Any], length: int) -> np.ndarray:
  """Interpolates the slow frequencies and leaves the fast ones. Source: arXiv:2309.00071."""
  del length

  def pair(rotations: float) -> float:
    """Returns the pair, counted as a real number, that rotates so often in the original length."""
    turns = numbers["original_length"] / (rotations * 2 * math.pi)
    return size * math.log(turns) / (2 * math.log(base))

  first, last = pair(numbers.get("beta_fast", 32.0)), pair(numbers.get("beta_slow", 1.0))
  if numbers.get("truncate", True):
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, size - 1)
  last += 0.001 if first == last else 0
  slow_h = np.clip((np.arange(size // 2) - first) / (last - first), 0, 1)
  frequency_h = _plain(size, base)
  return frequency_h * (1 - slow_h) + frequency_h / numbers["factor"] * slow_h


def _longrope(size: int, base: float, numbers: Mapping[str, Any], length: int) -> np.ndarray:
  """Divides each frequency by a number of its own, searched for. Source: arXiv:2402.13753."""
  name = "long_factors" if length > numbers["original_length"] else "short_factors"
  return _plain(size, base) / np.asarray(numbers[name], np.float64)


_FREQUENCIES = {"linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope}


def attention_factor(scaling: tuple) -> float:
  """Returns the factor of cosine and sine, so its square is a factor of the scores.

  The number of that name, or its default: 0.1 ln(factor) + 1 of YaRN (arXiv:2309.00071, equation
  22), the square root of 1 + ln(factor) / ln(original_length) of LongRoPE (arXiv:2402.13753).

  Args:
    scaling: a spec's `rotary_scaling`.
  """
  if not scaling or scaling[0] not in ("yarn", "longrope"):
    return 1.0
  numbers = dict(scaling[1])
  if given := numbers.get("attention_factor"):
    return given
  if (factor := numbers["factor"]) <= 1:
    return 1.0
  if scaling[0] == "yarn":
    return 0.1 * math.log(factor) + 1
  return math.sqrt(1 + math.log(factor) / math.log(numbers["original_length"]))


def rope_table(
  positions_BT: Int[Array, "#B T"], frequency_h: Float[Array, " h"], factor: float = 1.0
) -> Float[Array, "2 #B T h"]:
  """Returns cosine and sine of each pair's angle at each position, times a factor."""
  angle_BTh = positions_BT.astype(frequency_h.dtype)[:, :, None] * frequency_h[None, None]
  table_2BTh = jnp.stack([jnp.cos(angle_BTh), jnp.sin(angle_BTh)])
  return table_2BTh if factor == 1.0 else table_2BTh * jnp.asarray(factor, table_2BTh.dtype)


def apply_rope(
  x_BTNH: Float[Array, "B T N H"], table_2BTh: Float[Array, "2 #B T h"], *, adjacent: bool = False
) -> Float[Array, "B T N H"]:
  """Rotates each pair of dims by its position's angle, in float32 or wider.

  Dims from 2 h on are not rotated (GPT-NeoX's partial rotary positions).

  Args:
    x_BTNH: queries or keys.
    table_2BTh: of `rope_table`.
    adjacent: the pairs are (2 i, 2 i + 1), as in arXiv:2104.09864; else (i, i + h), as GPT-NeoX has
      them.
  """
  wide = wide_dtype(x_BTNH.dtype)
  half = table_2BTh.shape[-1]
  cos, sin = table_2BTh.astype(wide)[:, :, :, None]
  parts = (
    (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    if adjacent
    else (slice(0, half), slice(half, 2 * half))
  )
  first, second = (x_BTNH[..., part].astype(wide) for part in parts)
  turned = first * cos - second * sin, second * cos + first * sin
  if adjacent:
    rotated = jnp.stack(turned, axis=-1).reshape(*x_BTNH.shape[:-1], 2 * half)
  else:
    rotated = jnp.concatenate(turned, axis=-1)
  rotated = rotated.astype(x_BTNH.dtype)
  if x_BTNH.shape[-1] == 2 * half:
    return rotated
  return jnp.concatenate([rotated, x_BTNH[..., 2 * half :]], axis=-1)


# ------------------------------ what differs between layers ------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
  """The numbers of one layer, or (with L first) of all.

  Attributes:
    window: int32, the slots that a token attends to, its own the last; None: its full past.
    kind: int32, the place of that window among `LayerPattern.kinds`; None: there is one.
    rotary: int32, which of the rows' rope tables it uses; None: all layers use the same.
    scale: a factor of the scores; None: 1.
    decay: a factor of lightning attention's decays; None: there is none.
    strength: by which scores grow with the query's position, see `Rows.steps_BT`; None: by none.
    rotated: whether it rotates queries and keys; None: all layers do, or none.
  """

  window: Int[Array, "*L"] | None = None
  kind: Int[Array, "*L"] | None = None
  rotary: Int[Array, "*L"] | None = None
  scale: Float[Array, "*L"] | None = None
  decay: Float[Array, "*L"] | None = None
  strength: Float[Array, "*L"] | None = None
  rotated: Bool[Array, "*L"] | None = None

  def scaled(self, q_BTNH: Float[Array, "B T N H"], rows: "Rows") -> Float[Array, "B T N H"]:
    """Returns the queries, times the layer's factors of the scores."""
    factors = [] if self.scale is None else [self.scale]
    if self.strength is not None:
      factors.append((1 + self.strength * rows.steps_BT)[:, :, None, None])
    for factor in factors:
      q_BTNH = (q_BTNH.astype(factor.dtype) * factor).astype(q_BTNH.dtype)
    return q_BTNH


@dataclasses.dataclass(frozen=True)
class LayerPattern:
  """What differs between layers, as Python numbers: hashable, so that a module can store it.

  Attributes:
    windows: of each layer, None for all of the past; () where none has one.
    rotaries: of each layer (base, scaling), see `rotary_frequencies`, or None where it does not
      rotate; () without rotary positions.
    rotary_size: dims of a head that are rotated.
    row_length: tokens of a row in training, on which some kinds of scaling depend.
    scales: of each layer, a factor of its scores; () where all are 1.
    decays: of each layer, of `lightning_decays`; () of other mixers.
    temperature: (layers, strength, length), see `model.attention_temperature`; () where there is
      none.
    dtype: of the frequencies, scales and decays.
  """

  windows: tuple[int | None, ...]
  rotaries: tuple[tuple[float, tuple] | None, ...]
  rotary_size: int
  row_length: int
  scales: tuple[float, ...]
  decays: tuple[float, ...]
  temperature: tuple
  dtype: jnp.dtype

  @property
  def kinds(self) -> tuple[int | None, ...]:
    """The distinct windows of the layers; None: the full past."""
    return tuple(dict.fromkeys(self.windows)) or (None,)

  def stacked(self) -> Layer:
    """Returns the layers' numbers, stacked along L, as inputs of a scan over the layers."""
    window = kind = rotary = scale = strength = rotated = None
    if self.windows:
      beyond = jnp.iinfo(jnp.int32).max  # longer than any text
      window = jnp.asarray([beyond if w is None else w for w in self.windows], jnp.int32)
    if len(self.kinds) > 1:
      kind = jnp.asarray([self.kinds.index(w) for w in self.windows], jnp.int32)
    if len(variants := self._rope_variants()) > 1:
      rotary = jnp.asarray([variants.index(one) for one in self.rotaries], jnp.int32)
    if self.scales:
      scale = jnp.asarray(self.scales, self.dtype)
    decay = jnp.asarray(self.decays, self.dtype) if self.decays else None
    unrotated = [one is None for one in self.rotaries]
    if any(unrotated):
      rotated = jnp.logical_not(jnp.asarray(unrotated))
    if self.temperature:
      layers, every, _ = self.temperature
      of_layers = [every if layers == "all" or one else 0.0 for one in unrotated]
      strength = jnp.asarray(of_layers, self.dtype)
    return Layer(window, kind, rotary, scale, decay, strength, rotated)

  def temperature_steps(self, positions_BT: Int[Array, "#B T"]) -> Float[Array, "#B T"] | None:
    """Returns ln(1 + floor(position / length)) of each token; None without a temperature."""
    if not self.temperature:
      return None
    layers, _, length = self.temperature
    position_BT = positions_BT + (0 if layers == "all" else 1)  # Llama 4 counts them from 1
    return jnp.log1p((position_BT // length).astype(self.dtype))

  def rope_tables(self, positions_BT: Int[Array, "#B T"]) -> Float[Array, "X 2 #B T h"] | None:
    """Returns a rope table for each variant among the layers; None without rotary positions.

    A short text, and a cache of any size, has the frequencies of a row of training.

    Args:
      positions_BT: within the documents.
    """
    tables = []
    for variant in self._rope_variants():
      if variant is None:  # rotates by angles of zero
        tables.append(rope_table(positions_BT, jnp.zeros((self.rotary_size // 2,), self.dtype)))
        continue
      base, scaling = variant
      frequency_h = rotary_frequencies(
        self.rotary_size, base, scaling, dtype=self.dtype, length=self.row_length
      )
      tables.append(rope_table(positions_BT, frequency_h, attention_factor(scaling)))
    return jnp.stack(tables) if tables else None

  def _rope_variants(self) -> list[tuple[float, tuple] | None]:
    return list(dict.fromkeys(self.rotaries))


def is_global(spec: DecoderSpec, layer: int) -> bool:
  """Returns whether a layer, counted from 0, has global attention (no sliding window)."""
  return layer_type(spec, layer).startswith("full")


def layer_pattern(spec: DecoderSpec) -> LayerPattern:
  """Returns the layer pattern of a decoder."""
  types = [layer_type(spec, layer) for layer in range(spec.layers)]
  every = (spec.rotary_base, spec.rotary_scaling)
  local = (spec.local_rotary_base, spec.local_rotary_scaling)
  local = local if spec.local_rotary_base else every
  kinds = {"full": every, "sliding": local, "full_unrotated": None, "sliding_unrotated": None}
  kinds[WITH_MIXER] = every
  # Mixers and MLPs read none: no table of their own.
  others = (MIXER, MLP)
  kinds |= dict.fromkeys(others, next((kinds[one] for one in types if one not in others), None))
  rotaries = tuple(kinds[one] for one in types) if spec.positions == "rotary" else ()
  return LayerPattern(
    windows=tuple(spec.window if one.startswith("sliding") else None for one in types)
    if spec.window
    else (),
    rotaries=rotaries if any(rotaries) else (),
    rotary_size=spec.rotary_size or spec.head_size,
    row_length=spec.sequence_length,
    scales=tuple(1 / (layer + 1) for layer in range(spec.layers))
    if spec.attention_scale_by_inverse_layer
    else (),
    decays=tuple(lightning_decays(spec.layers)) if spec.mixer == "lightning" else (),
    temperature=tuple(spec.attention_temperature),
    dtype=wide_dtype(spec.compute_dtype),
  )


def lightning_decays(layers: int) -> list[float]:
  """Returns of each layer the factor of its decays in lightning attention: later ones forget less.

  Source: MiniMax-01, arXiv:2501.08313, as transformers has it.
  """
  return [1 - layer / (layers - 1 + 1e-5) + 1e-5 for layer in range(layers)]


# ------------------------------ rows of tokens ------------------------------

POSITIONS = "positions"  # of a batch that `in_order` has returned


def positions(segments_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Returns each token's position within its segment, from 0.

  Args:
    segments_BT: the document of each token; equal numbers are adjacent.
  """
  slots_BT = jax.lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
  before_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)))
  starts_BT = jnp.where(segments_BT != before_BT, slots_BT, jnp.zeros_like(slots_BT))
  return slots_BT - jax.lax.cummax(starts_BT, axis=1)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=(
    *("slots_BT", "positions_BT", "rope_X2BTh", "segments_BT", "weights_BT", "counts_B"),
    "steps_BT",
  ),
  meta_fields=("way",),
)
@dataclasses.dataclass(frozen=True)
class Rows:
  """Slots, positions and documents of the tokens that the model is given.

  Attributes:
    slots_BT: int32, within their rows.
    positions_BT: int32, within their documents.
    rope_X2BTh: the rope table of each variant among the layers; computed once, before the scan
      over the layers. None: no rotary positions.
    segments_BT: the documents, for intra-document attention masking; None: a row is one.
    way: how attention runs where the sequence is split, of `split_sequence.fastest_way`; "": it is
      not, or keys and values are a cache's.
    weights_BT: of the tokens in the loss, in their order; None: there is no loss.
    counts_B: int32, of tokens that follow those in a cache: how many are not padding; None: all.
    steps_BT: by which, times its strength, a layer's temperature grows; None: it has none.
  """

  slots_BT: Int[Array, "#B T"]
  positions_BT: Int[Array, "#B T"]
  rope_X2BTh: Float[Array, "X 2 #B T h"] | None
  segments_BT: Int[Array, "B T"] | None = None
  way: str = ""
  weights_BT: Float[Array, "B T"] | None = None
  counts_B: Int[Array, " B"] | None = None
  steps_BT: Float[Array, "#B T"] | None = None

  @property
  def ring(self) -> bool:
    """Whether the tokens are in the zigzag order of `partitioning.parallel.ring_attention`."""
    return self.way == RING

  def rope(self, layer: Layer) -> Float[Array, "2 #B T h"] | None:
    """Returns a layer's rope table; None without rotary positions."""
    if self.rope_X2BTh is None:
      return None
    return self.rope_X2BTh[0 if layer.rotary is None else layer.rotary]

  def chunks(self, layer: Layer) -> Int[Array, "#B T"]:
    """Returns the slot of the first token in each token's chunk of its document."""
    return self.slots_BT - self.positions_BT % layer.window


def _order(length: int, way: str) -> np.ndarray | None:
  """Returns the order of a row's tokens, int32 [length]; None: that of the text."""
  if way != RING:
    return None
  from partitioning.parallel import ring_attention  # where the sequence is split

  return ring_attention.zigzag_order(length, devices_along("T"))


def in_order(batch: Batch, way: str, *, documents: bool) -> Batch:
  """Returns a batch in the order that layers have tokens in; of documents with their positions.

  Args:
    batch: arrays [B, T] in the order of the text.
    way: see `Rows`.
    documents: whether `segments` tells documents apart, in each of which positions begin at 0, and
      to which attention is masked; else a row is one document.
  """
  if documents:
    batch = {**batch, POSITIONS: constrain(positions(batch["segments"]), "BT")}
  if (order_T := _order(batch["tokens"].shape[1], way)) is None:
    return batch
  from partitioning.parallel import ring_attention

  letters = {name: STORED_TEACHER.get(name, ("BT",))[0] for name in batch}
  return {name: ring_attention.in_order(x, order_T, letters[name]) for name, x in batch.items()}


def rows_of(batch: Batch, way: str, pattern: LayerPattern) -> Rows:
  """Returns slots, positions and documents of complete rows.

  Args:
    batch: that `in_order` has returned.
    way: see `Rows`.
    pattern: what differs between the layers.
  """
  length, segments_BT = batch["tokens"].shape[1], None
  order_T = _order(length, way)
  slots_T = jnp.arange(length, dtype=jnp.int32) if order_T is None else jnp.asarray(order_T)
  slots_BT = positions_BT = slots_T[None, :]
  if POSITIONS in batch:
    segments_BT, positions_BT = (constrain(batch[x], "BT") for x in ("segments", POSITIONS))
  tables, steps_BT = pattern.rope_tables(positions_BT), pattern.temperature_steps(positions_BT)
  return Rows(slots_BT, positions_BT, tables, segments_BT, way, steps_BT=steps_BT)
