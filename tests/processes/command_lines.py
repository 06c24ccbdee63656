"""Command lines that take seconds, and what they leave."""

import json
import pathlib

from tests.helpers.compiling import FAST

# A classifier that compiles faster than anything else here; four devices, batches of 12.
MLP = [
  "--config=configs/dp8.py:mlp",
  "--config.mesh.data=4",
  "--config.model.model_size=16",
  "--config.data.global_batch_size=12",
  "--config.training.steps=3",
  "--config.optimizer.schedule=constant",
  "--config.optimizer.warmup_steps=0",
  "--config.evaluation.every_steps=0",
  "--config.evaluation.steps=2",
  "--config.evaluation.final_steps=2",
  "--config.metrics.every_steps=1",
  "--config.metrics.report=False",
  "--config.metrics.tensorboard=False",
  "--config.checkpoint.every_steps=0",
  f"--config.compiler_options={FAST}",
  "--config.processes.heartbeat_seconds=20",
]


def losses(workdir: pathlib.Path) -> dict[int, float]:
  """Returns step -> loss."""
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return {line["step"]: line["loss"] for line in lines if "loss" in line}


def evaluations(workdir: pathlib.Path) -> dict[int, float]:
  """Returns step -> loss on the evaluation split."""
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}


def everything(folder: pathlib.Path) -> list[str]:
  """Returns what lies in a folder."""
  return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
