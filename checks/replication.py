"""Replication: state and large intermediate values that several devices hold the same of.

A state leaf is wrong where it is replicated over a mesh axis that shards other leaves: pure data
parallelism replicates everything on purpose, an axis that shards parameters is there to shard them.
An intermediate value is wrong where it has the rows of the batch and is not cut over the axes that
cut the batch.
"""

import math
import re
from collections.abc import Sequence

import jax

from checks import jaxprs
from checks.case import Case, axes_of, leaf_of, named_leaves
from checks.report import Finding, Outcome
from runtime.collectives import size_text

# Leaves of one dim (norms, biases) and those that are a smaller part of the state than this are
# left alone; of intermediate values, those that are this much smaller than the largest.
LEAST_SHARE = 0.01
LEAST_OF_LARGEST = 0.25


def check(cases: Sequence[Case]) -> list[Outcome]:
  """Looks at every mesh of more than one device."""
  return [check_one(case) for case in cases if case.program.mesh.size > 1]


def check_one(case: Case) -> Outcome:
  """Looks at the state as it comes out of a step, and at the step's intermediate values."""
  mesh = case.program.mesh
  leaves = named_leaves(case.start)
  # As the compiled step takes it, and not as it was asked for.
  placed = jax.tree.leaves(case.compiled.compiled.input_shardings[0][0])
  cut = {
    name: axes_of(sharding, leaf.shape, mesh)
    for (name, leaf), sharding in zip(leaves.items(), placed, strict=True)
  }
  given = list(zip(jax.tree.leaves(case.rows), jax.tree.leaves(case.shardings[1]), strict=True))
  of_batch = set().union(*(axes_of(one, leaf.shape, mesh) for leaf, one in given))
  rows = set().union(*(axes_of(one, leaf.shape, mesh, dim=0) for leaf, one in given))
  findings = [*_unused(case, cut, of_batch), *_state(case, leaves, cut)]
  findings += _intermediates(case, rows)
  total = sum(leaf.nbytes for leaf in leaves.values())
  held = sum(leaf.nbytes // _parts(mesh, cut[name]) for name, leaf in leaves.items())
  note = f"state of {size_text(total)}, {size_text(held)} on each of {mesh.size} devices"
  return Outcome("replication", case.name, findings, note)


def _parts(mesh, axes) -> int:
  return math.prod(mesh.shape[axis] for axis in axes)


def _unused(case: Case, cut, of_batch):
  for axis, size in case.program.mesh.shape.items():
    if size > 1 and axis not in of_batch.union(*cut.values()):
      yield Finding(
        f"mesh axis {axis} cuts neither the state nor the batch",
        f"axis {axis}",
        {"devices that hold the same": size},
        "no rule names the axis: its devices repeat one another's work, unless a schedule uses it",
      )


def _state(case: Case, leaves, cut):
  """Yields a finding for each axis over which leaves are replicated that should not be."""
  mesh, patterns = case.program.mesh, case.describe.replicated
  total = sum(leaf.nbytes for leaf in leaves.values())
  for axis in sorted(set().union(*cut.values())):
    found = {
      name: leaf.nbytes * (mesh.shape[axis] - 1) // _parts(mesh, cut[name] | {axis})
      for name, leaf in leaves.items()
      if axis not in cut[name]
      and len(leaf.shape) > 1
      and leaf.nbytes >= LEAST_SHARE * total
      and not any(re.search(pattern, name) for pattern in patterns)
    }
    if not found:
      continue
    largest = sorted(found, key=lambda name: -found[name])
    sharded = sum(axis in axes for axes in cut.values())
    yield Finding(
      f"{len(found)} state leaves are the same on all {mesh.shape[axis]} devices of axis {axis}",
      ", ".join(largest[:3]) + (", ..." if len(largest) > 3 else ""),
      {"leaves_bytes": sum(leaves[name].nbytes for name in found)}
      | {"wasted on each device_bytes": sum(found.values())}
      | {"leaves that the axis shards": sharded},
      "no rule matches these names or a later rule replaces the one that does, their dims are not "
      "divisible by the axis, or the optimizer's state has no rules; if it is meant, name them in "
      "describe.replicated",
      [
        f"{size_text(leaves[name].nbytes):>10}  {name} {list(leaves[name].shape)}"
        for name in largest[:12]
      ],
    )


def _intermediates(case: Case, rows):
  """Yields a finding for large values that have the batch's rows, and are not cut as they are."""
  mesh = case.program.mesh
  name = case.describe.tokens
  leading = leaf_of(case.rows, name) if name else jax.tree.leaves(case.rows)[0]
  arguments = case.place()
  record = jaxprs.Recorder(case.program.step, *arguments)
  compiled = case.jitted(record, out=False).lower(*arguments).compile()
  found = []
  for label, sharding in zip(record.labels, compiled.output_shardings, strict=True):
    shape, dtype = label.shape, label.dtype
    if _has_rows(shape[1:] if label.loop else shape, leading.shape):
      size = math.prod(shape) * jax.numpy.dtype(dtype).itemsize
      found.append((size, label, rows - axes_of(sharding, shape, mesh)))
  largest = max((size for size, _, _ in found), default=0)
  wrong = [one for one in found if one[2] and one[0] >= LEAST_OF_LARGEST * largest]
  if not wrong:
    return
  wrong.sort(key=lambda one: -one[0])
  size, label, missing = wrong[0]
  yield Finding(
    f"{len(wrong)} intermediate values have all rows of the batch on every device of an axis that "
    "cuts the batch",
    str(label),
    {"value_bytes": size, "on axes": "+".join(sorted(missing)), "copies": _parts(mesh, missing)},
    "a sharding constraint without the batch's axes, or none where the compiler has to choose: "
    "logits, one-hot encodings and gathers are the usual places",
    [f"{size_text(size):>10}  {label}" for size, label, _ in wrong[:8]],
  )


def _has_rows(shape: Sequence[int], leading: Sequence[int]) -> bool:
  """Returns whether a shape begins with the batch's dims: [B, T, ...], [B, ..., T] or [B * T, ...].

  A batch without positions has rows alone, [B, ...].
  """
  if not shape or not leading:
    return False
  if len(leading) == 1:
    return shape[0] == leading[0]
  joined = shape[0] == math.prod(leading[:2])
  return joined or (shape[0] == leading[0] and leading[1] in shape[1:])
