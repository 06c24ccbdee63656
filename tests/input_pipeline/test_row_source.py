"""Reading rows, and random_normal."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from input_pipeline import row_source


@pytest.fixture
def normal(config):
  """Returns a function that opens random_normal of 40 rows, 5 inputs and 3 targets."""

  def make(seed=7, split="train", **changes):
    sizes = {"examples": 40, "input_size": 5, "target_size": 3} | changes
    return row_source.open_source(config("random_normal", "random", **sizes), split, seed)

  return make


def test_random_normal_is_the_same_everywhere(normal):
  row = normal().read(np.array([0]))
  # The first draws of NumPy's Philox with key 7.
  inputs = [-1.7496944665908813, 0.5745441317558289, 0.6142833828926086, 0.29785972833633423]
  np.testing.assert_array_equal(row["inputs"][0, :4], np.array(inputs, np.float32))
  targets = [-1.2292683124542236, -0.6155326962471008, 0.2075999677181244]
  np.testing.assert_array_equal(row["targets"][0], np.array(targets, np.float32))


def test_random_normal_depends_on_the_seed_alone(normal):
  everything = np.arange(40)
  assert normal().fingerprint == normal(split="test").fingerprint != normal(seed=8).fingerprint
  longer = normal(examples=50)
  np.testing.assert_array_equal(
    longer.read(everything)["inputs"], normal().read(everything)["inputs"]
  )
  assert longer.fingerprint != normal().fingerprint


def test_tokens_of_arrays_must_be_in_the_vocabulary():
  arrays = {"tokens": np.array([[3, 5], [4, 0]]), "targets": np.array([[5, 9], [0, 1]])}
  source = row_source.array_source("mine", arrays)
  row_source.check_ids(source, 10)
  with pytest.raises(ValueError, match=r"mine: row 0 holds token 9.*set model\.vocabulary_size=10"):
    row_source.check_ids(source, 9)
  assert row_source.array_source("classes", {"targets": np.array([9])}).ids == 0


def test_reading_no_rows(config, tiny_text, tiny_images):
  for data in (
    config(tiny_text, sequence_length=9),
    config(tiny_images, "image", input_size=15, target_size=4),
  ):
    source = row_source.open_source(data, "train", seed=0)
    rows = source.read(np.zeros(0, np.int64))
    assert {f: (a.shape, a.dtype) for f, a in rows.items()} == {
      f: ((0, *shape), dtype) for f, (shape, dtype) in source.fields.items()
    }


def test_a_row_number_out_of_range(config, tiny_text):
  source = row_source.open_source(config(tiny_text), "train", seed=0)
  with pytest.raises(IndexError, match=r"tiny_text:1.2.0 train.* not all in 0..6"):
    source.read(np.array([0, 7]))


def test_a_registered_data_source_is_opened_by_its_function(monkeypatch):
  def count(data, split, seed):
    return row_source.array_source(f"{data.name} {split}", {"x": np.arange(seed, dtype=np.int32)})

  monkeypatch.setitem(row_source.SOURCES, "counting", count)
  data = ConfigDict({"name": "counting", "kind": "text", "max_bad_records": 0})
  source = row_source.open_source(data, "train", 5)
  assert (source.name, len(source)) == ("counting train", 5)
  assert source.fingerprint != row_source.open_source(data, "train", 6).fingerprint
  data.max_bad_records = 1
  with pytest.raises(ValueError, match="'counting' finds its bad records itself; set it to 0"):
    row_source.open_source(data, "train", 5)


def test_a_data_source_that_fails_is_named(monkeypatch):
  data = ConfigDict({"name": "mine", "kind": "text", "max_bad_records": 0})
  monkeypatch.setitem(row_source.SOURCES, "mine", lambda data, split, seed: 1 / 0)
  with pytest.raises(ValueError, match=r"'mine' fails, split 'test': .*ZeroDivisionError"):
    row_source.open_source(data, "test", 0)
  monkeypatch.setitem(row_source.SOURCES, "mine", lambda data, split, seed: [1])
  with pytest.raises(ValueError, match="'mine' returns a list, not a"):
    row_source.open_source(data, "test", 0)
