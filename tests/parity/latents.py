"""The small decoder with latent attention, and the meshes that it is trained on."""

# Beside the sizes of tests/helpers/jobs.py, each another than the others.
LATENTS = {
  "model.attention": "latent",
  "model.kv_heads": 8,
  "model.head_size": 10,
  "model.rotary_size": 4,
  "model.latent_size": 24,
  "model.query_latent_size": 16,
  "model.value_head_size": 7,
}
_SEQUENCE_PARALLEL = {"partitioning.sequence_parallel": True}
_ALL = {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2}
RING, GATHER = ({"model.context_attention": kind} for kind in ("ring", "gather"))
MESHES = {
  "data4_tensor2": {"mesh.data": 4, "mesh.tensor": 2},
  "fsdp8": {"mesh.fsdp": 8},
  "fsdp2_tensor4, sequence-parallel": {"mesh.fsdp": 2, "mesh.tensor": 4, **_SEQUENCE_PARALLEL},
  "all, ring": {**_ALL, **RING, **_SEQUENCE_PARALLEL},
  "all, gathered": {**_ALL, **GATHER},
  "all, Ulysses": {**_ALL, "model.context_attention": "ulysses"},
  "data2_tensor4, collective matmuls": {
    "mesh.tensor": 4,
    "mesh.data": 2,
    **_SEQUENCE_PARALLEL,
    "partitioning.collective_matmul": True,
    "training.attention_kernel": "blockwise",
    "training.gradient_accumulation_steps": 2,
  },
}
# Of whose steps the budget is proved. The others are products of these axes.
STRATEGIES = (
  "dp8, ZeRO-1",
  "fsdp8",
  "dp4_tp2",
  "dp4_tp2, sequence-parallel",
  "dp2_fsdp2_tp2",
  "dp2_fsdp2_tp2, sequence-parallel",
  "fsdp=2 x tensor=4, collective matmul",
  "dp2_fsdp2_tp2, 2 microbatches",
  "data=4 x context=2, ring",
  "fsdp=2 x context=4, gathered",
)
SPLIT = ("fsdp", "data")
# With ZeRO-1 the dims of latent vectors are split as the residual's width is.
ZERO_1 = {f"partitioning.optimizer.{dim}": SPLIT for dim in ("latent", "query_latent")}
