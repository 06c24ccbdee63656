"""An elastic run: on which smaller meshes it can go on, and with how many microbatches there.

Its config is that of the whole mesh, and so are its checkpoints. Where processes or devices are
missing, `runtime.devices.start` leaves data replicas out. Each of the others then has more rows of
a batch, in as many more microbatches: no device has more rows at once than on the whole mesh, and a
step has the same examples.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping

from ml_collections import ConfigDict

from partitioning.mesh_sizes import mesh_text, product_text, resolve_sizes, with_fewer_replicas
from partitioning.rules import Placement, axes_size, spec_entries
from processes.coordination import current, of_processes
from processes.preemption import FITTING
from training.specs import BatchSpec

Sizes = Mapping[str, int]  # mesh axis -> size, over all slices


@dataclasses.dataclass(frozen=True)
class Elastic:
  """What of a run's config says how it can go on with fewer data replicas.

  Attributes:
    mesh: mesh axis -> size, of one slice; nothing is missing.
    slices: mesh axis -> slices that it spans.
    batches: of the run.
    batch_axes: which split a batch.
    accumulated: gradient accumulation steps on the whole mesh.
    in_flight: microbatches of a pipeline; 1 without stages.
    drops: whether dropout draws for each microbatch, by a key of its own.
  """

  mesh: Sizes
  slices: Sizes
  batches: BatchSpec
  batch_axes: tuple[str, ...]
  accumulated: int
  in_flight: int
  drops: bool

  @classmethod
  def of(cls, config: ConfigDict, batches: BatchSpec) -> "Elastic":
    """Returns that of a finalized config."""
    training, mesh, slices = config.training, config.mesh.to_dict(), config.mesh_dcn.to_dict()
    return cls(
      mesh=mesh,
      slices=slices,
      batches=batches,
      batch_axes=config.partitioning.activations.batch,
      accumulated=training.gradient_accumulation_steps,
      in_flight=training.microbatches if resolve_sizes(mesh, None, slices)["stage"] > 1 else 1,
      drops=bool(config.lora.dropout or config.model.get("dropout_rate")),
    )

  @property
  def whole(self) -> dict[str, int]:
    """Returns the sizes of the mesh of which nothing is missing, over all slices."""
    return resolve_sizes(self.mesh, None, self.slices)

  def microbatches(self, sizes: Sizes) -> int:
    """Returns the gradient accumulation steps on a mesh that may have fewer data replicas.

    The fewest with which no device has more rows at once than on the whole mesh. With dropout it is
    the config's number: each microbatch draws with a key of its own.

    Raises:
      ValueError: a batch cannot be divided by the replicas.
    """
    shapes = [self.batches.ramp.last, *(shape for _, shape in self.batches.stages())]
    rows = sorted({shape.rows * shape.pieces for shape in shapes})
    there = axes_size(self.batch_axes, sizes)
    least = -(-axes_size(self.batch_axes, self.whole) * self.accumulated // there)
    counts = [self.accumulated] if self.drops else range(least, rows[0] // there + 1)
    at_once = there * self.in_flight
    fits = (count for count in counts if all(each % (at_once * count) == 0 for each in rows))
    if (found := next(fits, None)) is None:
      raise ValueError(
        f"training.elastic=True: batches of {' and '.join(map(str, rows))} rows cannot be divided "
        f"by the {there} parts of a batch on {product_text(sizes)}; start another number of "
        f"processes"
      )
    return found

  def smaller(self, placements: Iterable[Placement], processes: int) -> list[int]:
    """Returns with how many processes a run can go on, which has so many when none is missing.

    Args:
      placements: of parameters and optimizer state.
      processes: all of them.
    """
    placements, found = [*placements], []
    devices = axes_size(self.whole, self.whole)
    for count in range(1, processes):
      if devices * count % processes:
        continue
      try:
        mesh, slices = with_fewer_replicas(self.mesh, self.slices, devices * count // processes)
        sizes = resolve_sizes(mesh, None, slices)
        self.microbatches(sizes)
      except ValueError:
        continue
      if all(_divides(placement, sizes) for placement in placements):
        found.append(count)
    return found

  def offer(self, placements: Iterable[Placement], sizes: Sizes) -> None:
    """Tells the launcher, if there is one, with how many processes the run can go on.

    Args:
      placements: of parameters and optimizer state.
      sizes: of the mesh in use.

    Raises:
      ValueError: with no smaller number of them.
    """
    processes, whole = of_processes(), self.whole
    counts = self.smaller(placements, processes)
    if not counts and processes > 1 and sizes == whole:
      replicas, devices = whole["data"], axes_size(whole, whole)
      raise ValueError(
        f"training.elastic=True: none of 1 to {processes - 1} processes holds a whole number of "
        f"the {replicas} data replicas, of {devices // replicas} devices each, that divides "
        f"data.global_batch_size={self.batches.global_batch_size} and the sharded arrays; start "
        f"the {devices} devices as {replicas} processes, or leave training.elastic at False"
      )
    if current().first and (descriptor := os.environ.get(FITTING)):
      with contextlib.suppress(OSError):  # something between the two has closed it
        os.write(int(descriptor), f"{' '.join(map(str, counts))}\n".encode())

  def text(self, sizes: Sizes, slices: Sizes) -> str:
    """Returns what mesh an elastic run has, for its start and its summary.

    Args:
      sizes: of the mesh in use.
      slices: over which it is.
    """
    mesh = mesh_text(sizes, slices)
    if sizes == self.whole:
      return f"elastic: the whole mesh, {mesh}"
    return (
      f"elastic: {sizes['data']} of {self.whole['data']} data replicas, {mesh}; the batches are "
      f"those of the whole mesh, in {self.microbatches(sizes)} microbatches per step instead of "
      f"{self.accumulated}"
    )


def _divides(placement: Placement, sizes: Sizes) -> bool:
  """Returns whether a mesh divides an array that is sharded so."""
  entries = spec_entries(placement.spec, len(placement.shape))
  pairs = zip(placement.shape, entries, strict=True)
  return all(size % axes_size(axes, sizes) == 0 for size, axes in pairs)
