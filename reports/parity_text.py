"""The result of `compare` as text: a row per tensor, and whether the two configs train alike."""

from collections.abc import Sequence

from partitioning.mesh_sizes import mesh_text
from partitioning.rules import named_leaves, shape_text
from reports.drawings import plain
from reports.layout_text import plain_table
from training.parity import BOUNDS, SAME, STEPS, Difference, beyond
from training.setup import Job


def text(jobs: Sequence[Job], titles: Sequence[str], found: Sequence[Difference]) -> str:
  """Returns the two configs, the table, and the verdict below it."""
  config = jobs[0].config
  dtype, bound = config.training.parameter_dtype, BOUNDS[config.training.parameter_dtype]
  shapes = {
    name: shape_text(leaf.shape) for name, leaf in named_leaves(jobs[0].state.params).items()
  }
  table = plain_table("", "tensor", "shape", "relative L2", "")
  for one in found:
    distance = "0" if one.note == SAME else f"{one.distance:.2e}"
    note = one.note if one.distance <= bound else "> bound"
    table.add_row(one.what, one.name, shapes.get(one.name, ""), distance, note)
  meshes = (mesh_text(job.devices.sizes, job.devices.slices) for job in jobs)
  lines = [f"{title}: {mesh}" for title, mesh in zip(titles, meshes, strict=True)]
  lines.append(
    f"{STEPS} steps of {config.optimizer.name} at {config.optimizer.learning_rate:g}, {dtype} at "
    f"{config.training.matmul_precision} precision; bound {bound:g}"
  )
  return "\n".join([*lines, "", plain(table), "", _verdict(found, beyond(found, bound), bound)])


def _verdict(found: Sequence[Difference], wrong: Sequence[Difference], bound: float) -> str:
  if wrong:
    first = wrong[0]
    return (
      f"different: {len(wrong)} of {len(found)} tensors are beyond {bound:g}; the first is "
      f"{first.what} {first.name}, off by {first.distance:.2e}"
    )
  same = sum(one.note == SAME for one in found)
  if same == len(found):
    return f"equal to the bit: {same} tensors"
  largest = max(found, key=lambda one: one.distance)
  return (
    f"equal: {len(found)} tensors, {same} of them to the bit; the largest difference is "
    f"{largest.distance:.2e} ({largest.what} {largest.name})"
  )
