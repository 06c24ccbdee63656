"""Data sets of this room's tests: small ones on disk, and sources in memory."""

import pathlib
import shutil

import ml_collections
import numpy as np
import pytest

from input_pipeline import order, row_source, tfds_documents
from tests.input_pipeline.damage import IMAGES, LENGTH, ROWS
from tests.input_pipeline.writing import write

_DATA = {
  "name": "",
  "kind": "text",
  "data_dir": "",
  "train_split": "train",
  "evaluation_split": "test",
  "sequence_length": 16,
  "text_feature": "",
  "image_feature": "",
  "label_feature": "",
  "examples": 1,
  "input_size": 1,
  "target_size": 1,
  "max_bad_records": 0,
  "tokenizer": "bytes",
  "packing": "concatenate",
}


@pytest.fixture(autouse=True)
def _two_ways_to_shuffle(monkeypatch):
  """Has both ways at sizes that are quick; the second is for more than a million rows."""
  monkeypatch.setattr(order, "_WHOLE_EPOCH_ROWS", 2**10)


DOCUMENTS = [
  b"alpha beta\n",
  b"",
  b"gamma \xff\xfe delta epsilon zeta eta theta iota\n",
  b"k",
  b"l" * 40,
]
IMAGE_SHAPE = (3, 5, 1)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
  """A folder for all the session's data sets, so that each is prepared once."""
  return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def config(data_dir):
  """Returns a function that makes a config's `data` section in the session's folder."""

  def make(name, kind="text", **changes):
    settings = _DATA | {"name": name, "kind": kind, "data_dir": str(data_dir)} | changes
    return ml_collections.ConfigDict(settings)

  return make


@pytest.fixture(scope="session")
def write_tfds():
  """Returns a function that prepares a TFDS data set on disk without registering its builder."""
  return write


@pytest.fixture(scope="session")
def tiny_text(data_dir, write_tfds):
  """Name of a text data set on disk that no builder class is registered for."""
  import tensorflow_datasets as tfds

  features = {"body": tfds.features.Text(), "number": np.int64}
  examples = [{"body": document, "number": i} for i, document in enumerate(DOCUMENTS)]
  write_tfds(data_dir, "tiny_text", features, {"train": examples})
  return "tiny_text"


@pytest.fixture(scope="session")
def tiny_images(data_dir, write_tfds):
  """Name of an image data set on disk, with a config; the label of image i is i % 4."""
  import tensorflow_datasets as tfds

  features = {
    "image": tfds.features.Tensor(shape=IMAGE_SHAPE, dtype=np.uint8),
    "label": tfds.features.ClassLabel(num_classes=4),
    "year": np.int64,
  }
  pixels = np.random.default_rng(0).integers(0, 256, (11, *IMAGE_SHAPE), np.uint8)
  examples = [{"image": pixels[i], "label": i % 4, "year": 1990 + i} for i in range(11)]
  write_tfds(data_dir, "tiny_images", features, {"train": examples}, config="small")
  return "tiny_images"


@pytest.fixture(scope="session")
def numbered():
  """Returns a function that makes a source of `rows` rows, each of which tells its number."""

  def make(rows, length=6):
    numbers = np.arange(rows, dtype=np.int32)
    tokens = numbers[:, None] * 100 + np.arange(length, dtype=np.int32)
    weights = np.ones((rows, length), np.float32)
    return row_source.array_source(
      f"numbered {rows}", {"tokens": tokens, "labels": numbers, "weights": weights}
    )

  return make


@pytest.fixture(scope="session")
def noise_and_snow(tmp_path_factory, write_tfds, config):
  """A folder with two data sets of noise: text of 67 documents, each a row, and 41 images."""
  import tensorflow_datasets as tfds

  folder = tmp_path_factory.mktemp("whole")
  noise = np.random.default_rng(0)
  documents = [noise.integers(1, 256, LENGTH - 1, np.uint8).tobytes() for _ in range(ROWS)]
  text = {"train": [{"body": document} for document in documents]}
  text["test"] = [{"body": noise.integers(1, 256, 300, np.uint8).tobytes()}]
  write_tfds(folder, "noise", {"body": tfds.features.Text()}, text)
  features = {
    "image": tfds.features.Tensor(shape=(13, 1), dtype=np.uint8),
    "label": tfds.features.ClassLabel(num_classes=10),
  }
  pixels = noise.integers(0, 128, (IMAGES, 13, 1), np.uint8)  # below 128: as they stand in a record
  examples = [{"image": pixels[i], "label": i % 10} for i in range(IMAGES)]
  write_tfds(folder, "snow", features, {"train": examples})
  for name, kind in (("noise", "text"), ("snow", "image")):
    tfds_documents.prepare(config(name, kind, data_dir=str(folder)), "train")
  return folder


@pytest.fixture
def folder(noise_and_snow, tmp_path):
  """A copy of that folder, to be damaged."""
  return pathlib.Path(shutil.copytree(noise_and_snow, tmp_path / "data"))


@pytest.fixture
def text(config, folder):
  """Returns a function from a limit to the config's section of the text."""
  keys = {"data_dir": str(folder), "packing": "none"}
  return lambda limit: config("noise", max_bad_records=limit, **keys)


@pytest.fixture
def images(config, folder):
  """Returns a function from a limit to the config's section of the images."""
  sizes = {"input_size": 13, "target_size": 10}
  return lambda limit: config("snow", "image", data_dir=str(folder), max_bad_records=limit, **sizes)
