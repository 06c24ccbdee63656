"""Axis tables by model: dim name -> mesh axes, for parameters and activations."""

from runtime.extensions import Table

# dim name -> mesh axes, outermost first; dims that are not split are written down as ().
_OURS = {
  "transformer": {
    "parameters": {
      "layers": ("stage",),
      "model": ("fsdp",),
      "feedforward": ("tensor",),
      "heads": ("tensor",),
      "kv_heads": ("tensor",),
      "head": (),
      "value_head": (),
      "query_latent": ("fsdp",),
      "query_latent_output": (),
      "latent": ("fsdp",),
      "latent_output": (),
      "rotary_key": (),
      "key_value_head": (),
      "vocabulary": ("tensor",),
      "positions": (),
      "lora_rank": (),
      "dense_layers": (),
      "experts": ("expert",),
      "router_experts": (),
      "expert_feedforward": ("tensor",),
      "shared_feedforward": ("tensor",),
    },
    "activations": {
      "batch": ("data", "fsdp", "expert"),
      "sequence": ("context",),  # inside of a block
      "residual_sequence": ("context",),  # between blocks: see partitioning.sequence_parallel
      "key_sequence": (),
      "model": (),
      "feedforward": ("tensor",),
      "heads": ("tensor",),
      "kv_heads": ("tensor",),
      "head": (),
      "value_head": (),
      "query_latent": (),
      "query_latent_output": (),
      "latent": (),
      "latent_output": (),
      "rotary_key": (),
      "key_value_head": (),
      "vocabulary": ("tensor",),
      "positions": (),
      "lora_rank": (),
      "experts": ("expert",),
      "router_experts": (),
      "experts_per_token": (),
      "expert_feedforward": ("tensor",),
      "shared_feedforward": ("tensor",),
    },
  },
  "mlp": {
    "parameters": {
      "inputs": (),
      "model": ("fsdp",),
      "feedforward": ("tensor",),
      "outputs": (),
    },
    "activations": {
      "batch": ("data", "fsdp"),
      "inputs": (),
      "model": (),
      "feedforward": ("tensor",),
      "outputs": (),
    },
  },
  "vit": {
    "parameters": {
      "patch": (),
      "positions": (),
      "layers": (),
      "model": ("fsdp",),
      "feedforward": ("tensor",),
      "heads": ("tensor",),
      "head": (),
      "outputs": (),
    },
    "activations": {
      "batch": ("data", "fsdp"),
      "inputs": (),
      "patch": (),
      "positions": (),
      "sequence": ("context",),  # patches inside of a block
      "residual_sequence": ("context",),  # between blocks: see partitioning.sequence_parallel
      "key_sequence": (),
      "model": (),
      "feedforward": ("tensor",),
      "heads": ("tensor",),
      "head": (),
      "outputs": (),
    },
  },
}

AXIS_TABLES: Table = Table("axis table", _OURS, numerics=False)
