"""A mixture of folders of text, as one source."""

import numpy as np
import pytest

from input_pipeline import mixture, row_source, rows
from input_pipeline.batches import EvaluationBatches, TrainingBatches
from tests.input_pipeline.text.corpora import section, texts, write_lines


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


def test_each_source_is_evaluated_by_itself(data):
  batches = EvaluationBatches(row_source.open_source(data, "test", 3), global_batch_size=2)
  assert {batches.part(i) for i in range(len(batches))} == {"web", "code"}


def test_what_is_wrong_with_a_source_names_it(data):
  broken = data.copy_and_resolve_references()
  broken.sources = ({**data.sources[0], "files": "/nowhere/at-all"},)
  with pytest.raises(ValueError, match=r"source 'web' of data\.sources: .*/nowhere/at-all"):
    row_source.open_source(broken, "train", 3)
