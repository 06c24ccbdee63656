r"""Memory, FLOPs and HBM traffic of a step by the planner's formulas, and by compiled programs.

  pip install -r requirements/plan.txt
  python -m benchmarks.plan_formulas --of=memory [--named=gpt2] [--write]
  python -m benchmarks.plan_formulas --of=traffic [--named=gpt2] [--write]

Compiles the train step of each config for its TPUs (about a minute each on two cores, no TPU) and
prints formula / compiler; --write writes the section of docs/plan.md. For GPUs there is no compiler
here, so a plan reads the traced gradients (planning/traced_step.py): of `traffic`, FLOPs and bytes
by the same rules are compared with those of compiled programs, for plain attention, which is what
runs on GPUs, and for the kernel. Compiled FLOPs and bytes are counted from the optimized HLO
(planning/roofline.py), not measured.

Of `memory`, --write keeps the rows that --named leaves out and the paragraph that is marked as a
note; it exits with 1 if fewer than a dozen are within 10 %.
"""

import dataclasses
import os
import pathlib
import re
from typing import Any

from absl import app, flags

from commands import plan_process
from configs import single
from planning import analytic, aot, memory, step_time
from planning.step_facts import of_job
from planning.topology import parse
from runtime import hlo
from runtime.chips import CHIPS, Rates
from runtime.collectives import collectives
from tests.docs.pages import section, write_section
from training.setup import Job

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "plan.md"
_OF = flags.DEFINE_enum("of", "memory", ["memory", "traffic"], "What is compared.")
# Tests import this module beside planner_accuracy, which has flags of these names.
_SHARED = {"allow_override": True}
_NAMED = flags.DEFINE_string("named", "", "Only configs whose name contains this.", **_SHARED)
_WRITE = flags.DEFINE_bool("write", False, "Write the section of docs/plan.md.", **_SHARED)
_ON_CHIP = re.compile(r"S\([1-9]\)")  # of an array's layout: its memory, if that is not HBM
LEAST, WITHIN = 12, 0.1
HEADING = "## Memory by formula and by the compiler"
NOTE = "<!-- note: kept by --write; delete it when it no longer holds -->"
FIRST_COLUMN = "model, devices, mesh, rows x tokens, rematerialization"
CHUNKS = {"training.loss_chunks": 8}
REGIONS = {"partitioning.sequence_parallel": True}
# What a row about memory does not name is off, whatever the default.
OFF = {"training.loss_chunks": 1, "partitioning.sequence_parallel": False}
KERNELS = {"xla": "plain attention", "splash": "splash attention"}


@dataclasses.dataclass(frozen=True)
class Case:
  """A config.

  Attributes:
    model: preset.
    topology: the devices.
    mesh: axis -> size.
    rows: of the global batch.
    length: tokens of a row.
    rematerialization: of `training.rematerialization`.
    more: other keys, of a row about memory.
    kernel: of KERNELS, of a row about traffic.
  """

  model: str
  topology: str
  mesh: dict[str, int]
  rows: int
  length: int
  rematerialization: str
  more: dict[str, Any] = dataclasses.field(default_factory=dict)
  kernel: str = ""

  @property
  def name(self) -> str:
    """Returns it as text, the first column of the table."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
    parts = [self.model, self.topology, mesh, f"{self.rows} x {self.length}"]
    parts += [self.rematerialization, *(f"{k.partition('.')[2]}={v}" for k, v in self.more.items())]
    return ", ".join([*parts, *([KERNELS[self.kernel]] if self.kernel else [])])

  def job(self) -> Job:
    """Returns its job."""
    config = single.get_config(f"model={self.model},data=python_source")
    keys = {f"mesh.{axis}": size for axis, size in self.mesh.items()}
    keys |= {"training.attention_kernel": self.kernel} if self.kernel else {**OFF, **self.more}
    keys |= {"data.global_batch_size": self.rows, "data.sequence_length": self.length}
    keys["training.rematerialization"] = self.rematerialization
    config.update_from_flattened_dict(keys)
    return aot.prepare(config, parse(self.topology), ())


V5P = "v5p:4x4x4"
MEMORY = (
  Case("gpt2_124m", "v5e:4x2", {"data": 8}, 64, 1024, "full"),
  Case("gpt2_124m", "v5e:4x2", {"fsdp": 8}, 32, 1024, "none"),
  Case("gpt2_124m", "v5e:4x2", {"data": 2, "tensor": 4}, 32, 1024, "dots"),
  Case("qwen3_0_6b", "v5e:4x4", {"fsdp": 16}, 64, 4096, "full"),
  Case("qwen3_0_6b", "v6e:4x2", {"data": 2, "fsdp": 2, "tensor": 2}, 16, 2048, "dots"),
  Case("gemma3_1b", "v6e:4x2", {"fsdp": 8}, 32, 4096, "full", CHUNKS),
  Case("mistral_7b", V5P, {"fsdp": 16, "tensor": 4}, 64, 8192, "full"),
  Case("mistral_7b", V5P, {"fsdp": 16, "tensor": 4}, 64, 8192, "full", {**CHUNKS, **REGIONS}),
  Case("llama3_8b", V5P, {"fsdp": 64}, 64, 8192, "full"),
  Case("llama3_8b", V5P, {"fsdp": 64}, 64, 8192, "full", CHUNKS),
  Case("llama3_8b", V5P, {"fsdp": 16, "context": 4}, 32, 16384, "full", CHUNKS),
  Case(
    *("llama3_8b", "v6e:8x8", {"data": 4, "fsdp": 16}, 256, 2048, "full"),
    {"training.gradient_accumulation_steps": 4},
  ),
  Case("qwen3_8b", V5P, {"fsdp": 32, "tensor": 2}, 64, 4096, "dots"),
  Case("llama2_7b", V5P, {"data": 2, "fsdp": 32}, 64, 4096, "none"),
)
TRAFFIC = (
  Case("gpt2_124m", "v5e:4x2", {"data": 8}, 64, 1024, "full", kernel="xla"),
  Case("gpt2_124m", "v5e:4x2", {"data": 8}, 64, 1024, "none", kernel="xla"),
  Case("gpt2_124m", "v5e:4x2", {"data": 2, "tensor": 4}, 32, 1024, "dots", kernel="xla"),
  Case("qwen3_0_6b", "v5e:4x2", {"data": 8}, 16, 1024, "full", kernel="splash"),
  Case("qwen3_0_6b", "v5e:4x4", {"fsdp": 16}, 32, 2048, "full", kernel="xla"),
  Case("llama3_8b", V5P, {"fsdp": 64}, 64, 8192, "full", kernel="xla"),
  Case("llama3_8b", V5P, {"fsdp": 64}, 64, 8192, "full", kernel="splash"),
)


def _memory(case: Case) -> list[str]:
  """Returns bytes by formula and by the compiler, and their ratio."""
  job = case.job()
  formula = memory.at_once(memory.by_formula(of_job(job)))
  compiler = aot.compile_step(job).peak_bytes
  return [f"{formula:,}", f"{compiler:,}", f"{formula / compiler:.2f}"]


def _traffic(case: Case) -> list[str]:
  """Returns FLOPs, bytes and time by formula and compiled, and compiled bytes in all memories.

  Those are of HBM and of the memory on the chip, in which the compiler keeps arrays.
  """
  job, topology = case.job(), parse(case.topology)
  where, chip = aot.places(job.mesh, topology), CHIPS[topology.chip.name]
  program = aot.compile_step(job)
  if not program.fits:
    raise RuntimeError(f"{case.name}: does not fit")
  sent = collectives(program.text, job.mesh)
  compiled, everywhere = (
    step_time.times(hlo.parse(text), sent, where, chip, Rates())
    for text in (program.text, _ON_CHIP.sub("", program.text))
  )
  formula = analytic.times(of_job(job), where, chip, Rates())
  triples = [
    (getattr(formula.work, name) / unit, getattr(compiled.work, name) / unit)
    for name, unit in (("flops", 1e12), ("bytes", 2.0**30))
  ]
  triples.append(tuple(1e3 * (one.step - one.exposed) for one in (formula, compiled)))
  cells = [x for a, b in triples for x in (f"{a:,.4g}", f"{b:,.4g}", f"{a / b:.2f}")]
  of_all = everywhere.work.bytes
  return [*cells, f"{of_all / 2**30:,.4g}", f"{formula.work.bytes / of_all:.2f}"]


def is_close(line: str) -> bool:
  """Returns whether the formula of a row about memory is within 10 % of the compiler."""
  formula, compiler = (int(cell.replace(",", "")) for cell in line.split("|")[-4:-2])
  return abs(formula / compiler - 1) <= WITHIN


def note_of(text: str) -> str:
  """Returns the note of a page, with its marker; "" if it has none."""
  _, marker, after = text.partition(NOTE)
  return marker + after.partition("\n\n")[0] + "\n\n" if marker else ""


MEMORY_PAGE = """{heading}

Written by `python -m benchmarks.plan_formulas --of=memory --write`; do not edit.

Peak bytes per device of the train step, compiled for TPUs that are not attached: as the
compiler reports it, and as `plan` computes it by formula. {close} of {count} are within 10 %.

{note}| {first} | formula | compiler | ratio |
| --- | --- | --- | --- |
{lines}
"""
TRAFFIC_PAGE = """## FLOPs and HBM traffic by formula and in compiled programs

Written by `python -m benchmarks.plan_formulas --of=traffic --write`; do not edit.

Per device and step. A plan for GPUs has no compiler and counts operations of the traced
gradients. Here the same rules are applied to steps that are compiled for TPUs, whose
FLOPs and bytes are counted from optimized HLO. Neither was measured on a device. The
table shows what the rules omit or count twice next to one compiler, not how fast a GPU
is.

FLOPs agree. HBM traffic does not: a TPU has up to 128 MiB of memory on the chip, in which
its compiler keeps arrays between operations, as long as they fit: with plain attention,
the scores of a chunk of queries. The formula knows no such memory, as there is none of
that size on GPUs. The last two columns compare it with what the compiled program's
operations read and write in either memory. What is left: the compiler fuses entire
softmaxes, and elementwise operations into matmuls, which the formula does not assume.

{count} of {every} configs were compiled.

| {head} |
| --- |{rule}
{lines}
"""
TRAFFIC_HEAD = (
  *("TFLOP, formula", "compiled", "ratio", "HBM GiB, formula", "compiled", "ratio"),
  *("ms without collectives, formula", "compiled", "ratio"),
  *("GiB in HBM and on the chip, compiled", "ratio"),
)


def memory_page(lines: list[str], close: int, note: str) -> str:
  """Returns the section of docs/plan.md about memory; `note` as from `note_of`."""
  given = {"heading": HEADING, "close": close, "count": len(lines)}
  return MEMORY_PAGE.format(**given, note=note, first=FIRST_COLUMN, lines="\n".join(lines))


def traffic_page(lines: list[str]) -> str:
  """Returns the section of docs/plan.md about FLOPs and traffic."""
  head, rule = " | ".join([FIRST_COLUMN, *TRAFFIC_HEAD]), " --- |" * len(TRAFFIC_HEAD)
  counts = {"count": len(lines), "every": len(TRAFFIC)}
  return TRAFFIC_PAGE.format(**counts, head=head, rule=rule, lines="\n".join(lines))


def main(argv: list[str]) -> int:
  """Compiles every config; returns the exit code."""
  del argv
  of_memory, lines = _OF.value == "memory", []
  cases, measure = (MEMORY, _memory) if of_memory else (TRAFFIC, _traffic)
  before = section(PAGE.read_text(), HEADING)
  for case in cases:
    if _NAMED.value in case.name:
      lines.append(f"| {' | '.join([case.name, *measure(case)])} |")
      print(lines[-1], flush=True)
    elif _WRITE.value and of_memory:
      lines += [one for one in before.splitlines() if one.startswith(f"| {case.name} |")]
  if not of_memory:
    if _WRITE.value:
      write_section(PAGE, traffic_page(lines))
    return 0
  close = sum(map(is_close, lines))
  if _WRITE.value:
    write_section(PAGE, memory_page(lines, close, note_of(before)))
  return 0 if close >= min(LEAST, len(lines)) else 1


if __name__ == "__main__":
  os.environ.update(plan_process.ENVIRONMENT)  # before the compiler for TPUs is loaded
  app.run(main)
