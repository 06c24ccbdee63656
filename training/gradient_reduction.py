"""How often gradients are reduced over `data` where a step has several microbatches.

Parameters are replicated over `data`, so each device adds up complete gradients either way: a sum
over its own rows takes no more memory than a reduced one, and is sent once. Over `fsdp` each
microbatch's gradients are reduce-scattered; unreduced ones would have the size of all parameters.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from partitioning.dims import spec_axes
from partitioning.parallel.pipeline_schedule import STAGE
from partitioning.rules import Placement
from runtime import extensions

AUTO, STEP, MICROBATCH = "auto", "step", "microbatch"
KEY = "training.gradient_reduction"
AXIS = "data"


def reduced_once_over(
  config: ConfigDict,
  sizes: Mapping[str, int],
  parameters: Mapping[str, Placement],
  variables: Any,
) -> str | None:
  """Returns the mesh axis over which gradients are reduced once per step, or None.

  Args:
    config: finalized.
    sizes: mesh axis -> size.
    parameters: name -> Placement.
    variables: of the model.

  Raises:
    ValueError: `training.gradient_reduction=step`, and that is not possible.
  """
  asked, count = config.training.gradient_reduction, microbatches(config, sizes)
  if asked == MICROBATCH or count == 1 or sizes[AXIS] == 1:
    return None
  why = _obstacle(config, sizes, parameters, variables)
  if why and asked == STEP:
    raise ValueError(f"{KEY}={STEP}: {why}; set it to {AUTO} or {MICROBATCH}")
  return None if why else AXIS


def microbatches(config: ConfigDict, sizes: Mapping[str, int]) -> int:
  """Returns the microbatches of a step, those of a pipeline included."""
  count = config.training.gradient_accumulation_steps
  return count * (config.training.microbatches if sizes.get(STAGE, 1) > 1 else 1)


def text(
  config: ConfigDict, sizes: Mapping[str, int], axis: str | None, *, gathered: bool = False
) -> str:
  """Returns how the gradients of several microbatches are reduced; "" of one microbatch.

  Args:
    config: finalized.
    sizes: mesh axis -> size.
    axis: of `reduced_once_over`.
    gathered: whether a pipeline gathers its parameters once per step (`parameter_gathers`).
  """
  count = microbatches(config, sizes)
  if count == 1:
    return ""
  if gathered:
    return f"gradients of {count} microbatches: reduced once per step over data and fsdp"
  how = f"once per step over {axis}" if axis else "after each microbatch over all axes"
  more = ", after each microbatch over the other axes" if axis else ""
  return f"gradients of {count} microbatches: reduced {how}{more}"


def _obstacle(
  config: ConfigDict,
  sizes: Mapping[str, int],
  parameters: Mapping[str, Placement],
  variables: Any,
) -> str:
  """Returns why gradients cannot be reduced once per step; "" if they can."""
  model = extensions.registered("model", config.model.name)
  if model is not None and KEY not in getattr(model, "READS", ()):
    return (
      f"the model {config.model.name} does not name it in its READS: its loss must be a sum over "
      f"rows, and what it draws for a row must follow from the row's number in the batch "
      f"(partitioning.constraints.batch_part)"
    )
  if variables:
    return (
      f"the model has variables that each microbatch of the global batch updates "
      f"({', '.join(sorted(variables))})"
    )
  if config.training.matmul_dtype == "float8":
    return (
      "training.matmul_dtype='float8' has one scale for the rows of all devices, which each would "
      "have to know"
    )
  split = [name for name, one in parameters.items() if AXIS in spec_axes(one.spec)]
  if split:
    return (
      f"{split[0]} is sharded over {AXIS}={sizes[AXIS]}, and a sum before the reduction has its "
      f"complete size"
    )
  table = config.partitioning.activations
  if [name for name, axes in table.items() if AXIS in axes] != ["batch"] or table.batch[0] != AXIS:
    return f"partitioning.activations: {AXIS} must split the batch first, and nothing else"
  return ""
