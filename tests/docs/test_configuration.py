"""docs/configuration.md is current."""

import re

from tests.docs import configuration


def test_the_page_is_what_the_configs_say():
  stale = "run `python -m tests.docs.configuration --write`"
  assert configuration.PAGE.read_text() == configuration.page(), stale


def test_every_key_has_a_row():
  rows = re.findall(r"^\| `([\w.]+)` \|", configuration.page(), re.MULTILINE)
  wanted = {key for recipe in configuration.RECIPES for key in configuration.defaults(recipe)}
  assert sorted(rows) == sorted(wanted)


def test_a_row_shows_defaults_of_each_recipe_and_the_comment():
  row = configuration.row("training.steps", {"lm": 200, "mlp": 400, "mlp_tutorial": 200})
  assert row.startswith("| `training.steps` | `200`; mlp: `400` |")
  row = configuration.row("training.gradient_accumulation_steps", {"lm": 1})
  assert "| `1` | microbatches per step |" in row
