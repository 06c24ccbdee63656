"""Derived values: of a model folder, of the platform and the mesh, and of other keys."""

import json
import re
import shutil

import pytest

from configs import base
from configs.schema import finalize, recipes, validate
from partitioning.mesh_sizes import resolve_sizes
from tests.configs.loading import SIZES, finalized, load
from tests.docs.pages import ROOT
from tests.interop import folders

# ------------------------------ a model folder ------------------------------

BYTES = {"data.tokenizer": "bytes"}


def finalized_folder(folder, argument="hf", **overrides):
  config = base.get_config(argument)
  config.update_from_flattened_dict({"model.folder": str(folder), **BYTES, **overrides})
  return finalize.finalize(config, "cpu")


def check(config):
  validate.check(config, resolve_sizes({}, None))


def test_the_folder_determines_the_model():
  folder = folders.FOLDER / "gemma3"
  config = finalized_folder(folder)
  check(config)
  model = config.model
  assert (model.layers, model.heads, model.window, model.global_every) == (3, 4, 5, 3)
  assert (model.local_rotary_base, model.attention_scale) == (1e4, 1 / 3)
  assert model.max_positions == config.data.sequence_length == 32  # the model's most
  assert config.checkpoint.initialize_from == str(folder)
  assert config.optimizer.learning_rate == 1e-5
  assert config.training.rematerialization == "full"
  assert finalized_folder(folder, **{"lora.rank": 2}).optimizer.learning_rate == 2e-4


def test_all_families_pass_the_checks_of_a_decoder():
  for name in folders.NAMES:
    check(finalized_folder(folders.FOLDER / name))


def test_keys_without_effect_on_the_parameters_stay_the_users():
  own = {"model.dropout_rate": 0.1, "model.rotary_base": 77.0, "model.window": 3}
  own |= {"optimizer.learning_rate": 3e-4, "data.sequence_length": 9}
  own |= {"checkpoint.initialize_from": "runs/other"}
  config = finalized_folder(folders.FOLDER / "llama", **own)
  for key, value in own.items():
    section, name = key.split(".")
    assert config[section][name] == value


def test_keys_that_contradict_the_folder_are_refused_together():
  wrong = {"model.layers": 3, "model.heads": 4, "model.tied_embeddings": True}
  with pytest.raises(ValueError, match=r"parameters of other shapes; leave unset:") as caught:
    finalized_folder(folders.FOLDER / "llama", **wrong)
  path = folders.FOLDER / "llama" / "config.json"
  assert str(caught.value).splitlines()[1:] == [
    f"  model.layers=3: it is 2 in {path}",
    f"  model.tied_embeddings=True: it is False in {path}",
  ]


def test_the_tokenizer_is_the_folders(tmp_path):
  folder = shutil.copytree(folders.FOLDER / "llama", tmp_path / "Llama")
  with pytest.raises(ValueError, match=r"has neither a tokenizer.json nor"):
    finalized_folder(folder, **{"data.tokenizer": ""})
  (folder / "tokenizer.json").write_text("{}")
  assert finalized_folder(folder, **{"data.tokenizer": ""}).data.tokenizer == str(folder)


def test_a_window_may_be_longer_than_the_rows(tmp_path):
  folder = shutil.copytree(folders.FOLDER / "mistral", tmp_path / "Mistral")
  theirs = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps({**theirs, "sliding_window": 4096}))
  config = finalized_folder(folder, **{"data.sequence_length": 8})
  check(config)
  assert config.model.window == 4096


def test_no_folder_and_an_unknown_recipe_are_refused_with_the_way():
  with pytest.raises(
    ValueError, match=r"model.folder='': name the folder of the model.*--checkpoint"
  ):
    finalized_folder("")
  with pytest.raises(ValueError, match=r"there are lm, .*, hf; did you mean 'hf'"):
    recipes.base("hff")


# ------------------------------ the best configuration known ------------------------------


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
    # On GPUs up to 4 GiB: 131,072 tokens and half of the columns are 16,032 MiB.
    (("model=llama3_8b", "gpu", {"fsdp": 8, "tensor": 2}), 128, 4, True),
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
  limit = "4,096 MiB" if case[1] == "gpu" else "256 MiB"
  assert limit in found["training.loss_chunks"].why


@pytest.mark.parametrize(
  ("platform", "sizes", "layers", "recomputed", "unroll"),
  [
    ("gpu", {"data": 4, "tensor": 2}, 16, "elementwise", 16),
    ("gpu", {}, 126, "none", 21),
    ("gpu", {}, 16, "full", 1),
    ("gpu", {"fsdp": 2}, 16, "none", 1),
    ("tpu", {}, 16, "none", 1),
    ("cpu", {}, 4, "none", 4),
    ("cpu", {}, 4, "dots", 1),
    ("cpu", {"data": 2}, 4, "none", 1),
  ],
)
def test_layers_are_unrolled_where_a_device_has_them_whole(
  platform, sizes, layers, recomputed, unroll
):
  keys = {"model.layers": layers, "training.rematerialization": recomputed}
  config, _ = choices("lm", platform, sizes, **keys)
  assert config.training.scan_unroll == unroll


@pytest.mark.parametrize(
  ("platform", "sizes"), [("cpu", {"tensor": 8}), ("gpu", {}), ("tpu", {"data": 4, "tensor": 2})]
)
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
    assert size / count <= finalize.CHUNK_BYTES < size
    fewer = [n for n in range(1, count) if own % n == 0]
    assert size / fewer[-1] > finalize.CHUNK_BYTES


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
    (V6E, {"training.matmul_dtype": "int8", "lora.rank": 2}, False, "training.matmul_dtype=int8"),
    (V6E, {"partitioning.sequence_parallel": False}, False, "partitioning.sequence_parallel is"),
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


def test_the_page_says_what_each_rule_does():
  page = (ROOT / "docs" / "performance.md").read_text()
  keys = re.findall(r"^\| `((?:training|partitioning)\.\w+)` \|", page, re.MULTILINE)
  assert keys[: len(finalize.RULES)] == [*finalize.RULES]
  for number in (finalize.UNROLLED["gpu"], finalize.RING_TOKENS, finalize.LONG_ROW):
    assert f" {number}" in page


# ------------------------------ all derived values ------------------------------


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_warmup_follows_the_steps_that_were_asked_for(platform):
  default = finalized("lm", platform)
  assert default.optimizer.warmup_steps == default.training.steps // 20 > 0
  assert finalized("lm", platform, **{"training.steps": 140}).optimizer.warmup_steps == 7
  both = {"training.steps": 140, "optimizer.warmup_steps": 3}
  assert finalized("lm", platform, **both).optimizer.warmup_steps == 3
  assert finalized("mlp_tutorial", platform, **{"training.steps": 140}).optimizer.warmup_steps == 0


def test_the_head_size_follows_width_and_heads():
  assert finalized(**{"model.model_size": 88, "model.heads": 8}).model.head_size == 11
  assert finalized(**{"model.model_size": 176, "model.heads": 4}).model.head_size == 44
  assert finalized(**{"model.model_size": 100, "model.head_size": 6}).model.head_size == 6
  with pytest.raises(ValueError, match=r"model_size=100 is not a multiple of model\.heads=7; ch"):
    finalized(**{"model.model_size": 100, "model.heads": 7})


def test_the_tutorials_network_is_as_wide_as_the_platform_allows():
  for platform, width in (("gpu", 8192), ("tpu", 8192), ("cpu", 512)):
    config = finalized("mlp_tutorial", platform)
    model = (config.model.input_size, config.model.model_size, config.model.feedforward_size)
    assert (*model, config.model.output_size) == (784, width, width, 10)
    assert config.data.global_batch_size == config.data.examples == width
    assert (config.data.input_size, config.data.target_size) == (784, 10)
  narrow = finalized("mlp_tutorial", "gpu", **{"model.model_size": 96})
  assert (narrow.model.feedforward_size, narrow.data.global_batch_size) == (96, 8192)


def test_the_optimizers_table_follows_the_parameters():
  table = {"partitioning.parameters.vocabulary": ("tensor", "fsdp")}
  tables = finalized(**table).partitioning
  assert tables.optimizer.to_dict() == tables.parameters.to_dict()
  assert tables.optimizer.vocabulary == ("tensor", "fsdp")
  zero = finalized(**table, **{"partitioning.optimizer.model": ("data", "fsdp")}).partitioning
  assert (zero.parameters.model, zero.optimizer.model) == (("fsdp",), ("data", "fsdp"))


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_finalize_leaves_its_input_as_it_was(recipe):
  config = load("dp4_tp2", recipe)
  before = config.to_json_best_effort()
  found = finalize.finalize(config, "cpu")
  assert config.to_json_best_effort() == before
  assert config.optimizer.warmup_steps == (0 if recipe == "mlp_tutorial" else None)
  assert found.is_locked
  assert found.model.is_locked
  again = finalize.finalize(found, "cpu")
  assert again.to_json_best_effort() == found.to_json_best_effort()


@pytest.mark.parametrize(
  ("keys", "expected"),
  [
    ({"training.steps": 9000}, 3000),
    ({"training.steps": 20}, 8),  # as the periodic ones, whose checkpoints are compared with it
    ({"training.steps": 20, "evaluation.steps": 15}, 15),
    ({"training.steps": 20, "evaluation.every_steps": 0, "evaluation.steps": 0}, 8),
    ({"training.steps": 20, "evaluation.steps": 0}, 0),  # they take the whole split
    ({"training.steps": 20, "evaluation.final_steps": 0}, 0),
    ({"training.steps": 20, "evaluation.final_steps": 3}, 3),
  ],
)
def test_the_final_evaluation_of_a_short_run_is_limited(keys, expected):
  assert finalized("lm", "cpu", **keys).evaluation.final_steps == expected


def test_the_task_cannot_be_overridden_while_model_and_data_stay():
  for name in ("regression", "causal_lmm"):
    with pytest.raises(
      ValueError, match=f"task='{name}' was overridden while model and data"
    ) as no:
      finalized("lm", task=name)
    assert "those of 'causal_lm'; choose another recipe with --config=FILE:RECIPE" in str(no.value)


def test_the_models_name_cannot_be_overridden_while_its_sizes_stay():
  with pytest.raises(ValueError, match=r"model\.name='mlp' was overridden while the sizes") as no:
    finalized("lm", **{"model.name": "mlp"})
  assert "those of 'transformer'; pick the model with --config=FILE:model=NAME" in str(no.value)


def test_tokens_become_steps():
  tokens = {"training.tokens": 1_000_000, "optimizer.warmup_tokens": 50_000}
  decay = {"optimizer.schedule": "wsd", "optimizer.decay_tokens": 100_000}
  config = finalized("lm", "cpu", **tokens, **decay)  # 32 rows of 128 tokens
  assert config.training.steps == 245  # 244.1
  assert (config.optimizer.warmup_steps, config.optimizer.decay_steps) == (13, 25)
  with pytest.raises(ValueError, match=r"training\.steps=300: set one of the two"):
    finalized("lm", "cpu", **tokens, **{"training.steps": 300})
  with pytest.raises(ValueError, match="classification has no tokens; set steps"):
    finalized("mlp", "cpu", **{"training.tokens": 5})
