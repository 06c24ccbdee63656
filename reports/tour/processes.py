"""Several processes over one mesh: who feeds what, and two ways to hang that are caught."""

import json
import sys

from reports.drawings import holdings
from reports.run_files import Run
from reports.tour import launching, scene
from reports.tour.member import feed
from reports.tour.scene import DEVICES, Scene, Shown, mesh_of
from runtime import exit_codes

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

TRAINING = (
  "--simulate",
  "--config=configs/dp8.py:mlp_tutorial",
  "--config.model.model_size=64",
  "--config.metrics.every_steps=1",
  "--config.checkpoint.every_steps=0",
)


def who_feeds_what(data=DEVICES, tensor=1):
  """Starts two processes, each with half of the devices, and each runs the function above.

  The batch has the same global shape on both. Each reads the rows that its own devices hold.
  """
  sizes = {"data": data, "tensor": tensor}
  command = [sys.executable, "-m", "reports.tour.member", json.dumps(sizes)]
  return sizes, launching.start(command)


def _who_feeds_what(result) -> Shown:
  sizes, ended = result
  said = [line.partition("] ")[2] for line in ended.out.splitlines() if "] {" in line]
  members = sorted(map(json.loads, said), key=lambda member: member["process"])
  if len(members) < 2:
    raise RuntimeError(f"two processes were started, and {len(members)} answered:\n{ended.out}")
  place = {device: number for number, device in enumerate(members[0]["global"])}
  findings, fed, values = [], [], {}
  for member in members:
    rows = sorted({row for held in member["rows"].values() for row in held})
    fed += rows
    findings.append(
      f"Process {member['process']} has devices {_list(place[d] for d in member['local'])}; there "
      f"are {len(member['global'])} in all. Its batch has shape {member['shape']}, and it feeds "
      f"rows {_list(rows)}."
    )
    for device, held in member["rows"].items():
      values[place[int(device)]] = f"process {member['process']}: rows {_list(held)}"
  often = sorted({fed.count(row) for row in range(members[0]["shape"][0])})
  if often == [1]:
    findings.append("Each row is fed by one process.")
  else:
    findings.append(f"Each row is fed by {' or '.join(map(str, often))} processes.")
  drawing = holdings("what each device gets", mesh_of(**sizes), values)
  return Shown(findings, [drawing])


def _list(numbers) -> str:
  """Returns `0 to 3` for neighbours, else `0, 2 and 5`."""
  numbers = list(numbers)
  if numbers == list(range(numbers[0], numbers[-1] + 1)):
    return scene.span((numbers[0], numbers[-1] + 1))
  return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def another_shape(first=32, second=48):
  """Trains with batches of 32 rows on process 0, and of 48 rows on process 1."""
  return launching.train(
    *TRAINING,
    f"--config.data.global_batch_size={first}",
    "--config.training.steps=2",
    second=f"--config.data.global_batch_size={second}",
  )


def leaves_early(stopped=1, steps=2000):
  """Trains, and sends SIGTERM to process 1 alone once the first step has been made.

  A scheduler does this to a machine that it wants back. The other process gets no signal.
  """
  return launching.train(
    *TRAINING,
    "--config.data.global_batch_size=32",
    f"--config.training.steps={steps}",
    stopped=stopped,
  )


def _run(result: tuple[launching.Ended, Run | None]) -> Shown:
  ended, run = result
  codes = {index: ended.codes.get(index, 0) for index in range(2) if index not in ended.hung}
  if ended.hung:
    names = " and ".join(f"process {index}" for index in ended.hung)
    findings = [f"Hangs, and has to be killed: {names}."]
  else:
    findings = ["Nothing hangs: both processes end by themselves."]
  findings += [
    f"Process {index}: exit code {code} ({exit_codes.MEANINGS.get(code, 'failed')})."
    for index, code in codes.items()
  ]
  refusal = [
    line.partition("] ")[2]
    for line in ended.out.splitlines()
    if line.startswith("[") and ("refused:" in line or ended.code == exit_codes.REFUSED)
  ]
  if run is None:
    findings.append("No step was made, and no workdir.")
  elif run.on_disk == [run.done]:
    findings.append("Both leave after the same step: one step is saved, the last one made.")
  else:
    findings.append(f"Steps logged: {len(run.steps)}; steps saved: {len(run.on_disk)}.")
  measured = [f"It took {ended.seconds:.0f} s; steps made: {run.done if run else 0}."]
  return Shown(findings, text="\n".join(refusal), measured=measured)


SCENES = (
  Scene("Who feeds what", who_feeds_what, _who_feeds_what, parts=(feed,)),
  Scene("A batch of another shape", another_shape, _run),
  Scene("A process that leaves early", leaves_early, _run),
)
