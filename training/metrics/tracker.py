"""An experiment tracker in a process of its own: `python -P tracker.py NAME`; see tracker_sink.py.

It imports the tracker's package and the standard library alone, so that it runs in any environment
that has the package. It reads JSON lines from standard input: first what a `Start` has, then
`{"step": 3, "values": {"loss": 2.5}}` for each line of metrics. It ends when its input ends. To
standard output it writes `{"state": ...}`, by which a resumed run finds the tracker's run again,
`{"note": text}` for people, and `{"error": text}` or `{"done": true}` last. What the package prints
goes to standard error.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import queue
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

_MOST_LINES = 100  # that are sent together
_GAVE_UP = 3  # exit code

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
    wait_seconds: how long the last lines may take after the input has ended.
  """

  project: str
  name: str
  folder: str
  config: dict[str, Any]
  state: dict[str, Any] | None
  wait_seconds: float


class WandB:
  """Weights & Biases; without an API key its offline mode.

  `step` is a metric and the x-axis of all others. W&B's own step only grows, so that lines after a
  rollback would be lost.
  """

  def __init__(self, start: Start):
    """Opens the run, by the id of an earlier start."""
    import wandb

    known = start.state or {"id": secrets.token_hex(4)}
    options = {
      "project": os.environ.get("WANDB_PROJECT", start.project),
      "name": start.name,
      "id": known["id"],
      "dir": os.environ.get("WANDB_DIR", start.folder),
      "resume": "allow",
      "config": start.config,
      "settings": wandb.Settings(
        console="off", finish_timeout=0.8 * start.wait_seconds, finish_timeout_raises=True
      ),
    }
    try:
      self._run = wandb.init(**options)
    except wandb.errors.UsageError as error:  # no API key, and no terminal to ask for one
      if "API key" not in str(error):
        raise
      self._run = wandb.init(mode="offline", **options)
    self._run.define_metric("*", step_metric="step")
    self.state = {"id": known["id"]}
    starts = pathlib.Path(self._run.dir).parents[1]  # each start of the run has a folder in it
    offline = (
      f"offline; to upload: wandb sync {shlex.quote(str(starts))}/offline-run-*-{known['id']}"
    )
    self.note = offline if self._run.offline else self._run.url

  def log(self, lines: Sequence[Line]) -> None:
    """Sends lines; W&B has a thread of its own for that."""
    for step, values in lines:
      self._run.log({"step": step, **values})

  def close(self) -> None:
    """Waits until all is sent."""
    self._run.finish()


class MLflow:
  """MLflow; without MLFLOW_TRACKING_URI a SQLite file."""

  def __init__(self, start: Start):
    """Opens the run of an earlier start, or creates one."""
    from mlflow import MlflowClient, entities, exceptions

    self._metric, self._time = entities.Metric, 0
    path = os.path.join(start.folder, "mlflow.db")
    uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
    self._client = client = MlflowClient(tracking_uri=uri)
    self._id = (start.state or {}).get("id")
    if self._id is not None:
      try:
        client.update_run(self._id, status="RUNNING")
      except exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
          raise
        self._id = None
    if self._id is None:
      name = os.environ.get("MLFLOW_EXPERIMENT_NAME", start.project)
      experiment = client.get_experiment_by_name(name)
      number = experiment.experiment_id if experiment else self._create(name, start.folder)
      self._id = client.create_run(number, run_name=start.name).info.run_id
      params = [entities.Param(key, str(value)[:500]) for key, value in start.config.items()]
      for first in range(0, len(params), 100):
        client.log_batch(self._id, params=params[first : first + 100])
    self.state = {"id": self._id}
    local = uri.startswith("sqlite:")
    self.note = f"to open: mlflow ui --backend-store-uri {shlex.quote(uri)}" if local else uri

  def _create(self, name: str, folder: str) -> str:
    artifacts = None  # the server's default
    if "MLFLOW_TRACKING_URI" not in os.environ:
      artifacts = pathlib.Path(folder, "mlartifacts").absolute().as_uri()
    return self._client.create_experiment(name, artifact_location=artifacts)

  def log(self, lines: Sequence[Line]) -> None:
    """Sends lines in one request, each with a later time: it orders those of one step."""
    self._time = max(round(1000 * time.time()), self._time + 1)
    metrics = [
      self._metric(name, float(value), self._time + i, step)
      for i, (step, values) in enumerate(lines)
      for name, value in values.items()
    ]
    self._time += len(lines)
    for first in range(0, len(metrics), 1000):  # the most that a request may have
      self._client.log_batch(self._id, metrics=metrics[first : first + 1000])

  def close(self) -> None:
    """Marks the run as finished."""
    self._client.set_terminated(self._id)


class Trackio:
  """Trackio; local, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

  def __init__(self, start: Start):
    """Opens the run by its name, to which the first start adds an id."""
    os.environ.setdefault("TRACKIO_DIR", os.path.join(start.folder, "trackio"))  # before the import
    import trackio

    known = start.state or {"name": f"{start.name}-{time.strftime('%Y%m%d-%H%M%S')}"}
    self._run = trackio.init(
      project=start.project,
      name=known["name"],
      config=start.config,
      resume="allow",
      embed=False,
      auto_log_cpu=False,
    )
    self.state = {"name": known["name"]}
    folder = shlex.quote(os.environ["TRACKIO_DIR"])
    self.note = f"to open: TRACKIO_DIR={folder} trackio show --project {shlex.quote(start.project)}"

  def log(self, lines: Sequence[Line]) -> None:
    """Sends lines; Trackio has a thread of its own for that."""
    for step, values in lines:
      self._run.log(dict(values), step=step)

  def close(self) -> None:
    """Waits until all is written."""
    self._run.finish()


class Aim:
  """Aim; in `.aim` of a folder, or of AIM_REPO, which may be a server's `aim://` address."""

  def __init__(self, start: Start):
    """Opens the run of an earlier start, or creates one."""
    import aim

    place = os.environ.get("AIM_REPO", start.folder)
    repo = aim.Repo.from_path(place, init="://" not in place)
    options = {"repo": repo, "experiment": start.project, "capture_terminal_logs": False}
    options["system_tracking_interval"] = None
    known = (start.state or {}).get("hash")
    if known is not None and known not in repo.list_all_runs():
      known = None
    # A killed start has left the lock of its run; none is running, since each takes the run over.
    self._run = aim.Run(known, force_resume=True, **options) if known else aim.Run(**options)
    self._run.name = start.name
    self._run["config"] = start.config
    self.state = {"hash": self._run.hash}
    self.note = f"to open: aim up --repo {shlex.quote(place)}"

  def log(self, lines: Sequence[Line]) -> None:
    """Writes lines; Aim refuses numbers that are not finite."""
    for step, values in lines:
      for name, value in values.items():
        if math.isfinite(value):
          self._run.track(value, name=name, step=step)

  def close(self) -> None:
    """Closes the run."""
    self._run.close()


TRACKERS = {"aim": Aim, "mlflow": MLflow, "trackio": Trackio, "wandb": WandB}


def main(name: str) -> int:
  """Runs until standard input ends; returns the exit code."""
  # The run says when to stop; a signal to all processes of a job must not cost the last lines.
  for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(stop, signal.SIG_IGN)
  messages = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(2, 1)
  try:
    start = Start(**json.loads(sys.stdin.readline()))
    lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
    # The reader always reads, so that the run never waits for a slow network.
    threading.Thread(target=_read, args=(lines, start.wait_seconds), daemon=True).start()
    tracker = TRACKERS[name](start)
    _tell(messages, state=tracker.state)
    _tell(messages, note=tracker.note)
    while taken := _taken(lines):
      tracker.log(taken)
    tracker.close()
  except Exception as error:
    _tell(messages, error=" ".join(f"{type(error).__name__}: {error}".split()))
    return 1
  _tell(messages, done=True)
  return 0


def _read(lines: queue.SimpleQueue, wait_seconds: float) -> None:
  for text in sys.stdin:
    line = json.loads(text)
    lines.put((line["step"], line["values"]))
  lines.put(None)
  # The run has ended, perhaps by a kill. Nothing may keep this process for longer.
  time.sleep(wait_seconds)
  os._exit(_GAVE_UP)


def _taken(lines: queue.SimpleQueue) -> list[Line]:
  """Waits for a line; returns it and those that have come by then. None are left at the end."""
  taken = []
  while len(taken) < _MOST_LINES and (not taken or not lines.empty()):
    line = lines.get()
    if line is None:
      lines.put(None)
      break
    taken.append(line)
  return taken


def _tell(messages: TextIO, **message: Any) -> None:
  with contextlib.suppress(OSError):  # the run was killed
    messages.write(json.dumps(message) + "\n")


if __name__ == "__main__":
  sys.exit(main(sys.argv[1]))
