"""What `model.base_width` implies, and what it is refused with."""

import pytest

from configs import base
from configs.schema import finalize, validate
from partitioning.mesh_sizes import resolve_sizes

SIZES = resolve_sizes({}, None)


def finalized(recipe="lm", **overrides):
  config = base.get_config(recipe)
  config.update_from_flattened_dict(overrides)
  return finalize.finalize(config, "cpu")


@pytest.mark.parametrize(
  ("recipe", "overrides", "said"),
  [
    ("lm", {"model.base_width": -1}, "model.base_width=-1: at least 1, or 0 to turn muP off"),
    ("mlp", {"model.base_width": -1}, "model.base_width=-1: at least 1, or 0 to turn muP off"),
    (
      "lm",
      {"model.base_head_size": 8},
      "model.base_head_size=8 is about muP, which is off; set model.base_width, or leave it out",
    ),
    (
      "lm",
      {"model.base_width": 64, "model.base_head_size": 0},
      "model.base_head_size=0: at least 1",
    ),
    (
      "lm",
      {"model.base_width": 64, "lora.rank": 4},
      "model.base_width=64 with lora.rank=4: muP has no rule for adapters, whose rank is no width",
    ),
    (
      "lm",
      {"model.base_width": 64, "checkpoint.initialize_from": "hf://some/model"},
      "model.base_width=64: the parameters of hf://some/model are a trained model's, and muP would",
    ),
  ],
)
def test_what_mup_does_not_go_with_is_refused(recipe, overrides, said):
  with pytest.raises(ValueError, match="the config is refused") as error:
    validate.check(finalized(recipe, **overrides), SIZES)
  assert said in str(error.value)


def test_the_folder_of_a_model_is_refused():
  config = finalized(**{"model.base_width": 64})
  with config.unlocked():
    config.model.folder = "Qwen3-0.6B"
  with pytest.raises(ValueError, match=r"the parameters of Qwen3-0\.6B are a trained model's"):
    validate.check(config, SIZES)


@pytest.mark.parametrize("width", [0, 32, 128])
def test_the_base_model_has_the_same_heads_and_the_scale_is_as_without(width):
  config = finalized(**{"model.base_width": width})
  validate.check(config, SIZES)
  assert (config.model.head_size, config.model.base_head_size) == (16, 16)
  assert config.model.attention_scale == 16**-0.5


def test_scores_of_larger_heads_fall_as_their_size():
  config = finalized(**{"model.base_width": 64, "model.base_head_size": 4})
  validate.check(config, SIZES)
  assert config.model.attention_scale == 4**0.5 / 16
  given = finalized(**{"model.base_width": 64, "model.attention_scale": 0.3})
  assert given.model.attention_scale == 0.3
