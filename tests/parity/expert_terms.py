"""What a step sends to exchange tokens between experts, as terms.

Only the exchange along `expert`: kernels and gradients are sent as those of other layers, those of
the experts over (data, fsdp) alone.
"""

from collections import defaultdict
from collections.abc import Iterable

from analysis.collectives import Collective
from runtime.layer_kinds import sparse_layers
from tests.parity.theory import Row, shown, value
from tests.parity.update_terms import Term
from training.setup import Job

# (kind, axes, whether it is of each round).
Key = tuple[str, tuple[str, ...], bool]
_ALL = ("data", "fsdp", "expert", "context", "tensor")
# With one round in each layer.
ROUND_TERMS = (
  Term(
    "all-to-all",
    ("expert",),
    "8 * L * P",
    "L * (5 * P * C * D + 3 * P * C)",
    "Each round: tokens and gates to their experts, and results back. In the backward "
    "pass tokens and gates again, and gradients of results; back, those of tokens and of gates.",
  ),
)
TERMS = (
  Term(
    "all-to-all",
    ("expert",),
    "2 * L * P",
    "2 * L * E",
    "How many tokens each device has for each expert, which sets the rounds; in both passes, since "
    "no layer saves it.",
    only="rounds",
  ),
  Term(
    "all-reduce",
    _ALL,
    "2 * L",
    "2 * L",
    "The most tokens of any two devices, the same on all devices of the mesh; in both passes.",
    only="rounds",
  ),
  Term(
    "all-reduce",
    _ALL,
    "L",
    "L",
    "Gathered: the same number, which is only a metric.",
    only="not rounds",
  ),
  Term(
    "all-gather",
    ("expert",),
    "7 * L",
    "L * (3 * P * n * D + 4 * P * n * k)",
    "Gathered: the tokens of all devices with their experts and gates, in both passes, and the "
    "gradients of the results.",
    only="not rounds",
  ),
  Term(
    "reduce-scatter",
    ("expert",),
    "3 * L",
    "L * (2 * P * n * D + P * n * k)",
    "Gathered: the sums of the results, and of the gradients of tokens and of gates.",
    only="not rounds",
  ),
)
LETTERS = """\
- L sparse layers, D model, E experts, k experts of a token; P the size of `expert`;
- n tokens of a device; C rows of a buffer from one device to another, `model.expert_capacity`
  times n k / P, rounded up to a multiple of 8."""


def letters(job: Job) -> dict[str, int]:
  """Returns the sizes that the formulas speak of; `LETTERS` says which is which."""
  model, data, sizes = job.config.model, job.config.data, job.devices.sizes
  split = sizes["data"] * sizes["fsdp"] * sizes["expert"] * sizes["context"]
  n, k, devices = data.global_batch_size * data.sequence_length // split, 3, sizes["expert"]
  assert k == model.experts_per_token, "and no fewer experts on a device"
  mean, rest = divmod(5 * n * k, 4 * devices)  # times the capacity, 1.25
  rows = mean + (rest > 0)
  return {
    **{"L": sparse_layers(model), "D": model.model_size, "E": model.experts, "k": k},
    **{"P": devices, "n": n, "C": min((rows + 7) // 8 * 8, n * min(k, model.experts // devices))},
    "rounds": model.expert_exchange == "rounds",
    **{"m": 1, "f": 0, "t": 0},  # of which formulas of other pages are freed
  }


def theory(job: Job) -> dict[Key, Row]:
  """Returns what is sent for the exchange: of a step, and of one round in each layer."""
  known, sizes, rows = letters(job), job.devices.sizes, defaultdict(Row)
  for terms, each_round in ((TERMS, False), (ROUND_TERMS if known["rounds"] else (), True)):
    for term in terms:
      axes = tuple(axis for axis in sizes if axis in term.axes and sizes[axis] > 1)
      if value(term.only, known):
        row = rows[term.kind, axes, each_round]
        row.arrays += value(term.arrays, known)
        row.bytes += 4 * value(term.elements, known)
        row.formula += (" + " if row.formula else "") + shown(term.elements, known)
  return dict(rows)


def sent(found: Iterable[Collective]) -> dict[Key, tuple[int, int]]:
  """Returns arrays and bytes of the exchange, of all collectives of a step."""
  sums = defaultdict(lambda: (0, 0))
  for one in found:
    moved = one.axes == ("expert",) and one.kind != "all-reduce"
    if moved or "/pmax" in one.source:
      key = one.kind, one.axes, not one.exact
      arrays, size = sums[key]
      sums[key] = (arrays + one.count * one.arrays, size + one.count * one.bytes)
  return dict(sums)
