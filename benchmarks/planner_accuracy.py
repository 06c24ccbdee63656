r"""Predictions of `plan` next to published throughputs: tokens per second and device.

  pip install -r requirements/plan.txt
  python -m benchmarks.planner_accuracy [--only=v6e] [--write]

Compiles the train step of each row on TPUs for its devices (minutes each on two cores, no TPU),
plans those on GPUs by formula, and prints predicted / published; --write writes the section of
docs/plan.md, and keeps the rows that --only leaves out. The efficiency constants are
those of runtime/chips.py, from data sheets and published micro-benchmarks; none was fitted to the
rows.
"""

import ast
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import tempfile

from absl import app, flags

from configs import fsdp8
from planning import analytic, aot
from planning.step_facts import of_job
from planning.topology import parse
from runtime.chips import CHIPS, REASONS, SOURCES, Rates, overridden
from tests.docs.pages import write_section

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "plan.md"
_ONLY = flags.DEFINE_string("only", "", "Rows whose topology or model has this in its name.")
_WRITE = flags.DEFINE_bool("write", False, "Write the section of docs/plan.md.")


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
    fused: elementwise operations are fused, as a compiler does; of rows by formula.
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
  fused: bool = True


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
    *("llama2_70b", "v6e:16x16", 2, 4096, "query=offload,key=offload,value=offload", 905, "43.8 %"),
    "remat_policy=qkv_proj_offloaded: queries, keys and values are offloaded; 2,097,152 tokens per "
    "step in 9.052 s (log of tpu-recipes, training/trillium/Llama2-70B-MaxText, commit 9e458c7, of "
    "llama2_70b_4096_sc of MaxText's tag tpu-recipes-v0.1.2; the page says 900)",
    "blocks of 512 tokens in attention; the published run has blocks of 1024 and 2048",
  ),
)
# torchtitan's selective checkpointing saves attention and every second matmul of a layer. The H100s
# have HBM2e and 500 W. What they reach was measured by the same authors with the version of torchao
# that the runs used; their attention is FlashAttention-2 (pytorch/pytorch issues 141133, 142132).
_SELECTIVE = "query=save,value=save,attention_output=save,gate=save,mlp_update=save"
_THEIR_CHIP = "h100.hbm_bytes=102e9,h100.hbm_bandwidth=2.4e12,h100.matmul=0.6,h100.attention=0.33"
_TITAN = (
  "FSDP, selective activation checkpointing, reduction in float32 "
  "(pytorch/torchtitan/benchmarks/llama3_h100_202412_torchtitan.md, commit 31a17bf)"
)
_GPU = (
  "model.separate_documents=False",
  "training.gradient_reduction_dtype=float32",
  f"planning.constants={_THEIR_CHIP}",
)
FORMULA_ROWS = (
  Row(
    *("llama3_8b", "h100:8", 2, 8192, _SELECTIVE, 6667, ""),
    f"torch.compile, {_TITAN}",
    "nothing known",
    _GPU,
  ),
  Row(
    *("llama3_8b", "h100:8", 2, 8192, _SELECTIVE, 5762, ""),
    f"eager, {_TITAN}",
    "our programs are always compiled, so this is counted for the comparison alone: as if each "
    "elementwise operation read its arguments and wrote its result",
    _GPU,
    fused=False,
  ),
)


def title(row: Row) -> str:
  """Returns the first cell of a row of the table."""
  how = "" if row.fused else ", nothing fused"
  return f"{row.model}, {row.topology}, {row.rows} x {row.length}{how}"


def devices(row: Row) -> int:
  """Returns how many devices a topology has: none of these is of chips of two."""
  count = 1
  for size in row.topology.partition(":")[2].split("x"):
    count *= int(size)
  return count


def overrides(row: Row) -> dict[str, str]:
  """Returns key -> value of the settings of a row."""
  count = devices(row)
  return {
    "mesh.fsdp": f"{count}",
    "data.global_batch_size": f"{count * row.rows}",
    "data.sequence_length": f"{row.length}",
    "training.rematerialization": row.rematerialization,
    **dict(one.split("=", 1) for one in row.more),
  }


def arguments(row: Row) -> list[str]:
  """Returns the command line of a row, but for where it writes to."""
  return [
    *("plan", f"--config=configs/fsdp8.py:model={row.model}"),
    f"--topology={row.topology}",
    *(f"--config.{key}={value}" for key, value in overrides(row).items()),
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


def without_fusion(row: Row, found: dict) -> dict:
  """Returns plan.json with the speed that it has if nothing is fused.

  Args:
    row: of the plan, by formula.
    found: plan.json.
  """
  config = fsdp8.get_config(f"model={row.model}")
  given = {
    key: ast.literal_eval(value) if value[0].isdigit() else value
    for key, value in overrides(row).items()
  }
  given["model.separate_documents"] = False
  config.update_from_flattened_dict(given)
  chips, rates = overridden(config.planning.constants)
  topology = parse(row.topology, chips)
  job = aot.prepare(config, topology, aot.simulated(config, topology))
  where = aot.places(job.mesh, topology)
  compiled, eager = (
    analytic.times(of_job(job), where, topology.chip, rates, fused=fused).step
    for fused in (True, False)
  )
  speeds = ("tokens_per_second_per_device", "mfu", "mfu_causal")
  return found | {name: found[name] * compiled / eager for name in speeds}


def line(row: Row, found: dict) -> str:
  """Returns a row of the table."""
  where = title(row)
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


def page(compiled: list[str], formula: list[str]) -> str:
  """Returns the section of docs/plan.md.

  Args:
    compiled: rows of the table of compiled programs.
    formula: of those by formula.
  """
  rates = [
    f"- `{name}` {value:g}: {REASONS[name]}"
    for name, value in vars(Rates()).items()
    if name not in ("matmul", "memory")
  ]
  names = dict.fromkeys(row.topology.partition(":")[0] for row in (*ROWS, *FORMULA_ROWS))
  shares = [
    f"- `{name}.{share}` {getattr(CHIPS[name], share)}: {getattr(CHIPS[name], f'{share}_source')}"
    for share in ("matmul", "attention", "memory")
    for name in names
    if getattr(CHIPS[name], share)
  ]
  commands = dict.fromkeys(
    f"python main.py {' '.join(arguments(r))}" for r in (*ROWS, *FORMULA_ROWS)
  )
  return "\n".join(
    [
      "## Predicted and published throughput",
      "",
      "Written by `python -m benchmarks.planner_accuracy --write`; do not edit.",
      "",
      "In bfloat16, tokens per second and device. Nothing was measured here. The settings of each",
      "row are those of the published run; the constants are from data sheets and published",
      "micro-benchmarks, and none was fitted to a row.",
      "",
      "### TPUs, by the compiled program",
      "",
      "Published: the tiering page of MaxText's documentation. Predicted: from the program that is",
      "compiled for the same TPUs. The loss is in chunks, which the published runs do not have.",
      "",
      *HEAD,
      *compiled,
      "",
      *(_settings(row) for row in ROWS),
      "",
      "### GPUs, by formula",
      "",
      "There is no compiler for GPUs here: predicted by formula, from the traced gradients.",
      "[Below](#flops-and-hbm-traffic-by-formula-and-in-compiled-programs) is what the formulas",
      "count next to compiled TPU programs.",
      "",
      *HEAD,
      *formula,
      "",
      *(_settings(row) for row in FORMULA_ROWS),
      "",
      f"Constants of these rows: `{_THEIR_CHIP}`: the memory's size and bandwidth as published",
      "with the rows; 60 % of the peak in matmuls, by torchao's roofline of the same GPUs at that",
      "time ([9]); 33 % in attention, FlashAttention-2's 333 and 318 of 989 TFLOP/s ([10]).",
      "",
      "### The constants",
      "",
      *shares,
      *rates,
      "",
      f"Sources: {SOURCES}.",
      "",
      "### The commands",
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


def main(argv: list[str]) -> None:
  """Plans every row."""
  del argv
  before = PAGE.read_text()
  tables: list[list[str]] = []
  for rows in (ROWS, FORMULA_ROWS):
    tables.append([])
    for row in rows:
      if _ONLY.value in f"{row.model} {row.topology}":
        found = plan(tuple(arguments(row)))
        tables[-1].append(line(row, found if row.fused else without_fusion(row, found)))
        print(tables[-1][-1], flush=True)
      else:
        start = f"| {title(row)} | {row.published:,.0f} |"
        tables[-1] += [one for one in before.splitlines() if one.startswith(start)]
  if _WRITE.value:
    write_section(PAGE, page(*tables))


if __name__ == "__main__":
  app.run(main)
