"""input_pipeline/text/train_tokenizer.py: a byte-level BPE of a user's documents."""

import json
import pathlib
import re
import types

import pytest
import tokenizers

from input_pipeline import tfds_documents
from input_pipeline.shard_writer import content_hash
from input_pipeline.text import documents, files, tokenizer, train_tokenizer
from tests.helpers.syncs import Syncs
from tests.input_pipeline.text import corpora
from tests.input_pipeline.text.conftest import python_files

TEXTS = [b"the cat sat on the mat\n" * 40, "größer über Öl\n".encode() * 30]


@pytest.fixture
def data(tmp_path):
  return types.SimpleNamespace(
    name="text",
    files="corpus/*.jsonl",
    text_feature="",
    tokenizer="",
    data_dir=str(tmp_path),
    sources=(),
  )


def test_a_trained_tokenizer_is_the_library_s_and_encodes_any_bytes(bpe, trained):
  library = tokenizers.Tokenizer.from_file(str(trained / "tokenizer.json"))
  assert bpe.size == library.get_vocab_size() == 512
  assert bpe.end == bpe.start == library.token_to_id("<|endoftext|>")
  assert not bpe.has_bos
  [text] = python_files(1)
  [ids] = bpe.encode([text])
  assert ids.tolist() == library.encode(text.decode()).ids
  assert len(ids) < 0.7 * len(text)
  assert {bpe.token_bytes(i) for i in range(bpe.size)} >= {bytes((b,)) for b in range(256)}


def test_the_same_texts_give_the_same_tokenizer_and_others_another():
  first, second = (train_tokenizer.train(TEXTS, 300) for _ in range(2))
  assert first == second
  assert train_tokenizer.train(TEXTS[:1], 300) != first


def test_few_texts_give_fewer_tokens_than_asked_for():
  made = json.loads(train_tokenizer.train([b"ab ab"], 1000))
  assert len(made["model"]["vocab"]) == 257 + 2  # "ab", " ab"


@pytest.mark.parametrize("size", [0, 256, 2**20 + 1])
def test_a_size_out_of_range_is_refused(size):
  with pytest.raises(ValueError, match=f"--train_tokenizer={size}: .* has 257 .* 1,048,576 tokens"):
    train_tokenizer.train(TEXTS, size)


def test_no_documents_are_refused():
  with pytest.raises(ValueError, match="no document to train a tokenizer on"):
    train_tokenizer.train([], 300)


def test_what_was_trained_for_these_files_is_resolved_and_only_for_them(data, monkeypatch):
  assert tokenizer.resolve(data) == "bytes"
  older = train_tokenizer.store(data, train_tokenizer.train(TEXTS[:1], 300), {"size": 300})
  assert tokenizer.resolve(data) == older
  newer = train_tokenizer.store(data, train_tokenizer.train(TEXTS, 300), {"size": 300})
  assert tokenizer.resolve(data) == newer != older
  assert tokenizer.load(older).digest != tokenizer.load(newer).digest
  assert tokenizer.load(newer).special == {"<|endoftext|>": 0}
  data.files = "corpus/../corpus/*.jsonl , "  # the same
  assert tokenizer.resolve(data) == newer
  with monkeypatch.context() as elsewhere:
    elsewhere.chdir("/")
    assert tokenizer.resolve(data) == "bytes"
  data.files = "other/*.jsonl"
  assert tokenizer.resolve(data) == "bytes"
  data.files, data.name = "", "python_source"
  assert tokenizer.resolve(data) == "bytes"
  of_name = train_tokenizer.store(data, train_tokenizer.train(TEXTS, 290), {})
  assert tokenizer.resolve(data) == of_name
  data.name = "another"
  assert tokenizer.resolve(data) == "bytes"
  data.sources = ({"name": "a", "files": "corpus/*.jsonl"},)
  assert tokenizer.trained_folder(data) != tokenizer.trained_folder(
    types.SimpleNamespace(**{**vars(data), "sources": ({"name": "a", "files": "b"},)})
  )
  data.tokenizer = "mine"
  assert tokenizer.resolve(data) == "mine"


def test_no_half_written_tokenizer_is_taken(data, monkeypatch):
  content = train_tokenizer.train(TEXTS, 300)
  replace = train_tokenizer.files.replace

  def full(path, text, **options):
    if path.name == "tokenizer.json":
      raise OSError(28, "No space left on device", str(path))
    replace(path, text, **options)

  monkeypatch.setattr(train_tokenizer.files, "replace", full)
  with pytest.raises(ValueError, match=r"cannot be written to .*No space left.*data\.data_dir"):
    train_tokenizer.store(data, content, {})
  assert tokenizer.resolve(data) == "bytes"
  monkeypatch.undo()
  assert train_tokenizer.store(data, content, {}) == tokenizer.resolve(data)


def test_a_data_set_s_tokenizer_is_trained_once_for_each_size_split_and_python(data, monkeypatch):
  trained, version, original = [], ["3.11.7"], train_tokenizer.train
  data.name, data.files, data.train_split, data.max_bad_records = "python_source", "", "train", 0

  def train(texts, size, tick):
    trained.append(size)
    return original(TEXTS, size)

  monkeypatch.setattr(train_tokenizer, "train", train)
  monkeypatch.setattr(tfds_documents, "texts", lambda *_: TEXTS)
  monkeypatch.setattr(train_tokenizer.platform, "python_version", lambda: version[0])
  folders = [train_tokenizer.trained_once(data, size) for size in (290, 300, 290, 300)]
  assert trained == [290, 300]
  assert folders[:2] == folders[2:]
  data.train_split = "train[:50%]"
  train_tokenizer.trained_once(data, 300)
  version[0] = "3.13.0"
  train_tokenizer.trained_once(data, 300)
  assert trained == [290, 300, 300, 300]
  data.name = "another"
  train_tokenizer.trained_once(data, 300)
  version[0] = "3.14.0"  # its documents do not depend on it
  train_tokenizer.trained_once(data, 300)
  assert len(trained) == 5


def test_a_damaged_pointer_to_a_trained_tokenizer_is_named(data):
  train_tokenizer.store(data, train_tokenizer.train(TEXTS, 300), {})
  current = tokenizer.trained_folder(data) / "current.json"
  current.write_text("{")
  with pytest.raises(ValueError, match=r"current\.json cannot be read .*train again"):
    tokenizer.resolve(data)


def test_a_sample_takes_an_even_share_of_each_unit(tmp_path, monkeypatch):
  monkeypatch.setattr(train_tokenizer, "_LEAST_OF_UNIT", 1)
  for name in "abcd":
    lines = [json.dumps({"text": f"{name}{i:02}" + "x" * 97}) for i in range(20)]
    (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, "{"]))
  units, bad = documents.units(files.find(str(tmp_path))), []
  everything = [*train_tokenizer.sample(units, "text", bad.append)]
  assert len(everything) == 80
  assert {item.where.rpartition("/")[2] for item in bad} == {f"{n}.jsonl:21" for n in "abcd"}
  some = [*train_tokenizer.sample(units, "text", bad.append, 1200)]
  assert sorted(text[:3] for text in some) == [
    f"{n}{i:02}".encode() for n in "abcd" for i in range(3)
  ]


def test_it_is_trained_on_every_source_and_on_nothing_that_is_held_out(tmp_path, monkeypatch):
  seen = []

  def train(given, size, tick):
    seen.extend(given)
    return b"{}"

  monkeypatch.setattr(train_tokenizer, "train", train)
  web, code = corpora.texts(200), corpora.texts(50, seed=1)
  corpora.write_lines(tmp_path / "web.jsonl", web)
  corpora.write_lines(tmp_path / "code.jsonl", code)
  sources = (
    {"name": "web", "files": f"{tmp_path}/web.jsonl", "weight": 1.0},
    {"name": "code", "files": f"{tmp_path}/code.jsonl", "weight": 1.0, "evaluation_files": "x"},
  )
  data = corpora.section("", tmp_path / "data", sources=sources, evaluation_fraction=0.3)
  train_tokenizer.train_on(data, 300)
  taken = {text.decode() for text in seen}
  assert {*code} <= taken, "all of what has a validation split of its own"
  assert 100 < len(taken & {*web}) < 180
  assert all(content_hash(text.encode()) >= 0.3 * 2**64 for text in taken & {*web})


def test_what_is_beside_a_tokenizer_is_on_the_disk_before_it(data, monkeypatch):
  syncs = Syncs(monkeypatch)
  folder = pathlib.Path(train_tokenizer.store(data, train_tokenizer.train(TEXTS, 300), {}))
  path = folder / "tokenizer.json"
  assert syncs.unsynced_at(path) == []
  renamed = next(i for i, event in enumerate(syncs.events) if path in event[2:3])
  assert syncs.place("sync", folder) < renamed


# ------------------------------ characters ------------------------------


def test_characters_are_ids_in_their_order_and_what_is_unseen_is_bytes(data):
  text = "größer als Öl\n"
  content = train_tokenizer.characters([text.encode(), b"als <0x41>"])
  coder = tokenizer.load(train_tokenizer.store(data, content, {train_tokenizer.UNSEEN: ""}))
  known = sorted({*text, *"als <0x41>"})
  assert (coder.end, coder.size, coder.characters) == (0, 1 + len(known) + 256, {*known})
  other = "a€A<0x41>"
  ids, unseen = coder.encode([text, other])
  assert ids.tolist() == [1 + known.index(letter) for letter in text]
  first = 1 + len(known)
  assert unseen.tolist() == [
    *(1 + known.index("a"), *(first + byte for byte in "€".encode()), first + ord("A")),
    *(1 + known.index(letter) for letter in "<0x41>"),
  ]
  assert coder.decode(unseen) == other.encode() == b"".join(map(coder.token_bytes, unseen))
  assert coder.encode(["<|endoftext|>"])[0].min() > 0


def test_characters_are_of_what_is_trained_on_and_follow_the_files(tmp_path):
  corpora.write_lines(tmp_path / "a.jsonl", ["abc", "cab", "bca"])
  corpora.write_lines(tmp_path / "b.jsonl", ["aé€b"])
  data = corpora.section(
    f"{tmp_path}/a.jsonl", tmp_path / "data", evaluation_files=f"{tmp_path}/b.jsonl"
  )
  data.tokenizer = "characters"
  assert tokenizer.resolve(data) == "characters", "for a layout before the text"
  with pytest.raises(ValueError, match=r"characters of these data are not known .*`prepare` with"):
    tokenizer.load("characters")
  folder = train_tokenizer.trained_once(data, None)
  assert tokenizer.load(folder).characters == {*"abc"}
  said = tokenizer.unseen_text("the evaluation split", train_tokenizer.unseen_of(folder))
  assert re.match(r"the evaluation split has 2 characters .*\('é' '€'\): each is encoded as", said)
  assert train_tokenizer.trained_once(data, None) == folder == tokenizer.resolve(data)
  corpora.write_lines(tmp_path / "a.jsonl", ["abcd"])
  changed = train_tokenizer.trained_once(data, None)
  assert tokenizer.load(changed).characters == {*"abcd"}
  data.tokenizer = ""
  assert tokenizer.resolve(data) == "bytes", "a run that asks for none does not get characters"
