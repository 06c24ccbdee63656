"""What differs between the layers of a decoder: windows and rotary bases, as numbers."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from models.dtypes import wide_dtype
from models.rope import rotary_frequencies, turns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer, or (with L first) all.

  Attributes:
    window: int32, how many slots a token sees, its own the last of them; None: all of its past.
    rotary: int32, which of the rows' turns is its own; None: all layers have the same.
  """

  window: Int[Array, "*L"] | None
  rotary: Int[Array, "*L"] | None


@dataclasses.dataclass(frozen=True)
class Layers:
  """What the layers are, before there are arrays; hashable, so that a module can hold it.

  Attributes:
    windows: of each layer, None for all of the past; () where none has one.
    rotaries: of each layer (base, scaling), see `rotary_frequencies`; () where nothing turns.
    head_size: H.
    dtype: of the frequencies.
  """

  windows: tuple[int | None, ...]
  rotaries: tuple[tuple[float, tuple[float, ...]], ...]
  head_size: int
  dtype: jnp.dtype

  def stacked(self) -> Layer:
    """Returns what a scan over the layers goes over."""
    window = rotary = None
    if self.windows:
      beyond = jnp.iinfo(jnp.int32).max  # longer than any text
      window = jnp.asarray([beyond if w is None else w for w in self.windows], jnp.int32)
    if len(ways := self._ways()) > 1:
      rotary = jnp.asarray([ways.index(one) for one in self.rotaries], jnp.int32)
    return Layer(window, rotary)

  def turns(self, positions_BT: Int[Array, "#B T"]) -> Float[Array, "X 2 #B T h"] | None:
    """Returns `Rows.turns_X2BTh` for tokens at these positions."""
    frequencies = [
      rotary_frequencies(self.head_size, *way, dtype=self.dtype) for way in self._ways()
    ]
    return jnp.stack([turns(positions_BT, one) for one in frequencies]) if frequencies else None

  def _ways(self) -> list[tuple[float, tuple[float, ...]]]:
    return list(dict.fromkeys(self.rotaries))


def is_global(config: ConfigDict, layer: int) -> bool:
  """Tells whether a layer, counted from 0, sees all of its past."""
  model = config.model
  return not model.window or (model.global_every > 0 and (layer + 1) % model.global_every == 0)


def layers(config: ConfigDict) -> Layers:
  """Returns what the layers of a finalized config are."""
  model = config.model
  whole = [is_global(config, layer) for layer in range(model.layers)]
  every = (model.rotary_base, tuple(model.rotary_scaling))
  local = (model.local_rotary_base, ()) if model.local_rotary_base else every
  return Layers(
    windows=tuple(None if one else model.window for one in whole) if model.window else (),
    rotaries=tuple(every if one else local for one in whole) if model.positions == "rotary" else (),
    head_size=model.head_size,
    dtype=wide_dtype(jnp.dtype(config.training.compute_dtype)),
  )
