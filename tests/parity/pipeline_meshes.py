r"""Compiles a train step on every mesh of 8 devices with pipeline stages.

  python -m tests.parity.pipeline_meshes [MESH ...]

Where XLA's partitioner gathers along a dim that an axis splits inside of the pipeline's region, the
process aborts: the last mesh that is printed is the one that did.
"""

import importlib
import itertools
import sys

from partitioning.mesh_sizes import AXES
from tests.parity.pipeline_cases import EXPERTS

DEVICES = 8


def meshes() -> dict[str, dict[str, int]]:
  """Returns name -> mesh axis -> size, of all meshes of 8 devices with more than one stage."""
  found = {}
  for sizes in itertools.product((1, 2, 4, 8), repeat=len(AXES)):
    axes = dict(zip(AXES, sizes, strict=True))
    product = 1
    for size in sizes:
      product *= size
    if product == DEVICES and axes["stage"] > 1:
      name = "_".join(f"{axis}{size}" for axis, size in axes.items() if size > 1)
      found[name] = axes
  return found


def compile_step(axes: dict[str, int]) -> None:
  """Compiles the train step of a small decoder with documents, and with experts where split."""
  jobs = importlib.import_module("tests.helpers.jobs")
  keys = {f"mesh.{axis}": size for axis, size in axes.items()}
  if axes["expert"] > 1:
    keys |= EXPERTS
  if axes["tensor"] > 1:
    keys["partitioning.sequence_parallel"] = True
  if axes["context"] > 1:  # which puts the tokens in another order
    keys["model.context_attention"] = "ring"
  length = {"data.sequence_length": 32, "model.separate_documents": True, "model.layers": 8}
  job = jobs.make_job("single", "lm", **keys, **length)
  job.compile_train_step()


def main() -> None:
  """Compiles them, or those that are named."""
  importlib.import_module("tests.conftest")  # makes the simulated devices
  chosen = sys.argv[1:] or list(meshes())
  for name in chosen:
    print(name, flush=True)
    compile_step(meshes()[name])
  print("all", flush=True)


if __name__ == "__main__":
  main()
