"""Axis tables by model: dim name -> mesh axes, for parameters and activations."""

from collections.abc import Mapping
from typing import Any

from runtime.extensions import Table

Axes = tuple[str, ...] | None  # outermost first; () of a dim that is not split

_BETWEEN_BLOCKS = ("context",)  # see partitioning.sequence_parallel


def _tables(rows: Mapping[str, tuple[Axes, Axes]]) -> dict[str, dict[str, Any]]:
  """Returns the two tables of a model.

  Args:
    rows: dim -> its axes in parameters and in activations; None where it is a dim of none.
  """
  return {
    name: {dim: axes[column] for dim, axes in rows.items() if axes[column] is not None}
    for column, name in enumerate(("parameters", "activations"))
  }


_TRANSFORMER: dict[str, tuple[Axes, Axes]] = {
  "batch": (None, ("data", "fsdp", "expert")),
  "sequence": (None, ("context",)),  # inside of a block
  "residual_sequence": (None, _BETWEEN_BLOCKS),
  "key_sequence": (None, ()),
  "layers": (("stage",), None),
  "model": (("fsdp",), ()),
  "feedforward": (("tensor",), ("tensor",)),
  "heads": (("tensor",), ("tensor",)),
  "kv_heads": (("tensor",), ("tensor",)),
  "head": ((), ()),
  "value_head": ((), ()),
  "query_latent": (("fsdp",), ()),
  "query_latent_output": ((), ()),
  "latent": (("fsdp",), ()),
  "latent_output": ((), ()),
  "rotary_key": ((), ()),
  "key_value_head": ((), ()),
  "mixer_heads": (("tensor",), ("tensor",)),
  "mixer_key_heads": (("tensor",), ("tensor",)),
  "mixer_head": ((), ()),
  "mixer_value_head": ((), ()),
  "mixer_channels": (("tensor",), ("tensor",)),
  "decay_latent": ((), ()),
  "gate_latent": ((), ()),
  "convolution": ((), ()),
  "convolution_tail": (None, ()),
  "mixer_layers": (("stage",), None),
  "dense_mixer_layers": (("stage",), None),
  "mlp_layers": (("stage",), None),
  "mtp_layers": ((), None),
  "mtp_model": ((), ()),
  "vocabulary": (("tensor",), ("tensor",)),
  "positions": ((), ()),
  "lora_rank": ((), ()),
  "dense_layers": (("stage",), None),
  "experts": (("expert",), ("expert",)),
  "router_experts": ((), ()),
  "experts_per_token": (None, ()),
  "teacher_classes": (None, ()),
  "expert_feedforward": (("tensor",), ("tensor",)),
  "shared_feedforward": (("tensor",), ("tensor",)),
}
_MLP: dict[str, tuple[Axes, Axes]] = {
  "batch": (None, ("data", "fsdp")),
  "inputs": ((), ()),
  "model": (("fsdp",), ()),
  "feedforward": (("tensor",), ("tensor",)),
  "outputs": ((), ()),
}
_VIT: dict[str, tuple[Axes, Axes]] = {
  "batch": (None, ("data", "fsdp")),
  "inputs": (None, ()),
  "patch": ((), ()),
  "positions": ((), ()),
  "layers": ((), None),
  "sequence": (None, ("context",)),  # patches inside of a block
  "residual_sequence": (None, _BETWEEN_BLOCKS),
  "key_sequence": (None, ()),
  "model": (("fsdp",), ()),
  "feedforward": (("tensor",), ("tensor",)),
  "heads": (("tensor",), ("tensor",)),
  "head": ((), ()),
  "outputs": ((), ()),
}

AXIS_TABLES: Table = Table(
  "axis table",
  {"transformer": _tables(_TRANSFORMER), "mlp": _tables(_MLP), "vit": _tables(_VIT)},
  numerics=False,
)
