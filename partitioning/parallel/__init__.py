"""Manual parallel schedules under jax.shard_map: matmuls, ring attention, collectives."""
