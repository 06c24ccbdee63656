"""The data sets that every machine has."""

import ast
import collections
import pathlib
import sys
import tempfile

import numpy as np
from etils import epath

from input_pipeline import row_source, tfds
from input_pipeline.catalog import EMBEDDED, Reference


def _examples(data_dir, name, split):
  builder = tfds.load_builder(Reference(name, "", ""), data_dir)
  return [item.value for item in tfds.examples(builder, split)]


def test_python_source_is_the_library_without_its_tests(data_dir):
  documents = {}
  for split in ("train", "test"):
    documents |= {
      e["path"].decode(): e["text"] for e in _examples(data_dir, "python_source", split)
    }
  assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= documents.keys()
  parts = {part for path in documents for part in path.split("/")}
  assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
  assert documents["ast.py"] == pathlib.Path(ast.__file__).read_bytes()


def test_python_source_holds_out_about_a_twentieth(data_dir):
  counts = {s: len(_examples(data_dir, "python_source", s)) for s in ("train", "test")}
  assert 0.03 < counts["test"] / sum(counts.values()) < 0.07


def test_digits_are_scaled_and_split(data_dir, config):
  train, test = (_examples(data_dir, "digits", split) for split in ("train", "test"))
  assert (len(train), len(test)) == (1497, 300)
  pixels = np.stack([e["image"] for e in train])
  assert pixels.shape[1:] == (8, 8, 1)
  assert pixels.dtype == np.uint8
  assert (pixels.min(), pixels.max()) == (0, 255)
  held_out = collections.Counter(int(e["label"]) for e in test)
  assert len(held_out) == 10
  assert min(held_out.values()) > 15


def test_catalog_agrees_with_the_builders(data_dir):
  for name, entry in EMBEDDED.items():
    builder = tfds.load_builder(Reference(name, "", ""), data_dir)
    assert tfds.full_reference(builder) == Reference(name, entry.config, entry.version)
    assert set(builder.info.splits) == set(entry.splits)
    for role, feature in entry.features.items():
      assert tfds.choose_feature(builder, role, "") == feature


def test_tensorflow_is_never_imported(config):
  row_source.open_source(config("python_source"), "test", seed=0)
  assert "tensorflow" not in sys.modules


def test_preparing_leaves_no_temporary_folder(tmp_path, monkeypatch):
  temporary = tmp_path / "temporary"
  temporary.mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(temporary))
  builder = tfds.load_builder(Reference("digits", "", ""), epath.Path(tmp_path / "data"))
  assert builder.info.splits["test"].num_examples == 300
  assert list(temporary.iterdir()) == []
