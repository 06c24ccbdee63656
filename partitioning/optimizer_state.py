"""Which parameter a leaf of an optimizer's state belongs to, and which of its dims it has.

Copies of the parameter tree are found by structure, so no field of a state is known by name. Of a
factored statistic (Adafactor's `v_row`), the dims that are left say how it is sharded.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

Path = tuple[str, ...]
Kept = tuple[int, ...]  # the dims of a parameter that a statistic of it has


def owners(paths: Iterable[Path], parameters: Iterable[Path]) -> dict[Path, Path | None]:
  """Returns leaf -> the parameter that it belongs to; None where it belongs to none.

  A node of the state is a copy of the parameter tree where every leaf below it has a parameter's
  path there; some parameters may be absent (masked), and below one there may be more than a leaf.
  A leaf belongs to the parameter that the outermost copy around it says.

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


def candidates(shape: Sequence[int], whole: Sequence[int]) -> list[Kept]:
  """Returns every way in which a shape is another one with dims removed, or set to 1.

  Args:
    shape: of a statistic.
    whole: of its parameter.

  Returns:
    For each way, the dims that are left, in order.
  """
  if len(shape) == len(whole):
    kept = tuple(i for i, (n, m) in enumerate(zip(shape, whole, strict=True)) if n == m)
    others = (shape[i] for i in range(len(whole)) if i not in kept)
    return [kept] if all(size == 1 for size in others) else []
  chosen = itertools.combinations(range(len(whole)), len(shape))
  return [kept for kept in chosen if tuple(whole[i] for i in kept) == tuple(shape)]


def kept_by_trial(
  init: Callable[[Any], Any],
  parameters: Mapping[Path, jax.ShapeDtypeStruct],
) -> dict[Path, list[Kept]]:
  """Returns state leaf -> the ways of `candidates`, had each parameter dims of different sizes.

  Dims of equal size cannot be told apart by it. So the state is made once more, in the abstract,
  for parameters whose equal dims differ by the least that keeps their order, the later ones being
  the larger; as NumPy's and JAX's stable sorts order equal ones.

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
