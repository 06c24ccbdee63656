"""input_pipeline/text/library_tokenizers.py against the library itself; models of Mistral."""

import io
import json

import numpy as np
import pytest
import sentencepiece

from input_pipeline.text import tokenizer
from tests.input_pipeline.text.conftest import EVERY_PLANE, MISTRAL, python_files

# The first has three control tokens, the second hundreds.
NAMES = ["tokenizer.model.v1", "mistral_instruct_tokenizer_241114.model.v7"]


@pytest.fixture(scope="module", params=NAMES)
def path(request):
  return MISTRAL / request.param


@pytest.fixture(scope="module")
def library(path):
  return sentencepiece.SentencePieceProcessor(model_file=str(path))


@pytest.fixture(scope="module")
def ours(path):
  return tokenizer.load(str(path))


TEXTS = [EVERY_PLANE, "", " ", "  two", "x\n\n\ty", "\u2581x", "<0x41>", "\r\n", "\0"]


def test_ids_are_the_library_s(ours, library):
  texts = [*TEXTS, *(text.decode() for text in python_files(2))]
  found = ours.encode(texts)
  assert [ids.tolist() for ids in found] == library.encode(texts)
  assert {ids.dtype for ids in found} == {np.dtype(np.uint32)}
  assert [ids.tolist() for ids in ours.encode([text.encode() for text in texts])] == library.encode(
    texts
  )


def test_texts_come_back_to_the_byte(ours, library):
  for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
    # The format writes a space as U+2581, so the two cannot be told apart.
    assert ours.decode(ids).decode() == text.replace("\u2581", " ")
    assert ours.decode(ids).decode() == library.decode(ids.tolist())


def test_a_character_that_is_cut_off_stays_incomplete(ours):
  [ids] = ours.encode(["\U000e0001"])  # in no vocabulary: four tokens of a byte
  assert [ours.token_bytes(id_) for id_ in ids[-4:]] == [b"\xf3", b"\xa0", b"\x80", b"\x81"]
  assert ours.decode(ids[:-1]) == b"\xf3\xa0\x80"
  assert b"".join(map(ours.token_bytes, ids)) == b" \xf3\xa0\x80\x81"


def test_special_ids_are_the_model_s_and_not_in_a_text(ours, library):
  assert (ours.start, ours.end, ours.has_bos) == (library.bos_id(), library.eos_id(), True)
  assert ours.size == library.vocab_size()
  assert {"<s>": 1, "</s>": 2, "<unk>": 0}.items() <= ours.special.items()
  text = "".join(ours.special)
  [ids] = ours.encode([text])
  assert not {*ids.tolist()} & {*ours.special.values()}
  assert ours.decode(ids).decode() == text


def test_a_template_s_text_has_its_special_tokens_and_offsets():
  ours = tokenizer.load(str(MISTRAL / NAMES[1]))
  text = "<s>[INST] größer[/INST] \u0dda</s>"
  ids, offsets = ours.encode_template(text)
  names = [name for id_ in ids.tolist() for name, of in ours.special.items() if of == id_]
  assert names == ["<s>", "[INST]", "[/INST]", "</s>"]
  assert ids.dtype == np.uint32
  assert offsets.dtype == np.int64
  assert ours.decode(ids) == " größer \u0dda".encode()[1:]
  for id_, (start, stop) in zip(ids.tolist(), offsets.tolist(), strict=True):
    if id_ in ours.special.values():
      assert ours.special[text[start:stop]] == id_
  assert offsets[0].tolist() == [0, 3]
  assert (offsets[1:, 0] >= offsets[:-1, 0]).all()
  assert offsets[-1].tolist() == [len(text) - 4, len(text)]
  # A word after a control token: the template's own space, not one that is put before a text.
  assert (
    ours.encode_template("[INST]hi")[0].tolist() != ours.encode_template("[INST] hi")[0].tolist()
  )
  assert ours.encode_template("hi")[0].tolist() == ours.encode(["hi"])[0].tolist()
  assert ours.encode_template("")[1].shape == (0, 2)


def test_a_model_trained_here_says_which_ids_it_has(tmp_path):
  def train(**options):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(["a cat sat on a mat"] * 20),
      model_writer=out,
      vocab_size=24,
      hard_vocab_limit=False,
      minloglevel=2,
      **options,
    )
    (tmp_path / "tokenizer.model").write_bytes(out.getvalue())
    return tokenizer.load(tmp_path)

  unigram = train(user_defined_symbols=["<sep>"])
  assert (unigram.start, unigram.end, unigram.has_bos) == (1, 2, True)
  [ids] = unigram.encode(["a</s>cat<sep>"])
  assert 2 not in ids.tolist()
  assert unigram.special.keys() == {"<unk>", "<s>", "</s>"}
  assert unigram.decode(unigram.encode(["a cat \u3042"])[0]) == "a cat  \u2047 ".encode()  # unknown

  controls = train(control_symbols=["<c>", "<c>d"], add_dummy_prefix=False)
  assert controls.special.keys() == {"<unk>", "<s>", "</s>", "<c>", "<c>d"}
  assert controls.encode_template("<c>d")[1].tolist() == [[0, 4]]
  assert controls.decode(controls.encode([" a cat"])[0]) == b" a cat"[1:]  # trimmed when encoded
  spaced = [id_ for id_ in range(controls.size) if controls.token_bytes(id_).startswith(b" ")]
  for id_ in spaced:  # no space was put before the first word, so none is removed
    assert controls.decode([id_]) == controls.token_bytes(id_)
  assert spaced

  without = train(bos_id=-1)
  assert (without.start, without.end, without.has_bos) == (2, 2, False)
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
  configured = train()
  assert (configured.start, configured.end, configured.has_bos) == (2, 2, False)
  with pytest.raises(
    ValueError, match=r"tokenizer\.model has no id that ends a document; train it"
  ):
    train(eos_id=-1)
