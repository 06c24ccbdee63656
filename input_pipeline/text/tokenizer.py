"""Tokenizers: what turns a document into ids, and ids into exactly the bytes that they stand for.

`load` takes the word `bytes`, a tokenizer.json or a folder with one, or a SentencePiece model. What
a document contains is text: a special token's name in it (`<|endoftext|>`) is encoded like any
other characters, so that no document can end itself or open a turn of a conversation. Only
`encode_template`, for what a chat template has written, reads such names as special tokens.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from etils import epath, epy

from input_pipeline import catalog
from runtime import files

with epy.lazy_imports():  # bytes need neither before a text is encoded
  from input_pipeline.text import files as text_files
  from input_pipeline.text import tokenizer_files

BYTES = "bytes"
CHARACTERS = "characters"
USUAL_CHARACTERS = 384  # ids of up to 127 characters, their bytes and the end of a document
_LISTED = 20  # characters in a message
CURRENT_FILE, CHARACTERS_FILE = "current.json", "characters.json"  # of `trained_folder`


class Tokenizer(Protocol):
  """What every tokenizer can do.

  Attributes:
    name: as messages call it: `bytes`, or the path of its file.
    size: ids are 0 to size - 1.
    end: the id that ends a document.
    start: the id from which the first token of a document is predicted: BOS if there is one, else
      `end`.
    has_bos: whether the tokenizer puts a BOS of its own before a text.
    special: name -> id of the special tokens.
    digest: of all that decides ids: two tokenizers with the same digest encode alike.
    files: name in a folder -> path, of what to copy so that `load` of that folder gives the same
      tokenizer; empty for bytes.
    characters: those that have tokens, where others are bytes that training never saw; None: the
      tokenizer is no vocabulary of characters.
  """

  name: str
  size: int
  end: int
  start: int
  has_bos: bool
  special: Mapping[str, int]
  digest: str
  files: Mapping[str, epath.Path]
  characters: frozenset[str] | None

  def encode(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
    """Returns the ids of each text, uint32[N], without BOS and end.

    Args:
      texts: str, or bytes in UTF-8. Special tokens named in them are plain text.

    Raises:
      ValueError: a text is not valid Unicode, or not UTF-8.
    """

  def encode_template(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids uint32[N] of what a chat template wrote, and offsets int64[N, 2].

    The names of special tokens in it are special tokens. Offsets are the characters of the text
    that a token stands for, from (inclusive) and to (exclusive).
    """

  def decode(self, ids: Sequence[int]) -> bytes:
    """Returns the bytes of a text; a character that is cut off stays incomplete."""

  def token_bytes(self, id_: int) -> bytes:
    """Returns the bytes that an id adds to a text that is already there."""


class ByteTokenizer:
  """A token is a byte, and byte 0 ends a document. Takes any bytes, also such as are not UTF-8."""

  name = BYTES
  size = 256
  end = start = 0
  has_bos = False
  special: Mapping[str, int] = {}
  digest = hashlib.sha256(b"bytes, ended by 0").hexdigest()
  files: Mapping[str, epath.Path] = {}
  characters = None

  def encode(self, texts):
    """Returns the bytes of each text as ids, uint32[N]."""
    return [
      np.frombuffer(tokenizer_files.as_bytes(text), np.uint8).astype(np.uint32) for text in texts
    ]

  def encode_template(self, text):
    """Returns the bytes of a text, each with the offsets of its character."""
    widths = [len(tokenizer_files.as_bytes(character)) for character in text]
    starts = np.repeat(np.arange(len(text)), widths)
    return self.encode([text])[0], np.stack([starts, starts + 1], axis=1)

  def decode(self, ids):
    """Returns the ids as bytes."""
    return b"".join(map(self.token_bytes, ids))

  def token_bytes(self, id_):
    """Returns the id as a byte; none for an id that is not in use."""
    return bytes((int(id_),)) if id_ < self.size else b""


# ------------------------------ by name or path ------------------------------


def load(spec: epath.PathLike) -> Tokenizer:
  """Returns the tokenizer that data.tokenizer names.

  Args:
    spec: `bytes`; a tokenizer.json; a SentencePiece model (*.model); or a folder with either, of
      which tokenizer.json is taken if both are there. Paths may be in a bucket (gs://).

  Raises:
    ValueError: there is none, it cannot be read, or it does not say which id ends a document.
  """
  if str(spec) == BYTES:
    return ByteTokenizer()
  if str(spec) == CHARACTERS:
    raise ValueError(
      f"data.tokenizer={CHARACTERS}: the characters of these data are not known yet; `prepare` with"
      " the same config finds them, as a run does that trains"
    )
  path = tokenizer_files.find(epath.Path(spec).expanduser())
  companions = {
    name: path.parent / name for name in tokenizer_files.COMPANIONS if (path.parent / name).exists()
  }
  from input_pipeline.text import library_tokenizers  # imports libraries that bytes do not need

  return library_tokenizers.load(path, companions)


def unseen_text(where: str, characters: Iterable[str]) -> str:
  """Returns a sentence on characters that a vocabulary of characters does not have; "" for none."""
  unseen = sorted({*characters})
  if not unseen:
    return ""
  listed = " ".join(map(repr, unseen[:_LISTED])) + " ..." * (len(unseen) > _LISTED)
  many = len(unseen) > 1
  return (
    f"{where} has {len(unseen):,} character{'s' * many} that the text trained on does not have "
    f"({listed}): {'each' if many else 'it'} is encoded as its bytes, which the model has not "
    f"learned"
  )


# ------------------------------ the one trained for these files ------------------------------


def resolve(data: Any) -> str:
  """Returns the spec of the tokenizer of a config's data section, for `load`.

  It is data.tokenizer; where that is empty, the tokenizer that was trained for these files, else
  `bytes`. Where it is `characters`, their vocabulary that was stored last, if there is one.
  """
  if data.tokenizer not in ("", CHARACTERS):
    return data.tokenizer
  folder = trained_folder(data)
  name = CHARACTERS_FILE if data.tokenizer else CURRENT_FILE
  try:
    return str(folder / files.read_json(folder / name, follow=True)["folder"])
  except FileNotFoundError:
    return data.tokenizer or BYTES
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"{folder / name} cannot be read ({error}); it names the tokenizer trained for"
      " data.files. Delete it and train again, or set data.tokenizer"
    ) from error


def trained_folder(data: Any) -> epath.Path:
  """Returns the folder of the tokenizers that are trained for data.files (or data.sources).

  Without files it is that of the data set's name. Each tokenizer has a folder of its own in it, and
  CURRENT_FILE names the one that was trained last.
  """
  specs = [data.files, *(source["files"] for source in data.sources)]
  paths = [text_files.paths(spec) if spec else [] for spec in specs]
  facts = [*paths, data.text_feature, "" if any(paths) else data.name]
  key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
  return catalog.data_folder(data) / "prepared" / "text" / "tokenizers" / key
