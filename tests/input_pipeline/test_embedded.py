"""The data sets that every machine has."""

import ast
import collections
import pathlib
import sys

import numpy as np
import pytest

from input_pipeline import catalog, embedded, row_source
from tests.input_pipeline.writing import write


def examples(name, split):
  reference = catalog.embedded_reference(catalog.parse_name(name))
  return [item.value for item in embedded.examples(reference, split)]


def test_python_source_is_the_library_without_its_tests():
  train, test = (examples("python_source", split) for split in ("train", "test"))
  documents = {one["path"]: one["text"] for one in [*train, *test]}
  assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= documents.keys()
  parts = {part for path in documents for part in path.split("/")}
  assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
  assert documents["ast.py"] == pathlib.Path(ast.__file__).read_bytes()
  assert 0.03 < len(test) / len(documents) < 0.07


def test_digits_are_scaled_and_split():
  train, test = (examples("digits", split) for split in ("train", "test"))
  assert (len(train), len(test)) == (1497, 300)
  pixels = np.stack([one["image"] for one in train])
  assert (pixels.shape[1:], pixels.dtype) == ((8, 8, 1), np.uint8)
  assert (pixels.min(), pixels.max()) == (0, 255)
  held_out = collections.Counter(one["label"] for one in test)
  assert len(held_out) == 10
  assert min(held_out.values()) > 15


@pytest.mark.parametrize("split", ["train", "train[:40%]", "b[3:]+train[-2:]"])
def test_order_and_slices_are_those_of_tfds(tmp_path, monkeypatch, split):
  """Rows of a split that TFDS has stored before are the same."""
  made = {
    name: {f"k{n}": {"n": n} for n in range(size)} for name, size in (("train", 23), ("b", 9))
  }
  splits = {name: [*of.items()] for name, of in made.items()}
  builder = write(tmp_path, "digits", {"n": np.int64}, splits, keys=True)
  monkeypatch.setitem(embedded.SETS, "digits", lambda: made)
  theirs = [int(one["n"]) for one in builder.as_data_source(split=split)]
  assert [one["n"] for one in examples("digits", split)] == theirs


def test_another_python_s_source_is_read_where_it_is_stored(config, monkeypatch):
  row_source.open_source(config("python_source"), "test", seed=0)
  own = catalog.EMBEDDED["python_source"]
  reference = f"python_source/{own.config}"
  other = catalog.Embedded("cpython-9.9.9", own.version, own.features)
  monkeypatch.setitem(catalog.EMBEDDED, "python_source", other)
  assert row_source.open_source(config(reference), "test", seed=0).name.startswith(reference)
  with pytest.raises(ValueError, match=r"this Python makes only python_source/cpython-9\.9\.9"):
    row_source.open_source(config(reference), "test[:50%]", seed=0)


def test_tensorflow_is_never_imported(config):
  row_source.open_source(config("python_source"), "test", seed=0)
  assert "tensorflow" not in sys.modules
