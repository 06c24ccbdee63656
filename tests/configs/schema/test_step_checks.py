"""Keys about how a step computes: what follows from them, and what is refused."""

import pytest

from runtime import chips
from tests.configs.loading import checked
from training.setup import check_matmul_dtype

# ------------------------------ dtypes ------------------------------


BFLOAT16 = "training.parameter_dtype=bfloat16"


@pytest.mark.parametrize(
  ("platform", "keys", "wanted"),
  [
    ("cpu", "", ("float32", "float32", "float32", False)),
    ("tpu", "", ("bfloat16", "float32", "float32", False)),
    ("cpu", BFLOAT16, ("float32", "bfloat16", "bfloat16", True)),
    ("tpu", BFLOAT16, ("bfloat16", "bfloat16", "bfloat16", True)),
    ("gpu", "training.compute_dtype=float32", ("float32", "float32", "float32", False)),
    ("cpu", "training.parameter_dtype=float64", ("float64", "float64", "float64", False)),
    (
      "cpu",
      f"{BFLOAT16} optimizer.state_dtype=float32 training.stochastic_rounding=False",
      ("float32", "bfloat16", "float32", False),
    ),
  ],
)
def test_dtypes_follow_from_that_of_the_parameters(platform, keys, wanted):
  config = checked(keys, "lm", platform)
  training = config.training
  found = training.compute_dtype, training.frozen_dtype, config.optimizer.state_dtype
  assert (*found, training.stochastic_rounding) == wanted


@pytest.mark.parametrize(
  ("dtype", "chip", "said"),
  [
    ("int8", "v4", "on v4 its matmuls are not faster .* 275 TFLOP/s; set"),
    ("int8", "h100", "on h100 .* set training.matmul_dtype=float8"),
    ("float8", "v6e", "on v6e .* set training.matmul_dtype=int8"),
    ("float8", "a100", "on a100 .* set training.matmul_dtype=compute"),
    ("int8", "v5e", ""),
    ("float8", "h100", ""),
    ("float8", "cpu", ""),
    ("int8", None, ""),
    ("compute", "v4", ""),
  ],
)
def test_chips_that_do_not_compute_them_faster_are_refused(dtype, chip, said):
  config, chip = checked(f"training.matmul_dtype={dtype}"), chips.CHIPS.get(chip)
  if not said:
    check_matmul_dtype(config.training.matmul_dtype, chip)
    return
  with pytest.raises(ValueError, match=f"training.matmul_dtype='{dtype}': {said}"):
    check_matmul_dtype(config.training.matmul_dtype, chip)
