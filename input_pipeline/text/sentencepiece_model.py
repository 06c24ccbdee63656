"""Tokenizers in a SentencePiece model (*.model), which the library `sentencepiece` encodes."""

import functools
import re
from collections.abc import Mapping

import numpy as np
from etils import epath

from input_pipeline.text import tokenizer_files

_UNUSED = -1  # the id of a special token that a model does not have


def load(path: epath.Path, companions: Mapping[str, epath.Path]) -> "SentencePieceTokenizer":
  """Returns the tokenizer of a SentencePiece model.

  Args:
    path: of the model.
    companions: the files beside it, by name; of them counts whether BOS is put before a text.

  Raises:
    ValueError: the file cannot be read, or has no end of a document; or the library is missing.
  """
  try:
    import sentencepiece  # noqa: F401 an optional requirement
  except ImportError as error:
    raise ValueError(
      f"data.tokenizer: {path} is a SentencePiece model, which needs the library sentencepiece:"
      " pip install -r requirements/sentencepiece.txt"
    ) from error
  try:
    return SentencePieceTokenizer(path, companions)
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(
      f"data.tokenizer: {', '.join(companions)} beside {path}: an unexpected form"
      f" ({type(error).__name__}: {error})"
    ) from error


class SentencePieceTokenizer:
  """A SentencePiece model; the methods are those of `tokenizer.Tokenizer`."""

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
    said = {
      name: tokenizer_files.read_object(p) for name, p in companions.items() if name[-5:] == ".json"
    }
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
  import sentencepiece
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
