"""Tokenizers of files against the library itself; formats of several families."""

import json

import numpy as np
import pytest
import tokenizers

from input_pipeline.text import tokenizer
from tests.input_pipeline.text.conftest import EVERY_PLANE, python_files, save

TEXTS = [
  EVERY_PLANE,
  "",
  " ",
  "a",
  "  two",
  "x\n\n\ty",
  "<|endoftext|>",
  "\0",
  "e\u0301",
  "\ufffe\uffff",
]


def added(id_, content, special=True):
  flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
  return {"id": id_, "content": content, "special": special, **flags}


@pytest.fixture(scope="module")
def content(trained):
  return json.loads((trained / "tokenizer.json").read_text())


def changed(content, **parts):
  return {**json.loads(json.dumps(content)), **parts}


def written(folder, model, special, **parts):
  """Writes a tokenizer of the library's model, whose documents end with </s>."""
  library = tokenizers.Tokenizer(model)
  for name, part in parts.items():
    setattr(library, name, part)
  library.add_special_tokens(special)
  return save(folder, library.to_str(), {"eos_token": "</s>"})


# ------------------------------ the library's ids ------------------------------


def library_of(folder):
  """The library's tokenizer of a folder, which splits special tokens like other text."""
  library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  library.encode_special_tokens = True
  return library


def test_ids_are_the_library_s(trained, bpe):
  library = library_of(trained)
  texts = [*TEXTS, *(text.decode() for text in python_files(2))]
  found = bpe.encode(texts)
  assert [ids.tolist() for ids in found] == [library.encode(text).ids for text in texts]
  assert {ids.dtype for ids in found} == {np.dtype(np.uint32)}
  for text, ids in zip(texts, found, strict=True):
    assert bpe.decode(ids) == b"".join(map(bpe.token_bytes, ids)) == text.encode()
  assert bpe.decode(bpe.encode(["\U000e0001"])[0][:-1]) == b"\xf3\xa0\x80"
  assert bpe.token_bytes(bpe.size) == b""  # a model's vocabulary may be larger


def test_bytes_that_are_not_utf8_are_refused(bpe):
  with pytest.raises(ValueError, match="byte 1 of a text is 0xff, which is not valid UTF-8"):
    bpe.encode([b"a\xff"])


def test_what_a_file_says_of_batches_is_not_done_to_documents(content, tmp_path, bpe):
  """A file saved while it truncated, padded or dropped merges would lose text."""
  asked = tokenizers.Tokenizer.from_str(json.dumps(content))
  asked.enable_truncation(4)
  asked.enable_padding(length=4)
  asked = json.loads(asked.to_str())
  asked["model"]["dropout"] = 0.9
  odd = tokenizer.load(save(tmp_path, asked, {"eos_token": "<|endoftext|>"}))
  text = "def f(x): return x + 1"
  assert [e.tolist() for e in odd.encode([text, "x"])] == [
    e.tolist() for e in bpe.encode([text, "x"])
  ]
  assert odd.encode_template(text)[0].tolist() == bpe.encode([text])[0].tolist()


# ------------------------------ special tokens ------------------------------


def test_no_text_becomes_a_special_token(content, tmp_path):
  """Also if only tokenizer_config.json says that it is special, as Gemma's does."""
  own = changed(content, added_tokens=[*content["added_tokens"], added(512, "<turn>", False)])
  own["added_tokens"] += [added(513, "<think>", False), added(514, "<|\xe9|>")]
  config = {"eos_token": "<|endoftext|>", "additional_special_tokens": [{"content": "<turn>"}]}
  one = tokenizer.load(save(tmp_path, own, config))
  assert one.special == {"<|endoftext|>": 0, "<turn>": 512, "<|\xe9|>": 514}
  assert one.size == 515
  text = "a<turn>b<|\xe9|><|endoftext|> <think>"
  [ids] = one.encode([text])
  assert not {*ids.tolist()} & {*one.special.values()}
  assert ids[-1] == 513  # an added token that is not special is part of the vocabulary
  assert one.decode(ids) == text.encode()
  [ids] = one.encode(["<|<|\xe9|>"])
  assert one.decode(ids) == b"<|<|\xc3\xa9|>"
  assert one.token_bytes(514) == b"<|\xc3\xa9|>"  # its letters are no bytes of the alphabet


def test_a_unigram_model_does_not_find_its_own_end_in_a_text(tmp_path):
  pieces = {"<unk>": 0.0, "</s>": 0.0, **dict.fromkeys("</s>ab", -1.0)}
  model = tokenizers.models.Unigram([*pieces.items()], unk_id=0, byte_fallback=False)
  folder = written(tmp_path, model, ["<unk>", "</s>"], decoder=tokenizers.decoders.Fuse())
  assert 1 in library_of(folder).encode("a</s>b").ids  # the library's switch does not help here
  one = tokenizer.load(folder)
  [ids] = one.encode(["a</s>b\u3042"])
  assert one.decode(ids[:-1]) == b"a</s>b"
  assert ids[-1] == 0  # unknown
  assert 1 not in ids.tolist()
  assert one.encode_template("a</s>")[0].tolist()[-1] == 1


def test_a_template_s_text_has_its_special_tokens_and_offsets(bpe, content, tmp_path):
  text = "größer<|endoftext|> x"
  ids, offsets = bpe.encode_template(text)
  assert bpe.end in ids.tolist()
  assert ids.dtype == np.uint32
  assert offsets.dtype == np.int64
  where = ids.tolist().index(bpe.end)
  assert offsets[where].tolist() == [6, 19]
  assert offsets[where + 1 :].tolist()[0][0] == 19  # a token's space is part of it
  assert bpe.decode(ids) == text.encode()
  # A post-processor that trims offsets, or puts tokens around a text, does neither.
  trim = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
  both = {"type": "Sequence", "processors": [trim, around(before=["!"])]}
  one = tokenizer.load(
    save(tmp_path, changed(content, post_processor=both), {"eos_token": "<|endoftext|>"})
  )
  assert one.encode_template(text)[0].tolist() == ids.tolist()
  assert one.encode_template(text)[1].tolist() == offsets.tolist()
  assert bpe.encode_template("")[1].shape == (0, 2)


# ------------------------------ which id ends a document ------------------------------


def around(before=(), after=()):
  """Returns a post-processor that puts tokens before and after a text."""
  token = lambda name: {"SpecialToken": {"id": name, "type_id": 0}}  # noqa: E731
  single = [*map(token, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(token, after)]
  names = {"<|endoftext|>": 0, "!": 1, '"': 2}
  used = {name: {"id": name, "ids": [names[name]], "tokens": [name]} for name in (*before, *after)}
  pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
  return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used}


@pytest.mark.parametrize(
  ("config", "others", "processor", "end", "start"),
  [
    ({"eos_token": "!"}, {}, None, 1, 1),
    ({"eos_token": {"content": "!"}}, {}, None, 1, 1),
    ({"eos_token": None}, {"special_tokens_map": {"eos_token": {"content": "!"}}}, None, 1, 1),
    ({}, {"generation_config": {"eos_token_id": 2}}, None, 2, 2),
    ({}, {"generation_config": {"eos_token_id": [3, 2]}}, None, 3, 3),
    ({"eos_token": "!"}, {"generation_config": {"eos_token_id": 2}}, None, 1, 1),
    ({}, {}, around(after=["!"]), 1, 1),
    # BOS: what the post-processor writes, and what add_bos_token says; a name alone means nothing.
    ({"eos_token": "!", "bos_token": '"'}, {}, None, 1, 1),
    ({"eos_token": "!", "bos_token": '"', "add_bos_token": True}, {}, None, 1, 2),
    ({"eos_token": "!", "bos_token": '"'}, {}, around(before=['"']), 1, 2),
    ({"eos_token": "!"}, {}, around(before=['"'], after=["!"]), 1, 2),
    ({"eos_token": "!", "bos_token": '"', "add_bos_token": False}, {}, around(['"']), 1, 1),
    ({"eos_token": "!", "bos_token": "!"}, {}, around(before=["!"]), 1, 1),
  ],
)
def test_the_files_say_which_ids_end_and_begin_a_document(
  config, others, processor, end, start, content, tmp_path
):
  save(tmp_path, changed(content, post_processor=processor), config)
  for name, value in others.items():
    (tmp_path / f"{name}.json").write_text(json.dumps(value))
  one = tokenizer.load(tmp_path)
  assert (one.end, one.start, one.has_bos) == (end, start, start != end)
  assert {*one.files} == {"tokenizer.json", "tokenizer_config.json", *(f"{n}.json" for n in others)}
  assert one.encode(["a"])[0].tolist() == [content["model"]["vocab"]["a"]]


def test_a_special_token_that_is_an_ordinary_piece_remains_in_texts(content, tmp_path, bpe):
  own = changed(content, added_tokens=[*content["added_tokens"], added(1, "!"), added(2, '"')])
  assert any(merge[0] == '"' for merge in own["model"]["merges"])
  one = tokenizer.load(save(tmp_path, own, {"eos_token": "<|endoftext|>", "pad_token": "!"}))
  assert one.special == {"<|endoftext|>": 0, "!": 1, '"': 2}
  text = '!a! """b"""\n'
  assert one.encode([text])[0].tolist() == bpe.encode([text])[0].tolist()


@pytest.mark.parametrize("config", [None, {}, {"eos_token": None, "bos_token": "<|endoftext|>"}])
def test_without_an_end_the_files_are_named_with_what_to_write(config, content, tmp_path):
  with pytest.raises(ValueError, match="no file says which id ends a document") as error:
    tokenizer.load(save(tmp_path, content, config))
  said = str(error.value)
  for part in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_"):
    assert part in said
  assert '{"eos_token": "<|endoftext|>"}' in said


def test_an_end_that_is_not_in_the_vocabulary_is_refused(content, tmp_path):
  with pytest.raises(
    ValueError, match=r"tokenizer_config\.json names '</s>' as eos_token, which is"
  ):
    tokenizer.load(save(tmp_path, content, {"eos_token": "</s>"}))


@pytest.mark.parametrize(
  ("parts", "config"),
  [
    ({"added_tokens": [5]}, {}),
    ({"added_tokens": [{"content": "a"}]}, {}),
    ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}}, {}),
    ({}, {"added_tokens_decoder": [5]}),
    ({}, {"additional_special_tokens": 5}),
  ],
)
def test_a_malformed_file_is_refused_with_its_path(parts, config, content, tmp_path):
  folder = save(tmp_path, changed(content, **parts), {"eos_token": "a", **config})
  with pytest.raises(ValueError, match=rf"^data\.tokenizer: .*{tmp_path}/tokenizer"):
    tokenizer.load(folder)


# ------------------------------ decoders ------------------------------


@pytest.mark.parametrize("sequence", [True, False])
def test_pieces_with_a_mark_for_spaces_are_spelled_as_the_library_does(sequence, tmp_path):
  """The form of Llama 2 and Gemma: a space is U+2581, unknown characters are tokens of a byte."""
  pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcs</>", "\u3042"]
  vocabulary = {piece: number for number, piece in enumerate(pieces)}
  decoders, normalizers = tokenizers.decoders, tokenizers.normalizers
  parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
  decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
  marks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
  folder = written(
    tmp_path,
    tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True),
    ["</s>"],
    normalizer=normalizers.Sequence(marks),
    decoder=decoder if sequence else decoders.Metaspace(),
  )
  one, library = tokenizer.load(folder), library_of(folder)
  for text in ("ab c", " a", "a\u3042</s>", "<a>"):
    [ids] = one.encode([text])
    assert ids.tolist() == library.encode(text).ids
    assert (
      one.decode(ids).decode() == library.decode(ids.tolist(), skip_special_tokens=False) == text
    )
  if sequence:
    [ids] = one.encode(["é\U000e0001"])
    assert one.decode(ids).decode() == "é\U000e0001"
    assert [one.token_bytes(i) for i in ids[:3]] == [b" ", b"\xc3", b"\xa9"]
    assert one.decode(ids[:2]) == b"\xc3"


def test_a_decoder_that_looks_at_neighbors_is_the_library_s(tmp_path):
  vocabulary = {"[UNK]": 0, "</s>": 1, "play": 2, "##ing": 3, "he": 4}
  folder = written(
    tmp_path,
    tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"),
    ["[UNK]", "</s>"],
    pre_tokenizer=tokenizers.pre_tokenizers.Whitespace(),
    decoder=tokenizers.decoders.WordPiece(cleanup=False),
  )
  one = tokenizer.load(folder)
  [ids] = one.encode(["he playing x"])
  assert ids.tolist() == [4, 2, 3, 0]
  assert one.decode(ids) == b"he playing [UNK]"
