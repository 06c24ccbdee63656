r"""Peak memory by the formulas of `plan` and by the compiler, for configs of many kinds.

  pip install -r requirements/plan.txt
  python -m benchmarks.plan_memory [--only=gpt2] [--write]

Compiles the train step of each config for its TPUs (about a minute each on two cores, no TPU) and
prints formula / compiler; --write writes the section of docs/plan.md, and keeps the rows that
--only leaves out and the paragraph that is marked as a note. Exits with 1 if fewer than a dozen are
within 10 %.
"""

import dataclasses
import os
import pathlib
from typing import Any

from absl import app, flags

from commands import plan_process
from configs import single
from planning import aot, memory
from planning.step_facts import of_job
from planning.topology import parse
from tests.docs.pages import section, write_section

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "plan.md"
_ONLY = flags.DEFINE_string("only", "", "Only configs whose name contains this.")
_WRITE = flags.DEFINE_bool("write", False, "Write the section of docs/plan.md.")
LEAST, WITHIN = 12, 0.1
HEADING = "## Memory by formula and by the compiler"
NOTE = "<!-- note: kept by --write; delete it when it no longer holds -->"
CHUNKS = {"training.loss_chunks": 8}
REGIONS = {"partitioning.sequence_parallel": True}
# What a row does not name is off, whatever the default.
OFF = {"training.loss_chunks": 1, "partitioning.sequence_parallel": False}


@dataclasses.dataclass(frozen=True)
class Case:
  """A config: preset, devices, mesh, global batch size, sequence length, other keys."""

  model: str
  topology: str
  mesh: dict[str, int]
  rows: int
  length: int
  rematerialization: str
  more: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    """Returns it as text, the first column of the table."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
    more = "".join(f", {key.partition('.')[2]}={value}" for key, value in self.more.items())
    return f"{self.model}, {self.topology}, {mesh}, {self.rows} x {self.length}, " + (
      f"{self.rematerialization}{more}"
    )


V5P = "v5p:4x4x4"
CASES = (
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


def measured(case: Case) -> tuple[int, int]:
  """Returns bytes per device: by formula, by the compiler."""
  config = single.get_config(f"model={case.model},data=python_source")
  keys = {f"mesh.{axis}": size for axis, size in case.mesh.items()} | OFF | case.more
  keys |= {"data.global_batch_size": case.rows, "data.sequence_length": case.length}
  config.update_from_flattened_dict({**keys, "training.rematerialization": case.rematerialization})
  job = aot.prepare(config, parse(case.topology), aot.Here())
  return memory.at_once(memory.by_formula(of_job(job))), aot.compile_step(job).peak_bytes


def is_close(line: str) -> bool:
  """Returns whether the formula of a row is within 10 % of the compiler."""
  formula, compiler = (int(cell.replace(",", "")) for cell in line.split("|")[-4:-2])
  return abs(formula / compiler - 1) <= WITHIN


def note_of(text: str) -> list[str]:
  """Returns the note of a page, with its marker, as a list of one text; [] if it has none."""
  _, marker, after = text.partition(NOTE)
  return [marker + after.partition("\n\n")[0], ""] if marker else []


def page(lines: list[str], close: int, note: list[str]) -> str:
  """Returns the section of docs/plan.md; `note` as from `note_of`."""
  return "\n".join(
    [
      HEADING,
      "",
      "Written by `python -m benchmarks.plan_memory --write`; do not edit.",
      "",
      "Peak bytes per device of the train step, compiled for TPUs that are not attached: as the",
      "compiler reports it, and as `plan` computes it by formula. "
      f"{close} of {len(lines)} are within {100 * WITHIN:.0f} %.",
      "",
      *note,
      "| model, devices, mesh, rows x tokens, rematerialization | formula | compiler | ratio |",
      "| --- | --- | --- | --- |",
      *lines,
      "",
    ]
  )


def main(argv: list[str]) -> int:
  """Compiles every config; returns the exit code."""
  del argv
  before = section(PAGE.read_text(), HEADING)
  lines = []
  for case in CASES:
    if _ONLY.value in case.name:
      formula, compiler = measured(case)
      lines.append(f"| {case.name} | {formula:,} | {compiler:,} | {formula / compiler:.2f} |")
      print(lines[-1], flush=True)
    elif _WRITE.value:
      lines += [one for one in before.splitlines() if one.startswith(f"| {case.name} |")]
  close = sum(map(is_close, lines))
  if _WRITE.value:
    write_section(PAGE, page(lines, close, note_of(before)))
  return 0 if close >= min(LEAST, len(lines)) else 1


if __name__ == "__main__":
  os.environ.update(plan_process.ENVIRONMENT)  # before the compiler for TPUs is loaded
  app.run(main)
