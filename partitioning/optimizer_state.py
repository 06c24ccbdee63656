"""Matches each leaf of an optimizer's state to its parameter, and to dims of that parameter.

Copies of the parameter tree are found by structure, without knowing a state's fields by name. A
factored statistic (Adafactor's `v_row`) is sharded by the dims that it keeps of its parameter, a
square one (SOAP's preconditioners) by those of the matrix that it is multiplied by, and the scales
of an array in blocks as the array.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

Path = tuple[str, ...]
Kept = tuple[int, ...]  # the dims of a parameter that a statistic of it has


CODES, SCALES = "codes", "scales"  # of an array in blocks: the last parts of their paths


@dataclasses.dataclass(frozen=True)
class Square:
  """How a statistic is a stack of squares, of the size of one side of a parameter's matrices.

  Attributes:
    stack: the parameter's dims that both have.
    rows: the parameter's dims that are its matrices' rows.
    columns: those that are the columns.
    side: `rows` or `columns`: that whose size, all dims together, is the square's.
  """

  stack: tuple[int, ...]
  rows: tuple[int, ...]
  columns: tuple[int, ...]
  side: tuple[int, ...]


def owners(paths: Iterable[Path], parameters: Iterable[Path]) -> dict[Path, Path | None]:
  """Returns leaf -> the parameter that it belongs to; None where it belongs to none.

  A node of the state is a copy of the parameter tree if the path of every leaf below it begins
  with a parameter's path; some parameters may be absent (masked), and one may have several leaves.
  The outermost copy that contains a leaf determines its parameter.

  Args:
    paths: of the state's leaves.
    parameters: of the parameters.
  """
  paths, known = list(paths), set(parameters)
  found: dict[tuple[Path, int], Path | None] = {}  # (leaf, length of the node's path) -> parameter
  copies: dict[Path, bool] = {}
  for path in paths:
    for cut in range(len(path) + 1):
      rest = path[cut:]
      heads = (rest[:end] for end in range(1, len(rest) + 1))
      owner = next((head for head in heads if head in known), None)
      found[path, cut] = owner
      copies[path[:cut]] = copies.get(path[:cut], True) and owner is not None
  result = {}
  for path in paths:
    cut = next((cut for cut in range(len(path) + 1) if copies[path[:cut]]), None)
    result[path] = None if cut is None else found[path, cut]
  return result


def candidates(shape: Sequence[int], whole: Sequence[int]) -> list[Kept | Square]:
  """Returns every way in which a shape is another one with dims removed or set to 1, or of squares.

  Args:
    shape: of a statistic.
    whole: of its parameter.

  Returns:
    For each way, the dims that remain, in order; or what the squares are of.
  """
  if tuple(shape) == tuple(whole):
    return [tuple(range(len(whole)))]
  return [*_kept(shape, whole), *_squares(shape, whole)]


def _kept(shape: Sequence[int], whole: Sequence[int]) -> list[Kept]:
  if len(shape) == len(whole):
    kept = tuple(i for i, (n, m) in enumerate(zip(shape, whole, strict=True)) if n == m)
    others = (shape[i] for i in range(len(whole)) if i not in kept)
    return [kept] if all(size == 1 for size in others) else []
  chosen = itertools.combinations(range(len(whole)), len(shape))
  return [kept for kept in chosen if tuple(whole[i] for i in kept) == tuple(shape)]


def _squares(shape: Sequence[int], whole: Sequence[int]) -> list[Square]:
  if len(shape) < 2 or shape[-1] != shape[-2]:
    return []
  found = []
  for stack in itertools.combinations(range(len(whole)), len(shape) - 2):
    rest = tuple(dim for dim in range(len(whole)) if dim not in stack)
    if tuple(whole[dim] for dim in stack) == tuple(shape[:-2]):
      for cut in range(1, len(rest)):
        sides = rest[:cut], rest[cut:]
        found += [
          Square(stack, *sides, side)
          for side in sides
          if math.prod(whole[dim] for dim in side) == shape[-1]
        ]
  return found


def block_shape(
  path: Path, leaf: Any, leaves: Mapping[Path, Any], whole: Sequence[int]
) -> tuple[int, ...] | None:
  """Returns the shape of the blocks that an array of scales has a number for each of.

  Args:
    path: of the leaf.
    leaf: array or ShapeDtypeStruct.
    leaves: of the state.
    whole: shape of the parameter.

  Returns:
    A size for each dim; None if the leaf is no array of scales, with codes of the parameter's shape
    beside it.
  """
  codes = leaves.get((*path[:-1], CODES)) if path[-1] == SCALES else None
  if codes is None or codes.shape != tuple(whole) or len(leaf.shape) != len(whole):
    return None
  pairs = list(zip(whole, leaf.shape, strict=True))
  return None if any(n % m for n, m in pairs) else tuple(n // m for n, m in pairs)


def kept_by_trial(
  init: Callable[[Any], Any],
  parameters: Mapping[Path, jax.ShapeDtypeStruct],
) -> dict[Path, list[Kept | Square]]:
  """Returns state leaf -> the ways of `candidates`, as if each parameter's dims differed in size.

  Dims of equal size are ambiguous. So the state is evaluated abstractly once more, for parameters
  whose equal dims are made to differ as little as possible, the later ones being larger: the order
  that NumPy's and JAX's stable sorts give equal ones.

  Args:
    init: the optimizer's: parameters -> state.
    parameters: path -> shape and dtype.
  """
  distinct = {
    path: jax.ShapeDtypeStruct(_distinct(leaf.shape), leaf.dtype)
    for path, leaf in parameters.items()
  }
  leaves = leaves_by_path(jax.eval_shape(init, _nested(distinct)))
  whose = owners(leaves, distinct)
  return {
    path: candidates(leaf.shape, distinct[whose[path]].shape) if whose[path] else []
    for path, leaf in leaves.items()
  }


def leaves_by_path(tree: Any) -> dict[Path, Any]:
  """Returns path -> leaf, a path being the keys as text."""
  return {
    tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _distinct(shape: Sequence[int]) -> tuple[int, ...]:
  """Returns a shape whose dims differ, in the same order by size."""
  sizes, least = list(shape), 0
  for position in sorted(range(len(sizes)), key=lambda i: (sizes[i], i)):
    sizes[position] = least = max(sizes[position], least + 1)
  return tuple(sizes)


def _nested(leaves: Mapping[Path, Any]) -> dict:
  tree = {}
  for path, leaf in leaves.items():
    node = tree
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = leaf
  return tree
