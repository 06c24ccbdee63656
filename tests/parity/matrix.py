r"""Every mesh by every variant, beside one device; what `make test-all` runs.

  python -m tests.parity.matrix [--write] [--missing] [--only=TEXT] [--workers=2]

Prints a line per combination and a table. With --write each result is kept in docs/parity.json as
soon as it is there, in place of an older one, and the section of docs/compare.md is written from
all of them. --only takes the combinations whose name holds TEXT, --missing those that have no
result of this code and these libraries yet: so a run can resume another one. Exits with 1 where a
tensor is beyond its bound.
"""

import argparse
import concurrent.futures
import functools
import importlib
import multiprocessing
import sys
from typing import Any

from tests.docs.pages import write_section
from tests.parity.comparison import MESHES as OF_BATCH_AND_PARAMETERS
from tests.parity.comparison import Run, train
from tests.parity.results import PAGE, Combination, Result, load, made_here, page, save
from tests.parity.variants import ACCUMULATED, BOUNDS, VARIANTS
from training.parity import beyond, differences

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
  "data2_context2_tensor2 ring": {
    "mesh.data": 2,
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
  "fsdp2_context2_tensor2 Ulysses": {
    "mesh.fsdp": 2,
    "mesh.context": 2,
    "mesh.tensor": 2,
    "model.context_attention": "ulysses",
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
VIT_VARIANTS = (
  "plain",
  "dropout",
  "three microbatches, kernels kept",
  "rematerialization dots",
  "sequence-parallel",
  "sequence-parallel, collective matmuls",
  "ZeRO-1",
)
VIT_MESHES = (*OF_BATCH_AND_PARAMETERS, "fsdp2_context2_tensor2 gathered")
OF_RECIPES = {"lm": tuple(VARIANTS), "mlp": MLP_VARIANTS, "vit": VIT_VARIANTS}
ROWS = 16  # of the global batch of the small jobs of texts


def combinations() -> list[Combination]:
  """Returns the matrix; a variant that a mesh has no axis for is left out."""
  return [
    Combination(recipe, mesh, variant, dtype)
    for recipe, variants in OF_RECIPES.items()
    for variant in variants
    if recipe in VARIANTS[variant].recipes
    for dtype in VARIANTS[variant].dtypes
    for mesh in (VARIANTS[variant].meshes or MESHES)
    if recipe != "mlp" or mesh in OF_BATCH_AND_PARAMETERS
    if recipe != "vit" or mesh in VIT_MESHES
    if dtype != "float32" or variant == "plain" or (mesh not in OF_SEQUENCE and recipe != "vit")
    if mesh not in OF_STAGES or (dtype == "float64" and variant in STAGES_VARIANTS)
    if ("tensor" in mesh or "sequence" not in variant)
    and ("data" in mesh or "ZeRO-1" not in variant)
  ]


def overrides(combination: Combination) -> dict[str, Any]:
  """Returns the keys of a combination, besides those of the reference."""
  mesh = MESHES[combination.mesh]
  if combination.recipe == "vit":  # which has one way to attend over a split sequence
    mesh = {key: value for key, value in mesh.items() if key.startswith("mesh.")}
  rest = {**VARIANTS[combination.variant].ours}
  for key in ACCUMULATED:  # at most as many as the batch axes leave
    if key in rest and rest[key] is None:
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
  largest = max((one.distance for one in found if not one.note), default=0.0)
  return Result(combination, len(found), largest, wrong, made_here())


def _start_worker() -> None:
  importlib.import_module("tests.conftest")  # makes the simulated devices


def kept(results: dict[Combination, Result]) -> int:
  """Keeps what there is of the matrix, and writes the page; returns how many results lack."""
  wanted = combinations()
  found = [results[one] for one in wanted if one in results]
  save(found)
  missing = len(wanted) - len(found)
  write_section(PAGE, page(found, MESHES, missing))
  return missing


def chosen(
  only: str, missing: bool, before: dict[Combination, Result], made: tuple[str, ...]
) -> list[Combination]:
  """Returns what a run takes.

  Args:
    only: text that the names hold.
    missing: whether those are left out that have a result of this code and these libraries.
    before: the kept results.
    made: of `made_here`.
  """
  done = {c for c, one in before.items() if missing and one.made == made}
  return [c for c in combinations() if only in c.name and c not in done]


def main() -> int:
  """Runs the matrix; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--write", action="store_true", help="keep the results, in docs/compare.md too"
  )
  parser.add_argument("--missing", action="store_true", help="those without a result of this code")
  parser.add_argument("--only", default="", help="combinations whose name holds this text")
  parser.add_argument("--workers", type=int, default=2, help="processes at work")
  arguments = parser.parse_args()
  if not chosen(arguments.only, False, {}, ()):
    parser.error("--only names no combination")
  before = load()
  taken = chosen(arguments.only, arguments.missing, before, made_here())
  results = []
  with concurrent.futures.ProcessPoolExecutor(
    arguments.workers, multiprocessing.get_context("spawn"), _start_worker
  ) as pool:
    for result in pool.map(compare, taken):
      verdict = "; ".join(result.wrong) or "equal"
      print(
        f"{result.combination.name}: {result.tensors} tensors, {result.largest:.1e}, {verdict}",
        flush=True,
      )
      results.append(result)
      before[result.combination] = result
      if arguments.write:
        kept(before)
  if arguments.write:
    kept(before)  # also where nothing was left to run
  print(page(results, MESHES))
  return int(any(result.wrong for result in results))


if __name__ == "__main__":
  sys.exit(main())
