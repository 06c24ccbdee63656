"""Small programs as text, and what their instructions do."""

from planning.roofline import Costs, Work
from runtime import hlo


def work_of(text: str, name: str) -> Work:
  """Returns what an instruction of ENTRY does."""
  program = hlo.parse(text)
  entry = program.computations[program.entry]
  return Costs(program).work(entry, entry.instructions[name])


def entry(*lines: str) -> str:
  """Returns a program of these instructions."""
  return "HloModule m\n\nENTRY %main () -> f32[] {\n" + "\n".join(f"  {x}" for x in lines) + "\n}\n"
