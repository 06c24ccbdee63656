"""What the parity matrix varies besides the mesh: model, optimizer, how a step is computed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.parity.comparison import ADAPTERS, COLLECTIVE_MATMUL, FEATURES, SEQUENCE_PARALLEL, ZERO_1
from training import parity

Keys = Mapping[str, Any]

# Dtype of the parameters -> the largest relative L2 difference. In bfloat16, a number that is
# rounded to its other neighbour is off by 2**-8: one of a kernel's 4,096 elements or more, 6e-5.
BOUNDS = {**parity.BOUNDS, "bfloat16": 1e-3}

MOMENTUM = {"optimizer.momentum": 0.9}
# What the families differ in; layers take turns, so that both kinds are there.
FAMILIES = {
  "model.window": 9,
  "model.global_every": 2,
  "model.local_rotary_base": 500.0,
  "model.attention_soft_cap": 2.0,
  "model.logits_soft_cap": 3.0,
  "model.biases": "all",
  "model.query_key_norm": True,
  "model.post_norms": True,
  "model.norm_scale_from_one": True,
  "model.scaled_embeddings": True,
  "model.activation": "gelu",
}
# GPT-2's, which exclude some of those.
LEARNED = {
  "model.positions": "learned",
  "model.norm": "layer",
  "model.gated": False,
  "model.activation": "gelu",
  "model.biases": "all",
  "model.tied_embeddings": True,
}
ACCUMULATED = {"training.gradient_accumulation_steps": None}  # as many as the mesh leaves rows for

# Optimizers divide by roots of second moments: with a larger epsilon, a gradient that is rounding
# errors alone moves no parameter by a whole learning rate.
STABLE = {"optimizer.epsilon": 1e-2, "optimizer.learning_rate": 0.01}
ADAMW = {"optimizer.name": "adamw", **STABLE}
MUON = {"optimizer.name": "muon", **STABLE}
# The first step makes the bases, the second refreshes them, the third uses these.
SOAP = {"optimizer.name": "soap", "optimizer.arguments": "precondition_frequency=1", **STABLE}
SCHEDULE_FREE = {
  "optimizer.name": "schedule_free_adamw",
  "optimizer.schedule": "constant",
  "optimizer.warmup_steps": 2,
  **STABLE,
}
ATTENTION = {"parameters": "*/attention/*", "learning_rate": 0.02}
CLIPPED_BY_GROUP = {
  "optimizer.groups": (ATTENTION, {"parameters": "embed/*", "clip_norm": 0.1}),
  "optimizer.clip_groups": True,
}
CLIPPED_BY_QUANTILE = {
  "optimizer.clip_norm": 0.0,
  "optimizer.clip_quantile": 0.3,
  "optimizer.clip_window": 2,
}
BY_NAME = {
  "training.rematerialization": "full,query=save,attention_output=offload,layer_input=offload"
}
OFFLOADED = {**BY_NAME, "optimizer.state_memory": "host"}
# Groups with optimizers of their own, beside the config's.
OF_OTHERS = {
  "optimizer.groups": (
    {"parameters": "*/mlp/*", "name": "muon"},
    {"parameters": "embed/*", "name": "schedule_free_adamw"},
  ),
  "optimizer.schedule": "constant",
  "optimizer.independent_weight_decay": True,
}
DECAYED = {"parameters": "embed/*", "learning_rate": 0.02, "weight_decay": 0.3}
# With sizes of which blocks of 128 elements leave eight parts of each dim.
NARROW = {
  **ADAMW,
  "optimizer.state_dtype": "int8",
  "model.model_size": 64,
  "model.feedforward_size": 128,
  "model.head_size": 16,
  "model.vocabulary_multiple": 128,
}
RAMPS = {
  "data.batch_size_ramp": ((0, 8), (1, 16)),
  "data.sequence_length_ramp": ((0, 12), (2, 24)),
}
KEPT = {"partitioning.reshard_after_forward": False}  # gathered kernels
INT8 = {"training.matmul_dtype": "int8"}
FLOAT8 = {"training.matmul_dtype": "float8"}


@dataclasses.dataclass(frozen=True)
class Variant:
  """One row of the matrix.

  Attributes:
    shared: what changes what is computed: the run on one device has it too.
    ours: what only changes how it is computed.
    dtypes: of the parameters.
    meshes: names; None: all.
    recipes: of the models that have its keys, where the matrix has it of several.
  """

  shared: Keys = dataclasses.field(default_factory=dict)
  ours: Keys = dataclasses.field(default_factory=dict)
  dtypes: tuple[str, ...] = ("float32", "float64")
  meshes: tuple[str, ...] | None = None
  recipes: tuple[str, ...] = ("lm", "mlp", "vit")


# A product of every option with every mesh would take hours: each of these is on meshes that shard
# rows, kernels, both dims of kernels, and the sequence.
FEW = ("data8", "fsdp8", "tensor8", "data2_fsdp2_tensor2", "fsdp2_context2_tensor2 ring")


def _few(shared: Keys, ours: Keys | None = None, dtypes: tuple[str, ...] = ("float64",)) -> Variant:
  return Variant(shared, ours or {}, dtypes, FEW)


VARIANTS: dict[str, Variant] = {
  "plain": Variant(),
  "three microbatches, kernels kept": Variant(
    {}, {"training.gradient_accumulation_steps": 3, **KEPT}, recipes=("vit",)
  ),
  "features": Variant(FEATURES),
  "features, accumulated": Variant(FEATURES, ACCUMULATED),
  "dropout": Variant({"model.dropout_rate": 0.2}),
  "one key/value head": Variant({"model.kv_heads": 1}),
  "rematerialization dots": Variant({}, {"training.rematerialization": "dots"}),
  "sequence-parallel": Variant({}, SEQUENCE_PARALLEL),
  "sequence-parallel, features, accumulated": Variant(
    FEATURES, {**SEQUENCE_PARALLEL, **ACCUMULATED}
  ),
  "sequence-parallel, collective matmuls": Variant({}, COLLECTIVE_MATMUL),
  "sequence-parallel, collective matmuls, features, accumulated": Variant(
    FEATURES, {**COLLECTIVE_MATMUL, **ACCUMULATED}
  ),
  "adapters, sequence-parallel, collective matmuls": Variant(ADAPTERS, COLLECTIVE_MATMUL),
  "ZeRO-1": Variant(MOMENTUM, ZERO_1),
  "the families' options": Variant(FAMILIES),
  "the families' options, sequence-parallel": Variant(FAMILIES, SEQUENCE_PARALLEL),
  "learned positions": Variant(LEARNED),
  "adapters": Variant(ADAPTERS),
  "adapters with dropout, sequence-parallel": Variant(
    {**ADAPTERS, "lora.dropout": 0.3}, SEQUENCE_PARALLEL
  ),
  "muon": _few(MUON),
  "muP, muon, sequence-parallel": _few({**MUON, "model.base_width": 10}, SEQUENCE_PARALLEL),
  "soap": _few(SOAP),
  "schedule-free adamw, accumulated": _few(SCHEDULE_FREE, ACCUMULATED),
  "muP, adamw": _few({**ADAMW, "model.base_width": 10}),
  "each microbatch reduced": _few(
    FEATURES, {**ACCUMULATED, "training.gradient_reduction": "microbatch"}
  ),
  "clipped by group, averages": _few({**CLIPPED_BY_GROUP, "optimizer.ema_decays": (0.9,)}),
  "clipped by a quantile": _few(CLIPPED_BY_QUANTILE),
  "offloaded activations and state": _few({**ADAMW, **FEATURES}, OFFLOADED),
  "loss in chunks, sequence-parallel": _few(
    FEATURES, {**SEQUENCE_PARALLEL, "training.loss_chunks": 3}
  ),
  "int8 matmuls, sequence-parallel": _few(INT8, SEQUENCE_PARALLEL),
  "gathered kernels kept": _few(FEATURES, {**SEQUENCE_PARALLEL, **KEPT}),
  "int8 matmuls, gathered kernels kept": _few(INT8, KEPT),
  "float8 matmuls, delayed": _few({**FLOAT8, "training.matmul_scaling": "delayed"}),
  "stored in fewer bytes": _few(NARROW, dtypes=("bfloat16",)),
  "stored in fewer bytes, ZeRO-1": _few(
    NARROW, {"partitioning.optimizer.model": ("fsdp", "data")}, dtypes=("bfloat16",)
  ),
  "ramps": _few(RAMPS),
  # Many options at once: what one of them computes is given to the next.
  "muon, muP, int8, averages; sequence-parallel, accumulated, offloaded, chunked": _few(
    {**MUON, **INT8, **FEATURES, "model.base_width": 10, "optimizer.ema_decays": (0.9,)},
    {**SEQUENCE_PARALLEL, **ACCUMULATED, **BY_NAME, "training.loss_chunks": 3},
  ),
  "schedule-free, float8, a quantile, families; sequence-parallel, offloaded, chunked": _few(
    {
      **{**SCHEDULE_FREE, **FLOAT8, **CLIPPED_BY_QUANTILE, **FAMILIES},
      **{"training.matmul_scaling": "delayed", "training.z_loss": 0.01, "model.dropout_rate": 0.1},
    },
    {**SEQUENCE_PARALLEL, **BY_NAME, "training.loss_chunks": 3},
  ),
  "groups of soap, muon and schedule-free; sequence-parallel, accumulated": _few(
    {**SOAP, **LEARNED, **OF_OTHERS}, {**SEQUENCE_PARALLEL, **ACCUMULATED}
  ),
  "adapters with dropout, a group, averages; sequence-parallel, state on the host": _few(
    {
      **{**ADAMW, **ADAPTERS, "lora.dropout": 0.3, "training.trainable": ("embed/*",)},
      **{"optimizer.groups": (DECAYED,), "optimizer.ema_decays": (0.9,)},
    },
    {**SEQUENCE_PARALLEL, "optimizer.state_memory": "host"},
  ),
}
