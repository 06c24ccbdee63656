"""What a user can get wrong about data, and what they are told."""

import os
import shutil

import numpy as np
import pytest

from input_pipeline import batches, catalog, row_source
from input_pipeline import tfds as datasets


def _refusal(data, split="train"):
  with pytest.raises(ValueError) as error:  # noqa: PT011 (the caller reads the message)
    row_source.open_source(data, split, seed=0)
  return str(error.value)


def test_unknown_data_set(config, tiny_text):
  assert "unknown data set digit; did you mean 'digits'? Here" in _refusal(config("digit"))
  message = _refusal(config("tiny_tex"))
  assert "did you mean 'tiny_text'?" in message
  assert "python_source" in message
  assert "not the name of a data set" in _refusal(config("a b"))


def test_another_pythons_source(config):
  message = _refusal(config("python_source/cpython-2.7.18"))
  assert "this Python makes only python_source/cpython-3." in message


def test_unknown_split(config, tiny_text):
  message = _refusal(config(tiny_text), "tset")
  assert "tiny_text:1.2.0 has no split 'tset'" in message
  assert "train (5 examples)" in message
  message = _refusal(config("digits", "image", input_size=64, target_size=10), "validation")
  assert "no split 'validation'; it has" in message
  assert "test (300 examples)" in message


def test_empty_split(config, tiny_text, data_dir, write_tfds):
  import tensorflow_datasets as tfds

  write_tfds(data_dir, "nothing", {"body": tfds.features.Text()}, {"train": [{"body": b""}]})
  assert "nothing:1.2.0 train is empty: 1 documents with nothing" in _refusal(config("nothing"))
  assert "split 'train[:0]' of data set tiny_text:1.2.0 is empty" in _refusal(
    config(tiny_text), "train[:0]"
  )


def test_features(config, tiny_text, tiny_images, data_dir, write_tfds):
  import tensorflow_datasets as tfds

  message = _refusal(config(tiny_text, text_feature="txt"))
  assert "tiny_text:1.2.0 has no feature 'txt' (data.text_feature); it has " in message
  assert "body (Text)" in message
  assert "feature 'number' cannot be the text" in _refusal(config(tiny_text, text_feature="number"))
  assert "no feature fits as the text; it has image" in _refusal(config(tiny_images))
  assert "no feature fits as the image" in _refusal(config(tiny_text, "image"))
  two = {"question": tfds.features.Text(), "answer": tfds.features.Text()}
  write_tfds(data_dir, "two", two, {"train": [{"question": b"a", "answer": b"b"}]})
  message = _refusal(config("two"))
  assert "2 features fit as the text; it has " in message
  assert "Set data.text_feature" in message
  rows = row_source.open_source(config("two", text_feature="answer"), "train", seed=0)
  np.testing.assert_array_equal(rows.read(np.array([0]))["tokens"][0, :1], [ord("b")])
  # The embedded sets are asked too when their store is there already.
  row_source.open_source(config("python_source"), "test", seed=0)
  assert "has no feature 'body'" in _refusal(config("python_source", text_feature="body"), "test")


def test_images_that_do_not_fit(config, tiny_images, data_dir, write_tfds):
  import tensorflow_datasets as tfds

  def images(name, examples, **image):
    features = {
      "image": tfds.features.Tensor(**image),
      "label": tfds.features.Tensor(shape=(), dtype=np.int64),
    }
    write_tfds(data_dir, name, features, {"train": examples})
    return _refusal(config(name, "image", input_size=4, target_size=4))

  message = _refusal(config(tiny_images, "image", input_size=784, target_size=4))
  assert "an image has 15 values (3, 5, 1), but model.input_size=784" in message
  message = _refusal(config(tiny_images, "image", input_size=15, target_size=3))
  assert "labels run from 0 to 3, but model.output_size=3" in message
  white = np.full((2, 2), 255, np.uint8)
  message = images("unlabelled", [{"image": white, "label": -1}], shape=(2, 2), dtype=np.uint8)
  assert "labels run from -1 to -1" in message
  message = images(
    "floats", [{"image": np.ones((2, 2), np.float32), "label": 0}], shape=(2, 2), dtype=np.float32
  )
  assert "the pixels are float32, and only uint8" in message
  ragged = [{"image": white, "label": 0}, {"image": white[:1], "label": 0}]
  message = images("ragged", ragged, shape=(None, 2), dtype=np.uint8)
  assert "all images must have one shape" in message


def test_tokens_beyond_the_vocabulary(config, tiny_text):
  # The documents hold \xff, and no other byte above "z".
  source = row_source.open_source(config(tiny_text), "train", seed=0)
  rows = source.read(np.arange(len(source)))
  held = np.concatenate([rows["tokens"], rows["targets"]], axis=1)
  [row] = {*np.flatnonzero((held == 255).any(axis=1))}
  for size in (256, 300):
    row_source.check_ids(source, size)
  for size, first, token in ((255, row, 255), (ord("a"), 0, held[0].max())):
    with pytest.raises(ValueError, match=r"tiny_text:1\.2\.0 train: row") as error:
      row_source.check_ids(source, size)
    assert (
      f"row {first} holds token {token}, but model.vocabulary_size={size} allows 0 to {size - 1}; "
      f"set model.vocabulary_size=256" in str(error.value)
    )


def test_kinds(config):
  message = _refusal(config("digits", "audio"))
  assert "(Task.rows='audio'), which only a registered data source gives" in message
  for name, kind in (("random_normal", "text"), ("digits", "random")):
    message = _refusal(config(name, kind))
    assert f"data.name={name!r}: this recipe's task reads {kind} rows, and the only" in message
  assert "data.examples=0" in _refusal(config("random_normal", "random", examples=0))
  assert "data.sequence_length=0" in _refusal(config("python_source", sequence_length=0))


def test_a_choice_of_configs_and_versions(config, data_dir, write_tfds):
  import tensorflow_datasets as tfds

  for name, version, text in (("a", "1.9.0", b"x"), ("a", "1.10.0", b"y"), ("b", "1.0.0", b"z")):
    features, splits = {"body": tfds.features.Text()}, {"train": [{"body": text}]}
    write_tfds(data_dir, "several", features, splits, config=name, version=version)
  assert "with the configs a, b; name one of them" in _refusal(config("several"))
  for name, letter in (("several/a", "y"), ("several/a:1.9.0", "x"), ("several/b", "z")):
    source = row_source.open_source(config(name), "train", seed=0)
    assert chr(source.read(np.array([0]))["tokens"][0, 0]) == letter


def test_a_data_set_that_changed_under_its_version(config, tmp_path, write_tfds):
  import shutil

  import tensorflow_datasets as tfds

  data = config("moving", data_dir=str(tmp_path))
  features = {"body": tfds.features.Text()}
  write_tfds(tmp_path, "moving", features, {"train": [{"body": b"one"}]})
  row_source.open_source(data, "train", seed=0)
  shutil.rmtree(tmp_path / "moving")
  write_tfds(tmp_path, "moving", features, {"train": [{"body": b"one"}, {"body": b"two"}]})
  assert "has 2 examples, but its tokens were made from 1" in _refusal(data)


def test_a_file_format_without_random_access(config, data_dir, tiny_text):
  builder = datasets.load_builder(catalog.Reference(tiny_text, "", ""), data_dir)
  folder = data_dir / "sequential" / "1.0.0"
  folder.mkdir(parents=True)
  for name in ("dataset_info.json", "features.json"):
    text = (data_dir / tiny_text / "1.2.0" / name).read_text()
    text = text.replace("array_record", "tfrecord").replace("tiny_text", "sequential")
    (folder / name).write_text(text.replace("1.2.0", "1.0.0"))
  assert builder.info.file_format.value == "array_record"
  message = _refusal(config("sequential"))
  assert "as tfrecord, which has no random access" in message
  assert "--file_format=array_record" in message


class Source:
  """A data set all of whose records fail to be read with this error."""

  def __init__(self, error: Exception):
    self._error = error

  def __getitem__(self, number: int):
    raise self._error

  def __getitems__(self, numbers: list[int]):
    raise self._error


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError()])
def test_an_error_of_the_system_does_not_make_a_record_bad(error):
  with pytest.raises(type(error)):
    datasets._read(Source(error), [0, 1])


@pytest.mark.parametrize("error", [OSError("image file is truncated"), RuntimeError("checksum")])
def test_what_a_decoder_raises_is(error):
  bad = (None, f"{type(error).__name__}: {error}")
  assert datasets._read(Source(error), [0, 1]) == [bad, bad]


def test_a_registered_data_set_that_cannot_be_downloaded(config, tmp_path, monkeypatch):
  import tensorflow_datasets as tfds

  def no_network(self, **_):
    raise ConnectionError("Network is unreachable\nmore")

  monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", no_network)
  message = _refusal(config("mnist", "image", data_dir=str(tmp_path)))
  assert "data set mnist is not prepared in" in message
  assert "ConnectionError: Network is unreachable. Run it where there is a network" in message


def test_batches_refuse(numbered):
  with pytest.raises(ValueError, match=r"numbered 0 is empty \(0 rows\)"):
    batches.TrainingBatches(numbered(0), global_batch_size=1, seed=0)
  with pytest.raises(ValueError, match="numbered 0 is empty"):
    batches.EvaluationBatches(numbered(0), global_batch_size=1)
  message = "numbered 5 has 5 rows, but a batch takes data.global_batch_size=6; set it between 1"
  with pytest.raises(ValueError, match=message):
    batches.TrainingBatches(numbered(5), global_batch_size=6, seed=0)
  with pytest.raises(ValueError, match="a batch of 0 rows"):
    batches.EvaluationBatches(numbered(5), global_batch_size=0)


def a_directory(path):
  """Puts a directory in place of a file."""
  path.unlink()
  path.mkdir()


def a_fifo(path):
  """Puts a FIFO in place of a file."""
  path.unlink()
  os.mkfifo(path)


@pytest.mark.parametrize(
  "damage",
  [
    a_directory,
    a_fifo,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(bytes(99)),
    lambda path: path.write_text("[]"),
    lambda path: path.write_text("[" * 100_000),
    lambda path: path.write_text(path.read_text()[:-40]),
    lambda path: path.write_text('{"of": ["another", "form"]}'),
  ],
)
def test_damaged_metadata_of_a_data_set(damage, config, tmp_path, tiny_text, data_dir):
  name = "features.json" if damage is a_fifo else "dataset_info.json"
  shutil.copytree(data_dir / tiny_text, tmp_path / tiny_text)
  damage(tmp_path / tiny_text / "1.2.0" / name)
  message = _refusal(config(tiny_text, data_dir=str(tmp_path)))
  assert len(message.splitlines()) == 1
  assert len(message) < 600
  assert f"metadata of the data set in {tmp_path / tiny_text / '1.2.0'} cannot be read" in message
