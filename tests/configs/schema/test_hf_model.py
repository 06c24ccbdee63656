"""`model=hf`: what a folder's config.json determines, and what stays the user's."""

import json
import shutil

import pytest

from configs import base
from configs.schema import finalize, recipes, validate
from partitioning.mesh_sizes import resolve_sizes
from tests.interop import folders

BYTES = {"data.tokenizer": "bytes"}


def finalized(folder, argument="hf", **overrides):
  config = base.get_config(argument)
  config.update_from_flattened_dict({"model.folder": str(folder), **BYTES, **overrides})
  return finalize.finalize(config, "cpu")


def check(config):
  validate.check(config, resolve_sizes({}, None))


def test_the_folder_determines_the_model():
  folder = folders.FOLDER / "gemma3"
  config = finalized(folder)
  check(config)
  model = config.model
  assert (model.layers, model.heads, model.window, model.global_every) == (3, 4, 5, 3)
  assert (model.local_rotary_base, model.attention_scale) == (1e4, 1 / 3)
  assert model.max_positions == config.data.sequence_length == 32  # the model's most
  assert config.checkpoint.initialize_from == str(folder)
  assert config.optimizer.learning_rate == 1e-5
  assert config.training.rematerialization == "full"
  assert finalized(folder, **{"lora.rank": 2}).optimizer.learning_rate == 2e-4


def test_all_families_pass_the_checks_of_a_decoder():
  for name in folders.NAMES:
    check(finalized(folders.FOLDER / name))


def test_keys_without_effect_on_the_parameters_stay_the_users():
  own = {"model.dropout_rate": 0.1, "model.rotary_base": 77.0, "model.window": 3}
  own |= {"optimizer.learning_rate": 3e-4, "data.sequence_length": 9}
  own |= {"checkpoint.initialize_from": "runs/other"}
  config = finalized(folders.FOLDER / "llama", **own)
  for key, value in own.items():
    section, name = key.split(".")
    assert config[section][name] == value


def test_keys_that_contradict_the_folder_are_refused_together():
  wrong = {"model.layers": 3, "model.heads": 4, "model.tied_embeddings": True}
  with pytest.raises(ValueError, match=r"parameters of other shapes; leave unset:") as caught:
    finalized(folders.FOLDER / "llama", **wrong)
  path = folders.FOLDER / "llama" / "config.json"
  assert str(caught.value).splitlines()[1:] == [
    f"  model.layers=3: it is 2 in {path}",
    f"  model.tied_embeddings=True: it is False in {path}",
  ]


def test_the_tokenizer_is_the_folders(tmp_path):
  folder = shutil.copytree(folders.FOLDER / "llama", tmp_path / "Llama")
  with pytest.raises(ValueError, match=r"has neither a tokenizer.json nor"):
    finalized(folder, **{"data.tokenizer": ""})
  (folder / "tokenizer.json").write_text("{}")
  assert finalized(folder, **{"data.tokenizer": ""}).data.tokenizer == str(folder)


def test_a_window_may_be_longer_than_the_rows(tmp_path):
  folder = shutil.copytree(folders.FOLDER / "mistral", tmp_path / "Mistral")
  theirs = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps({**theirs, "sliding_window": 4096}))
  config = finalized(folder, **{"data.sequence_length": 8})
  check(config)
  assert config.model.window == 4096


def test_no_folder_and_an_unknown_recipe_are_refused_with_the_way():
  with pytest.raises(
    ValueError, match=r"model.folder='': name the folder of the model.*--checkpoint"
  ):
    finalized("")
  with pytest.raises(ValueError, match=r"there are lm, .*, hf; did you mean 'hf'"):
    recipes.base("hff")


def test_data_is_chosen_beside_it():
  config = base.get_config("model=hf,data=conversations")
  assert (config.model.name, config.data.name) == ("transformer", "conversations")
