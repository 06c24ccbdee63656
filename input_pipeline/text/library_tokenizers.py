"""Tokenizers of files: tokenizer.json (library `tokenizers`) and *.model (`sentencepiece`).

Of a tokenizer.json, two instances of the library's tokenizer are made. In the first, which encodes
documents, the names of the special tokens are replaced by random ones: their ids stay as they are,
and no text can contain them. (The library's own switch, `encode_special_tokens`, is not enough: a
Unigram model has `</s>` among its pieces, and finds it in the text all the same.) The second, which
encodes what a chat template has written, is the file as it is. Neither truncates, pads, adds BOS or
end, or drops merges at random, whatever the file says.
"""

import contextlib
import copy
import functools
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath, epy

from input_pipeline.text import tokenizer_files
from input_pipeline.text.tokenizer_files import (
  CONFIG_FILE,
  GENERATION_FILE,
  SPECIAL_FILE,
  SPECIAL_KEYS,
  TEKKEN_FILE,
  TOKENIZER_FILE,
  token_name,
)
from runtime.forms import COUNT, FLAG, TEXT, Needs, OrNull

with epy.lazy_imports():  # a SentencePiece model needs the other library alone
  import tokenizers

# ------------------------------ tokenizer.json ------------------------------

# What is read here beside what the library reads, which checks the rest.
_TYPE = Needs({"type": TEXT})
_FORM = {
  "added_tokens": OrNull([Needs({"id": COUNT, "content": TEXT}, {"special": FLAG})]),
  "decoder": OrNull(Needs({"type": TEXT}, {"decoders": [_TYPE]})),
}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LISTED = ("additional_special_tokens", "extra_special_tokens")


def load(
  path: epath.Path, companions: Mapping[str, epath.Path]
) -> "JsonTokenizer | SentencePieceTokenizer":
  """Returns the tokenizer of a tokenizer.json or of a SentencePiece model.

  Args:
    path: of the file.
    companions: the files beside it, by name, which say which special token does what.

  Raises:
    ValueError: a file cannot be read, or none of them says which id ends a document; or the library
      sentencepiece is missing.
  """
  try:
    return (JsonTokenizer if _is_json(path) else SentencePieceTokenizer)(path, companions)
  except (AttributeError, IndexError, KeyError, TypeError) as error:
    among = f" or {', '.join(companions)} beside it" if companions else ""
    raise ValueError(
      f"data.tokenizer: {path}{among} has an unexpected form ({type(error).__name__}: {error})"
    ) from error


def _is_json(path: epath.Path) -> bool:
  if path.suffix == ".json" or ".model" in path.name:
    return path.suffix == ".json"
  return tokenizer_files.read(path).lstrip()[:1] == b"{"


class JsonTokenizer:
  """A tokenizer.json; the methods are those of `tokenizer.Tokenizer`."""

  def __init__(self, path, companions):
    content = tokenizer_files.read(path)
    self._description = _plain_behavior(tokenizer_files.parse_object(content, path, _FORM), path)
    said = tokenizer_files.read_companions(companions)
    self.name = str(path)
    self.files = {TOKENIZER_FILE: path, **companions}
    self._library = _library(self._description, path)
    vocabulary = self._library.get_vocab()
    self.size = max(vocabulary.values(), default=-1) + 1
    tokenizer_files.check_added(path, said, vocabulary.get)
    names = {*_special_names(self._description, said.values())} & {*vocabulary}
    self.special = {name: vocabulary[name] for name in sorted(names, key=vocabulary.get)}
    self._encoder = _library(_without_special(self._description, names), path)
    prefix, suffix = _surroundings(self._library, path)
    self._library.post_processor = None  # it may trim offsets
    self._added = {
      id_: token.content for id_, token in self._library.get_added_tokens_decoder().items()
    }
    self._library.add_special_tokens([*(names - {*self._added.values()})])
    self.end = _end(path, said, vocabulary, suffix)
    bos = _bos(said, vocabulary, prefix)
    self.has_bos = bos is not None and bos != self.end
    self.start = bos if self.has_bos else self.end
    facts = {"end": self.end, "start": self.start, "special": self.special}
    self.digest = tokenizer_files.digest(content, facts)

  def encode(self, texts):
    """Returns the ids of each text, uint32[N], without BOS and end; see the protocol."""
    texts = [tokenizer_files.as_str(text) for text in texts]
    with _refusing("cannot encode a text with", self.name):
      encodings = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.uint32) for encoding in encodings]

  def encode_template(self, text):
    """Returns ids uint32[N] and offsets int64[N, 2], special tokens recognized by name."""
    text = tokenizer_files.as_str(text)
    with _refusing("cannot encode a conversation with", self.name):
      encoding = self._library.encode(text, add_special_tokens=False)
    return np.array(encoding.ids, np.uint32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

  def decode(self, ids):
    """Returns the bytes of a text."""
    if self._spelling is None:
      return self._library.decode([*map(int, ids)], skip_special_tokens=False).encode()
    text = b"".join(self.token_bytes(id_) for id_ in ids)
    strips = _strips_first_space(self._description["decoder"])
    return text[1:] if strips and text.startswith(b" ") else text

  def token_bytes(self, id_):
    """Returns the bytes that an id adds to a text; none for an id that is not in use."""
    piece = self._library.id_to_token(int(id_))
    if piece is None:
      return b""
    if int(id_) in self._added:
      return self._added[int(id_)].encode()
    if self._spelling is None:
      return self._library.decode([int(id_)], skip_special_tokens=False).encode()
    return self._spelling(piece)

  @functools.cached_property
  def characters(self):
    """Those of a vocabulary of characters, a BPE without merges; else None."""
    model = self._description["model"]
    if model.get("type") != "BPE" or model.get("merges") or not model.get("byte_fallback"):
      return None
    return frozenset(piece for piece in model["vocab"] if len(piece) == 1)

  @functools.cached_property
  def _spelling(self):
    return _spelling(self._description["decoder"])


def _surroundings(library: "tokenizers.Tokenizer", path) -> tuple[list[int], list[int]]:
  """Returns the ids that the file's post-processor puts before and after a text."""
  with _refusing("cannot encode a text with", path):
    bare = library.encode("a", add_special_tokens=False).ids
    full = library.encode("a").ids
  for start in range(len(full) - len(bare) + 1):
    if full[start : start + len(bare)] == bare:
      return full[:start], full[start + len(bare) :]
  return [], []


# ------------------------------ the file ------------------------------


def _plain_behavior(description: dict[str, Any], path: epath.PathLike) -> dict[str, Any]:
  """Returns the content of a tokenizer.json without what is not wanted of it: see the module."""
  model = description.get("model")
  if not isinstance(model, dict) or "vocab" not in model:
    hint = ""
    if "vocab" in description and "config" in description:
      hint = f"; it looks like {TEKKEN_FILE}: use the tokenizer.json of the same model"
    raise ValueError(
      f"data.tokenizer: {path} is not a tokenizer.json of the library `tokenizers`: it has no model"
      f" with a vocabulary{hint}"
    )
  missing = {"added_tokens": [], "decoder": None, "post_processor": None}
  plain = {**missing, **description, "truncation": None, "padding": None}
  plain["added_tokens"] = plain["added_tokens"] or []
  if model.get("dropout"):
    plain["model"] = {**model, "dropout": None}
  return plain


def _library(description: dict[str, Any], path: epath.PathLike) -> "tokenizers.Tokenizer":
  with _refusing("cannot read", path):
    return tokenizers.Tokenizer.from_str(json.dumps(description))


@contextlib.contextmanager
def _refusing(what: str, path: epath.PathLike) -> Iterator[None]:
  """Makes a ValueError of the library's errors, which are of no narrower type than Exception."""
  try:
    yield
  except BaseException as error:
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust
      raise
    raise ValueError(
      f"data.tokenizer: the library tokenizers {tokenizers.__version__} {what} {path} ({error})"
    ) from error


def _without_special(description: dict[str, Any], names: set[str]) -> dict[str, Any]:
  """Returns a tokenizer.json in which the special tokens have names that no text contains.

  A special token that is a piece of ordinary words too, as `!` can be, remains only that.
  """
  plain, model = copy.copy(description), copy.copy(description["model"])
  ordinary = _ordinary(names, model)
  secret = secrets.token_hex(16)
  hidden = {name: f"\uffff{secret}{number}\uffff" for number, name in enumerate(names - ordinary)}
  if isinstance(model["vocab"], dict):
    model["vocab"] = {hidden.get(piece, piece): id_ for piece, id_ in model["vocab"].items()}
  else:
    model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
  if model.get("unk_token") in hidden:
    model["unk_token"] = hidden[model["unk_token"]]
  plain["model"], plain["post_processor"] = model, None
  plain["added_tokens"] = [
    {**token, "content": hidden.get(token["content"], token["content"])}
    for token in description["added_tokens"]
    if token["content"] not in ordinary
  ]
  return plain


def _ordinary(names: set[str], model: dict[str, Any]) -> set[str]:
  """Returns those names that texts are made of: single characters, and what BPE merges."""
  pieces = model["vocab"]
  present = names & {piece if isinstance(piece, str) else piece[0] for piece in pieces}
  if not present:
    return set()
  used = {name for name in present if len(name) == 1}
  for merge in model.get("merges") or ():
    parts = merge.split(" ") if isinstance(merge, str) else merge
    used |= {*parts, "".join(parts)} & present
  return used


# ------------------------------ special tokens ------------------------------


def _special_names(description: dict[str, Any], said: Iterable[dict[str, Any]]) -> Iterable[str]:
  """Yields the names of the special tokens: those of the file, and those that others name."""
  yield from (token["content"] for token in description["added_tokens"] if token.get("special"))
  for config in said:
    named = [config.get(key) for key in SPECIAL_KEYS]
    for key in _LISTED:
      listed = config.get(key) or []
      listed = [listed] if isinstance(listed, str) else listed
      named += listed.values() if isinstance(listed, dict) else listed
    decoder = config.get("added_tokens_decoder") or {}
    named += [token for token in decoder.values() if token.get("special")]
    yield from filter(None, map(token_name, named))


def _end(path, said, vocabulary, suffix):
  """Returns the id that ends a document. Raises ValueError where no file says which."""
  for file in (CONFIG_FILE, SPECIAL_FILE):
    if name := token_name(said.get(file, {}).get("eos_token")):
      if name in vocabulary:
        return vocabulary[name]
      raise ValueError(
        f"data.tokenizer: {path.parent / file} names {name!r} as eos_token, which is not in the"
        f" vocabulary of {path}"
      )
  generation = said.get(GENERATION_FILE, {}).get("eos_token_id")
  ends = generation if isinstance(generation, list) else [generation]
  known = {*vocabulary.values()}
  if ends and ends[0] in known:
    return ends[0]
  if len(suffix) == 1:
    return suffix[0]
  named = [token for token in vocabulary if re.fullmatch(r"</s>|<eos>|<\|end\w*\|>", token)]
  raise ValueError(
    f"data.tokenizer: no file says which id ends a document: {path} adds none after a text, and"
    f" {CONFIG_FILE}, {SPECIAL_FILE} and {GENERATION_FILE} beside it"
    f" name no eos_token. Write {path.parent / CONFIG_FILE} with"
    f" {json.dumps({'eos_token': (named or ['<|endoftext|>'])[0]})}, or the token of the"
    " vocabulary that does"
  )


def _bos(said, vocabulary, prefix):
  """Returns the id of a BOS that the tokenizer puts before a text, None where it puts none.

  Many files name a bos_token that their tokenizer does not put anywhere; it counts only if the
  post-processor does, or `add_bos_token` says so.
  """
  config = {
    **said.get(SPECIAL_FILE, {}),
    **said.get(CONFIG_FILE, {}),
  }
  named = vocabulary.get(token_name(config.get("bos_token")))
  if config.get("add_bos_token") is False:
    return None
  if config.get("add_bos_token") and named is not None:
    return named
  return named if named in prefix else next(iter(prefix), None)


# ------------------------------ from ids to bytes ------------------------------


@functools.cache
def _byte_alphabet() -> dict[str, int]:
  """Returns character -> byte of byte-level BPE: printable bytes stand for themselves.

  Source: `bytes_to_unicode` of GPT-2's encoder; the others get the characters from 256 on.
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in {*printable}]
  alphabet = {chr(byte): byte for byte in printable}
  return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


def _parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
  if not decoder:
    return []
  return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _spelling(decoder: dict[str, Any] | None):
  """Returns the function from a piece to its bytes, None for a decoder that looks at neighbors."""
  parts = _parts(decoder)
  kinds = {part["type"] for part in parts}
  if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
    return _byte_level
  if not parts or not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
    return None
  replaced = []
  for part in parts:
    if part["type"] == "Replace":
      if "String" not in part["pattern"]:
        return None
      replaced.append((part["pattern"]["String"], part["content"]))
    elif part["type"] == "Metaspace":
      replaced.append((part["replacement"], " "))
    elif part["type"] == "Strip" and (part["content"], part["stop"]) != (" ", 0):
      return None
  fallback = "ByteFallback" in kinds

  def spell(piece):
    if fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
      return bytes((int(byte[1], 16),))
    for old, new in replaced:
      piece = piece.replace(old, new)
    return piece.encode()

  return spell


def _byte_level(piece):
  alphabet = _byte_alphabet()
  try:
    return bytes(alphabet[character] for character in piece)
  except KeyError:
    return piece.encode()


def _strips_first_space(decoder: dict[str, Any] | None) -> bool:
  """Returns whether decoding removes the space that encoding has put before the first word."""
  return any(
    (part["type"] == "Strip" and part["start"] > 0)
    or (
      part["type"] == "Metaspace"
      and part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
      != "never"
    )
    for part in _parts(decoder)
  )


# ------------------------------ SentencePiece ------------------------------

_UNUSED = -1  # the id of a special token that a model does not have


class SentencePieceTokenizer:
  """A SentencePiece model; the methods are those of `tokenizer.Tokenizer`."""

  characters = None

  def __init__(self, path, companions):
    content = tokenizer_files.read(path)
    self._proto, self._processor = _processor(content, path)
    processor = self._processor
    self.name = str(path)
    self.files = {tokenizer_files.SENTENCEPIECE_FILE: path, **companions}
    self.size = processor.vocab_size()
    self.special = {
      processor.id_to_piece(id_): id_
      for id_ in range(self.size)
      if processor.is_control(id_) or processor.is_unknown(id_)
    }
    self.end = processor.eos_id()
    if self.end == _UNUSED:
      raise ValueError(
        f"data.tokenizer: {path} has no id that ends a document; train it with an eos_id"
      )
    said = tokenizer_files.read_companions(companions)
    tokenizer_files.check_added(path, said, self._id_of)
    config = said.get(tokenizer_files.CONFIG_FILE, {})
    bos = processor.bos_id()
    self.has_bos = bos not in (_UNUSED, self.end) and config.get("add_bos_token") is not False
    self.start = bos if self.has_bos else self.end
    self.digest = tokenizer_files.digest(content, {"end": self.end, "start": self.start})

  def encode(self, texts):
    """Returns the ids of each text, uint32[N], without BOS and end; see the protocol."""
    texts = [tokenizer_files.as_str(text) for text in texts]
    return [
      ids.astype(np.uint32)
      for ids in self._processor.encode(texts, return_type="numpy", num_threads=1)
    ]

  def encode_template(self, text):
    """Returns ids uint32[N] and offsets int64[N, 2], control tokens recognized by name.

    The space that models put before a text's first word is put before the first part only: after a
    control token stands what the template wrote there, and no more.
    """
    ids, offsets, place = [], [], 0
    for part in self._controls.split(tokenizer_files.as_str(text)):
      if part in self.special:
        ids.append(self.special[part])
        offsets.append((place, place + len(part)))
      elif part:
        processor = self._without_prefix if place else self._processor
        found = processor.encode(part, return_type="offset_mapping", return_bytes=False)
        ids += found["ids"]
        offsets += [(place + start, place + stop) for start, stop in found["offsets"]]
      place += len(part)
    return np.array(ids, np.uint32), np.array(offsets, np.int64).reshape(-1, 2)

  def decode(self, ids):
    """Returns the bytes of a text, without those of control tokens."""
    text = b"".join(self.token_bytes(id_) for id_ in ids)
    strips = self._proto.normalizer_spec.add_dummy_prefix
    return text[1:] if strips and text.startswith(b" ") else text

  def token_bytes(self, id_):
    """Returns the bytes that an id adds to a text; none for a control token."""
    processor, id_ = self._processor, int(id_)
    if not 0 <= id_ < self.size or processor.is_control(id_) or processor.is_unused(id_):
      return b""
    if processor.is_unknown(id_):
      return self._proto.trainer_spec.unk_surface.encode()
    piece = processor.id_to_piece(id_)
    if processor.is_byte(id_):
      return bytes((int(piece[1:-1], 16),))
    return piece.replace("\u2581", " ").encode()

  def _id_of(self, piece):
    id_ = self._processor.piece_to_id(piece)
    return id_ if self._processor.id_to_piece(id_) == piece else None

  @functools.cached_property
  def _controls(self):
    names = sorted(self.special, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, names))})")

  @functools.cached_property
  def _without_prefix(self):
    proto = type(self._proto)()
    proto.CopyFrom(self._proto)
    proto.normalizer_spec.add_dummy_prefix = False
    return _processor(proto.SerializeToString(), self.name)[1]


def _processor(content, path):
  """Returns (the parsed model, the library's tokenizer of it)."""
  try:
    import sentencepiece  # an optional requirement
  except ImportError as error:
    raise ValueError(
      f"data.tokenizer: {path} is a SentencePiece model, which needs the library sentencepiece:"
      " pip install -r requirements/sentencepiece.txt"
    ) from error
  from google.protobuf.message import DecodeError
  from sentencepiece import sentencepiece_model_pb2

  proto = sentencepiece_model_pb2.ModelProto()
  try:
    proto.ParseFromString(content)
    if not proto.pieces:
      raise ValueError("it has no pieces")
    return proto, sentencepiece.SentencePieceProcessor(model_proto=content)
  except (DecodeError, RuntimeError, ValueError) as error:
    hint = ""
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", content):
      hint = ", but ranks of tiktoken; use the tokenizer.json of the same model"
    raise ValueError(
      f"data.tokenizer: {path} is not a SentencePiece model{hint} ({error})"
    ) from error
