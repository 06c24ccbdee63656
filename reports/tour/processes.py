"""Several processes over one mesh: who feeds what, and two ways to hang that are caught."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from input_pipeline.batches import TrainingBatches
from input_pipeline.row_source import array_source
from processes import coordination as groups
from processes import preemption
from reports import run_files
from reports.tour.scene import DEVICES, Scene, draw_held, mesh_of, say, say_measured, show
from runtime import devices, exit_codes

TITLE = "Many processes"
OPENING = """
On several machines a run consists of several processes, one per host. Each has the devices of its
host (its local devices), and all share one mesh (the global devices). They run the same program,
and each feeds its own devices.

A collective waits for all of its devices. Processes that do not run the same operations in the
same order therefore wait for one another forever. There are two classic ways to get there: a
batch of another shape on one process, and a process that leaves the loop early. Both are tried
here with the application itself, as two processes on this machine.
"""
ROOT = pathlib.Path(__file__).parents[2]
LIMIT_SECONDS = 180  # they take seconds, or longer on a busy machine; a hang must not hang the tour
_STEP = re.compile(r"\] step \d+/")
TRAINING = (
  *(sys.executable, "main.py", "--simulate", "--config=configs/dp8.py:mlp_tutorial"),
  *("--config.model.model_size=64", "--config.metrics.every_steps=1"),
  "--config.checkpoint.every_steps=0",
)
ROWS = 16


def feed():
  """Makes one global batch over all processes; returns what this process has of it."""
  source = array_source("numbers", {"row": np.arange(ROWS, dtype=np.int32)})
  batches = TrainingBatches(source, global_batch_size=ROWS, seed=0, shuffle=False)
  mesh = mesh_of(data=DEVICES)
  batch = batches.batch(0, {"row": NamedSharding(mesh, P("data"))})["row"]
  return {
    "process": jax.process_index(),
    "local": [device.id for device in jax.local_devices()],
    "global": [device.id for device in jax.devices()],
    "shape": batch.shape,
    "rows": {shard.device.id: shard.data.tolist() for shard in batch.addressable_shards},
  }


def who_feeds_what():
  """Starts two processes, each with half of the devices, and each runs the function above.

  The batch has the same global shape on both. Each reads the rows that its own devices hold.
  """
  _, out, _ = launched([sys.executable, "-m", "reports.tour.processes"])
  said = [json.loads(line.partition("] ")[2]) for line in out.splitlines() if "] {" in line]
  texts = {}
  for one in sorted(said, key=lambda one: one["process"]):
    place = {device: number for number, device in enumerate(one["global"])}
    for device, rows in one["rows"].items():
      texts[place[int(device)]] = f"process {one['process']}: rows {rows[0]} to {rows[-1]}"
    say(
      f"Process {one['process']} has {len(one['local'])} of {len(place)} devices. Its batch "
      f"has shape {one['shape']}, and it feeds {sum(map(len, one['rows'].values()))} rows."
    )
  draw_held("what each device gets", mesh_of(data=DEVICES), texts)


def another_shape():
  """Trains with batches of 32 rows on process 0, and of 48 rows on process 1.

  Nothing hangs: both processes refuse it before the first step.
  """
  refused = "--config.data.global_batch_size=48"
  trained("--config.data.global_batch_size=32", "--config.training.steps=2", second=refused)


def leaves_early():
  """Trains, and sends SIGTERM to process 1 alone once the first step has been made.

  A scheduler does this to a machine that it wants back. The other process gets no signal. Nothing
  hangs: both leave after the same step, which is saved.
  """
  steps = "--config.training.steps=2000"
  trained("--config.data.global_batch_size=32", steps, stopped=1)


# ------------------------------ two processes ------------------------------


def trained(*arguments: str, second: str = "", stopped: int | None = None) -> None:
  """Runs main.py as two processes, and says how they ended; see `launched`."""
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / "run"
    command = [*TRAINING, *arguments, f"--workdir={workdir}"]
    codes, out, seconds = launched(command, second=second, stopped=stopped)
    run = run_files.read(workdir) if workdir.exists() else None
  for index, code in enumerate(codes):
    say(f"Process {index}: exit code {code} ({exit_codes.MEANINGS[code]}).")
  if run is None:
    said = [line.partition("] ")[2] for line in out.splitlines() if line.startswith("[")]
    show("\n".join(said))
    say("No step was made, and no workdir.")
  else:
    assert run.on_disk == [run.done], out
    say("One step is saved, the last one made.")
  say_measured(f"It took {seconds:.0f} s; steps made: {run.done if run else 0}.")


def launched(
  command: Sequence[str], *, second: str = "", stopped: int | None = None
) -> tuple[list[int], str, float]:
  """Runs a command as two processes; returns their exit codes, what they printed, and the seconds.

  Args:
    command: of both.
    second: a further argument of process 1.
    stopped: a process that is sent SIGTERM when the first step has been made.

  Raises:
    RuntimeError: one hangs.
  """
  if second:
    script = f'test "$JAX_PROCESS_ID" = 1 && exec "$@" {second}; exec "$@"'
    command = ["sh", "-c", script, "sh", *command]
  began, lines = time.monotonic(), []
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder) / "report"
    environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
    running = subprocess.Popen(
      [
        sys.executable,
        "-m",
        "processes.launch",
        "--processes=2",
        f"--report={report}",
        "--",
        *command,
      ],
      cwd=ROOT,
      env={**environment, "PYTHONPATH": str(ROOT)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    limit = threading.Timer(LIMIT_SECONDS, running.terminate)
    limit.start()
    # A stop of the tour ends these, too: the Ctrl-C of a terminal reaches them, SIGTERM does not.
    with preemption.undone(running.terminate), running:
      for line in running.stdout:
        lines.append(line)
        if stopped is not None and _STEP.search(line):
          os.kill(json.loads(report.read_text())["pids"][stopped], signal.SIGTERM)
          stopped = None
    limit.cancel()
    out = "".join(lines)
    ended = json.loads(report.read_text().splitlines()[-1])
  if ended["killed"]:
    raise RuntimeError(f"process {ended['killed'][0]} hangs, and was killed:\n{out}")
  return ended["codes"], out, time.monotonic() - began


def main() -> None:
  """Joins the other process, feeds, prints, and leaves with it."""
  joined = groups.connect(start_timeout_seconds=60, heartbeat_seconds=100)
  devices.start({"data": DEVICES}, simulate=True, processes=joined.count)
  print(json.dumps(feed()), flush=True)
  groups.part()


SCENES = (
  Scene("Who feeds what", who_feeds_what, parts=(feed,)),
  Scene("A batch of another shape", another_shape),
  Scene("A process that leaves early", leaves_early),
)

if __name__ == "__main__":
  main()
