"""Sizes that follow from the width and the depth of a model."""

import pytest

from configs import base
from configs.schema import finalize, model_sizes, recipes
from tests.configs.loading import checked, finalized, refusal, settings

KEYS = ("layers", "model_size", "feedforward_size", "heads", "kv_heads")


@pytest.mark.parametrize(
  ("argument", "text", "expected"),
  [
    ("lm", "", (3, 128, 384, 8, 4)),
    ("lm", "model.model_size=512", (3, 512, 1536, 8, 4)),  # 8 heads of 64
    ("lm", "model.model_size=1024", (3, 1024, 3072, 16, 8)),
    ("lm", "model.model_size=64", (3, 64, 192, 8, 4)),
    ("lm", "model.model_size=100", (3, 100, 300, 5, 5)),  # a head has an even number of dims
    ("lm", "model.heads=2", (3, 128, 384, 2, 1)),
    ("lm", "model.heads=7 model.head_size=16", (3, 128, 384, 7, 7)),  # nearer to 3.5 than 1
    ("lm", "model.head_size=32", (3, 128, 384, 4, 2)),
    ("lm", "model.model_size=512 model.feedforward_size=384", (3, 512, 384, 8, 4)),
    ("lm", "model.depth=12", (12, 768, 2304, 12, 6)),
    ("lm", "model.depth=12 model.layers=3 model.heads=8", (3, 768, 2304, 8, 4)),
    ("vit", "model.depth=12", (12, 768, 3072, 12, None)),  # ViT-B
    ("llama3_8b", "", (32, 4096, 14_336, 32, 8)),
    ("llama3_8b", "model.model_size=2048", (32, 2048, 7168, 16, 4)),
    ("qwen3_0_6b", "model.model_size=1400", (28, 1400, 4200, 22, 11)),  # of 21.875 heads of 128
    ("qwen2_5_0_5b", "model.model_size=640", (24, 640, 3480, 10, 2)),
  ],
)
def test_sizes_follow_unless_they_are_set(argument, text, expected):
  model = checked(text, argument).model
  assert tuple(model.get(key) for key in KEYS) == expected


def test_the_published_sizes_of_gpt_2_and_vit_b_follow_from_their_depth():
  """12 layers: 768 dims and 12 heads. Radford et al. 2019, table 2; arXiv:2010.11929, table 1."""
  for argument in ("lm", "vit"):
    model = finalized(argument, **{"model.depth": 12}).model
    assert (model.model_size, model.heads, model.model_size // model.heads) == (768, 12, 64)
  assert finalized("vit", **{"model.depth": 12}).model.feedforward_size == 3072


@pytest.mark.parametrize(
  ("text", "rate"),
  [
    ("model.model_size=512", 8e-3 / 4),
    ("model.model_size=64", 8e-3),  # a narrower model keeps it
    ("model.model_size=512 model.base_width=128", 8e-3),  # muP scales it by itself
    ("model.model_size=512 optimizer.learning_rate=5e-3", 5e-3),
    ("model.model_size=512 optimizer.name=muon", 3.2e-2 / 2),
    ("model.model_size=512 optimizer.name=lion", 4e-3 / 4),
    ("model.model_size=512 optimizer.name=sgd", finalized(**{"optimizer.name": "sgd"})),
  ],
)
def test_the_learning_rate_falls_with_the_width(text, rate):
  expected = rate if isinstance(rate, float) else rate.optimizer.learning_rate
  assert checked(text).optimizer.learning_rate == pytest.approx(expected)


def test_recipes_keep_their_values():
  """To the bit: losses do not change."""
  for name in [*recipes.RECIPES, *[*recipes.PRESETS][::8]]:
    recipe, final = recipes.base(name), finalize.finalize(base.get_config(name), "cpu")
    for key in KEYS:
      assert key not in recipe.model or recipe.model[key] in (None, final.model[key]), (name, key)
    assert final.optimizer.learning_rate == recipe.optimizer.learning_rate, name


def test_what_follows_is_said_with_its_reason():
  config = base.get_config()
  config.update_from_flattened_dict(settings("model.depth=6"))
  _, choices = finalize.with_choices(config, "cpu")
  said = {one.key: (one.value, one.why) for one in choices if not one.of_devices}
  assert said == {
    "model.layers": (6, "model.depth"),
    "model.model_size": (384, "64 for each layer of model.depth"),
    "model.feedforward_size": (1152, "3 x model_size"),
    "optimizer.learning_rate": (
      8e-3 * 128 / 384,
      "0.333 of that at model_size=128, by muP's rule",
    ),
  }
  assert not [
    one for one in finalize.with_choices(base.get_config(), "cpu")[1] if not one.of_devices
  ]


def test_odd_values_are_refused_and_not_failed_over():
  assert "  model.depth=-2: at least 0" in refusal("model.depth=-2")
  assert "  model.model_size=-3: at least 1" in refusal("model.model_size=-3")
  assert any("model.heads=0" in line for line in refusal("model.heads=0"))
  config = base.get_config("hf")
  config.model.depth = 3
  with pytest.raises(ValueError, match=r"model.depth=3: a model folder has its own sizes"):
    model_sizes.finalize_sizes(config.model, recipes.base("hf").model)
