"""Which rows lie where, and what training and evaluation make of data sets of every remainder.

Run as one of several processes it prints one JSON object; the tests call the same functions in a
process of their own, which has all devices.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from configs.keys import table
from input_pipeline.batches import EvaluationBatches, TrainingBatches
from input_pipeline.row_source import array_source
from partitioning.mesh import make_mesh
from processes import coordination as groups
from processes.coordination import Lockstep
from processes.preemption import StopRequest
from processes.watchdog import Watchdog
from runtime import devices
from tests.helpers.jobs import make_job
from training.evaluation import Evaluator

P = PartitionSpec
# name: (mesh, rows of a batch, how the rows and the positions of a row are split)
LAYOUTS = {
  "data": ({"data": 8}, 16, P("data")),
  "every process holds all": ({"tensor": 8}, 3, P()),
  "tensor across processes": ({"data": 2, "tensor": 4}, 6, P("data")),
  "fsdp across processes": ({"fsdp": 8}, 8, P(("data", "fsdp"))),
  "three axes": ({"data": 2, "fsdp": 2, "tensor": 2}, 12, P(("data", "fsdp"))),
  "sequence": ({"data": 2, "context": 4}, 4, P("data", "context")),
  "sequence across processes": ({"context": 8}, 3, P(None, "context")),
  "sequence split by what splits other rows": ({"data": 4, "tensor": 2}, 4, P("tensor", "data")),
  "rows that are no neighbours": ({"data": 4, "tensor": 2}, 16, P(("tensor", "data"))),
  "fewer rows than processes": ({"data": 2, "tensor": 4}, 2, P("data")),
  "one row": ({"tensor": 8}, 1, P()),
}
ROWS, POSITIONS = 29, 8
STEPS = (0, 1, 5, 1000)


def where_rows_lie() -> dict:
  """Returns layout -> batch -> place in the mesh -> what the device there holds.

  Only the devices of this process are in it.
  """
  numbers = np.arange(ROWS, dtype=np.int32)
  source = array_source("numbered", {"tokens": numbers[:, None] * 100 + np.arange(POSITIONS)})
  found = {}
  for name, (sizes, rows, spec) in LAYOUTS.items():
    mesh = make_mesh({**table.section("mesh"), **sizes})
    places = {device: place for place, device in enumerate(mesh.devices.flat)}
    shardings = {"tokens": NamedSharding(mesh, spec)}
    training = TrainingBatches(source, global_batch_size=rows, seed=3)
    evaluation = EvaluationBatches(source, global_batch_size=rows)
    batches = {f"step {step}": training.batch(step, shardings) for step in STEPS}
    last = len(evaluation) - 1
    batches |= {f"batch {n}": evaluation.batch(n, shardings) for n in (0, last)}
    found[name] = {
      batch: {
        str(places[shard.device]): np.asarray(shard.data).tolist()
        for shard in arrays["tokens"].addressable_shards
      }
      for batch, arrays in batches.items()
    }
  return found


# ------------------------------ remainders ------------------------------

BATCH = 16
EPOCHS = 2
SOME = (0, 1, BATCH - 1)  # remainders
DEVICES = 4  # of all processes; a batch has several rows for each


def remainders(watch: Watchdog, beyond: Sequence[int]) -> Iterator[dict]:
  """Yields, for so many rows beyond two batches, every loss of training and that of evaluation."""
  job = make_job("dp8", "mlp", **{"mesh.data": DEVICES})
  train, evaluate = job.compile_train_step().function, job.compile_eval_step().function
  draw, key = job.compile_init().function, jax.random.key(job.config.seed)
  lockstep = Lockstep(watch.group, watch.stop)
  for remainder in beyond:
    source = _examples(2 * BATCH + remainder)
    batches = TrainingBatches(source, global_batch_size=BATCH, seed=remainder)
    state, losses, step = draw(key), [], 0
    while step * BATCH < EPOCHS * len(source):
      watch.at(f"step {step + 1}", begins=True)
      assert lockstep.enter()
      state, metrics = train(state, batches.batch(step, job.batch_shardings))
      losses.append(float(metrics["loss"]))
      step += 1
    held_out = EvaluationBatches(source, global_batch_size=BATCH)
    found = Evaluator(job, held_out, evaluate, watch, lockstep)(state.params)
    yield {"losses": losses, "eval_loss": found.metrics["eval_loss"], "batches": len(held_out)}


def _examples(rows: int):
  random = np.random.default_rng(rows)
  inputs = random.standard_normal((rows, 13)).astype(np.float32)
  targets = random.integers(0, 10, rows, np.int32)
  weights = np.ones(rows, np.float32)
  return array_source("examples", {"inputs": inputs, "targets": targets, "weights": weights})


def part(name: str, group: groups.Group) -> Any:
  """Returns what the tests look at: `rows`, `remainders`, or `some` of these."""
  if name == "rows":
    return where_rows_lie()
  with Watchdog(group, StopRequest()) as watch:
    return list(remainders(watch, SOME if name == "some" else range(BATCH)))


if __name__ == "__main__":
  joined = groups.connect(start_timeout_seconds=60, heartbeat_seconds=30)
  [name] = sys.argv[1:]
  count = 8 if name == "rows" else DEVICES
  devices.start({**table.section("mesh"), "data": count}, processes=joined.count)
  print("\n" + json.dumps({name: part(name, joined)}), flush=True)
  groups.part()
