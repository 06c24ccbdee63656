r"""Predictions of `plan` next to published throughputs: tokens per second and device.

  pip install -r requirements-plan.txt
  python -m benchmarks.planner_accuracy [--only=v6e] [--write]

Compiles the train step of each row for its devices (minutes each on two cores, no TPU) and prints
predicted / published; --write writes docs/planner_accuracy.md. The efficiency constants are those
of analysis/chips.py, one set for all rows, fixed before the rows were compared.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile

from absl import app, flags

from analysis.chips import REASONS, Rates

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planner_accuracy.md"
_ONLY = flags.DEFINE_string("only", "", "Rows whose topology or model has this in its name.")
_WRITE = flags.DEFINE_bool("write", False, "Write docs/planner_accuracy.md.")


@dataclasses.dataclass(frozen=True)
class Row:
  """A published speed, and the config that comes nearest to it here.

  Attributes:
    model: preset.
    topology: as published.
    rows: of the global batch, per device.
    length: tokens of a row.
    rematerialization: of `training.rematerialization`.
    published: tokens per second and device.
    mfu: as published, with what it counts of attention.
    differs: how the settings of the published run differ.
  """

  model: str
  topology: str
  rows: int
  length: int
  rematerialization: str
  published: float
  mfu: str
  differs: str


# Source: the tiering page of MaxText's documentation, and its benchmark configs.
ROWS = (
  Row(
    *("llama3_8b", "v6e:16x16", 4, 8192, "full", 7207, "45.46 % (scores halved)"),
    "offloads the layers' inputs, queries, keys, values and attention outputs to the host, "
    "which ours recomputes; attention blocks of 2048, ours of 512",
  ),
  Row(
    *("llama2_70b", "v5p:8x8x8", 1, 4096, "dots", 692, "65.4 % (scores in full)"),
    "saves the outputs of all matmuls but the MLP's first; ours saves all, for which 4 rows per "
    "device would take 215 GiB, so it has 1",
  ),
  Row(
    *("llama2_70b", "v6e:16x16", 3, 4096, "full", 900, "43.8 %"),
    "has 4 rows per device, for which ours would take 34.9 GiB; attention blocks of 1024 and 2048, "
    "ours of 512",
  ),
)


def devices(row: Row) -> int:
  """Returns how many devices a topology has: none of these is of chips of two."""
  count = 1
  for size in row.topology.partition(":")[2].split("x"):
    count *= int(size)
  return count


def arguments(row: Row) -> list[str]:
  """Returns the command line of a row, but for where it writes to."""
  count = devices(row)
  return [
    *("plan", f"--config=configs/fsdp8.py:model={row.model},data=python_source"),
    f"--topology={row.topology}",
    f"--config.mesh.fsdp={count}",
    f"--config.data.global_batch_size={count * row.rows}",
    f"--config.data.sequence_length={row.length}",
    f"--config.training.rematerialization={row.rematerialization}",
    "--config.training.loss_chunks=8",
  ]


def plan(row: Row) -> dict:
  """Returns plan.json of a row.

  Raises:
    RuntimeError: there is none.
  """
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, str(ROOT / "main.py"), *arguments(row), f"--workdir={folder}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 3):
      raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}")
    return json.loads(pathlib.Path(folder, "plan.json").read_text())


def line(row: Row, found: dict) -> str:
  """Returns a row of the table."""
  where = f"{row.model}, {row.topology}, {row.rows} x {row.length}"
  gib = found["peak_bytes_per_device"] / 2**30
  if not found["compiled"] or not found["fits"]:
    why = "does not fit" if found["compiled"] else "not compiled"
    return f"| {where} | {row.published:,.0f} | {why} | | {gib:.1f} | {row.mfu} | |"
  rate = found["tokens_per_second_per_device"]
  mfu = f"{100 * found['mfu']:.1f} %, {100 * found['mfu_causal']:.1f} % (scores halved)"
  ratio = rate / row.published
  cells = [where, f"{row.published:,.0f}", f"{rate:,.0f}", f"{ratio:.2f}", f"{gib:.1f}"]
  return f"| {' | '.join([*cells, row.mfu, mfu])} |"


def page(lines: list[str]) -> str:
  """Returns docs/planner_accuracy.md."""
  rates = [f"- `{name}` {value:g}: {REASONS[name]}" for name, value in vars(Rates()).items()]
  differs = [f"- {row.model}, {row.topology}: the published run {row.differs}." for row in ROWS]
  commands = [f"python main.py {' '.join(arguments(row))}" for row in ROWS]
  return "\n".join(
    [
      "# Predicted and published throughput",
      "",
      "Written by `python -m benchmarks.planner_accuracy --write`; do not edit.",
      "",
      "Published: MaxText's tiering page, bfloat16, tokens per second and device. Predicted: from",
      "the program compiled for the same TPUs, described with their wraparound links, and from",
      "the constants below. One set of constants serves all rows, and it was fixed before the",
      "comparison. Nothing was measured on a TPU.",
      "",
      "Nothing is compared for GPUs. They are planned by formula, and no GPU was available to",
      "measure on, so the accuracy is unknown. [planner_traffic.md](planner_traffic.md) shows",
      "what the formulas count next to compiled TPU programs.",
      "",
      "| model, devices, rows x tokens per device | published | predicted | predicted / published "
      "| peak GiB | MFU, published | MFU, predicted |",
      "| --- | --- | --- | --- | --- | --- | --- |",
      *lines,
      "",
      *differs,
      "",
      "Efficiencies assumed for every chip:",
      "",
      *rates,
      "",
      "The commands:",
      "",
      "```",
      *commands,
      "```",
      "",
    ]
  )


def main(argv: list[str]) -> None:
  """Plans every row."""
  del argv
  lines = []
  for row in ROWS:
    if _ONLY.value in f"{row.model} {row.topology}":
      lines.append(line(row, plan(row)))
      print(lines[-1], flush=True)
  if _WRITE.value:
    PAGE.write_text(page(lines))


if __name__ == "__main__":
  app.run(main)
