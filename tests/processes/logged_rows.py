"""main.py, which also writes what rows each step has, and waits at some steps.

python logged_rows.py FOLDER STEP=FILE,... ARGUMENTS OF MAIN

FOLDER/PORT.INDEX has a line for each step that this process begins: its number, and a digest of
each row that its devices hold. At STEP it waits until FOLDER/FILE is there.
"""

import hashlib
import json
import os
import pathlib
import sys
import time

import numpy as np
from absl import app

from commands.flags import parse_flags
from commands.session import main
from processes import preemption
from training import loop


def _logging(folder: pathlib.Path, waits: dict[int, str]):
  """Returns `loop.Run.step` with that."""
  inner = loop.Run.step
  port = os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2]
  log = folder / f"{port}.{os.environ['JAX_PROCESS_ID']}"

  def step(run, batch):
    shards = batch["tokens"].addressable_shards
    rows = [row.tobytes() for shard in shards for row in np.asarray(shard.data)]
    with open(log, "a") as file:
      digests = [hashlib.sha256(row).hexdigest()[:16] for row in rows]
      file.write(json.dumps([run.done + 1, digests]) + "\n")
    while (name := waits.get(run.done + 1)) and not (folder / name).exists():
      time.sleep(0.01)
    inner(run, batch)

  return step


if __name__ == "__main__":
  preemption.begin()
  where, given = pathlib.Path(sys.argv[1]), sys.argv[2]
  pairs = [pair.split("=") for pair in given.split(",") if pair]
  loop.Run.step = _logging(where, {int(number): name for number, name in pairs})
  app.run(preemption.ending(main), argv=[sys.argv[0], *sys.argv[3:]], flags_parser=parse_flags)
