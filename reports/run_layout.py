"""The drawings of a run's layout, stored as JSON: `layout.json`, for the page of the run.

The page is written by a process without JAX, from files alone. So a run stores its drawings at its
start: the mesh, and the largest parameters, one for each way of sharding.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from partitioning import shardings
from partitioning.rules import Placement
from reports import grid
from reports.layout_page import Side
from training.setup import Job

MOST_DRAWINGS = 6
MOST_DEVICES = 1024  # of a mesh that is drawn


def content(job: Job) -> dict[str, Any]:
  """Returns what `layout.json` holds."""
  side = Side("", job)
  schedule = job.program.pipeline
  small = job.mesh.size <= MOST_DEVICES
  drawn = [
    {"names": names, "sheet": grid.as_json(side.drawing(placement))}
    for names, placement in (_ways(job)[:MOST_DRAWINGS] if small else ())
  ]
  sizes = {
    title: sum(shardings.bytes_per_device(p, side.sizes) for p in placements.values())
    for title, placements in job.placements.items()
  }
  return {
    "caption": side.caption,
    "mesh": grid.as_json(side.mesh) if small else None,
    "parameters": job.parameter_counts()[0],
    "bytes_per_device": sizes,
    "replicated_bytes": shardings.replicated_bytes(side.held, side.sizes),
    "drawings": drawn,
    "pipeline": schedule and {**dataclasses.asdict(schedule), "layers": job.config.model.layers},
  }


def _ways(job: Job) -> list[tuple[list[str], Placement]]:
  """Returns (names, placement) of the parameters that are sharded alike, the largest first."""
  ways: dict[tuple, list[tuple[str, Placement]]] = {}
  for name, p in job.placements["parameters"].items():
    ways.setdefault((p.shape, p.letters, str(p.spec)), []).append((name, p))
  found = [([name for name, _ in same], same[0][1]) for same in ways.values()]
  return sorted(found, key=lambda one: -len(one[0]) * _bytes(one[1]))


def _bytes(placement: Placement) -> int:
  return math.prod(placement.shape) * np.dtype(placement.dtype).itemsize
