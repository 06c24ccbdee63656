"""Forecasts beside the runs that they predict, and an ablation that sweeps rank.

  python -m benchmarks.forecast_accuracy --predict=bytes    # trains the ladder, writes the forecast
  python -m benchmarks.forecast_accuracy --train=bytes      # trains the run, once it is predicted
  python -m benchmarks.forecast_accuracy --ablation
  python -m benchmarks.forecast_accuracy                    # prints the tables of docs/forecast.md
  python -m benchmarks.forecast_accuracy --write=headers --of=FOLDER    # the text of a pair

`headers` and `packages_1024` are for a GPU. Pairs of headers and packages read files that --write
makes: the headers of PyTorch's folder torch/include, and the modules of the packages of an
environment. The tokenizer of `packages_1024` is trained by `main.py prepare` with
--train_tokenizer=1024, and its folder copied to runs/forecast_accuracy/packages_1024.
The record is docs/forecast.json. A prediction is committed before its run is trained: the history
of that file shows which was first. Each run predicted takes 8 times the compute of the largest of
its ladder.
"""

import contextlib
import functools
import gzip
import hashlib
import json
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags

from benchmarks.timing import held_out, job_of, table, trained
from input_pipeline.batches import TrainingBatches
from reports import forecast_report, run_files
from reports.sweep_report import DONE, Entry, Result
from training.splits import evaluation_batches, training_batches

_PREDICT = flags.DEFINE_string("predict", None, "The pair whose ladder is trained.")
_TRAIN = flags.DEFINE_string("train", None, "The pair whose large run is trained.")
_WRITE = flags.DEFINE_enum("write", None, ["headers", "packages"], "The text that is written.")
_OF = flags.DEFINE_string("of", None, "The folder whose files it is made of.")
_ABLATION = flags.DEFINE_boolean("ablation", False, "Ten sweeps of an effect that is known.")

ROOT = pathlib.Path(__file__).parents[1]
RECORD = ROOT / "docs" / "forecast.json"
TEXT = "runs/forecast_accuracy"
RUNS = ROOT / TEXT
METRIC = "eval_bits_per_byte"
_FAMILY = (
  "model.layers=4 model.kv_heads=8 optimizer.learning_rate=0.002 evaluation.final_steps=400 "
  "metrics.report=False metrics.tensorboard=False"
)
# Batches of 8,192 tokens (4,096 of the tokenizer's) and two layers at each width.
_ON_A_GPU = (
  "model.model_size=320 model.heads=10 model.kv_heads=10 model.layers=2 data.sequence_length=256 "
  "optimizer.learning_rate=0.002 evaluation.final_steps=400 metrics.report=False "
  "metrics.tensorboard=False --widths=96,128,160,192,256"
)
_SMALLER = "data.global_batch_size=4 --widths=32,48,64,80 --flops=8e10,1.4e11,2.6e11"
# Many steps of 1,024 tokens, no width below 0.4 of the target's.
_MANY_STEPS = (
  "model.layers=2 data.sequence_length=128 data.global_batch_size=8 optimizer.learning_rate=0.002 "
  "evaluation.final_steps=400 metrics.report=False metrics.tensorboard=False"
)
# And no run so short that its loss still falls faster than a power of the tokens: 1,200 steps.
_LONGER = "model.model_size=160 model.heads=10 model.kv_heads=10 --widths=64,80,96,112"
# Name -> the words of a forecast, whose budget is 8 times the compute of the last of --flops.
PAIRS = {
  "bytes": f"configs/single:model=lm,data=python_source {_FAMILY} data.global_batch_size=8 "
  "--widths=32,48,64,80,96 --flops=6e10,1e11,1.8e11,5e11 --budget='754000 tokens'",
  "bpe": f"configs/single:model=lm,data=python_source {_FAMILY} data.train_tokenizer=512 "
  f"model.vocabulary_size=512 {_SMALLER} --budget='377000 tokens'",
  "bpe_1024": f"configs/single:model=lm,data=python_source {_FAMILY} data.train_tokenizer=1024 "
  "model.vocabulary_size=1024 data.global_batch_size=4 --widths=32,48,64,80 "
  "--flops=1.2e11,2e11,3.2e11 --budget='433000 tokens'",
  "bytes_many_steps": f"configs/single:model=lm,data=python_source {_MANY_STEPS} "
  "model.model_size=176 model.heads=11 model.kv_heads=11 --widths=80,96,112,128,144 "
  "--flops=1.5e12,3e12,6e12 --budget='9397000 tokens'",
  "bytes_long": f"configs/single:model=lm,data=python_source {_MANY_STEPS} {_LONGER},128 "
  "--flops=2.6e12,4.2e12,6.9e12 --budget='13006000 tokens'",
  "packages_long": f"configs/single:model=lm,data=text data.files={TEXT}/packages.jsonl.gz "
  f"{_MANY_STEPS} {_LONGER} --flops=2.9e12,4.5e12,6.9e12 --budget='13006000 tokens'",
  "bpe_long": f"configs/single:model=lm,data=python_source {_MANY_STEPS} {_LONGER} "
  "data.train_tokenizer=512 model.vocabulary_size=512 --flops=3e12,4.4e12,6.4e12 "
  "--budget='11403000 tokens'",
  "headers": f"configs/single:model=lm,data=text data.files={TEXT}/headers.jsonl.gz {_ON_A_GPU} "
  "data.global_batch_size=32 --flops=1.2e13,2.5e13,5e13 --budget='24278000 tokens'",
  "packages_1024": f"configs/single:model=lm,data=text data.files={TEXT}/packages.jsonl.gz "
  f"{_ON_A_GPU} data.global_batch_size=16 model.vocabulary_size=1024 "
  f"data.tokenizer={TEXT}/packages_1024 --flops=6e12,1.2e13,2.5e13 --budget='11100000 tokens'",
}
# Name -> the files of a text, of which each is a document; in the order of a hash of their paths.
TEXTS = {"headers": (".h", ".hpp", ".cuh"), "packages": (".py",)}
DOCUMENT, LARGEST = range(201, 200_000), 60_000_000  # bytes, of a document and of all of them
# The wider model, with everything else the same, has the lower loss.
WIDTHS, STEPS, SWEEPS, SEEDS = (32, 64, 128), 60, 10, 3
EVALUATED = 24  # batches, the same of each run


def write(name: str, folder: pathlib.Path) -> None:
  """Writes the text of a pair: each file once, those that are UTF-8."""
  paths = (path for path in folder.rglob("*") if path.suffix in TEXTS[name] and path.is_file())
  order = {hashlib.sha256(str(path.relative_to(folder)).encode()).digest(): path for path in paths}
  seen, total = set(), 0
  RUNS.mkdir(parents=True, exist_ok=True)
  with gzip.open(RUNS / f"{name}.jsonl.gz", "wt") as lines:
    for _, path in sorted(order.items()):
      data = path.read_bytes()
      if len(data) not in DOCUMENT or data in seen or total > LARGEST:
        continue
      with contextlib.suppress(UnicodeDecodeError):
        lines.write(json.dumps({"text": data.decode()}) + "\n")
        total += len(data)
      seen.add(data)


def predict(name: str, record: dict) -> None:
  """Trains the ladder of a pair, and notes what is predicted."""
  folder = RUNS / name
  _application("forecast", *shlex.split(PAIRS[name]), f"--workdir={folder}")
  found = json.loads((folder / "forecast.json").read_text())
  [target] = found["targets"]
  keys = ("parameters", "tokens", "flops", "bits_per_byte", "times_largest", "epochs", "train")
  record["pairs"][name] = {
    "runs": len(found["runs"]),
    **{key: found[key] for key in ("coefficients", "noise", "held_out")},
    **{key: target[key] for key in keys},
  }


def train(name: str, record: dict) -> None:
  """Trains the run of a pair that is predicted, and notes its bits per byte."""
  pair = record["pairs"][name]
  folder = RUNS / f"{name}_predicted"
  _application(*shlex.split(pair["train"])[2:], f"--workdir={folder}")
  pair["measured"] = run_files.read(folder).points(METRIC)[-1][1]


def _application(*words: str) -> None:
  subprocess.run([sys.executable, "main.py", *words], cwd=ROOT, check=True)


def ablation() -> list[dict[str, int]]:
  """Returns of each wider model in how many sweeps it is first, and beyond the spread of seeds."""
  losses = {width: _losses(width) for width in WIDTHS}
  return [_beside(losses, min(WIDTHS), width) for width in WIDTHS[1:]]


def _losses(width: int) -> list[float]:
  """Returns what is reached by a width with each seed of all sweeps."""
  keys = {"model.model_size": width, "model.layers": 2, "model.heads": width // 16}
  keys |= {"model.kv_heads": width // 16, "model.base_width": 32, "training.steps": STEPS}
  keys |= {"data.global_batch_size": 8, "optimizer.learning_rate": 8e-3}
  job = job_of("lm", keys)
  step, init = job.compile_train_step().function, job.compile_init().function
  evaluate, split = job.compile_eval_step().function, evaluation_batches(job.config)
  losses = []
  for seed in range(SWEEPS * SEEDS):
    job.config.unlock()
    job.config.seed = seed
    batches = training_batches(job.config)
    batch = functools.partial(_batch, batches, job.batch_shardings)
    state, _ = trained(step, init(jax.random.key(seed)), batch, STEPS)
    losses.append(held_out(evaluate, state, split, job.batch_shardings, EVALUATED))
  return losses


def _beside(losses: dict[int, list[float]], width: int, wider: int) -> dict[str, int]:
  """Returns what the sweeps of two widths say, three seeds of each at a time."""
  right = beyond = 0
  for number in range(SWEEPS):
    seeds = range(number * SEEDS, (number + 1) * SEEDS)
    entries = [
      Entry(
        f"{one}_{seed}",
        {"model.model_size": str(one), "seed": str(seed)},
        DONE,
        _run(losses[one][seed]),
      )
      for one in (width, wider)
      for seed in seeds
    ]
    [effect] = Result("ablation", entries).effects()
    first = next(iter(effect.means)) == str(wider)
    right += first
    beyond += first and not effect.within
  return {"width": width, "wider": wider, "sweeps": SWEEPS, "first": right, "beyond": beyond}


def _batch(batches: TrainingBatches, shardings: Any, number: int) -> Any:
  return batches.batch(number, shardings)


def _run(loss: float) -> run_files.Run:
  """Returns a run that has nothing but a last evaluation."""
  evaluations = [{"step": STEPS, "eval_loss": loss}]
  return run_files.Run("", "", {}, [], evaluations, [], None, [], None, [], 0)


def rows(record: dict) -> list[list[str]]:
  """Returns a row for each pair: what was predicted, and what came out."""
  found = []
  for name, pair in record["pairs"].items():
    loss, measured = pair["bits_per_byte"], pair.get("measured")
    cells = [name, str(pair["runs"]), f"{pair['parameters']:,}", f"{pair['tokens']:,.0f}"]
    cells += [f"{pair['times_largest']:.2f}", forecast_report.interval(loss)]
    if measured is None:
      cells += ["not trained yet", ""]
    else:
      inside = "inside" if loss["low"] <= measured <= loss["high"] else "outside"
      cells += [f"{measured:.3f}", f"{100 * (loss['value'] / measured - 1):+.2f} %, {inside}"]
    found.append(cells)
  return found


def main(_: Sequence[str]) -> None:
  """Adds to the record, and prints it."""
  record = json.loads(RECORD.read_text()) if RECORD.exists() else {"pairs": {}, "ablation": []}
  if _WRITE.value:
    write(_WRITE.value, pathlib.Path(_OF.value))
  if _PREDICT.value:
    predict(_PREDICT.value, record)
  if _TRAIN.value:
    train(_TRAIN.value, record)
  if _ABLATION.value:
    record["ablation"] = ablation()
  RECORD.write_text(json.dumps(record, indent=1) + "\n")
  head = ["pair", "runs", "parameters", "tokens", "times the largest", "predicted", "measured"]
  print(table([*head, "error"], rows(record)))
  for one in record["ablation"]:
    print(
      f"ablation: width {one['wider']} beside {one['width']} is first in {one['first']} of "
      f"{one['sweeps']} sweeps, beyond the spread of seeds in {one['beyond']}"
    )


if __name__ == "__main__":
  app.run(main)
