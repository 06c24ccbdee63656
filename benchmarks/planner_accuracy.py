r"""Predictions of `plan` next to published training speeds: `benchmarks/published_runs`.

  python -m benchmarks.planner_accuracy [--only=v6e] [--write]

Plans every run by formula and prints predicted / published, then the median and the worst error by
class of runs. Half of the runs, drawn with SEED, may be used to choose constants; the others are
only predicted. --write writes the section of docs/plan.md.
"""

import dataclasses
import pathlib
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence

import jax
from absl import app, flags

from benchmarks.published_runs import PublishedRun, read
from configs import single
from models import model_spec
from planning import aot, memory, traced_step
from planning.analytic import Counted, counted, with_host_traffic
from planning.step_facts import of_job
from planning.step_time import Times
from planning.topology import MOST_SIMULATED
from runtime.chips import overridden

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "plan.md"
SEED = 40  # draws the runs that constants may be fitted to
_ONLY = flags.DEFINE_string("only", "", "Runs that have this in their line of the table.")
_WRITE = flags.DEFINE_bool("write", False, "Write the section of docs/plan.md.")


@dataclasses.dataclass(frozen=True)
class Step:
  """What a device does in the step of a published run, before it is known how fast.

  Attributes:
    run: as published.
    counted: computed and sent.
    held: of `memory.of_the_host`.
    tokens: of a step, per chip.
    tflop: of a step, per chip: the model's, with attention's scores in full.
    peak: bytes of memory of a device, by formula.
  """

  run: PublishedRun
  counted: Counted
  held: Mapping[str, int]
  tokens: float
  tflop: float
  peak: int

  def times(self, constants: str = "") -> Times:
    """Returns how long the step takes, with the constants that a text replaces."""
    both = ",".join(filter(None, (constants, self.run.constants)))
    chips, rates = overridden(both)
    chip = chips[self.run.place.chip.name]
    times = self.counted.times(chip, rates)
    return with_host_traffic(times, self.run.accumulation, self.held, chip, rates)

  def ratio(self, constants: str = "") -> float:
    """Returns the predicted speed / the published one."""
    done = self.tokens if self.run.tokens_per_second else self.tflop
    published = self.run.tokens_per_second or self.run.tflops
    return done / self.times(constants).step / published


def step_of(run: PublishedRun, here: aot.Here) -> Step:
  """Returns the step of a published run, from its traced gradients.

  Runs on A100 have FlashAttention, which there is not for ours: they are traced as for H100.

  Raises:
    ValueError: the settings are refused.
  """
  config = single.get_config(f"model={run.model}")
  config.update_from_flattened_dict(run.overrides)
  topology, chip = run.place, run.place.chip
  if chip.name.startswith("a100"):
    topology = dataclasses.replace(topology, chip=dataclasses.replace(chip, name="h100"))
  job = aot.prepare(config, topology, here)
  step = of_job(job)
  layers = traced_step.by_the_layers(step)
  chips = job.mesh.size / chip.devices_per_chip
  flops = model_spec(job.config).train_flops_per_example(causal=False) * run.rows
  return Step(
    run,
    counted(step, aot.places(job.mesh, run.place), fused=run.fused),
    memory.of_the_host(step, layers),
    run.rows * run.length / chips,
    flops / chips / 1e12,
    memory.at_once(memory.by_formula(step, layers)),
  )


# ------------------------------ accuracy ------------------------------


def kind_of(run: PublishedRun) -> str:
  """Returns the class of a run: its errors are of a kind."""
  spec = single.get_config(f"model={run.model}").model
  dtype = "dense" if run.matmuls == "bfloat16" else "8 bits"
  what = "experts" if "experts" in spec and spec.experts else dtype
  return f"{'TPU' if run.place.chip.torus else 'GPU'}, {what}"


def chosen_for_fit() -> frozenset[int]:
  """Returns the places, in `read()`, of the half that constants may be fitted to."""
  count = len(read())
  return frozenset(random.Random(SEED).sample(range(count), count // 2))


def error(ratio: float) -> float:
  """Returns how far a prediction is off: 0.25 of 1.25 and of 1 / 1.25."""
  return max(ratio, 1 / ratio) - 1


def summary(name: str, ratios: Sequence[float]) -> str:
  """Returns a row of the table by class."""
  errors = [error(ratio) for ratio in ratios]
  cells = [name, f"{len(ratios)}", f"{100 * statistics.median(errors):.0f} %"]
  cells += [f"{100 * max(errors):.0f} %", f"{min(ratios):.2f} to {max(ratios):.2f}"]
  return f"| {' | '.join(cells)} |"


# ------------------------------ the tables ------------------------------

HEAD = (
  "| model, mesh, rows x tokens, rematerialization | published | predicted / published | "
  "peak GiB, published | by formula | constants |",
  "| --- | --- | --- | --- | --- | --- |",
)


def title(run: PublishedRun) -> str:
  """Returns the first cell of a run's row."""
  mesh = " x ".join(f"{axis}={size}" for axis, size in run.mesh.items())
  more = [f"{run.accumulation} microbatches"] if run.accumulation > 1 else []
  more += [run.matmuls] if run.matmuls != "bfloat16" else []
  more += [] if run.fused else ["eager"]
  width = run.sizes.get("model_size")
  model = f"{run.model} ({run.sizes['layers']} x {width})" if width else run.model
  cells = [model, run.topology, mesh, f"{run.rows} x {run.length}", run.rematerialization, *more]
  return ", ".join(filter(None, cells))


def line(number: int, step: Step, constants: str = "") -> str:
  """Returns a run's row of the table."""
  run = step.run
  published = f"{run.tokens_per_second:,.0f}" if run.tokens_per_second else f"{run.tflops} TFLOP/s"
  gib = f"{run.memory_gib}" if run.memory_gib else ""
  cells = [title(run), published, f"{step.ratio(constants):.2f}", gib, f"{step.peak / 2**30:.1f}"]
  cells.append("fitted" if number in chosen_for_fit() else "")
  return f"| {' | '.join(cells)} |"


def steps(only: str = "") -> Iterator[tuple[int, Step | ValueError]]:
  """Yields the place and the step of each run; the refusal of those that are refused."""
  jax.config.update("jax_num_cpu_devices", MOST_SIMULATED)
  here = aot.Here(simulated=tuple(jax.devices("cpu")))
  for number, run in enumerate(read()):
    if only in title(run):
      try:
        yield number, step_of(run, here)
      except ValueError as refusal:
        yield number, refusal


def main(argv: list[str]) -> None:
  """Plans every run."""
  del argv
  found: dict[str, list[float]] = {}
  for number, step in steps(_ONLY.value):
    run = read()[number]
    if isinstance(step, ValueError):
      print(f"| {title(run)} | refused: {' '.join(str(step).split())} |", flush=True)
      continue
    print(line(number, step), flush=True)
    found.setdefault(kind_of(run), []).append(step.ratio())
  for name, ratios in sorted(found.items()):
    print(summary(name, ratios))


if __name__ == "__main__":
  app.run(main)
