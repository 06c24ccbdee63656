"""Replication: state and large intermediate values that several devices hold the same of.

A state leaf is wrong where it is replicated over a mesh axis that shards other leaves: pure data
parallelism replicates everything on purpose, an axis that shards parameters is there to shard them.
An intermediate value is wrong where it has the rows of the batch and is not cut over the axes that
cut the batch.
"""

import math
import re
from collections.abc import Iterator, Sequence
from unittest import mock

import jax

from checks import jaxprs
from checks.case import SEED, Case, axes_of, leaf_of
from checks.report import SHOWN, Finding, Outcome, counted
from runtime import units

# Leaves of one dim (norms, biases) and those that are a smaller part of the state than this are
# left alone; of intermediate values, those that are this much smaller than the largest.
LEAST_SHARE = 0.01
LEAST_OF_LARGEST = 0.25


def check(case: Case, first: Case | None = None) -> Outcome | None:
  """Looks at the state as the compiled step takes it, and at the step's intermediate values."""
  del first
  devices = case.program.mesh.size
  if devices == 1:
    return None
  cut = {name: set().union(*dims) for name, dims in case.cut.items()}
  findings = [*_unused(case, cut), *_state(case, cut), *_intermediates(case)]
  total = sum(leaf.nbytes for leaf in case.leaves.values())
  held = sum(leaf.nbytes // case.parts(cut[name]) for name, leaf in case.leaves.items())
  note = f"state of {units.size(total)}, {units.size(held)} on each of {devices} devices"
  return Outcome("replication", case.name, findings, note)


def _unused(case: Case, cut) -> Iterator[Finding]:
  used = set().union(*cut.values(), *(axes for dims in case.batch_cut for axes in dims))
  for axis, size in case.program.mesh.shape.items():
    if size > 1 and axis not in used:
      yield Finding(
        f"mesh axis {axis} cuts neither the state nor the batch",
        f"axis {axis}",
        {"devices that hold the same": size},
        "no rule names the axis: its devices repeat one another's work, unless a schedule uses it",
      )


def _state(case: Case, cut) -> Iterator[Finding]:
  """Yields a finding for each axis over which leaves are replicated that should not be."""
  mesh, leaves, patterns = case.program.mesh, case.leaves, case.describe.replicated
  total = sum(leaf.nbytes for leaf in leaves.values())
  for axis in sorted(set().union(*cut.values())):
    found = {
      name: leaf.nbytes * (mesh.shape[axis] - 1) // case.parts(cut[name] | {axis})
      for name, leaf in leaves.items()
      if axis not in cut[name]
      and len(leaf.shape) > 1
      and leaf.nbytes >= LEAST_SHARE * total
      and not any(re.search(pattern, name) for pattern in patterns)
    }
    if not found:
      continue
    largest, lines = sorted(found, key=lambda name: -found[name]), _initializers(case)
    made = {name: f"{name} (made at {lines[name]})" if lines[name] else name for name in largest}
    yield Finding(
      f"{counted(len(found), 'state leaf is', 'state leaves are')} the same on all "
      f"{mesh.shape[axis]} devices of axis {axis}",
      ", ".join(made[name] for name in largest[:3]) + (", ..." if len(largest) > 3 else ""),
      {"leaves_bytes": sum(leaves[name].nbytes for name in found)}
      | {"wasted on each device_bytes": sum(found.values())}
      | {"leaves that the axis shards": sum(axis in axes for axes in cut.values())},
      "no rule matches these names or a later rule replaces the one that does, their dims are not "
      "divisible by the axis, or the optimizer's state has no rules; if it is meant, name them in "
      "describe.replicated",
      [
        f"{units.size(leaves[name].nbytes):>10}  {list(leaves[name].shape)} {made[name]}"
        for name in largest
      ],
    )


def _initializers(case: Case) -> dict[str, str]:
  """Returns the line of the initializer that makes each leaf of the state; "" if it is unknown."""
  # In a trace JAX refuses the mesh with its devices, and takes the abstract one.
  abstract = lambda mesh: jax.sharding.use_abstract_mesh(mesh.abstract_mesh)  # noqa: E731
  with mock.patch.object(jax, "set_mesh", abstract, create=True):
    try:
      closed = jax.make_jaxpr(lambda: jax.tree.leaves(case.program.state(SEED)))()
    except Exception:  # an initializer that computes with the values, as of NumPy
      return dict.fromkeys(case.leaves, "")
  lines = [jaxprs.line_of(closed.jaxpr, result) for result in closed.jaxpr.outvars]
  return dict(zip(case.leaves, lines, strict=True))


def _intermediates(case: Case) -> Iterator[Finding]:
  """Yields a finding for large values that have the batch's rows, and are not cut as they are."""
  name = case.describe.tokens
  leading = leaf_of(case.rows, name) if name else jax.tree.leaves(case.rows)[0]
  arguments = case.place()
  replay = jaxprs.Replay(case.program.step, *arguments)
  record = lambda state, batch: replay(state, batch)[1]  # noqa: E731
  compiled = case.jitted(record, out=False).lower(*arguments).compile()
  found = []
  for label, sharding in zip(replay.labels, compiled.output_shardings, strict=True):
    if _has_rows(label.shape[1:] if label.loop else label.shape, leading.shape):
      size = math.prod(label.shape) * jax.numpy.dtype(label.dtype).itemsize
      cut = axes_of(sharding, label.shape, case.program.mesh)
      found.append((size, label, case.row_axes.difference(*cut)))
  largest = max((size for size, _, _ in found), default=0)
  wrong = [one for one in found if one[2] and one[0] >= LEAST_OF_LARGEST * largest]
  if not wrong:
    return
  wrong.sort(key=lambda one: -one[0])
  size, label, missing = wrong[0]
  yield Finding(
    f"{counted(len(wrong), 'intermediate value has', 'intermediate values have')} all rows of the "
    "batch on every device of an axis that cuts the batch",
    str(label),
    {"value_bytes": size, "on axes": "+".join(sorted(missing)), "copies": case.parts(missing)},
    "a sharding constraint without the batch's axes, or none where the compiler has to choose: "
    "logits, one-hot encodings and gathers are the usual places",
    [f"{units.size(size):>10}  {label}" for size, label, _ in wrong[:SHOWN]],
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
