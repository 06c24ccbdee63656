"""An experiment tracker in a process of its own, as built_in_sinks.py starts it.

It is `python -P tracker.py NAME`. It imports the tracker's package and the standard library alone,
so that it runs in any environment that has the package. It reads JSON lines from standard input:
first what a `Start` has, then `[3, {"loss": 2.5}]` for each line of metrics. It ends when its input
ends. To standard output it writes `{"state": ..., "note": ...}` of `Opened`, and last
`{"done": true}` or `{"error": text}`. What the package prints goes to standard error.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import secrets
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Line = tuple[int, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Start:
  """What a tracker is given.

  Attributes:
    project: the name under which runs are compared.
    name: of the run.
    folder: where the package keeps files, unless its own environment variable says otherwise.
    config: key -> value, flat.
    state: of the tracker's run to continue; None starts a new one.
    wait_seconds: how long the last lines may take after the run has ended.
  """

  project: str
  name: str
  folder: str
  config: dict[str, Any]
  state: dict[str, Any] | None
  wait_seconds: float


@dataclasses.dataclass(frozen=True)
class Opened:
  """A tracker's run.

  Attributes:
    state: by which a resumed run finds it again.
    note: where to look at it.
    log: sends lines.
    close: waits until all are sent.
  """

  state: dict[str, Any]
  note: str
  log: Callable[[Sequence[Line]], None]
  close: Callable[[], None]


def open_wandb(start: Start) -> Opened:
  """Opens a run of Weights & Biases; without an API key in its offline mode.

  `step` is a metric and the x-axis of all others. W&B's own step only grows, so that lines after a
  rollback would be lost.
  """
  import wandb

  state = start.state or {"id": secrets.token_hex(4)}
  options = {
    "project": os.environ.get("WANDB_PROJECT", start.project),
    "name": start.name,
    "id": state["id"],
    "dir": os.environ.get("WANDB_DIR", start.folder),
    "resume": "allow",
    "config": start.config,
    "settings": wandb.Settings(
      console="off", finish_timeout=0.8 * start.wait_seconds, finish_timeout_raises=True
    ),
  }
  try:
    run = wandb.init(**options)
  except wandb.errors.UsageError as error:  # no API key, and no terminal to ask for one
    if "API key" not in str(error):
      raise
    run = wandb.init(mode="offline", **options)
  run.define_metric("*", step_metric="step")
  starts = pathlib.Path(run.dir).parents[1]  # each start of the run has a folder in it
  offline = f"offline; to upload: wandb sync {shlex.quote(str(starts))}/offline-run-*-{state['id']}"

  def log(lines: Sequence[Line]) -> None:
    for step, values in lines:
      run.log({"step": step, **values})

  return Opened(state, offline if run.offline else run.url, log, run.finish)


def open_mlflow(start: Start) -> Opened:
  """Opens a run of MLflow; without MLFLOW_TRACKING_URI in a SQLite file."""
  from mlflow import MlflowClient, entities, exceptions

  local = f"sqlite:///{os.path.join(start.folder, 'mlflow.db')}"
  uri = os.environ.get("MLFLOW_TRACKING_URI", local)
  client, state, latest = MlflowClient(tracking_uri=uri), start.state, 0
  if state is not None:
    try:
      client.update_run(state["id"], status="RUNNING")
    except exceptions.MlflowException as error:
      if error.error_code != "RESOURCE_DOES_NOT_EXIST":
        raise
      state = None
  if state is None:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", start.project)
    if experiment := client.get_experiment_by_name(name):
      number = experiment.experiment_id
    else:
      artifacts = pathlib.Path(start.folder, "mlartifacts").absolute().as_uri()
      number = client.create_experiment(name, artifacts if uri == local else None)
    state = {"id": client.create_run(number, run_name=start.name).info.run_id}
    params = [entities.Param(key, str(value)[:500]) for key, value in start.config.items()]
    for first in range(0, len(params), 100):  # the most that a request may have
      client.log_batch(state["id"], params=params[first : first + 100])

  def log(lines: Sequence[Line]) -> None:
    nonlocal latest
    metrics = []
    for step, values in lines:
      latest = max(latest + 1, round(1000 * time.time()))  # orders the lines of one step
      metrics += [entities.Metric(key, float(x), latest, step) for key, x in values.items()]
    for first in range(0, len(metrics), 1000):  # the most that a request may have
      client.log_batch(state["id"], metrics=metrics[first : first + 1000])

  note = f"to open: mlflow ui --backend-store-uri {shlex.quote(uri)}"
  note = note if uri.startswith("sqlite:") else uri
  return Opened(state, note, log, lambda: client.set_terminated(state["id"]))


def open_trackio(start: Start) -> Opened:
  """Opens a run of Trackio by its name, to which the first start adds the time.

  It is local, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set.
  """
  os.environ.setdefault("TRACKIO_DIR", os.path.join(start.folder, "trackio"))  # before the import
  import trackio

  state = start.state or {"name": f"{start.name}-{time.strftime('%Y%m%d-%H%M%S')}"}
  run = trackio.init(
    project=start.project,
    name=state["name"],
    config=start.config,
    resume="allow",
    embed=False,
    auto_log_cpu=False,
  )

  def log(lines: Sequence[Line]) -> None:
    for step, values in lines:
      run.log(values, step=step)

  folder = shlex.quote(os.environ["TRACKIO_DIR"])
  note = f"to open: TRACKIO_DIR={folder} trackio show --project {shlex.quote(start.project)}"
  return Opened(state, note, log, run.finish)


def open_aim(start: Start) -> Opened:
  """Opens a run of Aim in `.aim` of a folder, or of AIM_REPO, which may be a server's `aim://`."""
  import aim

  place = os.environ.get("AIM_REPO", start.folder)
  repo = aim.Repo.from_path(place, init="://" not in place)
  known = (start.state or {}).get("hash")
  # A killed start has left the lock of its run; none is running, since each takes the run over.
  run = aim.Run(
    known if known in repo.list_all_runs() else None,
    repo=repo,
    experiment=start.project,
    force_resume=True,
    capture_terminal_logs=False,
    system_tracking_interval=None,
  )
  run.name = start.name
  run["config"] = start.config

  def log(lines: Sequence[Line]) -> None:
    for step, values in lines:
      for name, value in values.items():
        if math.isfinite(value):  # Aim refuses others
          run.track(value, name=name, step=step)

  return Opened({"hash": run.hash}, f"to open: aim up --repo {shlex.quote(place)}", log, run.close)


TRACKERS = {
  "aim": open_aim,
  "mlflow": open_mlflow,
  "trackio": open_trackio,
  "wandb": open_wandb,
}


def main(name: str) -> int:
  """Runs until standard input ends; returns the exit code."""
  # The run says when to stop; a signal to all processes of a job must not cost the last lines.
  for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(stop, signal.SIG_IGN)
  # Under other numbers, which what the package prints and starts does not have.
  lines, messages = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)

  def tell(**message: Any) -> None:
    with contextlib.suppress(OSError):  # the run was killed
      messages.write(json.dumps(message).encode() + b"\n")

  try:
    start = Start(**json.loads(lines.readline()))
    bound = threading.Thread(target=_end, args=(messages, start.wait_seconds), daemon=True)
    bound.start()
    run = TRACKERS[name](start)
    tell(state=run.state, note=run.note)
    part = b""
    while content := lines.read1():  # all that have come
      *whole, part = (part + content).split(b"\n")
      run.log([json.loads(line) for line in whole])
    run.close()
  except Exception as error:
    tell(error=" ".join(f"{type(error).__name__}: {error}".split()))
    return 1
  tell(done=True)
  return 0


def _end(messages: io.FileIO, seconds: float) -> None:
  """Ends this process some seconds after a run that was killed, whatever the package does."""
  reader = select.poll()
  reader.register(messages, 0)
  reader.poll()  # returns once nobody can read the messages any more
  time.sleep(seconds)
  os.kill(os.getpid(), signal.SIGKILL)  # nobody is left to read a code


if __name__ == "__main__":
  sys.exit(main(sys.argv[1]))
