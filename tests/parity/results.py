"""Results of the parity matrix: kept from one run to the next, and the section of docs/compare.md.

A run may take some of the combinations. Each result is kept with the digest of the code and the
versions of the libraries that gave it, and the page says how many are of which.
"""

import collections
import json
import pathlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from runtime.provenance import versions
from tests.parity.variants import BOUNDS

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE, KEPT = DOCS / "compare.md", DOCS / "parity.json"
HEADING = "## Every strategy next to one device"
LIBRARIES = ("jax", "jaxlib", "flax", "optax")
VERSIONS = ("code", "python", *LIBRARIES)


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
  made: tuple[str, ...] = ()  # VERSIONS of what gave it; (): unknown


def made_here() -> tuple[str, ...]:
  """Returns the digest of the code, and the versions of Python and of the libraries."""
  found = {**versions(), "python": platform.python_version()}
  return tuple(found[name] for name in VERSIONS)


def load(path: pathlib.Path = KEPT) -> dict[Combination, Result]:
  """Returns the kept results; {} if there are none."""
  if not path.exists():
    return {}
  kept = json.loads(path.read_text())
  runs = [tuple(run[name] for name in VERSIONS) for run in kept["runs"]]
  found = {}
  for *combination, tensors, largest, wrong, run in kept["results"]:
    one = Combination(*combination)
    found[one] = Result(one, tensors, largest, tuple(wrong), runs[run])
  return found


def save(results: Iterable[Result], path: pathlib.Path = KEPT) -> None:
  """Keeps results, one a line."""
  results = list(results)
  runs = sorted({one.made for one in results})
  lines = [
    json.dumps([*one.combination, one.tensors, one.largest, one.wrong, runs.index(one.made)])
    for one in results
  ]
  made = json.dumps([dict(zip(VERSIONS, run, strict=True)) for run in runs], indent=1)
  text = ",\n".join(lines)
  path.write_text(f'{{"runs": {made},\n"results": [\n{text}\n]}}\n')


# ------------------------------ the section ------------------------------


def page(results: Sequence[Result], meshes: Iterable[str], missing: int = 0) -> str:
  """Returns the section of docs/compare.md.

  Args:
    results: in the order of the table.
    meshes: its columns, those that no result is of left out.
    missing: how many combinations of the matrix have no result.
  """
  worst: dict[str, float] = collections.defaultdict(float)
  table: dict[tuple[str, str], dict[str, float]] = collections.defaultdict(dict)
  for (recipe, mesh, variant, dtype), _, largest, *_ in results:
    worst[dtype] = max(worst[dtype], largest)
    cell = table[f"{recipe}, {variant}", dtype]
    cell[mesh] = max(cell.get(mesh, 0.0), largest)
  meshes = [mesh for mesh in meshes if any(mesh in row for row in table.values())]
  lines = [
    HEADING,
    "",
    *_HEAD.splitlines(),
    "",
    f"{len(results)} combinations, {sum(r.tensors for r in results):,} tensors compared, "
    f"{sum(bool(r.wrong) for r in results)} combinations beyond the bound.",
    *([f"{missing} combinations of the matrix have not been run."] if missing else []),
    "",
    *(
      f"- {dtype}: at most {largest:.1e}; bound {BOUNDS[dtype]:g}"
      for dtype, largest in worst.items()
    ),
    *_provenance(results),
    "",
    *_ABOUT.splitlines(),
    "",
    f"| variant | dtype | {' | '.join(meshes)} |",
    f"| --- | --- |{' --- |' * len(meshes)}",
  ]
  for (variant, dtype), row in table.items():
    cells = " | ".join(f"{row[mesh]:.1e}" if mesh in row else "" for mesh in meshes)
    lines.append(f"| {variant} | {dtype} | {cells} |")
  return "\n".join(lines) + "\n"


def _provenance(results: Sequence[Result]) -> list[str]:
  """Returns a line for each code and set of libraries that results are of, in falling order."""
  counts = collections.Counter(one.made for one in results if one.made)
  lines = []
  for made, count in counts.most_common():
    known: Mapping[str, Any] = dict(zip(VERSIONS, made, strict=True))
    libraries = ", ".join(f"{name} {known[name]}" for name in LIBRARIES)
    text = f"Python {known['python']}, {libraries}, code of digest {known['code']}"
    lines.append(f"- {text}" + (f": {count} combinations" if len(counts) > 1 else ""))
  return lines


_HEAD = """\
Written by `make test-all` (`python -m tests.parity.matrix --write`), from what is kept in
[parity.json](parity.json); do not edit.

Each entry is the largest relative L2 difference between 8 simulated devices and one device,
at highest matmul precision, with the same initial parameters and batches. It covers the
losses of three steps, every raw gradient of the first, the gradient norms, and every
parameter after the third. A tensor that differs by no more than the rounding of all tensors of its
kind together counts as equal. The optimizer is SGD where none is named."""
_ABOUT = """\
In all variants rows have different weights. Those of the decoder (lm) have a padded vocabulary, and
fewer key/value heads than query heads. vit is a vision transformer, mlp a classifier without
attention. Each of two pipeline stages has one of two layers; the schedule is 1F1B.

- features: tied embeddings, intra-document attention masking, full rematerialization
- accumulated: in 2 to 4 microbatches, the reference in one
- the families' options: sliding-window attention in every other layer, with another rotary
  base, soft-capping of scores and logits, biases, query and key norms, norms after the
  blocks, scaled embeddings
- adapters: LoRA of rank 3 in all linear layers, whose kernels are frozen
- learned positions: with LayerNorm, biases, tied embeddings, an ungated MLP
- muP: a base width of 10, where the model has 40
- soap: bases made in the first step, refreshed in the second, used in the third
- clipped by group, averages: the parameters' moving averages are compared too
- offloaded activations and state: the layers' inputs, the results of attention and AdamW's
  moments in host memory, the queries saved; the reference has all on its device
- chunked: the loss in three chunks of the vocabulary; offloaded: the activations above
- a group: a learning rate and a decay of its own for the embeddings, trained beside adapters
- ramps: 16 rows of 12 tokens, then 32 of 12, then 16 of 24; raw gradients are not compared
- stored in fewer bytes: bfloat16 parameters and 8-bit moments of AdamW, computed in float32.
  Sums over devices differ in their last bits, and a number close to the border between two
  codes is then rounded to the other one: 0.4 percent of a parameter, 3 to 6 of a moment"""
