"""Dtypes of a config: derived from one another, and refused where they do not go together."""

import pytest

from configs import base
from configs.schema import finalize, group_checks, precision_checks, validate
from partitioning.mesh_sizes import resolve_sizes


def finalized(platform="cpu", **overrides):
  config = base.get_config("lm")
  config.update_from_flattened_dict(overrides)
  return finalize.finalize(config, platform)


BFLOAT16 = {"training.parameter_dtype": "bfloat16"}


@pytest.mark.parametrize(
  ("platform", "overrides", "wanted"),
  [
    ("cpu", {}, ("float32", "float32", "float32", False)),
    ("tpu", {}, ("bfloat16", "float32", "float32", False)),
    ("cpu", BFLOAT16, ("float32", "bfloat16", "bfloat16", True)),
    ("tpu", BFLOAT16, ("bfloat16", "bfloat16", "bfloat16", True)),
    ("cpu", {"training.parameter_dtype": "float64"}, ("float64", "float64", "float64", False)),
    (
      "cpu",
      {**BFLOAT16, "optimizer.state_dtype": "float32", "training.stochastic_rounding": False},
      ("float32", "bfloat16", "float32", False),
    ),
  ],
)
def test_dtypes_follow_from_that_of_the_parameters(platform, overrides, wanted):
  config = finalized(platform, **overrides)
  training = config.training
  found = training.compute_dtype, training.frozen_dtype, config.optimizer.state_dtype
  assert (*found, training.stochastic_rounding) == wanted
  assert list(precision_checks.wrong(config)) == []


FLOAT64 = {"training.parameter_dtype": "float64"}


@pytest.mark.parametrize(
  ("overrides", "said"),
  [
    (
      {"training.parameter_dtype": "float16"},
      "training.parameter_dtype='float16': one of bfloat16, float32, float64; did you mean",
    ),
    ({"training.compute_dtype": "float31"}, "bfloat16, float32, float64; did you mean"),
    ({"training.compute_dtype": "float16"}, "set training.compute_dtype=bfloat16, whose"),
    (
      {"training.compute_dtype": "float64"},
      "training.compute_dtype=float64 needs training.parameter_dtype=float64",
    ),
    (
      {"training.gradient_reduction_dtype": "float23"},
      "one of compute, float32; did you mean 'float32'",
    ),
    (
      {**FLOAT64, "training.gradient_reduction_dtype": "float32"},
      "float32 is narrower than training.compute_dtype=float64; leave it at compute",
    ),
    ({**BFLOAT16, "training.frozen_dtype": "float32"}, "frozen_dtype='float32': one of bfloat16"),
    (
      {"optimizer.state_dtype": "int4"},
      "optimizer.state_dtype='int4': one of bfloat16, float32, int8, float64; did you mean 'int8'?",
    ),
    (
      {**FLOAT64, "optimizer.state_dtype": "int8"},
      "optimizer.state_dtype=int8: with training.parameter_dtype=float64 it is one of float64; "
      "leave it out",
    ),
    (
      {"optimizer.state_dtype": "float64"},
      "with training.parameter_dtype=float32 it is one of float32, bfloat16, int8; set "
      "training.parameter_dtype=float64 too",
    ),
    (
      {"training.stochastic_rounding": True},
      "training.stochastic_rounding=True: training.parameter_dtype=float32 is not rounded",
    ),
  ],
)
def test_refused(overrides, said):
  with pytest.raises(ValueError, match="the config is refused") as refusal:
    validate.check(finalized(**overrides), resolve_sizes({}, None))
  assert said in str(refusal.value)


def test_a_group_has_no_dtype_of_its_own():
  groups = ({"parameters": "embed/*", "state_dtype": "int8"},)
  [line] = group_checks.wrong(finalized(**{"optimizer.groups": groups}).optimizer)
  assert line.endswith("state_dtype is the same for all groups; set optimizer.state_dtype")
