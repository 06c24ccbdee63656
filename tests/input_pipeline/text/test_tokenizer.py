"""input_pipeline/text/tokenizer.py: bytes, and which files make a tokenizer."""

import json
import sys

import numpy as np
import pytest

from input_pipeline.text import tokenizer
from tests.input_pipeline.text.conftest import MISTRAL, save


def test_bytes_are_their_own_ids():
  one = tokenizer.load("bytes")
  assert (one.name, one.size, one.end, one.start, one.has_bos) == ("bytes", 256, 0, 0, False)
  [text, raw, empty] = one.encode(["aé\0", b"\xff\xfe", ""])
  assert text.dtype == np.uint32
  assert text.tolist() == [97, 195, 169, 0]
  assert (raw.tolist(), empty.tolist()) == ([255, 254], [])
  assert one.decode(text) == "aé\0".encode()
  assert one.decode([]) == b""
  assert (one.token_bytes(195), one.token_bytes(256)) == (b"\xc3", b"")
  ids, offsets = one.encode_template("aé日")
  assert bytes(ids.tolist()).decode() == "aé日"
  assert offsets.tolist() == [[0, 1], [1, 2], [1, 2], [2, 3], [2, 3], [2, 3]]
  assert one.files == one.special == {}


def test_half_a_surrogate_pair_is_named(bpe):
  for each in (tokenizer.load("bytes"), bpe):
    with pytest.raises(ValueError, match=r"character 2 .* half a surrogate pair \(U\+D83D\)"):
      each.encode(["ab\ud83d"])


def copy(of, folder):
  for name, path in of.files.items():
    (folder / name).write_bytes(path.read_bytes())


def test_a_folder_and_the_files_copied_from_it_give_the_same_tokenizer(trained, bpe, tmp_path):
  by_file = tokenizer.load(trained / "tokenizer.json")
  assert {*bpe.files} == {"tokenizer.json", "tokenizer_config.json"}
  copy(bpe, tmp_path)
  copied = tokenizer.load(tmp_path)
  assert copied.digest == by_file.digest == bpe.digest
  assert copied.name != bpe.name
  ids = [each.encode(["def f(x):\n  return x"])[0].tolist() for each in (copied, by_file, bpe)]
  assert ids[0] == ids[1] == ids[2]


def test_what_decides_ids_decides_the_digest(trained, bpe, tmp_path):
  content = (trained / "tokenizer.json").read_bytes()
  config = {"eos_token": "<|endoftext|>", "chat_template": "{{ 1 }}", "model_max_length": 8}
  assert tokenizer.load(save(tmp_path / "a", content, config)).digest == bpe.digest
  other_end = tokenizer.load(save(tmp_path / "b", content, {"eos_token": "!"}))
  assert other_end.digest != bpe.digest
  changed = json.loads(content)
  changed["model"]["merges"].pop()
  config = {"eos_token": "<|endoftext|>"}
  assert tokenizer.load(save(tmp_path / "c", changed, config)).digest != bpe.digest


def test_a_sentencepiece_model_is_found_in_its_folder(tmp_path):
  model = MISTRAL / "mistral_instruct_tokenizer_240323.model.v3"
  (tmp_path / "mistral.model.v3").write_bytes(model.read_bytes())
  by_folder, by_file = tokenizer.load(tmp_path), tokenizer.load(tmp_path / "mistral.model.v3")
  assert by_folder.digest == by_file.digest
  (tmp_path / "run").mkdir()
  copy(by_file, tmp_path / "run")
  assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer.model"]
  assert tokenizer.load(tmp_path / "run").digest == by_file.digest


def write(folder, files):
  for name, content in files.items():
    (folder / name).write_bytes(content)
  return folder


@pytest.mark.parametrize(
  ("files", "said"),
  [
    ({}, r"has neither a tokenizer\.json nor .* only nothing"),
    ({"vocab.txt": b""}, r"only vocab\.txt"),
    ({"tekken.json": b"{}"}, r"tekken\.json is not read, use the tokenizer\.json of the same"),
    ({"a.model": b"", "b.model": b""}, r"several SentencePiece models \(a\.model, b\.model\);"),
    ({"tokenizer.json": b"{"}, r"tokenizer\.json is not valid JSON \(Expecting"),
    ({"tokenizer.json": b"\xff"}, r"tokenizer\.json is not valid JSON \(.*utf-8"),
    ({"tokenizer.json": b"[]"}, r"tokenizer\.json: an object is expected, and \[\] is there"),
    ({"tokenizer.json": b'{"a": 1}'}, r"has no model with a vocabulary$"),
    ({"tokenizer.json": b'{"vocab": [], "config": {}}'}, r"looks like tekken\.json"),
    ({"tokenizer.json": b'{"model": {"vocab": {"a": 0}}}'}, r"library tokenizers [\d.]+ cannot re"),
    ({"tokenizer.model": b"no model"}, r"tokenizer\.model is not a SentencePiece model"),
    ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, r"but ranks of tiktoken; use the tokenizer\.json"),
    ({"tokenizer.model": b""}, r"tokenizer\.model is not a SentencePiece model \(it has no pieces"),
  ],
)
def test_what_is_no_tokenizer_is_refused_with_its_path(files, said, tmp_path):
  with pytest.raises(ValueError, match=said) as error:
    tokenizer.load(write(tmp_path, files))
  assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("kind", ["json", "model"])
@pytest.mark.parametrize(
  ("name", "content", "differs"),
  [
    ("added_tokens.json", {"{end}": "{id}"}, False),
    ("added_tokens.json", {"<new>": 40000}, True),
    ("tokenizer_config.json", {"added_tokens_decoder": {"{id}": {"content": "{end}"}}}, False),
    ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "{end}"}}}, True),
    ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "<new>"}}}, True),
    ("tokenizer_config.json", {"added_tokens_decoder": [5]}, True),
  ],
)
def test_tokens_that_only_files_beside_it_have_are_refused(
  kind, name, content, differs, trained, tmp_path
):
  if kind == "json":
    save(tmp_path, (trained / "tokenizer.json").read_bytes(), {"eos_token": "<|endoftext|>"})
    end, id_ = "<|endoftext|>", 0
  else:
    model = MISTRAL / "mistral_instruct_tokenizer_240323.model.v3"
    write(tmp_path, {"tokenizer.model": model.read_bytes()})
    end, id_ = "</s>", 2
  if name == "tokenizer_config.json":
    content = {"eos_token": end, **content}
  text = json.dumps(content).replace('"{id}":', f'"{id_}":').replace('"{id}"', str(id_))
  (tmp_path / name).write_text(text.replace("{end}", end))
  if not differs:
    assert tokenizer.load(tmp_path).end == id_
    return
  said = (
    r"added_tokens_decoder: an object is expected"
    if "[5]" in text
    else r"add tokens that it does not have \(1; the first is '<"
  )
  with pytest.raises(ValueError, match=said):
    tokenizer.load(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
  (tmp_path / "tokenizer.json").mkdir()
  with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read .*a directory"):
    tokenizer.load(tmp_path)


def test_without_the_library_its_requirements_file_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "sentencepiece", None)
  with pytest.raises(ValueError, match=r"pip install -r requirements/sentencepiece\.txt"):
    tokenizer.load(write(tmp_path, {"m.model": b"x"}))
