"""What a train step of small jobs sends, strategy by strategy: compiled, and by formula.

  python -m tests.parity.budgets --write

writes docs/budgets.md from the formulas of `planning/terms.py`. `test_budgets.py` compares them
with the compiled programs, to the byte.
"""

import dataclasses
import functools
import inspect
import math
import os
import pathlib
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from planning import terms
from planning.step_facts import of_job
from runtime import collectives, devices
from tests.helpers.jobs import make_job
from tests.parity import expert_cases, latents, pipeline_cases
from tests.parity.comparison import COLLECTIVE_MATMUL, SEQUENCE_PARALLEL, Run, train
from training.setup import Job

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "budgets.md"
COMMAND = "python -m tests.parity.budgets --write"

INVOLUNTARY = "nvoluntary full rematerialization"  # XLA says so on stderr, while it compiles
MUON = {"optimizer.name": "muon"}
SOAP = {"optimizer.name": "soap"}
MICROBATCHES = {"training.gradient_accumulation_steps": 2}
MEETING = "groups of fsdp=2 x tensor=2, meeting"  # by an outer optimizer
# Title -> file of configs/, and what is set beside it.
STRATEGIES = {
  "dp8": ("dp8", {}),
  "dp8, ZeRO-1": ("dp8", {"partitioning.optimizer.model": ("fsdp", "data")}),
  "fsdp8": ("fsdp8", {}),
  "fsdp8, kernels kept": ("fsdp8", {"partitioning.reshard_after_forward": False}),
  "data=4 x fsdp=2 (HSDP)": ("single", {"mesh.data": 4, "mesh.fsdp": 2}),
  "tp8": ("tp8", {}),
  "dp4_tp2": ("dp4_tp2", {}),
  "dp4_tp2, sequence-parallel": ("dp4_tp2", SEQUENCE_PARALLEL),
  "dp2_fsdp2_tp2": ("dp2_fsdp2_tp2", {}),
  "dp2_fsdp2_tp2, sequence-parallel": ("dp2_fsdp2_tp2", SEQUENCE_PARALLEL),
  "dp4_tp2, collective matmul": ("dp4_tp2", COLLECTIVE_MATMUL),
  "fsdp=2 x tensor=4, collective matmul": (
    "single",
    {"mesh.fsdp": 2, "mesh.tensor": 4, **COLLECTIVE_MATMUL},
  ),
  "dp8, 2 microbatches": ("dp8", MICROBATCHES),
  "dp4_tp2, sequence-parallel, 2 microbatches": (
    "dp4_tp2",
    {**SEQUENCE_PARALLEL, **MICROBATCHES},
  ),
  "dp2_fsdp2_tp2, 2 microbatches": ("dp2_fsdp2_tp2", MICROBATCHES),
  "dp2_fsdp2_tp2, 2 microbatches, each reduced": (
    "dp2_fsdp2_tp2",
    {**MICROBATCHES, "training.gradient_reduction": "microbatch"},
  ),
  "data=4 x context=2, ring, 2 microbatches": (
    "single",
    {"mesh.data": 4, "mesh.context": 2, "model.context_attention": "ring", **MICROBATCHES},
  ),
  "data=4 x context=2, ring": (
    "single",
    {"mesh.data": 4, "mesh.context": 2, "model.context_attention": "ring"},
  ),
  "fsdp=2 x context=4, gathered": (
    "single",
    {"mesh.fsdp": 2, "mesh.context": 4, "model.context_attention": "gather"},
  ),
  "data=4 x context=2, Ulysses": (
    "single",
    {"mesh.data": 4, "mesh.context": 2, "model.context_attention": "ulysses"},
  ),
  MEETING: (
    "single",
    {
      **{"mesh_dcn.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
      **{"optimizer.outer_every_steps": 4, "training.steps": 8},
    },
  ),
}
# Of the vision transformer.
VIT_STRATEGIES = {
  **{name: STRATEGIES[name] for name in ("dp8", "fsdp8", "data=4 x fsdp=2 (HSDP)", "tp8")},
  **{name: STRATEGIES[name] for name in ("dp2_fsdp2_tp2", "dp2_fsdp2_tp2, sequence-parallel")},
}
# Those whose tests are marked `long`.
LONG = (
  "data=4 x fsdp=2 (HSDP)",
  "fsdp=2 x tensor=4, collective matmul",
  "fsdp=2 x context=4, gathered",
  "dp2_fsdp2_tp2, 2 microbatches",
  "dp8, 2 microbatches",
  "dp4_tp2, sequence-parallel, 2 microbatches",
  "dp2_fsdp2_tp2, 2 microbatches, each reduced",
  "data=4 x context=2, ring, 2 microbatches",
)
# Of these the update alone is compiled; the gradients are those of AdamW's step.
UPDATES = ("dp8", "dp8, ZeRO-1", "fsdp8", "tp8", "dp2_fsdp2_tp2")


Sums = dict[tuple[str, tuple[str, ...]], tuple[int, int]]  # (kind, axes) -> (arrays, bytes)

# ---- What formulas say ----


def added_up(found: Iterable[terms.Term], job: Job, itemsize: int | None = None) -> Sums:
  """Returns arrays and bytes of one step.

  Args:
    found: terms of the job.
    job: whose mesh it is.
    itemsize: bytes of every computed number, if all are in one dtype; None: of each its own.
  """
  sums = defaultdict(lambda: (0, 0))
  for term in found:
    arrays, size = sums[term.kind, term.axes]
    # On CPUs an all-to-all is compiled as one array for each device.
    sizes = [job.devices.sizes[axis] for axis in term.axes]
    each = math.prod(sizes) if term.kind == "all-to-all" else term.arrays
    given = term.why.startswith("tokens, targets")  # of the batch, in its own dtypes
    size += term.runs * term.elements * (itemsize if itemsize and not given else term.itemsize)
    sums[term.kind, term.axes] = arrays + term.runs * each, size
  return dict(sums)


def budget(job: Job, itemsize: int | None = None) -> Sums:
  """Returns arrays and bytes of all that one step sends; `itemsize` as of `added_up`."""
  return added_up(
    [*terms.step_terms(of_job(job)), *terms.sent_by(terms.scalars, of_job(job))], job, itemsize
  )


def of_sources(job: Job, *sources: terms.Source) -> Sums:
  """Returns arrays and bytes of some of `terms.SOURCES`."""
  return added_up([term for source in sources for term in terms.sent_by(source, of_job(job))], job)


# ---- What the program does ----


@dataclasses.dataclass(frozen=True)
class Step:
  """A compiled train step of the small job: its text, and what XLA said on stderr meanwhile."""

  job: Job
  text: str
  said: str

  def sent(self) -> Sums:
    """Returns arrays and bytes of one step."""
    found = defaultdict(lambda: (0, 0))
    for c in collectives.collectives(self.text, self.job.mesh):
      arrays, size = found[c.kind, c.axes]
      found[c.kind, c.axes] = (arrays + c.count * c.arrays, size + c.count * c.bytes)
    return dict(found)


def job_of(strategy: str, *, recipe: str = "lm", **overrides) -> Job:
  """Returns the small job of one of `STRATEGIES`, here or of experts, or of a file of configs/."""
  every = {**STRATEGIES, **expert_cases.STRATEGIES}
  file, changed = every.get(strategy, (strategy, {}))
  return make_job(file, recipe, **{**changed, **overrides})


shared_job = functools.cache(job_of)


@functools.cache
def vit_job(strategy: str) -> Job:
  """Returns the small vision transformer of one of `VIT_STRATEGIES`."""
  file, changed = VIT_STRATEGIES[strategy]
  return make_job(file, "vit", **changed)


@functools.cache
def staged_job(strategy: str) -> Job:
  """Returns the small job of one of `pipeline_cases.STRATEGIES`."""
  return make_job("single", "lm", **pipeline_cases.STRATEGIES[strategy])


@functools.cache
def latent_job(strategy: str) -> Job:
  """Returns the small job with latent attention."""
  return job_of(strategy, **latents.LATENTS, **(latents.ZERO_1 if "ZeRO-1" in strategy else {}))


def compile_step(job: Job) -> Step:
  """Compiles a job's train step."""
  text, said = said_while(lambda: job.compile_train_step().function.as_text())
  return Step(job, text, said)


def measured(strategy: str, recipe: str = "lm", **overrides) -> tuple[Run, Step]:
  """Takes three steps in float64 on the mesh of a strategy; returns them, and what one sends."""
  file, changed = (VIT_STRATEGIES if recipe == "vit" else STRATEGIES)[strategy]
  momentum = {"optimizer.momentum": 0.9} if "ZeRO-1" in strategy else {}
  keys = {**changed, **momentum, **overrides}
  run, said = said_while(lambda: train(recipe, "float64", keys, file=file))
  return run, Step(run.job, run.trained.text, said)


# Of one of `STRATEGIES`, once for all tests.
trained = functools.cache(measured)


def assert_within_budget(ours: Step, itemsize: int | None = None) -> None:
  """Compares all that a step sends with the terms of its job; `itemsize` as of `added_up`."""
  assert ours.sent() == budget(ours.job, itemsize)


def said_while(compile_it: Callable[[], Any]) -> tuple[Any, str]:
  """Returns what a function returns, and what it wrote to stderr, C++ included.

  It compiles without the cache: a program that comes from there brings no warnings.
  """
  with tempfile.TemporaryFile() as file:
    _use_cache(False)
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
      result = compile_it()
    finally:
      os.dup2(kept, 2)
      os.close(kept)
      _use_cache(True)
    file.seek(0)
    return result, file.read().decode(errors="replace")


def _use_cache(use: bool) -> None:
  # JAX looks at the flag at its first compilation only, and again after a reset.
  jax.config.update("jax_enable_compilation_cache", use)
  compilation_cache.reset_cache()


# ---- The page ----


def page() -> str:
  """Returns docs/budgets.md."""
  lines = [*_INTRODUCTION.splitlines(), "", f"{_sizes(shared_job('dp8'), 'LDFNKHV')}.", ""]
  for source in (*terms.SOURCES, terms.scalars):
    said = " ".join(inspect.getdoc(source).removeprefix("Yields ").split())
    line = f"- **{_title(source)}**: {said}"
    lines += textwrap.wrap(line, 100, subsequent_indent="  ", break_on_hyphens=False)
  lines += ["", "## The decoder", "", *_HEAD]
  for strategy in STRATEGIES:
    lines += _rows(strategy, shared_job(strategy))
  lines += ["", *_OF_LATENTS.splitlines(), ""]
  lines += [f"{_sizes(latent_job('dp4_tp2'), 'QCIJUH')}.", "", *_HEAD]
  for strategy in latents.STRATEGIES:
    lines += _rows(strategy, latent_job(strategy))
  lines += ["", *_OF_EXPERTS.splitlines(), "", *_HEAD]
  for strategy in expert_cases.STRATEGIES:
    lines += _rows(strategy, job_of(strategy))
  lines += ["", *_OF_STAGES.splitlines(), "", *_HEAD]
  for strategy in pipeline_cases.STRATEGIES:
    lines += _rows(strategy, staged_job(strategy), (terms.pipeline_sends,))
  lines += ["", *_OF_VIT.splitlines(), "", f"{_sizes(vit_job('dp8'), 'LDFTXO')}.", "", *_HEAD]
  for strategy in VIT_STRATEGIES:
    lines += _rows(strategy, vit_job(strategy))
  for introduction, keys in ((_OF_MUON, MUON), (_OF_SOAP, SOAP)):
    lines += ["", *introduction.splitlines(), "", *_HEAD]
    for strategy in UPDATES:
      lines += _rows(strategy, job_of(strategy, **keys), (terms.matrix_exchanges,))
  return "\n".join([*lines, "", MORE, ""])


_HEAD = (
  "| strategy | source | kind | along | arrays | bytes |",
  "| --- | --- | --- | --- | ---: | ---: |",
)
_INTRODUCTION = f"""\
# What each strategy sends

Written by `{COMMAND}`; do not edit.

What one train step of small configs sends, by the formulas of `planning/terms.py`, with which plans
are made. `tests/parity/test_strategies.py` compares them with compiled programs, exactly: kinds of
collectives, axes (identified by the device ids of each group), arrays and bytes.

Bytes are payload per device: the array that is reduced or scattered, or the gathered array. In a
ring of n devices each sends (n - 1) / n of that, and twice as much in an all-reduce. Arrays are
counted, not messages: how XLA combines small all-reduces depends on its version. On CPUs an
all-to-all is compiled as one array for each device.

## Formulas

In numbers, not bytes. L layers, D model, F feedforward, N heads, K key/value heads, H head, V
padded vocabulary; d, f, c, t, P the sizes of `data`, `fsdp`, `context`, `tensor`, `expert`; m
microbatches, b rows of one on a device, T tokens of a row on a device; W numbers in the kernels of
a layer, as `tensor` splits them: D H (2 N + 2 K) / t + 3 D F / t, with K in place of K / t where t
does not divide it. The tables are of rows of 12 tokens, 16 in a batch, in float32 (4 bytes), and"""
_OF_LATENTS = """\
## Latent attention

With `model.attention=latent`, and a latent vector of the queries too. W is then D (Q + C + I) of
the down-projections and (Q N H + C N J + N U D + 3 D F) / t of the others. With sequence
parallelism latent vectors are gathered over `tensor`, not the residual. With ZeRO-1 their dims are
split as that of the residual is: `partitioning.optimizer.latent` and
`partitioning.optimizer.query_latent` are `("fsdp", "data")`.
`tests/parity/test_latent_budgets.py` compares them with the compiled programs. Q, C, I are the
numbers of a token in its latent vector of queries, in that of keys and values, and in the rotary
key; J of a head in both of its unrotated key and its value, U in its value:"""

_OF_EXPERTS = """\
## Experts

With `model.experts` tokens are sent along `expert`. The trip count of the loop over rounds is known
when it runs: this is with one round in each layer, in both passes.
`tests/parity/test_expert_budgets.py` compares it with the compiled programs."""

_OF_STAGES = """\
## Pipeline stages

With `mesh.stage` a step sends this along `stage`, beside scalars
([strategies.md](strategies.md#pipeline-stages)).
Along other axes each tick sends what the layers of one chunk send.
`tests/parity/test_pipeline_budgets.py` compares it with the compiled programs."""

_OF_VIT = """\
## Vision transformer

What one train step of a small `vit` config sends, 24 images of T patches of X numbers, O classes.
`tests/parity/test_vit.py` compares it with the compiled programs."""

_OF_MUON = """\
## The update of Muon

With `optimizer.name=muon` a step sends this in addition; AdamW's update sends nothing, or with
ZeRO-1 the same all-gather. `tests/parity/test_optimizers.py` compares it with the compiled
updates."""

_OF_SOAP = """\
## The update of SOAP

With `optimizer.name=soap` a step that refreshes the bases sends this in addition.
`tests/parity/test_optimizers.py` compares it with the compiled updates, and what a step without a
refresh sends."""


def _sizes(job: Job, letters: str) -> str:
  return ", ".join(f"{x} = {job.legend[x].size}" for x in letters)


def _title(source: terms.Source) -> str:
  return source.__name__.replace("_", " ")


def _rows(strategy: str, job: Job, sources: Iterable[terms.Source] = ()) -> list[str]:
  """Returns lines of a table; without sources of all, scalars in one line."""
  lines = []
  for source in sources or terms.SOURCES:
    for (kind, axes), (arrays, size) in of_sources(job, source).items():
      lines.append(_row(strategy, _title(source), kind, ", ".join(axes), arrays, size))
  found = {} if sources else of_sources(job, terms.scalars)
  along = "; ".join(", ".join(axes) for _, axes in found)
  counts = [sum(pair) for pair in zip(*found.values(), strict=True)]
  return lines + ([_row(strategy, "scalars", "all-reduce", along, *counts)] if found else [])


def _row(*cells: str | float) -> str:
  return f"| {' | '.join(x if isinstance(x, str) else f'{x:,.0f}' for x in cells)} |"


MORE = """\
## Adapters

With LoRA of rank r in all linear layers ([fine_tuning.md](fine_tuning.md)) no kernel has a gradient
to send. Of a layer's adapters the half with D among its dims has 7 D r numbers, the other half
(2 N H + 2 K H + 3 F) r, which `tensor` splits. Instead of the gradients of the kernels a step sends

- all-gather along fsdp, 2 L 7 D r: the first half, in both passes, besides the kernels;
- reduce-scatter along fsdp, L 7 D r; all-reduce along data and tensor, L 7 D r / f: its gradients;
- all-reduce along data and fsdp, L (2 N H + 2 K H + 3 F) r / t: those of the other half.

Activations are sent as without adapters. `tests/parity/test_lora.py` compares this with a compiled
program.

## Known inefficiencies

- ZeRO-1: the gradients are all-reduced as without it. A reduce-scatter of the same bytes would be
  enough, half of what a ring sends. From constraints alone XLA does not emit it on CPUs.
- The gradients of the scales over `fsdp`: the same, D numbers each.
- Microbatches: over `data` the sum of their gradients is reduced, over `fsdp`, `context` and
  `tensor` those of each. Over `fsdp` an unreduced sum would have the size of all parameters.
- `context`, gathered: the gradients of keys and values are all-reduced for each query head. A
  reduce-scatter for each key/value head would be enough. With both kinds of attention, the
  gradients of the parameters are all-reduced along `data` and then along `context`.
- Key and value kernels that `tensor` does not divide: their gradients are summed over it.
- Latent attention without sequence parallelism: every device along `tensor` computes the same
  latent vectors. Where `fsdp` gathers the down-projections, their gradients and those of
  attention's input are summed over `tensor`, although they are equal.
- Muon: stacks are filled up with zeros (dp8: 14 matrices are gathered as 24). Where `data` replicas
  share the work, a reduce-scatter of the gradients would be enough."""


def main() -> None:
  """Writes the page, with --write; else prints it."""
  devices.start({"data": 8}, simulate=True)
  if "--write" in sys.argv[1:]:
    PAGE.write_text(page())
  else:
    print(page())


if __name__ == "__main__":
  main()
