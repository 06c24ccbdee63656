"""How often gradients are reduced over `data` where a step has several microbatches.

Parameters are replicated over `data`, so each device adds up complete gradients either way: a sum
over its own rows takes no more memory than a reduced one, and is sent once. Over `fsdp` each
microbatch's gradients are reduce-scattered; unreduced ones would have the size of all parameters.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax

from partitioning.dims import spec_axes
from partitioning.parallel.batch_region import summed_over_batch_parts
from partitioning.parallel.pipeline_schedule import STAGE
from partitioning.rules import Placement
from runtime import extensions
from training.gradients import Gradients
from training.step_spec import StepSpec

AUTO, STEP, MICROBATCH = "auto", "step", "microbatch"
KEY = "training.gradient_reduction"
AXIS = "data"


def reduced_once_over(
  spec: StepSpec,
  sizes: Mapping[str, int],
  parameters: Mapping[str, Placement],
  variables: Any,
) -> str | None:
  """Returns the mesh axis over which gradients are reduced once per step, or None.

  Args:
    spec: of the step.
    sizes: mesh axis -> size.
    parameters: name -> Placement.
    variables: of the model.

  Raises:
    ValueError: `training.gradient_reduction=step`, and that is not possible.
  """
  asked, count = spec.gradient_reduction, microbatches(spec, sizes)
  if asked == MICROBATCH or count == 1 or sizes[AXIS] == 1:
    return None
  why = _obstacle(spec, sizes, parameters, variables)
  if why and asked == STEP:
    raise ValueError(f"{KEY}={STEP}: {why}; set it to {AUTO} or {MICROBATCH}")
  return None if why else AXIS


def reduce_once(gradients: Gradients, axis: str) -> Gradients:
  """Returns the sum of a function's gradients over an axis, each device having its own rows."""
  return functools.partial(summed_over_batch_parts, gradients, axis)


def keep_apart(grads: Any, sums: Any) -> tuple[Any, Any]:
  """Returns a microbatch's gradients and sums, whose reductions the compiler leaves where they are.

  The compiler for TPUs (libtpu 0.0.42) moves reductions of what a loop adds up out of the loop:
  those over fsdp too, where the sums would need the memory of all parameters, and it fails
  (RET_CHECK in while_loop_all_reduce_code_motion.cc) where rows are split so.
  """
  return jax.lax.optimization_barrier((grads, sums))


def microbatches(spec: StepSpec, sizes: Mapping[str, int]) -> int:
  """Returns the microbatches of a step, those of a pipeline included."""
  count = spec.gradient_accumulation_steps
  return count * (spec.microbatches if sizes.get(STAGE, 1) > 1 else 1)


def text(
  spec: StepSpec, sizes: Mapping[str, int], axis: str | None, *, gathered: bool = False
) -> str:
  """Returns how the gradients of several microbatches are reduced; "" of one microbatch.

  Args:
    spec: of the step.
    sizes: mesh axis -> size.
    axis: of `reduced_once_over`.
    gathered: whether a pipeline gathers its parameters once per step (`parameter_gathers`).
  """
  count = microbatches(spec, sizes)
  if count == 1:
    return ""
  if gathered:
    return f"gradients of {count} microbatches: reduced once per step over data and fsdp"
  how = f"once per step over {axis}" if axis else "after each microbatch over all axes"
  more = ", after each microbatch over the other axes" if axis else ""
  return f"gradients of {count} microbatches: reduced {how}{more}"


def _obstacle(
  spec: StepSpec,
  sizes: Mapping[str, int],
  parameters: Mapping[str, Placement],
  variables: Any,
) -> str:
  """Returns why gradients cannot be reduced once per step; "" if they can."""
  model = extensions.registered("model", spec.model)
  if model is not None and KEY not in getattr(model, "READS", ()):
    return (
      f"the model {spec.model} does not name it in its READS: its loss must be a sum over "
      f"rows, and what it draws for a row must follow from the row's number in the batch "
      f"(partitioning.constraints.batch_part)"
    )
  if variables:
    return (
      f"the model has variables that each microbatch of the global batch updates "
      f"({', '.join(sorted(variables))})"
    )
  if spec.matmul_dtype == "float8":
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
  table = spec.activations
  if [name for name, axes in table.items() if AXIS in axes] != ["batch"] or (
    table["batch"][0] != AXIS
  ):
    return f"partitioning.activations: {AXIS} must split the batch first, and nothing else"
  return ""
