"""A run's own copy of its tokenizer, and who reads it."""

import json
import re
import shutil

import pytest
from etils import epath
from ml_collections import ConfigDict

from configs import base
from inference.request import TextSpec
from input_pipeline.text import chat_template, tokenizer, train_tokenizer
from input_pipeline.text.conversations import Conversation
from tests.training.checkpointing.states import save_counting
from training import run_tokenizer, splits
from training.checkpointing.checkpointer import Checkpointer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Returns a folder with a small tokenizer."""
  folder = tmp_path_factory.mktemp("trained")
  texts = [f"one two three {number} words and others".encode() for number in range(300)]
  (folder / "tokenizer.json").write_bytes(train_tokenizer.train(texts, 280))
  said = json.dumps({"eos_token": train_tokenizer.END})
  (folder / "tokenizer_config.json").write_text(said)
  return folder


def contents(config):
  return run_tokenizer.contents(config.data, config.model)


def config_of(spec):
  return ConfigDict({"data": {"tokenizer": str(spec)}, "model": {}})


@pytest.fixture
def run(trained, tmp_path):
  """Returns the workdir of a run with two checkpoints."""
  files = contents(config_of(trained))
  with Checkpointer(tmp_path / "run" / "checkpoints", keep=2, tokenizer=files) as checkpointer:
    save_counting(checkpointer, 1, 2)
  return tmp_path / "run"


def test_the_workdir_has_a_copy_that_encodes_alike(trained, tmp_path):
  run_tokenizer.write(contents(config_of(trained)), epath.Path(tmp_path / "run"), lambda: None)
  copy = tokenizer.load(tmp_path / "run" / "tokenizer")
  original = tokenizer.load(trained)
  assert (copy.digest, copy.end) == (original.digest, original.end)
  assert copy.encode(["two words"])[0].tolist() == original.encode(["two words"])[0].tolist()


def test_bytes_need_no_copy(tmp_path):
  run_tokenizer.write(contents(config_of("bytes")), epath.Path(tmp_path), lambda: None)
  assert list(tmp_path.iterdir()) == []
  assert contents(ConfigDict({"data": {}, "model": {}})) == {}


@pytest.mark.parametrize("given", ["", "as trained", "gone", "characters"])
def test_a_checkpoint_s_own_tokenizer_is_read(given, trained, run):
  spec = {"as trained": trained, "gone": run / "nowhere"}.get(given, given)
  for location, step in ((run, 2), (run / "checkpoints" / "1", 1)):
    config = config_of(spec)
    run_tokenizer.adopt(config, str(location))
    assert config.data.tokenizer == str((run / "checkpoints" / str(step) / "tokenizer").resolve())


def test_another_tokenizer_than_the_checkpoint_s_is_refused(run):
  with pytest.raises(ValueError, match=r"data\.tokenizer=bytes is another tokenizer than the one"):
    run_tokenizer.adopt(config_of("bytes"), str(run))


def test_a_run_that_resumes_reads_its_own_only_where_the_given_one_is_gone(trained, run):
  moved = run.parent / "moved"
  shutil.copytree(trained, moved)
  config = config_of(moved)
  run_tokenizer.adopt_missing(config.data, config.model, epath.Path(run))
  assert config.data.tokenizer == str(moved)
  shutil.rmtree(moved)
  run_tokenizer.adopt_missing(config.data, config.model, epath.Path(run))
  assert config.data.tokenizer.endswith("checkpoints/2/tokenizer")
  for spec in ("", "bytes"):
    config = config_of(spec)
    run_tokenizer.adopt_missing(config.data, config.model, epath.Path(run))
    assert config.data.tokenizer == spec


def test_where_there_is_no_checkpoint_nothing_is_changed(tmp_path):
  config = config_of("bytes")
  run_tokenizer.adopt(config, str(tmp_path / "nowhere"))
  assert config.data.tokenizer == "bytes"


@pytest.mark.parametrize(("spec", "suffix"), [("bytes", "jinja"), ("trained", "json")])
def test_the_chat_template_of_a_file_is_copied_too(trained, tmp_path, spec, suffix):
  file = tmp_path / f"t.{suffix}"
  file.write_text("T" if suffix == "jinja" else json.dumps({"chat_template": "T"}))
  spec = str(trained) if spec == "trained" else spec

  def config():
    keys = {"tokenizer": spec, "chat_template": str(file), "name": "conversations"}
    return ConfigDict({"data": keys, "model": {}})

  copies = contents(config())
  with Checkpointer(tmp_path / "run" / "checkpoints", tokenizer=copies) as checkpointer:
    save_counting(checkpointer, 1)
  here = config()
  run_tokenizer.adopt_missing(here.data, here.model, epath.Path(tmp_path / "run"))
  assert here.data.chat_template == str(file)
  file.unlink()

  def adopt_missing(config, run):
    run_tokenizer.adopt_missing(config.data, config.model, run)

  for adopt in (run_tokenizer.adopt, adopt_missing):
    copied = config()
    adopt(copied, epath.Path(tmp_path / "run"))
    assert copied.data.chat_template.endswith(f"checkpoints/1/tokenizer/chat_template.{suffix}")
    encoder = tokenizer.load(copied.data.tokenizer)
    assert encoder.digest == tokenizer.load(spec).digest
    assert chat_template.load(copied.data.chat_template, encoder).render(Conversation([])) == "T"


def test_a_missing_tokenizer_is_trained_before_the_run(monkeypatch, tmp_path):
  asked = []
  monkeypatch.setattr(
    train_tokenizer, "trained_once", lambda data, size, tick: asked.append(size) or "a folder"
  )
  config = base.get_config("lm_bpe", mesh={})
  splits.train_missing_tokenizer(config)
  splits.train_missing_tokenizer(config)  # now there is one
  assert config.data.tokenizer == "a folder"
  splits.train_missing_tokenizer(base.get_config("lm", mesh={}))
  splits.train_missing_tokenizer(base.get_config("mlp", mesh={}))
  assert asked == [4096] == [config.model.vocabulary_size]


@pytest.mark.parametrize("recipe", ["model=lm_bpe,data=text", "mlp"])
def test_only_text_of_tfds_data_sets_is_trained_on_before_a_run(recipe):
  config = base.get_config(recipe, mesh={})
  config.data.train_tokenizer = 300
  with pytest.raises(
    ValueError, match=r"data\.train_tokenizer=300 is for TFDS data sets with text"
  ):
    splits.train_missing_tokenizer(config)


def test_a_run_finds_the_characters_of_its_text_and_says_what_else_evaluation_has(tmp_path, capsys):
  (tmp_path / "a.txt").write_text("abcab" * 18 + "caé€bacabd")
  config = base.get_config("model=lm,data=text", mesh={})
  config.data.update(files=f"{tmp_path}/a.txt", data_dir=f"{tmp_path}/data")
  config.data.update(tokenizer="characters", evaluation_fraction=0.1)
  splits.train_missing_tokenizer(config)
  coder = tokenizer.load(config.data.tokenizer)
  assert coder.characters == {*"abc"}
  said = capsys.readouterr().out
  assert (
    "tokenizer: the 3 characters of the text trained on; the evaluation split has 3 char" in said
  )
  assert "('d' 'é' '€')" in said
  spec = TextSpec("transformer", coder, True, 16, coder.size, "")
  assert spec.unseen(["ab", "", b"c", (1, 2)]) == ""
  assert re.match(r"the prompt has 1 character .* \('é'\): it is encoded", spec.unseen(["aé"]))


def test_conversations_have_no_tokenizer_of_characters():
  config = base.get_config("model=lm,data=conversations", mesh={})
  config.data.tokenizer = "characters"
  with pytest.raises(ValueError, match=r"characters is for text, and data\.name='conversations'"):
    splits.train_missing_tokenizer(config)
