"""Reads what trackers have kept, by their own packages; run by the Python that has them.

`python -P read_trackers.py FOLDER` prints JSON: tracker -> run -> metric -> [[step, value], ...] in
the order in which the tracker has them.
"""

import collections
import json
import os
import pathlib
import struct
import sys


def wandb(folder):
  from wandb.proto import wandb_internal_pb2

  runs = collections.defaultdict(lambda: collections.defaultdict(list))
  for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
    for raw in records(path.read_bytes()):
      record = wandb_internal_pb2.Record.FromString(raw)
      if record.WhichOneof("record_type") == "history":
        items = record.history.item
        values = {x.key or x.nested_key[0]: json.loads(x.value_json) for x in items}
        for name in values.keys() - {"step"}:
          runs[path.stem.removeprefix("run-")][name].append([values["step"], values[name]])
  return runs


def records(content):
  """Yields the records of a file in LevelDB's log format, behind W&B's 7 bytes."""
  block, at, parts = 32768, 7, b""
  while at + 7 <= len(content):
    if block - at % block < 7:
      at += block - at % block
      continue
    _, length, kind = struct.unpack_from("<IHB", content, at)
    parts += content[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):  # full, or last
      yield parts
      parts = b""


def mlflow(folder):
  from mlflow import MlflowClient

  client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
  runs = {}
  for run in client.search_runs([each.experiment_id for each in client.search_experiments()]):
    identity = run.info.run_id
    runs[identity] = {
      name: [[point.step, point.value] for point in client.get_metric_history(identity, name)]
      for name in run.data.metrics
    }
  return runs


def trackio(folder):
  os.environ["TRACKIO_DIR"] = str(folder / "trackio")
  from trackio.sqlite_storage import SQLiteStorage

  runs = {}
  for name in SQLiteStorage.get_runs("meshwright"):
    runs[name] = collections.defaultdict(list)
    for line in SQLiteStorage.get_logs("meshwright", name):
      for metric in line.keys() - {"step", "timestamp"}:
        runs[name][metric].append([line["step"], line[metric]])
  return runs


def aim(folder):
  import aim

  repo = aim.Repo.from_path(str(folder))
  repo._recreate_index()  # as `aim storage reindex`, and as `aim up` does from time to time
  runs = {run: {} for run in repo.list_all_runs()}
  for metric in repo.query_metrics("True", report_mode=aim.sdk.types.QueryReportMode.DISABLED):
    points = [[step, value] for step, (value, *_) in metric.data.items()]
    runs[metric.run.hash][metric.name] = points
  return runs


if __name__ == "__main__":
  folder = pathlib.Path(sys.argv[1])
  print(json.dumps({each.__name__: each(folder) for each in (wandb, mlflow, trackio, aim)}))
