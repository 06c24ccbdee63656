"""What theory says that a train step of a transformer sends: kinds, axes, arrays, bytes.

Every formula is written once: it is computed, compared with the compiled programs and printed.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable

import jax

from partitioning.dims import spec_entries
from tests.parity import latent_terms, vit_terms
from tests.parity.step_terms import TERMS
from tests.parity.update_terms import MUON_TERMS, SOAP_TERMS, Term, with_zero_1
from training.setup import Job


def letters(job: Job) -> dict[str, int]:
  """Returns the sizes that the formulas speak of; `LETTERS` says which is which."""
  if job.config.model.name == "vit":
    return vit_terms.letters(job)
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
  if job.config.model.name == "vit":
    return rows(job, vit_terms.TERMS, norm(job))
  soap_s = [*with_zero_1(term for terms in SOAP_TERMS.values() for term in terms)]
  latent = job.config.model.attention == "latent"
  terms = (*(one for one in TERMS if one.of_all), *latent_terms.OF_LATENTS) if latent else TERMS
  update = {"muon": MUON_TERMS, "soap": soap_s}.get(job.config.optimizer.name, ())
  return rows(job, (*terms, *update), norm(job))


def theory_of_muon(job: Job) -> dict[tuple[str, tuple[str, ...]], Row]:
  """Returns (kind, axes) -> Row of Muon's update alone, without the gradients."""
  return rows(job, (*(term for term in TERMS if term.only == "zero_1"), *MUON_TERMS), {})


def theory_of_soap(job: Job, terms: Iterable[Term]) -> dict[tuple[str, tuple[str, ...]], Row]:
  """Returns (kind, axes) -> Row of some of `SOAP_TERMS`."""
  return rows(job, with_zero_1(terms), {})


def rows(
  job: Job,
  terms: Iterable[Term],
  scalars: dict[tuple[str, ...], int],
  more: dict[str, int] | None = None,
) -> dict[tuple[str, tuple[str, ...]], Row]:
  """Returns (kind, axes) -> Row of some terms.

  Args:
    job: whose sizes the formulas are of.
    terms: which.
    scalars: axes -> all-reduced scalars besides.
    more: letters in addition, or in place of those of `letters`.
  """
  known, sizes = {**letters(job), **(more or {})}, job.devices.sizes
  parts = []
  for term in terms:
    axes = tuple(axis for axis in term.axes if sizes[axis] > 1)
    if axes and value(term.only, known):
      parts.append((term.kind, axes, term.arrays, term.elements))
  for axes, count in scalars.items():
    parts.append(("all-reduce", axes, str(count), str(count)))
  found = defaultdict(Row)
  for kind, axes, arrays, elements in parts:
    row = found[kind, axes]
    row.arrays += value(arrays, known)
    row.bytes += 4 * value(elements, known)
    row.formula += (" + " if row.formula else "") + shown(elements, known)
  return dict(found)


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
