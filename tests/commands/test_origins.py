"""The origin of a value, for each kind of it."""

import pytest

from commands import config as verb
from commands import config_flag
from configs import base
from configs.schema import finalize
from partitioning.mesh_sizes import resolve_sizes


def found(argument, overrides=None, *, mesh=None, platform="cpu"):
  config = base.get_config(argument, mesh=mesh)
  for key, value in (overrides or {}).items():
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = value
  sizes = resolve_sizes(config.mesh.to_dict(), None)
  final, choices = finalize.with_choices(config, platform, sizes)
  elsewhere = [finalize.finalize(config, one, sizes) for one in {*verb.PLATFORMS} - {platform}]
  given = {"file": "f.py", "overridden": overrides or {}, "elsewhere": elsewhere}
  origin = verb.origins(config, final, choices, platform=platform, **given)
  assert {*origin} == {key for key, _ in config_flag.leaves(final)}
  assert {kind for kind, _ in origin.values()} <= {*verb.KINDS}
  return origin


def test_a_preset():
  keys = found("llama3_8b")
  assert keys["model.layers"] == keys["data.sequence_length"] == ("preset", "llama3_8b")
  assert keys["model.dropout_rate"] == keys["data.shuffle"] == ("default", "")
  assert keys["training.steps"] == ("recipe", "lm")
  assert keys["optimizer.learning_rate"] == ("derived", "")


def test_a_recipe_with_other_data():
  keys = found("model=lm,data=text")
  assert keys["data.name"] == keys["argument"] == ("recipe", "model=lm,data=text")
  assert keys["model.layers"] == ("recipe", "lm")


def test_an_override_counts_as_one_even_if_it_is_the_default():
  keys = found("mlp", {"training.steps": 400, "seed": 3}, mesh={"data": 4})
  assert keys["training.steps"] == keys["seed"] == ("override", "")
  assert keys["mesh.data"] == ("file", "f.py")
  assert keys["data.global_batch_size"] == ("recipe", "mlp")
  assert keys["data.prefetch_batches"] == ("default", "")


@pytest.mark.parametrize(("platform", "width"), [("cpu", 512), ("tpu", 8192)])
def test_what_the_platform_decides(platform, width):
  keys = found("mlp_tutorial", platform=platform)
  assert keys["model.model_size"] == keys["training.compute_dtype"] == ("platform", platform)
  assert keys["data.input_size"] == ("derived", "")
  final = finalize.finalize(base.get_config("mlp_tutorial"), platform)
  assert final.model.model_size == width


def test_an_override_that_is_replaced_is_derived():
  keys = found("lm", {"data.skip_batches": (1,)})
  assert keys["data.skip_batches"] == keys["data.skip_rows"] == ("derived", "")
