"""What theory says that a step of the small `lm` job sends, strategy by strategy.

  python -m tests.parity.budgets --write

writes docs/budgets.md. `test_budgets.py` compares theory with the compiled programs, to the byte.
"""

import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from analysis import collectives
from runtime import devices
from tests.helpers.jobs import make_job
from tests.parity import (
  expert_cases,
  expert_terms,
  latent_terms,
  latents,
  pipeline_terms,
  vit_terms,
)
from tests.parity.step_terms import NORM, TERMS
from tests.parity.theory import (
  LETTERS,
  letters,
  shown,
  theory,
  theory_of_muon,
  theory_of_soap,
)
from tests.parity.update_terms import MUON_LETTERS, MUON_TERMS, SOAP_LETTERS, SOAP_TERMS
from training.setup import Job

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "budgets.md"
COMMAND = "python -m tests.parity.budgets --write"

INVOLUNTARY = "nvoluntary full rematerialization"  # XLA says so on stderr, while it compiles
MUON = {"optimizer.name": "muon"}
SOAP = {"optimizer.name": "soap"}
SEQUENCE_PARALLEL = {"partitioning.sequence_parallel": True}
COLLECTIVE_MATMUL = {**SEQUENCE_PARALLEL, "partitioning.collective_matmul": True}
MICROBATCHES = {"training.gradient_accumulation_steps": 2}
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


# ---- What the program does ----


@dataclasses.dataclass(frozen=True)
class Step:
  """A compiled train step of the small job: its text, and what XLA said on stderr meanwhile."""

  job: Job
  text: str
  said: str

  def sent(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """Returns (kind, axes) -> (arrays, bytes) of one step."""
    found = defaultdict(lambda: (0, 0))
    for c in collectives.collectives(self.text, self.job.mesh):
      arrays, size = found[c.kind, c.axes]
      found[c.kind, c.axes] = (arrays + c.count * c.arrays, size + c.count * c.bytes)
    return dict(found)


def job_of(strategy: str, **overrides) -> Job:
  """Returns the small job of one of `STRATEGIES`, here or of experts."""
  file, changed = {**STRATEGIES, **expert_cases.STRATEGIES}[strategy]
  return make_job(file, "lm", **{**changed, **overrides})


shared_job = functools.cache(job_of)


@functools.cache
def vit_job(strategy: str) -> Job:
  """Returns the small vision transformer of one of `vit_terms.STRATEGIES`."""
  file, changed = vit_terms.STRATEGIES[strategy]
  return make_job(file, "vit", **changed)


@functools.cache
def latent_job(strategy: str) -> Job:
  """Returns the small job with latent attention."""
  return job_of(strategy, **latents.LATENTS, **(latents.ZERO_1 if "ZeRO-1" in strategy else {}))


def compile_step(job: Job) -> Step:
  """Compiles a job's train step."""
  text, said = said_while(lambda: job.compile_train_step().function.as_text())
  return Step(job, text, said)


@functools.cache
def step(strategy: str) -> Step:
  """Returns the step of one of `STRATEGIES`, compiled once for all tests."""
  return compile_step(shared_job(strategy))


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
  job = shared_job("dp8")
  sizes = ", ".join(f"{name} = {letters(job)[name]}" for name in "LDFNKHVT")
  lines = [
    "# What each strategy sends",
    "",
    f"Written by `{COMMAND}`; do not edit.",
    "",
    "What one train step of a small `lm` config sends, in formulas. `tests/parity/test_budgets.py`",
    "compares them with the compiled programs, exactly: kinds of collectives, axes (identified by",
    "the device ids of each group), arrays and bytes.",
    "",
    f"{sizes}, {job.config.data.global_batch_size} rows, float32 (4 bytes).",
    "",
    LETTERS,
    "",
    "Bytes are payload per device: the array that is reduced or scattered, or the gathered array.",
    "In a ring of n devices each sends (n - 1) / n of that, and twice as much in an all-reduce.",
    "Arrays are counted, not messages: how XLA combines small all-reduces depends on its version.",
    "",
    *_HEAD,
  ]
  for strategy in STRATEGIES:
    lines += _rows(strategy, theory(shared_job(strategy)))
  lines += ["", "## Why", "", *_reasons(TERMS)]
  lines += textwrap.wrap(f"- all-reduce, a few scalars: {NORM}", 100, subsequent_indent="  ")
  sizes = ", ".join(f"{n} = {letters(latent_job('dp4_tp2'))[n]}" for n in "QCIJUH")
  lines += ["", *_OF_LATENTS.splitlines(), "", f"{sizes}.", "", latent_terms.LETTERS, "", *_HEAD]
  for strategy in latents.STRATEGIES:
    lines += _rows(strategy, theory(latent_job(strategy)))
  lines += ["", *_reasons(latent_terms.OF_LATENTS)]
  lines += expert_section()
  lines += ["", *_OF_STAGES.splitlines(), "", pipeline_terms.LETTERS, "", *_HEAD]
  for strategy in pipeline_terms.STRATEGIES:
    lines += _rows(strategy, pipeline_terms.theory(pipeline_terms.job_of(strategy)))
  lines += ["", *_reasons(pipeline_terms.TERMS)]
  lines += vit_section()
  lines += ["", *_OF_MUON.splitlines(), "", MUON_LETTERS, "", *_HEAD]
  for strategy in UPDATES:
    lines += _rows(strategy, theory_of_muon(job_of(strategy, **MUON)))
  lines += ["", *_reasons(MUON_TERMS)]
  lines += ["", *_OF_SOAP.splitlines(), "", SOAP_LETTERS, "", *_HEAD]
  for strategy in UPDATES:
    for when, terms in SOAP_TERMS.items():
      lines += _rows(f"{strategy}, {when}", theory_of_soap(job_of(strategy, **SOAP), terms))
  lines += ["", *_reasons(term for terms in SOAP_TERMS.values() for term in terms)]
  return "\n".join([*lines, "", MORE, ""])


_HEAD = (
  "| strategy | kind | along | elements | arrays | bytes |",
  "| --- | --- | --- | --- | ---: | ---: |",
)
_OF_LATENTS = """\
## Latent attention

With `model.attention=latent`, and a latent vector of the queries too. With sequence parallelism
latent vectors are gathered over `tensor`, not the residual. With ZeRO-1 their dims are split as
that of the residual is: `partitioning.optimizer.latent` and `partitioning.optimizer.query_latent`
are `("fsdp", "data")`. `tests/parity/test_latent_budgets.py` compares the formulas with the
compiled programs, and the planner with both. Reasons that are not about attention are above."""

_OF_EXPERTS = """\
## Exchange of tokens between experts

With `model.experts` tokens are sent along `expert`. The trip count of the loop over rounds is known
when it runs: here is what one round in each layer sends, in both passes. On CPUs an all-to-all is
compiled as one array for each device. `tests/parity/test_expert_budgets.py` compares the formulas
with the compiled programs."""

_OF_STAGES = """\
## Pipeline stages

With `mesh.stage` a step sends this along `stage`, beside the scalars of the norm
([pipeline.md](pipeline.md)). Along other axes each tick sends what the layers of one chunk send.
`tests/parity/test_pipeline_budgets.py` compares the formulas with the compiled programs."""

_OF_VIT = """\
## Vision transformer

What one train step of a small `vit` config sends, with the scalars of the norm as above.
`tests/parity/test_vit.py` compares the formulas with the compiled programs, and the planner with
both."""

_OF_MUON = """\
## The update of Muon

With `optimizer.name=muon` a step sends this in addition; AdamW's update sends nothing, or with
ZeRO-1 the same all-gather. Matrices of the same shape and sharding are stacked, those of all layers
and also transposed ones, and each device orthogonalizes its part of the stack.
`tests/parity/test_muon.py` compares the formulas with the compiled updates. On CPUs an all-to-all
is compiled as one array for each device; the bytes are those of all of them. What the stack lacks
for an equal number on all devices is sent as zeros."""

_OF_SOAP = """\
## The update of SOAP

With `optimizer.name=soap` a step sends this in addition, and a step that refreshes the bases the
lines of a refresh too. With ZeRO-1 parameters are gathered as with AdamW, and the all-to-alls are
along `data` too. Of an A x B matrix a step moves 4 A B + 2 (A A + B B) numbers, a refresh
2 A B + 2 (A A + B B) more. `tests/parity/test_soap.py` compares the formulas with the compiled
updates."""


def _rows(strategy: str, found: dict) -> list[str]:
  """Returns lines of a table."""
  lines = []
  for (kind, axes), row in found.items():
    cells = [strategy, kind, ", ".join(axes), row.formula, f"{row.arrays:,}", f"{row.bytes:,}"]
    lines.append(f"| {' | '.join(cells)} |")
  return lines


def expert_section() -> list[str]:
  """Returns the lines about the exchange of tokens between experts."""
  lines = ["", *_OF_EXPERTS.splitlines(), "", expert_terms.LETTERS, "", *_HEAD]
  for strategy in expert_cases.STRATEGIES:
    for (kind, axes, each_round), row in expert_terms.theory(job_of(strategy)).items():
      name = f"{strategy}, one round in each layer" if each_round else strategy
      lines += _rows(name, {(kind, axes): row})
  return [*lines, "", *_reasons((*expert_terms.TERMS, *expert_terms.ROUND_TERMS))]


def vit_section() -> list[str]:
  """Returns the lines about the vision transformer."""
  job = vit_job("dp8")
  sizes = ", ".join(f"{name} = {letters(job)[name]}" for name in "LDFTXO")
  images = f"{sizes}, {job.config.data.global_batch_size} images."
  lines = ["", *_OF_VIT.splitlines(), "", images, "", vit_terms.LETTERS, "", *_HEAD]
  for strategy in vit_terms.STRATEGIES:
    lines += _rows(strategy, theory(vit_job(strategy)))
  return [*lines, "", *_reasons(vit_terms.TERMS)]


def _reasons(terms) -> list[str]:
  """Returns a list of why terms are sent."""
  lines = []
  for term in terms:
    about = f"{term.kind} along {' and '.join(term.axes)}, {shown(term.elements)}"
    lines += textwrap.wrap(f"- {about}: {term.why}", 100, subsequent_indent="  ")
  return lines


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
