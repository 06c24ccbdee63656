"""Pipeline stages beside other axes and features: what the parity of pipelines is proved of."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.parity import variants
from tests.parity.comparison import ADAPTERS, COLLECTIVE_MATMUL, FEATURES, SEQUENCE_PARALLEL
from tests.parity.latents import LATENTS
from tests.parity.mixers import ALTERNATING, HYBRID_EXPERTS, MAMBA

Keys = Mapping[str, Any]
LAYERS = {"model.layers": 4}
INTERLEAVED = {"training.pipeline": "interleaved"}
GPIPE = {"training.pipeline": "gpipe"}
CONDITIONAL = {"training.pipeline_ends": "conditional"}
IN_EACH_TICK = {"training.pipeline_gather": "tick"}
DROPOUT = {"model.dropout_rate": 0.2}
# Losses of the routers beside that of the tokens, and a bias that moves by the layers' counts.
EXPERTS = {
  "model.experts": 8,
  "model.experts_per_token": 3,
  "model.expert_feedforward_size": 24,
  "training.balance_loss": 0.02,
  "training.router_z_loss": 0.01,
  "model.router_scores": "sigmoid",
  "model.router_correction": True,
  "training.router_bias_rate": 0.05,
  "model.shared_feedforward_size": 16,
}
ADAFACTOR = {
  "optimizer.name": "adafactor",
  "optimizer.arguments": "min_dim_size_to_factor=4,momentum=0.9,dtype_momentum=float64",
}
CURRENT = {"training.matmul_scaling": "current"}
RING, GATHER = ({"model.context_attention": kind} for kind in ("ring", "gather"))


def mesh(microbatches: int, **axes: int) -> dict[str, Any]:
  """Returns the keys of a mesh with stages."""
  return {
    "training.microbatches": microbatches,
    **{f"mesh.{axis}": size for axis, size in axes.items()},
  }


class Case(NamedTuple):
  """A pipeline, and what one device does instead.

  Attributes:
    ours: keys of the pipeline.
    shared: of both.
    microbatches: of one device, by accumulation; where what is computed of a microbatch depends on
      which rows it has (dropout's keys, scales of 8-bit matmuls), as many as the pipeline's.
  """

  ours: Keys
  shared: Keys = FEATURES
  microbatches: int = 1

  @property
  def on_one_device(self) -> dict[str, Any]:
    """Returns the keys of one device."""
    steps = {"training.gradient_accumulation_steps": self.microbatches}
    return {**LAYERS, **self.shared, **(steps if self.microbatches > 1 else {})}


# Of every run of the tests.
SHORT = {
  "stage4 fsdp2, fewer microbatches, gathered in each tick, dropout": Case(
    {**mesh(2, stage=4, fsdp=2), **CONDITIONAL, **IN_EACH_TICK}, {**FEATURES, **DROPOUT}, 2
  ),
}
LONG = {
  # ---- axes ----
  "stage2 data2, dropout": Case(mesh(4, stage=2, data=2), {**FEATURES, **DROPOUT}, 4),
  "stage4 tensor2, fewer microbatches, conditional": Case(
    {**mesh(2, stage=4, tensor=2), **CONDITIONAL}
  ),
  "stage4 fsdp2, as many": Case(mesh(4, stage=4, fsdp=2)),
  "stage4, no multiple": Case(mesh(6, stage=4), {**FEATURES, "data.global_batch_size": 24}),
  "stage2 fsdp2 tensor2": Case(mesh(4, stage=2, fsdp=2, tensor=2)),
  "stage2 fsdp2 tensor2, interleaved": Case(
    {**mesh(4, stage=2, fsdp=2, tensor=2), **INTERLEAVED, **CONDITIONAL}
  ),
  "stage2 data2 tensor2, gpipe, dropout": Case(
    {**mesh(4, stage=2, data=2, tensor=2), **GPIPE, **CONDITIONAL}, {**FEATURES, **DROPOUT}, 4
  ),
  "stage2 context2 tensor2, ring": Case(
    {**mesh(2, stage=2, context=2, tensor=2), **SEQUENCE_PARALLEL, **RING}
  ),
  "stage2 context2 tensor2, Ulysses": Case(
    {**mesh(2, stage=2, context=2, tensor=2), "model.context_attention": "ulysses"}
  ),
  "stage2 context2 tensor2, gathered": Case({**mesh(2, stage=2, context=2, tensor=2), **GATHER}),
  "stage2 data2 tensor2, collective matmuls": Case(
    {**mesh(2, stage=2, data=2, tensor=2), **COLLECTIVE_MATMUL}
  ),
  # ---- experts: rounds of the exchange inside of a stage ----
  "stage2 expert2 tensor2": Case(mesh(4, stage=2, expert=2, tensor=2), EXPERTS),
  "stage2 expert2 data2, interleaved": Case(
    {**mesh(2, stage=2, expert=2, data=2), **INTERLEAVED}, EXPERTS
  ),
  "stage2 expert2 fsdp2, gpipe": Case({**mesh(4, stage=2, expert=2, fsdp=2), **GPIPE}, EXPERTS),
  "stage2 expert2 context2": Case(mesh(2, stage=2, expert=2, context=2), EXPERTS),
  # ---- models ----
  "families, interleaved": Case(
    {**mesh(4, stage=2, data=2, tensor=2), **INTERLEAVED}, variants.FAMILIES
  ),
  "families, gpipe": Case({**mesh(4, stage=4, data=2), **GPIPE}, variants.FAMILIES),
  "latent attention": Case(mesh(4, stage=2, data=2), LATENTS),
  "learned positions": Case(
    {**mesh(4, stage=2, data=2, tensor=2), **CONDITIONAL}, variants.LEARNED
  ),
  "adapters with dropout, averages": Case(
    mesh(4, stage=2, fsdp=2, tensor=2),
    {
      **{**variants.ADAMW, **ADAPTERS, "lora.dropout": 0.3, "optimizer.ema_decays": (0.9,)},
      "training.trainable": ("embed/*",),
    },
    4,
  ),
  "hybrid of experts, ring": Case(mesh(2, stage=2, fsdp=2, context=2) | RING, HYBRID_EXPERTS),
  "hybrid of Mamba-2, interleaved": Case(
    {**mesh(4, stage=2, data=2, tensor=2), **INTERLEAVED},
    {**MAMBA, **ALTERNATING, "model.layers": 8},
  ),
  # ---- optimizers ----
  "muon": Case(mesh(2, stage=2, fsdp=2, tensor=2), variants.MUON),
  "muon, interleaved": Case({**mesh(2, stage=2, data=2), **INTERLEAVED}, variants.MUON),
  "soap": Case(mesh(4, stage=2, data=2), variants.SOAP),
  "adafactor": Case(mesh(2, stage=2, fsdp=2, data=2), ADAFACTOR),
  "schedule-free adamw, accumulated": Case(
    {**mesh(2, stage=4, data=2), "training.gradient_accumulation_steps": 2},
    variants.SCHEDULE_FREE,
  ),
  "groups of soap, muon and schedule-free": Case(
    mesh(2, stage=2, data=2, tensor=2),
    {**variants.SOAP, **variants.LEARNED, **variants.OF_OTHERS},
  ),
  "clipped by group, averages": Case(
    mesh(8, stage=4), {**variants.CLIPPED_BY_GROUP, "optimizer.ema_decays": (0.9,)}
  ),
  "clipped by a quantile": Case(mesh(2, stage=2), variants.CLIPPED_BY_QUANTILE),
  "ZeRO-1": Case(
    {**mesh(2, stage=2, data=2, tensor=2), "partitioning.optimizer.model": ("fsdp", "data")},
    variants.MOMENTUM,
  ),
  # ---- how a step is computed ----
  "offloaded activations and state": Case(
    {**mesh(4, stage=2, data=2), **variants.OFFLOADED}, {**variants.ADAMW, **FEATURES}
  ),
  "loss in chunks": Case({**mesh(4, stage=2, data=2, tensor=2), "training.loss_chunks": 3}),
  "gathered kernels kept": Case({**mesh(2, stage=2, fsdp=2, tensor=2), **variants.KEPT}),
  "int8": Case({**mesh(4, stage=2, tensor=2), **SEQUENCE_PARALLEL}, variants.INT8, 4),
  "float8": Case(mesh(4, stage=2, data=2), {**variants.FLOAT8, **CURRENT}, 4),
}
CASES = {**SHORT, **LONG}
# Of whose steps the budget is proved.
STRATEGIES = {
  "data=2 x stage=4": {**LAYERS, **mesh(4, data=2, stage=4)},
  "stage=2 x fsdp=2 x tensor=2, interleaved, sequence-parallel": {
    **{**LAYERS, **mesh(4, stage=2, fsdp=2, tensor=2), **IN_EACH_TICK},
    **{**INTERLEAVED, **SEQUENCE_PARALLEL},
  },
  "stage=4 x fsdp=2, interleaved": {
    **{"model.layers": 8, **mesh(8, stage=4, fsdp=2), **IN_EACH_TICK},
    **INTERLEAVED,
  },
  "data=2 x stage=2, GPipe": {**LAYERS, **mesh(4, data=2, stage=2), **GPIPE},
}
