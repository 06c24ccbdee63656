"""Every key that counts something has a unit."""

from commands import config_flag
from configs import base
from configs.schema import units


def test_every_count_has_a_unit_and_every_pattern_a_key():
  kinds = {}
  for recipe in ("lm", "mlp", "mlp_tutorial", "vit", "hf"):
    config = base.get_config(recipe)
    kinds |= {key: part.get_type(name) for key, part, name in config_flag.keys(config)}
  counts = {key for key, kind in kinds.items() if kind is int} - {*units.PLAIN}
  assert {key for key in counts if not units.of(key, int)} == set()
  used = {unit for key, kind in kinds.items() if (unit := units.of(key, kind))}
  assert used == {*units.UNITS.values()}


def test_the_first_pattern_decides_and_texts_have_none():
  assert units.of("evaluation.steps", int) == "batches"
  assert units.of("evaluation.every_steps", int) == "steps"
  assert units.of("checkpoint.keep", int) == "checkpoints"
  assert units.of("optimizer.learning_rate", float) == ""
  assert units.of("model.layer_types", tuple) == ""


def test_a_unit_stands_before_a_meaning_that_does_not_name_it():
  assert units.before("width", "model.model_size", int) == "[dims] width"
  assert units.before("optimizer steps", "training.steps", int) == "optimizer steps"
  assert units.before("of parameters", "seed", int) == "of parameters"
