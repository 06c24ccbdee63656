"""Mistral's Tekken as a tokenizer.json encodes as tiktoken does, its own library."""

import base64
import itertools
import json

import numpy as np
import tiktoken
import tokenizers

from input_pipeline.text import tokenizer
from tests.input_pipeline.text.conftest import EVERY_PLANE, MISTRAL, python_files, save

RANKS = 3000  # of Tekken's 150,000, so that the merges are found in a second
TEXTS = [
  "",
  " \n  a\t",
  "\r\n\r\n",
  "\0",
  " " * 300,
  "\ufeffx",
  "e\u0301",
  "<s></s>[INST]",
  EVERY_PLANE,
]


def tekken():
  """Returns (pattern, bytes of a token -> its rank) of Mistral's Tekken, the first of them."""
  content = json.loads((MISTRAL / "tekken_240718.json").read_bytes())
  entries = content["vocab"][:RANKS]
  return content["config"]["pattern"], {
    base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries
  }


def merges(ranks):
  """Yields the two tokens of which each longer one is made: what is left of merging lower ranks."""
  for whole, rank in ranks.items():
    parts = [whole[i : i + 1] for i in range(len(whole))]
    while len(parts) > 2:
      pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
      lowest = int(np.argmin(pairs))
      parts[lowest : lowest + 2] = [parts[lowest] + parts[lowest + 1]]
    if len(parts) == 2:
      yield parts


def as_tokenizer_json(pattern, ranks, first):
  """Returns a tokenizer.json of ranks of bytes; the ids begin after those of special tokens."""
  alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

  def spell(token):  # byte by byte, since a token need not be UTF-8
    return "".join(spelled[byte] for byte in token)

  characters = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in characters]
  spelled = {byte: chr(byte) for byte in characters}
  spelled |= {byte: chr(256 + number) for number, byte in enumerate(others)}
  assert {*spelled.values()} == {*alphabet.alphabet()}
  library = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      {spell(token): rank + first for token, rank in ranks.items()}
      | {f"<SPECIAL_{number}>": number for number in range(first)},
      [(spell(a), spell(b)) for a, b in merges(ranks)],
      ignore_merges=True,
    )
  )
  split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
  library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, alphabet])
  library.decoder = tokenizers.decoders.ByteLevel()
  library.add_special_tokens([f"<SPECIAL_{number}>" for number in range(first)])
  return library.to_str()


def test_tekken_as_a_tokenizer_json_encodes_as_tiktoken_does(tmp_path):
  pattern, ranks = tekken()
  first = 1000
  library = tiktoken.Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
  folder = save(tmp_path, as_tokenizer_json(pattern, ranks, first), {"eos_token": "<SPECIAL_2>"})
  ours = tokenizer.load(folder)
  assert (ours.size, ours.end) == (RANKS + first, 2)
  texts = [*TEXTS, *(text.decode() for text in python_files(2))]
  for text, ids in zip(texts, ours.encode(texts), strict=True):
    assert (ids.astype(int) - first).tolist() == library.encode_ordinary(text)
    assert ours.decode(ids) == text.encode()
  for id_ in range(0, RANKS, 7):
    assert ours.token_bytes(id_ + first) == library.decode_single_token_bytes(id_)
