"""Which batch a step trains on, where a run is told to skip some."""


def batch_index(step, skipped):
  """Returns the number of the batch that a step trains on: the step-th of those not skipped.

  Args:
    step: int, at least 0.
    skipped: numbers of batches, in ascending order, none of them twice.
  """
  for skip in skipped:
    if skip > step:
      break
    step += 1
  return step
