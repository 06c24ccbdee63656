"""Several sources as one: training batches, the evaluation of each, files."""

import dataclasses

import numpy as np
import pytest

from input_pipeline import mixture, row_source, rows
from input_pipeline.batches import EvaluationBatches, TrainingBatches
from input_pipeline.mixture import check_epochs, combine
from input_pipeline.position import Position
from input_pipeline.row_source import array_source
from input_pipeline.source import BadRecords, UnreadableError
from tests.input_pipeline.text.corpora import section, texts, write_lines

SIZES = {"web": 21, "code": 9, "books": 5}
STAGES = ((0, {"web": 0.5, "code": 0.25, "books": 0.25}),)


def source_of(name, rows):
  """Returns rows that say where they are from: 1000 * the source + the row."""
  values = 1000 * list(SIZES).index(name) + np.arange(rows, dtype=np.int32)
  return array_source(name, {"values": values, "weights": np.ones(rows, np.float32)})


def sources():
  return {name: source_of(name, rows) for name, rows in SIZES.items()}


def unreadable(source, row):
  """Returns the source with a row that raises."""

  def read(indices):
    if row in indices:
      raise UnreadableError(f"{source.name}: row {row}", {row: "torn"})
    return source.read(indices)

  return dataclasses.replace(source, read=read, bad=BadRecords((row,), (), "torn"))


def test_rows_are_numbered_one_source_after_the_other():
  source = combine("mixture", sources(), stages=STAGES)
  assert len(source) == 35
  ids = np.array([34, 0, 20, 21, 29, 30])
  assert source.read(ids)["values"].tolist() == [2004, 0, 20, 1000, 1008, 2000]
  assert source.read(ids[:0])["values"].shape == (0,)
  fewer = combine("mixture", {**sources(), "books": source_of("books", 4)}, stages=STAGES)
  assert fewer.fingerprint != source.fingerprint


def test_the_origins_of_a_row_are_those_of_its_source():
  code = dataclasses.replace(source_of("code", 9), origins=lambda row: [f"document {row} of c"])
  source = combine("mixture", {**sources(), "code": code})
  assert source.origins(23) == ["code: document 2 of c"]
  assert source.origins(20) == ["web"]  # which does not know more


def test_an_unreadable_row_keeps_its_number():
  damaged = {**sources(), "code": unreadable(source_of("code", 9), 2)}
  source = combine("mixture", damaged)
  assert source.bad.rows == (23,)
  with pytest.raises(UnreadableError, match="code: row 2") as raised:
    source.read(np.array([1, 23]))
  assert raised.value.rows == {23: "torn"}


def test_a_source_that_the_run_would_exhaust_is_refused_with_the_numbers():
  limits = {"web": 1, "code": 0, "books": 2}
  source = combine("mixture", sources(), stages=STAGES, maximum_epochs=limits)
  order = TrainingBatches(source, global_batch_size=4, seed=0).order
  check_epochs(order, 40, Position.start(4), 10)  # 20, 10 and 10 rows: books twice
  with pytest.raises(ValueError, match="web") as raised:
    check_epochs(order, 48, Position.start(4), 12)
  lines = str(raised.value).splitlines()
  assert len(lines) == 2
  assert lines[0].startswith(
    "source 'web' of data.sources has 21 rows, and 12 steps take 24 of it, 1.14 epochs, but its"
    " maximum_epochs is 1; set maximum_epochs=2 (0: no limit)"
  )
  assert "source 'books'" in lines[1]


def test_no_evaluation_batch_holds_rows_of_two_sources():
  source = combine("mixture", sources())
  batches = EvaluationBatches(source, global_batch_size=4)
  found = [batches.row_ids(i) for i in range(len(batches))]
  assert [batches.part(i) for i in range(5)] == ["web", "code", "books", "web", "code"]
  for index, ids in enumerate(found):
    names = {list(SIZES)[value // 1000] for value in source.read(ids[ids >= 0])["values"]}
    assert names == {batches.part(index)}
  everything = np.concatenate(found)
  assert sorted(everything[everything >= 0]) == list(range(35))
  # Two batches of each source, of which books has 5 rows.
  assert batches.count(2) == 6
  assert batches.examples(6) == 8 + 8 + 5
  assert batches.count(0) == len(batches) == 6 + 3 + 2
  one = EvaluationBatches(source_of("web", 10), global_batch_size=4)
  assert [one.part(i) for i in range(3)] == ["", "", ""]


@pytest.mark.parametrize("other", ["empty", "fields"])
def test_sources_that_do_not_go_together_are_refused(other):
  wrong = source_of("code", 0)
  if other == "fields":
    wrong = array_source("code", {"values": np.zeros((3, 2), np.int32)})
  with pytest.raises(ValueError, match="source 'code'"):
    combine("mixture", {**sources(), "code": wrong})


# ------------------------------ of files ------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """Returns the `data` section of two sources, one of them of longer documents."""
  folder = tmp_path_factory.mktemp("mixed")
  write_lines(folder / "web" / "a.jsonl", texts(120))
  write_lines(folder / "code" / "b.jsonl", texts(80, seed=1, longest=12))
  sources = (
    {"name": "web", "files": f"{folder}/web", "weight": 1.0, "maximum_epochs": 0},
    {"name": "code", "files": f"{folder}/code", "weight": 1.0},
  )
  keys = {"files": "", "packing": "none", "train_split": "train"}
  return section("", folder / "data", sources=sources, stages=((50, {"web": 1.0}),), **keys)


def test_the_rows_of_each_source_are_those_of_it_alone(data):
  source = row_source.open_source(data, "train", 3)
  assert [part.name for part in source.parts] == ["web", "code"]
  first = 0
  for part, entry in zip(source.parts, data.sources, strict=True):
    alone = rows.open_source(mixture.data_of(data, entry), "train", 3)
    numbers = np.arange(part.rows)
    found, expected = source.read(first + numbers), alone.read(numbers)
    for field, values in expected.items():
      np.testing.assert_array_equal(found[field], values)
    assert (part.tokens, part.bytes_per_token) == (alone.report["tokens"], alone.bytes_per_token)
    assert source.report[f"tokens/{part.name}"] == part.tokens
    first += part.rows
  assert source.stages == ((0, {"web": 1.0, "code": 1.0}), (50, {"web": 1.0}))
  assert [part.maximum_epochs for part in source.parts] == [0, 1]


def test_each_source_has_its_share_of_the_tokens(data):
  source = row_source.open_source(data, "train", 3)
  training = TrainingBatches(source, global_batch_size=4, seed=0)
  ids = np.concatenate([training.row_ids(step) for step in range(50)])
  tokens = source.read(ids)["weights"].sum(axis=1)
  of_web = tokens[ids < source.parts[0].rows].sum()
  # Rows are chosen by the mean of a source's rows; those that came so far are a sample of them.
  assert of_web == pytest.approx(tokens.sum() / 2, rel=0.06)
  after = np.concatenate([training.row_ids(step) for step in range(50, 60)])
  assert after.max() < source.parts[0].rows


def test_what_is_wrong_with_a_source_names_it(data):
  broken = data.copy_and_resolve_references()
  broken.sources = ({**data.sources[0], "files": "/nowhere/at-all"},)
  with pytest.raises(ValueError, match=r"source 'web' of data\.sources: .*/nowhere/at-all"):
    row_source.open_source(broken, "train", 3)
