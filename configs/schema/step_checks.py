"""How a step computes: which keys about dtypes, matmuls, memory and pipeline stages go together."""

from collections.abc import Iterator, Mapping

from ml_collections import ConfigDict

from configs.keys import table
from configs.keys.training import TRAINING
from configs.schema.data_checks import parts
from configs.schema.model_checks import divisors, listed
from configs.schema.optimizer_checks import names_of
from runtime import rematerialization
from runtime.extensions import kind_of_model
from runtime.layer_kinds import QUANTIZED, QUANTIZED_BLOCK, alike, stack_of
from runtime.suggest import nearest
from training.optimizer import optimizer_row, optimizers_with
from training.tasks import DPO, GRPO

# ------------------------------ dtypes ------------------------------

# Of parameters -> of the optimizer's moments.
STATE_DTYPES = {
  "bfloat16": ("bfloat16", "float32", "int8"),
  "float32": ("float32", "bfloat16", "int8"),
  "float64": ("float64",),
}


def finalize_precision(training: ConfigDict, optimizer: ConfigDict, accelerated: bool) -> None:
  """Fills in the dtypes that follow from that of the parameters; the config is unlocked."""
  stored = training.parameter_dtype
  narrow = stored == "bfloat16"
  derived = {
    "compute_dtype": "bfloat16" if accelerated else "float32" if narrow else stored,
    "frozen_dtype": stored,
    "stochastic_rounding": narrow,
  }
  for key, value in derived.items():
    if training[key] is None:
      training[key] = value
  if optimizer.state_dtype is None:
    optimizer.state_dtype = stored


def local_dir_errors(checkpoint: ConfigDict) -> Iterator[str]:
  """Yields why checkpoints of a host cannot be kept in `checkpoint.local_dir`."""
  if checkpoint.local_dir and not checkpoint.local_dir.startswith("/"):
    yield (
      f"checkpoint.local_dir={checkpoint.local_dir}: it is a folder of each host, with its full "
      f"path, such as /mnt/disk0; storage that all hosts see is the workdir's"
    )


def precision_errors(training: ConfigDict, optimizer: ConfigDict) -> Iterator[str]:
  """Yields a line for each dtype that is none, or that does not go with the others."""
  stored, compute = training.parameter_dtype, training.compute_dtype
  if stored not in STATE_DTYPES:  # the range of its row says so
    return
  frozen = tuple(dict.fromkeys(("bfloat16", stored)))
  frozen += QUANTIZED
  if training.frozen_dtype not in frozen:
    yield _unknown("training.frozen_dtype", training.frozen_dtype, frozen)
  known = tuple(dict.fromkeys(name for names in STATE_DTYPES.values() for name in names))
  if optimizer.state_dtype not in known:
    yield _unknown("optimizer.state_dtype", optimizer.state_dtype, known)
  elif optimizer.state_dtype not in STATE_DTYPES[stored]:
    fix = "leave it out" if stored == "float64" else "set training.parameter_dtype=float64 too"
    yield (
      f"optimizer.state_dtype={optimizer.state_dtype}: with training.parameter_dtype={stored} it "
      f"is one of {listed(STATE_DTYPES[stored])}; {fix}"
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


def quantized_errors(model: ConfigDict, training: ConfigDict) -> Iterator[str]:
  """Yields why the frozen kernels of a model cannot be quantized."""
  if training.frozen_dtype not in QUANTIZED:
    return
  given = f"training.frozen_dtype={training.frozen_dtype}"
  if kind_of_model(model.name) != "transformer":
    yield f"{given}: the kernels of decoders are quantized, and model.name={model.name} is none"
  elif "*" in training.trainable:
    yield (
      f"{given}: all parameters are trained, and none is frozen; set lora.rank, or name those to "
      f"train in training.trainable"
    )
  elif rest := model.model_size % QUANTIZED_BLOCK:
    below = max(model.model_size - rest, QUANTIZED_BLOCK)
    yield (
      f"{given}: blocks of {QUANTIZED_BLOCK} elements along the model's width do not divide "
      f"model.model_size={model.model_size}; make it {below} or "
      f"{below + QUANTIZED_BLOCK}, or set training.frozen_dtype=bfloat16"
    )


def _unknown(name: str, value: str, known: tuple[str, ...]) -> str:
  return f"{name}={value!r}: one of {', '.join(known)}{nearest(value, known)}"


# ------------------------------ 8-bit and collective matmuls ------------------------------


def matmul_errors(
  training: ConfigDict, partitioning: ConfigDict, lora: ConfigDict
) -> Iterator[str]:
  """Yields what does not go with matmuls as rings."""
  split = "residual_sequence" in partitioning.activations
  if partitioning.collective_matmul and split and (why := no_ring(training, partitioning, lora)):
    yield f"partitioning.collective_matmul=True: {why}; change that, or leave the key at False"


def no_ring(training: ConfigDict, partitioning: ConfigDict, lora: ConfigDict) -> str:
  """Returns why no matmul can be a ring over a split sequence; "" if some can.

  Everything else is filled in.
  """
  if not partitioning.sequence_parallel:
    return "partitioning.sequence_parallel is False, so that no sequence is gathered"
  if training.matmul_dtype != "compute" and lora.rank:
    return (
      f"training.matmul_dtype={training.matmul_dtype} with lora.rank={lora.rank}: adapters read "
      f"activations that are not rounded"
    )
  if lora.rank and lora.dropout:
    return f"lora.dropout={lora.dropout}: it is drawn for the gathered activation"
  return ""


# ------------------------------ fewer replicas ------------------------------


def elastic_errors(training: ConfigDict, mesh: ConfigDict, mesh_dcn: ConfigDict) -> Iterator[str]:
  """Yields why an elastic run could not go on with fewer data replicas."""
  if not training.elastic:
    return
  if open_axes := [axis for axis, size in mesh.items() if size == -1]:
    yield (
      f"training.elastic=True with mesh.{open_axes[0]}=-1: whether devices are missing is told by "
      f"the size of the whole mesh; set it"
    )
  elif mesh.data * mesh_dcn.data == 1:
    yield (
      "training.elastic=True with mesh.data=1 and mesh_dcn.data=1: there is no data replica to go "
      "on without; set one of them to 2 or more, or leave training.elastic at False"
    )


# ------------------------------ memory ------------------------------


def memory_errors(model: ConfigDict, training: ConfigDict, optimizer: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the keys about memory."""
  names = rematerialization.names_of(model)
  try:
    rematerialization.parse(training.rematerialization, names)
  except ValueError as error:
    yield f"training.rematerialization: {error}"
  if optimizer.state_memory == "host":
    yield from (f"optimizer.state_memory=host: {why}" for why in on_the_device(optimizer))


def on_the_device(keys: ConfigDict) -> Iterator[str]:
  """Yields why an optimizer's state has to be on the device.

  Args:
    keys: the config's section `optimizer`.
  """
  if others := [name for name in names_of(keys) if not optimizer_row(name).elementwise]:
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


# Keys about stages -> their value without.
OF_STAGES = table.needing("mesh.stage")


def pipeline_errors(
  model: ConfigDict,
  training: ConfigDict,
  data: ConfigDict,
  partitioning: ConfigDict,
  task: str,
  sizes: Mapping[str, int],
) -> Iterator[str]:
  """Yields what does not go with the pipeline stages of the mesh."""
  stages = sizes.get("stage", 1)
  if stages == 1:
    return
  if kind_of_model(model.name) != "transformer":
    yield f"mesh.stage={stages}: {model.name} has no stacked layers to split; set mesh.stage=1"
    return
  yield from _layers(model, training, stages)
  batch = parts(partitioning.activations.batch, sizes)
  yield from _microbatches(training, data.global_batch_size, batch, stages)
  if task in (DPO, GRPO):
    yield f"mesh.stage={stages}: data.name={data.name!r} ({task}) has no pipeline; set mesh.stage=1"
  for stack in sorted({stack_of(model, layer) for layer in range(model.layers)}):
    dim = stack.removesuffix("/")
    if (axes := tuple(partitioning.parameters[dim])) != ("stage",):
      yield (
        f"partitioning.parameters.{dim}={axes}: with mesh.stage={stages} the layers are split over "
        f"stage alone; set it to ('stage',)"
      )


def _layers(model: ConfigDict, training: ConfigDict, stages: int) -> Iterator[str]:
  """Yields how stages, and chunks of them, do not divide the layers, or are not alike."""
  chunks = training.pipeline_chunks if training.pipeline == "interleaved" else 1
  layers = model.layers
  if chunks < 1:
    return
  if layers % (stages * chunks) == 0:
    if not alike(model, stages * chunks):
      fits = [n for n in divisors(layers)[1:] if alike(model, n * chunks)]
      size = layers // (stages * chunks)
      stacks = [stack_of(model, layer).removesuffix("/") for layer in range(layers)]
      other = next(n for n in range(size, layers) if stacks[n] != stacks[n % size])
      yield (
        f"mesh.stage={stages}: layer {other} is one of {stacks[other]} and layer {other % size} of "
        f"{stacks[other % size]}, and the stages of a pipeline, of {size} layers, are alike; "
        f"set mesh.stage to {listed(fits) if fits else 1}"
      )
    return
  parts = f"mesh.stage={stages}" + (f" x training.pipeline_chunks={chunks}" if chunks > 1 else "")
  fits = [n for n in divisors(layers)[1:] if layers % (n * chunks) == 0]
  ways = [f"set mesh.stage to one of {listed(fits)}"] if fits else []
  of_chunks = [n for n in divisors(layers)[1:] if layers % (stages * n) == 0]
  if chunks > 1 and of_chunks:
    ways.append(f"set training.pipeline_chunks to one of {listed(of_chunks)}")
  whole = stages * chunks
  near = [n for n in (layers // whole * whole, (layers // whole + 1) * whole) if n]
  ways.append(f"make model.layers {' or '.join(map(str, near))}")
  yield f"model.layers={layers} is not divisible by {parts}; {', or '.join(ways)}"


def _microbatches(training: ConfigDict, rows: int, batch: int, stages: int) -> Iterator[str]:
  """Yields what is wrong with the number of microbatches; `batch` is the parts of the batch."""
  count, steps = training.microbatches, training.gradient_accumulation_steps
  if count < 1 or steps < 1:
    return
  whole = batch * steps
  if rows % (whole * count):
    of_device = rows // whole
    fits = divisors(of_device) if rows % whole == 0 else []
    way = f"set it to one of {listed(fits)}, or " if fits else ""
    more = f" x training.gradient_accumulation_steps={steps}" if steps > 1 else ""
    yield (
      f"training.microbatches={count}: data.global_batch_size={rows} is not divisible by "
      f"{count} microbatches x {batch} parts of the batch{more}; {way}make the batch "
      f"{(rows // (whole * count) + 1) * whole * count}"
    )
  if training.pipeline == "interleaved" and count % stages:
    near = [n for n in (count // stages * stages, (count // stages + 1) * stages) if n]
    yield (
      f"training.microbatches={count}: training.pipeline='interleaved' needs a multiple of "
      f"mesh.stage={stages}, such as {' or '.join(map(str, near))}; 1f1b takes any number"
    )
