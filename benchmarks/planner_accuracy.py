r"""Predictions of `plan` next to published throughputs: tokens per second and device.

  pip install -r requirements-plan.txt
  python -m benchmarks.planner_accuracy [--only=v6e] [--write]

Compiles the train step of each row on TPUs for its devices (minutes each on two cores, no TPU),
plans those on GPUs by formula, and prints predicted / published; --write writes
docs/planner_accuracy.md. The efficiency constants are those of analysis/chips.py, from data sheets
and published micro-benchmarks; none was fitted to the rows.
"""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import tempfile

from absl import app, flags

from analysis.chips import CHIPS, REASONS, SOURCES, Rates

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planner_accuracy.md"
NOTE = "## What remains"  # this part of the page is written by hand, and kept by --write
_ONLY = flags.DEFINE_string("only", "", "Rows whose topology or model has this in its name.")
_WRITE = flags.DEFINE_bool("write", False, "Write docs/planner_accuracy.md.")


@dataclasses.dataclass(frozen=True)
class Row:
  """A published speed, and the config of the same settings here.

  Attributes:
    model: preset.
    topology: as published.
    rows: of the global batch, per device.
    length: tokens of a row.
    rematerialization: of `training.rematerialization`.
    published: tokens per second and device.
    mfu: as published, with what it counts of attention.
    settings: of the published run, and where they are published.
    differs: how ours differ from them.
    more: further overrides, of `--config.`.
  """

  model: str
  topology: str
  rows: int
  length: int
  rematerialization: str
  published: float
  mfu: str
  settings: str
  differs: str
  more: tuple[str, ...] = ()


_OFFLOADED = ",".join(
  f"{name}=offload" for name in ("layer_input", "query", "key", "value", "attention_update")
)
ROWS = (
  Row(
    *("llama3_8b", "v6e:16x16", 4, 8192, _OFFLOADED, 7207, "45.46 % (scores halved)"),
    "remat_policy=custom: the layers' inputs, queries, keys, values and the output projection's "
    "results are offloaded (tpu-recipes, training/trillium/Llama3.1-8B-MaxText/v6e-256, commit "
    "a9e0929)",
    "blocks of 512 tokens in attention, whose backward pass has two kernels; the published run has "
    "blocks of 2048 and one kernel",
  ),
  Row(
    *("llama2_70b", "v5p:8x8x8", 4, 4096),
    "query=save,key=save,value=save,attention_update=save,mlp_update=save",
    *(692, "65.4 % (scores in full)"),
    "remat_policy=save_dot_except_mlpwi: queries, keys, values and the results of the output "
    "projection and of the MLP are saved (llama2_70b_v5p_128 of "
    "maxtext/benchmarks/maxtext_v5p_model_configs.py, linked by that page at commit 92e59fd)",
    "nothing known",
  ),
  Row(
    *("llama2_70b", "v6e:16x16", 3, 4096, "query=offload,key=offload,value=offload", 900, "43.8 %"),
    "remat_policy=qkv_proj_offloaded: queries, keys and values are offloaded "
    "(tpu-recipes, training/trillium/Llama2-70B-MaxText, commit 9e458c7, llama2_70b_4096_sc of "
    "MaxText's tag tpu-recipes-v0.1.2)",
    "blocks of 512 tokens in attention; the published run has blocks of 1024 and 2048",
  ),
)
# torchtitan's selective checkpointing saves attention and every second matmul of a layer. The H100s
# had 95 GiB of HBM2e at 2.4 TB/s and 500 W; "between SXM and NVL", of their peak: the middle.
_SELECTIVE = "query=save,value=save,attention_output=save,gate=save,mlp_update=save"
_HBM2E = "h100.hbm_bytes=102e9,h100.hbm_bandwidth=2.4e12,h100.flops=912e12"
_TITAN = (
  "FSDP, selective activation checkpointing, reduction in float32 "
  "(pytorch/torchtitan/benchmarks/llama3_h100_202412_torchtitan.md, commit 31a17bf)"
)
_GPU = ("training.gradient_reduction_dtype=float32", f"planning.constants={_HBM2E}")
_ATTENTION = "our attention is a scan over blocks, which are written to HBM; torch's is one kernel"
FORMULA_ROWS = (
  Row(
    *("llama3_8b", "h100:8", 2, 8192, _SELECTIVE, 6667, ""),
    f"torch.compile, {_TITAN}",
    _ATTENTION,
    _GPU,
  ),
  Row(
    *("llama3_8b", "h100:8", 2, 8192, _SELECTIVE, 5762, ""),
    f"eager, {_TITAN}",
    f"{_ATTENTION}; formulas assume that elementwise operations are fused, as a compiler does",
    _GPU,
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
    *("plan", f"--config=configs/fsdp8.py:model={row.model}"),
    f"--topology={row.topology}",
    f"--config.mesh.fsdp={count}",
    f"--config.data.global_batch_size={count * row.rows}",
    f"--config.data.sequence_length={row.length}",
    f"--config.training.rematerialization={row.rematerialization}",
    *(f"--config.{one}" for one in row.more),
  ]


@functools.cache
def plan(command: tuple[str, ...]) -> dict:
  """Returns plan.json of a command line.

  Raises:
    RuntimeError: there is none.
  """
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, str(ROOT / "main.py"), *command, f"--workdir={folder}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 3):
      raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}")
    return json.loads(pathlib.Path(folder, "plan.json").read_text())


def line(row: Row, found: dict | None) -> str:
  """Returns a row of the table; without a plan, that it was left out by --only."""
  where = f"{row.model}, {row.topology}, {row.rows} x {row.length}"
  if found is None:
    return f"| {where} | {row.published:,.0f} | not compiled | | | {row.mfu} | |"
  gib = found["peak_bytes_per_device"] / 2**30
  if not found["fits"]:
    return f"| {where} | {row.published:,.0f} | does not fit | | {gib:.1f} | {row.mfu} | |"
  rate = found["tokens_per_second_per_device"]
  mfu = f"{100 * found['mfu']:.1f} %, {100 * found['mfu_causal']:.1f} % (scores halved)"
  ratio = rate / row.published
  cells = [where, f"{row.published:,.0f}", f"{rate:,.0f}", f"{ratio:.2f}", f"{gib:.1f}"]
  return f"| {' | '.join([*cells, row.mfu, mfu])} |"


HEAD = (
  "| model, devices, rows x tokens per device | published | predicted | predicted / published "
  "| peak GiB | MFU, published | MFU, predicted |",
  "| --- | --- | --- | --- | --- | --- | --- |",
)


def page(compiled: list[str], formula: list[str], kept: list[str]) -> str:
  """Returns docs/planner_accuracy.md.

  Args:
    compiled: rows of the table of compiled programs.
    formula: of those by formula.
    kept: lines of the page that are written by hand.
  """
  rates = [
    f"- `{name}` {value:g}: {REASONS[name]}"
    for name, value in vars(Rates()).items()
    if name != "matmul"
  ]
  names = dict.fromkeys(row.topology.partition(":")[0] for row in (*ROWS, *FORMULA_ROWS))
  matmuls = [
    f"- `{name}.matmul` {CHIPS[name].matmul}: {CHIPS[name].matmul_source}" for name in names
  ]
  commands = dict.fromkeys(
    f"python main.py {' '.join(arguments(r))}" for r in (*ROWS, *FORMULA_ROWS)
  )
  return "\n".join(
    [
      "# Predicted and published throughput",
      "",
      "Written by `python -m benchmarks.planner_accuracy --write`; do not edit.",
      "",
      "In bfloat16, tokens per second and device. Nothing was measured here. The settings of each",
      "row are those of the published run; the constants are from data sheets and published",
      "micro-benchmarks, and none was fitted to a row.",
      "",
      "## TPUs, by the compiled program",
      "",
      "Published: the tiering page of MaxText's documentation. Predicted: from the program that is",
      "compiled for the same TPUs. The loss is in chunks, which the published runs do not have.",
      "",
      *HEAD,
      *compiled,
      "",
      *(_settings(row) for row in ROWS),
      "",
      "## GPUs, by formula",
      "",
      "There is no compiler for GPUs here: predicted by formula, from the traced gradients.",
      "[planner_traffic.md](planner_traffic.md) shows what the formulas count next to compiled TPU",
      "programs.",
      "",
      *HEAD,
      *formula,
      "",
      *(_settings(row) for row in FORMULA_ROWS),
      "",
      *kept,
      "## The constants",
      "",
      *matmuls,
      *rates,
      "",
      f"Sources: {SOURCES}.",
      "",
      "## The commands",
      "",
      "```",
      *commands,
      "```",
      "",
    ]
  )


def _settings(row: Row) -> str:
  return (
    f"- {row.model}, {row.topology}, {row.published:,}: {row.settings}. Differs: {row.differs}."
  )


def notes(text: str) -> list[str]:
  """Returns the lines of a page that are written by hand, which --write keeps."""
  lines = text.splitlines()
  if NOTE not in lines:
    return []
  start = lines.index(NOTE)
  return lines[start : lines.index("## The constants")]


def main(argv: list[str]) -> None:
  """Plans every row."""
  del argv
  tables: list[list[str]] = []
  for rows in (ROWS, FORMULA_ROWS):
    tables.append([])
    for row in rows:
      chosen = _ONLY.value in f"{row.model} {row.topology}"
      tables[-1].append(line(row, plan(tuple(arguments(row))) if chosen else None))
      print(tables[-1][-1], flush=True)
  if _WRITE.value:
    PAGE.write_text(page(*tables, notes(PAGE.read_text())))


if __name__ == "__main__":
  app.run(main)
