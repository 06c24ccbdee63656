"""What the updates of Muon and SOAP send, as terms; `theory.py` computes them."""

import dataclasses
from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True)
class Term:
  """Arrays that travel for one reason.

  `arrays` and `elements` are formulas in the letters of `letters`; both are of one step, and
  elements are those of the payload that `analysis.collectives` speaks of.

  Attributes:
    kind: of `collectives.KINDS`.
    axes: those of size 1 drop out; a term that has none left is not sent.
    arrays: how many.
    elements: of all of them together.
    why: what they are, and why so many.
    only: a condition in the same letters.
    of_all: whether it is the same whatever attention is.
  """

  kind: str
  axes: tuple[str, ...]
  arrays: str
  elements: str
  why: str
  only: str = "True"
  of_all: bool = False


# Of Muon: whole matrices are brought to devices, and back.
_SPLIT_HEADS = "not (k == K and t > 1)"
MUON_TERMS = (
  Term(
    "all-to-all",
    ("fsdp", "tensor"),
    "2 * 2 * e",
    "2 * x * D * N * H + 2 * z * D * F",
    "The matrices of query and out, and those of gate, up and down, to the devices that "
    "orthogonalize them, and back: one array for each of the e devices.",
    only="not zero_1",
  ),
  Term(
    "all-to-all",
    ("fsdp", "tensor"),
    "2 * e",
    "2 * y * D * K * H",
    "Likewise those of key and value.",
    only=f"not zero_1 and {_SPLIT_HEADS}",
  ),
  Term(
    "all-to-all",
    ("data", "fsdp", "tensor"),
    "2 * 3 * e",
    "2 * x * D * N * H + 2 * y * D * K * H + 2 * z * D * F",
    "With ZeRO-1 the momentum is sharded over `data` too, and so are the matrices.",
    only="zero_1",
  ),
  Term(
    "all-gather",
    ("data",),
    "1",
    "u * x * D * N * H",
    "The results for query and out, where devices with the same shards have shared the work.",
    only="u > 1",
  ),
  Term(
    "all-gather",
    ("data",),
    "1",
    "v * y * D * K * H",
    "Likewise for key and value.",
    only=f"v > 1 and {_SPLIT_HEADS}",
  ),
  Term(
    "all-gather",
    ("data", "tensor"),
    "1",
    "v * y * D * K * H",
    "Where tensor does not divide the key/value heads, devices along it share their work too.",
    only=f"v > 1 and not ({_SPLIT_HEADS})",
  ),
  Term(
    "all-gather",
    ("data",),
    "1",
    "w * z * D * F",
    "Likewise for gate, up and down.",
    only="w > 1",
  ),
)
# Of SOAP; each term also with ZeRO-1, along `data` too. First what every step sends.
_EXCHANGES = (
  Term(
    "all-to-all",
    ("fsdp", "tensor"),
    "4 * 4 * e",
    "4 * P",
    "The gradients of query, out, down, and gate with up, to the devices that have their bases; in "
    "the bases to where the moments are; what Adam makes of them to the bases; and the updates.",
  ),
  Term(
    "all-to-all",
    ("fsdp", "tensor"),
    "4 * 2 * 2 * e",
    "2 * S",
    "The bases of both sides of these matrices, and the products of the gradients with themselves.",
  ),
  Term(
    "all-to-all",
    ("fsdp", "tensor"),
    "4 * e + 2 * 2 * e",
    "4 * p + 2 * s",
    "Likewise those of key with value.",
    only=_SPLIT_HEADS,
  ),
  Term(
    "all-gather",
    ("data",),
    "2 * 4",
    "r * 2 * P",
    "Gradients in the bases, and updates, where devices with the same shards share the work.",
    only="r > 1",
  ),
  Term(
    "all-gather",
    ("data",),
    "4 * 2",
    "r * S",
    "Products of the gradients with themselves.",
    only="r > 1",
  ),
  Term(
    "all-gather",
    ("data",),
    "2 + 2",
    "v * (2 * p + s)",
    "Likewise for key and value.",
    only=f"v > 1 and {_SPLIT_HEADS}",
  ),
  Term(
    "all-gather",
    ("data", "tensor"),
    "2 + 2",
    "v * (2 * p + s)",
    "Where tensor does not divide the key/value heads, devices along it share their work too.",
    only=f"v > 1 and not ({_SPLIT_HEADS})",
  ),
)
_REFRESHES = (
  Term(
    "all-to-all",
    ("fsdp", "tensor"),
    "4 * 2 * e + 4 * 2 * 2 * e",
    "2 * P + 2 * S",
    "The first moments, from the old bases to the new; the statistics, and the new bases.",
  ),
  Term(
    "all-to-all",
    ("fsdp", "tensor"),
    "2 * e + 2 * 2 * e",
    "2 * p + 2 * s",
    "Likewise of key and value.",
    only=_SPLIT_HEADS,
  ),
  Term(
    "all-gather",
    ("data",),
    "4 + 4 * 2",
    "r * (P + S)",
    "First moments in the new bases, and the bases, where devices share the work.",
    only="r > 1",
  ),
  Term(
    "all-gather",
    ("data",),
    "1 + 2",
    "v * (p + s)",
    "Likewise for key and value.",
    only=f"v > 1 and {_SPLIT_HEADS}",
  ),
  Term(
    "all-gather",
    ("data", "tensor"),
    "1 + 2",
    "v * (p + s)",
    "Likewise where tensor does not divide their heads.",
    only=f"v > 1 and not ({_SPLIT_HEADS})",
  ),
)


def with_zero_1(terms: Iterable[Term]) -> Iterator[Term]:
  """Yields terms, all-to-alls once more as with ZeRO-1, where moments are split over `data` too."""
  for term in terms:
    if term.kind == "all-to-all":
      yield dataclasses.replace(term, only=f"not zero_1 and {term.only}")
      axes, only = ("data", *term.axes), f"zero_1 and {term.only}"
      yield dataclasses.replace(term, axes=axes, only=only)
    else:
      yield term


SOAP_TERMS = {"each step": _EXCHANGES, "each refresh": _REFRESHES}
MUON_LETTERS = """\
- e devices have shards of the same matrices: f t, and d f t with ZeRO-1;
- x, y, z matrices on a device, of query and out, key and value, and gate, up and down;
- u, v, w devices with the same shards that share the work of these."""
SOAP_LETTERS = """\
- i matrices on a device of each of query, out and down, and j of gate and up; e, y and v as above;
- r devices with the same shards that share the work of these;
- P = i (2 D N H + D F) + j D F numbers in these matrices, and S = i (3 D^2 + 2 (N H)^2 + F^2) +
  j (D^2 + F^2) in the squares of both of their sides;
- p = y D K H, s = y (D^2 + (K H)^2): likewise of key and value."""
