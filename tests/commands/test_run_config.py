"""commands/run_config.py: the config of a run, as it was parsed."""

import json

import pytest

from commands import config_flag, run_config
from configs import base
from configs.schema import finalize
from runtime import forms
from training import workdir_files

OURS = ["configs/fsdp.py", "configs/experiments/experts.py", "configs/experiments/vit.py"]
RECIPES = ("lm", "mlp", "vit")


def write(folder, config, config_files=None):
  content = {"config_files": config_files or {}, "config": forms.plain(config)}
  (folder / workdir_files.GIVEN).write_text(json.dumps(content))
  return str(folder)


def leaves(config):
  return {key: (value, type(value)) for key, value in config_flag.leaves(config)}


@pytest.mark.parametrize("name", [*RECIPES, *OURS])
def test_a_parsed_config_is_what_was_given(tmp_path, name):
  config = config_flag.load("config", name) if name in OURS else base.get_config(name)
  config.training.steps, config.seed = 7, 11
  config.compiler_options = "xla_a=1"
  config.partitioning.overrides = (("embed/table", (None, ("data", "fsdp"))),)
  files = {name: None} if name in OURS else {}
  assert leaves(run_config.get_config(write(tmp_path, config, files))) == leaves(config)


def test_a_value_that_was_derived_is_unset_again(tmp_path):
  found = run_config.get_config(write(tmp_path, base.get_config("lm")))
  assert found.optimizer.warmup_steps is None
  found.optimizer.warmup_steps = 5
  with pytest.raises((AttributeError, KeyError)):
    found.training.stepz = 3


def test_a_users_file_may_have_keys_of_its_own(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text(
    "from configs import base\ndef get_config(argument):\n  base.changed_by_mine = argument\n"
  )
  config = base.get_config("mlp")
  with config.unlocked():
    config.data.mine = (1, 2)
  assert run_config.get_config(write(tmp_path, config, {str(file): "wide"})).data.mine == (1, 2)
  assert base.changed_by_mine == "wide"
  del base.changed_by_mine
  file.write_text(file.read_text().replace("argument\n", "1 / 0\n"))
  with pytest.raises(ValueError, match=r"mine.py, which fails: .*mine.py:3: .*; give the config"):
    run_config.get_config(write(tmp_path, config, {str(file): "wide"}))
  with pytest.raises(ValueError, match=r"given.json: unknown config keys data.mine; give the con"):
    run_config.get_config(write(tmp_path, config))
  file.unlink()
  with pytest.raises(ValueError, match=r"was begun with .*mine.py, which is not there; give the"):
    run_config.get_config(write(tmp_path, config, {str(file): "wide"}))


def test_a_copy_of_the_checkpoints_has_the_finalized_config(tmp_path):
  wanted = finalize.finalize(base.get_config("lm", mesh={"data": 2}), "cpu")
  content = json.dumps(forms.plain(wanted))
  newest = tmp_path / "checkpoints" / "10" / "config"
  newest.mkdir(parents=True)
  (tmp_path / "checkpoints" / "9").mkdir()
  (newest / "metadata").write_text(content)
  assert leaves(run_config.get_config(str(tmp_path))) == leaves(wanted)
  (newest / "metadata").unlink()
  (tmp_path / workdir_files.CONFIG).write_text(content)
  assert leaves(run_config.get_config(str(tmp_path))) == leaves(wanted)


@pytest.mark.parametrize(
  ("content", "said"),
  [
    ("{", "cannot be read"),
    ("[]", "cannot be read"),
    ('{"config_files": {}, "config": {}}', "given.json has no key 'argument', the recipe"),
    (
      '{"config_files": {}, "config": {"argument": "lm", "training": {"steps": "x"}}}',
      "training.steps='x' does not fit",
    ),
    ('{"config_files": {}, "config": {"argument": "ml"}}', "did you mean 'mlp'?"),
    (None, "it has neither given.json nor config.json nor a checkpoint"),
  ],
)
def test_a_damaged_config_is_refused_with_the_fix(tmp_path, content, said):
  (tmp_path / "checkpoints").mkdir()
  if content is not None:
    (tmp_path / workdir_files.GIVEN).write_text(content)
  with pytest.raises(ValueError, match=r".") as refused:
    run_config.get_config(str(tmp_path))
  assert said in str(refused.value)
