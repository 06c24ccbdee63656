"""Placements of arrays that exist on no device."""

import numpy as np
from jax.sharding import PartitionSpec

from partitioning.mesh_sizes import AXES
from partitioning.rules import Placement

SIZES = {axis: {"fsdp": 2, "tensor": 4}.get(axis, 1) for axis in AXES}


ALONE = dict.fromkeys(AXES, 1)


def placement(name, shape, *entries, dtype="float32", letters="", rule="a rule", notes=()):
  """Returns where one array lies."""
  spec = PartitionSpec(*entries)
  return Placement(name, shape, np.dtype(dtype), letters, rule, spec, notes)


UP = placement("up/kernel", (3, 12, 20), None, "fsdp", "tensor", letters="LDF", rule="(up|gate).*")


BOTH = placement("table", (24, 5), ("tensor", "fsdp"))


HALF = placement("out/kernel", (12, 7), "fsdp", None, dtype="bfloat16")


WHOLE = placement("norm/scale", (12,), dtype="float64")


COUNT = placement("count", (), dtype="int32", rule="scalar")
