"""An elastic run: on which smaller meshes it can go on, and with how many microbatches there.

Its config is that of the whole mesh, and so are its checkpoints. Where processes or devices are
missing, `runtime.devices.start` leaves data replicas out. Each of the others then has more rows of
a batch, in as many more microbatches: no device has more rows at once than on the whole mesh, and a
step has the same examples.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping

from ml_collections import ConfigDict

from partitioning.mesh_sizes import mesh_text, product_text, resolve_sizes, with_fewer_replicas
from partitioning.rules import Placement, axes_size, spec_entries
from processes.coordination import current, of_processes
from processes.preemption import FITTING
from training.specs import BatchSpec

Sizes = Mapping[str, int]  # mesh axis -> size, over all slices


def whole_mesh(config: ConfigDict) -> dict[str, int]:
  """Returns the mesh of a run of which nothing is missing."""
  return resolve_sizes(config.mesh, None, config.mesh_dcn)


def microbatches(config: ConfigDict, batches: BatchSpec, sizes: Sizes) -> int:
  """Returns the gradient accumulation steps on a mesh that may have fewer data replicas.

  The fewest with which no device has more rows at once than on the whole mesh. With dropout it is
  the config's number: each microbatch draws with a key of its own.

  Args:
    config: finalized.
    batches: of the run.
    sizes: of the mesh.

  Raises:
    ValueError: a batch cannot be divided by the replicas.
  """
  keys = config.training
  axes, given = config.partitioning.activations.batch, keys.gradient_accumulation_steps
  shapes = [batches.ramp.last, *(shape for _, shape in batches.stages())]
  there, rows = axes_size(axes, sizes), sorted({shape.rows * shape.pieces for shape in shapes})
  least = -(-axes_size(axes, whole_mesh(config)) * given // there)
  drops = config.lora.dropout or ("dropout_rate" in config.model and config.model.dropout_rate)
  counts = [given] if drops else range(least, rows[0] // there + 1)
  at_once = there * (keys.microbatches if sizes["stage"] > 1 else 1)
  fits = (count for count in counts if all(each % (at_once * count) == 0 for each in rows))
  if (found := next(fits, None)) is None:
    raise ValueError(
      f"training.elastic=True: batches of {' and '.join(map(str, rows))} rows cannot be divided by "
      f"the {there} parts of a batch on {product_text(sizes)}; start another number of processes"
    )
  return found


def smaller(
  config: ConfigDict, batches: BatchSpec, placements: Iterable[Placement], processes: int
) -> list[int]:
  """Returns with how many processes a run can go on, which has so many when none is missing.

  Args:
    config: finalized.
    batches: of the run.
    placements: of parameters and optimizer state.
    processes: all of them.
  """
  whole, placements, found = whole_mesh(config), [*placements], []
  devices = axes_size(whole, whole)
  for count in range(1, processes):
    if devices * count % processes:
      continue
    given = config.mesh.to_dict(), config.mesh_dcn.to_dict(), devices * count // processes
    try:
      mesh, slices = with_fewer_replicas(*given)
      sizes = resolve_sizes(mesh, None, slices)
      microbatches(config, batches, sizes)
    except ValueError:
      continue
    if all(_divides(placement, sizes) for placement in placements):
      found.append(count)
  return found


def _divides(placement: Placement, sizes: Sizes) -> bool:
  """Returns whether a mesh divides an array that is sharded so."""
  entries = spec_entries(placement.spec, len(placement.shape))
  pairs = zip(placement.shape, entries, strict=True)
  return all(size % axes_size(axes, sizes) == 0 for size, axes in pairs)


def offer(
  config: ConfigDict, batches: BatchSpec, placements: Iterable[Placement], sizes: Sizes
) -> None:
  """Tells the launcher, if there is one, with how many processes the run can go on.

  Args:
    config: finalized.
    batches: of the run.
    placements: of parameters and optimizer state.
    sizes: of the mesh in use.

  Raises:
    ValueError: with no smaller number of them.
  """
  processes, whole = of_processes(), whole_mesh(config)
  counts = smaller(config, batches, placements, processes)
  if not counts and processes > 1 and sizes == whole:
    replicas, devices = whole["data"], axes_size(whole, whole)
    raise ValueError(
      f"training.elastic=True: none of 1 to {processes - 1} processes holds a whole number of the "
      f"{replicas} data replicas, of {devices // replicas} devices each, that divides "
      f"data.global_batch_size={batches.global_batch_size} and the sharded arrays; start the "
      f"{devices} devices as {replicas} processes, or leave training.elastic at False"
    )
  if current().first and (descriptor := os.environ.get(FITTING)):
    with contextlib.suppress(OSError):  # something between the two has closed it
      os.write(int(descriptor), f"{' '.join(map(str, counts))}\n".encode())


def text(config: ConfigDict, sizes: Sizes, slices: Sizes, count: int) -> str:
  """Returns what mesh an elastic run has, for its start and its summary.

  Args:
    config: finalized.
    sizes: of the mesh in use.
    slices: over which it is.
    count: its microbatches.
  """
  whole, mesh = whole_mesh(config), mesh_text(sizes, slices)
  if sizes == whole:
    return f"elastic: the whole mesh, {mesh}"
  return (
    f"elastic: {sizes['data']} of {whole['data']} data replicas, {mesh}; the batches are those of "
    f"the whole mesh, in {count} microbatches per step instead of "
    f"{config.training.gradient_accumulation_steps}"
  )
