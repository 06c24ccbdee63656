"""The result of `compare` as text."""

from commands import compare
from tests.helpers.jobs import make_job
from training.parity import Difference

FOUND = [
  Difference("loss", "step 1", 0.0, "to the bit"),
  Difference("gradient", "layer_2/kernel", 3e-16, "rounding"),
  Difference("parameters", "layer_3/bias", 1e-16),
]


def text(found):
  jobs = [make_job("dp8", "mlp"), make_job("single", "mlp")]
  for job in jobs:
    with job.config.unlocked():
      job.config.training.parameter_dtype = "float64"
  return compare.table_text(jobs, ("dp8_mlp", "single_mlp"), found)


def test_every_tensor_has_a_row_and_equality_the_largest_difference():
  lines = text(FOUND).splitlines()
  [row] = [line.split() for line in lines if "layer_2/kernel" in line and "3.00e-16" in line][:1]
  assert row == ["gradient", "layer_2/kernel", "[40,", "56]", "3.00e-16", "rounding"]
  [row] = [line.split() for line in lines if "step 1" in line]
  assert row == ["loss", "step", "1", "0", "to", "the", "bit"]
  wanted = "equal: 3 tensors, 1 of them to the bit; the largest difference is 3.00e-16 (gradient "
  assert lines[-1] == wanted + "layer_2/kernel)"
  assert lines[:2] == ["dp8_mlp: data=8", "single_mlp: 1 device"]
  assert text(FOUND[:1]).splitlines()[-1] == "equal to the bit: 1 tensors"
  lines = text([*FOUND, Difference("parameters", "layer_1/kernel", 0.5)]).splitlines()
  assert [line for line in lines if line.split()[-3:] == ["5.00e-01", ">", "bound"]]
  assert lines[-1].startswith("different: 1 of 4 tensors are beyond 1e-12; the first is parameters")
