"""Parallel schedules written as shard_maps: FSDP and tensor-parallel matmuls, ring attention."""
