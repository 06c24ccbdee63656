"""The tokenizer's files of an exported model, as transformers 4.57 and 5 load them.

A run's own copies are taken as they are. What is missing is written: tokens that are bytes become a
tokenizer.json that encodes alike, and a bare tokenizer.json gets its tokenizer_config.json.
"""

import json
from collections.abc import Mapping
from typing import Any

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
SENTENCEPIECE_FILE = "tokenizer.model"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE, TEMPLATE_KEY = "chat_template.jinja", "chat_template"
CLASS = "PreTrainedTokenizerFast"
# As version 5 calls that class where it saves one; 4.57 does not know the name.
_NEW_CLASS = "TokenizersBackend"
# The token of byte 0, which ends a document. The format's own character for this byte would be
# found as a special token in texts that have that character.
_END_OF_BYTES = "\0"


def tokenizer_files(
  copies: Mapping[str, bytes], *, end: int, start: int | None, special: Mapping[str, int]
) -> dict[str, bytes]:
  """Returns name -> content of the files to write.

  Args:
    copies: name -> content of the run's own copies; none where tokens are bytes.
    end: the id that ends a document.
    start: the id of the BOS that the tokenizer puts before a text; None: it puts none.
    special: name -> id of the special tokens.
  """
  found = dict(copies)
  if not {TOKENIZER_FILE, SENTENCEPIECE_FILE} & {*found}:
    found[TOKENIZER_FILE] = json_bytes(bytes_tokenizer(), indent=None)
    special = {_END_OF_BYTES: end}
  if "chat_template.json" in found:  # whose form belongs to other classes
    template = json.loads(found.pop("chat_template.json"))[TEMPLATE_KEY]
    if not isinstance(template, str):  # several, by name
      template = next(one["template"] for one in template if one["name"] == "default")
    found[TEMPLATE_FILE] = template.encode()
  names = {id_: name for name, id_ in special.items()}
  if TOKENIZER_FILE in found and CONFIG_FILE not in found:
    named = {"bos_token": names.get(start), "eos_token": names.get(end)}
    config = {"tokenizer_class": CLASS, "clean_up_tokenization_spaces": False}
    found[CONFIG_FILE] = json_bytes(config | {k: name for k, name in named.items() if name})
  elif CONFIG_FILE in found:
    config = json.loads(found[CONFIG_FILE])
    if config.get("tokenizer_class") == _NEW_CLASS:
      found[CONFIG_FILE] = json_bytes(config | {"tokenizer_class": CLASS})
  if GENERATION_FILE not in found:
    ids = {"bos_token_id": start, "eos_token_id": end}
    found[GENERATION_FILE] = json_bytes({k: id_ for k, id_ in ids.items() if id_ is not None})
  return found


def bytes_tokenizer() -> dict[str, Any]:
  """Returns the tokenizer.json of a tokenizer whose ids are the bytes of a text."""
  characters = _byte_characters()
  vocabulary = {_END_OF_BYTES: 0} | {characters[byte]: byte for byte in range(1, 256)}
  added = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
  as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
  as_bytes["use_regex"] = False
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 0, "content": _END_OF_BYTES, **added, "special": True}],
    "normalizer": None,
    "pre_tokenizer": as_bytes,
    "post_processor": None,
    "decoder": as_bytes,
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": None,
      "continuing_subword_prefix": None,
      "end_of_word_suffix": None,
      "fuse_unk": False,
      "byte_fallback": False,
      "ignore_merges": False,
      "vocab": vocabulary,
      "merges": [],
    },
  }


def _byte_characters() -> list[str]:
  """Returns the character that stands for each byte in a byte-level vocabulary. Source: GPT-2."""
  plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in plain]
  return [chr(byte if byte in plain else 256 + others.index(byte)) for byte in range(256)]


def json_bytes(value: Any, indent: int | None = 2) -> bytes:
  """Returns a value as a file of JSON."""
  return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode()
