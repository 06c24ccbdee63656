"""Rows of stored documents: what is predicted from what, splits by content, damage, resume."""

import dataclasses
import itertools

import numpy as np
import pytest
from etils import epath
from ml_collections import ConfigDict

from input_pipeline import packing, row_source, rows, shard_writer, store
from tests.input_pipeline.text.corpora import section, texts, write_lines

T = 32
START, END = 5, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder with 200 short documents, and one of several records."""
  folder = tmp_path_factory.mktemp("corpus")
  write_lines(folder / "a.jsonl", texts(150))
  write_lines(folder / "b.jsonl", [*texts(50, seed=1), "x" * 9000 + "y" * 500])
  return folder


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


@pytest.fixture
def data(folder, data_dir):
  """Returns a function from keys to the config's `data` section."""
  return lambda **keys: section(folder, data_dir, sequence_length=T, **keys)


def read_all(source):
  return source.read(np.arange(len(source)))


def documents_of(found):
  """Returns the documents that rows predict, in the order of the rows: lists of targets."""
  documents = []
  for targets, weights, segments in zip(
    found["targets"], found["weights"], found["segments"], strict=True
  ):
    for number in range(segments.max() + 1):
      here = (segments == number) & (weights > 0)
      if here.any():
        documents.append(targets[here].tolist())
  return documents


def joined(documents):
  return [*itertools.chain.from_iterable(documents)]


def encoded(documents):
  return [[*text.encode(), 0] for text in documents]


# ---- each packing, against a plain loop over the documents ----


class Encoder:
  """A tokenizer of 300 ids: a character's code, with a BOS of its own if asked."""

  def __init__(self, has_bos):
    self.name, self.size, self.digest = "made up", 300, f"made up {has_bos}"
    self.end, self.has_bos = END, has_bos
    self.start = START if has_bos else END

  def encode(self, documents):
    return [np.frombuffer(text, np.uint8).astype(np.uint32) + 8 for text in documents]


def prepared_by(encoder, folder, documents, masks=None):
  folder = epath.Path(folder)
  folder.mkdir(exist_ok=True)

  def fill(shard):
    for number, document in enumerate(documents):
      shard.add(np.asarray(document), len(document), number, masks[number] if masks else None)

  shard_writer.write_shard(folder / "a", encoder.size, {}, fill)
  return store.open_prepared(folder, ["a"], encoder, "here", 0)


def loop(packed, inputs_of, targets_of, trained_of):
  """Returns the fields of all rows, written piece by piece and slot by slot."""
  shape = (len(packed), T)
  found = {name: np.zeros(shape, int) for name in ("tokens", "targets", "weights", "segments")}
  for row in range(len(packed)):
    slot = 0
    for number, piece in enumerate(range(packed.starts[row], packed.starts[row + 1])):
      document = packed.document[piece]
      for i in range(packed.first[piece], packed.first[piece] + packed.count[piece]):
        found["tokens"][row, slot] = inputs_of(document, i)
        found["targets"][row, slot] = targets_of(document, i)
        found["weights"][row, slot] = trained_of(document, i)
        found["segments"][row, slot] = number
        slot += 1
    found["segments"][row, slot:] = number + 1
  return found


def settings(name):
  return ConfigDict({"name": "text", "packing": name, "sequence_length": T, "max_bad_records": 0})


@pytest.mark.parametrize("has_bos", [False, True])
@pytest.mark.parametrize("algorithm", packing.ALGORITHMS)
def test_each_token_is_predicted_from_the_ones_before_it(tmp_path, algorithm, has_bos):
  draw, encoder = np.random.default_rng(2), Encoder(has_bos)
  documents = [[*draw.integers(8, 300, n).tolist(), END] for n in draw.integers(1, 90, 40)]
  documents[3] = [*draw.integers(8, 300, 9000).tolist(), END]
  prepared = prepared_by(encoder, tmp_path, documents)
  source = rows.source_of(prepared, np.arange(40), "here", settings(algorithm), seed=4)
  begin = [END, START] if has_bos and algorithm == "concatenate" else [encoder.start]
  streams = [[*begin, *document] for document in documents]
  packed = packing.pack([len(s) - 1 for s in streams], T, algorithm, seed=4)
  wanted = loop(packed, lambda d, i: streams[d][i], lambda d, i: streams[d][i + 1], lambda d, i: 1)
  found = read_all(source)
  for name, array in wanted.items():
    np.testing.assert_array_equal(found[name], array, err_msg=name)
  assert {name: (a.shape[1:], a.dtype) for name, a in found.items()} == source.fields
  # In any order, and some of them twice.
  some = draw.integers(0, len(source), 9)
  for name, array in source.read(some).items():
    np.testing.assert_array_equal(array, found[name][some])
  if algorithm == "concatenate":
    # As one stream, cut every T tokens.
    stream = np.concatenate([[START, *d] if has_bos else d for d in documents])
    taken = found["weights"].ravel() > 0
    np.testing.assert_array_equal(found["targets"].ravel()[taken], stream[1:])
    np.testing.assert_array_equal(found["tokens"].ravel()[taken], stream[:-1])


def test_of_a_conversation_the_learned_tokens_have_weight(tmp_path):
  draw = np.random.default_rng(2)
  documents = [draw.integers(8, 300, n).tolist() for n in draw.integers(2, T + 2, 30)]
  masks = [draw.integers(0, 2, len(d)).astype(bool) for d in documents]
  prepared = prepared_by(Encoder(True), tmp_path, documents, masks)
  source = rows.source_of(prepared, np.arange(30), "here", settings("best_fit"), seed=4)
  packed = packing.pack([len(d) - 1 for d in documents], T, "best_fit", seed=4)
  wanted = loop(
    packed,
    lambda d, i: documents[d][i],
    lambda d, i: documents[d][i + 1],
    lambda d, i: masks[d][i + 1],
  )
  for name, array in wanted.items():
    np.testing.assert_array_equal(read_all(source)[name], array, err_msg=name)
  documents[4] = [9] * (T + 2)
  prepared = prepared_by(
    Encoder(True), tmp_path / "b", documents, [[1] * len(d) for d in documents]
  )
  with pytest.raises(ValueError, match=r"1 of 30 documents take more than data.sequence_length=32"):
    rows.source_of(prepared, np.arange(30), "here", settings("best_fit"), seed=4)


# ---- text in files ----


def test_each_document_is_in_one_split_and_equal_ones_in_the_same(data, tmp_path):
  sources = {split: row_source.open_source(data(), split, 0) for split in rows.SPLITS}
  found = {split: documents_of(read_all(source)) for split, source in sources.items()}
  assert 1 <= sources["test"].report["documents"] <= 30
  wanted = encoded([*texts(150), *texts(50, seed=1), "x" * 9000 + "y" * 500])
  both = [*found["train"], *found["test"]]
  assert sorted(joined(both)) == sorted(joined(wanted))
  short = [d for d in wanted if len(d) <= T]
  assert all(document in both for document in short)
  # Twice the same documents under another name: each copy is where the other one is.
  twice = section(tmp_path, tmp_path / "data", sequence_length=T)
  for name in "ab":
    write_lines(tmp_path / f"{name}.jsonl", texts(150))
  test = row_source.open_source(twice, "test", 0)
  held_out = sorted(tuple(d) for d in documents_of(read_all(test)))
  assert held_out[::2] == held_out[1::2] != []


def test_evaluation_files_are_the_test_split(data, folder, tmp_path):
  write_lines(tmp_path / "held_out.jsonl", ["only this"])
  keys = {"evaluation_files": f"{tmp_path}/*.jsonl"}
  test = row_source.open_source(data(**keys), "test", 0)
  assert documents_of(read_all(test)) == encoded(["only this"])
  assert row_source.open_source(data(**keys), "train", 0).report["documents"] == 201
  with pytest.raises(ValueError, match=r"data.evaluation_files: there is no file or folder .*/no"):
    row_source.open_source(data(evaluation_files=f"{tmp_path}/no"), "test", 0)


def test_what_a_split_reports(data):
  source = row_source.open_source(data(), "train", 0)
  report = source.report
  assert report["tokens"] + report["padding"] == T * report["rows"] == T * len(source)
  assert report["bytes"] == report["tokens"] == int(read_all(source)["weights"].sum())
  assert source.bytes_per_token == 1.0
  assert report["split_documents"] >= 1
  assert (source.ids, source.tokenizer) == (256, "")
  concatenated = row_source.open_source(data(packing="concatenate"), "train", 0)
  assert concatenated.bytes_per_token == 1.0
  assert concatenated.report["padding"] < T


def test_a_row_says_which_documents_of_which_file_it_has(data, folder):
  source = row_source.open_source(data(), "train", 0)
  files = {"a.jsonl": texts(150), "b.jsonl": [*texts(50, seed=1), "x" * 9000 + "y" * 500]}
  seen = set()
  for row in range(0, len(source), 7):
    found = documents_of(source.read(np.array([row])))
    origins = source.origins(row)
    assert len(origins) == len(found)
    for targets, origin in zip(found, origins, strict=True):
      number, path = origin.removeprefix("document ").split(" of ")
      name = path.removeprefix(f"{folder}/")
      text = [one for one in files[name] if one][int(number)].encode() + b"\0"
      assert bytes(targets) in text, origin
      seen.add(name)
  assert seen == {*files}


def test_the_evaluation_s_rows_are_the_same_for_every_seed(data):
  for split, same in (("test", True), ("train", False)):
    prints = {row_source.open_source(data(), split, seed).fingerprint for seed in (0, 1)}
    assert (len(prints) == 1) == same


def test_a_fingerprint_follows_from_content_and_not_from_paths(data, folder, tmp_path):
  first = row_source.open_source(data(), "train", 0).fingerprint
  for file in folder.glob("*.jsonl"):
    (tmp_path / file.name).write_bytes(file.read_bytes())
  moved = section(tmp_path, tmp_path / "data", sequence_length=T)
  assert row_source.open_source(moved, "train", 0).fingerprint == first
  others = [{"packing": "none"}, {"evaluation_fraction": 0.3}, {"sequence_length": T + 1}]
  for keys in others:
    other = section(
      **{"folder": tmp_path, "data_dir": tmp_path / "data", "sequence_length": T} | keys
    )
    assert row_source.open_source(other, "train", 0).fingerprint != first
  (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("0 ", "1 ", 1))
  assert row_source.open_source(moved, "train", 0).fingerprint != first


def test_wrong_splits_are_refused(data, tmp_path):
  with pytest.raises(ValueError, match=r"data.name='text' has no split 'test\[:1\]'; it has train"):
    row_source.open_source(data(), "test[:1]", 0)
  write_lines(tmp_path / "a.jsonl", ["one alone"])
  one = section(tmp_path, tmp_path / "data")
  with pytest.raises(
    ValueError, match=r"1 document, and none is left to train on .*; name the documents"
  ):
    row_source.open_source(one, "train", 0)
  write_lines(tmp_path / "a.jsonl", ["", ""])
  with pytest.raises(ValueError, match=r"no document in it has any text \(2 are empty\)"):
    row_source.open_source(one, "train", 0)


def test_one_text_file_alone_is_divided_as_nanogpt_divides_it(tmp_path):
  text = "".join(texts(40))
  (tmp_path / "a.txt").write_text(text)
  file, keys = f"{tmp_path}/a.txt", {"evaluation_fraction": 0.1, "packing": "concatenate"}
  cut = int(len(text) * 0.9)
  for split, part in (("train", text[:cut]), ("test", text[cut:])):
    source = row_source.open_source(section(file, tmp_path / "data", **keys), split, 0)
    predicted = bytes(joined(documents_of(read_all(source))))
    assert predicted == part.encode()[1:] + b"\0", "all but what a stream begins with"
    assert {"train": "first 90 %", "test": "last 10 %"}[split] in source.name
  (tmp_path / "b.txt").write_text("another")
  both = row_source.open_source(section(tmp_path, tmp_path / "data", **keys), "train", 0)
  assert both.report["documents"] == 1, "whole files are held out where there are several"
  (tmp_path / "a.txt").write_text("a")
  with pytest.raises(ValueError, match=r"too short to be divided: its last 10 % are the evaluat"):
    row_source.open_source(section(file, tmp_path / "data", **keys), "test", 0)


def test_an_id_beyond_the_vocabulary_is_refused_with_the_numbers(data):
  source = row_source.open_source(data(), "train", 0)
  row_source.check_ids(source, 256)
  with pytest.raises(ValueError, match=r"holds token \d+, but model.vocabulary_size=100 allows"):
    row_source.check_ids(source, 100)
  other = dataclasses.replace(source, tokenizer="a/tokenizer.json", ids=300)
  message = r"the tokenizer a/tokenizer.json has 300 tokens, but model.vocabulary_size=256 .*=300"
  with pytest.raises(ValueError, match=message):
    row_source.check_ids(other, 256)


# ---- records that cannot be read ----


@pytest.fixture
def damaged(folder, tmp_path):
  """Data of which the second record of the last document is damaged, and that document's shard."""
  made = section(folder, tmp_path, sequence_length=T)
  row_source.open_source(made, "train", 0)
  [shard] = [
    p.parent
    for p in epath.Path(tmp_path).glob("prepared/text/*/*/tokens*")
    if b"y" * 400 in p.read_bytes()
  ]
  path = shard / store.TOKENS
  content = bytearray(path.read_bytes())
  content[content.index(b"y" * 400) + 9] ^= 1
  path.write_bytes(bytes(content))
  return made, shard


def test_with_a_limit_its_rows_have_weight_0(damaged):
  made, shard = damaged
  plain = row_source.open_source(made, "train", 0)
  made.max_bad_records = 5
  with pytest.raises(
    ValueError, match=r"text train: (\d+) of .* rows cannot be read, more than"
  ) as e:
    row_source.open_source(made, "train", 0)
  count = int(str(e.value).split()[2])
  made.max_bad_records = count
  source = row_source.open_source(made, "train", 0)
  found = read_all(source)
  bad = np.array(source.bad.rows)
  assert len(bad) == len(source.bad) == count
  assert f"document 50 of {shard}" in source.bad.why
  assert not any(found[name][bad].any() for name in found)
  good = np.setdiff1d(np.arange(len(source)), bad)
  for name, array in plain.read(good).items():
    np.testing.assert_array_equal(found[name][good], array)
