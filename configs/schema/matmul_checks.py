"""8-bit matmuls: which of their keys go together."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from training.tasks import DPO

DTYPES = ("compute", "int8", "float8")
SCALINGS = ("current", "delayed")
CHOICES = {"training.matmul_dtype": DTYPES, "training.matmul_scaling": SCALINGS}


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each key of 8-bit matmuls that does not go with the others.

  Args:
    config: finalized.
  """
  dtype, scaling = config.training.matmul_dtype, config.training.matmul_scaling
  if scaling != "delayed" or dtype not in DTYPES:
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
