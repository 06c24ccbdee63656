"""The clouds' names of TPU slices: `v5p-128`, `v6e-256`, `v5litepod-16`.

The number counts TensorCores, two per chip, of v4, v5p and 7x, and chips of v5e and v6e. A size has
one standard shape: up to 32 chips 1x1x1 to 2x4x4, above that complete cubes of 4x4x4 chips, as
close to a cube as their number allows. Source: the Cloud TPU pages of v4, v5e, v5p, v6e and tpu7x
(cloud.google.com/tpu/docs), tables of configurations; for numbers of cubes that the tables omit,
XPK's list (github.com/AI-Hypercomputer/xpk, system_characteristics.py).
"""

import dataclasses
import functools
import itertools
import math
import re


@dataclasses.dataclass(frozen=True)
class _Family:
  """How slices of a chip are named.

  Attributes:
    chip: its name in a topology.
    cores: how much each chip adds to the number.
    small: shapes smaller than a cube; for two dims, all shapes.
    most: chips of the largest slice.
  """

  chip: str
  cores: int
  small: tuple[tuple[int, ...], ...]
  most: int


_BELOW_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBE = 4
_FAMILIES = {
  "v4": _Family("v4", 2, _BELOW_A_CUBE, 4096),
  "v5litepod": _Family("v5e", 1, _FLAT, 256),
  "v5e": _Family("v5e", 1, _FLAT, 256),
  "v5p": _Family("v5p", 2, _BELOW_A_CUBE, 6144),
  "v6e": _Family("v6e", 1, _FLAT, 256),
  "tpu7x": _Family("tpu7x", 2, ((1, 1, 1), *_BELOW_A_CUBE), 9216),
}


def most_chips(chip: str) -> int | None:
  """Returns the chips of the largest slice of a TPU; None for what is not one."""
  return max((one.most for one in _FAMILIES.values() if one.chip == chip), default=None)


def resolve(text: str) -> tuple[str, str]:
  """Returns a topology's name (`v5p:4x4x4` for `v5p-128`) and a remark about it.

  A name of another form is returned unchanged, with "".

  Raises:
    ValueError: there is no slice of that size; the message names the nearest ones.
  """
  found = re.fullmatch(r"([a-z0-9]+)-(\d+)", text)
  if found is None or found[1] not in _FAMILIES:
    return text, ""
  family, number = _FAMILIES[found[1]], int(found[2])
  shapes = _shapes(found[1])
  if number not in shapes:
    near = sorted(shapes, key=lambda size: (abs(size - number), size))[:2]
    names = " and ".join(f"{found[1]}-{size} ({_text(shapes[size])})" for size in sorted(near))
    raise ValueError(
      f"--topology={text}: there is no slice of {number} {_counted(family)}; the nearest are "
      f"{names}"
    )
  name = f"{family.chip}:{_text(shapes[number])}"
  chips = math.prod(shapes[number])
  counted = f", {number} {_counted(family)}" if family.cores > 1 else ""
  return name, f"{text} is {name}: {chips} {'chip' if chips == 1 else 'chips'}{counted}"


def _counted(family: _Family) -> str:
  return "TensorCores (two per chip)" if family.cores > 1 else "chips"


def _text(shape: tuple[int, ...]) -> str:
  return "x".join(map(str, shape))


@functools.cache
def _shapes(name: str) -> dict[int, tuple[int, ...]]:
  """Returns the number in a slice's name -> the shape of the slice, in chips."""
  family = _FAMILIES[name]
  found = {family.cores * math.prod(shape): shape for shape in family.small}
  if len(family.small[0]) == 3:
    for count in range(1, family.most // _CUBE**3 + 1):
      found[family.cores * count * _CUBE**3] = tuple(_CUBE * side for side in _cubic(count))
  return found


def _cubic(count: int) -> tuple[int, int, int]:
  """Returns the three factors of a number, in order, whose sum is least."""
  sides = range(1, math.isqrt(count) + 1)
  triples = (
    (a, b, count // (a * b))
    for a, b in itertools.combinations_with_replacement(sides, 2)
    if count % (a * b) == 0 and count // (a * b) >= b
  )
  return min(triples, key=sum)
