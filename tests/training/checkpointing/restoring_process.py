"""One of several processes that restore a state together: what it holds, and what it held at most.

  restoring_process.py FOLDER INDEX COUNT PORT

The state's one large array is split by rows over eight devices, which the processes share. Prints
a JSON object of bytes: `shards` (of this process's devices) and `growth` (of its resident memory,
from before the restore to the highest point of it).
"""

import json
import pathlib
import sys

import jax

FOLDER, INDEX, COUNT, PORT = sys.argv[1], *map(int, sys.argv[2:])
jax.config.update("jax_num_cpu_devices", 8 // COUNT)
jax.distributed.initialize(f"localhost:{PORT}", COUNT, INDEX)

import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from partitioning.rules import nested  # noqa: E402
from training.checkpointing import reading  # noqa: E402
from training.checkpointing.checkpointer import Checkpointer  # noqa: E402


def resident(key: str) -> int:
  """Returns `VmRSS` (now) or `VmHWM` (the highest so far) of this process, in bytes."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(f"{key}:"):
      return int(line.split()[1]) * 1024
  raise AssertionError(key)


def restore() -> dict[str, int]:
  """Restores, and looks whether the shards hold their rows."""
  mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("fsdp",)))
  with Checkpointer(FOLDER, read_only=True) as checkpointer:
    [step] = checkpointer.steps()
    stored = reading.stored_arrays(checkpointer.folder / str(step))
    target = nested(
      {
        name: jax.ShapeDtypeStruct(
          array.shape, array.dtype, sharding=rows if name == "optimizer/large" else whole
        )
        for name, array in stored.items()
      }
    )
    # The few small parameters: what libraries and threads need is there when it is measured.
    reading.restore_branches(checkpointer.folder, lambda _: {"params": target["params"]})
    before = resident("VmRSS")
    _, tree = checkpointer.restore(target)
    large = jax.block_until_ready(tree)["optimizer"]["large"]
  growth = resident("VmHWM") - before
  shards = [np.asarray(shard.data) for shard in large.addressable_shards]
  for shard, data in zip(large.addressable_shards, shards, strict=True):
    assert data[0, 0] == np.float32(shard.index[0].start * large.shape[1]), shard.index
  return {"shards": sum(data.nbytes for data in shards), "growth": growth}


if __name__ == "__main__":
  print(json.dumps(restore()), flush=True)
  jax.distributed.shutdown()  # waits for the others; a fork ends without what Python calls at exit
