"""The tokenizer's files of an export: copies stay as they are, what is missing is written."""

import json

import pytest
import tokenizers

from input_pipeline.text import tokenizer, train_tokenizer
from interop.tokenizer_export import bytes_tokenizer, tokenizer_files

TEXTS = ["hello\n  wörld", "Ā\0b", "日本 <|endoftext|> ", " a", "", "a  b .", "Ġx", "𝄞\r\n\t"]


def test_bytes_become_a_tokenizer_that_encodes_alike():
  library = tokenizers.Tokenizer.from_str(json.dumps(bytes_tokenizer()))
  for text in TEXTS:
    ids = library.encode(text).ids
    assert ids == list(text.encode())
    assert library.decode(ids, skip_special_tokens=False) == text
  assert [library.token_to_id(library.id_to_token(byte)) for byte in range(256)] == [*range(256)]


def test_they_are_read_here_as_the_same_tokens(tmp_path):
  own = tokenizer.ByteTokenizer()
  for name, content in tokenizer_files({}, end=own.end, start=None, special={}).items():
    (tmp_path / name).write_bytes(content)
  back = tokenizer.load(tmp_path)
  assert (back.size, back.end, back.has_bos) == (own.size, own.end, False)
  for text in TEXTS:
    if "\0" not in text:  # a special token, which no document can write
      assert [*back.encode([text])[0]] == [*own.encode([text])[0]]
  generation = json.loads((tmp_path / "generation_config.json").read_text())
  assert generation == {"eos_token_id": 0}


def test_a_bare_tokenizer_json_gets_its_config():
  content = train_tokenizer.train([b"ab ab abc"], 260)
  special = {train_tokenizer.END: 0, "<s>": 3}
  found = tokenizer_files({"tokenizer.json": content}, end=0, start=3, special=special)
  assert found["tokenizer.json"] == content
  assert json.loads(found["tokenizer_config.json"]) == {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "bos_token": "<s>",
    "eos_token": train_tokenizer.END,
  }
  assert json.loads(found["generation_config.json"]) == {"bos_token_id": 3, "eos_token_id": 0}


def test_copies_stay_as_they_are():
  copies = {
    "tokenizer.model": b"\0\1",
    "tokenizer_config.json": b'{"tokenizer_class":   "LlamaTokenizer"}',
    "generation_config.json": b'{"eos_token_id": [1, 2]}',
    "chat_template.jinja": b"{{ messages }}",
  }
  assert tokenizer_files(copies, end=2, start=1, special={}) == copies


@pytest.mark.parametrize(
  "template", ["T", [{"name": "tools", "template": "U"}, {"name": "default", "template": "T"}]]
)
def test_what_older_readers_do_not_know_is_renamed(template):
  copies = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"tokenizer_class": "TokenizersBackend", "eos_token": "e"}',
    "chat_template.json": json.dumps({"chat_template": template}).encode(),
    "chat_template.jinja": b"of the tokenizer, which data.chat_template replaces",
  }
  found = tokenizer_files(copies, end=2, start=None, special={})
  config = json.loads(found["tokenizer_config.json"])
  assert config == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "e"}
  assert found["chat_template.jinja"] == b"T"
  assert "chat_template.json" not in found
