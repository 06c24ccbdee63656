"""What attention is told besides its input: of the layer, and of the rows.

In what layers differ is numbers: a scan goes over them with the parameters.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from models import documents
from models.attention import rotary_frequencies, turns
from models.dtypes import wide_dtype
from partitioning.constraints import constrain


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
class Rows:
  """Where the tokens at hand are.

  Attributes:
    slots_BT: int32, within their rows.
    positions_BT: int32, within their documents.
    turns_X2BTh: `turns` of queries and keys, of each way that a layer has of it; computed once,
      before the scan over the layers. None: nothing turns.
    segments_BT: the documents that do not see one another; None: a row is one.
    key_segments_BS: those of the keys, where these are not of the same tokens.
    ring: whether they lie in the order in which `partitioning.ring` takes them.
  """

  slots_BT: Int[Array, "#B T"]
  positions_BT: Int[Array, "#B T"]
  turns_X2BTh: Float[Array, "X 2 #B T h"] | None
  segments_BT: Int[Array, "B T"] | None = None
  key_segments_BS: Int[Array, "B S"] | None = None
  ring: bool = False

  def turns(self, layer: Layer) -> Float[Array, "2 #B T h"] | None:
    """Returns how far a layer turns queries and keys; None where it does not."""
    if self.turns_X2BTh is None:
      return None
    return self.turns_X2BTh[0 if layer.rotary is None else layer.rotary]


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


def rows_of(
  tokens_BT: Int[Array, "B T"],
  order_T: np.ndarray | None,
  kinds: Layers,
  *,
  separate_documents: bool,
) -> Rows:
  """Returns where the tokens of whole rows are.

  Args:
    tokens_BT: in the order of the text.
    order_T: the order in which they are to lie, None: as they are.
    kinds: what the layers are.
    separate_documents: whether documents do not see one another.
  """
  slots_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None, :]
  segments_BT, positions_BT = None, slots_BT
  if separate_documents:
    segments_BT = documents.segments(tokens_BT)
    positions_BT = documents.positions(segments_BT)
  if order_T is not None:
    slots_BT, positions_BT = slots_BT[:, order_T], positions_BT[:, order_T]
    segments_BT = None if segments_BT is None else segments_BT[:, order_T]
  if segments_BT is not None:
    segments_BT, positions_BT = constrain(segments_BT, "BT"), constrain(positions_BT, "BT")
  turns = kinds.turns(positions_BT)
  return Rows(slots_BT, positions_BT, turns, segments_BT, ring=order_T is not None)


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
