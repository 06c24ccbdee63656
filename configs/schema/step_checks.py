"""How a step computes: which keys about dtypes, matmuls, memory and pipeline stages go together."""

from collections.abc import Iterator, Mapping

from ml_collections import ConfigDict

from configs.keys.training import TRAINING
from runtime import rematerialization
from runtime.layer_kinds import beside_sparse
from runtime.suggest import nearest
from training.optimizer import optimizer_row, optimizers_with
from training.tasks import DPO

# ------------------------------ dtypes ------------------------------

# Of parameters -> of the optimizer's moments.
STATE_DTYPES = {
  "bfloat16": ("bfloat16", "float32", "int8"),
  "float32": ("float32", "bfloat16", "int8"),
  "float64": ("float64",),
}


def finalize_precision(config: ConfigDict, accelerated: bool) -> None:
  """Fills in the dtypes that follow from that of the parameters; `config` is unlocked."""
  training, stored = config.training, config.training.parameter_dtype
  narrow = stored == "bfloat16"
  derived = {
    "compute_dtype": "bfloat16" if accelerated else "float32" if narrow else stored,
    "frozen_dtype": stored,
    "stochastic_rounding": narrow,
  }
  for key, value in derived.items():
    if training[key] is None:
      training[key] = value
  if config.optimizer.state_dtype is None:
    config.optimizer.state_dtype = stored


def precision_errors(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each dtype that is none, or that does not go with the others."""
  training = config.training
  stored, compute = training.parameter_dtype, training.compute_dtype
  if stored not in STATE_DTYPES:  # the range of its row says so
    return
  frozen = tuple(dict.fromkeys(("bfloat16", stored)))
  if training.frozen_dtype not in frozen:
    yield _unknown("training.frozen_dtype", training.frozen_dtype, frozen)
  yield from _state_dtype(config)
  if training.stochastic_rounding and stored != "bfloat16":
    yield (
      f"training.stochastic_rounding=True: training.parameter_dtype={stored} is not rounded; leave "
      f"it out, or set training.parameter_dtype=bfloat16"
    )
  if compute == "float16":
    yield (
      "training.compute_dtype='float16': gradients below 6e-8 become zero in it, and losses are "
      "not scaled up to prevent that; set training.compute_dtype=bfloat16, whose range is that of "
      "float32"
    )
  elif compute not in TRAINING["compute_dtype"].usual:
    yield _unknown("training.compute_dtype", compute, TRAINING["compute_dtype"].usual)
  if compute == "float64" and stored != "float64":
    yield "training.compute_dtype=float64 needs training.parameter_dtype=float64"
  if training.gradient_reduction_dtype == "float32" and compute == "float64":
    yield (
      "training.gradient_reduction_dtype=float32 is narrower than training.compute_dtype=float64; "
      "leave it at compute"
    )


def _state_dtype(config: ConfigDict) -> Iterator[str]:
  dtype, stored = config.optimizer.state_dtype, config.training.parameter_dtype
  known = tuple(dict.fromkeys(name for names in STATE_DTYPES.values() for name in names))
  if dtype not in known:
    yield _unknown("optimizer.state_dtype", dtype, known)
  elif dtype not in STATE_DTYPES[stored]:
    fix = "leave it out" if stored == "float64" else "set training.parameter_dtype=float64 too"
    yield (
      f"optimizer.state_dtype={dtype}: with training.parameter_dtype={stored} it is one of "
      f"{', '.join(STATE_DTYPES[stored])}; {fix}"
    )


def _unknown(name: str, value: str, known: tuple[str, ...]) -> str:
  return f"{name}={value!r}: one of {', '.join(known)}{nearest(value, known)}"


# ------------------------------ 8-bit and collective matmuls ------------------------------


def matmul_errors(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each of these keys that does not go with the others.

  Args:
    config: finalized.
  """
  split = "residual_sequence" in config.partitioning.activations
  if config.partitioning.collective_matmul and split and (why := no_ring(config)):
    yield f"partitioning.collective_matmul=True: {why}; change that, or leave the key at False"
  dtype, scaling = config.training.matmul_dtype, config.training.matmul_scaling
  if scaling != "delayed":
    return
  if dtype == "int8":
    yield (
      "training.matmul_scaling=delayed: int8 has scales for each token and each output, not for "
      "arrays, so there is none of an earlier step to take; set training.matmul_scaling=current, "
      "or training.matmul_dtype=float8"
    )
  elif dtype == "compute":
    yield (
      "training.matmul_scaling=delayed is about 8-bit matmuls: set training.matmul_dtype=float8, "
      "or leave it at current"
    )
  elif config.task == DPO:
    yield (
      f"training.matmul_scaling=delayed: the reference model of the task {DPO} has no earlier "
      f"steps; set training.matmul_scaling=current"
    )


def no_ring(config: ConfigDict) -> str:
  """Returns why no matmul of a config can be a ring over a split sequence; "" if some can.

  Args:
    config: with everything else filled in.
  """
  if not config.partitioning.sequence_parallel:
    return "partitioning.sequence_parallel is False, so that no sequence is gathered"
  if config.training.matmul_dtype != "compute" and config.lora.rank:
    return (
      f"training.matmul_dtype={config.training.matmul_dtype} with lora.rank={config.lora.rank}: "
      "adapters read activations that are not rounded"
    )
  if config.lora.rank and config.lora.dropout:
    return f"lora.dropout={config.lora.dropout}: it is drawn for the gathered activation"
  return ""


# ------------------------------ memory ------------------------------


def memory_errors(config: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the keys about memory.

  Args:
    config: finalized.
  """
  names = rematerialization.names_of(config.model)
  try:
    rematerialization.parse(config.training.rematerialization, names)
  except ValueError as error:
    yield f"training.rematerialization: {error}"
  yield from _state_memory(config.optimizer)


def _state_memory(keys: ConfigDict) -> Iterator[str]:
  """Yields why the optimizer's state cannot be where `optimizer.state_memory` says."""
  if keys.state_memory == "host":
    yield from (f"optimizer.state_memory=host: {why}" for why in on_the_device(keys))


def on_the_device(keys: ConfigDict) -> Iterator[str]:
  """Yields why an optimizer's state has to be on the device.

  Args:
    keys: the config's section `optimizer`.
  """
  groups = [group for group in keys.groups if isinstance(group, dict)]
  names = [keys.name, *(group["name"] for group in groups if "name" in group)]
  if others := [name for name in dict.fromkeys(names) if not optimizer_row(name).elementwise]:
    yield (
      f"layers are updated one by one, and {' and '.join(others)} may need whole arrays; it is for "
      f"{', '.join(optimizers_with(lambda row: row.elementwise))}"
    )
  if keys.state_dtype not in ("float32", "float64"):
    yield (
      f"layers are updated one by one, and optimizer.state_dtype={keys.state_dtype} rounds whole "
      "arrays; set it to float32"
    )
  for key in ("clip_quantile", "clip_groups"):
    if keys[key]:
      yield (
        f"layers are updated one by one, and optimizer.{key}={keys[key]} needs the norm of all; "
        f"clip with optimizer.clip_norm alone"
      )


# ------------------------------ pipeline stages ------------------------------

# Keys about pipelines -> what they are where they say nothing.
OFF = {
  key: TRAINING[key].default
  for key in ("pipeline", "pipeline_chunks", "pipeline_ends", "pipeline_gather")
}


def pipeline_errors(config: ConfigDict, sizes: Mapping[str, int]) -> Iterator[str]:
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
