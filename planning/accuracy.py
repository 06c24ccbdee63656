"""How accurate plans are known to be: what docs/plan.md measures, in sentences.

Tests keep the numbers here those of the page.
"""

# Predicted / published throughput, least and most, of docs/plan.md: of TPUs by compiled
# programs, of GPUs by formula.
PUBLISHED, PUBLISHED_BY_FORMULA = (1.05, 1.13), (0.97, 1.08)
# HBM traffic by formula / in compiled programs, least and most, of docs/plan.md.
TRAFFIC = (2.11, 3.17)
# Of docs/plan.md: how many configs have a peak within 10 %, of how many.
MEMORY = (13, 14)


def of_times(platform: str, *, compiled: bool) -> str:
  """Returns how accurate the times of a plan are.

  Args:
    platform: of the topology.
    compiled: whether they are those of a compiled program.
  """
  if platform == "cpu":
    return "simulated devices share one machine; compare plans, not times"
  if compiled:
    return (
      f"predictions are {_range(PUBLISHED)} of published TPU throughputs; nothing was measured "
      "here (docs/plan.md)"
    )
  traffic = (
    "next to compiled TPU programs the FLOPs agree and HBM traffic is "
    f"{_range(TRAFFIC)} of theirs (docs/plan.md)"
  )
  if platform == "tpu":
    return f"unknown by formula, without the compiler; {traffic}"
  return (
    f"by formula, predictions are {_range(PUBLISHED_BY_FORMULA)} of two published throughputs of "
    "eight H100, with the share of the peak that was measured of matmuls on them "
    f"(docs/plan.md); {traffic}"
  )


def of_memory() -> str:
  """Returns how accurate the peak memory by formula is."""
  close, every = MEMORY
  return (
    f"by formula, the peak memory is within 10 % of the TPU compiler's on {close} of {every} "
    "configs (docs/plan.md)"
  )


def _range(ends: tuple[float, float]) -> str:
  return f"{ends[0]:.2f} to {ends[1]:.2f}"
