"""Model folders: what is missing or damaged is one message with the fix; the Hub by a stand-in."""

import json
import pathlib
import shutil

import huggingface_hub
import numpy as np
import pytest

from interop import hf_config, hf_folder, read_weights
from interop.hf_folder import local, read_config
from interop.read_weights import stored_tensors
from tests.interop import folders

KEY = "model.folder"


@pytest.fixture
def folder(tmp_path):
  """Returns a copy of a folder that transformers wrote."""
  return pathlib.Path(shutil.copytree(folders.FOLDER / "llama", tmp_path / "Llama"))


def sharded(folder):
  """Splits a folder's weights over two files with an index."""
  arrays = folders.tensors_of(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  places = {}
  for number, names in enumerate((sorted(arrays)[::2], sorted(arrays)[1::2]), 1):
    file = f"model-{number:05}-of-00002.safetensors"
    folders.write_tensors(folder / file, {name: arrays[name] for name in names})
    places |= dict.fromkeys(names, file)
  (folder / hf_folder.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
  return arrays


def refusal(function, *arguments):
  with pytest.raises(ValueError, match=r".") as caught:
    function(*arguments)
  return str(caught.value)


def test_one_file_and_several_with_an_index(folder):
  one = stored_tensors(folder, KEY)
  arrays = sharded(folder)
  assert {name: x.shape for name, x in one.items()} == {n: x.shape for n, x in arrays.items()}
  assert {name: x.shape for name, x in stored_tensors(folder, KEY).items()} == {
    name: x.shape for name, x in one.items()
  }


def test_missing_shards_are_named(folder):
  sharded(folder)
  (folder / "model-00002-of-00002.safetensors").unlink()
  assert refusal(stored_tensors, folder, KEY) == (
    f"{KEY}={folder}: 1 of the 2 files that model.safetensors.index.json names are missing: "
    f"model-00002-of-00002.safetensors; download them too"
  )


def test_an_index_that_does_not_fit_its_files_is_refused(folder):
  sharded(folder)
  index = json.loads((folder / hf_folder.INDEX).read_text())
  index["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
  index["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors"
  del index["weight_map"]["lm_head.weight"]
  (folder / hf_folder.INDEX).write_text(json.dumps(index))
  lines = refusal(stored_tensors, folder, KEY).splitlines()
  assert lines[0] == f"{folder / hf_folder.INDEX} does not fit the files beside it:"
  assert (
    "  lm_head.weight is in model-00001-of-00002.safetensors, and the index says nothing"
    in (lines[1][: len(lines[1]) - len(" of it")])
  )
  assert "  model.extra is not in model-00001-of-00002.safetensors" in lines
  for content in ("[]", "{}", '{"weight_map": {"a": "../b"}}'):
    (folder / hf_folder.INDEX).write_text(content)
    assert "has no weight_map of names of files" in refusal(stored_tensors, folder, KEY)
  places = {f"w{number}": f"{number}.safetensors" for number in range(5000)}
  (folder / hf_folder.INDEX).write_text(json.dumps({"weight_map": places}))
  assert "names 5,000 files, and at most 4,096" in refusal(stored_tensors, folder, KEY)


@pytest.mark.parametrize(
  ("files", "said"),
  [
    ((), "it has no weights (model.safetensors), only config.json, config_5.json, logits.npy"),
    (("pytorch_model.bin",), "its weights are pickled (pytorch_model.bin), and reading a pickle"),
    (("adapter_config.json",), "it is an adapter (adapter_config.json), not a model"),
    (("model-00001-of-00002.safetensors",), "neither model.safetensors nor model.safetensors.ind"),
  ],
)
def test_a_folder_without_weights_is_refused(folder, files, said):
  (folder / "model.safetensors").unlink()
  for name in files:
    (folder / name).touch()
  assert said in refusal(stored_tensors, folder, KEY)


def test_a_folder_that_is_not_there_or_not_a_model(folder, tmp_path):
  assert refusal(local, str(tmp_path / "Lama"), KEY).endswith(
    f"there is no folder {tmp_path / 'Lama'}; did you mean 'Llama'?"
  )
  assert "it is a file; name the folder" in refusal(local, str(folder / "config.json"), KEY)
  assert "a local path or hf://OWNER/NAME" in refusal(local, "gs://bucket/Llama", KEY)
  (folder / "config.json").write_text("{")
  assert f"{folder / 'config.json'} cannot be read (Expecting" in refusal(read_config, folder, KEY)
  (folder / "config.json").unlink()
  assert "it has no config.json, only config_5.json" in refusal(read_config, folder, KEY)
  (folder / "adapter_config.json").touch()
  assert "name the folder of its base" in refusal(read_config, folder, KEY)


def test_a_model_folder_is_told_from_the_workdir_of_a_run(folder, tmp_path):
  assert hf_folder.is_model(str(folder))
  assert hf_folder.is_model("hf://owner/name")
  (folder / "model.safetensors").unlink()
  assert hf_folder.is_model(str(folder))  # by its model_type
  (folder / "config.json").write_text('{"model": {"name": "transformer"}}')
  for other in (str(folder), str(tmp_path / "none"), "", "gs://bucket/run"):
    assert not hf_folder.is_model(other)


def test_the_digest_is_of_the_config_and_of_what_the_files_hold(folder):
  found = hf_folder.digest(folder)
  with_weights = read_weights.digest(folder)
  arrays = folders.tensors_of(folder / "model.safetensors")
  arrays["model.norm.weight"] = np.zeros(17, np.float32)
  folders.write_tensors(folder / "model.safetensors", arrays)
  assert hf_folder.digest(folder) == found
  assert read_weights.digest(folder) != with_weights


def test_a_model_of_the_hub_is_downloaded_in_two_parts(folder, monkeypatch):
  asked = []

  def snapshot_download(repository, *, revision, allow_patterns):
    asked.append((repository, revision, "*.safetensors" in allow_patterns))
    return str(folder)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
  hf_folder._downloaded.cache_clear()
  assert local("hf://owner/name", KEY) == folder
  assert local("hf://owner/name@v1", KEY, weights=True) == folder
  assert asked == [("owner/name", None, False), ("owner/name", "v1", True)]
  assert "a model of the Hub is hf://OWNER/NAME" in refusal(local, "hf://name", KEY)


def test_what_the_hub_says_is_passed_on_with_the_way_round(monkeypatch):
  def snapshot_download(*arguments, **keywords):
    raise ConnectionError("no route to host")

  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
  hf_folder._downloaded.cache_clear()
  said = refusal(local, "hf://owner/name", KEY)
  assert "cannot be read from the Hugging Face Hub (ConnectionError: no route to host)" in said
  assert f"`hf download owner/name --local-dir FOLDER`, and set {KEY}=FOLDER" in said


def test_a_run_keeps_the_config_of_the_decoder():
  inner = {**folders.config_of("gemma3")}
  outer = {"model_type": "gemma3", "text_config": inner, "vision_config": {}}
  kept = hf_config.decoder_config(json.dumps(outer).encode())
  assert json.loads(kept) == inner
  assert hf_config.decoder_config(content := json.dumps(inner).encode()) is content
