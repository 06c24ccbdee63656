"""Keys about how a step computes: what follows from them, and what is refused."""

import pytest

from configs import base
from configs.schema import finalize, optimizer_checks, step_checks, validate
from partitioning.mesh_sizes import resolve_sizes
from runtime import chips
from tests.configs.schema.test_model_checks import finalized_lora
from tests.helpers.jobs import make_job
from training.setup import check_matmul_dtype

# ------------------------------ dtypes ------------------------------


def finalized_dtypes(platform="cpu", **overrides):
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
  config = finalized_dtypes(platform, **overrides)
  training = config.training
  found = training.compute_dtype, training.frozen_dtype, config.optimizer.state_dtype
  assert (*found, training.stochastic_rounding) == wanted
  assert list(step_checks.precision_errors(config)) == []


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
    validate.check(finalized_dtypes(**overrides), resolve_sizes({}, None))
  assert said in str(refusal.value)


def test_a_group_has_no_dtype_of_its_own():
  groups = ({"parameters": "embed/*", "state_dtype": "int8"},)
  [line] = optimizer_checks.group_errors(finalized_dtypes(**{"optimizer.groups": groups}).optimizer)
  assert line.endswith("state_dtype is the same for all groups; set optimizer.state_dtype")


# ------------------------------ 8-bit and collective matmuls ------------------------------


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
    finalized_lora(recipe, **overrides)


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
    finalized_lora("lm", **{"partitioning.collective_matmul": True, **overrides})


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
  config, chip = finalized_lora("lm", **{"training.matmul_dtype": dtype}), chips.CHIPS.get(chip)
  if not said:
    check_matmul_dtype(config.training.matmul_dtype, chip)
    return
  with pytest.raises(ValueError, match=f"training.matmul_dtype='{dtype}': {said}"):
    check_matmul_dtype(config.training.matmul_dtype, chip)


# ------------------------------ memory ------------------------------


def refusal(recipe, **keys):
  config = base.get_config(recipe)
  config.update_from_flattened_dict(keys)
  config = finalize.finalize(config, "cpu")
  with pytest.raises(ValueError, match="refused") as error:
    validate.check(config, dict(config.mesh))
  return str(error.value)


def test_the_names_that_a_message_lists_are_those_of_the_model():
  said = refusal("lm", **{"training.rematerialization": "full,quary=save"})
  assert "training.rematerialization: 'quary' is no named activation of this model; did you" in said
  assert "the names are layer_input, attention_input, query, key, value, attention_output" in said
  plain = refusal("lm", **{"training.rematerialization": "gate=save", "model.gated": False})
  assert "'gate' is no named activation of this model" in plain


def test_only_elementwise_optimizers_have_their_state_on_the_host():
  host = {"optimizer.state_memory": "host"}
  assert "state_memory='hots': one of device, host; did you mean 'host'?" in refusal(
    "lm", **{"optimizer.state_memory": "hots"}
  )
  said = refusal("lm", **host, **{"optimizer.name": "muon"})
  assert "optimizer.state_memory=host: layers are updated one by one, and muon may need" in said
  groups = ({"parameters": "embed/*", "name": "contrib.muon"},)
  assert "and contrib.muon may need whole" in refusal("lm", **host, **{"optimizer.groups": groups})
  said = refusal("lm", **host, **{"optimizer.clip_quantile": 0.5, "optimizer.clip_norm": 0.0})
  assert "optimizer.clip_quantile=0.5 needs the norm of all" in said
  said = refusal("lm", **host, **{"optimizer.state_dtype": "int8"})
  assert "optimizer.state_dtype=int8 rounds whole arrays; set it to float32" in said


# ------------------------------ pipeline stages ------------------------------

STAGES = {"mesh.stage": 4, "model.layers": 8}


@pytest.mark.parametrize(
  ("keys", "words"),
  [
    ({"training.pipeline": "gpipe"}, ["training.pipeline='gpipe'", "mesh.stage is 1"]),
    ({"training.microbatches": 4}, ["training.microbatches=4", "mesh.stage is 1"]),
    ({**STAGES, "model.layers": 6}, ["model.layers=6", "mesh.stage=4", "2, 3, 6", "4 or 8"]),
    (
      {**STAGES, "training.pipeline": "interleaved", "training.pipeline_chunks": 3},
      ["training.pipeline_chunks=3", "mesh.stage=4", "one of 2"],
    ),
    ({**STAGES, "training.pipeline": "1F1B"}, ["1f1b, interleaved, gpipe"]),
    ({**STAGES, "training.pipeline_chunks": 4}, ["training.pipeline=interleaved"]),
    ({**STAGES, "training.microbatches": 5}, ["training.microbatches=5", "is not divisible by"]),
    (
      {**STAGES, "training.pipeline": "interleaved", "training.microbatches": 2},
      ["a multiple of mesh.stage=4", "1f1b takes any number"],
    ),
    ({**STAGES, "training.microbatches": 0}, ["training.microbatches=0: at least 1"]),
    (
      {**STAGES, "training.pipeline": "interleaved", "training.pipeline_chunks": 0},
      ["training.pipeline_chunks=0: at least 2"],
    ),
    ({**STAGES, "partitioning.parameters.layers": ()}, ["partitioning.parameters.layers"]),
  ],
)
def test_is_refused_with_what_would_work(keys, words):
  with pytest.raises(ValueError, match="the config is refused") as error:
    make_job("single", "lm", **keys)
  for word in words:
    assert word in str(error.value)


def test_a_model_without_stacked_layers_has_no_stages():
  with pytest.raises(ValueError, match=r"mlp has no stacked layers to split; set mesh\.stage=1"):
    make_job("single", "mlp", **{"mesh.stage": 2})
