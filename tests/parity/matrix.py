r"""Every mesh by every variant, beside one device; what `make test-all` runs.

  python -m tests.parity.matrix [--write] [--only=TEXT] [--workers=2]

Prints a line per combination and a table; with --write the table goes to docs/parity.md. Exits
with 1 where a tensor is beyond its bound. --only takes the combinations whose name holds TEXT.
"""

import argparse
import collections
import concurrent.futures
import functools
import importlib
import multiprocessing
import pathlib
import platform
import sys
from typing import Any, NamedTuple

from runtime.provenance import versions
from tests.parity.comparison import MESHES as OF_BATCH_AND_PARAMETERS
from tests.parity.comparison import Run, train
from tests.parity.variants import ACCUMULATED, BOUNDS, VARIANTS
from training.parity import beyond, differences

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "parity.md"
RING, GATHER = ({"model.context_attention": kind} for kind in ("ring", "gather"))
# Where the sequence is split as well.
OF_SEQUENCE = {
  "data2_context4 ring": {"mesh.data": 2, "mesh.context": 4, **RING},
  "fsdp4_context2 ring": {"mesh.fsdp": 4, "mesh.context": 2, **RING},
  "context4_tensor2 ring": {"mesh.context": 4, "mesh.tensor": 2, **RING},
  "fsdp2_context2_tensor2 ring": {
    "mesh.fsdp": 2,
    "mesh.context": 2,
    "mesh.tensor": 2,
    **RING,
  },
  "fsdp2_context2_tensor2 gathered": {
    "mesh.fsdp": 2,
    "mesh.context": 2,
    "mesh.tensor": 2,
    **GATHER,
  },
}
# With pipeline stages. tests/parity/pipeline_cases.py has more: also beside dropout and 8-bit
# matmuls, whose numbers depend on which rows a microbatch has.
OF_STAGES = {
  "data2_stage2_tensor2": {"mesh.data": 2, "mesh.stage": 2, "mesh.tensor": 2},
  "fsdp2_stage2_context2 ring": {
    "mesh.fsdp": 2,
    "mesh.stage": 2,
    "mesh.context": 2,
    **RING,
  },
}
STAGES_VARIANTS = (
  "plain",
  "features",
  "features, accumulated",
  "one key/value head",
  "sequence-parallel",
  "the families' options",
  "learned positions",
  "adapters",
)
MESHES = {**OF_BATCH_AND_PARAMETERS, **OF_SEQUENCE, **OF_STAGES}
MLP_VARIANTS = ("plain", "ZeRO-1")
ROWS = 16  # of the global batch of the small jobs


class Combination(NamedTuple):
  """One entry of the matrix."""

  recipe: str
  mesh: str
  variant: str
  dtype: str

  @property
  def name(self) -> str:
    """Returns it as a person reads it."""
    return f"{self.recipe} {self.mesh} {self.variant}, {self.dtype}"


class Result(NamedTuple):
  """How far a combination is from one device."""

  combination: Combination
  tensors: int
  largest: float
  wrong: tuple[str, ...]


def combinations() -> list[Combination]:
  """Returns the matrix; a variant that a mesh has no axis for is left out."""
  return [
    Combination(recipe, mesh, variant, dtype)
    for recipe in ("lm", "mlp")
    for variant in (VARIANTS if recipe == "lm" else MLP_VARIANTS)
    for dtype in VARIANTS[variant].dtypes
    for mesh in (VARIANTS[variant].meshes or MESHES)
    if recipe == "lm" or mesh in OF_BATCH_AND_PARAMETERS
    if mesh not in OF_SEQUENCE or dtype != "float32" or variant == "plain"
    if mesh not in OF_STAGES or (dtype == "float64" and variant in STAGES_VARIANTS)
    if ("tensor" in mesh or "sequence" not in variant)
    and ("data" in mesh or "ZeRO-1" not in variant)
  ]


def overrides(combination: Combination) -> dict[str, Any]:
  """Returns the keys of a combination, besides those of the reference."""
  mesh = MESHES[combination.mesh]
  rest = {**VARIANTS[combination.variant].ours}
  for key in ACCUMULATED.keys() & rest.keys():  # at most as many as the batch axes leave
    rows = ROWS // (mesh.get("mesh.data", 1) * mesh.get("mesh.fsdp", 1))
    rest[key] = min(rows, 4)
  return {**mesh, **rest}


@functools.cache
def on_one_device(recipe: str, variant: str, dtype: str) -> Run:
  """Returns what one device gives, without what only changes how it is computed."""
  return train(recipe, dtype, VARIANTS[variant].shared)


def compare(combination: Combination) -> Result:
  """Trains on the mesh, and compares."""
  recipe, _, variant, dtype = combination
  shared = VARIANTS[variant].shared
  same = next(name for name, other in VARIANTS.items() if other.shared == shared)
  wanted = on_one_device(recipe, same, dtype)
  ours = train(recipe, dtype, {**shared, **overrides(combination)})
  found = differences(ours.trained, wanted.trained)
  wrong = tuple(f"{x.what} {x.name}: {x.distance:.2e}" for x in beyond(found, BOUNDS[dtype]))
  return Result(combination, len(found), max(one.distance for one in found), wrong)


def page(results: list[Result]) -> str:
  """Returns docs/parity.md."""
  worst: dict[str, float] = collections.defaultdict(float)
  table: dict[tuple[str, str], dict[str, float]] = collections.defaultdict(dict)
  for (recipe, mesh, variant, dtype), _, largest, _ in results:
    worst[dtype] = max(worst[dtype], largest)
    cell = table[f"{recipe}, {variant}", dtype]
    cell[mesh] = max(cell.get(mesh, 0.0), largest)
  meshes = [mesh for mesh in MESHES if any(mesh in row for row in table.values())]
  lines = [
    "# Every strategy next to one device",
    "",
    "Written by `make test-all` (`python -m tests.parity.matrix --write`); do not edit.",
    "",
    "Each entry is the largest relative L2 difference between 8 simulated devices and one device,",
    "at highest matmul precision, with the same initial parameters and batches. It covers the",
    "losses of three steps, every raw gradient of the first, the gradient norms, and every",
    "parameter after the third. The optimizer is SGD where none is named.",
    "[compare.md](compare.md) compares configs of your own.",
    "",
    f"{len(results)} combinations, {sum(r.tensors for r in results):,} tensors compared, "
    f"{sum(bool(r.wrong) for r in results)} combinations beyond the bound.",
    "",
    *(
      f"- {dtype}: at most {largest:.1e}; bound {BOUNDS[dtype]:g}"
      for dtype, largest in worst.items()
    ),
    f"- Python {platform.python_version()}, "
    + ", ".join(f"{name} {version}" for name, version in _shown(versions()).items()),
    "",
    "In all variants rows have different weights, the vocabulary is padded, and there are fewer",
    "key/value heads than query heads.",
    "",
    "- features: tied embeddings, intra-document attention masking, full rematerialization",
    "- accumulated: in 2 to 4 microbatches, the reference in one",
    "- the families' options: sliding-window attention in every other layer, with another rotary",
    "  base, soft-capping of scores and logits, biases, query and key norms, norms after the",
    "  blocks, scaled embeddings",
    "- adapters: LoRA of rank 3 in all linear layers, whose kernels are frozen",
    "- learned positions: with LayerNorm, biases, tied embeddings, an ungated MLP",
    "- muP: a base width of 10, where the model has 40",
    "- soap: bases made in the first step, refreshed in the second, used in the third",
    "- clipped by group, averages: the parameters' moving averages are compared too",
    "- offloaded activations and state: the layers' inputs, the results of attention and AdamW's",
    "  moments in host memory, the queries saved; the reference has all on its device",
    "- chunked: the loss in three chunks of the vocabulary; offloaded: the activations above",
    "- a group: a learning rate and a decay of its own for the embeddings, trained beside adapters",
    "- ramps: 16 rows of 12 tokens, then 32 of 12, then 16 of 24; raw gradients are not compared",
    "- stored in fewer bytes: bfloat16 parameters and 8-bit moments of AdamW, computed in float32.",
    "  Sums over devices differ in their last bits, and a number close to the border between two",
    "  codes is then rounded to the other one: 0.4 percent of a parameter, 3 to 6 of a moment",
    "",
    f"| variant | dtype | {' | '.join(meshes)} |",
    f"| --- | --- |{' --- |' * len(meshes)}",
  ]
  for (variant, dtype), row in table.items():
    cells = " | ".join(f"{row[mesh]:.1e}" if mesh in row else "" for mesh in meshes)
    lines.append(f"| {variant} | {dtype} | {cells} |")
  return "\n".join(lines) + "\n"


def _shown(found: dict[str, Any]) -> dict[str, str]:
  return {name: found[name] for name in ("jax", "jaxlib", "flax", "optax") if name in found}


def _start_worker() -> None:
  importlib.import_module("tests.conftest")  # makes the simulated devices


def main() -> int:
  """Runs the matrix; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--write", action="store_true", help="write docs/parity.md")
  parser.add_argument("--only", default="", help="combinations whose name holds this text")
  parser.add_argument("--workers", type=int, default=2, help="processes at work")
  arguments = parser.parse_args()
  chosen = [c for c in combinations() if arguments.only in c.name]
  if not chosen or (arguments.write and arguments.only):
    parser.error("--only names no combination, or goes with --write, which needs all of them")
  results = []
  with concurrent.futures.ProcessPoolExecutor(
    arguments.workers, multiprocessing.get_context("spawn"), _start_worker
  ) as pool:
    for result in pool.map(compare, chosen):
      verdict = "; ".join(result.wrong) or "equal"
      print(
        f"{result.combination.name}: {result.tensors} tensors, {result.largest:.1e}, {verdict}",
        flush=True,
      )
      results.append(result)
  text = page(results)
  print(text)
  if arguments.write:
    PAGE.write_text(text)
  return int(any(result.wrong for result in results))


if __name__ == "__main__":
  sys.exit(main())
