"""What presets and tables of `training.rematerialization` save, and what they compute again.

  python -m benchmarks.rematerialization

Compiles the train step of the recipe lm on one CPU device with each value. A row of the table has
the bytes that the layers save (on the device, on the host), the compiler's temporary bytes, and the
operations of the step's matmuls, in loops as often as they run. A CPU has one memory: offloaded
arrays are among its temporaries. docs/memory.md has the table.
"""

import jax
from absl import app

from benchmarks.timing import job_of
from partitioning.rules import size_text
from planning import step_time, traced_step
from planning.interconnect import in_order
from planning.step_facts import of_job
from planning.topology import parse
from runtime import hlo
from runtime.chips import CHIPS, Rates

VALUES = (
  "none",
  "dots",
  "full",
  "query=save,key=save,value=save",
  "attention_output=save",
  "gate=save,up=save",
  "layer_input=offload,query=offload,key=offload,value=offload",
  "dots,gate=offload,up=offload",
)


def row(value: str) -> str:
  """Returns a row of the table."""
  job = job_of("lm", {"training.rematerialization": value})
  layers = traced_step.by_the_layers(of_job(job))
  compiled = job.compile_train_step().function
  program = hlo.parse(compiled.as_text())
  one = in_order(parse("cpu:1"), 1)
  flops = step_time.times(program, [], one, CHIPS["cpu"], Rates()).work.flops
  sizes = (layers.kept, layers.offloaded, compiled.memory_analysis().temp_size_in_bytes)
  return f"| `{value}` | {' | '.join(map(size_text, sizes))} | {flops / 1e9:.2f} |"


def main(argv: list[str]) -> None:
  """Prints the table."""
  del argv
  print("| value | saved on the device | on the host | temporaries | GFLOP of matmuls |")
  print("| --- | --- | --- | --- | --- |")
  for value in VALUES:
    print(row(value), flush=True)
    jax.clear_caches()


if __name__ == "__main__":
  app.run(main)
