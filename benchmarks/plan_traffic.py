r"""FLOPs and HBM traffic of a step by the planner's formulas, beside those of compiled programs.

  pip install -r requirements/plan.txt
  python -m benchmarks.plan_traffic [--only=gpt2] [--write]

For GPUs there is no compiler here, so a plan reads the traced gradients (planning/traced_step.py).
This compiles steps for TPUs (a minute each on two cores, no TPU), where the same rules can be
compared: prints formula / compiled program, for plain attention, which is what runs on GPUs, and
for the kernel; --write writes the section of docs/plan.md. Compiled FLOPs and bytes are counted
from the optimized HLO (planning/roofline.py), not measured.
"""

import dataclasses
import os
import pathlib
import re

from absl import app, flags

from commands import plan_process
from configs import single
from planning import analytic, aot, step_time
from planning.step_facts import of_job
from planning.topology import parse
from runtime import hlo
from runtime.chips import CHIPS, Rates
from runtime.collectives import collectives
from tests.docs.pages import write_section

_ON_CHIP = re.compile(r"S\([1-9]\)")  # of an array's layout: its memory, if that is not HBM
PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "plan.md"
_ONLY = flags.DEFINE_string("only", "", "Configs whose name has this in it.")
_WRITE = flags.DEFINE_bool("write", False, "Write the section of docs/plan.md.")


@dataclasses.dataclass(frozen=True)
class Case:
  """A config: preset, devices, mesh, rows of the global batch, tokens of a row, and what else."""

  model: str
  topology: str
  mesh: dict[str, int]
  rows: int
  length: int
  rematerialization: str
  kernel: str = "xla"

  @property
  def name(self) -> str:
    """Returns it as a person reads it."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
    attention = "plain attention" if self.kernel == "xla" else "splash attention"
    what = f"{self.rows} x {self.length}, {self.rematerialization}, {attention}"
    return f"{self.model}, {self.topology}, {mesh}, {what}"


V5P = "v5p:4x4x4"
CASES = (
  Case("gpt2_124m", "v5e:4x2", {"data": 8}, 64, 1024, "full"),
  Case("gpt2_124m", "v5e:4x2", {"data": 8}, 64, 1024, "none"),
  Case("gpt2_124m", "v5e:4x2", {"data": 2, "tensor": 4}, 32, 1024, "dots"),
  Case("qwen3_0_6b", "v5e:4x2", {"data": 8}, 16, 1024, "full", "splash"),
  Case("qwen3_0_6b", "v5e:4x4", {"fsdp": 16}, 32, 2048, "full"),
  Case("llama3_8b", V5P, {"fsdp": 64}, 64, 8192, "full"),
  Case("llama3_8b", V5P, {"fsdp": 64}, 64, 8192, "full", "splash"),
)


def compared(case: Case) -> tuple[step_time.Times, step_time.Times, float]:
  """Returns the step by formula, by the compiled program, and the latter's bytes in all memories.

  Those are of HBM and of the memory on the chip, in which the compiler keeps arrays.
  """
  config = single.get_config(f"model={case.model},data=python_source")
  keys = {f"mesh.{axis}": size for axis, size in case.mesh.items()}
  keys |= {"data.global_batch_size": case.rows, "data.sequence_length": case.length}
  keys |= {"training.attention_kernel": case.kernel}
  config.update_from_flattened_dict({**keys, "training.rematerialization": case.rematerialization})
  topology = parse(case.topology)
  job = aot.prepare(config, topology, aot.Here())
  where, chip = aot.places(job.mesh, topology), CHIPS[topology.chip.name]
  program = aot.compile_step(job)
  if not program.fits:
    raise RuntimeError(f"{case.name}: does not fit")
  sent = collectives(program.text, job.mesh)
  compiled, everywhere = (
    step_time.times(hlo.parse(text), sent, where, chip, Rates())
    for text in (program.text, _ON_CHIP.sub("", program.text))
  )
  return analytic.times(of_job(job), where, chip, Rates()), compiled, everywhere.work.bytes


def line(case: Case) -> str:
  """Returns a row of the table."""
  formula, compiled, everywhere = compared(case)
  cells = [case.name]
  for name, unit in (("flops", 1e12), ("bytes", 2.0**30)):
    here, there = getattr(formula.work, name), getattr(compiled.work, name)
    cells += [f"{here / unit:,.4g}", f"{there / unit:,.4g}", f"{here / there:.2f}"]
  busy = [one.step - one.exposed for one in (formula, compiled)]
  cells += [f"{1e3 * busy[0]:,.4g}", f"{1e3 * busy[1]:,.4g}", f"{busy[0] / busy[1]:.2f}"]
  cells += [f"{everywhere / 2**30:,.4g}", f"{formula.work.bytes / everywhere:.2f}"]
  return f"| {' | '.join(cells)} |"


def page(lines: list[str]) -> str:
  """Returns the section of docs/plan.md."""
  heads = ["TFLOP, formula", "compiled", "ratio", "HBM GiB, formula", "compiled", "ratio"]
  heads += ["ms without collectives, formula", "compiled", "ratio"]
  heads += ["GiB in HBM and on the chip, compiled", "ratio"]
  return "\n".join(
    [
      "## FLOPs and HBM traffic by formula and in compiled programs",
      "",
      "Written by `python -m benchmarks.plan_traffic --write`; do not edit.",
      "",
      "Per device and step. A plan for GPUs has no compiler and counts operations of the traced",
      "gradients. Here the same rules are applied to steps that are compiled for TPUs, whose",
      "FLOPs and bytes are counted from optimized HLO. Neither was measured on a device. The",
      "table shows what the rules omit or count twice next to one compiler, not how fast a GPU",
      "is.",
      "",
      "FLOPs agree. HBM traffic does not: a TPU has up to 128 MiB of memory on the chip, in which",
      "its compiler keeps arrays between operations, as long as they fit: with plain attention,",
      "the scores of a chunk of queries. The formula knows no such memory, as there is none of",
      "that size on GPUs. The last two columns compare it with what the compiled program's",
      "operations read and write in either memory. What is left: the compiler fuses entire",
      "softmaxes, and elementwise operations into matmuls, which the formula does not assume.",
      "",
      f"{len(lines)} of {len(CASES)} configs were compiled.",
      "",
      f"| {' | '.join(['model, devices, mesh, rows x tokens, rematerialization', *heads])} |",
      f"| --- |{' --- |' * len(heads)}",
      *lines,
      "",
    ]
  )


def main(argv: list[str]) -> None:
  """Compiles every config."""
  del argv
  lines = []
  for case in CASES:
    if _ONLY.value in case.name:
      lines.append(line(case))
      print(lines[-1], flush=True)
  if _WRITE.value:
    write_section(PAGE, page(lines))


if __name__ == "__main__":
  os.environ.update(plan_process.ENVIRONMENT)  # before the compiler for TPUs is loaded
  app.run(main)
