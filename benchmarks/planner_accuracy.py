r"""Predictions of `plan` next to published training speeds: `benchmarks/published_runs`.

  python -m benchmarks.planner_accuracy [--named=v6e] [--fit] [--write]

Plans every run by formula and prints predicted / published, then the errors by class of runs. Half
of the runs, drawn with SEED, may be used to choose constants; the others are only predicted. --fit
prints the constants that suit the first half best, to be taken over into runtime/chips.py. --write
writes the section of docs/plan.md and its picture.
"""

import dataclasses
import io
import math
import pathlib
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence

import matplotlib
from absl import app, flags
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.published_runs import MEASURED, PublishedRun, bound, error, read, runs_of
from benchmarks.timing import table
from configs import single
from models import model_spec
from planning import aot, memory, prediction, traced_step
from planning.analytic import Counted, counted, with_host_traffic
from planning.interconnect import DCN
from planning.step_facts import StepFacts, of_job
from planning.step_time import Times
from runtime.chips import CHIPS, REASONS, SOURCES, Rates, overridden
from tests.docs.pages import write_section

# By the compiled program: (model, topology, rows) -> the predicted speed and the peak in GiB, by
# libtpu 0.0.42 and, for GPUs, jax[cuda12] 0.10.2. Each takes minutes to compile, so they are not
# made again.
COMPILED = {
  ("llama3_8b", "v6e:16x16", 1024): (7550, 9.6),
  ("llama2_70b", "v5p:8x8x8", 2048): (770, 73.7),
  ("llama2_70b", "v6e:16x16", 512): (1027, 18.5),
  ("llama3_8b", "v6e:2x4", 24): (7638, 25.5),
  ("llama3_70b", "v6e:8x8", 128): (1109, 31.1),
  ("llama3_405b", "2xv6e:16x16", 512): (198.5, 23.4),
  ("llama2_7b", "v5e:16x16", 1024): (132.4, 11.3),
  ("llama2_7b", "v5p:4x4x4", 384): (295.6, 22.4),
  ("llama2_7b", "h100:8", 32): (484.5, 62.2),
  ("llama2_7b", "h100:16", 64): (411.5, 62.3),
  ("llama2_7b", "h100:32", 128): (416.2, 61.6),
  ("llama2_7b", "h100:64", 256): (416.2, 61.6),
  ("llama2_7b", "h100:128", 512): (416.2, 61.6),
}
PICTURE = "images/planner_accuracy.svg"  # beside the page
PICTURE_TITLE = "Predicted over published training speed of each run, by class of runs"
PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "plan.md"
SEED = 40  # draws the runs that constants may be fitted to
_NAMED = flags.DEFINE_string("named", "", "Runs that have this in their line of the table.")
_FIT = flags.DEFINE_bool("fit", False, "Print constants that suit half of the runs best.")
_WRITE = flags.DEFINE_bool("write", False, "Write the section of docs/plan.md.")


@dataclasses.dataclass(frozen=True)
class Step:
  """What a device does in the step of a published run, before it is known how fast.

  Attributes:
    run: as published.
    kind: its class, of `prediction.class_of`.
    counted: computed and sent.
    held: of `memory.of_the_host`.
    tokens: of a step, per chip.
    tflop: of a step, per chip: the model's, with attention's scores in full.
    peak: bytes of memory of a device, by formula.
    reserved: of `reserved_by_pytorch`.
  """

  run: PublishedRun
  kind: str
  counted: Counted
  held: Mapping[str, int]
  tokens: float
  tflop: float
  peak: int
  reserved: Mapping[str, float]

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


def step_of(run: PublishedRun) -> Step:
  """Returns the step of a published run, from its traced gradients.

  Runs on A100 have FlashAttention and those of experts on GPUs grouped kernels, which there are not
  for ours: the former are traced as for H100, the latter as for TPUs.

  Raises:
    ValueError: the settings are refused.
  """
  config = single.get_config(f"model={run.model}")
  config.update_from_flattened_dict(run.overrides)
  if run.has_experts:
    config.training.grouped_matmul = "ragged"
  topology, chip = run.place, run.place.chip
  if chip.name.startswith("a100"):
    as_h100 = dataclasses.replace(chip, name="h100", capability=CHIPS["h100"].capability)
    topology = dataclasses.replace(topology, chip=as_h100)
  job = aot.prepare(config, topology, ())
  step = of_job(job)
  layers = traced_step.by_the_layers(step)
  chips = job.mesh.size / chip.devices_per_chip
  parts = memory.by_formula(step, layers)
  flops = model_spec(job.config).train_flops_per_example(causal=False) * run.rows
  return Step(
    run,
    prediction.class_of(topology.platform, job.config, compiled=False),
    counted(step, aot.places(job.mesh, run.place), fused=run.fused),
    memory.of_the_host(step, layers),
    run.rows * run.length / chips,
    flops / chips / 1e12,
    memory.at_once(parts),
    reserved_by_pytorch(run, step, parts) if run.pytorch_loss else {},
  )


def reserved_by_pytorch(
  run: PublishedRun, step: StepFacts, parts: Mapping[str, int]
) -> dict[str, float]:
  """Returns part -> bytes that PyTorch's allocator has reserved at the peak of a run with FSDP2.

  When the backward pass begins. Sources: torchtitan (train.py, its pull request 1033 on the loss),
  PyTorch (FSDP2's root group; `torch.distributed.tensor.parallel.loss`).

  Args:
    run: whose loss is in float32 (the logits also as they were computed; they, their softmax and
      its gradient in float32, and where the vocabulary is split one more) or compiled (the logits
      and their gradient).
    step: the same run by our program.
    parts: of its memory, by formula.
  """
  sizes, (tensor, context) = step.sizes, (step.sizes["tensor"], step.sizes["context"])
  tables = [p for p in step.parameters.values() if "V" in p.letters]
  embeddings = sum(math.prod(p.shape) for p in tables) // tensor
  columns = tables[0].shape[tables[0].letters.index("V")] // tensor
  width = math.prod(tables[0].shape) // (columns * tensor)
  tokens = run.rows * run.length * tensor / math.prod(sizes.values())
  narrow, wide = step.compute_itemsize, 4
  of_loss = {"compiled": 2 * narrow, "float32": narrow + wide * (4 if tensor > 1 else 3)}
  found = {
    # Its shards are those of data, fsdp and context together.
    "parameters and optimizer": (parts["parameters"] + parts["optimizer state"]) / context,
    "saved activations": parts["saved activations"],
    "loss": of_loss[run.pytorch_loss] * tokens * columns,
    "embeddings, gathered until the end": narrow * embeddings,
    # Allocated on the stream that reduces them, whose blocks no other stream takes.
    "gradients": parts["gradients"] / context,
    "gradients of the embeddings, not yet scattered": wide * embeddings,
    "input of the logits, gathered over tensor": narrow * tokens * width if tensor > 1 else 0,
  }
  return {name: size for name, size in found.items() if size}


# ------------------------------ accuracy ------------------------------

# Constants that are fitted, where at least LEAST_RUNS of the half bear on them: others stay as
# micro-benchmarks have them.
LEAST_RUNS = 3
_STEPS = (0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25)


def chosen_for_fit() -> frozenset[int]:
  """Returns the places, in `read()`, of the half that constants may be fitted to."""
  count = len(read())
  return frozenset(random.Random(SEED).sample(range(count), count // 2))


def fit(some: Sequence[Step]) -> dict[str, float]:
  """Returns the constants with the least sum of |log(predicted / published)|.

  By coordinate descent. Runs whose programs differ from ours are left out: our stages repeat their
  forward pass, and on GPUs our rings have no kernel.
  """
  some = [step for step in some if not {"stage", "context"} & {*step.run.mesh}]
  bears: dict[str, list[Step]] = {
    f"{name}.formula": [step for step in some if step.run.place.chip.name == name] for name in CHIPS
  }
  bears["slow_overlap"] = [
    step for step in some if DCN in {wire.network for *_, wire in step.counted.sent}
  ]
  bears = {name: steps for name, steps in bears.items() if len(steps) >= LEAST_RUNS}
  values = {
    name: CHIPS[name.removesuffix(".formula")].matmul if "." in name else 1.0 for name in bears
  }
  most = values  # not above what the largest matmuls reach

  def loss(values: Mapping[str, float], steps: Sequence[Step]) -> float:
    text = as_text(values)
    return sum(math.log1p(error(step.ratio(text))) for step in steps)

  moved = True
  while moved:
    moved = False
    for name, steps in bears.items():
      tried = [values | {name: values[name] * factor} for factor in (1.0, *_STEPS)]
      tried = [one for one in tried if one[name] <= most[name]]
      best = min(tried, key=lambda one: loss(one, steps))
      moved |= loss(values, steps) - loss(best, steps) > 1e-3
      values = best
  return values


def as_text(values: Mapping[str, float]) -> str:
  """Returns constants as `planning.constants` takes them."""
  return ",".join(f"{name}={value:.3g}" for name, value in values.items())


@dataclasses.dataclass(frozen=True)
class Class:
  """The runs of a class: predicted / published of those that were fitted and of the others."""

  name: str
  fitted: tuple[float, ...]
  held: tuple[float, ...]

  @property
  def record(self) -> prediction.Record:
    """Returns what a plan says of the class; the range is rounded up to a whole percent."""
    errors = [error(ratio) for ratio in (*self.fitted, *self.held)]
    width = math.ceil(100 * bound(self.fitted or self.held)) / 100
    median, worst = round(statistics.median(errors), 2), round(max(errors), 2)
    return prediction.Record(len(errors), median, worst, width)

  @property
  def cells(self) -> list[str]:
    """Returns a row of the table by class."""
    record = self.record
    shares = map(_percent, (record.median, record.worst, record.range))
    found = [self.name, f"{record.runs}", *shares]
    errors = [error(ratio) for ratio in self.held]
    if not errors:
      return [*found, "", "", "", ""]
    inside = f"{sum(one <= record.range for one in errors)} of {len(errors)}"
    shares = map(_percent, (statistics.median(errors), max(errors)))
    return [*found, f"{len(errors)}", *shares, inside]


def _percent(share: float) -> str:
  return f"{100 * share:.0f} %"


def classes(found: Mapping[int, Step], constants: str = "") -> list[Class]:
  """Returns the classes of runs, by name."""
  kinds = sorted({step.kind for step in found.values()})
  chosen, every = chosen_for_fit(), []
  for kind in kinds:
    both = ([], [])
    for number, step in found.items():
      if step.kind == kind:
        both[number not in chosen].append(step.ratio(constants))
    every.append(Class(kind, *map(tuple, both)))
  return every


# ------------------------------ the page ------------------------------

FIRST = "model, topology, mesh, rows x tokens, rematerialization"
COMPARED = (FIRST, "published", "predicted / published")
HEAD = (*COMPARED, "peak GiB, published", "by formula", "constants")
CLASSES_HEAD = (
  *("class", "runs", "median error", "worst", "range"),
  *("not fitted", "median error", "worst", "in the range"),
)
MEMORY_HEAD = ("run", "published", "ours", "PyTorch's", "predicted / published", "PyTorch's parts")
SECTION = """## Predicted and published throughput

Written by `python -m benchmarks.planner_accuracy --write`; do not edit.

{count} published runs (`benchmarks/published_runs`), with their settings; none
was measured here. An error of 25 % is a predicted speed of 1.25, or of 1 / 1.25, times the
published one. Constants were fitted to half of the runs, drawn with the seed
{seed}; the columns after `not fitted` are of the other half. The range, which a plan
states, is what nine of ten runs of the first half are within. Of `context` and `stages` no
run was fitted to.

![Predicted over published speed of each run, by class]({picture})

{classes}

### By the compiled program

No constant is fitted to these, but the share of the peak that matmuls reach on several
GPUs. On TPUs the loss is in chunks, which the published runs do not have.

{compiled}

### By formula

Tokens per second and chip, or TFLOP/s with attention's scores in full. Runs on A100 are
counted with cuDNN's attention, and experts on GPUs with grouped kernels, as the published
ones have them.

{formula}

### Peak memory as it was published

GiB of a device. PyTorch's is what its allocator has reserved at the peak of a program that
is not ours: the same parts by our formula, and those that its program has besides.

{memory}

### Measured with this application

On one H100, of [performance.md](performance.md#on-one-h100); not published, so neither
fitted nor counted above. On one GPU the formula has matmuls at the share of the peak that
large ones reach.

{measured}

Refused here, so not predicted:

{refused}

Sources: {sources}.

### The constants

{constants}

Sources: {of_constants}.
"""


def title(run: PublishedRun) -> str:
  """Returns the first cell of a run's row."""
  mesh = " x ".join(f"{axis}={size}" for axis, size in run.mesh.items())
  more = [f"{run.accumulation} microbatches"] if run.accumulation > 1 else []
  more += [run.matmuls] if run.matmuls != "bfloat16" else []
  more += [] if run.fused else ["eager"]
  more += ["LoRA"] if "lora.rank" in run.settings else []
  width = run.sizes.get("model_size")
  model = f"{run.model} ({run.sizes['layers']} x {width})" if width else run.model
  cells = [model, run.topology, mesh, f"{run.rows} x {run.length}", run.rematerialization, *more]
  return ", ".join(filter(None, cells))


def published(run: PublishedRun) -> str:
  """Returns the published speed, of a chip."""
  return f"{run.tokens_per_second:,.0f}" if run.tokens_per_second else f"{run.tflops:g} TFLOP/s"


def cells(number: int, step: Step, constants: str = "") -> list[str]:
  """Returns a run's row of the table."""
  run = step.run
  gib = f"{run.memory_gib}" if run.memory_gib else ""
  found = [title(run), published(run), f"{step.ratio(constants):.2f}", gib]
  return [*found, f"{step.peak / 2**30:.1f}", "fitted" if number in chosen_for_fit() else ""]


def memory_cells(step: Step) -> list[str]:
  """Returns a run's row of the table of published peaks."""
  run, gib = step.run, 2**30
  reserved, ours = sum(step.reserved.values()) / gib, step.peak / gib
  found = [title(run), f"{run.memory_gib}", f"{ours:.1f}", f"{reserved:.1f}" if reserved else ""]
  parts = ", ".join(f"{name} {size / gib:.1f}" for name, size in step.reserved.items())
  return [*found, f"{(reserved or ours) / run.memory_gib:.2f}", parts]


def compiled() -> Iterator[tuple[PublishedRun, float, float, float]]:
  """Yields the runs whose programs were compiled: predicted speed, its ratio, peak in GiB."""
  for run in read():
    key = run.model, run.topology, run.rows
    if key in COMPILED and run.matmuls == "bfloat16":
      speed, gib = COMPILED[key]
      yield run, speed, speed / (run.tokens_per_second or run.tflops), gib


def steps(only: str = "") -> Iterator[tuple[int, Step | ValueError]]:
  """Yields the place and the step of each run; the refusal of those that are refused."""
  for number, run in enumerate(read()):
    if only in title(run):
      try:
        yield number, step_of(run)
      except ValueError as refusal:
        yield number, refusal


def page(found: Mapping[int, Step | ValueError], every: Sequence[Class]) -> str:
  """Returns the section of docs/plan.md."""
  planned = {number: step for number, step in found.items() if isinstance(step, Step)}
  refused: dict[str, list[str]] = {}
  for number, step in found.items():
    if number not in planned:
      reason = f"{step}".splitlines()[-1].strip().partition("; set it")[0]
      refused.setdefault(reason, []).append(title(read()[number]))
  fitted = [
    f"- `{chip.name}.formula` {chip.formula:g}: fitted; of large matmuls {chip.matmul:g}"
    for chip in CHIPS.values()
    if chip.formula
  ]
  rates = {name: value for name, value in vars(Rates()).items() if value}
  programs = ([title(run), published(run), f"{x:.2f}", f"{gib}"] for run, _, x, gib in compiled())
  peaks = (memory_cells(step) for step in planned.values() if step.run.memory_gib)
  return SECTION.format(
    count=len(read()),
    seed=SEED,
    picture=PICTURE,
    classes=table(CLASSES_HEAD, (one.cells for one in every)),
    compiled=table((*COMPARED, "peak GiB"), programs),
    formula=table(HEAD, (cells(number, step) for number, step in planned.items())),
    memory=table(MEMORY_HEAD, peaks),
    measured=table(HEAD, (cells(-1, step_of(run)) for run in runs_of(MEASURED))),
    refused="\n".join(f"- {reason}: {'; '.join(titles)}." for reason, titles in refused.items()),
    sources="; ".join(dict.fromkeys(f"{run.source}, {run.version}" for run in read())),
    constants="\n".join([*fitted, *(f"- `{x}` {n:g}: {REASONS[x]}" for x, n in rates.items())]),
    of_constants=SOURCES,
  )


def picture(every: Sequence[Class]) -> str:
  """Returns the ratios of each run by class as SVG, with the range of each class."""
  with matplotlib.rc_context(
    {"svg.hashsalt": "meshwright", "svg.fonttype": "none", "font.size": 9}
  ):
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, one in enumerate(reversed(every)):
      width = 1 + one.record.range
      axes.plot(
        [1 / width, width], [place, place], color="#c9d4e5", lw=9, solid_capstyle="butt", zorder=0
      )
      for ratios, filled, up in ((one.fitted, "none", 0.16), (one.held, "#1f5fbf", -0.16)):
        axes.scatter(
          ratios, [place + up] * len(ratios), 16, facecolors=filled, edgecolors="#1f5fbf"
        )
    axes.axvline(1, color="#888888", lw=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.3, 0.5, 0.8, 1, 1.25, 2, 3]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(
      "predicted / published (open: constants may be fitted to it; bar: range of a plan)"
    )
    axes.set_yticks(range(len(every)), [one.name for one in reversed(every)])
    for side in ("top", "right"):
      axes.spines[side].set_visible(False)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Title": PICTURE_TITLE})
  return "\n".join(text.rstrip() for text in out.getvalue().splitlines()) + "\n"


def main(argv: list[str]) -> None:
  """Plans every run."""
  del argv
  found = {}
  for number, step in steps(_NAMED.value):
    found[number] = step
    refused = isinstance(step, ValueError)
    text = f"| {title(read()[number])} | refused: {' '.join(str(step).split())} |"
    print(text if refused else f"| {' | '.join(cells(number, step))} |", flush=True)
  report(found)


def report(found: Mapping[int, Step | ValueError]) -> None:
  """Prints the classes; fits constants and writes the page where flags ask for it."""
  planned = {number: step for number, step in found.items() if isinstance(step, Step)}
  every = classes(planned)
  for platform in ("TPU", "GPU"):
    ratios = [ratio for run, _, ratio, _ in compiled() if run.place.platform == platform.lower()]
    every.append(Class(f"{platform}, compiled", (), tuple(ratios)))
  every.sort(key=lambda one: one.name)
  for one in every:
    print(f"{one.name}: {one.record}")
  if _FIT.value:
    chosen = chosen_for_fit()
    text = as_text(fit([step for number, step in planned.items() if number in chosen]))
    print(f"planning.constants={text}")
    for one in classes(planned, text):
      print(f"with these {one.name}: {one.record}")
  if _WRITE.value:
    write_section(PAGE, page(found, every))
    (PAGE.parent / PICTURE).write_text(picture(every))


if __name__ == "__main__":
  app.run(main)
