"""The table of keys: each recipe's config is made of it, and each row is whole."""

import pytest

from configs import base
from configs.keys import table
from configs.keys.row import Required, Unset
from configs.schema import origins, recipes
from partitioning.mesh_sizes import AXES, SLOW_AXES

RECIPES = (*recipes.RECIPES, recipes.HF)
ROWS = {
  **{f"{part}.{key}": row for part, rows in table.SECTIONS.items() for key, row in rows.items()},
  **{f"model.{key}": row for rows in table.MODELS.values() for key, row in rows.items()},
}
# Numbers that count or measure nothing.
PLAIN = {".seed"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_of_a_config_has_a_row(recipe):
  config = base.get_config(recipe)
  keys = [key for key, _ in origins.leaves(config)]
  tables = ("partitioning.parameters.", "partitioning.activations.", "partitioning.optimizer.")
  known = [key for key in keys if not key.startswith(tables)]
  assert [key for key in known if table.find(key, recipe, config.model.name) is None] == []


def test_a_row_s_default_is_within_its_own_range_and_words():
  for key, row in ROWS.items():
    if not isinstance(row.default, Required | Unset):
      refused = list(row.range_errors(row.default))
      assert not refused or key == "training.steps", key  # a person says how many
      assert not row.choices or row.default in row.choices, key


def test_every_whole_number_has_a_unit():
  def kind(row):
    derived = isinstance(row.default, Required | Unset)
    return row.default.kind if derived else type(row.default)

  assert {key for key, row in ROWS.items() if kind(row) is int and not row.unit} == PLAIN
  assert {key for key, row in ROWS.items() if kind(row) not in (int, float) and row.unit} == set()


def test_the_mesh_has_the_axes_that_there_are():
  assert tuple(table.SECTIONS["mesh"]) == AXES
  assert tuple(table.SECTIONS["mesh_dcn"]) == SLOW_AXES


def test_a_recipe_s_own_row_comes_first():
  assert table.find("data.sequence_length", "hf").meaning == "2048, or the model's most"
  assert table.find("model.input_size", "mlp", "mlp").unit == "values"
  assert table.find("model.nothing") is None


@pytest.mark.parametrize(
  ("key", "wanted"),
  [
    ("training.steps", "may change"),
    ("optimizer.learning_rate", "needs acceptance"),
    ("optimizer.name", "refused"),
    ("model.layers", "refused"),
    ("model.of_a_user", "refused"),
    ("model.folder", "may change"),
    ("optimizer.of_a_user", "needs acceptance"),
    ("data.files", "may change"),
    ("data.of_a_user", "refused"),
    ("partitioning.parameters.model", "may change"),
  ],
)
def test_what_a_change_means_on_resume(key, wanted):
  assert table.resume_class(key) == wanted
