"""Which keys of 8-bit matmuls are refused, and on which chips."""

import pytest

from analysis import chips
from tests.configs.schema.test_lora_checks import finalized
from training.setup import check_matmul_dtype


@pytest.mark.parametrize(
  ("recipe", "overrides", "said"),
  [
    ("lm", {"training.matmul_dtype": "int4"}, "'int4': one of compute, int8, float8; did you mean"),
    ("lm", {"training.matmul_dtype": "fp8"}, "'fp8': one of compute, int8, float8"),
    ("lm", {"training.matmul_scaling": "delay"}, "'delay': one of current, delayed; did you mean"),
    (
      "lm",
      {"training.matmul_scaling": "delayed"},
      "is about 8-bit matmuls: set training.matmul_dt",
    ),
    (
      "lm",
      {"training.matmul_dtype": "int8", "training.matmul_scaling": "delayed"},
      "int8 has scales for each token and each output, .* set training.matmul_scaling=current",
    ),
    (
      "model=lm,data=preferences",
      {
        "data.files": "rows.jsonl",
        "training.matmul_dtype": "float8",
        "training.matmul_scaling": "delayed",
      },
      "the reference model of the task dpo has no earlier steps",
    ),
    ("mlp", {"training.matmul_dtype": "int8"}, "the model mlp does not use it; leave it at 'comp"),
  ],
)
def test_refused_with_the_key(recipe, overrides, said):
  with pytest.raises(ValueError, match=f"training.matmul_.*{said}"):
    finalized(recipe, **overrides)


@pytest.mark.parametrize(
  ("overrides", "said"),
  [
    ({}, "partitioning.sequence_parallel is False, so that no sequence is gathered; change that"),
    (
      {"partitioning.sequence_parallel": True, "training.matmul_dtype": "int8", "lora.rank": 2},
      "training.matmul_dtype=int8 with lora.rank=2: adapters read",
    ),
    (
      {"partitioning.sequence_parallel": True, "lora.rank": 4, "lora.dropout": 0.1},
      "lora.dropout=0.1: it is drawn for the gathered activation",
    ),
  ],
)
def test_a_collective_matmul_of_nothing_is_refused(overrides, said):
  with pytest.raises(ValueError, match=f"partitioning.collective_matmul=True: {said}"):
    finalized("lm", **{"partitioning.collective_matmul": True, **overrides})


@pytest.mark.parametrize(
  ("dtype", "chip", "said"),
  [
    (
      "int8",
      "v4",
      "on v4 its matmuls are not faster .* 275 TFLOP/s; set training.matmul_dtype=com",
    ),
    ("int8", "a100", "on a100 .* set training.matmul_dtype=compute"),
    ("int8", "h100", "on h100 .* set training.matmul_dtype=float8"),
    ("int8", "tpu7x", "on tpu7x .* set training.matmul_dtype=float8"),
    ("float8", "v6e", "on v6e .* set training.matmul_dtype=int8"),
    ("float8", "a100", "on a100 .* set training.matmul_dtype=compute"),
    ("int8", "v5e", ""),
    ("int8", "v5p", ""),
    ("int8", "v6e", ""),
    ("float8", "h100", ""),
    ("float8", "tpu7x", ""),
    ("float8", "cpu", ""),
    ("int8", None, ""),
    ("compute", "v4", ""),
  ],
)
def test_chips_that_do_not_compute_them_faster_are_refused(dtype, chip, said):
  config, chip = finalized("lm", **{"training.matmul_dtype": dtype}), chips.CHIPS.get(chip)
  if not said:
    check_matmul_dtype(config, chip)
    return
  with pytest.raises(ValueError, match=f"training.matmul_dtype='{dtype}': {said}"):
    check_matmul_dtype(config, chip)
