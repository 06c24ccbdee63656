"""Slots and positions of tokens: where in its row and where in its document a token is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.layer_pattern import Layer, LayerPattern
from models.losses import Batch
from partitioning.constraints import constrain
from partitioning.parallel.ring_attention import in_order as in_ring_order

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
  data_fields=("slots_BT", "positions_BT", "rope_X2BTh", "segments_BT", "weights_BT"),
  meta_fields=("ring",),
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
    ring: whether the tokens are in the zigzag order of `partitioning.parallel.ring_attention`.
    weights_BT: of the tokens in the loss, in their order; None: there is no loss.
  """

  slots_BT: Int[Array, "#B T"]
  positions_BT: Int[Array, "#B T"]
  rope_X2BTh: Float[Array, "X 2 #B T h"] | None
  segments_BT: Int[Array, "B T"] | None = None
  ring: bool = False
  weights_BT: Float[Array, "B T"] | None = None

  def rope(self, layer: Layer) -> Float[Array, "2 #B T h"] | None:
    """Returns a layer's rope table; None without rotary positions."""
    if self.rope_X2BTh is None:
      return None
    return self.rope_X2BTh[0 if layer.rotary is None else layer.rotary]


def rows_of(
  tokens_BT: Int[Array, "B T"],
  order_T: np.ndarray | None,
  pattern: LayerPattern,
  segments_BT: Int[Array, "B T"] | None = None,
) -> Rows:
  """Returns slots, positions and documents of complete rows.

  Args:
    tokens_BT: in the order of the text.
    order_T: permutation of the tokens; None: the order of the text.
    pattern: what differs between the layers.
    segments_BT: the document of each token, in the order of the text, where attention is masked
      to the token's own document; None: a row is one document.
  """
  slots_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None, :]
  positions_BT = slots_BT if segments_BT is None else positions(segments_BT)
  if order_T is not None:
    slots_BT = jnp.asarray(order_T)[None, :]
    positions_BT = slots_BT if segments_BT is None else in_ring_order(positions_BT, order_T, "BT")
    segments_BT = None if segments_BT is None else in_ring_order(segments_BT, order_T, "BT")
  elif segments_BT is not None:
    segments_BT, positions_BT = constrain(segments_BT, "BT"), constrain(positions_BT, "BT")
  tables = pattern.rope_tables(positions_BT)
  return Rows(slots_BT, positions_BT, tables, segments_BT, ring=order_T is not None)


def in_order(batch: Batch, order_T: np.ndarray | None, *, documents: bool) -> Batch:
  """Returns a batch with its tokens' positions, all of it in the order that layers have tokens in.

  A pipeline does this once, before its region.

  Args:
    batch: arrays [B, T] in the order of the text.
    order_T: permutation of the tokens; None: the order of the text.
    documents: whether `segments` tells documents apart, in each of which positions begin at 0.
  """
  tokens_BT = batch["tokens"]
  slots_BT = jax.lax.broadcasted_iota(jnp.int32, tokens_BT.shape, 1)
  found = {**batch, POSITIONS: positions(batch["segments"]) if documents else slots_BT}
  if order_T is not None:
    return {name: in_ring_order(x_BT, order_T, "BT") for name, x_BT in found.items()}
  return {name: constrain(x_BT, "BT") for name, x_BT in found.items()}


def rows_in_order(
  batch: Batch, order_T: np.ndarray | None, pattern: LayerPattern, *, documents: bool
) -> Rows:
  """Returns `rows_of` of a batch that `in_order` has returned; arguments as there."""
  length = batch["tokens"].shape[1]
  slots_T = np.arange(length, dtype=np.int32) if order_T is None else order_T
  segments_BT = constrain(batch["segments"], "BT") if documents else None
  slots_BT = jnp.asarray(slots_T)[None, :]
  positions_BT = constrain(batch[POSITIONS], "BT") if documents else slots_BT
  tables = pattern.rope_tables(positions_BT)
  return Rows(slots_BT, positions_BT, tables, segments_BT, ring=order_T is not None)
