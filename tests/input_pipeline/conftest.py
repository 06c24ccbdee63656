"""Data sets of this room's tests: small ones on disk, and sources in memory."""

import ml_collections
import numpy as np
import pytest

from input_pipeline import sources

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
}

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
  import tensorflow_datasets as tfds

  def write(folder, data_set, features, splits, *, config="", version="1.2.0"):
    class Written(tfds.core.GeneratorBasedBuilder, skip_registration=True):
      name = data_set
      VERSION = tfds.core.Version(version)
      BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []
      url_infos = None

      def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

      def _split_generators(self, dl_manager):
        return {split: self._generate_examples(examples) for split, examples in splits.items()}

      def _generate_examples(self, examples):
        yield from enumerate(examples)

    builder = Written(data_dir=folder, file_format="array_record")
    builder.download_and_prepare()
    return builder

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
    return sources.array_source(
      f"numbered {rows}", {"tokens": tokens, "labels": numbers, "weights": weights}
    )

  return make
