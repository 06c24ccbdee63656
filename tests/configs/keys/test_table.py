"""The table of keys: each recipe's config is made of it, and each row is whole."""

import pytest

from commands import config_flag, help, words
from configs import base
from configs.keys import table
from configs.keys.row import MAY_CHANGE, Key, Required, Unset
from configs.schema import recipes, validate
from partitioning.mesh_sizes import AXES, SLOW_AXES
from tests.configs.loading import checked, finalized, refusal
from tests.docs import configuration

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
  keys = [key for key, _ in config_flag.leaves(config)]
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


def test_a_key_is_one_row(monkeypatch):
  """A row is all that a key needs: no other file names it."""
  row = Key(
    *(2, "layers that are computed together"),
    **{"unit": "layers", "least": 1, "resume": MAY_CHANGE, "needs": "model.window"},
  )
  monkeypatch.setitem(table.SECTIONS["training"], "layer_group", row)
  order = Key("in_turn", "how", choices=("in_turn", "at_once"), readers=("decoder",))
  monkeypatch.setitem(table.SECTIONS["training"], "layer_order", order)
  assert finalized("lm").training.layer_group == 2
  for keys, said in (
    ("model.window=8 training.layer_group=0", "training.layer_group=0: at least 1"),
    (
      "training.layer_group=3",
      "is about model.window, which is 0; set that, or leave the key at 2",
    ),
    ("training.layer_order=at_onse", "one of in_turn, at_once; did you mean 'at_once'?"),
  ):
    [line] = refusal(keys, "lm")
    assert said in line
  [line] = refusal("training.layer_order=at_once", "mlp")
  assert "the model mlp does not use it; leave it at 'in_turn'" in line
  checked("model.window=8 training.layer_group=3 training.layer_order=at_once", "lm")
  assert table.resume_class("training.layer_group") == MAY_CHANGE
  shown = help.text(words.Line(verb="help", words=["training.layer_g"]), {})
  assert "--config.training.layer_group=2\n      layers that are computed together" in shown
  assert validate.choices_of(finalized("lm"))["training.layer_order"] == ("in_turn", "at_once")
  meaning = "layers that are computed together"
  row = f"| `training.layer_group` | `2` | {meaning} | may change |\n"
  assert configuration.row("training.layer_group", {"lm": 2}) == row
