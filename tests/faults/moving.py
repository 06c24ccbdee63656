"""One of several processes that restore checkpoints of other layouts, and make the next step.

  moving.py STRATEGY FOLDER...      with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID

Prints a JSON object per folder: `wrong`, the names of arrays of which a device of this process
holds other bits than plain TensorStore reads; `ids`, the rows of the next batch; `loss`, of the
next step; `seconds`.
"""

import json
import pathlib
import sys
import time

import numpy as np

from configs import dp4_tp2
from configs.schema import finalize, validate
from processes import coordination as groups
from runtime import devices
from tests.helpers.compiling import FAST
from tests.training.checkpointing import plain
from training import splits
from training.checkpointing import reading
from training.checkpointing.checkpointer import Checkpointer
from training.checkpointing.consensus import Together
from training.setup import Job, prepare
from training.state import State

SAVED = 3  # steps
DEVICES = 4
MESHES = {
  "dp": {"data": DEVICES, "tensor": 1},
  "fsdp": {"data": 1, "fsdp": DEVICES, "tensor": 1},
  "tp": {"data": 1, "tensor": DEVICES},
}
SETTINGS = {
  "model.layers": 2,
  "model.model_size": 32,
  "model.feedforward_size": 48,
  "data.sequence_length": 16,
  "data.global_batch_size": 24,
  "data.evaluation_split": "test[:1]",
  "evaluation.every_steps": 0,
  "evaluation.steps": 2,
  "evaluation.sample_tokens": 0,
  "metrics.every_steps": 1,
  "metrics.report": False,
  "metrics.tensorboard": False,
  "training.steps": SAVED + 1,
  "training.matmul_precision": "highest",
  "checkpoint.every_steps": SAVED,
  "compiler_options": FAST,
}


def flags(strategy: str) -> list[str]:
  """Returns the flags of a command line that saves."""
  mesh = {f"mesh.{axis}": size for axis, size in MESHES[strategy].items()}
  settings = [f"--config.{key}={value}" for key, value in {**SETTINGS, **mesh}.items()]
  return ["--config=configs/dp4_tp2.py", *settings]


def job_of(strategy: str, processes: int) -> Job:
  """Returns the job of such a command line, of one of several processes."""
  config = dp4_tp2.get_config()
  mesh = {f"mesh.{axis}": size for axis, size in MESHES[strategy].items()}
  config.update_from_flattened_dict({**SETTINGS, **mesh})
  [its] = devices.start(config.mesh.to_dict(), simulate=True, processes=processes)
  config = finalize.finalize(config, its.platform)
  validate.check(config, its.sizes)
  return prepare(config, its)


def wrong(tree: dict, folder: str) -> list[str]:
  """Returns the names of the arrays that are not what the files hold."""
  expected = plain.arrays(pathlib.Path(folder) / str(SAVED))
  found = {name.replace("/", "."): leaf for name, leaf in reading.named_leaves(tree).items()}
  assert sorted(found) == sorted(expected)
  names = []
  for name, leaf in found.items():
    for shard in leaf.addressable_shards:
      if np.asarray(shard.data).tobytes() != expected[name][shard.index].tobytes():
        names.append(name)
  return names


def main(strategy: str, *folders: str) -> None:
  """Restores each."""
  group = groups.connect(start_timeout_seconds=60, heartbeat_seconds=30)
  job = job_of(strategy, group.count)
  batches = splits.open_data(job).train
  train_step = job.compile_train_step().function
  for folder in folders:
    began = time.monotonic()
    with Checkpointer(folder, read_only=True, together=Together(group)) as checkpointer:
      step, tree = checkpointer.restore(vars(job.placed_state), step=SAVED)
    found = {"wrong": wrong(tree, folder), "ids": batches.row_ids(step).tolist()}
    _, metrics = train_step(State(**tree), batches.batch(step, job.batch_shardings))
    found |= {"loss": float(metrics["loss"]), "seconds": time.monotonic() - began}
    print(json.dumps(found), flush=True)
  groups.part()


if __name__ == "__main__":
  main(*sys.argv[1:])
