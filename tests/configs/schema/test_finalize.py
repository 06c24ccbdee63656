"""Values that are derived from other keys, after all overrides."""

import pytest

from configs.schema import finalize, recipes
from tests.configs.loading import finalized, load


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


def test_the_compute_dtype_follows_the_platform_and_the_parameters():
  assert finalized("lm", "cpu").training.compute_dtype == "float32"
  assert finalized("lm", "gpu").training.compute_dtype == "bfloat16"
  assert finalized("lm", "tpu").training.compute_dtype == "bfloat16"
  wide = {"training.parameter_dtype": "float64"}
  assert finalized("lm", "cpu", **wide).training.compute_dtype == "float64"
  chosen = {"training.compute_dtype": "float32"}
  assert finalized("lm", "gpu", **chosen).training.compute_dtype == "float32"


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
