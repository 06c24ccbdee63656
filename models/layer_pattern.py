"""The layer pattern: windows, rotary bases and scales that differ between a decoder's layers.

As arrays, so that one block serves all layers and a scan over the layers can take them as input.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.rope import attention_factor, rope_table, rotary_frequencies
from models.spec import DecoderSpec
from partitioning.dtypes import wide_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
  """The numbers of one layer, or (with L first) of all.

  Attributes:
    window: int32, the slots that a token attends to, its own the last; None: its full past.
    kind: int32, the place of that window among `LayerPattern.kinds`; None: there is one.
    rotary: int32, which of the rows' rope tables it uses; None: all layers use the same.
    scale: a factor of the scores; None: 1.
  """

  window: Int[Array, "*L"] | None
  kind: Int[Array, "*L"] | None
  rotary: Int[Array, "*L"] | None
  scale: Float[Array, "*L"] | None

  def scaled(self, q_BTNH: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Returns the queries, times the layer's factor of the scores."""
    if self.scale is None:
      return q_BTNH
    return (q_BTNH.astype(self.scale.dtype) * self.scale).astype(q_BTNH.dtype)


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
    dtype: of the frequencies and scales.
  """

  windows: tuple[int | None, ...]
  rotaries: tuple[tuple[float, tuple] | None, ...]
  rotary_size: int
  row_length: int
  scales: tuple[float, ...]
  dtype: jnp.dtype

  @property
  def kinds(self) -> tuple[int | None, ...]:
    """The distinct windows of the layers; None: the full past."""
    return tuple(dict.fromkeys(self.windows)) or (None,)

  def stacked(self) -> Layer:
    """Returns the layers' numbers, stacked along L, as inputs of a scan over the layers."""
    window = kind = rotary = scale = None
    if self.windows:
      beyond = jnp.iinfo(jnp.int32).max  # longer than any text
      window = jnp.asarray([beyond if w is None else w for w in self.windows], jnp.int32)
    if len(self.kinds) > 1:
      kind = jnp.asarray([self.kinds.index(w) for w in self.windows], jnp.int32)
    if len(variants := self._rope_variants()) > 1:
      rotary = jnp.asarray([variants.index(one) for one in self.rotaries], jnp.int32)
    if self.scales:
      scale = jnp.asarray(self.scales, self.dtype)
    return Layer(window, kind, rotary, scale)

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


def layer_type(spec: DecoderSpec, layer: int) -> str:
  """Returns the type of a layer, counted from 0: an entry of model_checks.LAYER_TYPES."""
  if spec.layer_types:
    return spec.layer_types[layer % len(spec.layer_types)]
  last_of_some = spec.global_every > 0 and (layer + 1) % spec.global_every == 0
  return "full" if not spec.window or last_of_some else "sliding"


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
  return LayerPattern(
    windows=tuple(None if one.startswith("full") else spec.window for one in types)
    if spec.window
    else (),
    rotaries=tuple(kinds[one] for one in types) if spec.positions == "rotary" else (),
    rotary_size=spec.rotary_size or spec.head_size,
    row_length=spec.sequence_length,
    scales=tuple(1 / (layer + 1) for layer in range(spec.layers))
    if spec.attention_scale_by_inverse_layer
    else (),
    dtype=wide_dtype(spec.compute_dtype),
  )
