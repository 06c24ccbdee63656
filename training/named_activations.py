"""The named activations of a decoder's layers: their bytes, and what happens to each.

By their letters and the layout's axis table, without a trace: what `layout` shows.
"""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
from jax.sharding import PartitionSpec

from partitioning.rules import resolve, shard_shape
from runtime import rematerialization
from training.setup import Job


@dataclasses.dataclass(frozen=True)
class Named:
  """A named activation.

  Attributes:
    name: of `rematerialization.NAMES`.
    letters: of its dims.
    shape: logical (global) shape, of one layer and one microbatch.
    spec: how it is sharded.
    bytes: per device, of all layers; of pipeline stages, of those of one chunk.
    choice: save, recompute or offload.
  """

  name: str
  letters: str
  shape: tuple[int, ...]
  spec: PartitionSpec
  bytes: int
  choice: str


def sums(named: Iterable[Named]) -> dict[str, int]:
  """Returns choice -> bytes per device; choices that no activation has are left out."""
  found: dict[str, int] = {}
  for one in named:
    found[one.choice] = found.get(one.choice, 0) + one.bytes
  return found


def of_job(job: Job) -> list[Named]:
  """Returns the named activations in the order of the forward pass; [] for another model.

  The output of a kernel or a ring is counted without the softmax's normalizers, one for each H
  elements.
  """
  config, sizes = job.config, job.devices.sizes
  names = rematerialization.names_of(config.model)
  if not names:
    return []
  choices = rematerialization.parse(config.training.rematerialization, names).by_name
  itemsize = np.dtype(config.training.compute_dtype).itemsize
  rows = config.data.global_batch_size // job.program.spec.microbatches_on(sizes)
  layers = config.model.layers
  if schedule := job.program.pipeline:  # a device has those of one chunk of a stage at a time
    layers //= schedule.stages * schedule.chunks
  extents = {"B": rows, "T": config.data.sequence_length, "R": config.data.sequence_length}
  found = []
  for name in names:
    letters = rematerialization.letters_of(name, config.model)
    shape = tuple(extents.get(letter) or job.legend[letter].size for letter in letters)
    spec = resolve(letters, shape, job.legend, job.activations.table, sizes).spec
    size = itemsize * layers * math.prod(shard_shape(shape, spec, sizes))
    found.append(Named(name, letters, shape, spec, size, choices[name]))
  return found
