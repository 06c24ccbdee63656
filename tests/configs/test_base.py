"""The shipped strategies, each with every recipe."""

import itertools

import pytest

from commands import config_flag
from configs.schema import finalize, recipes, validate
from tests.configs.loading import SIZES, load
from tests.helpers.jobs import STRATEGIES

MESHES = {
  "single": {},
  "dp8": {"data": 8},
  "dp4_tp2": {"data": 4, "tensor": 2},
  "tp8": {"tensor": 8},
  "fsdp8": {"fsdp": 8},
  "fsdp": {"fsdp": -1},
  "dp2_fsdp2_tp2": {"data": 2, "fsdp": 2, "tensor": 2},
}


def test_every_shipped_strategy_is_tested():
  shipped = {path.removeprefix("configs/").removesuffix(".py") for path in config_flag.strategies()}
  assert shipped == {*MESHES} == {*STRATEGIES}


# Each recipe on each platform, and each strategy with several of both.
CASES = [
  ([*MESHES][number % len(MESHES)], recipe, platform)
  for number, (recipe, platform) in enumerate(
    itertools.product(recipes.RECIPES, ("cpu", "gpu", "tpu"))
  )
]


@pytest.mark.parametrize(("strategy", "recipe", "platform"), CASES)
def test_every_strategy_goes_with_every_recipe(strategy, recipe, platform):
  config = finalize.finalize(load(strategy, recipe), platform)
  assert config.mesh.to_dict() == {**SIZES, **MESHES[strategy]}
  sizes = {axis: 8 if size == -1 else size for axis, size in config.mesh.items()}
  validate.check(config, sizes)
  unset = [
    f"{section}.{key}"
    for section in ("model", "data", "training", "optimizer", "evaluation")
    for key, value in config[section].items()
    if value is None
  ]
  assert unset == []
  assert config.argument == recipe


def test_the_default_recipe_is_lm():
  assert load("dp8", None).to_dict() == load("dp8", "lm").to_dict()
  assert load("dp8", None).model.name == "transformer"
