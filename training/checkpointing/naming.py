"""Trees as they are stored: nested dicts by name, and a strict comparison of two of them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def named_leaves(tree: Any) -> dict[str, Any]:
  """Returns name -> leaf, a name being the path with `/` between its keys."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Returns nested dicts of the leaves, a level for each part of their names.

  Containers of other kinds (the optimizer's named tuples) are written as dicts, so that a
  checkpoint is read without the library that made them: `optimizer/0/mu` is `["0"]["mu"]`.
  """
  tree: dict[str, Any] = {}
  for name, leaf in leaves.items():
    *parents, last = name.split("/")
    inner = tree
    for key in parents:
      inner = inner.setdefault(key, {})
    assert last not in inner, name  # two leaves of one name: a key holds a "/"
    inner[last] = leaf
  return tree


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
  """Compares names, shapes and dtypes, strictly both ways.

  Args:
    stored: name -> array of the checkpoint: anything with a shape and a dtype.
    wanted: name -> array to be restored.

  Returns:
    A line per array that differs.
  """
  lines = []
  for name in sorted({*stored, *wanted}):
    sides = [f"{_text(side[name])}" if name in side else "absent" for side in (stored, wanted)]
    if sides[0] != sides[1]:
      lines.append(f"{name}: {sides[0]} in the checkpoint, {sides[1]} here")
  return lines


def _text(array: Any) -> str:
  return f"{np.dtype(array.dtype)}[{', '.join(map(str, array.shape))}]"
