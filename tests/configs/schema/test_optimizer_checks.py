"""What a config says of the optimizer where only its name is set, and what is refused."""

import pytest

from configs import base
from configs.keys import table
from configs.schema import finalize, optimizer_checks, recipes, validate
from training.optimizer import imported, optimizer_row, optimizers_with

# ------------------------------ where only the name is set ------------------------------

SIZES = dict.fromkeys(table.section("mesh"), 1)


def finalized(recipe, **overrides):
  config = base.get_config(recipe)
  config.update_from_flattened_dict({f"optimizer.{key}": x for key, x in overrides.items()})
  return finalize.finalize(config, "cpu")


def values(recipe, **overrides):
  keys = finalized(recipe, **overrides).optimizer
  return keys.learning_rate, keys.weight_decay, keys.schedule


@pytest.mark.parametrize("recipe", [*recipes.RECIPES, "llama3_8b"])
def test_a_recipe_s_own_optimizer_has_the_recipe_s_values(recipe):
  keys = recipes.base(recipe).optimizer
  wanted = keys.learning_rate, keys.weight_decay, keys.schedule
  assert values(recipe) == wanted
  assert None not in wanted


def test_of_another_optimizer_they_follow():
  lion = optimizer_row("lion").default
  assert values("mlp", name="lion") == (2e-3 * lion.rate, 0.05 * lion.decay, "cosine")
  assert values("llama3_8b", name="lion")[0] == 3e-4 * lion.rate
  assert values("mlp", name="adafactor")[1:] == (0.0, "cosine")
  assert values("mlp", name="schedule_free_adamw")[2] == "constant"
  for name in ("muon", "adan"):
    assert values("mlp", name=name) == values("mlp")
  assert values("lm", name="adan") == values("lm")


@pytest.mark.parametrize("argument", ["lm", "model=lm", "data=text", "model=lm,data=text"])
def test_the_small_recipe_has_the_learning_rates_that_were_measured(argument):
  for name, rate in {"adafactor": 8e-2, "lion": 4e-3, "muon": 3.2e-2}.items():
    config = base.get_config(argument)
    config.optimizer.name = name
    optimizer_checks.finalize_optimizer(
      config.optimizer, recipes.base(argument).optimizer, config.argument
    )
    assert config.optimizer.learning_rate == rate
  config = base.get_config("model=llama3_8b,data=text")
  config.optimizer.name = "muon"
  optimizer_checks.finalize_optimizer(
    config.optimizer, recipes.base(config.argument).optimizer, config.argument
  )
  assert config.optimizer.learning_rate == 3e-4


def test_a_recipe_of_another_optimizer_than_adamw_says_nothing_about_others():
  assert values("mlp_tutorial", name="lion") == values("mlp_tutorial")


def test_what_is_set_stays():
  given = {"learning_rate": 8e-3, "weight_decay": 0.1, "schedule": "linear"}
  for name in ("lion", "muon"):
    assert values("lm", name=name, **given) == (8e-3, 0.1, "linear")
  assert values("lm", learning_rate=0.0, weight_decay=0.0) == (0.0, 0.0, "cosine")


def test_every_optimizer_of_the_table_is_one():
  from training.optimizers import build

  for name in optimizers_with(lambda row: not row.refused):
    assert callable(imported(build.find(name).build)), name


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_schedule_that_decays_is_refused_where_parameters_are_averaged(schedule):
  config = finalized("lm", name="schedule_free_adamw", schedule=schedule)
  with pytest.raises(ValueError, match=f"schedule={schedule}: schedule_free_adamw averages"):
    validate.check(config, SIZES)


def test_a_group_needs_the_constant_schedule_as_well():
  groups = ({"parameters": "embed/*", "name": "schedule_free_adamw"},)
  with pytest.raises(ValueError, match="cosine, which is that of all groups: schedule_free_adamw"):
    validate.check(finalized("lm", groups=groups), SIZES)
  validate.check(finalized("lm", groups=groups, schedule="constant"), SIZES)


# ------------------------------ parameter groups ------------------------------


@pytest.mark.parametrize(
  ("groups", "said"),
  [
    ({"parameters": "*"}, "a tuple of groups, such as"),
    (({"learning_rate": 0.1},), "group 1: `parameters` is a pattern"),
    (({"parameters": 5, "learning_rate": 0.1},), "group 1: `parameters` is a pattern"),
    (({"parameters": "*"},), "group 1: it has no key of its own"),
    (({"parameters": "*", "learning_rte": 1.0},), "did you mean 'learning_rate'?"),
    (({"parameters": "*", "schedule": "linear"},), "schedule is the same for all groups; set opt"),
    (({"parameters": "*", "learning_rate": "big"},), "learning_rate='big' is no float"),
    (({"parameters": "*", "learning_rate": -1},), "learning_rate=-1: at least 0"),
    (({"parameters": "*", "momentum": 0.9},), "momentum=0.9: adamw does not use it; it"),
    (({"parameters": "*", "name": "sgd", "beta_1": 0.9},), "beta_1=0.9: sgd does not use it"),
  ],
)
def test_groups_of_another_form_are_refused(groups, said):
  config = base.get_config("lm")
  config.optimizer.groups = groups if isinstance(groups, tuple) else (groups, 3)
  config = finalize.finalize(config, "cpu")
  with pytest.raises(ValueError, match="refused") as error:
    validate.check(config, dict(config.mesh))
  assert said in str(error.value)
