"""What theory says that a train step of the transformer sends: kinds, axes, arrays, bytes.

Every formula is written once: it is computed, compared with the compiled programs and printed.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable

import jax

from partitioning.dims import spec_entries
from tests.parity import latent_terms
from tests.parity.update_terms import MUON_TERMS, SOAP_TERMS, Term, with_zero_1
from training.setup import Job

KERNELS = "L * W + 2 * V * D / t"
TERMS = (
  Term(
    "all-gather",
    ("fsdp",),
    "m * 2 * 7 * L",
    "m * 2 * L * W",
    "The seven kernels of each layer, inside the scan over layers, and again in its backward pass, "
    "because gathered kernels are not saved.",
    only="not kept",
  ),
  Term(
    "all-gather",
    ("fsdp",),
    "m * 7 * L",
    "m * L * W",
    "With partitioning.reshard_after_forward=False: once, since they are saved.",
    only="kept",
  ),
  Term(
    "all-gather",
    ("fsdp",),
    "2",
    "2 * V * D / t",
    "Embedding and unembedding, once. The gradient of a lookup does not read the table, the "
    "gradient of the logits follows them immediately, and XLA hoists both out of the loop over "
    "microbatches.",
    of_all=True,
  ),
  Term(
    "all-gather",
    ("fsdp",),
    "m * 2 * L + 1",
    "(m * 2 * L + 1) * D",
    "The scales of the norms, D numbers each, which are saved for the backward pass.",
  ),
  Term(
    "reduce-scatter",
    ("fsdp",),
    "m * (7 * L + 2)",
    f"m * ({KERNELS})",
    "The gradients of the kernels: the transpose of each all-gather.",
  ),
  Term(
    "all-reduce",
    ("data",),
    "m * (7 * L + 2)",
    f"m * ({KERNELS}) / f",
    "The gradients of the kernels; each device reduces those of its own shard.",
    only="not once",
  ),
  Term(
    "all-reduce",
    ("data",),
    "7 + 2",
    f"({KERNELS}) / f",
    "Where microbatches are added up before the reduction over data: the sums of the gradients of "
    "the kernels, those of all layers as one array.",
    only="once",
  ),
  Term(
    "all-reduce",
    ("data", "fsdp"),
    "m * (2 * L + 1)",
    "m * (2 * L + 1) * D",
    "The full gradients of the scales. From constraints alone XLA emits no reduce-scatter.",
    only="not once",
  ),
  Term(
    "all-reduce",
    ("fsdp",),
    "m * (2 * L + 1)",
    "m * (2 * L + 1) * D",
    "In the same case: the full gradients of the scales of each microbatch.",
    only="once",
  ),
  Term(
    "all-reduce",
    ("data",),
    "2 + 1",
    "(2 * L + 1) * D / f",
    "In the same case: their sums, sharded as the scales are.",
    only="once",
  ),
  Term(
    "all-reduce",
    ("data", "fsdp"),
    "m * 2",
    "m * 2",
    "Two scalars: the sum of the losses and the sum of the weights.",
    only="not once",
    of_all=True,
  ),
  Term(
    "all-reduce",
    ("fsdp",),
    "m * 2",
    "m * 2",
    "In the same case: the two scalars of each microbatch.",
    only="once",
    of_all=True,
  ),
  Term(
    "all-reduce",
    ("data",),
    "2",
    "2",
    "In the same case: their sums.",
    only="once",
    of_all=True,
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * (4 * L + 2)",
    "m * (4 * L + 2) * b * T * D",
    "Forward: the partial sums of the embedding and of both blocks of a layer. Backward: the "
    "gradients of the inputs of both blocks and of the logits, each summed over its uses first.",
    only="not sequence_parallel",
  ),
  Term(
    "reduce-scatter",
    ("tensor",),
    "m * (4 * L + 2)",
    "m * (4 * L + 2) * b * T * D",
    "The same sums; each device keeps its part of the sequence.",
    only="sequence_parallel and not collective_matmul",
  ),
  Term(
    "reduce-scatter",
    ("tensor",),
    "m",
    "m * b * T * D",
    "With collective matmuls: of the embedding alone.",
    only="collective_matmul",
  ),
  Term(
    "all-gather",
    ("tensor",),
    "m * (6 * L + 2)",
    "m * (6 * L + 2) * b * T * D",
    "The inputs of both blocks and of the logits, and the gradients of the outputs of embedding "
    "and blocks. Inputs of blocks are saved sharded and gathered again in the backward pass.",
    only="sequence_parallel and not collective_matmul",
  ),
  Term(
    "all-gather",
    ("tensor",),
    "m",
    "m * b * T * D",
    "With collective matmuls: the gradient of the embedding's output.",
    only="collective_matmul",
  ),
  Term(
    "collective-permute",
    ("tensor",),
    "m * (10 * L + 2) * (t - 1) * h",
    "m * (10 * L + 2) * (t - 1) / t * b * T * D",
    "The other gathers and scatters as rings: t - 1 times a device passes on its part of the "
    "sequence, in h halves, one for each direction. h is 1 where t is 2, or the part is odd.",
    only="collective_matmul",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * (2 * L + 1)",
    "m * (2 * L + 1) * D",
    "The gradients of the scales, to which each part of the sequence contributes.",
    only="sequence_parallel",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * 3",
    "m * 3 * b * T",
    "Vocabulary-parallel cross-entropy: the largest logit, the sum of exponentials and the "
    "target's logit of each token.",
    of_all=True,
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * 2 * L",
    "m * 2 * L * b * T * H",
    "Where tensor does not divide the key/value heads: the gradients of the keys and values that "
    "the query heads of one group share, one head in each group of t / K devices.",
    only="k == K and t > 1",
  ),
  Term(
    "all-gather",
    ("tensor",),
    "m * 2 * L",
    "m * 2 * L * b * T * K * H",
    "In the same case: from these, the gradients of all keys and values on each device.",
    only="k == K and t > 1",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * 2 * L",
    "m * 2 * L * D * K * H",
    "In the same case: the gradients of the replicated key and value kernels, divided by t, since "
    "shard_map does not know that they are equal.",
    only="k == K and t > 1",
  ),
  Term(
    "all-reduce",
    ("context",),
    "m * (9 * L + 5)",
    f"m * (({KERNELS}) / f + (2 * L + 1) * D + 2)",
    "All gradients and the two scalars, summed over the parts of the sequence as well. XLA reduces "
    "over one sharded dim after the other.",
  ),
  Term(
    "all-gather",
    ("context",),
    "m * 3",
    "m * 3 * b * T * c",
    "The zigzag order of ring attention: tokens, targets and weights of whole rows, from which "
    "each device takes an early and a late piece.",
    only="ring",
    of_all=True,
  ),
  Term(
    "collective-permute",
    ("context",),
    "m * L * (6 * (c - 1) + 2)",
    "m * L * (6 * (c - 1) + 2) * b * T * k * H",
    "Ring attention: keys and values are passed to the next device c - 1 times, and again in the "
    "backward pass, with their gradients, which take one more hop back to their own device.",
    only="ring",
  ),
  Term(
    "all-gather",
    ("context",),
    "m * L * 2",
    "m * L * 2 * b * T * c * k * H",
    "Instead of a ring: the keys and values of whole rows.",
    only="not ring",
  ),
  Term(
    "all-reduce",
    ("context",),
    "m * L * 2",
    "m * L * 2 * b * T * c * N * H / t",
    "Instead of a ring: their gradients, summed before those of a group's query heads are added.",
    only="not ring",
  ),
  Term(
    "all-gather",
    ("data",),
    "7 + 2 + 3",
    f"({KERNELS} + (2 * L + 1) * D) / f",
    "ZeRO-1: each device updates its part of every parameter and gathers the other parts.",
    only="zero_1",
  ),
)
NORM = (
  "The gradient norm: a scalar for each parameter and each of its dims that is sharded while the "
  "squares are summed. Replicas are sharded for that along the first dim that their number divides."
)


def letters(job: Job) -> dict[str, int]:
  """Returns the sizes that the formulas speak of; `LETTERS` says which is which."""
  config, sizes = job.config, job.devices.sizes
  axes = ("data", "fsdp", "context", "tensor")
  model, d, f, c, t = config.model, *(sizes[axis] for axis in axes)
  D, F, N, K, H = (
    model[name] for name in ("model_size", "feedforward_size", "heads", "kv_heads", "head_size")
  )
  m = config.training.gradient_accumulation_steps
  k = K if K % t else K // t
  tables = config.partitioning
  zero_1 = "data" in tables.optimizer.model and d > 1
  e, replicated = (d * f * t, []) if zero_1 else (f * t, [d])
  (x, u), (z, w), (i, r), (j, _) = (
    _shared(count * model.layers, e, replicated) for count in (2, 3, 1, 2)
  )
  split = e, replicated
  y, v = _shared(2 * model.layers, *((f, [d, t]) if K % t else split))
  return {
    **{
      "L": model.layers,
      "D": D,
      "F": F,
      "N": N,
      "K": K,
      "H": H,
      "T": config.data.sequence_length // c,
    },
    "V": -(-model.vocabulary_size // model.vocabulary_multiple) * model.vocabulary_multiple,
    **{"d": d, "f": f, "c": c, "t": t, "m": m, "k": k},
    "once": job.program.reduce_once_over is not None,
    "ring": model.context_attention == "ring",
    "b": config.data.global_batch_size // (d * f * m),
    "W": D * H * (2 * N // t + 2 * k) + 3 * D * F // t,
    "sequence_parallel": tables.sequence_parallel,
    "collective_matmul": tables.collective_matmul,
    "kept": not tables.reshard_after_forward,
    "h": 1 if t == 2 or config.data.sequence_length // (c * t) % 2 else 2,
    "zero_1": zero_1,
    **{"e": e, "x": x, "y": y, "z": z, "u": u, "v": v, "w": w},
    **{"i": i, "j": j, "r": r},
    **latent_terms.letters(job, t),
    "P": i * (2 * D * N * H + D * F) + j * D * F,
    "S": i * (3 * D**2 + 2 * (N * H) ** 2 + F**2) + j * (D**2 + F**2),
    **{"p": y * D * K * H, "s": y * (D**2 + (K * H) ** 2)},
  }


def _shared(count: int, exchanging: int, replicated: list[int]) -> tuple[int, int]:
  """Returns how many matrices a device gets at least, and with how few sharing replicas."""
  ways = [1]
  for size in replicated:
    ways += [way * size for way in ways]
  return min((math.ceil(count / (exchanging * way)), way) for way in ways)


LETTERS = """\
- L layers, D model, F feedforward, N heads, K key/value heads, H head, V padded vocabulary,
  T tokens of a row on a device, the sequence / c: the sizes of the model and of its rows;
- d, f, c, t: the sizes of `data`, `fsdp`, `context`, `tensor`; m microbatches (left out where it
  is 1); b rows of a microbatch on a device;
- W numbers in the kernels of a layer, as `tensor` splits them: D H (2 N + 2 K) / t + 3 D F / t,
  with K in place of K / t where t does not divide it."""


@dataclasses.dataclass
class Row:
  """What collectives of one kind carry along some axes in one step.

  Attributes:
    arrays: how many.
    bytes: of all of them, 4 for each element.
    formula: the elements, in the letters of `LETTERS`.
  """

  arrays: int = 0
  bytes: int = 0
  formula: str = ""


def theory(job: Job) -> dict[tuple[str, tuple[str, ...]], Row]:
  """Returns (kind, axes) -> Row, in the order of `TERMS`."""
  soap_s = [*with_zero_1(term for terms in SOAP_TERMS.values() for term in terms)]
  latent = job.config.model.attention == "latent"
  terms = (*(one for one in TERMS if one.of_all), *latent_terms.OF_LATENTS) if latent else TERMS
  update = {"muon": MUON_TERMS, "soap": soap_s}.get(job.config.optimizer.name, ())
  return _rows(job, (*terms, *update), norm(job))


def theory_of_muon(job: Job) -> dict[tuple[str, tuple[str, ...]], Row]:
  """Returns (kind, axes) -> Row of Muon's update alone, without the gradients."""
  return _rows(job, (*(term for term in TERMS if term.only == "zero_1"), *MUON_TERMS), {})


def theory_of_soap(job: Job, terms: Iterable[Term]) -> dict[tuple[str, tuple[str, ...]], Row]:
  """Returns (kind, axes) -> Row of some of `SOAP_TERMS`."""
  return _rows(job, with_zero_1(terms), {})


def _rows(
  job: Job, terms: Iterable[Term], scalars: dict[tuple[str, ...], int]
) -> dict[tuple[str, tuple[str, ...]], Row]:
  known, sizes = letters(job), job.devices.sizes
  parts = []
  for term in terms:
    axes = tuple(axis for axis in term.axes if sizes[axis] > 1)
    if axes and value(term.only, known):
      parts.append((term.kind, axes, term.arrays, term.elements))
  for axes, count in scalars.items():
    parts.append(("all-reduce", axes, str(count), str(count)))
  rows = defaultdict(Row)
  for kind, axes, arrays, elements in parts:
    row = rows[kind, axes]
    row.arrays += value(arrays, known)
    row.bytes += 4 * value(elements, known)
    row.formula += (" + " if row.formula else "") + shown(elements, known)
  return dict(rows)


def shown(formula: str, known: dict[str, int] | None = None) -> str:
  """Returns a formula as people write it, without what is 1."""
  for left_out, letter in (("m * ", "m"), (" / f", "f"), (" / t", "t")):
    if known and known[letter] == 1:
      formula = formula.replace(left_out, "")
  if formula.startswith("(") and formula.endswith(")"):  # around it all: no factor is left
    formula = formula[1:-1]
  return formula.replace(" * ", " ")


def value(formula: str, known: dict[str, int]) -> int:
  """Returns what a formula is for these sizes, which must be whole."""
  found = eval(formula, {}, known)  # so the formula that the page shows is the one that is proved
  assert found == int(found), formula
  return int(found)


def norm(job: Job) -> dict[tuple[str, ...], int]:
  """Returns axes -> scalars of the gradients' norm: XLA sums over one cut dim after the other."""
  found = defaultdict(int)
  for spec in jax.tree.leaves(job.program.norm_specs):
    for cut in spec_entries(spec):
      if axes := tuple(a for a, size in job.devices.sizes.items() if a in cut and size > 1):
        found[axes] += 1
  return dict(found)
