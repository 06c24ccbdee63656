"""What is wrong with pipeline stages: mesh.stage and training.pipeline."""

from collections.abc import Iterator, Mapping

from ml_collections import ConfigDict

from configs.keys.training import TRAINING
from runtime.layer_kinds import beside_sparse
from training.tasks import DPO

# Keys about pipelines -> what they are where they say nothing.
OFF = {
  key: TRAINING[key].default
  for key in ("pipeline", "pipeline_chunks", "pipeline_ends", "pipeline_gather")
}


def wrong(config: ConfigDict, sizes: Mapping[str, int]) -> Iterator[str]:
  """Yields a line for each key that does not go with the stages of the mesh.

  Args:
    config: finalized.
    sizes: mesh axis -> size.
  """
  training, stages = config.training, sizes.get("stage", 1)
  if stages == 1:
    given = {key: training[key] for key, off in OFF.items() if training[key] != off}
    if training.microbatches != 1:
      given["microbatches"] = training.microbatches
    for key, value in given.items():
      yield f"training.{key}={value!r}: mesh.stage is 1; set mesh.stage, or leave it out"
    return
  if training.pipeline != "interleaved" and training.pipeline_chunks != OFF["pipeline_chunks"]:
    yield (
      f"training.pipeline_chunks={training.pipeline_chunks}: a stage of "
      f"training.pipeline={training.pipeline!r} has one chunk of layers; set "
      f"training.pipeline=interleaved, or leave it out"
    )
  if config.model.name != "transformer":
    name = config.model.name
    yield f"mesh.stage={stages}: {name} has no stacked layers to split; set mesh.stage=1"
    return
  yield from _layers(config, stages)
  yield from _microbatches(config, sizes, stages)
  yield from _others(config, stages)


def _layers(config: ConfigDict, stages: int) -> Iterator[str]:
  """Yields what is wrong with the number of layers."""
  training, layers = config.training, config.model.layers
  if config.model.experts and (beside := beside_sparse(config.model)):
    yield (
      f"mesh.stage={stages}: {beside} of {layers} layers have no experts, and the stages of a "
      f"pipeline are alike; set mesh.stage=1"
    )
    return
  chunks = training.pipeline_chunks if training.pipeline == "interleaved" else 1
  if chunks < 1 or layers % (stages * chunks) == 0:
    return
  parts = f"mesh.stage={stages}" + (f" x training.pipeline_chunks={chunks}" if chunks > 1 else "")
  fits = [n for n in range(2, layers + 1) if layers % (n * chunks) == 0]
  ways = [f"set mesh.stage to one of {', '.join(map(str, fits))}"] if fits else []
  of_chunks = [n for n in range(2, layers + 1) if layers % (stages * n) == 0]
  if chunks > 1 and of_chunks:
    ways.append(f"set training.pipeline_chunks to one of {', '.join(map(str, of_chunks))}")
  whole = stages * chunks
  near = [n for n in (layers // whole * whole, (layers // whole + 1) * whole) if n]
  ways.append(f"make model.layers {' or '.join(map(str, near))}")
  yield f"model.layers={layers} is not divisible by {parts}; {', or '.join(ways)}"


def _microbatches(config: ConfigDict, sizes: Mapping[str, int], stages: int) -> Iterator[str]:
  """Yields what is wrong with the number of microbatches."""
  training = config.training
  count, steps = training.microbatches, training.gradient_accumulation_steps
  if count < 1 or steps < 1:
    return
  parts = 1
  for axis in config.partitioning.activations.batch:
    parts *= sizes.get(axis, 1)
  rows, whole = config.data.global_batch_size, parts * steps
  if rows % (whole * count):
    of_device = rows // whole
    fits = [n for n in range(1, of_device + 1) if of_device % n == 0] if rows % whole == 0 else []
    way = f"set it to one of {', '.join(map(str, fits))}, or " if fits else ""
    more = f" x training.gradient_accumulation_steps={steps}" if steps > 1 else ""
    yield (
      f"training.microbatches={count}: data.global_batch_size={rows} is not divisible by "
      f"{count} microbatches x {parts} parts of the batch{more}; {way}make the batch "
      f"{(rows // (whole * count) + 1) * whole * count}"
    )
  if training.pipeline == "interleaved" and count % stages:
    near = [n for n in (count // stages * stages, (count // stages + 1) * stages) if n]
    yield (
      f"training.microbatches={count}: training.pipeline='interleaved' needs a multiple of "
      f"mesh.stage={stages}, such as {' or '.join(map(str, near))}; 1f1b takes any number"
    )


def _others(config: ConfigDict, stages: int) -> Iterator[str]:
  """Yields features that a pipeline does not have."""
  training = config.training
  if config.task == DPO:
    yield f"mesh.stage={stages}: data.name='preferences' (DPO) has no pipeline; set mesh.stage=1"
  if training.matmul_scaling == "delayed" and training.matmul_dtype != "compute":
    yield (
      f"mesh.stage={stages}: training.matmul_scaling='delayed' keeps numbers of each layer from "
      f"step to step, which stages do not exchange; set training.matmul_scaling=current"
    )
  if "stage" not in config.partitioning.parameters.layers:
    yield (
      f"partitioning.parameters.layers={tuple(config.partitioning.parameters.layers)}: with "
      f"mesh.stage={stages} the layers are split over stage; set it to ('stage',)"
    )
  elif tuple(config.partitioning.parameters.layers) != ("stage",):
    yield "partitioning.parameters.layers: a pipeline splits the layers over stage alone"
