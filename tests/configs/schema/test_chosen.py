"""Defaults that follow from config, platform and mesh: each, on every platform, and overridden."""

import pytest

from configs.schema import chosen, finalize
from tests.configs.loading import SIZES, load
from tests.docs.pages import ROOT


def choices(argument, platform, sizes, /, **overrides):
  """Returns (the finalized config, key -> Choice)."""
  config = load("single", argument, **overrides)
  config, found = finalize.with_choices(config, platform, {**SIZES, **sizes})
  return config, {one.key: one for one in found}


V5P = ("model=llama3_8b", "tpu", {"fsdp": 64})
V6E = ("model=llama3_8b", "tpu", {"fsdp": 64, "tensor": 4})


@pytest.mark.parametrize(
  ("case", "rows", "chunks", "parallel"),
  [
    # 8192 tokens and 128,256 columns in bfloat16 are 2,004 MiB: 8 of 250.5.
    (V5P, 64, 8, False),
    (V6E, 256, 8, True),  # four rows, a quarter of the columns
    (V5P, 128, 16, False),
    (("model=llama3_8b", "gpu", {"fsdp": 8, "tensor": 2}), 8, 4, True),
    # In float32.
    (("model=llama3_8b", "cpu", {"fsdp": 64, "tensor": 2}), 64, 8, False),
    (("model=llama3_8b", "tpu", {"fsdp": 16, "context": 4}), 16, 2, False),
  ],
)
def test_presets_have_the_best_known_configuration(case, rows, chunks, parallel):
  config, found = choices(*case, **{"data.global_batch_size": rows})
  assert config.training.loss_chunks == chunks
  assert config.partitioning.sequence_parallel is parallel
  assert ("tensor" in config.partitioning.activations.residual_sequence) is parallel
  assert found["training.loss_chunks"].value == chunks
  assert "256 MiB" in found["training.loss_chunks"].why


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("sizes", [{}, {"data": 4, "tensor": 2}, {"tensor": 8}])
def test_the_small_decoder_has_one_chunk(platform, sizes):
  config, found = choices("lm", platform, sizes)
  assert config.training.loss_chunks == 1
  assert config.partitioning.sequence_parallel is (platform != "cpu" and "tensor" in sizes)
  assert config.training.compute_dtype == ("float32" if platform == "cpu" else "bfloat16")
  assert found["training.attention_kernel"].value == config.training.attention_kernel == "xla"


@pytest.mark.parametrize(
  ("length", "attention", "kernel"),
  [
    # A row of 8192: 2048 tokens of a device, 32 heads, half of 2048 keys, 4 bytes: 0.25 GiB.
    (8200, "auto", "xla"),
    (16_376, "ring", "xla"),
    (32_776, "auto", "blockwise"),  # 4 GiB
    # In pieces of whole blocks of 128.
    (8192, "auto", "splash"),
    (32_768, "ring", "splash"),
    (16_392, "gather", "splash"),
  ],
)
def test_split_rows_that_splash_cannot_take_are_in_blocks_where_their_scores_are_large(
  length, attention, kernel
):
  given = {"data.global_batch_size": 16, "data.sequence_length": length}
  given |= {"mesh.context": 4, "model.context_attention": attention}
  config, found = choices("model=qwen3_8b", "tpu", {"fsdp": 16, "context": 4}, **given)
  assert config.training.attention_kernel == kernel
  assert ("GiB of scores at once" in found["training.attention_kernel"].why) is (kernel == "xla")


def test_what_was_set_is_not_chosen():
  given = {
    "training.loss_chunks": 2,
    "partitioning.sequence_parallel": False,
    "training.attention_kernel": "xla",
    "partitioning.collective_matmul": False,
  }
  config, found = choices(*V6E, **given, **{"data.global_batch_size": 256})
  assert found == {}
  assert {key: config[key.split(".")[0]][key.split(".")[1]] for key in given} == given


def test_the_chunks_divide_the_columns_of_a_device():
  # 50,257 columns, padded to 50,304 = 2^7 x 3 x 131.
  for rows, tensor in ((64, 1), (24, 2), (40, 4)):
    sizes = {"tensor": tensor}
    config, _ = choices("gpt2_124m", "tpu", sizes, **{"data.global_batch_size": rows})
    own, count = 50_304 // tensor, config.training.loss_chunks
    assert own % count == 0
    size = rows * 1024 * own * 2
    assert size / count <= chosen.CHUNK_BYTES < size
    fewer = [n for n in range(1, count) if own % n == 0]
    assert size / fewer[-1] > chosen.CHUNK_BYTES


def test_the_finest_chunks_where_none_is_small_enough():
  prime = {"model.vocabulary_size": 131, "model.vocabulary_multiple": 131}
  config, found = choices("lm", "tpu", {}, **prime, **{"data.global_batch_size": 2**16})
  assert config.training.loss_chunks == 1
  assert "no finer parts" in found["training.loss_chunks"].why


def test_pairs_have_two_rows_and_microbatches_fewer():
  one, _ = choices(*V5P, **{"data.global_batch_size": 64})
  more = {"data.global_batch_size": 128, "training.gradient_accumulation_steps": 2}
  assert choices(*V5P, **more)[0].training.loss_chunks == one.training.loss_chunks
  pairs = ("model=llama3_8b,data=preferences", *V5P[1:])
  twice, _ = choices(*pairs, **{"data.global_batch_size": 64})
  assert twice.training.loss_chunks == 2 * one.training.loss_chunks


@pytest.mark.parametrize(
  ("sizes", "overrides", "why"),
  [
    ({"tensor": 3}, {}, "data.sequence_length=128 is not a multiple of 3"),
    ({"tensor": 2, "context": 3}, {}, "data.sequence_length=128 is not a multiple of 6"),
    (
      {"tensor": 2},
      {"partitioning.activations.residual_sequence": ("context", "data")},
      "partitioning.activations.residual_sequence=('context', 'data') is set",
    ),
  ],
)
def test_regions_are_left_out_where_they_are_impossible(sizes, overrides, why):
  config, found = choices("lm", "tpu", sizes, **overrides)
  assert config.partitioning.sequence_parallel is False
  assert found["partitioning.sequence_parallel"].why == why


@pytest.mark.parametrize(
  ("case", "overrides", "ring", "why"),
  [
    (V6E, {}, True, "8192 tokens are multiplied while as many are sent"),
    (V6E, {"data.sequence_length": 512}, True, "512 tokens are multiplied while as many are sent"),
    (V6E, {"data.sequence_length": 256}, False, "256 tokens per device and part of the sequence"),
    (V6E, {"lora.rank": 4}, True, "8192 tokens are multiplied while as many are sent"),
    (V6E, {"lora.rank": 4, "lora.dropout": 0.1}, False, "lora.dropout=0.1: it is drawn for the"),
    (V6E, {"training.matmul_dtype": "int8"}, True, "8192 tokens are multiplied while as many"),
    (
      V6E,
      {"training.matmul_dtype": "int8", "lora.rank": 2},
      False,
      "training.matmul_dtype=int8 with lora.rank=2: adapters read",
    ),
    (
      V6E,
      {"partitioning.sequence_parallel": False},
      False,
      "partitioning.sequence_parallel is False, so that no sequence is gathered",
    ),
    (("model=llama3_8b", "gpu", {"tensor": 4}), {}, False, "measured for TPUs alone"),
    (("model=llama3_8b", "cpu", {"tensor": 4}), {}, False, "measured for TPUs alone"),
    (V5P, {}, False, ""),
  ],
)
def test_matmuls_are_rings_where_chunks_are_large_enough(case, overrides, ring, why):
  config, found = choices(*case, **{"data.global_batch_size": 256, **overrides})
  assert config.partitioning.collective_matmul is ring
  said = found.get("partitioning.collective_matmul")
  assert said.why.startswith(why) if why else said is None


@pytest.mark.parametrize("recipe", ["mlp", "mlp_tutorial"])
def test_other_models_have_nothing_of_a_decoder(recipe):
  for platform in ("cpu", "gpu", "tpu"):
    config, found = choices(recipe, platform, {"tensor": 2})
    assert (config.training.loss_chunks, config.training.attention_kernel) == (1, "xla")
    assert config.partitioning.sequence_parallel is False
    assert config.partitioning.collective_matmul is False
    assert found == {}


def test_the_page_has_the_rules_of_the_table():
  page = (ROOT / "docs" / "performance.md").read_text()
  rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
  wanted = [[f"`{rule.key}`", rule.default, rule.reason] for rule in chosen.RULES]
  assert [row[:3] for row in rows[: len(wanted)]] == wanted
