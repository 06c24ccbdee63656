"""A process of the chapter `processes`: prints its devices and the rows that it feeds, as JSON.

python -m processes.launch --processes=2 -- python -m reports.tour.member '{"data": 8}'
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from input_pipeline.batches import TrainingBatches
from input_pipeline.row_source import array_source
from partitioning.mesh import make_mesh
from processes import coordination as groups
from runtime import devices

ROWS = 16


def feed(sizes):
  """Makes one global batch over all processes; returns what this process has of it."""
  source = array_source("numbers", {"row": np.arange(ROWS, dtype=np.int32)})
  batches = TrainingBatches(source, global_batch_size=ROWS, seed=0, shuffle=False)
  mesh = make_mesh(sizes)
  batch = batches.batch(0, {"row": NamedSharding(mesh, P("data"))})["row"]
  return {
    "process": jax.process_index(),
    "local": [device.id for device in jax.local_devices()],
    "global": [device.id for device in jax.devices()],
    "shape": batch.shape,
    "rows": {shard.device.id: shard.data.tolist() for shard in batch.addressable_shards},
  }


def main(sizes: dict[str, int]) -> None:
  """Joins the others, feeds, prints, and leaves with them."""
  joined = groups.connect(start_timeout_seconds=60, heartbeat_seconds=100)
  [started] = devices.start(sizes, simulate=True, processes=joined.count)
  print(json.dumps(feed(started.sizes)), flush=True)
  groups.part()


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
