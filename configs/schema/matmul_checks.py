"""8-bit matmuls and collective matmuls: which of their keys go together."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from training.tasks import DPO


def wrong(config: ConfigDict) -> Iterator[str]:
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
